"""Faults of workers, from outside: F01 and F06; F11 (all of them) and F24 with the fault tests."""

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

import headrace
from headrace.collectors.worker_pool import WorkerPool
from headrace.envs.api import Guards
from headrace.envs.faulty import Faulty
from headrace.meter import Meter
from headrace.storage import checkpoint
from headrace.timeouts import step_timeout
from tests.faults.test_env import LIMITS_S, SMALL, assert_balanced, assert_same_run
from tests.marks import repeats
from tests.support import (
    Counting,
    children,
    inline,
    plan_for,
    policies_for,
    short_cartpole,
    workers,
)

RUN = SMALL | {"num_steps": 32, "total_env_steps": 4 * 32 * 150, "checkpoint_every_s": 1e6}


class Chaos:
    """Kills workers of this process's runs, at random times after it was told to.

    Args:
        rng: decides whom and when.
        within_s: how long after.
    """

    def __init__(self, rng, within_s):
        self._rng, self._within_s = rng, within_s
        self._before = children()
        self._timers = []
        self.killed_at = []

    def soon(self):
        """Kill one."""
        self._timers.append(threading.Timer(self._rng.uniform(0, self._within_s), self._kill))
        self._timers[-1].start()

    def join(self):
        """Until all that was to be killed is."""
        for timer in self._timers:
            timer.join()

    def _kill(self):
        if pids := self._workers():
            self.killed_at.append(time.monotonic())
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._rng.choice(pids), signal.SIGKILL)

    def _workers(self):
        """The new processes that the server has forked: they are not our own children."""
        found = []
        for pid in children() - self._before:
            with contextlib.suppress(OSError):  # gone meanwhile
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if parent != os.getpid():
                    found.append(pid)
        return sorted(found)


@pytest.fixture
def losses(monkeypatch):
    """When the learner's side sees that a worker is lost (`time.monotonic`)."""
    seen_at, lose = [], WorkerPool._lose

    def noted(self, worker, cause, **more):
        seen_at.append(time.monotonic())
        lose(self, worker, cause, **more)

    monkeypatch.setattr(WorkerPool, "_lose", noted)
    return seen_at


@pytest.mark.fault_a
@repeats("kills", [5, 20])
def test_f01_run_with_random_kills_equals_the_whole_run(tmp_path, measured, losses, kills):
    # Steps of 0.5 ms: a fragment takes as long as the kill may be late, so that most kills hit one
    env = {"env": "headrace.envs.faulty:Faulty", "env_kwargs": {"slow_step": 5e-4}}
    settings = RUN | env | {"total_env_steps": 4 * 32 * (7 * kills + 10), "num_workers": 2}
    whole = headrace.train(run_dir=tmp_path / "whole", **settings)
    chaos = Chaos(random.Random(1), within_s=0.03)

    def kill_now_and_then(iteration, metrics):
        if iteration % 7 == 0 and iteration <= 7 * kills:
            chaos.soon()

    run = headrace.train(
        run_dir=tmp_path / "run", max_worker_restarts=100, on_update=kill_now_and_then, **settings
    )
    chaos.join()
    assert len(chaos.killed_at) == kills
    ledger = run.summary["ledger"]
    # One may be hit twice before it is buried
    assert kills * 3 // 4 <= run.summary["restarts"] == len(losses) <= kills
    assert_balanced(run.summary)
    assert run.summary["lost_env_steps"] == 0 < ledger["remade"] <= kills * 2 * 32
    assert_same_run(run, whole)
    for killed_at in chaos.killed_at:
        later = [at - killed_at for at in losses if at >= killed_at]
        measured(
            "F01", f"kill -9 of a worker, at a random time of {kills} in a run",
            detect_s=min(later, default=None), within_s=1,
            lost_env_steps=run.summary["lost_env_steps"],
        )  # fmt: skip


def first_worker(collector):
    return collector.workers[0].child.process.pid


@pytest.mark.fault_a
@pytest.mark.parametrize("limit_s", LIMITS_S)
@repeats("replaced", [True, False])
def test_f06_stopped_worker_is_replaced_after_the_limit(measured, limit_s, replaced):
    """Shorter than the limit it is a pause; longer, it is killed and another takes its place."""
    told = []
    pause_s = limit_s * (2 if replaced else 1 / 3)
    plan = plan_for(
        lambda: Faulty(slow_step=0.005), num_steps=64, guards=Guards(env_timeout_s=limit_s)
    )
    reference = workers(plan)
    collector = workers(plan, say=lambda text: told.append((time.monotonic(), text)))
    for c in (reference, collector):
        c.publish(policies_for(plan), 0)
    pid = first_worker(collector)
    stopped_at = []

    def disturb():
        stopped_at.append(time.monotonic())
        os.kill(pid, signal.SIGSTOP)

    timers = [threading.Timer(0.1, disturb), threading.Timer(0.1 + pause_s, resume, [pid])]
    for timer in timers:
        timer.start()
    batches = [c.collect() for c in (collector, reference)]
    recovered = time.monotonic()
    for ours, theirs in zip(*(b.fragments for b in batches), strict=True):
        assert ours.obs.equal(theirs.obs) and ours.action.equal(theirs.action)
    assert collector.ledger.restarts == int(replaced) == len(told)
    if replaced:
        ((seen, text),) = told
        assert f"has not answered for {limit_s:g} s" in text
        assert first_worker(collector) != pid
        assert collector.ledger.lost == 0 < collector.ledger.remade < 64 * 2
        measured(
            "F06", f"SIGSTOP for longer than the limit of {limit_s:g} s",
            detect_s=seen - stopped_at[0], within_s=4, recover_s=recovered - seen, lost_env_steps=0,
        )  # fmt: skip
    for timer in timers:
        timer.join()
    for c in (reference, collector):
        c.close()


def resume(pid):
    with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
        os.kill(pid, signal.SIGCONT)


@pytest.mark.fault_a
def test_default_limit_follows_the_measured_steps():
    """20 times the 99.9th percentile, and not less than a minute."""
    meter = Meter()
    assert step_timeout(0.0, meter.usual_s()) == 60.0
    for _ in range(2000):
        meter.lap("env_step")
    meter._last -= 7.0  # one step that takes 7 s is less than one in a thousand
    meter.lap("env_step")
    assert step_timeout(0.0, meter.usual_s()) == 60.0
    for _ in range(10):
        meter._last -= 7.0
        meter.lap("env_step")
    assert step_timeout(0.0, meter.usual_s()) == 20 * 8.0  # powers of two: up to 8 s
    assert step_timeout(2.5, meter.usual_s()) == 2.5


@pytest.mark.fault_a
def test_worker_that_dies_while_the_run_stops_is_not_awaited():
    stop = threading.Event()
    plan = plan_for(lambda: Faulty(slow_step=0.05), num_steps=1000)
    collector = workers(plan, stop=stop.is_set)
    collector.publish(policies_for(plan), 0)
    pid = first_worker(collector)
    threading.Timer(0.5, lambda: (stop.set(), os.kill(pid, signal.SIGKILL))).start()
    assert collector.collect() is None
    assert collector.ledger.restarts == 0
    assert collector.ledger.collected == collector.ledger.lost > 0
    collector.close()


class Anything(Faulty):
    """Each of its objects fails in one way, some time: a soak's share of everything."""

    KINDS = ("segv", "abort", "exit", "kill", "hang", "spin", "crash", "nan", "inf", "wrong_shape")

    def __init__(self):
        rng = random.Random(os.urandom(8))
        super().__init__(f"{rng.choice(self.KINDS)}@{int(rng.expovariate(1 / 40_000)) + 200}")


SOAK_S = 600


@pytest.mark.faults
@pytest.mark.timeout(SOAK_S + 300)
def test_f24_ten_minutes_of_random_faults(tmp_path, measured):
    """No stop, no leak: memory's slope is below 1 MB a minute, and file descriptors stay."""
    ends_at, seen, before = time.monotonic() + SOAK_S, [], children()
    chaos = Chaos(random.Random(7), within_s=2.0)

    def look(iteration, metrics):
        rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        seen.append((time.monotonic(), rss, len(os.listdir("/proc/self/fd"))))
        if iteration % 100 == 0:
            chaos.soon()
        if time.monotonic() > ends_at:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        headrace.train(
            Anything, run_dir=tmp_path / "run", num_workers=2, num_envs=8, envs_per_vector=2,
            num_steps=64, total_env_steps=10**9, env_timeout_s=3.0, max_worker_restarts=10**6,
            on_env_error="restart", checkpoint_every_s=20, on_update=look, quiet=True,
        )  # fmt: skip
    chaos.join()
    assert ended.value.code == 128 + signal.SIGTERM
    resumed = headrace.resume(
        tmp_path / "run", env=Faulty, total_env_steps=env_steps_of(tmp_path / "run") + 2048,
        quiet=True,
    )  # fmt: skip
    assert_balanced(resumed.summary)
    ledger = resumed.summary["ledger"]
    assert resumed.summary["restarts"] > 20 and ledger["dropped_episodes"] > 20
    assert len(children() - before) <= 2
    settled = [(at, rss) for at, rss, _ in seen if at > seen[0][0] + 60]
    slope = slope_per_minute(settled)
    assert slope < 1e6, f"{slope / 1e6:.2f} MB a minute"
    files = [count for at, _, count in seen if at > seen[0][0] + 60]
    assert max(files[len(files) // 2 :]) <= max(files[: len(files) // 2]) + 4
    measured(
        "F24",
        f"{SOAK_S / 60:g} minutes: {resumed.summary['restarts']} workers replaced, "
        f"{ledger['dropped_episodes']} episodes dropped, {ledger['collected']:,} env steps; memory "
        f"{slope / 1e6:+.2f} MB a minute, {files[0]} to {files[-1]} open files",
        lost_env_steps=resumed.summary["lost_env_steps"],
    )


def env_steps_of(run_dir):
    return checkpoint.newest(run_dir).manifest["counters"]["env_steps"]


def slope_per_minute(points):
    """Bytes a minute: a line through all points, by least squares."""
    n = len(points)
    mean_t = sum(t for t, _ in points) / n
    mean_y = sum(y for _, y in points) / n
    over = sum((t - mean_t) * (y - mean_y) for t, y in points)
    return 60 * over / sum((t - mean_t) ** 2 for t, _ in points)


@pytest.mark.fault_a
def test_episode_survives_the_loss_of_many_workers():
    """It goes on through all batches, and in each of them its worker is lost."""
    plan = plan_for(Counting, guards=Guards(max_restarts=100))  # which never ends
    collectors = workers(plan), inline(plan)
    for collector in collectors:
        collector.publish(policies_for(plan), 0)
    for _ in range(5):
        os.kill(first_worker(collectors[0]), signal.SIGKILL)
        batches = [collector.collect() for collector in collectors]
        for ours, theirs in zip(*(b.fragments for b in batches), strict=True):
            assert ours.obs.equal(theirs.obs) and ours.action.equal(theirs.action)
    assert collectors[0].ledger.restarts == 5
    assert collectors[0].ledger.lost == 0
    for collector in collectors:
        collector.close()


@pytest.mark.more
@pytest.mark.fault_a
def test_restarts_accumulate_no_files_and_processes():
    """File descriptors and processes after many replacements."""
    plan = plan_for(short_cartpole, guards=Guards(max_restarts=100))
    collector = workers(plan)
    collector.publish(policies_for(plan), 0)
    collector.collect()
    files, processes = len(os.listdir("/proc/self/fd")), len(children())
    for _ in range(10):
        os.kill(first_worker(collector), signal.SIGKILL)
        assert collector.collect() is not None
    assert collector.ledger.restarts == 10
    assert len(os.listdir("/proc/self/fd")) == files
    assert len(children()) == processes
    collector.close()
