"""The inner loop of all collectors: T steps of one vector into one fragment."""

import contextlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.batch import Fragment, Fragments, select
from headrace.collectors.api import SamplingPlan, ShouldStop
from headrace.collectors.opponents import Opponents
from headrace.envs.api import Episode, Restored, VectorContext, VectorEnv
from headrace.envs.changes import Changes
from headrace.envs.seats import Pool
from headrace.envs.vectors import make_vector
from headrace.meter import Meter
from headrace.models.fast_paths import actor_for
from headrace.models.policy import Actor
from headrace.spec import Array


class ActorSource(Protocol):
    """The source of a worker's actors.

    Attributes:
        version: version of the weights of the last `pull`.
        deferred: True if an inference server computes the actions and records the weight version.
    """

    version: int
    deferred: bool = False

    def pull(self) -> Sequence[Actor]:
        """Return the current actors, one of each policy."""

    def is_stale(self) -> bool:
        """Return whether newer actors must replace the pulled ones. Called after each step."""


class FixedActors(ActorSource):
    """The same actors, one of each policy, for all steps of a fragment."""

    def __init__(self, actors: Sequence[Actor], version: int) -> None:
        self._actors, self.version = actors, version

    def pull(self) -> Sequence[Actor]:
        return self._actors

    def is_stale(self) -> bool:
        return False


Rollout = Generator[None, None, int]
"""Steps a vector through a fragment; yields wherever it waits for actions. Returns the number of
steps taken: T, or fewer if it had to stop."""


def rollout(
    vector: VectorEnv,
    fragments: Sequence[Fragment],
    weights: ActorSource,
    noise: Sequence[Tensor],
    meter: Meter,
    stop: ShouldStop,
    opponents: Opponents | None = None,
) -> Rollout:
    """Step `vector` through one fragment, or one of each policy.

    Args:
        vector: bound to the fragments here.
        weights: may change between steps; each step records its version.
        noise: for each fragment `[T, n, draws]`, uniform in (0, 1).
        stop: called before every step.
        opponents: act for those whom members of a league play.
    """
    vector.bind(*fragments)
    num_steps, deferred = fragments[0].num_steps, weights.deferred
    t = 0
    while t < num_steps:
        first, actors = t, weights.pull()
        acts = [actor.begin(f, u) for actor, f, u in zip(actors, fragments, noise, strict=True)]
        if opponents is not None:
            sides = enumerate(zip(fragments, noise, strict=True))
            acts += [opponents.begin(vector, i, f, u) for i, (f, u) in sides]
        meter.lap("rollout")
        while t == first or (not weights.is_stale() and t < num_steps):
            if stop():
                return t
            for act in acts:
                act(t)
            if deferred:
                yield
            meter.lap("infer")
            vector.step(t)
            t += 1
        for actor, fragment in zip(actors, fragments, strict=True):
            actor.finish(slice(first, t))
            if not deferred:
                fragment.policy_version[first:t] = weights.version
        meter.lap("infer")
    return num_steps


def at_once(rollout: Rollout) -> int:
    """Run a rollout that never waits. Return the number of steps."""
    try:
        next(rollout)
    except StopIteration as ended:
        return int(ended.value)
    raise AssertionError("a rollout with deferred actions cannot run at once")


@dataclass
class RolloutResult:
    """A worker's report on the fragments of an order."""

    taken: int = 0  # env steps, lost ones included
    agent_steps: int = 0  # rows of agents that are learned from, where these are not environments
    lost: int = 0  # env steps without a valid row, since an environment failed
    whole: bool = False  # all fragments are full; if not, the worker had to stop and none counts
    episodes: list[Episode] = field(default_factory=list)  # that ended
    dropped: list[str] = field(default_factory=list)  # a line for each; its rows are not valid
    # By the vector's index in the run: its state, without observations, and seconds per env step.
    states: dict[int, dict[str, Array]] = field(default_factory=dict)
    step_s: dict[int, float] = field(default_factory=dict)
    lag_sum: int = 0  # age of the weights at the end of each vector step (versions), summed
    lag_max: int = 0  # the largest such age

    def add_lag(self, lag: int) -> None:
        """Count the age of the weights at the end of a vector step."""
        self.lag_sum += lag
        self.lag_max = max(self.lag_max, lag)

    @property
    def kept(self) -> int:
        """Env steps with valid rows."""
        return self.taken - self.lost


class RolloutTask(NamedTuple):
    """A fragment to fill."""

    vector: int  # its index in the run
    fragments: Fragments  # one of each policy
    steps: int  # that each env of the vector has taken before
    changes: Changes  # of its envs, before the fragment
    pool: Pool | None = None  # of opponents, in a league


class RolloutWorker:
    """The vectors of a worker, with copies of the policies if the worker acts.

    Args:
        vectors: indices in the run: vector v has the envs `v * n .. (v + 1) * n - 1`.
        name: for error messages.
        acts: whether the worker computes actions; if not, every `ActorSource` is deferred.

    Attributes:
        policies: {} if the worker does not act.
    """

    def __init__(
        self, plan: SamplingPlan, vectors: list[int], meter: Meter, name: str, *, acts: bool = True
    ) -> None:
        self._plan, self._meter = plan, meter
        self.policies = plan.build_policies() if acts else {}
        self._opponents: Opponents | None = None
        if plan.league is not None:
            device = torch.device("cpu")
            self._opponents = Opponents(plan.league.load, list(plan.policies), device)
        n = plan.envs_per_vector
        self._vectors: dict[int, VectorEnv] = {}
        # Recurrent states of each vector's envs (or agents), for each policy
        self._memory = {
            v: [
                torch.zeros(n * policy.agents.size, policy.network.state_size)
                for policy in plan.policies.values()
            ]
            for v in vectors
        }
        for v in vectors:
            context = VectorContext(
                plan.spec,
                np.arange(v * n, (v + 1) * n),
                plan.seed,
                meter,
                worker=name,
                guards=plan.guards,
                reseed=plan.reseed_episodes,
                replay_limit_s=plan.replay_limit_s,
                parts=plan.parts,
                owners=plan.owners,
                league_size=plan.league_size,
                num_threads=plan.threads_per_worker,
            )
            self._vectors[v] = make_vector(plan.maker, context)

    def actors(self) -> list[Actor]:
        """Build an actor of each policy (or side), with its current weights."""
        plan = self._plan
        return [
            actor_for(self.policies[name], of.spec, of.network)
            for name, of in zip(plan.acting, plan.policies.values(), strict=True)
        ]

    def _take_pool(self, pool: Pool | None, vectors: Iterable[VectorEnv]) -> None:
        """Have opponents of later episodes drawn from this pool."""
        for vector in vectors:
            vector.set_pool(pool)
        if self._opponents is not None and pool is not None:
            self._opponents.forget(pool, list(self._vectors.values()))

    @torch.no_grad()
    def collect(
        self,
        tasks: Iterable[RolloutTask],
        weights: ActorSource,
        stop: ShouldStop,
        result: RolloutResult,
    ) -> None:
        """Fill fragments one after the other, with `weights` that are not deferred.

        `stop` is called between two steps.
        """
        for task in tasks:
            if at_once(self.fill(task, weights, stop, result)) < self._plan.num_steps:
                return
        result.whole = True
        self._meter.lap("rollout")

    def fill(
        self, task: RolloutTask, weights: ActorSource, stop: ShouldStop, result: RolloutResult
    ) -> Rollout:
        """Fill one fragment, and add to `result`. The caller sets `result.whole`.

        `stop` is called between two steps.
        """
        plan, vector = self._plan, self._vectors[task.vector]
        vector.change(task.changes)
        self._take_pool(task.pool, [vector])
        fragments, memories = task.fragments, self._memory[task.vector]
        for fragment, memory in zip(fragments, memories, strict=True):
            fragment.recurrent_state[0] = memory
        # An inference server draws its own noise: then there is none here.
        draws = [self.policies[name].num_draws if self.policies else 0 for name in plan.acting]
        noise = plan.action_noise(vector.env_id, task.steps, draws)
        taken = yield from rollout(
            vector, fragments, weights, list(map(torch.from_numpy, noise)), self._meter, stop,
            self._opponents,
        )  # fmt: skip
        result.taken += vector.count_env_steps(taken) + vector.lost_steps
        result.lost += vector.lost_steps
        result.dropped += vector.dropped
        if taken == plan.num_steps:
            for fragment, memory in zip(fragments, memories, strict=True):
                memory.copy_(fragment.recurrent_state[1])
            result.episodes += vector.finish()
            if plan.spec.num_agents > 1:
                result.agent_steps += sum(int(fragment.valid.sum()) for fragment in fragments)
            result.states[task.vector] = vector.state()
            result.step_s[task.vector] = vector.step_s
        return taken

    def restore(
        self,
        state: dict[str, Array],
        begin_after: int,
        changes: Changes,
        pool: Pool | None = None,
    ) -> Restored:
        """Restore this worker's vectors, before the first `collect`.

        Args:
            state: of all vectors.
            begin_after: steps of each env so far. A vector without state begins with episodes that
                cannot have occurred in so many steps; 0: with its first episodes.
            changes: of the envs of a vector without state that begins with later episodes.
            pool: of opponents in episodes that begin here.
        """
        self._take_pool(pool, self._vectors.values())
        restored = Restored()
        for v, vector in self._vectors.items():
            if saved := select(state, f"vector{v}."):
                restored.add(vector.restore(saved))
                begun_anew = torch.from_numpy(vector.state()["episode_step"] == 0)
                recall(saved, self._memory[v], begun_anew)
            elif begin_after:
                vector.change(changes)
                restored.add(vector.start_after(begin_after))
        if self._opponents is not None:  # later pools may not have the policies of all of them
            self._opponents.prepare(self._vectors.values())
        return restored

    def states(self) -> dict[int, dict[str, Array]]:
        """Return each vector's state, observations and recurrent states, by index in the run."""
        return {
            v: vector.state()
            | vector.obs()
            | remembered(self._memory[v], self._plan.envs_per_vector)
            for v, vector in self._vectors.items()
        }

    def close(self) -> None:
        """Close all environments. Raise EnvError if closing one fails."""
        with contextlib.ExitStack() as stack:  # closes the rest if one raises
            for vector in self._vectors.values():
                stack.callback(vector.close)


def remembered(states: Sequence[Tensor], num_envs: int) -> dict[str, Array]:
    """Return copies of a vector's recurrent states, of each policy, as named arrays.

    Args:
        states: `[n * agents, S]` of each policy; the arrays are `[n, agents * S]`.
    """
    return {
        f"core_state.{i}": state.cpu().numpy().reshape(num_envs, -1).copy()
        for i, state in enumerate(states)
        if state.numel()
    }


def recall(saved: Mapping[str, Array], states: Sequence[Tensor], begun_anew: Tensor) -> None:
    """Undo `remembered`; states are zero in envs that have begun another episode, `[n]` bool."""
    for i, state in enumerate(states):
        if state.numel():
            former = saved.get("core_state")  # once the name of that of the only policy
            found = saved[f"core_state.{i}"] if former is None else former
            state.copy_(torch.from_numpy(found).reshape(state.shape))
            state.view(len(begun_anew), -1)[begun_anew.to(state.device)] = 0.0
