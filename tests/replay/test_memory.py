"""The memory of a replay buffer is asked for at the start."""

import contextlib

import pytest
import torch

import headrace
from headrace.errors import ConfigError
from headrace.replay import memory
from headrace.replay.buffer import ReplayBuffer
from headrace.replay.memory import check_memory, row_bytes
from tests.replay.test_buffer import SPEC


@pytest.mark.parametrize(
    "more", [{}, {"prioritized": True}, {"hindsight": True}], ids=lambda more: str(*more)
)
def test_a_row_takes_what_the_buffer_takes(more):
    rows = (64_000, 128_000)
    sizes = [ReplayBuffer(SPEC, size, 1, **more) for size in rows]
    small, large = (sum(b.nbytes for b in each.buffers()) for each in sizes)
    expected = 64_000 * row_bytes(SPEC, **more)
    assert large - small == pytest.approx(expected, rel=0.01)  # sums of 64 come on top


@pytest.mark.more
def test_more_than_the_machine_has_is_refused_in_words(tmp_path):
    with pytest.raises(
        ConfigError, match=r"(?s)needs [\d.]+ GB, \d+ bytes.*Use --replay-size \d+ or"
    ):
        headrace.train(
            "CartPole-v1", algo=headrace.DQN(replay_size=10**11), quiet=True,
            run_dir=tmp_path / "run",
        )  # fmt: skip
    assert not list(tmp_path.rglob("checkpoints"))


def test_learners_of_one_machine_share_its_memory(monkeypatch):
    size, cpu = 10_000, torch.device("cpu")
    needed = size * row_bytes(SPEC)
    monkeypatch.setattr(memory, "available_bytes", lambda: int(0.9 * needed))
    with pytest.raises(ConfigError, match="GB of memory are free for each of 2 learners here"):
        check_memory(SPEC, size, cpu, prioritized=False, num_ranks=2, num_local=2)
    apart = check_memory(SPEC, size, cpu, prioritized=False, num_ranks=2)  # on two machines
    assert apart == needed // 2


@pytest.mark.parametrize("frozen", [{}, {"tagger": "random"}])
def test_the_buffers_of_several_policies_have_to_fit_together(monkeypatch, tmp_path, frozen):
    monkeypatch.setattr(memory, "available_bytes", lambda: 1_600_000)  # each takes 1.06 MB
    refused = pytest.raises(ConfigError, match="GB of memory are free")
    with contextlib.nullcontext() if frozen else refused:  # a frozen policy has no buffer
        headrace.train(
            "headrace/TagGridWorld-v0", algo=headrace.DQN(replay_size=10_000), frozen=frozen,
            num_envs=2, num_steps=4, total_env_steps=16, quiet=True,
            num_workers=0, run_dir=tmp_path / "run",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("size", "directory", "words"),
    [
        (1_000, "", ""),
        (3_000_000, "", r"0.1 GB of GPU memory.*Use --replay-size \d+ or less, or --device cpu"),
        (1_000, "/tmp", r"the learner is on cuda:1.*Use --replay-dir \"\""),
    ],
)
def test_on_a_gpu_its_memory_has_to_be_enough(monkeypatch, size, directory, words):
    """No GPU is needed to ask: it would answer so."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50_000_000, 10**11))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 12_000_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2_000_000)
    device = torch.device("cuda", 1)
    if not words:
        assert check_memory(SPEC, size, device, prioritized=False) == size * row_bytes(SPEC)
        half = check_memory(SPEC, size, device, prioritized=False, num_ranks=2, num_local=2)
        assert half == size // 2 * row_bytes(SPEC)
        with pytest.raises(ConfigError, match=r"and 0\.0 GB of GPU memory"):
            check_memory(SPEC, size, device, prioritized=False, taken=59_990_000)
        return
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        check_memory(SPEC, size, device, directory, prioritized=False)
    if not directory:
        words = rf"replay_size={2 * size}: the part of each of 2 learners needs.*{words}"
        with pytest.raises(ConfigError, match=f"(?s){words}"):
            check_memory(SPEC, 2 * size, device, prioritized=False, num_ranks=2, num_local=2)
