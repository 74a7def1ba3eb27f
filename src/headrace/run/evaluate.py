"""A trained policy on its own: load it, call it, measure it, film it.

Left out: training. Nothing here needs the environment, but `evaluate`.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace import batch
from headrace.batch import Fragment, Obs
from headrace.collect.api import ShouldStop
from headrace.collect.rollout import Pinned, at_once, rollout
from headrace.envs.api import GUARDS, Episode, VectorEnv
from headrace.envs.device import device_vector
from headrace.envs.film import filmed
from headrace.envs.gym import GymVector
from headrace.envs.make import EnvMaker, make_all
from headrace.envs.vector import make_vector
from headrace.errors import ConfigError, EnvError
from headrace.meter import Meter
from headrace.models.own import ModelFactory
from headrace.models.policy import Act, Network, Policy, PolicyActor
from headrace.run import checkpoint
from headrace.run.code import code
from headrace.run.config import cpu_cores
from headrace.run.shares import DEFAULT
from headrace.seeding import action_noise
from headrace.spec import ActionCodec, Agents, Array, EnvSpec

_NUM_STEPS = 64
_MOST_ENVS = 32
_SAY_EVERY_S = 5.0
_ENDLESS = 200_000  # steps of all envs without a single end


@dataclass(frozen=True)
class Evaluation:
    """Returns of whole episodes.

    Attributes:
        returns: undiscounted, one per episode.
        lengths: env steps, one per episode.
        by_policy: where several policies played, the returns of each: means over its agents
            (`returns` are then means over all agents).
    """

    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    by_policy: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data for `headrace eval --json`."""
        means = {name: float(np.mean(returns)) for name, returns in self.by_policy.items()}
        return {
            "mean_return": float(np.mean(self.returns)),
            **({"mean_return_by_policy": means} if means else {}),
            "std_return": float(np.std(self.returns)),
            "episodes": len(self.returns),
            "mean_length": float(np.mean(self.lengths)),
        }


class TrainedPolicy:
    """A policy to act with: `policy(obs) -> action`, normalizers included, on the CPU.

    With a recurrent core it remembers, from call to call: call `reset` when an episode begins. It
    serves one environment, or a batch of always as many, then; each user loads one of its own.

    Attributes:
        spec: what it was trained on.
        module: the network.
        network: its shape.
    """

    def __init__(self, spec: EnvSpec, module: Policy, network: Network) -> None:
        self.spec, self.module, self.network = spec, module, network
        self._codec = ActionCodec(spec.action)
        self._memory: Tensor | None = None  # [n, S], once called

    def reset(self, begun: Any = None) -> None:
        """New episodes begin with the next call; nothing to do without a recurrent core.

        Args:
            begun: `[n]` bool: in which environments of a batch; default: in all, and from here on
                there may be another number of them.

        Raises:
            ValueError: `begun` is not of the batch's length.
        """
        if begun is None or self._memory is None:
            self._memory = None
            return
        ended = torch.from_numpy(np.asarray(begun, dtype=bool))
        if ended.shape != self._memory.shape[:1]:
            raise ValueError(
                f"reset got {tuple(ended.shape)} flags; the batch has {len(self._memory)} rows."
            )
        self._memory[ended] = 0.0

    @torch.no_grad()
    def __call__(self, obs: Any, action_mask: Any = None) -> Any:
        """The likeliest action, as the environment expects it.

        Args:
            obs: one observation, or a batch of them with one more leading dimension (of a Dict
                space: a dict of arrays; keys that the policy does not see may be there).
            action_mask: which actions are allowed, for a policy whose mask came from `info`.

        Returns:
            One action or a batch of them: integers, or arrays of the action space's shape.

        Raises:
            ValueError: the shape is neither one observation's nor a batch's, or a key is missing;
                or the batch is not of the length that is remembered.
        """
        parts = dict(obs) if self.spec.observation.kind == "dict" and _is_dict(obs) else {"": obs}
        if self.spec.mask_in_info:
            if action_mask is None:
                raise ValueError(
                    "This policy was trained with action masks from info: call it as "
                    'policy(obs, action_mask=info["action_mask"]).'
                )
            parts[self.spec.mask_key] = action_mask
        rows, single = {}, False
        for key, space in self.spec.observation.leaves:
            if key not in parts:
                raise ValueError(f"The observation has no {key!r}; it has {sorted(parts)}.")
            array = np.asarray(parts[key], dtype=space.dtype)
            single = array.shape == space.shape
            if not single and array.shape[1:] != space.shape:
                own_mask = self.spec.mask_in_info and key == self.spec.mask_key
                what = "action_mask" if own_mask else f"an observation{f' {key!r}' if key else ''}"
                raise ValueError(
                    f"Got {what} of shape {array.shape}; "
                    f"expected {space.shape}, or a batch (n, *{space.shape})."
                )
            rows[key] = torch.from_numpy(array[None] if single else array)
        batched = rows if self.spec.observation.kind == "dict" else rows[""]
        out = self.module.act_greedily(batched, *self._remembered(len(rows[key])))
        self._memory = out.get("state")
        action = self._codec.to_env(out["action"].numpy())
        if not single:
            return action
        return int(action[0]) if self.spec.action.kind == "discrete" else action[0]

    def _remembered(self, n: int) -> list[Tensor]:
        if not self.module.state_size:
            return []
        if self._memory is None:
            self._memory = torch.zeros(n, self.module.state_size)
        if len(self._memory) != n:
            raise ValueError(
                f"Got {n} observations; the policy remembers {len(self._memory)} of the call "
                "before.\nCall its reset() first, or load one policy for each batch."
            )
        return [self._memory]


def _is_dict(obs: Any) -> bool:
    return hasattr(obs, "keys")


def load_policy(
    directory: str | Path, model: str | ModelFactory | None = None, policy: str | None = None
) -> TrainedPolicy:
    """Load the newest whole checkpoint's policy from a run directory (or from that checkpoint).

    Needs neither the environment nor a GPU, and unpickles nothing. A policy with a recurrent core
    remembers from call to call, until its `reset`.

    Args:
        directory: of a run, its `best`, or a checkpoint.
        model: what made the network (or its name, `module:callable`), where it was one of your
            own: a file can not name code.
        policy: which, of a run with several.

    Raises:
        CheckpointError: there is no usable checkpoint, or it is of another network, or there are
            several policies, and none of this name.
        ConfigError: it was a network of your own, and `model` is not given (or the other way).
    """
    model = code((), model).model
    saved = checkpoint.newest(Path(directory))
    with checkpoint.as_written(saved.path):
        name = checkpoint.policy_name(saved, policy)
        described = saved.manifest["policies"][name]
        is_own = bool(described["model"])
    if is_own != (model is not None):
        raise ConfigError(
            f"{directory} was trained with "
            + (
                f"a network of its own ({described['model']}).\nName what makes it: --model "
                "module:callable, or load_policy(directory, model=...)."
                if described["model"]
                else "Headrace's network: it takes no model."
            )
        )
    with checkpoint.as_written(saved.path):
        spec = EnvSpec.from_json(described["spec"])
        sizes = tuple(described["network"]["hidden_sizes"])
        network = Network(**described["network"] | {"hidden_sizes": sizes})
        if model is None:  # without memory, before any of it is allocated
            with torch.device("meta"):
                checkpoint.check_shapes(Policy(spec, network), saved, name)
    module = Policy(spec, network, model)
    checkpoint.load_into(module, saved, name)
    return TrainedPolicy(spec, module.eval(), network)


def load_policies(
    directory: str | Path, model: str | ModelFactory | None = None
) -> tuple[dict[str, TrainedPolicy], dict[str, Agents]]:
    """All policies of a run, by name, and the agents of each; see `load_policy`."""
    saved = checkpoint.newest(Path(directory))
    with checkpoint.as_written(saved.path):
        shares = {
            name: Agents(first, end - first)
            for name, of in saved.manifest["policies"].items()
            for first, end in (of.get("agents", (0, 1)),)
        }
    return {name: load_policy(saved.path, model, name) for name in shares}, shares


@torch.no_grad()
def evaluate(
    policy: TrainedPolicy | Mapping[str, TrainedPolicy],
    maker: EnvMaker,
    *,
    shares: Mapping[str, Agents] | None = None,
    episodes: int = 20,
    stochastic: bool = False,
    seed: int = 0,
    video: Path | None = None,
    stop: ShouldStop = lambda: False,
    say: Callable[[str], None] = lambda progress: None,
) -> Evaluation | None:
    """Play whole episodes: each env a fixed number of them, so that short ones count no more.

    Args:
        policy: acts; or several, by name.
        maker: makes the environments.
        shares: the agents of each of several.
        episodes: how many.
        stochastic: sample actions, as in training; default: the likeliest.
        seed: of environments and sampling; evaluation's seeds differ from training's.
        video: write the first episode here (MP4).
        stop: asked between two steps whether to give up.
        say: told every few seconds how far it is.

    Returns:
        The returns; None if told to stop.

    Raises:
        ConfigError, MissingExtraError: fewer than one episode; a video without the `video` extra.
        EnvError: the environment failed, or its episodes do not end.
    """
    quota = _quota(episodes)
    played: list[list[Episode]] = [[] for _ in quota]
    policies = {DEFAULT: policy} if isinstance(policy, TrainedPolicy) else dict(policy)
    spec = next(iter(policies.values())).spec
    parts = list((shares or {DEFAULT: Agents(0, spec.num_agents)}).values())
    modules = [of.module for of in policies.values()]

    actors = [PolicyActor(_act(module, stochastic=stochastic)) for module in modules]
    weights, meter = Pinned(actors, version=0), Meter()
    fragments = [
        _fragment(spec, module, len(quota) * part.size)
        for module, part in zip(modules, parts, strict=True)
    ]
    with contextlib.closing(_vector(spec, maker, len(quota), seed, meter, video, parts)) as vector:
        steps = last_end = ended = 0
        say = _now_and_then(say)
        while ended < episodes:
            noise = [
                torch.from_numpy(action_noise(seed, ids, steps, _NUM_STEPS, module.num_draws))
                for module, part in zip(modules, parts, strict=True)
                for ids in (part.ids(vector.env_id, spec.num_agents),)
            ]
            taken = at_once(rollout(vector, fragments, weights, noise, meter, stop))
            if taken < _NUM_STEPS:
                return None
            steps += _NUM_STEPS
            for fragment in fragments:
                fragment.core_state[0] = fragment.core_state[1]
            for episode in vector.finish():
                played[episode.env_id].append(episode)
                last_end = steps
            ended = sum(min(len(p), q) for p, q in zip(played, quota, strict=True))
            say(f"{ended} of {episodes} episodes, step {steps:,} of each environment")
            if steps - last_end > _ENDLESS:
                raise _endless(maker, len(quota))
    kept = [e for p, q in zip(played, quota, strict=True) for e in p[:q]]
    of_each = zip(*(e.by_policy for e in kept), strict=True)
    return Evaluation(
        tuple(e.total_reward for e in kept),
        tuple(e.num_steps for e in kept),
        dict(zip(policies, of_each, strict=False)),
    )


def _fragment(spec: EnvSpec, module: Policy, num_rows: int) -> Fragment:
    columns = batch.columns(spec, {}, _NUM_STEPS, num_rows, module.state_size)
    fragment = batch.allocate(columns)
    fragment.core_state.zero_()
    return fragment


def _act(module: Policy, *, stochastic: bool) -> Act:
    def greedily(obs: Obs, noise: Tensor, *memory: Tensor) -> dict[str, Tensor]:
        return module.act_greedily(obs, *memory)

    return module.act if stochastic else greedily


def _endless(maker: EnvMaker, num_envs: int) -> EnvError:
    return EnvError(
        f"No episode of {maker.name} ended in {_ENDLESS:,} steps of {num_envs} envs.\n"
        "Give it a time limit: --wrapper module:callable, with gymnasium.wrappers.TimeLimit."
    )


def _now_and_then(say: Callable[[str], None]) -> Callable[[str], None]:
    """`say`, but not before some seconds have passed since the last time (or now)."""
    said_at = time.monotonic()

    def say_if_due(text: str) -> None:
        nonlocal said_at
        if time.monotonic() - said_at > _SAY_EVERY_S:
            said_at = time.monotonic()
            say(text)

    return say_if_due


def _quota(episodes: int) -> list[int]:
    """How many episodes each of the environments plays."""
    if episodes < 1:
        raise ConfigError(f"episodes={episodes}: expected at least 1.")
    num_envs = min(episodes, _MOST_ENVS)
    return [episodes // num_envs + (i < episodes % num_envs) for i in range(num_envs)]


def _vector(
    spec: EnvSpec,
    maker: EnvMaker,
    num_envs: int,
    seed: int,
    meter: Meter,
    video: Path | None,
    parts: Sequence[Agents],
) -> VectorEnv:
    """The environments of an evaluation; the first one filmed if asked for (in Python form)."""
    env_id: Array = np.arange(num_envs)
    if maker.kernel() is not None:
        return device_vector(
            maker, spec, env_id, seed, meter,
            parts=parts, device=torch.device("cpu"), num_threads=1, guards=GUARDS, role="eval",
        )  # fmt: skip
    if video is None:
        return make_vector(
            maker, spec, env_id, seed, meter,
            num_threads=cpu_cores(), role="eval", sampler="evaluation",
        )  # fmt: skip
    maker = replace(maker, native=False)
    envs = [filmed(maker, video), *make_all(maker, num_envs - 1)]
    return GymVector(envs, spec, env_id, seed, meter, role="eval", sampler="evaluation")
