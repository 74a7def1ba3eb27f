"""What a sampler needs of environments: a vector of them that writes into the caller's memory.

Left out: how one is made (`factory.py`) and stepped (`python_vector.py`).
"""

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from headrace.batch import Fragment
from headrace.errors import EnvError
from headrace.meter import Meter
from headrace.seeding import derive
from headrace.spec import Agents, Array, EnvSpec


class Episode(NamedTuple):
    """One finished episode; sorted by when it ended, whoever stepped it.

    Attributes:
        ended_at: step of the fragment in which it ended, 0..T-1.
        env_id: logical index of its env.
        total_reward: undiscounted.
        num_steps: its length.
        by_policy: where several policies act, in their order: the mean over the agents of each;
            `total_reward` is then the mean over all agents.
    """

    ended_at: int
    env_id: int
    total_reward: float
    num_steps: int
    by_policy: tuple[float, ...] = ()


@dataclass(frozen=True)
class Guards:
    """What is done about environments that fail, and about samplers that are lost.

    Attributes:
        on_env_error: what an exception or a bad value leads to: the run's end, or a new episode.
        on_worker_loss: what death and silence lead to: another sampler, or the run's end.
        env_timeout_s: how long a step or reset may take; 0: by what is usual (`patience.limit`).
        max_restarts: of each sampler and each env, in 10 minutes.
        enabled: check what environments give, and watch for silence.
    """

    on_env_error: Literal["fail", "restart"] = "fail"
    on_worker_loss: Literal["fail", "restart"] = "restart"
    env_timeout_s: float = 0.0
    max_restarts: int = 3
    enabled: bool = True


GUARDS = Guards()


@dataclass
class Restored:
    """How the episodes under way came back after a resume, in numbers of envs."""

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
    """What every vector of environments is built with.

    Attributes:
        spec: what each environment offers to an agent.
        env_id: `[n]`, the logical index of each environment.
        seed: the run's seed, from which all of the environments' seeds are derived.
        meter: counts the time of steps and resets.
        role: `env` for training, `eval` for evaluation: their seeds differ.
        worker: the worker's name, for error messages; "" (kernel environments only): exceptions
            are raised as they are.
        guards: what to check, and what to do when an environment fails.
        reseed: seed every episode, so that it can be replayed. Otherwise only the first one.
        replay_limit_s: time limit for replaying unfinished episodes after a resume.
        parts: the agents whose rows each fragment holds; (): one fragment holds all agents.
        num_threads: threads of a compiled or native vector.
        last_episodes: `finish` returns at most so many episodes, the last ones; 0: all (vectors on
            the learner's device only).
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
    num_threads: int = 1
    last_episodes: int = 0

    def episode_seed(self, i: int, episode: int) -> int:
        """Return the seed of the reset that begins an episode of row i."""
        return derive(self.seed, self.role, int(self.env_id[i]), episode)

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

    The caller owns the memory. `bind` names the fragments to write into, one for each policy, and
    fills their row 0 of observations. `step(t)` takes row t of actions, as the policy emitted
    them, and writes row t of rewards and ends and row t + 1 of observations. Where an episode
    ended, that row is the next episode's first observation (Gymnasium's SAME_STEP). The true next
    observation of a truncated step goes to the final observations.

    Attributes:
        context: what it was built with.
        spec: what each env offers.
        env_id: `[n]`, the logical index of each.
        step_s: mean seconds per env step in the last fragment.
        dropped: a line for each episode that was dropped in the last fragment. If it was dropped
            in a step, that row is not valid.
        lost_steps: number of such rows.
    """

    def __init__(self, context: VectorContext) -> None:
        self.context, self.spec, self.env_id = context, context.spec, context.env_id
        self.dropped: list[str] = []
        self.step_s, self.lost_steps = 0.0, 0

    @abstractmethod
    def bind(self, *fragments: Fragment) -> None:
        """Write into these from now on; the very first time this resets all envs."""

    @abstractmethod
    def step(self, t: int) -> None:
        """Step all envs, and begin the next episode of those that ended.

        Raises:
            EnvError: an env failed or gave a bad value, and is not to be restarted.
        """

    @abstractmethod
    def finish(self) -> list[Episode]:
        """Check the full fragment, and return the episodes that ended in it.

        Raises:
            EnvError: an env gave NaN or infinity.
        """

    @abstractmethod
    def state(self) -> dict[str, Array]:
        """Return counts, and the envs' states if they have any, between two fragments.

        With observations and the actions of unfinished episodes (`collectors/snapshots.py`) it is
        what `restore` takes.
        """

    def obs(self) -> dict[str, Array]:
        """Return the current observations, as `obs.KEY`; {} if `restore` does not need them."""
        return {}

    @abstractmethod
    def restore(self, state: dict[str, Array]) -> Restored:
        """Continue from `state`, before the first `bind`."""

    @abstractmethod
    def start_after(self, num_steps: int) -> Restored:
        """Begin episodes with an index that no run of `num_steps` steps has reached."""

    @abstractmethod
    def close(self) -> None:
        """Close all envs.

        Raises:
            EnvError: closing one failed; the others are closed all the same.
        """


def close_all(envs: Sequence[Any], where: Callable[[int], str]) -> None:
    """Close all, whatever one of them does; then raise EnvError if one failed.

    Args:
        envs: what has a `close`.
        where: who the i-th of them is, in words.
    """
    failed = None
    for i, env in enumerate(envs):
        try:
            env.close()
        except Exception as error:
            failed = failed or env_error(error, f"while closing, {where(i)}")
    if failed is not None:
        raise failed


def env_error(error: BaseException, where: str) -> EnvError:
    """The environment's own traceback, without our frame that called it; then where it happened."""
    own = error.__traceback__.tb_next if error.__traceback__ else None
    lines = traceback.format_exception(type(error), error, own)
    return EnvError("".join(lines) + f"\nThe environment failed {where}.")


def summarize_error(error: EnvError) -> str:
    """An environment's failure, for a run that goes on: what, at which line of code, and where."""
    raised, has_traceback, where = str(error).rpartition("\n\n")
    if not has_traceback:
        return " ".join(str(error).splitlines())
    lines = raised.splitlines()
    places = [line.strip() for line in lines if line.startswith("  File ")]
    return f"{lines[-1]} ({places[-1]}). {where}" if places else f"{lines[-1]}. {where}"


_FIELDS = {
    "reset": ("observation", "info"),
    "step": ("observation", "reward", "terminated", "truncated", "info"),
}


def check_fields(method: str, result: Any, where: str) -> None:
    """Raise EnvError unless `result` is what Gymnasium's `reset` or `step` returns."""
    fields = _FIELDS[method]
    if not isinstance(result, tuple | list) or len(result) != len(fields):
        length = f" of {len(result)}" if isinstance(result, tuple | list) else ""
        raise EnvError(
            f"{method} returned a {type(result).__name__}{length}; expected "
            f"({', '.join(fields)}) ({where}).\n"
            "Environments of Gym before 0.26 returned less: see "
            "https://gymnasium.farama.org/introduction/migration_guide/"
        )
    if method == "step" and (result[1] is None or np.ndim(result[1]) != 0):
        raise EnvError(f"step returned the reward {result[1]!r}; expected a number ({where}).")


def describe_position(
    env: str, worker: str, episode: int, seed: int | None, num_steps: int, action: Any = None
) -> str:
    """Describe an env's position for messages.

    Args:
        env: its index and name.
        worker: the worker's name.
        episode: index of the episode.
        seed: of the reset that began it; None: it had none.
        num_steps: steps taken in it so far.
        action: of the current step; None: outside of a step.
    """
    return (
        ("" if action is None else f"step {num_steps + 1} with action {action}, ")
        + f"env {env}, {worker}, episode {episode} "
        f"(reset seed {'none' if seed is None else seed}, {num_steps} steps so far)"
    )
