"""The worker processes of a rank: started, told, listened to, replaced, ended.

What they write and read lies in anonymous shared memory: weights, and a *slot* for each worker with
the fragments of its vectors, which whoever has an order for them owns. A worker that dies or hangs
is replaced, and its orders are given to the other. Where they do not act themselves, a thread here
does (`inference.py`).

Left out: what is ordered, and what becomes of it (`workers.py`, `nonstop.py`); who is started and
told when (`supervisor.py`); one process (`handle.py`, `worker.py`); other machines.
"""

import atexit
import contextlib
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing import connection
from typing import Any

import cloudpickle

from headrace import patience
from headrace.batch import Fragment
from headrace.collect import forkserver
from headrace.collect.api import Ledger, Plan, Say, ShouldStop
from headrace.collect.handle import Handle, in_memory
from headrace.collect.inference import Inference
from headrace.collect.journal import Journals, missing, unwritten
from headrace.collect.orders import Order, Orders, Slot
from headrace.collect.rollout import Filled, lag_metrics
from headrace.collect.seat import Seat
from headrace.collect.supervisor import Supervisor
from headrace.envs.api import Restored
from headrace.errors import ConfigError, SamplerError, UsageError
from headrace.models import policy as policies
from headrace.models.policy import Policy
from headrace.weights import Published

_LOOK_EVERY_S = 0.1
_STOP_WITHIN_S = 5.0  # how long a worker that was told to stop may take for the step under way
_CLOSE_WITHIN_S = 3.0


class Crew:
    """The workers of a rank.

    Args:
        plan: what to sample.
        num_workers: W, at most the number of vectors, which they take in turns.
        journals: where the environments are.
        stop: asked while waiting whether to give up.
        say: told of workers that were lost.
        remakes: a worker that takes over makes the same steps again, where it can.

    Attributes:
        ledger: of what workers did.
        restored: see `Collector`.
        delivered: what was carried out, and nobody has taken from here yet.

    Raises:
        ConfigError: this platform has no anonymous shared memory.
        EnvError: an environment could not be made.
        SamplerError: a worker did not come up.
    """

    def __init__(
        self,
        plan: Plan,
        num_workers: int,
        journals: Journals,
        stop: ShouldStop,
        say: Say,
        *,
        remakes: bool,
    ) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                f"num_workers={num_workers} needs Linux (memfd), and this is {sys.platform}.\n"
                "Use num_workers=0: all environments are stepped in the learner's process."
            )
        self._plan, self._journals, self._stop, self._say = plan, journals, stop, say
        self._remakes, self._give_up_at, self._watched_at = remakes, float("inf"), 0.0
        self.ledger, self.restored = Ledger(), Restored()
        self.delivered: list[tuple[Order, Filled]] = []
        self._supervisor = Supervisor(
            num_workers,
            restart=plan.guards.on_sampler_loss == "restart",
            max_restarts=plan.guards.max_restarts,
        )
        template = policies.build(plan.spec, plan.network, 0, plan.model)
        plan_fd = in_memory("plan", _pickled(plan))
        weights_fd, weights = _shared("weights", Published.num_bytes(template))
        self._published = Published(template, weights)
        self.shares = [list(plan.vectors)[i::num_workers] for i in range(num_workers)]
        sizes = [Slot.num_bytes(plan, len(share)) for share in self.shares]
        memory_fd, memory = _shared("fragments", sum(sizes))
        self._fds = [weights_fd, memory_fd, plan_fd]  # as `worker.main` takes them
        self._seats = [
            Seat(f"worker {i}", memory, sum(sizes[:i]), plan, share)
            for i, share in enumerate(self.shares)
        ]
        self._inference: Inference | None = None
        # multiprocessing's own way at exit is SIGTERM, which workers ignore, and then to wait.
        atexit.register(self.close)
        try:
            if plan.inference_device is not None:
                self._inference = Inference(plan, self._published)
            self.serve(lambda: self._supervisor.coming_up)
        except BaseException:
            self.close()
            raise

    @property
    def owing(self) -> list[int]:
        """Workers with orders that are not carried out."""
        return self._supervisor.owing

    @property
    def told_to_stop(self) -> bool:
        """Whether orders are given up: whatever is delivered from here on may not be whole."""
        return self._give_up_at < float("inf")

    def publish(self, policy: Policy, version: int) -> None:
        """Write weights where the workers read them."""
        self._published.publish(policy, version)

    def fragment(self, vector: int, buffer: int) -> Fragment:
        """One of a vector's."""
        seat = self._seats[self._sits(vector)]
        return seat.slot.fragments[vector][buffer]

    def order(self, order: Order) -> None:
        """Have fragments filled by the worker that has these vectors; sent by `serve`."""
        i = self._sits(order.fragments[0][0])
        for of in self._seats[i].fragments([order]).values():
            unwritten(of)
        self._supervisor.order(i, order)

    def serve(self, pending: Callable[[], list[int]]) -> None:
        """Start, tell, listen and replace until no worker is `pending`.

        Once told to stop, only those that answer in time are waited for, whatever they owe.
        """
        while self.owing if self.told_to_stop else pending():
            now = time.monotonic()
            if self._stop():
                self.stop(now)
            if self.told_to_stop:
                alive = [i for i in self.owing if self._seats[i].handle is not None]
                if not alive or now > self._give_up_at:
                    self._abandon(alive)
                    return
            self.look(_LOOK_EVERY_S)

    def look(self, wait_s: float = 0.0) -> None:
        """Start, tell, listen and replace, once; wait so long for something to be heard."""
        now = time.monotonic()
        if self._inference is not None:
            self._inference.check()
        if not self.told_to_stop:
            for i in self._supervisor.due(now):
                self._start(i, now)
        self.send(now)
        self._listen(wait_s)
        if now - self._watched_at >= _LOOK_EVERY_S:
            self._watched_at = now
            self._end_silent()

    def send(self, now: float) -> None:
        """Tell workers what is ordered."""
        for i, order in self._supervisor.to_send(now):
            seat = self._seats[i]
            seat.beats_at_order = seat.slot.beats[0]
            seat.tell(order)

    def halt(self) -> None:
        """Have workers stop where they are, and wait until they say what they have done."""
        self.stop(time.monotonic())
        self.serve(lambda: self.owing)

    def stop(self, now: float) -> None:
        """Workers are to stop where they are."""
        if not self.told_to_stop:
            self._published.stop[0] = 1
            self._give_up_at = now + _STOP_WITHIN_S

    def metrics(self, batch: list[Filled], depth: float) -> dict[str, float]:
        """Of how a batch came about; see `lag_metrics`."""
        metrics = lag_metrics(self._plan, batch, depth, self._meters())
        return metrics | (self._inference.metrics() if self._inference is not None else {})

    def meters(self) -> dict[str, dict[str, float]]:
        """See `Collector`."""
        own = {} if self._inference is None else {"inference": self._inference.seconds()}
        return self._meters() | own

    def _meters(self) -> dict[str, dict[str, float]]:
        """Of the workers."""
        return {seat.name: seat.meter() for seat in self._seats}

    def close(self) -> None:
        """See `Collector`. What a signal interrupts of it is done at exit."""
        self._published.stop[0] = 1  # a fragment under way is of no use any more
        for seat in self._seats:
            seat.tell(None)
        deadline = time.monotonic() + _CLOSE_WITHIN_S
        try:
            with contextlib.ExitStack() as stack:  # backwards, and goes on if one raises
                stack.callback(self._close_memory)
                for seat in self._seats:
                    stack.callback(seat.end, deadline)
        finally:
            if not any(seat.handle for seat in self._seats):
                atexit.unregister(self.close)
                self._seats = []

    def _close_memory(self) -> None:
        """What workers share; they have ended."""
        if self._inference is not None:
            self._inference.close()
            self._inference = None
        while self._fds:
            os.close(self._fds.pop())

    def _sits(self, vector: int) -> int:
        """Whose a vector is."""
        return (vector - self._plan.vectors.start) % len(self.shares)

    def _start(self, i: int, now: float) -> None:
        """Put a worker into a slot."""
        seat = self._seats[i]
        generation, anew = self._supervisor.begin(i, now)
        self.ledger.restarts = self._supervisor.restarts
        orders = Orders(
            name=seat.name,
            generation=generation,
            vectors=seat.vectors,
            offset=seat.offset,
            state={} if anew else self._journals.state(seat.vectors),
            begin_after=self._journals.steps(seat.vectors) + anew,
        )
        with contextlib.ExitStack() as stack:
            files = list(self._fds)
            if self._inference is not None:
                asks = stack.enter_context(self._inference.admit(i, seat.slot.fragments))
                files.append(asks.fileno())
            context = stack.enter_context(forkserver.context())
            seat.handle = Handle(context, orders, *files)

    def _listen(self, wait_s: float) -> None:
        """Wait a moment for words or the end of any worker."""
        watched: dict[Any, int] = {}
        for i, seat in enumerate(self._seats):
            if seat.handle is not None:
                watched |= {seat.handle.channel: i, seat.handle.process.sentinel: i}
        for i in {watched[ready] for ready in connection.wait(list(watched), wait_s)}:
            handle = self._seats[i].handle
            assert handle is not None
            ended = handle.has_ended  # before listening: what it said last is heard
            try:
                for message in handle.channel.take():
                    self._hear(i, *message)
            except EOFError:
                ended = True
            if ended:
                self._lose(i, handle.cause())

    def _hear(self, i: int, kind: str, generation: int, what: Any) -> None:
        seat = self._seats[i]
        match kind:
            case "ready" if self._supervisor.ready(i, generation):
                restored, states = what
                self._journals.begin(states)
                if generation == 1:
                    self.restored.add(restored)
                elif restored.new_episode:
                    self._say(
                        f"{seat.name.capitalize()}: {restored.new_episode} episodes could not be "
                        "brought back, and begin anew. From here on this run differs from one "
                        "in which no worker was lost."
                    )
                elif self._remakes:  # it goes on just where the fragment began
                    self.ledger.lost -= seat.lost_steps
                    self.ledger.remade += seat.lost_steps
                    seat.lost_steps = 0
            case "done" if seat.slot.generation[0] == generation:
                order, filled, seconds, usual_s = what
                if self._supervisor.delivered(i, generation, order):
                    seat.latest, seat.usual_s, seat.lost_steps = seconds, usual_s, 0
                    self.delivered.append((order, filled))
            case "error":
                raise what

    def _end_silent(self) -> None:
        """Kill workers that have shown no progress for too long."""
        guards, now = self._plan.guards, time.monotonic()
        if not guards.enabled:
            return
        usual_s = max(seat.usual_s for seat in self._seats)
        limit_s = patience.limit(guards.env_timeout_s, usual_s)
        if self._inference is not None:
            self._inference.watch(now, limit_s)

        def progress(i: int) -> tuple[int, int]:
            return self._seats[i].slot.beats[0], self._num_missing(i)

        for i, patience_s in self._supervisor.silent(now, limit_s, progress):
            handle = self._seats[i].handle
            assert handle is not None
            stack = handle.stack()
            why = f"has not answered for {patience_s:g} s and was killed (see --env-timeout-s)"
            self._lose(i, f"{why}\n{stack}" if stack else why)

    def _ordered(self, i: int) -> list[Fragment]:
        """Fragments that a worker owes."""
        of_vectors = self._seats[i].fragments(self._supervisor.orders(i))
        return [fragment for of in of_vectors.values() for fragment in of]

    def _num_missing(self, i: int) -> int:
        """How many env steps of what a worker owes are not written yet."""
        return sum(map(missing, self._ordered(i)))

    def _lose(self, i: int, why: str) -> None:
        """A worker is lost: bury it, and have it replaced, or fail."""
        seat = self._seats[i]
        assert seat.handle is not None
        summary, _, words = why.partition("\n")
        where = self._where(i)
        handle = seat.handle
        seat.vacate()
        handle.end(deadline=0.0)
        if self._inference is not None:
            self._inference.dismiss(i)
        rows_left, fragments = self._num_missing(i), self._ordered(i)
        taken = sum(fragment.reward.numel() for fragment in fragments) - rows_left
        seat.lost_steps += taken
        self.ledger.collected += taken
        self.ledger.lost += taken
        unwritten(fragments)
        said = f"{seat.name} {summary}, {where}." + (f"\n{words.rstrip()}" if words else "")
        if self.told_to_stop:
            return
        backoff = self._supervisor.gone(i, time.monotonic(), rows_left)
        if backoff is None:
            guards = self._plan.guards
            many = f"\nThat was more than {guards.max_restarts} times in 10 minutes"
            raise SamplerError(
                f"{said[0].upper()}{said[1:]}"
                + (
                    f"{many} (--max-sampler-restarts)."
                    if guards.on_sampler_loss == "restart"
                    else "\nWith --on-sampler-loss restart it would have been replaced."
                )
            )
        when = f" in {backoff:g} s" if backoff else ""
        self._say(f"{said[0].upper()}{said[1:]}\nIt is replaced{when}.")

    def _where(self, i: int) -> str:
        """Where a worker was lost."""
        seat, orders = self._seats[i], self._supervisor.orders(i)
        if i in self._supervisor.coming_up:
            return f"while making its environments, sampler {seat.name}"
        if not orders or seat.slot.beats[0] == seat.beats_at_order:
            return f"between two fragments, sampler {seat.name}"
        if self._inference is None:  # one after the other
            of_first = seat.fragments(orders[:1])
            under_way = {v: fragments[0] for v, fragments in of_first.items()}
        else:
            turn = seat.slot.turn[0]
            if turn < 0:
                return f"while waiting for actions, sampler {seat.name}"
            under_way = {turn: seat.fragments(orders)[turn][0]}
        return self._journals.whereabouts(under_way, seat.name)

    def _abandon(self, slots: Iterable[int]) -> None:
        """Kill those that did not answer before the run is to stop."""
        for i in slots:
            self._lose(i, "did not stop")


def _shared(name: str, size: int) -> tuple[int, mmap.mmap]:
    """Anonymous shared memory: it is gone with the last process that has it open."""
    fd = os.memfd_create(f"headrace {name}")
    os.ftruncate(fd, size)
    return fd, mmap.mmap(fd, size)


def _pickled(plan: Plan) -> bytes:
    """Lambdas and classes of a script or notebook travel by value; nothing goes through a file."""
    try:
        return bytes(cloudpickle.dumps(plan))
    except Exception as error:
        raise UsageError(
            f"The environment cannot be sent to worker processes: {type(error).__name__}: "
            f"{error}.\nWhat makes it must not carry open files, locks or devices: open them "
            "inside, or use num_workers=0."
        ) from error
