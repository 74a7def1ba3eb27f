"""The moves of a game in turns as transitions: `pack` against a plain loop over each column."""

from types import SimpleNamespace

import numpy as np
import pytest

from headrace.batch import each
from headrace.envs.games.moves import KeptMoves, pack
from tests.envs.games.turns_support import Moves, at, leaves, plain

NUM_STEPS, AGENTS = 24, 2
NEVER, ALWAYS = 0.0, 1.0
COLUMNS = (NEVER, 0.15, 0.4, 0.4, 0.7, 0.7, 0.9, ALWAYS, ALWAYS, 0.5)
"""How likely each agent moves in a step; two agents are in one game."""
CASES = {
    "one endless game": {"ends": 0.0, "cancels": 0.0},
    "long games": {"ends": 0.08, "cancels": 0.0},
    "short games": {"ends": 0.35, "cancels": 0.0},
    "cancelled games": {"ends": 0.1, "cancels": 0.12},
    "all of it, often": {"ends": 0.5, "cancels": 0.3},
}


def stepped(rng, ends, cancels, *, is_dict):
    """What a vector writes in `NUM_STEPS` steps, all of it different; and final observations."""
    num_columns = len(COLUMNS)
    shape = NUM_STEPS, num_columns
    cancelled = np.repeat(rng.random((NUM_STEPS, num_columns // AGENTS)) < cancels, AGENTS, 1)
    obs = rng.permutation((NUM_STEPS + 1) * num_columns * 2).reshape(NUM_STEPS + 1, num_columns, 2)
    obs = obs.astype(np.float32)
    rows = SimpleNamespace(
        obs={"a": obs, "b.0": obs[..., 0].astype(np.int64)} if is_dict else obs,
        action=rng.integers(0, 1000, (*shape, 3)),
        reward=(rng.integers(-8, 9, shape) / 8 * ~cancelled).astype(np.float32),
        terminated=(rng.random(shape) < ends / 2) & ~cancelled,
        truncated=(rng.random(shape) < ends / 2) & ~cancelled,
        valid=(rng.random(shape) < COLUMNS) & ~cancelled,
        policy_version=rng.integers(0, 1000, shape),
        stored_outputs={"value": rng.normal(size=shape).astype(np.float32)},
    )
    finals = [
        (int(t), int(c), leaves(each(lambda o, t=t, c=c: -1 - o[t, c], rows.obs)))
        for t, c in np.argwhere(rows.truncated & ~rows.terminated)
    ]
    return rows, finals, cancelled


def moves_one_by_one(rows, finals, cancelled):
    """Of each column, in order: its complete transitions, by a loop over its steps."""
    final_obs = {(t, c): plain(obs) for t, c, obs in finals}
    columns = []
    for c in range(rows.valid.shape[1]):
        done, move = [], None
        for t in range(rows.valid.shape[0]):
            if cancelled[t, c]:
                move = None
            if rows.valid[t, c]:
                now = at(rows.obs, t, c)
                if move is not None:
                    done.append(move | {"next_obs": now})
                move = {
                    "obs": now, "action": rows.action[t, c].tolist(),
                    "policy_version": int(rows.policy_version[t, c]),
                    "outputs": {"value": float(rows.stored_outputs["value"][t, c])},
                    "reward": 0.0, "terminated": False, "truncated": False,
                }  # fmt: skip
            if move is None:
                continue
            move["reward"] += float(rows.reward[t, c])
            move["terminated"] = bool(rows.terminated[t, c])
            move["truncated"] = bool(rows.truncated[t, c])
            if move["terminated"] or move["truncated"]:
                final = None if move["terminated"] else final_obs[t, c]
                done.append(move | {"next_obs": final})
                move = None
        columns.append(done)
    return columns


def part_of(rows, finals, cancelled, first, end):
    """Copies of some steps, as one fragment."""
    steps = slice(first, end)
    obs = each(lambda o: o[first : end + 1].copy(), rows.obs)
    of_steps = {
        name: each(lambda a: a[steps].copy(), array)
        for name, array in vars(rows).items()
        if name != "obs"
    }
    own = [(t - first, c, obs) for t, c, obs in finals if first <= t < end]
    return SimpleNamespace(obs=obs, **of_steps), own, cancelled[steps]


def packed(rows, finals, cancelled, length, *, is_saved):
    """Pack fragments of `length` steps, one after the other."""
    num_columns = rows.valid.shape[1]
    kept, result = KeptMoves(num_columns), Moves(num_columns)
    for first in range(0, NUM_STEPS, length):
        part, own, lost = part_of(rows, finals, cancelled, first, first + length)
        result.read(part, pack(part, kept, own, lost))
        if is_saved:
            state, kept = kept.state(num_columns // AGENTS), KeptMoves(num_columns)
            kept.restore({name: array.copy() for name, array in state.items()})
    return result


@pytest.mark.parametrize("length", [1, 2, 3, 8, NUM_STEPS])
@pytest.mark.parametrize("case", CASES)
def test_packed_moves_are_those_of_a_plain_loop(case, length):
    """Short fragments give those of a long one, also if what is kept is saved in between."""
    ended = cut = 0
    for seed in range(8):
        stream = stepped(np.random.default_rng(seed), **CASES[case], is_dict=seed % 2 == 1)
        result = packed(*stream, length, is_saved=seed % 3 == 0)
        expected = moves_one_by_one(*stream)
        result.assert_equal(expected)
        assert result.columns[0] == []
        assert sum(map(len, expected)) > NUM_STEPS
        ended += sum(of["terminated"] for column in expected for of in column)
        cut += result.cut
    assert (ended > 0) == (case != "one endless game")
    assert (cut > 0) == (length > 1)


def test_moves_of_a_game_that_is_dropped_are_not_kept():
    stream = stepped(np.random.default_rng(3), ends=0.0, cancels=0.0, is_dict=False)
    kept, moves = KeptMoves(len(COLUMNS)), Moves(len(COLUMNS))
    part, own, lost = part_of(*stream, 0, 8)
    moves.read(part, pack(part, kept, own, lost))
    assert kept.is_kept.tolist() == [False] + [True] * 9
    kept.drop(slice(2 * AGENTS, 3 * AGENTS))
    before = [len(column) for column in moves.columns]
    moves._waits.clear()  # the next game begins with another observation
    part, own, lost = part_of(*stream, 8, 16)
    moves.read(part, pack(part, kept, own, lost))
    rest = moves_one_by_one(*part_of(*stream, 8, 16))
    for c in (4, 5):
        gained = moves.columns[c][before[c] :]
        assert [move["obs"] for move in gained] == [move["obs"] for move in rest[c]]
        assert gained
