"""What the loop needs of whoever samples for it. Left out: every way of doing it (beside this)."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Protocol

import torch

from headrace.batch import Column, Fragment, StoredOutputs, columns
from headrace.envs.api import GUARDS, Episode, Guards, Restored
from headrace.envs.factory import EnvMaker
from headrace.meter import Laps
from headrace.models.custom import ModelFactory
from headrace.models.policy import Network, Policy
from headrace.spec import Array, EnvSpec


@dataclass(frozen=True)
class SamplingPlan:
    """What every sampler of a run is told; which vectors are its own comes on top.

    Attributes:
        maker: makes one environment.
        spec: what it offers.
        network: shape of the policy, to build a copy.
        model: makes the user's own network, if there is one.
        stored_outputs: what the algorithm wants stored with each step.
        num_steps: T.
        num_envs: N, of this rank.
        first_env: index over all ranks of the first of them.
        envs_per_vector: n.
        seed: the run's seed.
        reseed_episodes: see `GymVector`.
        replay_limit_s: see `GymVector`.
        threads_per_worker: see `EnvMaker.vector`.
        lag: how many updates old the weights may be when a step is taken.
        first_ready: at lag 1 or more: whether samplers never stop, with the newest weights at each
            step, and the fragments that are there first make a batch; else all are made with the
            weights of the update before the last.
        inference_device: the learner's process acts for all workers, on this device; None: each
            sampler acts itself.
        guards: what is done about environments that fail and samplers that are lost.
        timeline: whether samplers keep what they did when.
    """

    maker: EnvMaker
    spec: EnvSpec
    network: Network
    model: ModelFactory | None
    stored_outputs: StoredOutputs
    num_steps: int
    num_envs: int
    first_env: int
    envs_per_vector: int
    seed: int
    reseed_episodes: bool
    replay_limit_s: float
    threads_per_worker: int
    lag: int = 0
    first_ready: bool = False
    inference_device: torch.device | None = None
    guards: Guards = GUARDS
    timeline: bool = False

    @property
    def layout(self) -> dict[str, Column]:
        """Of one vector's fragment."""
        n, state_size = self.envs_per_vector, self.network.state_size
        return columns(self.spec, self.stored_outputs, self.num_steps, n, state_size)

    @property
    def num_vectors(self) -> int:
        """How many vectors the envs make."""
        return self.num_envs // self.envs_per_vector

    @property
    def num_buffers(self) -> int:
        """Fragments of each vector that there is memory for."""
        return 1 + self.lag if self.first_ready else 1

    @property
    def vectors(self) -> range:
        """Their indices over all ranks: vector v has the envs `v * n .. (v + 1) * n - 1`."""
        first = self.first_env // self.envs_per_vector
        return range(first, first + self.num_vectors)


WINDOW = 100
"""`mean_return` is over so many of the last finished training episodes."""


@dataclass
class Collected:
    """One batch.

    Attributes:
        fragments: as many as there are vectors, in their order; of some none, of others several,
            where the first that are there make a batch.
        env_steps: in them.
        episodes: that ended in them.
        metrics: of how they came about.
        agent_steps: in them, if agents are not environments.
        num_episodes: that ended, if `episodes` are but the last `WINDOW` of them.
    """

    fragments: list[Fragment]
    env_steps: int
    episodes: list[Episode] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    agent_steps: int = 0
    num_episodes: int | None = None


Say = Callable[[str], None]
"""Told what the user should know of."""
_DROPS_SAID = 20


@dataclass
class Ledger:
    """Where the env steps went that samplers took: each was learned from, or is in one of these.

    Attributes:
        collected: taken, by whomever.
        lost: given up: unfinished when the run was stopped, or of a lost sampler.
        remade: of a lost sampler, and taken again to the bit by another.
        restarts: samplers that were started in the place of lost ones.
        dropped_episodes: given up because their environment failed.
    """

    collected: int = 0
    lost: int = 0
    remade: int = 0
    restarts: int = 0
    dropped_episodes: int = 0

    def count(self, taken: int, lost: int, *, whole: bool) -> None:
        """Count what a sampler did.

        Args:
            taken: env steps.
            lost: of them, those that failed.
            whole: whether it filled what it was to fill; else all of them are lost.
        """
        self.collected += taken
        self.lost += lost if whole else taken

    def drop(self, episodes: list[str], say: Say) -> None:
        """Count episodes that were given up, each in a line; the first of the run are said."""
        for line in episodes:
            self.dropped_episodes += 1
            if self.dropped_episodes <= _DROPS_SAID:
                say(f"An episode was dropped: {line}")
            if self.dropped_episodes == _DROPS_SAID:
                say("Those that are dropped from here on are counted, and not shown.")

    def __add__(self, other: "Ledger") -> "Ledger":
        return Ledger(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Ledger)))


class Collector(Protocol):
    """Steps the envs of a rank for T steps at a time, with the weights that were published.

    Attributes:
        restored: how the episodes came back that were under way when the run was saved.
        ledger: of the env steps so far.
    """

    restored: Restored
    ledger: Ledger

    def publish(self, policy: Policy, version: int) -> None:
        """Hand out weights: at lag 0, those that the next batch is to be made with."""

    def collect(self) -> Collected | None:
        """The next batch; None if it was given up because the run is to stop.

        The fragments are valid until the next call. Raises EnvError or WorkerError.
        """

    def release_batch(self, *, more: bool) -> None:
        """The batch that was collected last counts, and nobody reads its fragments any more.

        At lag 1 and above samplers go on from here, while it is learned from.

        Args:
            more: another one will be collected.
        """

    def discard_batch(self) -> None:
        """The batch that was collected last is not learned from: it does not count."""

    def halt(self) -> None:
        """Nothing more is collected: samplers stop, and what they have is lost; see `ledger`."""

    def state(self) -> dict[str, Array]:
        """Everything needed to go on from the last batch that counts, as named arrays."""

    def meters(self) -> dict[str, dict[str, float]]:
        """Seconds by span of every sampler that is not this process, by name."""

    def laps(self) -> dict[str, Laps]:
        """What each of them did when, if the plan wants a timeline; asked for once, at the end."""

    def close(self) -> None:
        """End every sampler, and leave nothing behind; EnvError if an env failed in closing."""


ShouldStop = Callable[[], bool]
"""Asked between two steps: give the fragment under way up?"""
