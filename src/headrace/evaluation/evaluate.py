"""Evaluation: trained policies play whole episodes, which are measured, filmed, or kept."""

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
from headrace.batch import Obs
from headrace.collectors.api import ShouldStop
from headrace.collectors.rollout import FixedActors, at_once, rollout
from headrace.collectors.watchdog import Watchdog
from headrace.config.policies import DEFAULT
from headrace.envs.api import Episode, Guards, VectorContext, VectorEnv
from headrace.envs.factory import EnvMaker, env_spec, make_all
from headrace.envs.games.vector import GameVector
from headrace.envs.gym.python_vector import GymVector
from headrace.envs.kernels.env import KernelEnv
from headrace.envs.kernels.vector import KernelVector
from headrace.envs.vectors import device_vector, is_one_vector, make_vector
from headrace.envs.video import record_first_episode, write_video
from headrace.errors import ConfigError, EnvError, UsageError
from headrace.evaluation.scripted import ScriptedPolicy
from headrace.evaluation.trained_policies import TrainedPolicy
from headrace.machine.limits import cpu_cores
from headrace.meter import Meter
from headrace.models.policy import Act, Actor, Policy, PolicyActor
from headrace.seeding import action_noise, check_seed
from headrace.spec import GAMES, Agents, Array, EnvSpec

_NUM_STEPS = 64
_MAX_ENVS = 32
_ENVS_OBSERVED = 8
_SAY_EVERY_S = 5.0
_MAX_STEPS_WITHOUT_END = 200_000  # of each env
_MAX_STEPS_KEPT = 100_000
_FPS = 20
NOT_WATCHED = Guards(enabled=False)

Plays = TrainedPolicy | ScriptedPolicy
Policies = Plays | Mapping[str, Plays]
"""The policy that acts; or several, by name."""


@dataclass(frozen=True)
class Evaluation:
    """Returns of whole episodes.

    Attributes:
        returns: undiscounted, one per episode. Of several agents, the mean.
        lengths: env steps, one per episode.
        by_policy: the returns of each of several policies: means over its agents.
    """

    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    by_policy: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `headrace eval --json`."""
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
    policy: Policies,
    maker: EnvMaker,
    *,
    spec: EnvSpec | None = None,
    shares: Mapping[str, Agents] | None = None,
    episodes: int = 20,
    stochastic: bool = False,
    seed: int = 0,
    video: Path | None = None,
    num_steps: int = _NUM_STEPS,
    stop: ShouldStop = lambda: False,
    say: Callable[[str], None] = lambda progress: None,
    guards: Guards = NOT_WATCHED,
) -> Evaluation | None:
    """Play whole episodes.

    Each env plays a fixed number, so that short episodes are not overrepresented.

    Args:
        shares: the agents of each of several policies.
        stochastic: sample actions, as in training and always for random policies; or the likeliest.
        video: write the first episode to this file (MP4).
        num_steps: env steps of each env that are played at a time; episodes are the same.
        stop: asked between steps whether to stop, and return None.
        guards: a hang of the environment ends this process, with its stack.

    Raises:
        UsageError: less than one episode, a negative seed, or a video without the `video` extra.
        EnvError: the environment failed, or its episodes do not end.
    """
    if episodes < 1:
        raise ConfigError(f"episodes={episodes}: expected at least 1.")
    n = min(episodes, _MAX_ENVS)
    quotas = [episodes // n + (i < episodes % n) for i in range(n)]  # of each env
    if video is not None and (env := maker.kernel()) is not None:
        first = play_episode(policy, maker, shares=shares, seed=seed, stochastic=stochastic)
        _write_film(env, first, video)
    spec = spec or env_spec(maker)
    players = _Players(policy, shares, n, num_steps, seed=seed, stochastic=stochastic)
    where = f"in an evaluation of {maker.name}"
    watchdog = Watchdog(players.meter, guards, lambda: 0, lambda: where)
    with (
        contextlib.closing(watchdog),
        contextlib.closing(_vector(players, maker, spec, n, seed, video)) as vector,
        watchdog,
    ):
        kept = _whole_episodes(players, vector, quotas, maker.name, stop, say)
    if kept is None:
        return None
    by_policy = zip(*(e.by_policy for e in kept), strict=True)
    return Evaluation(
        tuple(e.total_reward for e in kept),
        tuple(e.num_steps for e in kept),
        dict(zip(players.names, by_policy, strict=False)),
    )


@torch.no_grad()
def observations_of(
    policy: Policies,
    maker: EnvMaker,
    *,
    spec: EnvSpec,
    shares: Mapping[str, Agents] | None = None,
    num_envs: int = _ENVS_OBSERVED,
    num_steps: int = _NUM_STEPS,
    seed: int = 0,
) -> dict[str, Obs]:
    """Play, with sampled actions, and return what each policy observes: `[rows, ...]` by name.

    Raises:
        UsageError: a negative seed.
        EnvError: the environment failed.
    """
    players = _Players(policy, shares, num_envs, num_steps, seed=seed, stochastic=True)
    with contextlib.closing(_vector(players, maker, spec, num_envs, seed, None)) as vector:
        players.play(vector)
        vector.finish()
    return players.observations()


def _whole_episodes(
    players: "_Players",
    vector: VectorEnv,
    quotas: Sequence[int],
    name: str,
    stop: ShouldStop,
    say: Callable[[str], None],
) -> list[Episode] | None:
    """Play until each env has ended its quota of episodes. Return these; None if stopped.

    Args:
        name: of the environment, for the error.
    """
    played: list[list[Episode]] = [[] for _ in quotas]
    last_end = num_played = 0
    said_at = time.monotonic()
    while num_played < sum(quotas):
        if not players.play(vector, stop):
            return None
        for episode in vector.finish():
            played[episode.env_id].append(episode)
        counted = sum(min(len(p), q) for p, q in zip(played, quotas, strict=True))
        if counted > num_played:  # episodes beyond a quota do not count
            num_played, last_end = counted, players.steps
        if time.monotonic() - said_at > _SAY_EVERY_S:
            said_at = time.monotonic()
            say(f"{num_played} of {sum(quotas)} episodes, step {players.steps:,} of each env")
        if players.steps - last_end > _MAX_STEPS_WITHOUT_END:
            raise _endless(name)
    return [e for p, q in zip(played, quotas, strict=True) for e in p[:q]]


def _write_film(env: KernelEnv, episode: Mapping[str, Array], video: Path) -> None:
    rows = ({k: array[t] for k, array in episode.items()} for t in range(len(episode["step"])))
    write_video(video, (env.draw(row) for row in rows), _FPS)


def _endless(name: str) -> EnvError:
    return EnvError(
        f"An episode of {name} did not end in {_MAX_STEPS_WITHOUT_END:,} steps."
        "\nGive it a time limit: --wrapper module:callable, with gymnasium.wrappers.TimeLimit."
    )


def _vector(
    players: "_Players",
    maker: EnvMaker,
    spec: EnvSpec,
    num_envs: int,
    seed: int,
    video: Path | None,
) -> VectorEnv:
    context = VectorContext(
        spec, np.arange(num_envs), seed,
        role="eval", worker="evaluation", parts=tuple(players.parts),
    )  # fmt: skip
    if is_one_vector(maker, spec):
        if video is not None and spec.interface != "kernel":
            raise ConfigError(f"There is no film of {maker.name}: leave --video out.")
        return device_vector(maker, context, torch.device("cpu"))
    is_game = spec.interface in GAMES
    if not is_game:  # messages name the environment that is played
        named = replace(players.spec, id=spec.id)
        context = replace(context, spec=named, num_threads=cpu_cores())
    if video is None:
        return make_vector(maker, context)
    maker = replace(maker, native=False)
    envs = [record_first_episode(maker, video), *make_all(maker, num_envs - 1)]
    return GameVector(envs, context) if is_game else GymVector(envs, context)


def play_episode(
    policy: Policies,
    maker: EnvMaker,
    *,
    shares: Mapping[str, Agents] | None = None,
    seed: int = 0,
    stochastic: bool = False,
) -> dict[str, Array]:
    """Play one episode of a kernel environment: the first that `evaluate` plays with this seed.

    Returns:
        All arrays of the world, by name, `[steps + 1, ...]`: row t is after step t. In row 0,
        `action` and `reward` mean nothing.

    Raises:
        UsageError: it is no kernel environment, or the seed is negative.
        EnvError: it failed, or does not end.
    """
    env = maker.kernel()
    if env is None:
        raise UsageError(
            f"{maker.name} is no kernel environment: of others there are no arrays to keep.\n"
            "A film can be made of those that draw themselves: evaluate(video=...)."
        )
    players = _Players(policy, shares, 1, 1, seed=seed, stochastic=stochastic)
    context = VectorContext(
        players.spec, np.arange(1), seed, role="eval", worker="evaluation",
        parts=tuple(players.parts),
    )  # fmt: skip
    vector = KernelVector(env, context, autoreset=False)

    def row() -> dict[str, Array]:
        return {name: array[0].numpy().copy() for name, array in vector.world.items()}

    vector.restart(seed)
    rows = [row()]
    while not vector.ended[0] or len(rows) == 1:
        players.play(vector)
        vector.finish()
        rows.append(row())
        if len(rows) > _MAX_STEPS_KEPT:
            raise EnvError(f"The episode of {maker.name} did not end in {_MAX_STEPS_KEPT:,} steps.")
    vector.close()
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


class _Players:
    """Policies that act in a vector, each for its agents, `num_steps` at a time."""

    def __init__(
        self,
        policy: Policies,
        shares: Mapping[str, Agents] | None,
        num_envs: int,
        num_steps: int,
        *,
        seed: int,
        stochastic: bool,
    ) -> None:
        check_seed(seed)
        policies = dict(policy) if isinstance(policy, Mapping) else {DEFAULT: policy}
        self.names, self.steps = list(policies), 0
        self.spec = next(iter(policies.values())).spec  # all have the environment's agents
        self.parts = list((shares or {DEFAULT: Agents(0, self.spec.num_agents)}).values())
        self._policies, self._stochastic = list(policies.values()), stochastic
        self.meter, self._seed, self._num_steps = Meter(), seed, num_steps
        self._fragments = []
        for each, part in zip(self._policies, self.parts, strict=True):
            rows = num_envs * part.size
            fragment = batch.allocate(
                batch.columns(each.spec, {}, num_steps, rows, each.state_size)
            )
            fragment.recurrent_state.zero_()
            self._fragments.append(fragment)

    @torch.no_grad()
    def play(self, vector: VectorEnv, stop: ShouldStop = lambda: False) -> bool:
        """Play `num_steps`; return False if stopped."""
        noise, actors = list[Tensor](), list[Actor]()
        for each, part in zip(self._policies, self.parts, strict=True):
            ids = part.ids(vector.env_id, self.spec.num_agents)
            drawn = action_noise(self._seed, ids, self.steps, self._num_steps, each.num_draws)
            noise.append(torch.from_numpy(drawn))
            actors.append(self._actor(each, vector, part))
        weights = FixedActors(actors, version=0)
        steps = rollout(vector, self._fragments, weights, noise, self.meter, stop)
        taken = at_once(steps)
        for fragment in self._fragments:
            fragment.recurrent_state[0] = fragment.recurrent_state[1]
        self.steps += taken
        return taken == self._num_steps

    def observations(self) -> dict[str, Obs]:
        """Return the observations of the steps that were just played, by policy, `[rows, ...]`."""
        found = dict[str, Obs]()
        for name, fragment in zip(self.names, self._fragments, strict=True):
            real = fragment.valid.nonzero(as_tuple=True)
            found[name] = batch.each(lambda o, rows=real: o[rows], fragment.obs)
        return found

    def _actor(self, policy: Plays, vector: VectorEnv, part: Agents) -> Actor:
        if isinstance(policy, ScriptedPolicy):
            return policy.actor(vector, part)
        sampled = self._stochastic or policy.is_random
        return PolicyActor(policy.module.act if sampled else _greedily(policy.module))


def _greedily(module: Policy) -> Act:
    return lambda obs, noise, *memory: module.act_greedily(obs, *memory)
