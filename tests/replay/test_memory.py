"""The memory of a replay buffer is asked for at the start."""

import pytest

import headrace
from headrace.errors import ConfigError
from headrace.replay.buffer import ReplayBuffer
from headrace.replay.memory import row_bytes
from tests.replay.test_buffer import SPEC


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_row_takes_what_the_buffer_takes(prioritized):
    rows = (64_000, 128_000)
    sizes = [ReplayBuffer(SPEC, size, 1, prioritized=prioritized) for size in rows]
    small, large = (sum(b.nbytes for b in each.buffers()) for each in sizes)
    expected = 64_000 * row_bytes(SPEC, prioritized=prioritized)
    assert large - small == pytest.approx(expected, rel=0.01)  # sums of 64 come on top


def test_more_than_the_machine_has_is_refused_in_words(tmp_path):
    with pytest.raises(
        ConfigError, match=r"(?s)needs [\d.]+ GB, \d+ bytes.*Use --replay-size \d+ or"
    ):
        headrace.train(
            "CartPole-v1", algo=headrace.DQN(replay_size=10**11), quiet=True,
            run_dir=tmp_path / "run",
        )  # fmt: skip
    assert not list(tmp_path.rglob("checkpoints"))
