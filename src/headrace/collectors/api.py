"""The interface between the training loop and the collectors."""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch

from headrace.batch import Column, Fragment, StoredOutputs, columns
from headrace.envs.api import GUARDS, Episode, Guards, Restored
from headrace.envs.changes import Changes
from headrace.envs.factory import EnvMaker
from headrace.envs.games.opponents import LoadMember
from headrace.envs.games.seats import Pool
from headrace.meter import Timings
from headrace.models.policy import Network, Policy
from headrace.seeding import action_noise
from headrace.spec import Agents, Array, EnvSpec


@dataclass(frozen=True)
class PolicyPlan:
    """One of the policies that act; in a league, one for each side of a game."""

    agents: Agents  # its agents in each environment, or those of the side
    spec: EnvSpec
    network: Network
    stored_outputs: StoredOutputs  # with each step; {}: the policy is not trained
    build: Callable[[], Policy]  # builds a copy, whose weights are then overwritten
    policy: str = ""  # its name, where several sides share it; "": the plan's own name
    owner: Agents | None = None  # all agents of that policy; None: `agents`


@dataclass(frozen=True)
class LeaguePlan:
    """The opponents of the learned policies, in a league.

    Attributes:
        size: members of a pool, at most.
        load: loads a member.
        pool: that a run begins with, or goes on with.
        pack: returns a pool that has the policies of these members as data, too, for machines that
            may not see their directories; None: all see them.
    """

    size: int
    load: LoadMember
    pool: Pool
    pack: Callable[[Pool, Iterable[int]], Pool] | None = None


@dataclass(frozen=True)
class SamplingPlan:
    """Description of a run for all workers of a rank.

    Attributes:
        asynchronous: workers never stop, use the newest weights at each step, and the first
            finished fragments make a batch. Otherwise one version of the weights makes a whole
            batch: at lag 1, that of the update before the last.
        inference_device: device of the inference server; None: each worker computes its actions.
    """

    maker: EnvMaker
    spec: EnvSpec
    policies: Mapping[str, PolicyPlan]  # in the order of their agents' ids; or of sides
    num_steps: int  # T
    num_envs: int  # N, of this rank
    first_env: int  # the index over all ranks of the first of them
    envs_per_vector: int  # n
    seed: int
    reseed_episodes: bool
    replay_limit_s: float
    threads_per_worker: int
    # asynchronous: batches that may wait for the learner; else the age of the weights, in updates
    lag: int = 0
    asynchronous: bool = False
    inference_device: torch.device | None = None
    guards: Guards = GUARDS
    env_changes: Changes = ()  # that a resumed run begins with
    timeline: bool = False  # keep what each process did when
    league: LeaguePlan | None = None

    def build_policies(self) -> dict[str, Policy]:
        """Build a copy of each policy. Weights that are pulled replace its own."""
        return {policy.policy or name: policy.build() for name, policy in self.policies.items()}

    @property
    def acting(self) -> list[str]:
        """The name of the policy that acts for each entry of `policies`."""
        return [policy.policy or name for name, policy in self.policies.items()]

    @property
    def env_steps_per_fragment(self) -> int:
        """Env steps of a fragment of one vector."""
        return self.num_steps * self.envs_per_vector

    @property
    def layouts(self) -> list[dict[str, Column]]:
        """Arrays of the fragments of one vector, one of each policy."""
        return [
            columns(
                policy.spec,
                policy.stored_outputs,
                self.num_steps,
                self.envs_per_vector * policy.agents.size,
                policy.network.state_size,
            )
            for policy in self.policies.values()
        ]

    @property
    def parts(self) -> tuple[Agents, ...]:
        """The agents of each policy."""
        return tuple(policy.agents for policy in self.policies.values())

    @property
    def owners(self) -> tuple[Agents, ...]:
        """All agents of the policy that each entry of `policies` has."""
        return tuple(policy.owner or policy.agents for policy in self.policies.values())

    @property
    def league_size(self) -> int:
        """Members of a pool, at most; 0: there is no league."""
        return self.league.size if self.league else 0

    def action_noise(self, env_id: Array, first_step: int, num_draws: Sequence[int]) -> list[Array]:
        """Draw the noise of one fragment of each policy, `[T, n * agents, draws]`.

        Args:
            env_id: `[n]`, of the vector.
            first_step: steps that each env has taken before.
            num_draws: of each policy.
        """
        return [
            action_noise(
                self.seed, part.ids(env_id, self.spec.num_agents), first_step, self.num_steps, draws
            )
            for part, draws in zip(self.parts, num_draws, strict=True)
        ]

    @property
    def num_vectors(self) -> int:
        """Number of vectors of the rank."""
        return self.num_envs // self.envs_per_vector

    @property
    def num_buffers(self) -> int:
        """Number of buffers of each vector; each holds one fragment."""
        return 1 + self.lag if self.asynchronous else 1

    @property
    def vectors(self) -> range:
        """Indices of the rank's vectors, over all ranks: v has envs `v * n .. (v + 1) * n - 1`."""
        first = self.first_env // self.envs_per_vector
        return range(first, first + self.num_vectors)


LEAGUE_WINDOW = 1000
"""Episodes of a batch that a league counts, the last ones: the same ones wherever games are played,
and no more than Python counts in a moment."""

WINDOW = 100
"""`mean_return` is the mean of so many finished episodes, the last ones."""


@dataclass
class Collected:
    """One batch."""

    # Of each vector, in order, one of each policy; asynchronous: of those that were the first
    fragments: list[Fragment]
    env_steps: int
    episodes: list[Episode] = field(default_factory=list)  # that ended, at least the last `WINDOW`
    metrics: dict[str, float] = field(default_factory=dict)
    agent_steps: int = 0  # where agents are not environments
    num_episodes: int | None = None  # that ended; None: `episodes` has all


Say = Callable[[str], None]
"""Receives what the user should know."""
ShouldStop = Callable[[], bool]
"""Asked between two steps: give up the fragment under way?"""
_MOST_DROPS_SHOWN = 20


@dataclass
class Ledger:
    """Counts of collected env steps: learned from, lost, or collected again."""

    collected: int = 0
    lost: int = 0  # unfinished when the run stopped, or of a lost worker
    remade: int = 0  # of a lost worker, and taken again to the bit
    restarts: int = 0  # processes started in the place of lost ones
    dropped_episodes: int = 0  # whose environment failed

    def count(self, taken: int, lost: int, *, whole: bool) -> None:
        """Count a result's env steps; `lost` of them failed, or all of them if it is not whole."""
        self.collected += taken
        self.lost += lost if whole else taken

    def drop(self, episodes: list[str], say: Say) -> None:
        """Count dropped episodes, each described by a line. Show the first of the run."""
        for line in episodes:
            self.dropped_episodes += 1
            if self.dropped_episodes <= _MOST_DROPS_SHOWN:
                say(f"An episode was dropped: {line}")
            if self.dropped_episodes == _MOST_DROPS_SHOWN:
                say("Further dropped episodes are counted, but not shown.")

    def __add__(self, other: "Ledger") -> "Ledger":
        return Ledger(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Ledger)))


class Collector(abc.ABC):
    """Steps the envs of a rank for T steps at a time, with the weights that were published.

    Args:
        stop: called between two steps; returns True to give up.
        say: receives messages for the user, such as on dropped episodes.

    Attributes:
        restored: how the episodes came back that were under way when the run was saved.
    """

    def __init__(self, plan: SamplingPlan, stop: ShouldStop, say: Say = lambda text: None) -> None:
        self._plan, self._stop, self._say = plan, stop, say
        self.ledger, self.restored = Ledger(), Restored()
        self._env_changes = plan.env_changes
        self._pool = plan.league.pool if plan.league else None

    @abc.abstractmethod
    def publish(self, policies: Mapping[str, Policy], version: int) -> None:
        """Hand out weights: at lag 0, those for the next batch."""

    def change_envs(self, changes: Changes) -> None:
        """Have all envs changed, each before the next fragment that is ordered of it.

        `changes` are all that are recorded; what an env has already is left out.
        """
        self._env_changes = changes

    def set_pool(self, pool: Pool) -> None:
        """Have opponents drawn from this pool in the next fragments that are ordered."""
        self._pool = pool

    @abc.abstractmethod
    def collect(self) -> Collected | None:
        """Return the next batch, valid until the next call; None: the run is to stop.

        Raises:
            EnvError: an environment failed.
            WorkerError: a worker was lost, and is not replaced.
        """

    def release_batch(self, *, more: bool) -> None:
        """Count the last batch, whose fragments are read. `more`: another will be collected.

        At lag 1 and above workers go on from here, while the batch is learned from.
        """
        return

    @abc.abstractmethod
    def discard_batch(self) -> None:
        """Count the last batch as lost: it is not learned from."""

    def halt(self) -> None:
        """Stop the workers, and count what they have as lost."""
        return

    @abc.abstractmethod
    def state(self) -> dict[str, Array]:
        """Return the state after the last batch that counts, as named arrays."""

    def timings(self) -> dict[str, Timings]:
        """Return what each worker and the inference server have measured, by name."""
        return {}

    @abc.abstractmethod
    def close(self) -> None:
        """End all workers. Raise EnvError if an environment failed in closing."""
