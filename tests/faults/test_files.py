"""F13, F14, F15, F29: crashes while saving, full disks, damaged and hostile files; bad batches."""

import itertools
import json
import os
import pickle
import random
import re
import shutil
import struct
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import headrace
from headrace.config.resolve import read_config_file
from headrace.errors import (
    CheckpointError,
    ConfigError,
    HeadraceError,
    NonFiniteError,
    RunDirError,
)
from headrace.storage import checkpoint
from headrace.storage.manifest import digest
from headrace.storage.metrics import read_metrics
from headrace.storage.run_dir import read_config
from headrace.training.job import RunRequest, settings_of_run
from headrace.training.log import MetricsLog
from tests.faults.support import FLAGS, TINY, UPDATE, heard, run, small_disk
from tests.marks import repeats
from tests.python import command
from tests.storage.test_checkpoint import write
from tests.support import Counting, short_cartpole

pytestmark = pytest.mark.fault_a


class Crash(BaseException):
    """As if the process had ended: nothing handles it."""


class CrashAt:
    """Makes the N-th file operation of this process the last one."""

    OPERATIONS = ("open", "fsync", "rename", "mkdir", "unlink", "rmdir")

    def __init__(self, patched):
        self.left = None
        for name in self.OPERATIONS:
            patched.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, real):
        def operation(*args, **kwargs):
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise Crash
            return real(*args, **kwargs)

        return operation

    def survived(self, n, function):
        """Whether all of it was done before the `n`-th operation."""
        self.left = n
        try:
            function()
        except Crash:
            return False
        finally:
            self.left = None
        return True


def test_a_crash_at_any_file_operation_leaves_the_old_or_the_new(tmp_path, monkeypatch, measured):
    """F13: of a save and of the removal of the one before, with its pointer `latest`."""

    def save(step):
        checkpoint.prune(1, write(folder, step, float(step)))

    seen = []
    with monkeypatch.context() as patched:
        crash = CrashAt(patched)
        for n in itertools.count():
            folder = tmp_path / str(n)
            folder.mkdir()
            save(1)
            whole = crash.survived(n, lambda: save(2))
            began = time.monotonic()
            seen.append(checkpoint.newest(folder).manifest["counters"]["n"])
            checkpoint.newest(folder / "checkpoints" / pointed_to(folder))
            save(3)  # the next one is not hindered by what the crash left
            assert names(folder) == ["latest", "step_000000000003"]
            assert pointed_to(folder) == "step_000000000003"
            measured("F13", "crash while saving", recover_s=time.monotonic() - began)
            if whole:
                break
    assert n > 15, "the shim must see the writer's operations"
    assert seen == sorted(seen) and set(seen) == {1, 2}


def pointed_to(folder):
    return (folder / "checkpoints/latest").read_text()


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_disk_that_is_full_while_a_checkpoint_is_written_costs_nothing(tmp_path, measured):
    """F14: training goes on, one warning; the old one stays, and later there are new ones."""
    filled_at, at_full = [], {}
    with small_disk(tmp_path / "disk", 1 << 20) as disk, heard() as said:
        run_dir = disk.path / "run"

        def on_update(iteration, _metrics):
            if iteration == 3:
                disk.fill(leave_bytes=32 << 10)  # room for metrics, and for part of a checkpoint
                filled_at.append(time.monotonic())
            if iteration == 9:  # the evaluation of update 5 has been waited for
                at_full["names"], at_full["latest"] = names(run_dir), pointed_to(run_dir)
                at_full["newest"] = checkpoint.newest(run_dir).path.name
                disk.clear()

        done = headrace.train(
            short_cartpole, run_dir=run_dir, total_env_steps=10 * UPDATE, checkpoint_every_s=0.0,
            keep=1, on_update=on_update, eval_every=5 * UPDATE, eval_episodes=1, **TINY,
        )  # fmt: skip
        old = f"step_{2 * UPDATE:012d}"
        assert at_full == {"names": ["latest", old], "latest": old, "newest": old}
        assert names(run_dir) == ["latest", f"step_{10 * UPDATE:012d}"]
        assert [row["iteration"] for row in read_metrics(run_dir)] == list(range(1, 11))
        # The best one at update 5 was not kept, and does not count.
        assert checkpoint.newest(run_dir / "best").manifest["counters"]["env_steps"] == 10 * UPDATE
    assert [text.partition(" to ")[0] for _, text in said] == [
        "Checkpoints cannot be written",
        "Best policies cannot be written",
        "Checkpoints are written",
        "Best policies are written",
    ]
    assert "No space left on device. Training goes on" in said[0][1]
    measured(
        "F14", "disk full while a checkpoint is written", detect_s=said[0][0] - filled_at[0],
        within_s=1.0, lost_env_steps=done.summary["lost_env_steps"],
    )  # fmt: skip


def test_metrics_wait_for_room_and_are_neither_torn_nor_doubled(tmp_path, measured):
    """F14: metrics.jsonl and TensorBoard's events on a disk that is full for a while."""
    with small_disk(tmp_path / "disk", 256 << 10) as disk, heard() as said:
        log = MetricsLog(disk.path, 0, 0)

        def rows(first, last):
            for i in range(first, last):
                log.write(
                    {"iteration": i, "env_steps": 10 * i, "loss": 1.0 / i, "text": float("nan")}
                )
                log.flush()

        rows(1, 5)
        disk.fill()
        filled_at = time.monotonic()
        rows(5, 400)  # more than what is left of a page
        assert len(said) == 1
        assert len(read_metrics(disk.path)) < 399
        disk.clear()
        rows(400, 401)
        assert [row["iteration"] for row in read_metrics(disk.path)] == list(range(1, 401))
        assert [text.partition(" to ")[0] for _, text in said] == [
            "Metrics cannot be written",
            "Metrics are written",
        ]
        disk.fill()
        rows(401, 900)
        log.close()  # without an error, and without waiting for a thread that has died
        (events,) = (disk.path / "tensorboard").iterdir()
        steps = [event.step for event in EventFileLoader(str(events)).Load() if event.summary.value]
        assert steps[:400] == [10 * i for i in range(1, 401)]
    measured("F14", "disk full while metrics are written", detect_s=said[0][0] - filled_at,
             within_s=1.0, lost_env_steps=0)  # fmt: skip


def test_a_disk_without_room_at_the_start_is_an_error_in_words(tmp_path, measured):
    """F14: wherever it ends: lock, config.json, the only checkpoint (metrics wait for room)."""
    reached = set()
    with small_disk(tmp_path / "disk", 256 << 10) as disk:
        for pages in range(12):
            disk.fill(leave_bytes=pages * os.sysconf("SC_PAGE_SIZE"))
            began = time.monotonic()
            with heard(), pytest.raises(RunDirError, match="No space left on device") as caught:
                headrace.train(
                    short_cartpole, run_dir=disk.path / "run", total_env_steps=UPDATE, **TINY
                )
            measured("F14", "disk full at the start", detect_s=time.monotonic() - began, within_s=2)
            is_run = (disk.path / "run/config.json").exists()
            reached.add((is_run, "its last checkpoint" in str(caught.value)))
            shutil.rmtree(disk.path / "run", ignore_errors=True)
            disk.clear()
    assert reached == {(False, False), (True, True)}


@repeats("learners", [1, 2])
def test_a_result_that_cannot_be_saved_is_exit_code_1(tmp_path, learners):
    """Saving is tried after each update, and once more at the end: by all learners, or by none."""
    with small_disk(tmp_path / "disk", 64 << 10):
        words = command(
            "train", "CartPole-v1", *FLAGS, "--total-env-steps", 640, "--run-dir", "run",
            "--num-learners", learners, "--checkpoint-every-s", 0,
        )  # fmt: skip
        done = run(words, tmp_path / "disk")
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert done.stderr.count("cannot be written") == 1
        assert "last checkpoint could not be written to run: No space left" in done.stderr
        assert "Done:" not in done.stdout
        assert names(tmp_path / "disk/run") == []


def mutated(rng, folder):
    """Damage one of a checkpoint's files (or swap two); a copy of those that were there before."""
    files = sorted(folder.iterdir())
    before = {file: file.read_bytes() for file in files}
    file, kind = rng.choice(files), rng.choice(["flip", "cut", "delete", "swap", "fill", "grow"])
    data = bytearray(before[file])
    if kind == "flip":
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[rng.randrange(len(data)) :]
    elif kind == "fill":
        at = rng.randrange(len(data))
        data[at : at + rng.randint(1, 64)] = rng.randbytes(16)
    elif kind == "grow":
        data += rng.randbytes(rng.randint(1, 64))
    elif kind == "swap":
        other = rng.choice([f for f in files if f != file])
        data = bytearray(before[other])
        other.write_bytes(before[file])
    file.write_bytes(data)
    if kind == "delete":
        file.unlink()
    return before


def test_damage_is_named_and_the_one_before_is_used(tmp_path, measured):
    """F15: 1,000 seeded mutations."""
    write(tmp_path, 1, 1.0)
    path, rng, damaged = write(tmp_path, 2, 2.0), random.Random(0), 0
    for trial in range(1000):
        before = mutated(rng, path)
        if {file: file.read_bytes() for file in path.iterdir()} == before:
            assert checkpoint.newest(tmp_path).path == path, f"trial {trial}"
            continue
        damaged += 1
        began = time.monotonic()
        with pytest.warns(UserWarning, match=f"{path}/.*Passed over") as caught:
            assert checkpoint.newest(tmp_path).manifest["counters"]["n"] == 1, f"trial {trial}"
        assert len(caught) == 1
        measured("F15", "a damaged checkpoint is passed over", detect_s=time.monotonic() - began)
        for file, data in before.items():
            file.write_bytes(data)
    assert checkpoint.newest(tmp_path).path == path
    assert damaged > 900


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """A run of two updates; copied before it is damaged."""
    return headrace.train(
        "CartPole-v1", run_dir=tmp_path_factory.mktemp("small") / "run", num_minibatches=2,
        total_env_steps=2 * UPDATE, network=headrace.Network(hidden_sizes=(4,)), **TINY,
    ).dir  # fmt: skip


@pytest.fixture
def copied(small_run, tmp_path):
    return shutil.copytree(small_run, tmp_path / "run")


def damage(rng, original):
    data = bytearray(original)
    for _ in range(rng.randint(1, 3)):
        kind, at = rng.choice(["flip", "cut", "swap", "fill"]), rng.randrange(len(data))
        if kind == "flip":
            data[at] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del data[at : at + rng.randint(1, 40)]
        elif kind == "fill":
            data[at : at + 1] = rng.choice([b"-1", b"null", b"{", b"[", b'"', b"9" * 30, b"\xff"])
        else:
            other = rng.randrange(len(data))
            data[at], data[other] = data[other], data[at]
    return bytes(data)


def test_a_damaged_config_is_refused_in_words_or_harmless(copied):
    """F15: 1,500 seeded mutations; some change a number into another."""
    file, rng, refused = copied / "config.json", random.Random(0), 0
    original = file.read_bytes()
    for trial in range(1_500):
        file.write_bytes(damage(rng, original))
        try:
            settings_of_run(copied, RunRequest())
        except HeadraceError as error:
            refused += 1
            assert len(str(error)) > 20, f"trial {trial}"
    assert refused > 750


def test_damaged_metrics_do_not_stand_in_the_way(copied):
    """F15: lines that can be read are kept, the others are named."""
    file, rng, named = copied / "metrics.jsonl", random.Random(0), 0
    original = file.read_bytes() * 4
    for trial in range(500):
        file.write_bytes(damage(rng, original))
        with heard() as said:
            rows = read_metrics(copied)
        named += len(said)
        assert all("metrics.jsonl is damaged: left out line" in text for _, text in said)
        assert len(rows) <= 8 + 3, f"trial {trial}"
        assert len(said) <= 1 and (said or len(rows) >= 5), f"trial {trial}"
    assert named > 100
    file.write_bytes(b"\x80\x04nonsense\n" + original[: len(original) // 4])
    with pytest.warns(UserWarning, match="left out line 1"):
        headrace.resume(copied, total_env_steps=3 * UPDATE, quiet=True)
    assert [row["iteration"] for row in read_metrics(copied)] == [1, 2, 3]


class Canary:
    """Whoever unpickles it makes a directory."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


YAML = b'!!python/object/apply:os.mkdir ["%s"]\n'


def newest_file(run_dir, name):
    return checkpoint.newest(run_dir).path / name


@repeats("form", ["pickle", "yaml", "torch"])
@pytest.mark.parametrize(
    "name", ["manifest.json", "policy_default.safetensors", "workers.safetensors", "config.json",
             ".running", "metrics.jsonl", "checkpoints/latest", "mine.toml"],
)  # fmt: skip
def test_hostile_files_are_refused_and_nothing_runs(copied, name, form, tmp_path):
    """F29: in the place of every file that is read, what some other program would run."""
    target, canary = copied / name, tmp_path / "canary sang"
    if name.startswith(("manifest", "policy", "workers")):
        target = newest_file(copied, name)
    if form == "torch":
        with target.open("wb") as file:  # torch refuses the name ".running"
            torch.save(Canary(canary), file)
    else:
        pickled = pickle.dumps(Canary(canary))
        target.write_bytes(pickled if form == "pickle" else YAML % str(canary).encode())
    if name == "mine.toml":
        with pytest.raises(ConfigError, match=f"{name} is not valid TOML"):
            read_config_file(target)
    elif name in ("metrics.jsonl", "checkpoints/latest"):  # nothing depends on them
        with heard():
            headrace.resume(copied, total_env_steps=3 * UPDATE, quiet=True)
    else:
        uses = [lambda: headrace.resume(copied, quiet=True), lambda: headrace.load_policy(copied)]
        for use in uses[
            : 1 if name in ("config.json", ".running") else 2
        ]:  # a policy needs neither
            with heard() as said, pytest.raises(RunDirError) as caught:
                use()
            assert name in str(caught.value) + "".join(text for _, text in said)
    assert not canary.exists()


def resealed(path, change):
    """Change a manifest as somebody would who knows how it is sealed."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    del manifest["sha256"]
    manifest["sha256"] = digest(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "name", ["../../secret.safetensors", "/etc/passwd", "/tmp/x.safetensors", "a/../b.safetensors"]
)
def test_a_manifest_may_not_name_files_elsewhere(tmp_path, name):
    path = write(tmp_path, 1, 1.0)
    resealed(path, lambda manifest: manifest["files"].update({name: "0" * 64}))
    with pytest.raises(CheckpointError, match="none of ours"):
        checkpoint.newest(path)


def reseal_file(path, name, data):
    (path / name).write_bytes(data)
    digest = checkpoint.hashlib.sha256(data).hexdigest()
    resealed(path, lambda manifest: manifest["files"].update({name: digest}))


def header(shape, offsets):
    """A safetensors file that promises that, and holds nothing."""
    text = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "data",
    [
        header([10**13], [0, 4 * 10**13]),
        header([10**13], [0, 0]),
        header([2**62, 4], [0, 0]),
        header([-1], [0, 4]),
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 100 << 20) + b"{}",
        b"",
    ],
)
def test_a_file_that_promises_terabytes_is_refused_before_any_are_allocated(copied, data):
    """F29: with checksums that agree."""
    path = checkpoint.newest(copied).path
    reseal_file(path, "policy_default.safetensors", data)
    for use in (lambda: headrace.load_policy(copied), lambda: headrace.resume(copied, quiet=True)):
        with pytest.raises(CheckpointError, match=r"policy_default.safetensors cannot be read"):
            use()


def test_a_file_of_terabytes_is_refused_unread(copied):
    path = checkpoint.newest(copied).path
    for file in (path / "policy_default.safetensors", path / "manifest.json"):
        before = file.read_bytes()
        os.truncate(file, 10**13)  # sparse
        with heard() as said, pytest.raises(CheckpointError):
            checkpoint.newest(copied)
        assert file.name in said[0][1] and re.search("memory|none of its kind", said[0][1])
        file.write_bytes(before)
    os.truncate(copied / "config.json", 10**13)
    with pytest.raises(RunDirError, match=r"config.json has 10,000,000,000,000 bytes"):
        read_config(copied)


MANIFESTS = {
    "no counters": lambda m: m.pop("counters"),
    "odd counters": lambda m: m.update(counters={"env_steps": []}),
    "no policies": lambda m: m.update(policies=[]),
    "no spec": lambda m: m["policies"]["default"].update(spec=None),
    "huge network": lambda m: m["policies"]["default"]["network"].update(hidden_sizes=[10**7] * 2),
    "huge observation": lambda m: m["policies"]["default"]["spec"]["observation"].update(
        shape=[10**13]
    ),
    "deep": lambda m: m.update(counters=json.loads("[" * 900 + "]" * 900)),
}


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_manifest_that_is_sealed_and_makes_no_sense_is_refused(copied, what):
    resealed(checkpoint.newest(copied).path, MANIFESTS[what])
    uses = [lambda: headrace.resume(copied, quiet=True), lambda: headrace.load_policy(copied)]
    if what in ("no counters", "odd counters", "deep"):
        del uses[1]  # a policy needs none
    if what == "huge network":
        del uses[0]  # that of config.json counts
    for use in uses:
        with pytest.raises(CheckpointError):
            use()


class Odd(Counting):
    """Its reward is finite once in the second batch, and the square of it is not."""

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, 1e30 if self.t == 20 else 1.0, *rest


def test_the_batch_that_broke_the_arithmetic_is_written_down(tmp_path):
    with pytest.raises(NonFiniteError) as caught:
        headrace.train(
            Odd, run_dir=tmp_path / "run", total_env_steps=640, normalize_reward=False, **TINY
        )
    (path,) = (tmp_path / "run").glob("bad_batch_*")
    assert path.name == f"bad_batch_step_{2 * UPDATE:012d}.safetensors"
    assert f"The batch is in {path}" in str(caught.value)
    assert path.stat().st_mode & 0o777 == 0o600
    batch = load_file(path)
    assert batch["obs"].shape == (17, 2, 2) and batch["stored_outputs.log_prob"].shape == (16, 2)
    assert batch["reward"][3].tolist() == [float(np.float32(1e30))] * 2
    # What the message says to do with it works.
    words = re.search(r"python -c '(.*)' FILE", str(caught.value))[1]
    done = run([*command()[:1], "-c", words, str(path)], tmp_path)
    assert "\nreward 1.0 1.0000000150474662e+30\n" in done.stdout, done.stderr


class Dark(torch.nn.Module):
    """Gives NaN for the 20th step of an episode, but in one process."""

    def __init__(self, spec, first):
        super().__init__()
        self.params, self.value = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        self.fails = os.getpid() != first

    def forward(self, obs):
        value = self.value(obs).squeeze(-1)
        dark = (obs[:, 0] == 20) & self.fails
        return self.params(obs), value.masked_fill(dark, float("nan"))


@pytest.mark.more
def test_only_the_rank_whose_batch_it_is_writes_it_down(tmp_path):
    first = os.getpid()
    with pytest.raises(NonFiniteError) as caught:
        headrace.train(
            Counting, model=lambda spec: Dark(spec, first), run_dir=tmp_path / "run",
            total_env_steps=640, num_learners=2, normalize_obs=False, **TINY,
        )  # fmt: skip
    (path,) = (tmp_path / "run").glob("bad_batch_*")
    assert path.name == f"bad_batch_step_{2 * UPDATE:012d}_rank1.safetensors"
    assert f"The batch is in {path}" in str(caught.value)
    assert load_file(path)["stored_outputs.value"].isnan().nonzero().tolist() == [[4, 0]]
