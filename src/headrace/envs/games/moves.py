"""The moves of a game in turns as transitions: rows without a move are taken out of a fragment.

While a vector steps, row t has what happened in step t: who moved (`valid`), what each agent was
paid, whose episode ended. An agent's transition goes from one of its moves to its next one: it has
all rewards in between, and the observation at the next move follows it. So the moves of each column
go to its first rows, one after the other. The last move of a column waits, until the agent moves
again or its episode ends: it is kept for the next fragment. The rest of a column is not valid, and
repeats the observation at which it goes on.
"""

from typing import Any

import numpy as np

from headrace.batch import select
from headrace.envs.spaces.obs_reader import leaf
from headrace.spec import Array

Finals = list[tuple[int, int, dict[str, Array]]]
"""(step, column, observation) of truncated transitions."""
_PREFIX = "kept."


class KeptMoves:
    """The last move of each of C columns, if it is not in a fragment yet: row 0 of its arrays.

    Attributes:
        is_kept: `[C]` bool.
        reward, terminated, truncated: `[C]`, of it so far. One that has ended found no room.
        columns: its entries in the fragment's columns, `[C, ...]`; {}: none was kept yet.
        final: observations of kept transitions that were truncated, by column.
    """

    def __init__(self, num_columns: int) -> None:
        self.is_kept = np.zeros(num_columns, bool)
        self.reward = np.zeros(num_columns)
        self.terminated, self.truncated = self.is_kept.copy(), self.is_kept.copy()
        self.columns: dict[str, Array] = {}
        self.final: dict[int, dict[str, Array]] = {}

    def take(
        self, moves: "_Moves", by_move: dict[str, Array], final: dict[int, dict[str, Array]]
    ) -> None:
        """Keep the last move of each column that found no place in the fragment."""
        self.is_kept[:] = moves.is_kept
        self.reward[:] = moves.of_last(moves.reward)
        self.terminated[:] = moves.of_last(moves.terminated)
        self.truncated[:] = moves.of_last(moves.truncated)
        self.columns = {name: moves.of_last(array).copy() for name, array in by_move.items()}
        self.final = final

    def drop(self, columns: slice) -> None:
        """Forget the moves of these columns."""
        self.is_kept[columns] = False

    def state(self, num_envs: int) -> dict[str, Array]:
        """Return all as named arrays, `[num_envs, ...]`; {} if nothing was kept yet."""
        if not self.columns:
            return {}
        final = {key: np.zeros_like(o) for key, o in select(self.columns, "obs.").items()}
        for column, obs in self.final.items():
            for key, array in obs.items():
                final[key][column] = array
        named = {
            "is_kept": self.is_kept, "reward": self.reward, "terminated": self.terminated,
            "truncated": self.truncated,
            **{f"columns.{name}": array for name, array in self.columns.items()},
            **{f"final.{key}": array for key, array in final.items()},
        }  # fmt: skip
        of_envs = {k: a.reshape(num_envs, -1, *a.shape[1:]).copy() for k, a in named.items()}
        return {_PREFIX + name: array for name, array in of_envs.items()}

    def restore(self, state: dict[str, Array]) -> None:
        """Undo `state`."""
        named = {k: a.reshape(-1, *a.shape[2:]) for k, a in select(state, _PREFIX).items()}
        if not named:
            return
        for name in ("is_kept", "reward", "terminated", "truncated"):
            getattr(self, name)[:] = named[name]
        self.columns = select(named, "columns.")
        final = select(named, "final.")
        has_final = self.is_kept & self.truncated & ~self.terminated
        self.final = {
            column: {key: array[column] for key, array in final.items()}
            for column in np.flatnonzero(has_final).tolist()
        }


class _Moves:
    """Which row of a fragment belongs to which move of its column, from what the vector wrote.

    Row 0 of `[T + 1, C]` has what was kept, row t + 1 the fragment's row t. Move j of a column is
    at j in arrays "by move", `[T + 1, C]`.

    Attributes:
        number: `[T + 1, C]`: the last move before the row's end; -1: none.
        belongs: `[T + 1, C]` bool: what the row has is that move's. What comes after an episode's
            end, and before the agent's next move, belongs to none.
        count: `[C]`, moves of each column.
        source: by move: the row that it was made in; beyond the last one the last one's again.
    """

    def __init__(self, rows: Any, kept: KeptMoves, cancelled: Array) -> None:
        num_steps, num_columns = rows.reward.shape
        none, steps = np.zeros((1, num_columns), bool), np.arange(num_steps + 1)[:, None]
        moved = np.concatenate([kept.is_kept[None], rows.valid])
        terminated = np.concatenate([(kept.terminated & kept.is_kept)[None], rows.terminated])
        truncated = np.concatenate([(kept.truncated & kept.is_kept)[None], rows.truncated])
        lost = np.concatenate([none, cancelled])
        reward = np.concatenate([(kept.reward * kept.is_kept)[None], rows.reward], dtype=np.float64)
        ends = (terminated | truncated | lost).astype(np.int64)
        ends_before = ends.cumsum(0) - ends
        moved_at = np.maximum.accumulate(np.where(moved, steps, -1))
        self.number: Array = moved.cumsum(0) - 1
        self.belongs: Array = (self.number >= 0) & (
            ends_before == np.take_along_axis(ends_before, moved_at, 0)
        )
        self.count: Array = self.number[-1] + 1
        self.column = np.arange(num_columns)
        self.last: Array = np.maximum(self.count - 1, 0)
        order = np.argsort(~moved, 0, kind="stable")
        self.source: Array = np.take_along_axis(order, np.minimum(steps, self.last), 0)
        self.reward = self._summed(reward)
        self.terminated, self.truncated = self._summed(terminated) > 0, self._summed(truncated) > 0
        self.lost = self._summed(lost) > 0
        has_ended = self.of_last(self.terminated | self.truncated | self.lost)
        whole = self.count - ((self.count > 0) & ~has_ended)
        # Of one that was kept, and of T others, one finds no room.
        self.num_whole: Array = np.minimum(whole, num_steps)
        self.valid: Array = (steps < self.num_whole) & ~self.lost
        self.is_kept: Array = (self.count > 0) & (self.num_whole < self.count)

    def of_last(self, by_move: Array) -> Array:
        """Return the entry of each column's last move."""
        return by_move[self.last, self.column]

    def _summed(self, values: Array) -> Array:
        """Return, by move, the sum of what belongs to it."""
        place = self.number * len(self.column) + self.column
        there = self.belongs
        total = np.bincount(place[there], values[there].astype(np.float64), values.size)
        return total.reshape(values.shape)

    def gathered(self, rows: Any, kept: KeptMoves) -> dict[str, Array]:
        """Return the columns of a fragment by move."""
        columns = {"action": rows.action, "policy_version": rows.policy_version}
        columns |= {f"stored_outputs.{name}": array for name, array in rows.stored_outputs.items()}
        obs = rows.obs if isinstance(rows.obs, dict) else {"": rows.obs}
        columns |= {f"obs.{key}": array[:-1] for key, array in obs.items()}
        return {
            name: np.concatenate([kept.columns.get(name, array[0])[None], array])[
                self.source, self.column
            ]
            for name, array in columns.items()
        }

    def finals(self, kept: KeptMoves, finals: Finals) -> dict[tuple[int, int], dict[str, Array]]:
        """Return final observations by (move, column)."""
        found = {(0, c): obs for c, obs in kept.final.items() if kept.is_kept[c]}
        for step, c, obs in finals:
            if self.belongs[step + 1, c]:
                found[int(self.number[step + 1, c]), c] = obs
        return found


def pack(rows: Any, kept: KeptMoves, finals: Finals, cancelled: Array) -> Finals:
    """Move the moves of a full fragment to its first rows, and keep each column's last one.

    Args:
        rows: the fragment's columns as arrays, `[T, C, ...]`, as the vector wrote them.
        kept: of the fragment before; of this one afterwards.
        finals: of agents whose episodes were truncated, by step.
        cancelled: `[T, C]` bool: the game was dropped in this step. A move that waited then is
            none.

    Returns:
        The final observations of the packed fragment: those of truncated transitions, and the
        observation of the next move where a column is cut off.
    """
    moves = _Moves(rows, kept, cancelled)
    by_move = moves.gathered(rows, kept)
    found, last = moves.finals(kept, finals), moves.last
    waiting = {c: (int(last[c]), c) for c in np.flatnonzero(moves.is_kept).tolist()}
    kept_finals = {c: found.pop(place) for c, place in waiting.items() if place in found}
    found = {place: obs for place, obs in found.items() if moves.valid[place]}

    # A transition whose next row is none is cut off there.
    valid = moves.valid[:-1]
    goes_on = valid & ~(moves.terminated | moves.truncated)[:-1]
    cut = goes_on & ~moves.valid[1:]
    cut[-1] = False  # what follows the last row is the first of the next fragment
    obs = select(by_move, "obs.")
    for j, c in np.argwhere(cut).tolist():
        found[j, c] = {key: array[j + 1, c] for key, array in obs.items()}

    for key, array in obs.items():
        leaf(rows.obs, key)[...] = array
    for name in ("action", "policy_version"):
        getattr(rows, name)[...] = by_move[name][:-1]
    for name, array in select(by_move, "stored_outputs.").items():
        rows.stored_outputs[name][...] = array[:-1]
    rows.valid[...] = valid
    rows.reward[...] = np.where(valid, moves.reward[:-1], 0.0)
    rows.terminated[...] = valid & moves.terminated[:-1]
    rows.truncated[...] = (valid & moves.truncated[:-1]) | cut | moves.lost[:-1]
    kept.take(moves, by_move, kept_finals)
    return [(j, c, o) for (j, c), o in sorted(found.items(), key=lambda item: item[0])]
