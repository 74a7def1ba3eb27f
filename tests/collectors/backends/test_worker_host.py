"""A host of worker processes, without Ray: a learner starts workers over its connection."""

import contextlib
import pickle
import subprocess
import sys

import pytest

from headrace.collectors.backends.api import Exited, Ready, WorkerSetup
from headrace.collectors.backends.worker_host import Beats, Close, Closed, Said, Start
from headrace.distributed.channel import Listener, pickled
from tests.support import plan_for, short_cartpole

HOST = """
import os, pickle, resource, sys

import cloudpickle

from headrace.collectors.backends.worker_host import WorkerHost
from headrace.distributed.channel import connect

door, plan = pickle.load(sys.stdin.buffer)
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1000)]
host = WorkerHost(cloudpickle.loads(plan), connect(door, 1))
print("connected", flush=True)
host.run()
"""
"""It may open few more files than it has, unless it asks for more."""


@pytest.fixture
def host():
    """The learner's end of the connection to a host."""
    plan, listener = plan_for(short_cartpole, num_envs=8), Listener("127.0.0.1")
    process = subprocess.Popen(
        [sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        pickle.dump((listener.door, pickled(plan, "worker processes")), process.stdin)
        process.stdin.close()
        assert process.stdout.readline() == b"connected\n"
        with contextlib.closing(listener), contextlib.closing(listener.accept(1)) as channel:
            yield channel
            channel.send(Close())
            while not isinstance(closed := channel.receive(), Closed):
                pass
    assert closed.error is None
    assert process.returncode == 0


def test_workers_start_where_many_files_are_open(host):
    generations = {0: 1, 1: 3, 2: 1, 3: 2}
    for worker, generation in generations.items():
        setup = WorkerSetup(f"worker {worker}", generation, [worker], {}, 0, ())
        host.send(Start(worker, setup))
    ready, beats = set(), {}
    while not (len(ready) == len(beats) == len(generations)):
        match host.receive():
            case Said(worker, generation, Ready()):
                assert generation == generations[worker]
                ready.add(worker)
            case Said(message=Exited(cause=cause)):
                pytest.fail(cause)
            case Beats(beats):
                pass
    assert {worker: beat.generation for worker, beat in beats.items()} == generations
