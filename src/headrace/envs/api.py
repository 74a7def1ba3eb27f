"""The interface of a vector of environments, and messages about environments that fail."""

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from headrace.batch import Fragment
from headrace.envs.changes import Changes
from headrace.envs.games.seats import Pool, Seats
from headrace.errors import EnvError
from headrace.meter import Meter
from headrace.seeding import derive
from headrace.spec import Agents, Array, EnvSpec


class Episode(NamedTuple):
    """One finished episode; episodes sort by the step in which they ended.

    Attributes:
        ended_at: step of the fragment in which it ended, 0..T-1.
        by_policy: the mean over each policy's agents, where several policies act; `total_reward`
            is then the mean over all agents.
        match: in a league, against a member: its id, the side that was learned from, and the score
            of that side (`seats.score`).
    """

    ended_at: int
    env_id: int
    total_reward: float
    num_steps: int
    by_policy: tuple[float, ...] = ()
    match: tuple[float, ...] = ()


@dataclass(frozen=True)
class Guards:
    """Checks of environments and workers, and reactions to their failures.

    Attributes:
        on_env_error: what follows an exception or a bad value: the run's end, or a new episode.
        env_timeout_s: time limit of a step or reset; 0: chosen by `timeouts.step_timeout`.
        max_restarts: of each worker and each env, in 10 minutes.
        enabled: check what environments return, and watch for hangs.
    """

    on_env_error: Literal["fail", "restart"] = "fail"
    on_worker_loss: Literal["fail", "restart"] = "restart"
    env_timeout_s: float = 0.0
    max_restarts: int = 3
    enabled: bool = True


GUARDS = Guards()


@dataclass
class Restored:
    """Counts of envs by how their unfinished episodes were restored after a resume."""

    set_state: int = 0
    replayed: int = 0
    new_episode: int = 0

    def add(self, other: "Restored") -> None:
        """Count another vector's envs as well."""
        self.set_state += other.set_state
        self.replayed += other.replayed
        self.new_episode += other.new_episode


@dataclass(frozen=True, eq=False)
class VectorContext:
    """Arguments that every vector of environments is built with.

    Attributes:
        env_id: `[n]`, the logical index of each environment.
        seed: the run's seed.
        role: `env` for training, `eval` for evaluation: their seeds differ.
        worker: for error messages; "" (kernel environments only): exceptions are raised as is.
        reseed: seed every episode, so that it can be replayed, or only the first one.
        replay_limit_s: for replaying unfinished episodes after a resume.
        parts: the agents whose rows each fragment holds; (): one fragment holds all agents.
        owners: of each fragment, all agents of its policy, where several fragments share one; ():
            the parts.
        league_size: in a league, members of a pool at most; the parts are the sides. 0: none.
        num_threads: of a compiled or native vector.
        last_episodes: `finish` of a `DeviceVector` returns only so many, the last ones; 0: all.
    """

    spec: EnvSpec
    env_id: Array
    seed: int
    meter: Meter = field(default_factory=Meter)
    role: str = "env"
    worker: str = "inline"
    guards: Guards = GUARDS
    reseed: bool = True
    replay_limit_s: float = 30.0
    parts: tuple[Agents, ...] = ()
    owners: tuple[Agents, ...] = ()
    league_size: int = 0
    num_threads: int = 1
    last_episodes: int = 0

    def episode_seed(self, i: int, episode: int) -> int:
        """Return the seed of the reset that begins an episode of row i."""
        return derive(self.seed, self.role, int(self.env_id[i]), episode)

    def all_parts(self) -> tuple[Agents, ...]:
        """Return the agents of each fragment."""
        return self.parts or (Agents(0, self.spec.num_agents),)

    def row_ids(self, i: int) -> Array:
        """Return the index of each row of fragment i among the rows of its policy in the run."""
        part = self.all_parts()[i]
        owner = self.owners[i] if self.owners else part
        return Agents(part.first - owner.first, part.size).ids(self.env_id, owner.size)

    def seats(self, device: Any = None) -> Seats | None:
        """Return who plays which side of the games; None without a league."""
        if not self.league_size:
            return None
        parts = self.all_parts()
        return Seats(self.seed, self.env_id, parts, self.league_size, device)

    def returns_of(self, by_part: Array) -> tuple[float, tuple[float, ...]]:
        """Return an episode's mean over all agents, and over those of each of several policies.

        Args:
            by_part: `[parts]`, means over the agents of each.
        """
        parts = self.all_parts()
        sizes = np.array([part.size for part in parts])
        total = float(np.average(by_part, weights=sizes))
        owners = self.owners or parts
        each = dict.fromkeys(owners)
        if len(each) < 2:
            return total, ()
        of = [np.array([owner == other for other in owners]) for owner in each]
        return total, tuple(float(np.average(by_part[i], weights=sizes[i])) for i in of)

    def describe_all(self) -> str:
        """Name all environments and the worker, for messages."""
        first, last = self.env_id[[0, -1]]
        return f"envs {first} to {last} of {self.spec.id}, {self.worker}"

    def describe(
        self, i: int, episode: int, num_steps: int, seed: int | None, action: Any = None
    ) -> str:
        """Describe row i and its position in an episode, for messages."""
        env = f"{self.env_id[i]} of {self.spec.id}"
        return describe_position(env, self.worker, episode, seed, num_steps, action)


class VectorEnv(ABC):
    """n environments that are stepped together and reset themselves.

    The caller owns the memory. `step(t)` takes row t of actions, as the policy emitted them, and
    writes row t of rewards and ends and row t + 1 of observations. Where an episode ended, that row
    is the next episode's first observation (Gymnasium's SAME_STEP). The true next observation of a
    truncated step goes to the final observations.

    Attributes:
        step_s: mean seconds per env step in the last fragment.
        dropped: a line for each episode that was dropped in the last fragment.
        lost_steps: rows that are not valid because an episode was dropped.
        seats: who plays which side, in a league.
    """

    def __init__(self, context: VectorContext) -> None:
        self.context, self.spec, self.env_id = context, context.spec, context.env_id
        self.dropped: list[str] = []
        self.step_s, self.lost_steps = 0.0, 0
        self.seats: Seats | None = None

    def set_pool(self, pool: Pool | None) -> None:
        """Draw opponents of the episodes that begin from now on from this pool, in a league."""
        if self.seats is not None and pool is not None:
            self.seats.set_pool(pool)

    def change(self, changes: Changes) -> None:
        """Carry out the changes that an env does not have yet, between two fragments.

        Before the first `bind`, `restore` or `start_after` they come before the first reset.
        Only `GymVector` has single environments, and gets any.

        Raises:
            EnvChangeError: an env cannot be changed so.
        """
        assert not changes, changes

    @abstractmethod
    def bind(self, *fragments: Fragment) -> None:
        """Write into these fragments, one for each policy, and fill row 0 of their observations.

        The first call resets all envs.
        """

    @abstractmethod
    def step(self, t: int) -> None:
        """Step all envs, and begin the next episode where one ended; EnvError if an env fails."""

    def acting(self) -> Array:
        """Return `[n, agents]` bool: whose actions the next step asks for."""
        return np.ones((len(self.env_id), self.spec.num_agents), bool)

    def count_env_steps(self, num_steps: int) -> int:
        """Return the env steps in the first rows of the fragment, without those that failed."""
        return num_steps * len(self.env_id)

    @abstractmethod
    def finish(self) -> list[Episode]:
        """Return the episodes that ended in the full fragment; EnvError for NaN and infinity."""

    @abstractmethod
    def state(self) -> dict[str, Array]:
        """Return counts, and the envs' states if they have any, between two fragments.

        `restore` takes it, with observations and actions of unfinished episodes added.
        """

    def obs(self) -> dict[str, Array]:
        """Return the current observations, as `obs.KEY`; {} if `restore` does not need them."""
        return {}

    def restore(self, state: dict[str, Array]) -> Restored:
        """Continue from `state` before the first `bind`; by default with new episodes."""
        return self.start_after(state["episode"])

    @abstractmethod
    def start_after(self, episode: int | Array) -> Restored:
        """Begin episodes with an index above `episode`, which earlier ones cannot have."""

    @abstractmethod
    def close(self) -> None:
        """Close all envs, even if closing one fails; then raise its EnvError."""


def close_all(envs: Sequence[Any], describe: Callable[[int], str]) -> None:
    """Close all, even if one fails; then raise EnvError, with `describe` of its index."""
    failed = None
    for i, env in enumerate(envs):
        try:
            env.close()
        except Exception as error:
            failed = failed or env_error(error, f"while closing, {describe(i)}")
    if failed is not None:
        raise failed


class explain_errors:  # noqa: N801  # as contextlib's own
    """Context in which an exception becomes an EnvError; `position` says where it was."""

    def __init__(self, position: str | Callable[[], str]) -> None:
        self._position = position

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception | SystemExit) and not isinstance(error, EnvError):
            position = self._position if isinstance(self._position, str) else self._position()
            raise env_error(error, position) from error


def env_error(error: BaseException, position: str) -> EnvError:
    """Return the environment's traceback, without our frame that called it, and the position."""
    traceback_ = error.__traceback__.tb_next if error.__traceback__ else None
    lines = traceback.format_exception(type(error), error, traceback_)
    hint = ""
    if isinstance(error, TypeError) and "unexpected keyword argument 'seed'" in str(error):
        hint = "\nExpected a reset as Gymnasium's: def reset(self, *, seed=None, options=None)."
    return EnvError("".join(lines) + f"\nThe environment failed {position}.{hint}")


def summarize_error(error: EnvError) -> str:
    """Return a failure in one line: the exception, its line of code, and the position."""
    raised, has_traceback, position = str(error).rpartition("\n\n")
    if not has_traceback:
        return " ".join(str(error).splitlines())
    lines = raised.splitlines()
    places = [line.strip() for line in lines if line.startswith("  File ")]
    return f"{lines[-1]} ({places[-1]}). {position}" if places else f"{lines[-1]}. {position}"


_FIELDS = {
    "reset": ("observation", "info"),
    "step": ("observation", "reward", "terminated", "truncated", "info"),
}


def check_fields(
    method: str, result: Any, position: Callable[[], str], *, reward: bool = True
) -> None:
    """Raise EnvError unless `result` is what Gymnasium's `reset` or `step` returns.

    `reward`: check that the reward is one number, and not one for each agent.
    """
    fields = _FIELDS[method]
    if not isinstance(result, tuple | list) or len(result) != len(fields):
        raise EnvError(
            f"{method} returned {describe_result(result)}; expected "
            f"({', '.join(fields)}) ({position()}).\n"
            "Environments of Gym before 0.26 returned less: see "
            "https://gymnasium.farama.org/introduction/migration_guide/"
        )
    if method == "step" and reward:
        check_reward(result[1], position)


def describe_result(result: Any) -> str:
    """Return what a method returned, in words, where several values were expected."""
    kind = type(result).__name__
    if isinstance(result, tuple | list):
        return f"a {kind} of {len(result)}"
    return f"an object of class {kind}"


def check_reward(reward: Any, position: Callable[[], str]) -> None:
    """Raise EnvError unless a reward is a number, or an array or list of one number."""
    if reward is None or np.asarray(reward).size != 1:
        raise EnvError(
            f"step returned the reward {reward!r}; expected one number ({position()}).\n"
            "If it has several parts, let a wrapper add them up, such as "
            "gymnasium.wrappers.TransformReward."
        )


def describe_position(
    env: str, worker: str, episode: int, seed: int | None, num_steps: int, action: Any = None
) -> str:
    """Describe an env's position; `seed` is that of the episode's reset."""
    return (
        ("" if action is None else f"step {num_steps + 1} with action {action}, ")
        + f"env {env}, {worker}, episode {episode} "
        f"(reset seed {'none' if seed is None else seed}, {num_steps} steps so far)"
    )
