"""The rows of a replay buffer on disk: written once, shared by checkpoints, read to the bit."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

import headrace
from headrace.distributed.ranks import SINGLE_RANK
from headrace.errors import CheckpointError
from headrace.replay.buffer import ReplayBuffer
from headrace.storage import checkpoint
from headrace.storage.row_log import RowLog, prune_rows, read_rows
from tests.replay.test_buffer import Frames, N, Stream
from tests.support import saved_rows, short_cartpole

ALGO = headrace.DQN(learning_starts=100, replay_size=300, replay_ratio=0.1, priority_alpha=0.5)
SETTINGS = {
    "algo": ALGO, "num_envs": 4, "num_steps": 16, "envs_per_vector": 2, "seed": 5, "quiet": True,
    "num_workers": 0, "schedule_env_steps": 960,
}  # fmt: skip


def again(buffer, kind, folder, entries):
    """Another buffer with the saved state and rows."""
    other = ReplayBuffer(kind.spec, 40 * N, N)
    small = {k: t.clone() for k, t in buffer.state_dict().items() if k not in buffer.columns}
    missing = other.load_state_dict(small, strict=False)
    assert set(missing.missing_keys) == buffer.columns
    read_rows(folder, entries, other)
    other.mark_saved()
    return other


@pytest.mark.parametrize("kind", [Stream, Frames])
def test_what_is_read_is_what_was_kept(tmp_path, kind):
    stream, buffer = kind(3), ReplayBuffer(kind.spec, 40 * N, N)
    log = RowLog(tmp_path, "rows", buffer, [])
    written = 0
    for save in range(12):
        for _ in range((1, 2, 30)[save % 3]):  # 30 batches are more than it keeps
            buffer.insert(stream.fragment())
        files, least = log.collect(SINGLE_RANK)
        entries = log.write(files, least, save)
        if save == 4:
            continue  # as if the disk had been full: the next one has these rows as well
        log.mark_saved(entries)
        prune_rows(tmp_path, [{"rows": {"rows": entries}}])
        other = again(buffer, kind, tmp_path, entries)
        for name, tensor in buffer.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name
        assert len(list((tmp_path / "rows").iterdir())) == len(entries) <= 4
        written += len(files[0])
        if save == 7:  # a resumed run goes on writing what is new
            buffer = other
            log = RowLog(tmp_path, "rows", buffer, entries)


def test_rows_are_written_once(tmp_path):
    stream, buffer = Stream(1, p_end=0.0), ReplayBuffer(Stream.spec, 4_000 * N, N)
    log, sizes = RowLog(tmp_path, "rows", buffer, []), []
    for save in range(6):
        for _ in range(40):
            buffer.insert(stream.fragment())
        files, least = log.collect(SINGLE_RANK)
        sizes.append(len(files[0]))
        assert least == 40 * 5
        log.mark_saved(log.write(files, least, save))
    assert max(sizes) < 1.1 * min(sizes)


def train(path, total, **more):
    settings = SETTINGS | more
    return headrace.train(short_cartpole, run_dir=path, total_env_steps=total, **settings)


def everything(path):
    saved = checkpoint.newest(path)
    tensors = saved.tensors("policy_default") | saved.tensors("learner_default")
    return tensors | saved_rows(path)


SCRIPT = """
import os, signal, sys
import tests.storage.test_row_log as t
if __name__ == "__main__":
    kill = lambda update, _: os.kill(os.getpid(), signal.SIGKILL) if update == 9 else None
    t.train(sys.argv[1], 960, checkpoint_every_s=0.0, keep=2, on_update=kill)
"""


@pytest.mark.more
def test_a_run_that_is_killed_goes_on_to_the_bit(tmp_path):
    train(tmp_path / "whole", 960)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "killed")], check=False, timeout=120,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    with pytest.warns(UserWarning, match="vanished"):
        headrace.resume(tmp_path / "killed", env=short_cartpole, total_env_steps=960, quiet=True)
    whole, killed = everything(tmp_path / "whole"), everything(tmp_path / "killed")
    assert whole.keys() == killed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, killed[name]), name
    manifests = (tmp_path / "killed/checkpoints").glob("step_*/manifest.json")
    named = {
        file
        for path in manifests
        for entry in json.loads(path.read_bytes())["rows"]["learner_default"]
        for file in entry["files"]
    }
    assert {path.name for path in (tmp_path / "killed/checkpoints/rows").iterdir()} == named


def test_a_checkpoint_that_is_damaged_ends_no_run(tmp_path):
    """What it needs is not known, so no rows are removed while it is kept."""
    folder = tmp_path / "run/checkpoints"
    counts = []

    def damage(update, _):
        if update == 4:
            (max(folder.glob("step_*")) / "manifest.json").write_text("{")
        counts.append(len(list((folder / "rows").glob("*"))) if folder.exists() else 0)

    train(tmp_path / "run", 960, checkpoint_every_s=0.0, keep=2, on_update=damage)
    assert len(checkpoint.newest(tmp_path / "run").manifest["rows"]["learner_default"]) > 2
    assert counts[-1] > 2


def spoil(path, how):
    if how == "missing":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


WORDS = {"missing": "cannot be read", "damaged": "is damaged: its SHA-256"}


@pytest.mark.parametrize("how", WORDS)
def test_rows_that_are_not_as_written_are_refused(tmp_path, how):
    train(tmp_path / "run", 320)
    (path,) = (tmp_path / "run/checkpoints/rows").iterdir()
    assert {p.stat().st_mode & 0o777 for p in (path.parent, path.parents[1])} == {0o700}
    spoil(path, how)
    with (
        pytest.warns(UserWarning, match=rf"rows/learner_default.*{WORDS[how]}.*Passed over"),
        pytest.raises(CheckpointError, match="holds no usable checkpoint"),
    ):
        headrace.resume(tmp_path / "run", env=short_cartpole, total_env_steps=960, quiet=True)
    assert headrace.load_policy(tmp_path / "run") is not None  # a policy needs no rows


@pytest.mark.parametrize("how", WORDS)
def test_a_checkpoint_whose_rows_are_damaged_is_passed_over(tmp_path, how):
    train(tmp_path / "whole", 960)
    train(tmp_path / "run", 320)
    headrace.resume(tmp_path / "run", env=short_cartpole, total_env_steps=640, quiet=True)
    spoil(max((tmp_path / "run/checkpoints/rows").iterdir()), how)
    with pytest.warns(UserWarning, match=rf"rows/learner_default.*{WORDS[how]}.*Passed over"):
        headrace.resume(tmp_path / "run", env=short_cartpole, total_env_steps=960, quiet=True)
    whole, resumed = everything(tmp_path / "whole"), everything(tmp_path / "run")
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name
