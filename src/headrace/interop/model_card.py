"""The card of a shared policy: README.md, with the header in YAML that Hugging Face reads.

Left out: the other files of a shared policy (`shared_policy.py`), and what it reaches (`share.py`).
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from headrace.config.settings import FREE
from headrace.errors import flags_of
from headrace.evaluation.evaluate import Evaluation
from headrace.training.job import code_flags

_SHAPES = (
    "hidden_sizes", "activation", "shared_trunk", "core", "core_size", "image_net",
    "normalize_obs", "normalize_reward", "layer_norm", "dueling", "noisy", "distribution",
    "num_atoms", "v_min", "v_max",
)  # fmt: skip
"""Settings that decide which weights a network has."""
_OF_ENV = ("env_kwargs", "drop_obs_keys")
"""Settings without which a new run would have another environment."""


@dataclass(frozen=True)
class Facts:
    """What a card says.

    Attributes:
        config: the content of the run's config.json.
        played: the evaluation of the policies that are shared.
        seed: root of the seeds of its environments.
        place: how `headrace pull` names it.
        env_steps: that the policies were trained for.
        has_film: whether there is a film beside the card.
    """

    config: Mapping[str, Any]
    played: Evaluation
    seed: int
    place: str
    env_steps: int
    has_film: bool


def model_card(facts: Facts) -> str:
    """Return the text of the card."""
    settings = facts.config["settings"]
    env, algo = settings["env"], settings["algo"]
    returns = np.array(facts.played.returns)
    reached = f"{returns.mean():.2f} ± {returns.std():.2f}"
    code = {name: f"{name} {shlex.join(of)}" for name, of in code_flags(facts.config).items()}
    note = ""
    if code:
        flags = ", ".join(f"`{each}`" for each in code.values())
        note = (
            f"\nThe run has code of its own, which is not shared here. Name it again to `headrace "
            f"eval` and `headrace export`: {flags}.\n"
        )
    film = "\nOne episode: [film.mp4](film.mp4)\n" if facts.has_film else ""
    again = f"headrace eval my_policy --episodes {len(returns)} --seed {facts.seed}"
    return f"""{_header(env, algo, reached)}
# {algo} for {env}

A policy that was trained with [Headrace](https://pypi.org/project/headrace/) \
{facts.config["headrace"]} for {facts.env_steps:,} env steps.
{film}
## Returns

| episodes | mean ± deviation | least | greatest | mean length | seed |
|---|---|---|---|---|---|
| {len(returns)} | {reached} | {returns.min():.2f} | {returns.max():.2f} | \
{np.mean(facts.played.lengths):.1f} | {facts.seed} |

The likeliest actions were taken. `{again}` plays the same episodes.

## Use
{note}
```
pip install headrace
headrace pull {facts.place} --run-dir my_policy
{again}
headrace export my_policy
headrace train {env} --algo {algo} --init-from my_policy {_shapes(settings)}{_made(settings, code)}
```

The last command begins a new run with these weights. In Python:

```python
import headrace

policy = headrace.load_policy("my_policy")
action = policy(obs)
```

## Settings

Those that are not Headrace's defaults; `config.json` has all.

| setting | value | from |
|---|---|---|
{_table(facts.config)}

Versions: {", ".join(f"{name} {of}" for name, of in facts.config["versions"].items())}
"""


def _header(env: str, algo: str, reached: str) -> str:
    """Return the header. Each text in it is JSON, which is YAML as well."""
    text = partial(json.dumps, ensure_ascii=False)
    return f"""---
library_name: headrace
pipeline_tag: reinforcement-learning
tags:
- headrace
- reinforcement-learning
- deep-reinforcement-learning
- {text(env)}
- {text(algo)}
model-index:
- name: {text(algo)}
  results:
  - task:
      type: reinforcement-learning
      name: reinforcement-learning
    dataset:
      name: {text(env)}
      type: {text(env)}
    metrics:
    - type: mean_reward
      value: {text(reached)}
      name: mean_reward
      verified: false
---
"""


def _shapes(settings: Mapping[str, Any]) -> str:
    """Return the flags without which a new run would have another network."""
    named = {name: settings[name] for name in _SHAPES if name in settings}
    if settings.get("core") == "none":
        del named["core_size"]
    return flags_of(named)


def _made(settings: Mapping[str, Any], code: Mapping[str, str]) -> str:
    """Return the flags, each after a space, by which a new run makes the same environment."""
    named = {name: settings[name] for name in _OF_ENV if settings.get(name)}
    flags = [flags_of(named)] if named else []
    flags += [code[name] for name in ("--wrapper", "--model") if name in code]
    return "".join(f" {each}" for each in flags)


def _table(config: Mapping[str, Any]) -> str:
    rows = []
    for name, value in sorted(config["settings"].items()):
        source = str(config["origin"].get(name, ""))
        if source.startswith(FREE) and not source.startswith("preset"):
            continue
        rows.append(f"| `{name}` | `{json.dumps(value, ensure_ascii=False)}` | {source} |")
    return "\n".join(rows)
