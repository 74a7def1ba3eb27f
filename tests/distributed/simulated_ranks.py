"""Ranks as tasks of a simulation: one runs at a time, in an order that a seed decides.

The loop, the agreement after a loss, and the way into the next group are the real ones; simulated
are the clock, collectives, and what a rank collects and learns. A task gives way at each
collective, each wait and each batch. There it may be killed, or cut off: then it goes on, in groups
that the others have left, while another takes its place.
"""

import random
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import torch
from torch.distributed import HashStore

from headrace.collectors.api import Collected, Ledger
from headrace.distributed import groups
from headrace.distributed.ranks import JoinedRanks, RankInfo
from headrace.errors import RankLostError
from headrace.meter import Meter
from headrace.training.counters import Counters
from headrace.training.loop import Loop
from headrace.training.rejoin import Iteration, agree

STEPS_OF_UPDATE = 3
ENV_STEPS = 10
"""Of a worker's fragment; without workers, of a rank's batch."""


class Killed(BaseException):
    """This task is killed. No code of a rank may catch it."""


class Task:
    """A thread that runs only while the world lets it."""

    def __init__(self, world, name, function):
        self.world, self.name = world, name
        self.is_killed = self.is_cut_off = False
        self.ready, self.wake_at, self.has_ended = lambda: True, 0.0, False
        self.go, self.result = threading.Semaphore(0), None

        def run():
            self.go.acquire()
            try:
                if not self.is_killed:
                    self.result = function()
            except Killed:
                pass
            except BaseException as error:
                self.result = error
            self.has_ended = True
            world.back.release()

        threading.Thread(target=run, daemon=True).start()

    def give_way(self, until=None, seconds=0.0):
        """Let another task run; return once `until` is true, or the seconds have passed."""
        self.ready = until or (lambda: True)
        self.wake_at = self.world.now + seconds
        self.world.back.release()
        self.go.acquire()
        if self.is_killed:
            raise Killed


class World:
    """All tasks, the clock, and the groups of ranks."""

    def __init__(self, seed, size, updates, losses, workers=1):
        """Args: `losses` of ranks at most; `workers` of each rank, any of which may be lost."""
        self.workers = workers
        self.random, self.size, self.updates = random.Random(seed), size, updates
        self.back, self.now, self.current = threading.Semaphore(0), 0.0, None
        self.store, self.groups, self.losses_left = HashStore(), {}, losses
        self.tasks, self.killed, self.group = {}, [], 0
        self.given_up = []  # tasks that were cut off, and have a successor
        self.kill_rate = self.random.choice([0.005, 0.02, 0.1])
        self.may_kill_early = self.random.random() < 0.1

    @property
    def begins_again(self):
        """Whether a rank could not go on, so that all are to begin again from a checkpoint."""
        return any(isinstance(task.result, RankLostError) for task in self.tasks.values())

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.current.give_way(seconds=seconds)

    def start(self, rank, group):
        self.tasks[rank] = Task(self, f"rank {rank}", lambda: run_rank(self, rank, group))

    def run(self):
        """Run all to their end; AssertionError: they wait for each other."""
        with mock.patch.multiple(groups, time=self, JoinedRanks=SimulatedRanks):
            for rank in range(self.size):
                self.start(rank, 0)
            driver = Task(self, "driver", self._replace)
            while not driver.has_ended:
                tasks = (driver, *self.tasks.values(), *self.given_up)
                under_way = [t for t in tasks if not t.has_ended]
                able = [t for t in under_way if t.wake_at <= self.now and t.ready()]
                if not able:
                    later = [task.wake_at for task in under_way if task.wake_at > self.now]
                    assert later, f"all wait: {[task.name for task in under_way]}"
                    self.now = min(later)
                    continue
                self.current = self.random.choice(able)
                self._maybe_kill(self.current)
                self.current.go.release()
                self.back.acquire()
                assert self.now < 3600, "it takes for ever"
            self._end()

    def _end(self):
        """End the threads of tasks that wait."""
        for task in (*self.tasks.values(), *self.given_up):
            while not task.has_ended:
                task.is_killed = True
                task.go.release()
                self.back.acquire()

    def _maybe_kill(self, task):
        is_rank = task in self.tasks.values()
        if not (is_rank and self.losses_left) or any(t.result for t in self.tasks.values()):
            return
        has_begun = 0 in self.groups and len(self.groups[0].rounds) > 2
        if not (has_begun or self.may_kill_early):
            return
        if self.random.random() < self.kill_rate:
            self.losses_left -= 1
            if has_begun and self.random.random() < 0.3:
                task.is_cut_off = True
            else:
                task.is_killed = True
            rank = next(rank for rank, each in self.tasks.items() if each is task)
            self.killed.append(rank)
            for group in self.groups.values():
                group.leave(rank)

    def _replace(self):
        """Do what the driver does: start a successor of each lost rank, and announce its group."""
        give_up_at = float("inf")
        while not (self.begins_again or all(task.result for task in self.tasks.values())):
            if any(task.result for task in self.tasks.values()):
                give_up_at = min(give_up_at, self.now + groups.JOIN_WITHIN_S)
            if self.now > give_up_at:  # others wait for one that has ended
                return
            for rank, task in list(self.tasks.items()):
                if task.is_cut_off or (task.has_ended and task.is_killed):
                    self.sleep(self.random.choice([0.0, 0.1, 5.0]))
                    self.group += 1
                    if task.is_cut_off:
                        self.given_up.append(task)
                    self.start(rank, self.group)
                    groups.announce(self.store, self.group, f"rank {rank} was lost", [rank])
            self.sleep(0.5)


class Group:
    """One group of ranks, and its collectives."""

    def __init__(self, size):
        self.size, self.rounds, self.gone = size, {}, set()

    def leave(self, rank):
        self.gone.add(rank)


class SimulatedRanks(JoinedRanks):
    """A rank whose collectives take place in a world."""

    world = None  # set by `run_rank`, on a class of its own

    def __init__(self, info, store, backend, device, limit_s, next_group, meet_within_s):
        self.rank, self.size, self.local_rank = info.rank, info.size, 0
        self._next_group, self._has_rejoined, self._round = next_group, False, 0
        self._world = WORLD.get()
        self._join(store, meet_within_s)

    def _join(self, store, within_s):
        number = self._next_group._group
        self._group = self._world.groups.setdefault(number, Group(self.size))
        self._round = 0
        try:
            self.gather_bytes(b"host", self._world.now + within_s)
        except RankLostError:
            self.close()
            raise

    def close(self):
        self._group.leave(self.rank)

    def gather_bytes(self, data, until=None):
        group, task = self._group, self._world.current
        task.give_way()
        if task.is_cut_off:
            raise RankLostError("This rank is alone.")
        parts = group.rounds.setdefault(self._round, {})
        self._round += 1
        parts[self.rank] = data

        def is_over():
            return len(parts) == self.size or group.gone - set(parts)

        if until is None:
            task.give_way(lambda: is_over() or task.is_cut_off)
        while until is not None and not is_over() and self._world.now < until:
            self._world.sleep(1.0)
        if task.is_cut_off:
            raise RankLostError("This rank is alone.")
        is_whole = len(parts) == self.size
        # Where a rank has gone since, another may have seen the end of the round, or the loss.
        if not is_whole or (group.gone and self._world.random.random() < 0.5):
            raise RankLostError("Another rank is gone.")
        return [parts[rank] for rank in range(self.size)]


class _Current(threading.local):
    """The world of this thread."""

    def get(self):
        return self.world


WORLD = _Current()


class CountingLearner:
    """Weights that are a number: each gradient step changes it by the step's address."""

    def __init__(self, ranks):
        self.ranks, self.policies = ranks, {}
        self.version = self.weights = self.made = self.skip = 0
        self.steps = []

    positions = property(lambda self: [(self.version, self.made)])

    def leave_ranks(self):
        pass

    def join_ranks(self):
        pass

    def assemble(self, fragments):
        return {}

    def update(self, batch, env_steps, new_env_steps):
        self.skip = self.made
        self.ranks.gather_bytes(b"advantages")
        for step in range(STEPS_OF_UPDATE):
            if self.skip:
                self.skip -= 1
                continue
            self.ranks.gather_bytes(b"gradient")
            self.weights = hash((self.weights, self.version, step))
            self.made += 1
        self.version += 1
        self.made = 0
        self.ranks.gather_bytes(b"metrics")
        return {"nonfinite": 0.0}

    def shared_state(self):
        return {}, {"default": [self.version, self.weights, self.made]}

    def load_shared_state(self, tensors, values):
        self.version, self.weights, self.made = values["default"]


@dataclass
class Batches:
    """A collector: each batch takes time, in which the rank may be killed."""

    world: World
    ledger: Ledger = field(default_factory=Ledger)
    published: int = -1

    def publish(self, policies, version):
        self.published = version

    def collect(self):
        self.world.sleep(self.world.random.choice([0.0, 0.1, 3.0]))
        env_steps = self.world.workers * ENV_STEPS
        if self.world.workers > 1:
            self._lose_workers()
        self.ledger.collected += env_steps
        return Collected([], env_steps)

    def _lose_workers(self):
        """Lose fragments that workers had begun: each is made again, by as many steps."""
        for _ in range(self.world.workers):
            if self.world.random.random() < 0.01:
                self.world.sleep(1.0)
                made = self.world.random.randint(1, ENV_STEPS)
                self.ledger.collected += made
                self.ledger.remade += made
                self.ledger.restarts += 1

    def release_batch(self, *, more):
        pass

    def discard_batch(self):
        self.ledger.lost += self.world.workers * ENV_STEPS

    def halt(self):
        pass

    def change_envs(self, changes):
        pass


def run_rank(world, rank, group):
    """Run a rank to its end; return what it has learned and counted."""
    WORLD.world = world
    ranks = groups.join(
        world.store, RankInfo(rank, world.size, 0), "gloo", torch.device("cpu"), 600.0,
        group=group, replaces=True,
    )  # fmt: skip
    learner, counters, iteration = CountingLearner(ranks), Counters(), Iteration()
    if ranks.is_successor:
        agree(ranks, learner, counters, None, iteration)
    saver = SimpleNamespace(
        saved_version=-1, is_due=lambda: False, save=lambda: ranks.gather_bytes(b"saved"),
        check_finite=lambda metrics, batch: None,
    )  # fmt: skip
    run = SimpleNamespace(
        total_env_steps=world.updates * world.size * world.workers * ENV_STEPS, stop_after_s=0.0,
        stop_at_return=None, check_ranks=0,
    )  # fmt: skip
    collector = Batches(world)
    Loop(
        run, collector, learner, counters, Meter(), ranks, saver, lambda is_last: {},
        lambda metrics: [], lambda text: None, iteration=iteration,
    ).train()  # fmt: skip
    return learner, counters, collector
