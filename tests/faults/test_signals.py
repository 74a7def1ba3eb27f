"""F12: a signal, or two, during each phase of a run."""

import contextlib
import os
import select
import signal
import time

import pytest

from headrace.distributed.process import SAME_WITHIN_S
from headrace.storage import checkpoint, run_dir
from tests.faults.support import FLAGS, start
from tests.python import command
from tests.support import children, still_alive

pytestmark = pytest.mark.fault_a

PHASES = """
import multiprocessing, os, pathlib, sys
import gymnasium as gym
import torch

from headrace.distributed.channel import Channel

HERE = pathlib.Path(__file__).parent
WANTED, TIMES = PHASE, COUNT
# A worker, another rank, or the process that the user started.
IS_CHILD = multiprocessing.parent_process() is not None or sys.argv[0] == "-c"
seen = 0

def reached(phase):
    # At the N-th time: say so, and wait until told to go on.
    global seen
    seen += phase == WANTED
    if phase == WANTED and seen == TIMES:
        (HERE / "here").write_text("x")  # two pipes
        with open(HERE / "on", "rb", buffering=0) as on:
            on.read(1)

class Env(gym.Wrapper):
    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))
        reached("start of a child" if IS_CHILD else "start")

    def step(self, action):
        reached("rollout")
        return self.env.step(action)

class Net(torch.nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.params, self.value = torch.nn.Linear(4, 2), torch.nn.Linear(4, 1)

    def forward(self, obs):
        if torch.is_grad_enabled():
            reached("update")
        return self.params(obs), self.value(obs).squeeze(-1)

def audit(event, args):
    if event == "os.mkdir" and ".step_" in str(args[0]):
        reached("save")

sys.addaudithook(audit)

def sent(channel, message, send=Channel.send):
    if message is None:
        reached("close")
    send(channel, message)

Channel.send = sent
"""
TIMES = {"start": 1, "start of a child": 1, "rollout": 100, "update": 100, "save": 3, "close": 2}
INLINE, WORKERS = ("--num-workers", 0), ("--num-workers", 2)
LEARNERS = ("--num-learners", 2, *INLINE)
TWICE = (signal.SIGINT, signal.SIGINT)
TERM_TWICE = (signal.SIGTERM, signal.SIGTERM)


def _later(*case):
    """A phase that another case reaches in another way: with the slow tests, and in test-faults."""
    return pytest.param(*case, marks=pytest.mark.slow)


def _more(*case):
    """A phase that another case reaches with other processes."""
    return pytest.param(*case, marks=pytest.mark.more)


@pytest.mark.parametrize(
    ("phase", "who", "signals"),
    [
        ("start", INLINE, (signal.SIGINT,)),
        _later("start", INLINE, (signal.SIGTERM,)),
        _later("rollout", INLINE, (signal.SIGINT,)),
        _more("rollout", INLINE, TWICE),
        _later("rollout", INLINE, TERM_TWICE),
        ("update", INLINE, (signal.SIGTERM,)),
        _later("update", INLINE, TWICE),
        _later("save", INLINE, (signal.SIGINT,)),
        ("save", INLINE, TWICE),
        ("start of a child", WORKERS, (signal.SIGINT,)),
        ("rollout", WORKERS, (signal.SIGTERM,)),
        _later("rollout", WORKERS, TWICE),
        _more("update", WORKERS, (signal.SIGINT,)),
        _more("save", WORKERS, (signal.SIGTERM,)),
        ("close", WORKERS, TWICE),  # the second worker is not told any more
        _later("start of a child", LEARNERS, (signal.SIGTERM,)),
        _more("rollout", LEARNERS, (signal.SIGINT,)),
        _later("update", LEARNERS, TWICE),
        _more("save", LEARNERS, (signal.SIGTERM,)),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_signal_ends_a_run_and_keeps_a_whole_checkpoint(
    tmp_path, phase, who, signals, measured, request
):
    text = PHASES.replace("PHASE", repr(phase), 1).replace("COUNT", str(TIMES[phase]))
    (tmp_path / "phases.py").write_text(text)
    for name in ("here", "on"):
        os.mkfifo(tmp_path / name)
    # Both ends of both: nobody waits for somebody to open the other.
    here, on = (os.open(tmp_path / name, os.O_RDWR) for name in ("here", "on"))
    request.addfinalizer(lambda: (os.close(here), os.close(on)))
    before = children()
    words = command(
        "train", "phases:Env", *FLAGS, "--model", "phases:Net", "--run-dir", "run", *who,
        "--checkpoint-every-s", 0, "--total-env-steps", 640 if phase == "close" else 10**8,
    )  # fmt: skip
    with start(words, tmp_path, stdin=None) as process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        stack.callback(os.close, ended := os.pidfd_open(process.pid))
        ready = select.select([here, ended], [], [], 60)[0]
        assert ready == [here], process.communicate(timeout=1)[1]
        started = children() - before
        began = time.monotonic()
        for number in signals[:-1]:
            os.killpg(process.pid, number)
            while "Again: stop" not in process.stderr.readline():
                assert process.poll() is None
            time.sleep(SAME_WITHIN_S)
        os.killpg(process.pid, signals[-1])
        if len(signals) == 1:  # at the second one, what is under way need not end
            os.write(on, b"xxxx")  # one for each that waits
        _, err = process.communicate(timeout=50)
        took = time.monotonic() - began
    names = " twice" if len(signals) > 1 else ""
    measured(
        "F12", f"{signals[0].name}{names}, during {phase}", recover_s=took, recover_within_s=10
    )
    assert still_alive(started, within_s=25) == []
    assert children() == before
    # Before a run's own handler is there, SIGTERM's is the system's; a shell says 143 for it.
    ends = {128 + signals[-1]} | ({-signal.SIGTERM} if phase == "start" else set())
    assert process.returncode in ends, err
    assert "Traceback" not in err
    if len(signals) > 1 and phase in ("rollout", "update", "save"):
        assert "checkpoint are lost.\nTo go on: headrace resume run" in err
    assert run_dir.left_mark(tmp_path / "run") is None
    if phase in ("rollout", "update", "save", "close"):
        saved = checkpoint.newest(tmp_path / "run")  # a warning of a damaged one would be an error
        assert saved.manifest["counters"]["env_steps"] >= 64
    elif phase == "start":
        assert not (tmp_path / "run").exists()
