"""F21, F22, F23, F30: beside other jobs, on a machine that has little, and what others can see."""

import contextlib
import json
import os
import re
import socket
import sys
import time
from pathlib import Path

import pytest

import headrace
from headrace.storage import checkpoint
from tests.faults.support import FLAGS, modes, mounted, needs_mounts, run, start
from tests.marks import repeats
from tests.python import command
from tests.support import children, short_cartpole

pytestmark = pytest.mark.fault_a

ROOT = Path(__file__).parents[2]
SHORT = ["train", "CartPole-v1", *FLAGS, "--total-env-steps", 640, "--json"]


@pytest.mark.slow
def test_four_jobs_at_once_do_not_clash(tmp_path, measured):
    """F21: no port, name or file in common; each ends as its twin does."""
    before, segments = children(), set(os.listdir("/dev/shm"))
    kinds = [("--num-learners", 2), ("--num-workers", 2)] * 2
    jobs = [
        start(command(*SHORT, *kind, "--seed", 3, "--run-dir", f"run{i}"), tmp_path)
        for i, kind in enumerate(kinds)
    ]
    weights = []
    for i, job in enumerate(jobs):
        with job:
            out, err = job.communicate(timeout=100)
        assert job.returncode == 0, err
        assert json.loads(out.splitlines()[-1])["lost_env_steps"] == 0
        weights.append((checkpoint.newest(tmp_path / f"run{i}").path / "manifest.json").read_text())
    assert files_of(weights[0]) == files_of(weights[2])
    assert files_of(weights[1]) == files_of(weights[3])
    assert children() == before
    assert set(os.listdir("/dev/shm")) == segments
    measured("F21", "four jobs at once", lost_env_steps=0)


def files_of(manifest):
    return json.loads(manifest)["files"]


@pytest.mark.slow
def test_small_shared_memory_and_a_home_that_is_read_only_do_not_matter(tmp_path):
    """F22: fragments are in anonymous memory, and nothing is kept at home."""
    needs_mounts()
    (tmp_path / "home").mkdir()
    script = (
        "mount -t tmpfs -o size=4k tmpfs /dev/shm; mount -t tmpfs -o ro tmpfs home; "
        "export HOME=$PWD/home; ! touch home/x 2>/dev/null"
    )
    # Fragments of several MB.
    many = ["--num-envs", 64, "--num-steps", 512, "--total-env-steps", 64 * 512]
    words = command(*SHORT, *many, "--num-learners", 2, "--num-workers", 2, "--num-epochs", 1)
    done = run(mounted(script, *words, "--run-dir", tmp_path / "run"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["env_steps"] == 64 * 512


@repeats("where", [("--run-dir", "disk/run"), ()])
def test_a_run_directory_that_is_read_only_is_an_error_in_words(tmp_path, where, measured):
    needs_mounts()
    (tmp_path / "disk").mkdir()
    script = "mount -t tmpfs -o ro tmpfs disk" + ("" if where else "; cd disk")
    began = time.monotonic()
    done = run(mounted(script, *command(*SHORT, *where)), tmp_path)
    measured("F22", "run directory is read-only", detect_s=time.monotonic() - began, within_s=5)
    assert done.returncode == 1
    assert "cannot be used: Read-only file system" in done.stderr
    assert "--run-dir" in done.stderr and "Traceback" not in done.stderr


MANY = ["--num-envs", 24, "--envs-per-vector", 1, "--num-workers", 24]
NEEDED = (
    r"--num-workers 24 needs (\d+) open files in this process, and it may have 64.\n"
    r"Use at most (\d+) workers, or raise the limit: ulimit -n \1"
)


def limited(folder, limits, *words):
    """Run `SHORT` with many workers and few open files."""
    words = command(*SHORT, *MANY, *words)
    return run(["sh", "-ec", f'{limits}; exec "$@"', "sh", *words], folder)


@pytest.mark.more
def test_too_few_open_files_are_refused_with_the_number_needed(tmp_path, measured):
    """F22."""
    began = time.monotonic()
    done = limited(tmp_path, "ulimit -n 64", "--run-dir", "run")
    measured("F22", "64 open files", detect_s=time.monotonic() - began, within_s=5)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    found = re.search(NEEDED, done.stderr)
    assert 0 < int(found[2]) < 24
    assert not (tmp_path / "run").exists()


@pytest.mark.more
def test_the_number_of_open_files_that_is_named_is_enough(tmp_path):
    """F22: and where only the soft limit is in the way, it is raised."""
    refused = limited(tmp_path, "ulimit -n 64", "--run-dir", "run")
    files, workers = re.search(NEEDED, refused.stderr).groups()
    done = limited(tmp_path, f"ulimit -Sn 64; ulimit -Hn {files}", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    done = limited(tmp_path, "ulimit -n 64", "--num-workers", workers, "--run-dir", "few")
    assert done.returncode == 0, done.stderr


LOCKED = """
import os, pathlib, sys, threading
import gymnasium as gym

LOCK = threading.Lock()

def audit(event, args):
    if event.startswith("os.fork"):
        with open(pathlib.Path(__file__).with_name("forks"), "a") as file:
            print(event, os.getpid(), file=file)

sys.addaudithook(audit)

class Env(gym.Wrapper):
    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))

    def step(self, action):
        with LOCK:  # a worker's own
            return self.env.step(action)
"""
SCRIPT = """
import contextlib, os, threading
import headrace
from locked import LOCK, Env

held, done = threading.Event(), threading.Event()

def hold():
    with LOCK:
        held.set()
        done.wait()

holder = threading.Thread(target=hold)
holder.start()
held.wait()
run = headrace.train(Env, num_envs=4, num_steps=16, envs_per_vector=2, num_workers=2,
                     num_learners=LEARNERS, total_env_steps=256, quiet=True, run_dir="run")
done.set()
holder.join()
print(run.summary["env_steps"], os.path.exists("forks"))
with contextlib.suppress(DeprecationWarning):  # the audit sees that there are threads
    if os.fork() == 0:
        os._exit(0)
"""


@pytest.mark.more
@repeats("learners", [1, 2])
def test_no_process_with_threads_forks_and_no_warning_is_given(tmp_path, learners):
    """F23: all warnings are errors, and a thread holds a lock that the workers need as well."""
    (tmp_path / "locked.py").write_text(LOCKED)
    (tmp_path / "script.py").write_text(SCRIPT.replace("LEARNERS", str(learners)))
    done = run([sys.executable, "-W", "error", "script.py"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "256 False\n"
    # The script's own, at its end: the hook does see them.
    assert (tmp_path / "forks").read_text().startswith("os.fork ")


def sockets(pids):
    """Internet sockets of processes: (local address in hexadecimal, whether it listens)."""
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                inodes.add(os.readlink(file))
    found = []
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if f"socket:[{rest[5]}]" in inodes:
                found.append((local.partition(":")[0], state == "0A"))
    return found


LOOPBACK = {
    "0100007F",  # 127.0.0.1
    "0000000000000000FFFF00000100007F",  # the same as IPv6 has it
    "00000000000000000000000001000000",  # ::1
}


def test_others_can_neither_connect_nor_read(tmp_path):
    """F30: sockets of all processes of a run; modes of all that it wrote."""
    seen = []

    def look(_iteration, _metrics):
        seen.append(sockets({os.getpid(), *children()}))

    old = os.umask(0)  # the most open that a user can have
    try:
        done = headrace.train(
            short_cartpole, run_dir=tmp_path / "run", num_learners=2, num_workers=2, num_envs=8,
            num_steps=16, envs_per_vector=2, num_minibatches=2, total_env_steps=256, quiet=True,
            eval_every=128, eval_episodes=1, checkpoint_every_s=0.0,
            on_update=look,
        )  # fmt: skip
    finally:
        os.umask(old)
    assert sum(listens for _, listens in seen[-1]) >= 1
    assert {address for found in seen for address, _ in found} <= LOOPBACK
    for path, mode in modes(done.dir).items():
        assert mode == (0o700 if path.is_dir() else 0o600), path
    written = {path.relative_to(done.dir).parts[0] for path in modes(done.dir) if path != done.dir}
    assert written >= {"config.json", "metrics.jsonl", "tensorboard", "checkpoints", "best"}


NAMED = """
import os
import headrace
from tests.support import children, short_cartpole
from tests.faults.test_machine import sockets

def look(iteration, metrics):
    print(*(address for address, _ in sockets({os.getpid(), *children()})))

headrace.train(short_cartpole, run_dir="run", num_learners=2, num_envs=4, num_steps=16,
               envs_per_vector=2, num_minibatches=2, total_env_steps=128, quiet=True,
               backend="gloo", on_update=look)
"""


@pytest.mark.more
def test_not_even_where_the_host_s_name_is_an_address_that_others_reach(tmp_path):
    """F30: which is what gloo listens on by itself."""
    needs_mounts()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        try:
            asks.connect(("192.0.2.1", 9))  # sends nothing: which address would it be sent from?
        except OSError:
            pytest.skip("needs an address besides the loopback")
        address = asks.getsockname()[0]
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{address} elsewhere\n")
    (tmp_path / "script.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + NAMED)
    script = "mount --bind hosts /etc/hosts; hostname elsewhere"
    done = run(mounted(script, sys.executable, "script.py"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= LOOPBACK and done.stdout.split()
