"""What a sampler needs of environments: a vector of them that writes into the caller's memory.

Left out: how one is made (`make.py`) and stepped (`gym.py`).
"""

import traceback
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

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
    """

    ended_at: int
    env_id: int
    total_reward: float
    num_steps: int


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
    current one; `step(t, ...)` writes row t of rewards and ends and row t + 1 of observations,
    where an env that ended has already begun its next episode (Gymnasium's SAME_STEP); the true
    next observation of a truncated step goes to the final ones.

    A fragment counts once `commit` is called. `state` describes the last commit even if steps were
    taken since: they belong to a fragment that may yet be given up.
    """

    spec: EnvSpec
    env_id: Array

    def bind(self, fragment: Fragment) -> None:
        """Write into `fragment` from now on; its observation row 0 is filled."""

    def step(self, t: int, action: Array) -> None:
        """Step all envs with `[n, ...]` actions of the policy; raises EnvError."""

    def finish(self) -> list[Episode]:
        """The fragment is full: check it, and give the episodes that ended in it."""

    def commit(self) -> None:
        """The fragment counts: `state` is now that of its end."""

    def state(self) -> dict[str, Array]:
        """Everything needed to go on from the last commit, as named arrays."""

    def restore(self, state: dict[str, Array]) -> Restored:
        """Go on from `state`, before the first `bind`."""

    def start_after(self, num_steps: int) -> Restored:
        """Without a state: begin episodes that no run of `num_steps` steps can have had."""

    def close(self) -> None:
        """Close all envs."""


def env_error(error: BaseException, where: str) -> EnvError:
    """The environment's own traceback, without our frame that called it; then where it happened."""
    own = error.__traceback__.tb_next if error.__traceback__ else None
    lines = traceback.format_exception(type(error), error, own)
    return EnvError("".join(lines) + f"\nThe environment failed {where}.")


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
