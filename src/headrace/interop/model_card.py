"""The card of a shared policy: README.md, with the header in YAML that Hugging Face reads.

Left out: the other files of a shared policy (`shared_policy.py`), and what it reaches (`share.py`).
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np

from headrace.config.algorithms import ALGORITHMS
from headrace.config.run_config import RunConfig
from headrace.config.settings import FREE
from headrace.errors import flags_of
from headrace.evaluation.evaluate import Evaluation
from headrace.learner.frozen import random_names
from headrace.models.policy import Network
from headrace.spec import EnvSpec
from headrace.training.job import code_flags, eval_flags

HERE = "THIS_DIRECTORY"
"""How a card names the directory that it lies in, whose name on other machines nobody knows."""
_SHAPES = (
    "hidden_sizes", "activation", "shared_trunk", "core", "core_size", "image_net",
    "normalize_obs", "normalize_reward", "layer_norm", "dueling", "noisy", "distribution",
    "num_atoms", "v_min", "v_max",
)  # fmt: skip
"""Settings that decide which weights a network has."""
_OF_ENV = {
    "env_kwargs": {}, "drop_obs_keys": [], "action_mask": "auto", "critic": "own",
    "agent_ids": False,
}  # fmt: skip
"""Settings without which a new run would have another environment, and their defaults."""
_PULLED = "my_policy"
"""The directory into which the card's commands pull the policy."""


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
        described: what the manifest says of each policy, by name.
        imported: from where the run was imported, and after how many env steps; {}: it was not.
    """

    config: Mapping[str, Any]
    played: Evaluation
    seed: int
    place: str
    env_steps: int
    has_film: bool
    described: Mapping[str, Any]
    imported: Mapping[str, Any] = field(default_factory=dict)


def model_card(facts: Facts) -> str:
    """Return the text of the card."""
    settings = facts.config["settings"]
    env, algo = settings["env"], settings["algo"]
    returns = np.array(facts.played.returns)
    reached = f"{returns.mean():.2f} ± {returns.std():.2f}"
    film = "\nOne episode: [film.mp4](film.mp4)\n" if facts.has_film else ""
    ending = f"--episodes {len(returns)} --seed {facts.seed}"
    again = " ".join(filter(None, ["headrace eval", _PULLED, eval_flags(facts.config), ending]))
    return f"""{_header(env, algo, reached)}
# {algo} for {env}

{_origin(facts)}
{film}
## Returns

| episodes | mean ± deviation | least | greatest | mean length | seed |
|---|---|---|---|---|---|
| {len(returns)} | {reached} | {returns.min():.2f} | {returns.max():.2f} | \
{np.mean(facts.played.lengths):.1f} | {facts.seed} |
{_by_policy(facts)}
The likeliest actions were taken. `{again}` plays the same episodes.

## Use
{_note(facts.config)}
Headrace is on no package index. In a copy of its source, `pip install -c constraints.txt -e \
'.[export]'` installs it; its README.md names the extras that environments need. \
Then{_place(facts)}:

```
headrace pull {facts.place} --run-dir {_PULLED}
{again}
{_exports(facts)}
{_train(facts)}
```

The last command begins a new run with these weights. In Python:

```python
import headrace

{_python(facts)}
```

| policy | observation (`obs`) | action |
|---|---|---|
{_spaces(facts)}

## Settings

Those that are not Headrace's defaults; `config.json` has all.

| setting | value | from |
|---|---|---|
{_table(facts.config)}

Versions: {", ".join(f"{name} {of}" for name, of in facts.config["versions"].items())}
"""


def _origin(facts: Facts) -> str:
    """Return who trained the policies, and for how long."""
    by = f"Headrace {facts.config['headrace']}"
    if not facts.imported:
        goal = facts.config["settings"]["total_env_steps"]
        planned = f" of {goal:,} that were planned" if goal > facts.env_steps else ""
        return f"Trained with {by} for {facts.env_steps:,} env steps{planned}."
    before = facts.imported.get("env_steps", facts.env_steps)  # old files lack it
    own = facts.env_steps - before
    then = f"then trained on with {by} for {own:,}" if own > 0 else f"by {by}"
    return f"Imported from {facts.imported['from']} after {before:,} env steps, {then}."


def _by_policy(facts: Facts) -> str:
    """Return the returns of each of several policies."""
    if len(facts.described) < 2:
        return ""
    frozen = facts.config["settings"]["frozen"]
    rows = ["", "| policy | mean return of its agents ± deviation |", "|---|---|"]
    for name, returns in facts.played.by_policy.items():
        how = {None: "", "": ", frozen"}.get(frozen.get(name), ", acts at random")
        rows.append(f"| `{name}`{how} | {np.mean(returns):.2f} ± {np.std(returns):.2f} |")
    return "\n".join([*rows, ""])


def _place(facts: Facts) -> str:
    return f", where {HERE} is the directory with this card" if facts.place == HERE else ""


def _note(config: Mapping[str, Any]) -> str:
    """Return what to name again of the run's own code."""
    code = {name: f"{name} {shlex.join(of)}" for name, of in code_flags(config).items()}
    if not code:
        return ""
    flags = ", ".join(f"`{each}`" for each in code.values())
    return (
        f"\nThe run has code of its own, which is not shared here. The commands name it: {flags}.\n"
    )


def _exports(facts: Facts) -> str:
    """Return the commands that export each policy."""
    head = " ".join(filter(None, ["headrace export", _PULLED, eval_flags(facts.config)]))
    if len(facts.described) == 1:
        return head
    return "\n".join(f"{head} --policy {name}" for name in _likely(facts))


def _likely(facts: Facts) -> dict[str, Any]:
    """Return what is said of the policies that do not act at random."""
    random = random_names(facts.config["settings"]["frozen"])
    return {name: of for name, of in facts.described.items() if name not in random}


def _train(facts: Facts) -> str:
    """Return the command that begins a run with these weights."""
    settings, code = facts.config["settings"], code_flags(facts.config)
    env = code.get("--env", [settings["env"]])[0]
    named = {
        name: settings[name]
        for name, default in _OF_ENV.items()
        if settings.get(name, default) != default
    }
    agents = {
        name: of["agents"] if isinstance(of, Mapping) else of
        for name, of in settings["policies"].items()
        if isinstance(of, str) or "agents" in of
    }
    frozen = {name: of or _PULLED for name, of in settings["frozen"].items()}
    named |= {name: of for name, of in (("policies", agents), ("frozen", frozen)) if of}
    head = f"headrace train {env} --algo {settings['algo']} --init-from {_PULLED}"
    own = [f"{name} {shlex.join(code[name])}" for name in ("--wrapper", "--model") if name in code]
    return " ".join(filter(None, [head, _shapes(settings), flags_of(named), *own]))


def _shapes(settings: Mapping[str, Any]) -> str:
    """Return the flags without which a new run would have another network."""
    named = {name: settings[name] for name in _SHAPES if name in settings}
    if settings.get("core") == "none":
        del named["core_size"]
    return flags_of(named)


def _python(facts: Facts) -> str:
    """Return Python code that loads each policy, and acts."""
    code = code_flags(facts.config)
    own = [f'{name}="{code[f"--{name}"][0]}"' for name in ("model", "algo") if f"--{name}" in code]
    several = len(facts.described) > 1
    lines = []
    for name, described in _likely(facts).items():
        spec = EnvSpec.from_json(described["spec"])
        variable = name.replace("-", "_") if several else "policy"
        which = [f'policy="{name}"'] if several else []
        given = ", ".join([f'"{_PULLED}"', *which, *own])
        lines.append(f"{variable} = headrace.load_policy({given})")
        arguments = ["obs"]
        arguments += ['action_mask=info["action_mask"]'] if spec.mask_in_info else []
        arguments += ["agent=0"] if spec.id_key else []
        if described["network"].get("core", "none") != "none":
            lines.append(f"{variable}.reset()  # when an episode begins")
        lines.append(f"action = {variable}({', '.join(arguments)})")
    return "\n".join(lines)


def _spaces(facts: Facts) -> str:
    """Return what each policy takes and gives."""
    rows = []
    for name, described in facts.described.items():
        spec = EnvSpec.from_json(described["spec"])
        mask = ""
        if spec.mask_in_info:
            of = dict(spec.observation.parts)[spec.mask_key]
            mask = f"; `action_mask`: {of.describe()}, 1 where an action is allowed"
        if spec.id_key:
            mask += "; `agent`: its index among all agents of the game"
        rows.append(f"| `{name}` | {spec.given.describe()}{mask} | {spec.action.describe()} |")
    return "\n".join(rows)


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


def _defaults(algo: str) -> dict[str, Any]:
    """Return the defaults of all settings as JSON has them; without those of an own algorithm."""
    own = [ALGORITHMS[algo].Config()] if algo in ALGORITHMS else []
    configs: list[Any] = [RunConfig(), Network(), *own]
    flat = {f.name: getattr(config, f.name) for config in configs for f in fields(config)}
    return dict(json.loads(json.dumps(flat)))


def _table(config: Mapping[str, Any]) -> str:
    defaults = _defaults(config["settings"]["algo"])
    rows = []
    for name, value in sorted(config["settings"].items()):
        source = str(config["origin"].get(name, ""))
        if source.startswith(FREE) and not source.startswith("preset"):
            continue
        # The head of the card says the env steps that were made.
        if name == "total_env_steps" or (name in defaults and defaults[name] == value):
            continue
        rows.append(f"| `{name}` | `{json.dumps(value, ensure_ascii=False)}` | {source} |")
    return "\n".join(rows)
