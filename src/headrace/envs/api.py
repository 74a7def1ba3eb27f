"""What a sampler needs of environments: a vector of them that writes into the caller's memory.

Left out: how one is made (`factory.py`) and stepped (`python_vector.py`).
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from headrace.batch import Fragment
from headrace.errors import EnvError
from headrace.spec import Array, EnvSpec


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


class VectorEnv(Protocol):
    """n environments that are stepped together and reset themselves.

    The caller owns the memory: `bind` names the fragment, whose row 0 of observations is then the
    current one; `step(t)` takes row t of actions, as the policy emitted them, and writes row t of
    rewards and ends and row t + 1 of observations, where an env that ended has already begun its
    next episode (Gymnasium's SAME_STEP); the true next observation of a truncated step goes to the
    final ones.

    Attributes:
        spec: what each env offers.
        env_id: `[n]`, the logical index of each.
        step_s: mean seconds per env step in the last fragment.
        dropped: episodes that were given up in the last fragment, each in a line; the row of each
            is not valid, if it was in a step.
        lost_steps: how many such rows there are.
    """

    spec: EnvSpec
    env_id: Array
    dropped: list[str]
    lost_steps: int

    @property
    def step_s(self) -> float:
        """See the attributes."""

    def bind(self, *fragments: Fragment) -> None:
        """Write into these from now on, one of each policy; their observation row 0 is filled."""

    def step(self, t: int) -> None:
        """Step all envs; raises EnvError."""

    def finish(self) -> list[Episode]:
        """The fragment is full: check it, and give the episodes that ended in it."""

    def state(self) -> dict[str, Array]:
        """Where the envs are, between two fragments: counts, and their own states if they have any.

        With observations and the actions of the episodes under way (`collectors/snapshots.py`) it
        is what `restore` takes.
        """

    def obs(self) -> dict[str, Array]:
        """The current observations, as `obs.KEY`."""

    def restore(self, state: dict[str, Array]) -> Restored:
        """Go on from there, before the first `bind`."""

    def start_after(self, num_steps: int) -> Restored:
        """Without a state: begin episodes that no run of `num_steps` steps can have had."""

    def close(self) -> None:
        """Close all envs."""


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


def in_a_line(error: EnvError) -> str:
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
    env: str,
    sampler: str,
    episode: int,
    seed: int | None,
    num_steps: int,
    action: Any = None,
) -> str:
    """Which env, which sampler, and where in its life: for messages.

    Args:
        env: its index and name.
        sampler: its name.
        episode: index of the episode.
        seed: of the reset that began it; None: that had none.
        num_steps: how many were taken in it.
        action: of the step under way; None: it is not in a step.
    """
    return (
        ("" if action is None else f"step {num_steps + 1} with action {action}, ")
        + f"env {env}, sampler {sampler}, episode {episode} "
        f"(reset seed {'none' if seed is None else seed}, {num_steps} steps so far)"
    )
