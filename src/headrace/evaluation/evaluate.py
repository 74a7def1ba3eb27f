"""Playing whole episodes with trained policies: measure them, film them.

Left out: loading them (`trained_policies.py`), and training.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace import batch
from headrace.batch import Fragment, Obs
from headrace.collectors.api import ShouldStop
from headrace.collectors.rollout import FixedActors, at_once, rollout
from headrace.config.policies import DEFAULT
from headrace.config.resolve import cpu_cores
from headrace.envs.api import Episode, VectorContext, VectorEnv
from headrace.envs.factory import EnvMaker, env_spec, make_all
from headrace.envs.gym.python_vector import GymVector
from headrace.envs.kernels.vector import KernelVector
from headrace.envs.vectors import device_vector, is_one_vector, make_vector
from headrace.envs.video import record_first_episode, write_video
from headrace.errors import ConfigError, EnvError, UsageError
from headrace.evaluation.trained_policies import TrainedPolicy
from headrace.meter import Meter
from headrace.models.policy import Act, Policy, PolicyActor
from headrace.seeding import action_noise
from headrace.spec import Agents, Array, EnvSpec

# Trained policies at play: each acts for its agents, some steps at a time.


class Players:
    """Policies, and what they remember of the environments of one vector.

    Args:
        policy: acts; or several, by name.
        shares: the agents of each of several.
        num_envs: of the vector.
        num_steps: that are played at a time.
        seed: of sampled actions.
        stochastic: sample them, as in training; else take the likeliest.

    Attributes:
        names: of the policies.
        parts: the agents of each.
        spec: of the first policy; all of them have the environment's roles.
        steps: that each environment has taken.
    """

    def __init__(
        self,
        policy: TrainedPolicy | Mapping[str, TrainedPolicy],
        shares: Mapping[str, Agents] | None,
        num_envs: int,
        num_steps: int,
        *,
        seed: int,
        stochastic: bool,
    ) -> None:
        policies = {DEFAULT: policy} if isinstance(policy, TrainedPolicy) else dict(policy)
        self.names, self.steps = list(policies), 0
        self.spec = next(iter(policies.values())).spec
        self.parts = list((shares or {DEFAULT: Agents(0, self.spec.num_agents)}).values())
        self._modules = [of.module for of in policies.values()]
        actors = [PolicyActor(_act(module, stochastic=stochastic)) for module in self._modules]
        self._weights, self._meter, self._seed = FixedActors(actors, version=0), Meter(), seed
        self._num_steps = num_steps
        self._fragments = [
            self._fragment(of, num_envs * part.size)
            for of, part in zip(policies.values(), self.parts, strict=True)
        ]

    def _fragment(self, policy: TrainedPolicy, num_rows: int) -> Fragment:
        state_size = policy.module.state_size
        columns = batch.columns(policy.spec, {}, self._num_steps, num_rows, state_size)
        fragment = batch.allocate(columns)
        fragment.recurrent_state.zero_()
        return fragment

    @torch.no_grad()
    def play(self, vector: VectorEnv, stop: ShouldStop = lambda: False) -> bool:
        """Play `num_steps`; False if told to stop."""
        noise = []
        for module, part in zip(self._modules, self.parts, strict=True):
            ids = part.ids(vector.env_id, self.spec.num_agents)
            drawn = action_noise(self._seed, ids, self.steps, self._num_steps, module.num_draws)
            noise.append(torch.from_numpy(drawn))
        steps = rollout(vector, self._fragments, self._weights, noise, self._meter, stop)
        taken = at_once(steps)
        for fragment in self._fragments:
            fragment.recurrent_state[0] = fragment.recurrent_state[1]
        self.steps += taken
        return taken == self._num_steps


def _act(module: Policy, *, stochastic: bool) -> Act:
    def greedily(obs: Obs, noise: Tensor, *memory: Tensor) -> dict[str, Tensor]:
        return module.act_greedily(obs, *memory)

    return module.act if stochastic else greedily


# One episode of a kernel environment, whole: as arrays, and as a film.


_MOST_STEPS = 100_000
_FPS = 20


def play_episode(
    policy: TrainedPolicy | Mapping[str, TrainedPolicy],
    maker: EnvMaker,
    *,
    shares: Mapping[str, Agents] | None = None,
    seed: int = 0,
    stochastic: bool = False,
) -> dict[str, Array]:
    """Play one episode: the first that `evaluate` plays with this seed.

    Args:
        policy: acts; or several, by name.
        maker: makes the environment.
        shares: the agents of each of several.
        seed: of the environment and of sampled actions.
        stochastic: sample actions, as in training; default: the likeliest.

    Returns:
        Everything that there is in the world, by name, `[steps + 1, ...]`: row t is after step t.
        Row 0 is the start, where `action` and `reward` say nothing.

    Raises:
        UsageError: it is no kernel environment.
        EnvError: it failed, or does not end.
    """
    env = maker.kernel()
    if env is None:
        raise UsageError(
            f"{maker.name} is no kernel environment: of others there are no arrays to keep.\n"
            "A film can be made of those that draw themselves: evaluate(video=...)."
        )
    players = Players(policy, shares, 1, 1, seed=seed, stochastic=stochastic)
    context = VectorContext(
        players.spec, np.arange(1), seed, role="eval", worker="evaluation",
        parts=tuple(players.parts),
    )  # fmt: skip
    vector = KernelVector(env, context, autoreset=False)
    vector.restart(seed)
    rows = [_copied(vector)]
    while not vector.ended[0] or len(rows) == 1:
        players.play(vector)
        vector.finish()
        rows.append(_copied(vector))
        if len(rows) > _MOST_STEPS:
            raise EnvError(f"The episode of {maker.name} did not end in {_MOST_STEPS:,} steps.")
    vector.close()
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def film_episode(episode: Mapping[str, Array], maker: EnvMaker, path: Path) -> None:
    """Draw an episode from `play_episode` (MP4).

    Raises:
        UsageError: the environment does not draw itself.
        MissingExtraError: imageio-ffmpeg is not installed.
    """
    env = maker.kernel()
    assert env is not None, maker.name
    steps = range(len(episode["step"]))
    write_video(path, (env.draw({k: of[t] for k, of in episode.items()}) for t in steps), _FPS)


def _copied(vector: KernelVector) -> dict[str, Array]:
    return {name: of[0].numpy().copy() for name, of in vector.world.items()}


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


@torch.no_grad()
def evaluate(
    policy: TrainedPolicy | Mapping[str, TrainedPolicy],
    maker: EnvMaker,
    *,
    spec: EnvSpec | None = None,
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
        spec: of them, as `env_spec` gives it; default: it is asked.
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
    if video is not None and maker.kernel() is not None:
        first = play_episode(policy, maker, shares=shares, seed=seed, stochastic=stochastic)
        film_episode(first, maker, video)
    spec, quota = spec or env_spec(maker), _quota(episodes)
    played: list[list[Episode]] = [[] for _ in quota]
    players = Players(policy, shares, len(quota), _NUM_STEPS, seed=seed, stochastic=stochastic)
    with contextlib.closing(_vector(players, maker, spec, len(quota), seed, video)) as vector:
        last_end = ended = 0
        say = _now_and_then(say)
        while ended < episodes:
            if not players.play(vector, stop):
                return None
            for episode in vector.finish():
                played[episode.env_id].append(episode)
                last_end = players.steps
            ended = sum(min(len(p), q) for p, q in zip(played, quota, strict=True))
            say(f"{ended} of {episodes} episodes, step {players.steps:,} of each environment")
            if players.steps - last_end > _ENDLESS:
                raise _endless(maker, len(quota))
    kept = [e for p, q in zip(played, quota, strict=True) for e in p[:q]]
    of_each = zip(*(e.by_policy for e in kept), strict=True)
    return Evaluation(
        tuple(e.total_reward for e in kept),
        tuple(e.num_steps for e in kept),
        dict(zip(players.names, of_each, strict=False)),
    )


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
    players: Players,
    maker: EnvMaker,
    spec: EnvSpec,
    num_envs: int,
    seed: int,
    video: Path | None,
) -> VectorEnv:
    """The environments of an evaluation; the first one filmed if asked for (in Python form)."""
    context = VectorContext(spec, np.arange(num_envs), seed, role="eval", worker="evaluation")
    if is_one_vector(maker, spec):
        if video is not None and spec.kind != "kernel":
            raise ConfigError(f"There is no film of {maker.name}: leave --video out.")
        context = replace(context, parts=tuple(players.parts))
        return device_vector(maker, context, torch.device("cpu"))
    context = replace(context, spec=players.spec, num_threads=cpu_cores())
    if video is None:
        return make_vector(maker, context)
    maker = replace(maker, native=False)
    return GymVector([record_first_episode(maker, video), *make_all(maker, num_envs - 1)], context)
