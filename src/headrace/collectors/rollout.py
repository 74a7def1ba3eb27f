"""The inner loop: T steps of one vector into one fragment. All kinds of collectors run this one.

Left out: processes and memory (`inline.py`, `synchronous.py`), what a step does (`envs/`), and the
turns of vectors that wait for actions (`worker_main.py`).
"""

import contextlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.batch import Fragment
from headrace.collectors.api import SamplingPlan, ShouldStop
from headrace.envs.api import Episode, Restored, VectorContext, VectorEnv
from headrace.envs.vectors import make_vector
from headrace.meter import Meter
from headrace.models.fast_paths import actor_for
from headrace.models.policy import Actor, Policy
from headrace.seeding import action_noise
from headrace.spec import Array


class ActorSource(Protocol):
    """The weights that a worker acts with.

    Attributes:
        version: of the weights that `pull` gave last.
        waits: whether somebody else acts, later, and stamps the steps with versions.
    """

    version: int
    waits: bool

    def pull(self) -> Sequence[Actor]:
        """Take the weights that are to act now: of each policy."""

    def is_stale(self) -> bool:
        """Whether others are to act from here on; asked after each step."""


class FixedActors:
    """The same weights from a fragment's first step to its last.

    Args:
        actors: act with them, one of each policy.
        version: theirs.
    """

    waits = False

    def __init__(self, actors: Sequence[Actor], version: int) -> None:
        self._actors, self.version = actors, version

    def pull(self) -> Sequence[Actor]:
        """See `ActorSource`."""
        return self._actors

    def is_stale(self) -> bool:
        """See `ActorSource`."""
        return False


Rollout = Generator[None, None, int]
"""Steps a vector through a fragment; yields wherever it waits for actions. What it returns is the
number of steps taken: T, or fewer if it was told to stop."""


def rollout(
    vector: VectorEnv,
    fragments: Sequence[Fragment],
    weights: ActorSource,
    noise: Sequence[Tensor],
    meter: Meter,
    stop: ShouldStop,
) -> Rollout:
    """Step `vector` through one fragment, or one of each policy.

    Args:
        vector: is bound to the fragments here.
        fragments: are filled.
        weights: may be others from some step on: each step is stamped with its version.
        noise: for each fragment `[T, n, draws]`, uniform in (0, 1).
        meter: told where the time goes.
        stop: asked before every step.
    """
    vector.bind(*fragments)
    num_steps, waits = fragments[0].num_steps, weights.waits
    t = 0
    while t < num_steps:
        first, actors = t, weights.pull()
        acts = [actor.begin(f, u) for actor, f, u in zip(actors, fragments, noise, strict=True)]
        meter.lap("rollout")
        while t == first or (not weights.is_stale() and t < num_steps):
            if stop():
                return t
            for act in acts:
                act(t)
            if waits:
                yield
            meter.lap("infer")
            vector.step(t)
            t += 1
        for actor, fragment in zip(actors, fragments, strict=True):
            actor.finish(slice(first, t))
            if not waits:
                fragment.policy_version[first:t] = weights.version
        meter.lap("infer")
    return num_steps


def at_once(rollout: Rollout) -> int:
    """Carry a rollout out that has nothing to wait for: what it returns."""
    try:
        next(rollout)
    except StopIteration as ended:
        return int(ended.value)
    raise AssertionError("it waits for actions, and nobody was asked")


@dataclass
class RolloutResult:
    """What a worker reports of an order's fragments.

    Attributes:
        taken: env steps, those that were lost included.
        lost: of them, those that failed, and gave nothing.
        whole: whether all are full; else it was told to stop, and nothing of them counts.
        episodes: that ended in them.
        dropped: those that were given up, each in a line: their rows are not valid.
        states: where each vector is now, by its index in the run; without observations.
        step_s: mean seconds per env step, likewise.
        lag_sum: by how many versions the weights were older than the newest, at the end of each
            vector step, added up.
        lag_max: the most of these.
    """

    taken: int = 0
    lost: int = 0
    whole: bool = False
    episodes: list[Episode] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    states: dict[int, dict[str, Array]] = field(default_factory=dict)
    step_s: dict[int, float] = field(default_factory=dict)
    lag_sum: int = 0
    lag_max: int = 0

    @property
    def kept(self) -> int:
        """Env steps that could be learned from."""
        return self.taken - self.lost


def lag_metrics(
    plan: SamplingPlan,
    batch: list[RolloutResult],
    depth: float,
    meters: Mapping[str, Mapping[str, float]],
) -> dict[str, float]:
    """Metrics of a batch that was made while the learner learned; at lag 0: none.

    Args:
        plan: the run's.
        batch: what workers reported of its fragments.
        depth: batches that are left in the queue.
        meters: seconds by span of each worker, so far.
    """
    if not plan.lag:
        return {}
    num_acts = plan.num_steps * sum(len(filled.states) for filled in batch)
    return {
        "lag_acting": sum(filled.lag_sum for filled in batch) / num_acts,
        "lag_acting_max": float(max(filled.lag_max for filled in batch)),
        "queue_depth": depth,
        "workers_wait_s": sum(seconds.get("wait", 0.0) for seconds in meters.values()),
    }


class RolloutTask(NamedTuple):
    """A fragment that is to be filled.

    Attributes:
        vector: its index in the run.
        fragment: the memory.
        steps: how many each env of the vector has taken before.
    """

    vector: int
    fragment: Fragment
    steps: int


class RolloutWorker:
    """The vectors of one process, with a copy of the policy if it acts itself.

    Args:
        plan: the run's.
        vectors: which vectors of the run are this worker's: vector v has the envs
            `v * n .. (v + 1) * n - 1`.
        meter: this process's.
        name: in errors.
        acts: whether it does; else it is only given `ActorSource` that wait.
    """

    def __init__(
        self, plan: SamplingPlan, vectors: list[int], meter: Meter, name: str, *, acts: bool = True
    ) -> None:
        self._plan, self._meter = plan, meter
        # Its weights are overwritten by the first publish.
        self._policy = plan.policy.build() if acts else None
        n = plan.envs_per_vector
        self._vectors: dict[int, VectorEnv] = {}
        # What a recurrent core remembers of each vector's envs
        self._memory = {v: torch.zeros(n, plan.policy.network.state_size) for v in vectors}
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
                num_threads=plan.threads_per_worker,
            )
            self._vectors[v] = make_vector(plan.maker, context)

    @property
    def policy(self) -> Policy:
        """Its copy, to put weights into."""
        assert self._policy is not None, "somebody else acts"
        return self._policy

    def actor(self) -> Actor:
        """Acts with the weights that `policy` has now."""
        return actor_for(self.policy, self._plan.spec, self._plan.policy.network)

    @torch.no_grad()
    def collect(
        self, wanted: Iterable[RolloutTask], weights: ActorSource, stop: ShouldStop
    ) -> RolloutResult:
        """Fill fragments, one after the other.

        Args:
            wanted: which.
            weights: to act with; they do not wait.
            stop: asked between two steps.
        """
        filled = RolloutResult()
        for each in wanted:
            if at_once(self.fill(each, weights, stop, filled)) < self._plan.num_steps:
                return filled
        filled.whole = True
        self._meter.lap("rollout")
        return filled

    def fill(
        self, wanted: RolloutTask, weights: ActorSource, stop: ShouldStop, filled: RolloutResult
    ) -> Rollout:
        """Fill a fragment.

        Args:
            wanted: which.
            weights: to act with.
            stop: asked between two steps.
            filled: is added to; only who knows of its other fragments can say if it is whole.
        """
        plan, vector = self._plan, self._vectors[wanted.vector]
        memory, states = self._memory[wanted.vector], wanted.fragment.recurrent_state
        states[0] = memory
        # Whoever acts makes the noise: no numbers of it if that is somebody else.
        draws = 0 if self._policy is None else self._policy.num_draws
        noise = action_noise(plan.seed, vector.env_id, wanted.steps, plan.num_steps, draws)
        taken = yield from rollout(
            vector, [wanted.fragment], weights, [torch.from_numpy(noise)], self._meter, stop
        )
        filled.taken += int(wanted.fragment.valid[:taken].sum()) + vector.lost_steps
        filled.lost += vector.lost_steps
        filled.dropped += vector.dropped
        if taken == plan.num_steps:
            memory.copy_(states[1])
            filled.episodes += vector.finish()
            filled.states[wanted.vector] = vector.state()
            filled.step_s[wanted.vector] = vector.step_s
        return taken

    def restore(self, state: dict[str, Array], begin_after: int) -> Restored:
        """Go on from the state of this worker's vectors, before the first `collect`.

        Args:
            state: of all vectors.
            begin_after: where one has none, it begins episodes that no run of so many steps of
                each env can have had; 0: its first ones.
        """
        restored = Restored()
        for v, vector in self._vectors.items():
            own = {
                name.removeprefix(f"vector{v}."): array
                for name, array in state.items()
                if name.startswith(f"vector{v}.")
            }
            if own:
                restored.add(vector.restore(own))
                if (memory := self._memory[v]).numel():
                    begun_anew = vector.state()["episode_step"] == 0
                    memory.copy_(torch.from_numpy(own["core_state"]))
                    memory[torch.from_numpy(begun_anew)] = 0.0
            elif begin_after:
                restored.add(vector.start_after(begin_after))
        return restored

    def states(self) -> dict[int, dict[str, Array]]:
        """Where each vector is, with observations and memory, by its index in the run."""
        return {
            v: vector.state() | vector.obs() | remembered(self._memory[v])
            for v, vector in self._vectors.items()
        }

    def close(self) -> None:
        """Close all environments; EnvError if one fails in it."""
        with contextlib.ExitStack() as stack:  # goes on with the rest if one raises
            for vector in self._vectors.values():
                stack.callback(vector.close)


def remembered(state: Tensor) -> dict[str, Array]:
    """What a recurrent core remembers of a vector's envs `[n, S]`, as a named array (a copy)."""
    return {"core_state": state.numpy().copy()} if state.numel() else {}
