"""F26 for sampling that never stops: queue and supervisor in 10,000 schedules, on a fake clock.

As in `test_protocol.py` the world here does what processes do, and a schedule is a seed. The
learner of this world learns for a while, in which it hears nothing; workers work on until they
have no memory left. Then real workers are killed.
"""

import random
from collections import deque

import pytest

import headrace
from headrace.collectors.asynchronous import Queue
from headrace.collectors.supervisor import Supervisor
from headrace.errors import EnvError
from tests.faults.test_env import SMALL, assert_balanced, train
from tests.faults.test_workers import RUN, Chaos, losses
from tests.marks import repeats

__all__ = ["losses"]  # a fixture

SEEDS = range(10_000)
T = 3  # steps of a fragment
LIMIT_S = 5.0


class Process:
    """One worker process, as the world knows it."""

    def __init__(self, worker, generation, now, places):
        self.worker, self.generation, self.places = worker, generation, places
        self.alive, self.hangs, self.up, self.progress_at = True, False, False, now
        self.orders = deque()  # (vector, buffer, number of the fragment)
        self.mailbox = []  # what it has said and nobody has heard
        self.beats = 0


class World:
    """Workers with vectors, buffers of these, processes, weights, and the ledger."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.now, self.version = 0.0, 0
        self.num_workers, self.lag = rng.randint(1, 3), rng.randint(1, 4)
        self.shares = [[] for _ in range(self.num_workers)]
        for v in range(self.num_workers * rng.randint(1, 2)):
            self.shares[v % self.num_workers].append(v)
        self.vectors = sorted(v for share in self.shares for v in share)
        self.slow = {worker: rng.choice([1.0, 1.0, 0.1]) for worker in range(self.num_workers)}
        self.in_turns = rng.random() < 0.5  # several orders at a time, where another acts
        self.queue = Queue(self.vectors, self.lag)
        self.supervisor = Supervisor(self.num_workers, restart=True, max_restarts=rng.randint(0, 6))
        self.process = [None] * self.num_workers
        self.memory = {}  # buffer -> steps in it: (generation, fragment's number, version)
        self.owner = {}  # buffer -> "worker", "queue" or "learner"
        self.ordered = dict.fromkeys(self.vectors, 0)
        self.delivered = dict.fromkeys(self.vectors, 0)  # fragments, heard of
        self.learned_up_to = dict.fromkeys(self.vectors, 0)
        self.acted_with = dict.fromkeys(self.vectors, 0)
        self.collected = self.learned = self.lost = 0
        self.failed = False

    def run_processes(self):
        for process in self.process:
            if process is None or not process.alive or process.hangs:
                continue
            dice = self.rng.random()
            if dice < 0.01:
                process.alive = False
            elif dice < 0.015:
                process.hangs = True
            elif not process.up:
                process.up, process.progress_at = True, self.now
                process.mailbox.append(("ready", process.generation, None))
            elif process.orders and self.rng.random() < self.slow[process.worker]:
                self.step(process)

    def step(self, process):
        """One step of a vector, with the newest weights: of the first order's, or in any turns."""
        i = 0
        if self.in_turns:  # each vector's own orders in their order
            firsts = {v: i for i, (v, _, _) in reversed(list(enumerate(process.orders)))}
            i = self.rng.choice(sorted(firsts.values()))
        v, buffer, number = order = process.orders[i]
        assert self.owner[v, buffer] == "worker"  # nobody reads it, nobody else writes
        assert number == process.places[v]  # right after what this vector did before
        steps = self.memory[v, buffer]
        if steps and steps[0][0] != process.generation:
            steps.clear()  # of one that was lost, and counted
        assert self.version >= self.acted_with[v]  # never back to older weights
        self.acted_with[v] = self.version
        steps.append((process.generation, number, self.version))
        self.collected += 1
        process.beats, process.progress_at = process.beats + 1, self.now
        if len(steps) == T:
            process.orders.remove(order)
            process.places[v] += 1
            process.mailbox.append(("done", process.generation, order))

    def order(self):
        for v, buffer in self.queue.to_order():
            assert self.owner.get((v, buffer)) != "queue"
            self.owner[v, buffer], self.memory[v, buffer] = "worker", []
            self.supervisor.order(v % self.num_workers, (v, buffer, self.ordered[v]))
            self.ordered[v] += 1

    def lose(self, worker):
        """Do what the pool does: end the process first; only then may another come."""
        process, self.process[worker] = self.process[worker], None
        process.alive = False
        unfinished = [self.memory[v, b] for v, b, _ in self.supervisor.orders(worker)]
        self.lost += sum(map(len, unfinished))
        for steps in unfinished:
            steps.clear()
        if self.supervisor.lost(worker, self.now, None) is None:
            self.failed = True

    def listen(self, process):
        worker, ended = process.worker, not process.alive
        heard, process.mailbox = process.mailbox, []
        if self.rng.random() < 0.05:  # words of one that was there before, late
            late = self.rng.choice(["ready", "done"])
            orders = self.supervisor.orders(worker)
            heard.insert(0, (late, process.generation - 1, orders[0] if orders else None))
        for kind, generation, order in heard:
            if kind == "ready":
                self.supervisor.ready(worker, generation)
            elif self.supervisor.delivered(worker, generation, order):
                v, buffer, number = order
                assert [s[:2] for s in self.memory[v, buffer]] == [(generation, number)] * T
                assert number == self.delivered[v]  # each once, in order
                self.delivered[v] += 1
                self.queue.deliver((v, buffer))
                self.owner[v, buffer] = "queue"
        if ended:
            self.lose(worker)

    def learner_looks(self):
        """Do one round of the pool's loop."""
        sup = self.supervisor
        for worker in sup.due(self.now):
            assert self.process[worker] is None  # never two in a worker
            generation, _ = sup.begin(worker, self.now)
            places = {v: self.delivered[v] for v in self.shares[worker]}
            self.process[worker] = Process(worker, generation, self.now, places)
        for worker, order in sup.to_send(self.now):
            process = self.process[worker]
            if not process.orders:
                process.progress_at = self.now
            process.orders.append(order)
        for process in self.process:
            if process is not None:
                self.listen(process)
            if self.failed:
                return

        def progress(worker):
            process = self.process[worker]
            return (process.generation, process.up, process.beats) if process else None

        for worker, _ in sup.stalled(self.now, LIMIT_S, progress):
            assert self.now - self.process[worker].progress_at > LIMIT_S  # nobody who goes on
            self.lose(worker)
            if self.failed:
                return

    def collect(self):
        """A batch, as soon as there are fragments for one."""
        self.queue.release()
        self.order()
        for _ in range(20_000):
            self.learner_looks()
            if self.failed:
                return False
            if self.queue.has_batch:  # it waits for nobody in particular
                self.read(self.queue.take())
                return True
            self.now += self.rng.choice([0.01, 0.1, 0.4])
            self.run_processes()
        raise AssertionError("it never ends")

    def read(self, batch):
        assert len(batch) == len(self.vectors)
        assert self.queue.depth <= self.lag
        for v, buffer in batch:
            assert self.owner[v, buffer] == "queue"
            self.owner[v, buffer] = "learner"
            versions = [version for _, _, version in self.memory[v, buffer]]
            assert versions == sorted(versions) and versions[-1] <= self.version
            assert self.memory[v, buffer][0][1] == self.learned_up_to[v]  # nothing is left out
            self.learned_up_to[v] += 1
            self.learned += T

    def learn(self):
        """Workers work on, and nobody listens."""
        self.queue.release()
        self.order()
        for worker, order in self.supervisor.to_send(self.now):
            self.process[worker].orders.append(order)
        for _ in range(self.rng.choice([0, 5, 100])):
            self.now += 0.1
            self.run_processes()
        self.version += 1

    def run(self):
        for _ in range(self.rng.randint(1, 6)):
            if not self.collect():
                break
            self.learn()

    @property
    def left(self):
        """Steps that are in memory, and not learned from."""
        return sum(len(self.memory[b]) for b, of in self.owner.items() if of != "learner")


@pytest.mark.fault_a
@repeats("first", range(0, len(SEEDS), 1000), keep=3)
def test_f26_all_asynchronous_schedules_keep_the_invariants(first):
    ended, uneven = {True: 0, False: 0}, 0
    for seed in SEEDS[first : first + 1000]:
        world = World(seed)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}") from error
        balance = world.collected - world.learned - world.lost
        assert balance == world.left, f"schedule {seed}"
        ended[world.failed] += 1
        uneven += len(set(world.learned_up_to.values())) > 1
    assert min(ended.values()) > 50 and uneven > 50  # all of these were tried


@pytest.mark.more
@pytest.mark.fault_a
def test_f01_killed_asynchronous_workers_lose_a_fragment_each(tmp_path, measured, losses):
    chaos = Chaos(random.Random(1), within_s=0.03)

    def kill_now_and_then(iteration, metrics):
        if iteration % 10 == 0 and iteration <= 100:
            chaos.soon()

    run = headrace.train(
        "CartPole-v1", run_dir=tmp_path / "run", num_workers=2, max_worker_restarts=100, lag=2,
        on_update=kill_now_and_then, **RUN | {"algo": "appo"},
    )  # fmt: skip
    chaos.join()
    restarts, lost = run.summary["restarts"], run.summary["lost_env_steps"]
    assert 5 <= restarts == len(losses) <= len(chaos.killed_at) <= 10
    assert_balanced(run.summary)
    # Of each that is killed its unfinished fragment; at the end, what is not learned from.
    fragment = 2 * 32
    assert 0 < lost <= restarts * fragment + 2 * 3 * fragment
    assert run.summary["ledger"]["remade"] == 0
    for killed_at in chaos.killed_at:
        later = [at - killed_at for at in losses if at >= killed_at]
        measured(
            "F01", "kill -9 of a worker that never stops, at a random time of 10 in a run",
            detect_s=min(later, default=None), within_s=1, lost_env_steps=lost,
        )  # fmt: skip


@pytest.mark.more
@pytest.mark.fault_a
def test_f03_f05_errors_and_hangs_of_asynchronous_workers(tmp_path, capsys):
    """An environment's own error ends the run; a hang costs the one that hangs its fragment."""
    (tmp_path / "once").mkdir()
    kwargs = {"faults": "hang@40", "once": str(tmp_path / "once"), "slow_step": 0.005}
    more = SMALL | {"lag": 1, "algo": "appo", "env_timeout_s": 2.0, "num_workers": 2}
    run = headrace.train(
        "headrace.envs.faulty:Faulty", run_dir=tmp_path / "hang", env_kwargs=kwargs,
        **more | {"total_env_steps": 64 * 30, "quiet": False},
    )  # fmt: skip
    assert "has not answered for 2 s and was killed" in capsys.readouterr().out
    assert run.summary["restarts"] == 1
    assert_balanced(run.summary)
    with pytest.raises(EnvError, match=r"worker \d"):
        train(tmp_path / "error", faults="crash@40", lag=1, algo="appo")
