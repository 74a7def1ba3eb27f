"""F26: the supervisor against workers of our own, on a clock of our own, in 10,000 schedules.

The world here does what processes do: they start, take steps, deliver, crash, hang, are stopped and
go on, and what a process wrote before its end may be heard after it. A schedule is a seed; a
failing one is run again with `pytest -k "f26 and 1234"` after `SEEDS` was set to it.
"""

import itertools
import random

import pytest

from headrace.collectors.supervisor import Supervisor
from tests.marks import repeats

pytestmark = pytest.mark.fault_a

SEEDS = range(10_000)
T = 4  # steps of a fragment
LIMIT_S = 5.0


class Process:
    """One worker process, as the world knows it."""

    def __init__(self, worker, generation, now, place):
        self.place = place  # batches that its environments have behind them
        self.worker, self.generation = worker, generation
        self.alive, self.stopped, self.hangs = True, False, False
        self.up, self.progress_at = False, now
        self.batch = None  # that it is filling
        self.mailbox = []  # what it has said and nobody has heard


class World:
    """Workers with memory, processes in them, and the ledger of their steps."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.now = 0.0
        self.num_workers = self.rng.randint(1, 4)
        self.supervisor = Supervisor(
            self.num_workers, restart=self.rng.random() < 0.9, max_restarts=self.rng.randint(0, 6)
        )
        self.process = [None] * self.num_workers
        self.memory = [(None, None, 0)] * self.num_workers  # (generation, batch, steps written)
        self.delivered = {}
        self.batch, self.entered = -1, 0
        self.goes_on = self.rng.choice([0.3, 0.02])  # how soon a process that was stopped does
        self.collected = self.learned = self.lost = 0
        self.starts = [[] for _ in range(self.num_workers)]
        self.failed = False

    def write(self, process):
        """A step: into the memory of the worker, which must not have two writers."""
        generation, batch, steps = self.memory[process.worker]
        if (generation, batch) != (process.generation, process.batch):
            steps = 0
        self.memory[process.worker] = (process.generation, process.batch, steps + 1)
        self.collected += 1
        process.progress_at = self.now

    def run_processes(self):
        for process in self.process:
            if process is None or not process.alive or process.stopped or process.hangs:
                continue
            dice = self.rng.random()
            if dice < 0.03:
                process.alive = False
            elif dice < 0.05:
                process.hangs = True
            elif dice < 0.08:
                process.stopped = True
            elif not process.up:
                process.up, process.progress_at = True, self.now
                process.mailbox.append(("ready", process.generation, None))
            elif process.batch is not None:
                self.write(process)
                if self.memory[process.worker][2] == T:
                    process.mailbox.append(("done", process.generation, process.batch))
                    process.batch = None

    def continue_some(self):
        for process in self.process:
            if process is not None and process.stopped and self.rng.random() < self.goes_on:
                process.stopped = False

    def lose(self, worker):
        """Do what the pool does: end the process first; only then may another come."""
        process, self.process[worker] = self.process[worker], None
        process.alive = False
        generation, batch, steps = self.memory[worker]
        if (generation, batch) != (process.generation, self.batch):
            steps = 0
        if worker in self.supervisor.pending:
            self.lost += steps
        if self.supervisor.lost(worker, self.now, steps) is None:
            self.failed = True

    def learner_looks(self):
        """Do one round of the pool's loop."""
        sup = self.supervisor
        for worker in sup.due(self.now):
            assert self.process[worker] is None  # never two in a worker
            generation, anew = sup.begin(worker, self.now)
            assert generation == len(self.starts[worker]) + 1
            self.starts[worker].append((self.now, anew))
            self.process[worker] = Process(worker, generation, self.now, self.entered)
        for worker, batch in sup.to_send(self.now):
            assert self.process[worker].up
            self.process[worker].batch, self.process[worker].progress_at = batch, self.now
        for process in self.process:
            if process is not None:
                self.listen(process)
            if self.failed:
                return

        def progress(worker):
            process = self.process[worker]
            return (process.generation, process.up, self.memory[worker]) if process else None

        for worker, _ in sup.stalled(self.now, LIMIT_S, progress):
            assert self.now - self.process[worker].progress_at > LIMIT_S  # nobody who goes on
            self.lose(worker)
            if self.failed:
                return

    def listen(self, process):
        worker, ended = process.worker, not process.alive
        heard, process.mailbox = process.mailbox, []
        if self.rng.random() < 0.05:  # words of one that was there before, late
            late = self.rng.choice(["ready", "done"])
            heard.insert(0, (late, process.generation - 1, self.batch))
        for kind, generation, batch in heard:
            if kind == "ready":
                self.supervisor.ready(worker, generation)
            elif self.supervisor.delivered(worker, generation, batch):
                assert batch == self.batch
                assert self.memory[worker] == (process.generation, self.batch, T)
                assert process.place == self.batch  # it went on from where the last batch ended
                process.place += 1
                assert worker not in self.delivered
                self.delivered[worker] = generation
        if ended:
            self.lose(worker)

    def collect(self):
        self.batch += 1
        self.entered = self.batch  # the one before counts: who comes now goes on after it
        self.delivered = {}
        for worker in range(self.num_workers):
            self.supervisor.order(worker, self.batch)
        for _ in range(10_000):
            self.now += self.rng.choice([0.01, 0.1, 0.4])
            self.run_processes()
            self.continue_some()
            self.learner_looks()
            if self.failed:
                return False
            if not self.supervisor.pending:
                assert set(self.delivered) == set(range(self.num_workers))
                self.learned += self.num_workers * T
                return True
        raise AssertionError("it never ends")

    def run(self):
        for _ in range(self.rng.randint(1, 5)):
            if not self.collect():
                break
            if self.rng.random() < 0.3:  # the learner learns for long, or the machine sleeps
                self.now += self.rng.choice([3.0, 1000.0])


@repeats("first", range(0, len(SEEDS), 1000), keep=3)
def test_f26_all_schedules_keep_the_invariants(first):
    ended = {True: 0, False: 0}
    for seed in SEEDS[first : first + 1000]:
        world = World(seed)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}") from error
        in_flight = sum(
            world.memory[worker][2] for worker in world.supervisor.pending
            if world.process[worker] is not None
            and world.memory[worker][:2] == (world.process[worker].generation, world.batch)
        )  # fmt: skip
        # Delivered in a batch that another worker failed in: neither lost nor learned from.
        if world.failed:
            in_flight += T * len(world.delivered)
        assert world.collected == world.learned + world.lost + in_flight, f"schedule {seed}"
        for starts in world.starts:
            assert_backed_off(starts, seed)
        ended[world.failed] += 1
    assert min(ended.values()) > 50  # both ways were tried


def assert_backed_off(starts, seed):
    """Never two at a time, and never new episodes at the first try."""
    for number, ((before, _), (after, anew)) in enumerate(itertools.pairwise(starts)):
        assert after >= before, f"schedule {seed}"
        assert anew <= number, f"schedule {seed}"


def test_f26_restart_rate_has_a_window():
    supervisor = Supervisor(1, restart=True, max_restarts=2)
    waits = []
    for now in (0.0, 10.0, 20.0):
        supervisor.begin(0, now)
        waits.append(supervisor.lost(0, now, None))
        if now == 10.0:
            assert supervisor.due(10.4) == [] and supervisor.due(10.5) == [0]
    assert waits == [0.0, 0.5, None]
    again = Supervisor(1, restart=True, max_restarts=2)
    waits = []
    for now in (0.0, 400.0, 800.0, 1200.0):
        again.begin(0, now + 100)
        waits.append(again.lost(0, now + 100, None))
    assert waits == [0.0, 0.5, 1.0, 2.0]


def test_f26_delivered_fragment_resets_the_backoff():
    supervisor = Supervisor(1, restart=True, max_restarts=9)
    waits = []
    for generation in range(1, 5):
        supervisor.begin(0, 0.0)
        supervisor.ready(0, generation)
        if generation == 3:
            supervisor.order(0, "it")
            supervisor.to_send(0.0)
            assert not supervisor.delivered(0, generation, "something else")
            assert supervisor.delivered(0, generation, "it")
        waits.append(supervisor.lost(0, 0.0, None))
    assert waits == [0.0, 0.5, 0.0, 0.5]


def test_f26_fragment_lost_twice_at_one_place_gets_new_episodes():
    supervisor = Supervisor(1, restart=True, max_restarts=9)
    assert supervisor.begin(0, 0.0) == (1, 0)
    assert supervisor.ready(0, 1)
    supervisor.order(0, "it")
    assert supervisor.to_send(0.0) == [(0, "it")]
    assert not supervisor.delivered(0, 0, "it")  # of nobody
    supervisor.lost(0, 1.0, position=7)
    assert supervisor.begin(0, 1.0) == (2, 0)  # as it was
    assert not supervisor.ready(0, 1)  # late
    for generation, where, anew in ((2, 8, 0), (3, 8, 1), (4, 8, 2), (5, 2, 2)):
        assert supervisor.ready(0, generation)
        assert supervisor.to_send(1.0) == [(0, "it")]
        assert not supervisor.delivered(0, generation - 1, "it")  # late
        supervisor.lost(0, 2.0, where)
        assert supervisor.begin(0, 99.0) == (generation + 1, anew)
    assert supervisor.restarts == 5


def test_f26_only_observed_stalls_count():
    """Whoever watches may have been asleep: nobody is killed for that."""
    supervisor = Supervisor(1, restart=True, max_restarts=9)
    supervisor.begin(0, 0.0)
    supervisor.ready(0, 1)
    supervisor.order(0, "it")
    supervisor.to_send(0.0)
    assert supervisor.stalled(0.1, LIMIT_S, lambda worker: 7) == []
    assert supervisor.stalled(1000.0, LIMIT_S, lambda worker: 7) == []
    assert supervisor.stalled(1000.1, LIMIT_S, lambda worker: 8) == []
    now = 1000.1
    supervisor_starting = Supervisor(1, restart=True, max_restarts=9)
    supervisor_starting.begin(0, now)
    while not supervisor.stalled(now, LIMIT_S, lambda worker: 8):
        now += 0.1
        assert supervisor_starting.stalled(now, LIMIT_S, lambda worker: 8) == []
    assert LIMIT_S < now - 1000.1 < LIMIT_S + 0.3
    while not supervisor_starting.stalled(now, LIMIT_S, lambda worker: 8):
        now += 0.1
    assert 10 * LIMIT_S < now - 1000.1 < 10 * LIMIT_S + 0.5  # making environments takes longer
    supervisor_starting.lost(0, now, None)
    supervisor_starting.begin(0, now)  # the next has all of it again, and nothing to show yet
    assert supervisor_starting.stalled(now + 0.1, LIMIT_S, lambda worker: 8) == []


def test_f26_delivered_fragment_is_a_sign_of_life():
    """Whatever else is seen of who made it, and however late."""
    supervisor = Supervisor(1, restart=True, max_restarts=9)
    supervisor.begin(0, 0.0)
    supervisor.ready(0, 1)
    for k in range(20):
        supervisor.order(0, k)
    supervisor.to_send(0.0)
    now = 0.0
    for k in range(10):
        for _ in range(6):
            now += LIMIT_S / 10
            assert supervisor.stalled(now, LIMIT_S, lambda worker: 7) == []
        assert supervisor.delivered(0, 1, k)
    for _ in range(20):
        now += LIMIT_S / 10
        found = supervisor.stalled(now, LIMIT_S, lambda worker: 7)
    assert found == [(0, LIMIT_S)]
