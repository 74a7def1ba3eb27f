"""What runs in a Ray actor: samplers that sit here, carrying out orders one after the other.

A fragment is returned from the call that ordered it, as a few large arrays; so the learner that
called owns it, and fetches it from this machine's object store. What is small goes as bytes, as
Ray's own way to pickle it takes longer. Calls that must not wait for a fragment (`newer`, `leave`,
`stop`, `beat`, `stack`) come in by another thread.

Left out: the learner's end (`ray_actors.py`), and stepping itself (`rollout.py`).
"""

import contextlib
import gc
import os
import platform
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import threadpoolctl
import torch
from torch import nn

from headrace import batch
from headrace.batch import Fragment, pack
from headrace.collectors.api import SamplingPlan
from headrace.collectors.backends.api import WorkerSetup, WorkOrder
from headrace.collectors.backends.worker_main import LatestWeights
from headrace.collectors.rollout import RolloutTask, RolloutWorker
from headrace.collectors.snapshots import count_unwritten, unwritten
from headrace.errors import HeadraceError, UsageError, WorkerError
from headrace.meter import Meter
from headrace.spec import Array
from headrace.weights import FlatWeights

_Packs = list[tuple[int, list[Array]]]
INSTALLED_THERE = "What the environment is made of must be installed there, in the same versions."


class Beat(NamedTuple):
    """A sign of life of a sampler.

    Attributes:
        laps: that its meter has counted.
        order: that it carries out.
        taken: env steps of it, so far.
    """

    laps: int
    order: WorkOrder | None
    taken: int


class Received:
    """Numbered weights as they came in: the newest two (see `carry_out.Numbered`)."""

    def __init__(self) -> None:
        self._flat: dict[int, Array] = {}
        self._memory = np.empty(0, np.uint8)
        self._weights: FlatWeights | None = None  # that lie in it
        self.newest = -1

    def take(self, version: int, flat: Array | bytes) -> None:
        """These are there now; the newest stays the newest, in whatever order they come."""
        self._flat[version] = np.frombuffer(flat, np.uint8)
        self.newest = max(self.newest, version)
        self._flat = {v: of for v, of in self._flat.items() if v >= self.newest - 1}

    def pull(self, module: nn.Module, version: int | None = None) -> int:
        """Copy a version into the module, and say which; None: the newest."""
        found = self.newest if version is None else version
        flat = self._flat[found]
        if self._weights is None:
            self._memory = np.empty_like(flat)
            self._weights = FlatWeights(module, self._memory)
        self._memory[:] = flat  # what came may be read-only, which torch does not know
        self._weights.pull(module)
        return found


@dataclass
class _Sitting:
    """A sampler that sits here."""

    sampler: RolloutWorker
    generation: int
    meter: Meter
    weights: LatestWeights
    memory: dict[int, Array]  # of a fragment, by vector: sent before the next one is begun
    fragments: dict[int, Fragment]  # in it
    left: bool = False
    order: WorkOrder | None = None
    wanted: list[RolloutTask] = field(default_factory=list)


class WorkerActor:
    """One process, in which one sampler sits; or several, where machines are few.

    Args:
        plan: pickled.
        here: the working directory of the learner.
    """

    def __init__(self, plan: bytes, here: str) -> None:
        gc.freeze()
        work_in(here)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray lets an actor without a GPU see them all
        torch.set_num_threads(1)
        threadpoolctl.threadpool_limits(1)
        self._plan: SamplingPlan = cloudpickle.loads(plan)
        self._received = Received()
        self._seats: dict[int, _Sitting] = {}
        self._stopped = False
        self._thread = 0

    def hello(self) -> str:
        """It is up: the id of its machine."""
        import ray  # only here: the rest runs in any process

        return str(ray.get_runtime_context().get_node_id())

    def sit(self, packed: bytes) -> tuple[Any, ...]:
        """A sampler sits down here.

        Args:
            packed: pickled: its seat, and its `WorkerSetup`.

        Returns:
            Pickled: "ready", generation, (restored, states), []; or as of `fill`.
        """
        seat: int
        orders: WorkerSetup
        seat, orders = cloudpickle.loads(packed)

        def sit() -> tuple[Any, _Packs]:
            meter, size = Meter(keeps_laps=self._plan.timeline), batch.num_bytes(self._plan.layout)
            sampler = RolloutWorker(self._plan, orders.vectors, meter, orders.name)
            restored = sampler.restore(orders.state, orders.begin_after)
            states = sampler.states() if orders.begin_after else {}
            meter.lap("start")
            memory = {v: np.empty(size, np.uint8) for v in orders.vectors}
            self._seats[seat] = _Sitting(
                sampler,
                orders.generation,
                meter,
                LatestWeights(self._received, sampler, meter),
                memory,
                {v: batch.allocate(self._plan.layout, of) for v, of in memory.items()},
            )
            return ("ready", orders.generation, (restored, states)), []

        return self._guarded(orders.name, orders.generation, sit)

    def fill(self, packed: bytes, flat: Array | bytes | None) -> tuple[Any, ...]:
        """Carry an order out, with these weights or newer ones, if it does not say which.

        Args:
            packed: pickled: whose seat, its `WorkOrder`, and the version of the weights.
            flat: these; None: they were sent before.

        Returns:
            Pickled: "done", generation, what the crew wants to know of it, and how many final
            observations each fragment has; then the fragments' parts (see `packed.pack`). Or
            pickled: "error", generation, error, [].
        """
        seat: int
        order: WorkOrder
        seat, order, version = cloudpickle.loads(packed)
        of = self._seats[seat]
        of.meter.lap("wait")

        def fill() -> tuple[Any, _Packs]:
            if flat is not None:
                self._received.take(version, flat)
            of.wanted = [RolloutTask(v, of.fragments[v], steps) for v, _, steps in order.fragments]
            unwritten(wanted.fragment for wanted in of.wanted)
            of.order = order
            filled = of.weights.collect(order, of.wanted, lambda: of.left or self._stopped)
            of.order = None
            done = order, filled, of.meter.readings()
            whole = [wanted.vector for wanted in of.wanted] if filled.whole else []
            packs = [pack(self._plan.layout, of.memory[v]) for v in whole]
            return ("done", of.generation, done), packs

        found = self._guarded(f"sampler {seat}", of.generation, fill)
        of.meter.lap("transport")
        return found

    def drop(self, seat: int) -> None:
        """Who sat there has left: close its environments."""
        if (of := self._seats.pop(seat, None)) is not None:
            of.sampler.close()

    def close(self) -> HeadraceError | None:
        """Close all environments; what failed in it."""
        failed = None
        for seat in list(self._seats):
            try:
                self.drop(seat)
            except HeadraceError as error:
                failed = error
        return failed

    def newer(self, version: int, flat: Array | bytes) -> None:
        """Weights to act with from the next step on, where orders do not say with which."""
        self._received.take(version, flat)

    def leave(self, seat: int) -> None:
        """Who sits there is to give its orders back."""
        self._seats[seat].left = True

    def stop(self) -> None:
        """All are to give up where they are."""
        self._stopped = True

    def beat(self) -> dict[int, Beat]:
        """How far each is."""
        return {seat: _beat(of) for seat, of in list(self._seats.items())}

    def stack(self) -> str:
        """Where the thread is that carries orders out."""
        frame = sys._current_frames().get(self._thread)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def _guarded(
        self, name: str, generation: int, call: Callable[[], tuple[Any, _Packs]]
    ) -> tuple[Any, ...]:
        """What a call returns; or of what it failed, which Ray would say in its own words."""
        self._thread = threading.get_ident()
        packs: _Packs = []
        try:
            message, packs = call()
        except UsageError as error:  # of this machine: where the run was started it was none
            said = f"{error}\nThat was {name}, on the machine {platform.node()}. {INSTALLED_THERE}"
            message = "error", generation, WorkerError(said)
        except HeadraceError as error:
            message = "error", generation, error
        except (Exception, KeyboardInterrupt):
            said = f"{traceback.format_exc()}\n{name} failed."
            message = "error", generation, WorkerError(said)
        told = cloudpickle.dumps((*message, [k for k, _ in packs]))
        return told, *(part for _, parts in packs for part in parts)


def work_in(folder: str) -> None:
    """Where this machine has it: an environment's relative paths mean the same as elsewhere."""
    with contextlib.suppress(OSError):
        os.chdir(folder)


def _beat(of: _Sitting) -> Beat:
    order, wanted = of.order, list(of.wanted)
    taken = 0
    if order is not None:
        taken = sum(w.fragment.reward.numel() - count_unwritten(w.fragment) for w in wanted)
    return Beat(of.meter.beats[0], order, taken)
