"""A trained policy on its own: load it, call it, measure it, film it.

Left out: training. Nothing here needs the environment, but `evaluate`.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace import batch
from headrace.batch import Obs
from headrace.collect.api import ShouldStop
from headrace.collect.rollout import Pinned, at_once, rollout
from headrace.envs.api import Episode, VectorEnv
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
from headrace.seeding import action_noise
from headrace.spec import ActionCodec, Array, EnvSpec

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
    """

    returns: tuple[float, ...]
    lengths: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data for `headrace eval --json`."""
        return {
            "mean_return": float(np.mean(self.returns)),
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
    """

    def __init__(self, spec: EnvSpec, module: Policy) -> None:
        self.spec, self.module = spec, module
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


def load_policy(directory: str | Path, model: str | ModelFactory | None = None) -> TrainedPolicy:
    """Load the newest whole checkpoint's policy from a run directory (or from that checkpoint).

    Needs neither the environment nor a GPU, and unpickles nothing. A policy with a recurrent core
    remembers from call to call, until its `reset`.

    Args:
        directory: of a run, its `best`, or a checkpoint.
        model: what made the network (or its name, `module:callable`), where it was one of your
            own: a file can not name code.

    Raises:
        CheckpointError: there is no usable checkpoint, or it is of another network.
        ConfigError: it was a network of your own, and `model` is not given (or the other way).
    """
    model = code((), model).model
    saved = checkpoint.newest(Path(directory))
    with checkpoint.as_written(saved.path):
        described = saved.manifest["policies"]["default"]
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
                checkpoint.check_shapes(Policy(spec, network), saved)
    module = Policy(spec, network, model)
    checkpoint.load_into(module, saved)
    return TrainedPolicy(spec, module.eval())


@torch.no_grad()
def evaluate(
    policy: TrainedPolicy,
    maker: EnvMaker,
    *,
    episodes: int = 20,
    stochastic: bool = False,
    seed: int = 0,
    video: Path | None = None,
    stop: ShouldStop = lambda: False,
    say: Callable[[str], None] = lambda progress: None,
) -> Evaluation | None:
    """Play whole episodes: each env a fixed number of them, so that short ones count no more.

    Args:
        policy: acts.
        maker: makes the environments.
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
    num_envs, module = len(quota), policy.module
    played: list[list[Episode]] = [[] for _ in quota]

    weights = Pinned([PolicyActor(_act(module, stochastic=stochastic))], version=0)
    columns = batch.columns(policy.spec, {}, _NUM_STEPS, num_envs, module.state_size)
    meter, fragment = Meter(), batch.allocate(columns)
    fragment.core_state.zero_()
    with contextlib.closing(_vector(policy.spec, maker, num_envs, seed, meter, video)) as vector:
        steps = last_end = ended = 0
        say = _now_and_then(say)
        while ended < episodes:
            drawn = action_noise(seed, vector.env_id, steps, _NUM_STEPS, module.num_draws)
            noise = torch.from_numpy(drawn)
            taken = at_once(rollout(vector, [fragment], weights, [noise], meter, stop))
            if taken < _NUM_STEPS:
                return None
            steps += _NUM_STEPS
            fragment.core_state[0] = fragment.core_state[1]
            for episode in vector.finish():
                played[episode.env_id].append(episode)
                last_end = steps
            ended = sum(min(len(p), q) for p, q in zip(played, quota, strict=True))
            say(f"{ended} of {episodes} episodes, step {steps:,} of each environment")
            if steps - last_end > _ENDLESS:
                raise _endless(maker, num_envs)
    kept = [e for p, q in zip(played, quota, strict=True) for e in p[:q]]
    return Evaluation(tuple(e.total_reward for e in kept), tuple(e.num_steps for e in kept))


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
    spec: EnvSpec, maker: EnvMaker, num_envs: int, seed: int, meter: Meter, video: Path | None
) -> VectorEnv:
    """The environments of an evaluation; the first one filmed if asked for (in Python form)."""
    env_id: Array = np.arange(num_envs)
    if video is None:
        return make_vector(
            maker, spec, env_id, seed, meter,
            num_threads=cpu_cores(), role="eval", sampler="evaluation",
        )  # fmt: skip
    maker = replace(maker, native=False)
    envs = [filmed(maker, video), *make_all(maker, num_envs - 1)]
    return GymVector(envs, spec, env_id, seed, meter, role="eval", sampler="evaluation")
