"""Worker processes: they die in words, stop when told, and leave nothing behind."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from headrace.distributed.child_process import raise_open_files
from headrace.envs.api import Guards
from headrace.errors import EnvError, UsageError, WorkerError
from tests import python
from tests.envs.test_factory import Broken
from tests.support import (
    Counting,
    children,
    inline,
    plan_for,
    policies_for,
    short_cartpole,
    still_alive,
    workers,
)


class Sleepy(Counting):
    """A step takes as long as it is told to: slowness is what is tested, nothing is waited for."""

    def __init__(self, seconds):
        super().__init__(truncate_at=100)
        self.seconds = seconds

    def step(self, action):
        time.sleep(self.seconds)
        return super().step(action)


class Dying(Counting):
    def step(self, action):
        if self.t == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def test_error_in_a_worker_has_the_environment_s_traceback():
    plan = plan_for(lambda: Broken("step"))
    collector = workers(plan)
    collector.publish(policies_for(plan), 0)
    with pytest.raises(EnvError) as caught:
        collector.collect()
    collector.close()
    assert str(caught.value).startswith("Traceback")
    assert "TwoArgumentsError: the user's own message: step 7" in str(caught.value)
    assert "worker " in str(caught.value)


def test_error_while_a_worker_starts_has_the_environment_s_message():
    class FailsInWorkers(Counting):
        def __init__(self, pid):
            super().__init__()
            if os.getpid() != pid:
                raise RuntimeError("no licence in this process")

    plan = plan_for(FailsInWorkers, kwargs={"pid": os.getpid()})
    before = children()
    with pytest.raises(EnvError, match="RuntimeError: no licence in this process"):
        workers(plan)
    assert len(children() - before) <= 2  # the server that forks, and Python's tracker


class Interrupted(Counting):
    def step(self, action):
        raise KeyboardInterrupt


def test_interrupt_raised_by_an_environment_is_a_worker_error():
    plan = plan_for(Interrupted)
    collector = workers(plan)
    collector.publish(policies_for(plan), 0)
    with pytest.raises(WorkerError, match=r"(?s)test_worker_pool.py.*KeyboardInterrupt.*failed"):
        collector.collect()
    collector.close()


def test_killed_worker_ends_the_run_with_its_signal():
    plan = plan_for(Dying, guards=Guards(on_worker_loss="fail"))
    collector = workers(plan)
    collector.publish(policies_for(plan), 0)
    with pytest.raises(WorkerError, match=r"Worker . died \(SIGKILL\), in step 4 with action"):
        collector.collect()
    collector.close()


class StopLater:
    """Says stop a while after it is told to: the clock starts when the sampling does."""

    def __init__(self, seconds):
        self._stopping = threading.Event()
        self._timer = threading.Timer(seconds, self._stopping.set)

    def begin(self):
        self._timer.start()

    def __call__(self):
        return self._stopping.is_set()


def test_stopped_workers_give_up_fragments_and_count_steps():
    plan, stop = plan_for(lambda: Sleepy(0.05), num_steps=1000), StopLater(1.0)
    collector = workers(plan, stop=stop)
    collector.publish(policies_for(plan), 0)
    stop.begin()
    assert collector.collect() is None
    assert 0 < collector.ledger.lost == collector.ledger.collected < 1000
    assert set(collector.state()) == {"steps"}  # as before the batch
    collector.close()


class OneFast(Sleepy):
    """In the first worker that makes one, steps take no time; elsewhere (but here) they do."""

    def __init__(self, folder, learner):
        super().__init__(0.05)
        if os.getpid() != learner:
            try:
                with (folder / "fast").open("x") as file:
                    file.write(str(os.getpid()))
            except FileExistsError:
                pass
            if (folder / "fast").read_text() == str(os.getpid()):
                self.seconds = 0.0


def test_full_fragment_counts_only_with_its_batch(tmp_path):
    """One worker is done when the other gives up: both go back to where the batch began."""
    plan = plan_for(OneFast, num_steps=130, kwargs={"folder": tmp_path, "learner": os.getpid()})
    stop = StopLater(1.5)
    collector = workers(plan, stop=stop)
    collector.publish(policies_for(plan), 0)
    stop.begin()
    assert collector.collect() is None
    assert 130 * 2 <= collector.ledger.lost == collector.ledger.collected < 130 * 4
    assert set(collector.state()) == {"steps"}
    collector.close()


@pytest.mark.more
def test_worker_that_does_not_stop_is_killed_and_its_envs_begin_anew(tmp_path):
    plan, stop = plan_for(lambda: Sleepy(600), num_steps=1000), StopLater(0.5)
    collector = workers(plan, stop=stop)
    collector.publish(policies_for(plan), 0)
    stop.begin()
    started = time.monotonic()
    assert collector.collect() is None
    state = collector.state()
    assert set(state) == {"steps"}
    collector.close()
    assert time.monotonic() - started < 30
    for make in (workers, inline):
        for steps, begun_anew in ((0, 0), (16, 4)):  # before the first batch they just begin
            again = make(plan, state={"steps": np.array(steps)})
            assert again.restored.new_episode == begun_anew
            again.close()
    assert int(state["steps"]) == 0


def test_worker_that_dies_between_batches_is_replaced():
    plan, said = plan_for(short_cartpole), []
    collector = workers(plan, say=said.append)
    collector.publish(policies_for(plan), 0)
    collector.collect()
    process = collector.workers[0].child.process
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert collector.collect() is not None
    assert "Worker 0 died (SIGKILL), between two fragments" in said[0]
    collector.close()


class DiesTwice(Counting):
    """After 20 steps of the first object, and after 21 of the next. No episode can be replayed."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.steps, self.process = folder, 0, os.getpid()

    def step(self, action):
        deaths = len(list(self.folder.iterdir()))
        if deaths < 2 and self.steps == 20 + deaths:
            (self.folder / str(deaths)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps += 1
        return super().step(action)

    def _obs(self):
        return np.array([self.t, self.t and self.process], np.float32)


def test_steps_count_as_remade_only_if_they_were(tmp_path):
    """The first process is lost with 4 steps, and its episode with it; the second with 5."""
    plan = plan_for(DiesTwice, num_envs=1, envs_per_vector=1, kwargs={"folder": tmp_path})
    said = []
    collector = workers(plan, 1, say=said.append)
    collector.publish(policies_for(plan), 0)
    for _ in range(2):
        assert collector.collect() is not None
    assert sum("1 episodes could not be brought back" in text for text in said) == 1
    ledger = collector.ledger
    assert (ledger.collected, ledger.lost, ledger.remade) == (16 + 16 + 4 + 5, 4, 5)
    collector.close()


class DiesAtStart(Counting):
    """Kills the first worker that makes one."""

    def __init__(self, folder, learner):
        super().__init__()
        if os.getpid() != learner and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_episodes_of_a_worker_that_died_at_a_resume_are_counted(tmp_path):
    plan = plan_for(DiesAtStart, kwargs={"folder": tmp_path, "learner": os.getpid()})
    said = []
    collector = workers(plan, 1, state={"steps": np.array(16)}, say=said.append)
    assert collector.ledger.restarts == 1
    assert collector.restored.new_episode == 4
    assert len(said) == 1 and "while making its environments" in said[0]
    collector.close()


@pytest.fixture
def many_open_files():
    """As many open files as a learner of 250 workers has: `select` takes none above 1023."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if raise_open_files(2048) < 2048:
        pytest.skip("this process may not open 2048 files")
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(1024):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield


@pytest.mark.usefixtures("many_open_files")
def test_workers_are_heard_by_descriptors_above_1023():
    plan = plan_for(short_cartpole)
    collector = workers(plan)
    collector.publish(policies_for(plan), 0)
    assert collector.collect() is not None
    child = collector.workers[0].child
    assert child.channel.fileno() > 1023
    assert "worker_main.py" in child.stack()
    collector.close()


class Fussy(Counting):
    """Offers its state, and fails to give it."""

    def get_state(self):
        raise OSError("the state is elsewhere")

    def set_state(self, state):
        pass


@pytest.mark.parametrize("make", [inline, workers])
def test_error_in_get_state_has_the_environment_s_message(make):
    plan = plan_for(Fussy)
    collector = make(plan)
    collector.publish(policies_for(plan), 0)
    with pytest.raises(EnvError, match="OSError: the state is elsewhere"):
        collector.collect()
    collector.close()


def test_environment_that_cannot_be_pickled_is_refused():
    lock = threading.Lock()
    plan = plan_for(lambda: Counting() if lock else None)
    with pytest.raises(UsageError, match=r"cannot be sent to worker processes: TypeError: .*lock"):
        workers(plan)


@pytest.mark.more
def test_process_with_unclosed_workers_ends(tmp_path):
    process = script(
        tmp_path,
        """
        from tests.support import plan_for, policies_for, short_cartpole, workers
        collector = workers(plan_for(short_cartpole))
        collector.publish(policies_for(plan_for(short_cartpole)), 0)
        collector.collect()
        """,
    )
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0


@pytest.mark.more
def test_runs_in_two_threads_keep_the_main_module(tmp_path):
    process = script(
        tmp_path,
        """
        import sys, threading
        import headrace
        print("script runs")
        mine = sys.modules["__main__"]
        def run(i):
            headrace.train("CartPole-v1", num_workers=2, total_env_steps=512, quiet=True,
                           run_dir=f"run{i}")
        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        print(sys.modules["__main__"] is mine)
        """,
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "script runs\nTrue\n", "")


def test_closed_workers_leave_nothing_behind():
    plan = plan_for(short_cartpole)
    before = children()
    segments = set(os.listdir("/dev/shm"))
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        collector = workers(plan)
        collector.publish(policies_for(plan), 0)
        collector.collect()
        collector.close()
        del collector
    # The server that forks workers, and Python's own resource tracker, stay until we end.
    assert len(children() - before) <= 2
    assert set(os.listdir("/dev/shm")) == segments
    assert len(os.listdir("/proc/self/fd")) <= files + 6


def script(tmp_path, text):
    path = tmp_path / "users_script.py"
    path.write_text(textwrap.dedent(text))
    return python.Python(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_script_without_a_main_guard_and_with_a_lambda_runs(tmp_path):
    process = script(
        tmp_path,
        """
        import gymnasium as gym
        import headrace
        print("script runs")
        class Mine(gym.Wrapper):
            pass
        run = headrace.train(lambda: Mine(gym.make("CartPole-v1")), num_workers=2, num_envs=4,
                             envs_per_vector=2, num_steps=16, total_env_steps=64, quiet=True)
        print(run.summary["env_steps"])
        """,
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "script runs\n64\n", "")


@pytest.mark.parametrize(
    "trial", [0, *(pytest.param(n, marks=pytest.mark.faults) for n in range(1, 20))]
)
def test_workers_end_when_the_main_process_is_killed(tmp_path, trial):
    """F11, with a worker inside a step: once with every test run, 20 times with the fault tests."""
    process = script(
        tmp_path,
        """
        from tests.support import children, plan_for, policies_for, workers
        from tests.collectors.test_worker_pool import Sleepy
        plan = plan_for(lambda: Sleepy(600))
        collector = workers(plan)
        collector.publish(policies_for(plan), 0)
        print(" ".join(map(str, children())), flush=True)
        collector.collect()
        """,
    )
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) >= 3, process.communicate(timeout=5)[1]
    process.kill()
    process.communicate()
    assert still_alive(pids, within_s=10) == []
