"""Sampling in worker processes of this machine: the hybrid of processes and vectors.

Each worker steps its own vectors for T steps with its own copy of the policy; nobody waits for
anybody inside a fragment. Fragments and weights lie in anonymous shared memory, and whoever has the
turn owns a fragment's. A worker that dies or hangs is replaced, and its fragment made again.

Left out: who is started, asked and replaced when (`supervisor.py`), processes (`handle.py`,
`worker.py`), other machines.
"""

import atexit
import contextlib
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import connection
from typing import Any

import cloudpickle

from headrace import patience
from headrace.collect import forkserver
from headrace.collect.api import Collected, Ledger, Plan, Say, ShouldStop
from headrace.collect.handle import Handle, in_memory
from headrace.collect.journal import Journals, missing, unwritten
from headrace.collect.rollout import Filled
from headrace.collect.supervisor import Supervisor
from headrace.collect.worker import Orders, Slot
from headrace.envs.api import Restored
from headrace.errors import ConfigError, SamplerError, UsageError
from headrace.models import policy as policies
from headrace.models.policy import Policy
from headrace.spec import Array
from headrace.weights import FlatWeights

_LOOK_EVERY_S = 0.1
_STOP_WITHIN_S = 5.0  # how long a worker that was told to stop may take for the step under way
_CLOSE_WITHIN_S = 3.0


class _Seat:
    """A slot, and who is in it."""

    def __init__(
        self, name: str, memory: mmap.mmap, offset: int, plan: Plan, vectors: list[int]
    ) -> None:
        self.name, self.offset, self.vectors = name, offset, vectors
        self.slot = Slot(memory, offset, plan, vectors, fresh=True)
        self.handle: Handle | None = None
        self.filled: Filled | None = None
        self.lost_steps = 0  # of workers that were lost in this batch
        self.beats_at_order = 0
        self.seconds: dict[str, float] = {}  # of those that sat here before
        self.latest: dict[str, float] = {}  # of who sits here now
        self.usual_s = 0.0

    @property
    def num_missing(self) -> int:
        """How many env steps of the fragments are not written yet."""
        return sum(map(missing, self.slot.fragments.values()))


class WorkersCollector:
    """A `Collector` over worker processes.

    Args:
        plan: what to sample.
        num_workers: W, at most the number of vectors, which they take in turns.
        stop: asked while waiting whether to give up.
        state: what to go on from; {}: begin.
        say: told of workers that were lost, and of episodes that were dropped.

    Raises:
        ConfigError: this platform has no anonymous shared memory.
        EnvError: an environment could not be made.
        SamplerError: a worker did not come up.
    """

    def __init__(
        self,
        plan: Plan,
        num_workers: int,
        stop: ShouldStop,
        state: Mapping[str, Array] | None = None,
        say: Say = lambda text: None,
    ) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                f"num_workers={num_workers} needs Linux (memfd), and this is {sys.platform}.\n"
                "Use num_workers=0: all environments are stepped in the learner's process."
            )
        self._plan, self._stop, self._say = plan, stop, say
        self._version, self._give_up_at = 0, float("inf")
        self.ledger, self.restored = Ledger(), Restored()
        self._journals = Journals(plan, state or {})
        self._supervisor = Supervisor(
            num_workers,
            restart=plan.guards.on_sampler_loss == "restart",
            max_restarts=plan.guards.max_restarts,
        )
        template = policies.build(plan.spec, plan.network, 0, plan.model)
        self._plan_fd = in_memory("plan", _pickled(plan))
        size = 1 + FlatWeights.num_bytes(template)
        self._weights_fd, self._flag = _shared("weights", size)  # last byte: workers are to stop
        self._weights = FlatWeights(template, self._flag)
        shares = [list(plan.vectors)[i::num_workers] for i in range(num_workers)]
        sizes = [Slot.num_bytes(plan, len(share)) for share in shares]
        self._memory_fd, memory = _shared("fragments", sum(sizes))
        self._seats = [
            _Seat(f"worker {i}", memory, sum(sizes[:i]), plan, share)
            for i, share in enumerate(shares)
        ]
        # multiprocessing's own way at exit is SIGTERM, which workers ignore, and then to wait.
        atexit.register(self.close)
        try:
            self._serve(lambda: self._supervisor.coming_up)
        except BaseException:
            self.close()
            raise

    def publish(self, policy: Policy, version: int) -> None:
        """See `Collector`."""
        self._weights.publish(policy)
        self._version = version

    def collect(self) -> Collected | None:
        """See `Collector`."""
        self._journals.enter()
        for seat in self._seats:
            seat.filled, seat.lost_steps = None, 0
            unwritten(seat.slot.fragments.values())
        self._supervisor.order()
        self._serve(lambda: self._supervisor.owing)
        all_filled = [seat.filled for seat in self._seats if seat.filled is not None]
        whole = len(all_filled) == len(self._seats) and all(f.whole for f in all_filled)
        for filled in all_filled:
            self.ledger.collected += filled.taken
            self.ledger.lost += filled.lost if whole else filled.taken
            self.ledger.drop(filled.dropped, self._say)
        self.ledger.restarts = self._supervisor.restarts
        if not whole:
            return None
        fragments = {v: f for seat in self._seats for v, f in seat.slot.fragments.items()}
        self._journals.hold(fragments, all_filled)
        episodes = [episode for filled in all_filled for episode in filled.episodes]
        return Collected([fragments[v] for v in sorted(fragments)], episodes)

    def give_up(self) -> None:
        """See `Collector`."""
        self._journals.drop()

    def state(self) -> dict[str, Array]:
        """See `Collector`."""
        self._journals.enter()
        return self._journals.state()

    def meters(self) -> dict[str, dict[str, float]]:
        """See `Collector`."""
        return {seat.name: _added(seat.seconds, seat.latest) for seat in self._seats}

    def close(self) -> None:
        """See `Collector`."""
        atexit.unregister(self.close)
        self._flag[-1] = 1  # a fragment under way is of no use any more
        handles = [seat.handle for seat in self._seats if seat.handle is not None]
        for handle in handles:
            with contextlib.suppress(OSError):  # it is gone
                handle.channel.send(("close", None))
        deadline = time.monotonic() + _CLOSE_WITHIN_S
        with contextlib.ExitStack() as stack:  # goes on with the rest if one raises
            for handle in handles:
                stack.callback(handle.end, deadline)
            for fd in (self._plan_fd, self._weights_fd, self._memory_fd):
                stack.callback(os.close, fd)
        self._seats = []

    def _serve(self, pending: Callable[[], list[int]]) -> None:
        """Start, ask, listen and replace until no slot is `pending`.

        Once told to stop, only those that answer in time are waited for.
        """
        while waiting_for := pending():
            now = time.monotonic()
            if self._stop() and self._give_up_at == float("inf"):
                self._flag[-1] = 1
                self._give_up_at = now + _STOP_WITHIN_S
            if self._give_up_at < float("inf"):
                alive = [i for i in waiting_for if self._seats[i].handle is not None]
                if not alive or now > self._give_up_at:
                    self._abandon(alive)
                    return
            else:
                for i in self._supervisor.due(now):
                    self._start(i, now)
            for i in self._supervisor.to_send(now):
                self._send_order(i)
            self._listen()
            self._end_silent()

    def _start(self, i: int, now: float) -> None:
        """Put a worker into a slot."""
        seat = self._seats[i]
        generation, anew = self._supervisor.begin(i, now)
        steps = self._journals.steps
        orders = Orders(
            name=seat.name,
            generation=generation,
            vectors=seat.vectors,
            offset=seat.offset,
            state={} if anew else self._journals.state(seat.vectors),
            begin_after=steps + anew,
        )
        with forkserver.context() as context:
            seat.handle = Handle(context, orders, self._weights_fd, self._memory_fd, self._plan_fd)

    def _send_order(self, i: int) -> None:
        seat = self._seats[i]
        handle, seat.beats_at_order = seat.handle, seat.slot.beats[0]
        assert handle is not None
        with contextlib.suppress(OSError):  # its death shows when it is listened to
            handle.channel.send(("collect", (self._journals.steps, self._version)))

    def _listen(self) -> None:
        """Wait a moment for words or the end of any worker."""
        watched: dict[Any, int] = {}
        for i, seat in enumerate(self._seats):
            if seat.handle is not None:
                watched |= {seat.handle.channel: i, seat.handle.process.sentinel: i}
        for i in {watched[ready] for ready in connection.wait(list(watched), _LOOK_EVERY_S)}:
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
                elif not restored.new_episode:  # it goes on just where the fragment began
                    self.ledger.lost -= seat.lost_steps
                    self.ledger.remade += seat.lost_steps
                    seat.lost_steps = 0
                else:
                    self._say(
                        f"{seat.name.capitalize()}: {restored.new_episode} episodes could not be "
                        "brought back, and begin anew. From here on this run differs from one "
                        "in which no worker was lost."
                    )
            case "done" if seat.slot.generation[0] == generation and self._supervisor.delivered(
                i, generation
            ):
                seat.filled, seat.latest, seat.usual_s = what
            case "error":
                raise what

    def _end_silent(self) -> None:
        """Kill workers that have shown no progress for too long."""
        guards = self._plan.guards
        if not guards.enabled:
            return
        usual_s = max(seat.usual_s for seat in self._seats)
        limit_s = patience.limit(guards.env_timeout_s, usual_s)

        def progress(i: int) -> tuple[int, int]:
            return self._seats[i].slot.beats[0], self._seats[i].num_missing

        for i, patience_s in self._supervisor.silent(time.monotonic(), limit_s, progress):
            handle = self._seats[i].handle
            assert handle is not None
            stack = handle.stack()
            why = f"has not answered for {patience_s:g} s and was killed (see --env-timeout-s)"
            self._lose(i, f"{why}\n{stack}" if stack else why)

    def _lose(self, i: int, why: str) -> None:
        """A worker is lost: bury it, and have it replaced, or fail."""
        seat = self._seats[i]
        assert seat.handle is not None
        summary, _, words = why.partition("\n")
        where = f"between two fragments, sampler {seat.name}"
        if i in self._supervisor.coming_up:
            where = f"while making its environments, sampler {seat.name}"
        elif i in self._supervisor.owing and seat.slot.beats[0] != seat.beats_at_order:
            where = self._journals.whereabouts(seat.slot.fragments, seat.name)
        handle, seat.handle = seat.handle, None
        handle.end(deadline=0.0)
        seat.seconds, seat.latest = _added(seat.seconds, seat.latest), {}
        rows_left = seat.num_missing
        if i in self._supervisor.owing:
            rows = self._plan.num_steps * self._plan.envs_per_vector * len(seat.vectors)
            taken = rows - rows_left
            seat.lost_steps += taken
            self.ledger.collected += taken
            self.ledger.lost += taken
            unwritten(seat.slot.fragments.values())
        said = f"{seat.name} {summary}, {where}." + (f"\n{words.rstrip()}" if words else "")
        if self._give_up_at < float("inf"):
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

    def _abandon(self, slots: Iterable[int]) -> None:
        """Kill those that did not answer before the run is to stop."""
        for i in slots:
            self._lose(i, "did not stop")


def _added(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {span: one.get(span, 0.0) + other.get(span, 0.0) for span in one | other}


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
