"""A Ray actor with one or more workers, which carry out orders one after the other.

The call that orders a fragment returns it, as a few large arrays: the learner owns it, and fetches
it from this machine's object store. Small data go as bytes: Ray's pickling takes longer. Another
thread receives the calls that must not wait for a fragment. Left out: the learner's end
(`ray_actors.py`), and stepping (`rollout.py`).
"""

import contextlib
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

from headrace import batch
from headrace.batch import Fragments, pack, split_memory
from headrace.collectors.api import SamplingPlan
from headrace.collectors.backends.api import Done, Failed, Message, WorkerSetup, WorkOrder
from headrace.collectors.backends.worker_main import (
    LatestWeights,
    failure,
    prepare_process,
    start_worker,
)
from headrace.collectors.rollout import RolloutTask, RolloutWorker
from headrace.collectors.snapshots import count_unwritten, mark_unwritten
from headrace.errors import HeadraceError, UsageError, WorkerError
from headrace.meter import Meter
from headrace.spec import Array
from headrace.weights import FlatWeights, Modules

_Packed = list[tuple[int, list[Array]]]
"""Of each fragment the number of final observations, and its parts (see `batch.pack`)."""
INSTALLED_THERE = "What the environment is made of must be installed there, in the same versions."


class Beat(NamedTuple):
    """A sign of life of a worker."""

    laps: int  # of its meter, so far
    order: WorkOrder | None  # that it carries out
    taken: int  # env steps of the order, so far


class ReceivedWeights:
    """Weights as they arrive, of the newest two versions. They are `NumberedWeights`."""

    def __init__(self) -> None:
        self._flat: dict[int, Array] = {}
        self._memory = np.empty(0, np.uint8)
        self._weights: FlatWeights | None = None  # that lie in it
        self.newest = -1

    def take(self, version: int, flat: Array | bytes) -> None:
        """Keep these; the newest stays the newest, in whatever order they come."""
        self._flat[version] = np.frombuffer(flat, np.uint8)
        self.newest = max(self.newest, version)
        self._flat = {v: of for v, of in self._flat.items() if v >= self.newest - 1}

    def pull(self, modules: Modules, version: int | None = None) -> int:
        """Copy a version (None: the newest) into the modules. Return which."""
        version = self.newest if version is None else version
        flat = self._flat[version]
        if self._weights is None:
            self._memory = np.empty_like(flat)
            self._weights = FlatWeights(modules, self._memory)
        self._memory[:] = flat  # what came may be read-only, which torch does not know
        self._weights.pull(modules)
        return version


@dataclass
class _Hosted:
    worker: RolloutWorker
    generation: int
    meter: Meter
    weights: LatestWeights
    memory: dict[int, Array]  # of a fragment, by vector: sent before the next one is begun
    fragments: dict[int, Fragments]  # in it
    plan: SamplingPlan
    has_left: bool = False
    order: WorkOrder | None = None
    tasks: list[RolloutTask] = field(default_factory=list)

    def beat(self) -> Beat:
        order, plan, taken = self.order, self.plan, 0
        if order is not None:
            whole = plan.num_steps * plan.envs_per_vector
            taken = sum(whole - count_unwritten(plan, task.fragments) for task in self.tasks)
        return Beat(self.meter.beats[0], order, taken)


class WorkerActor:
    """A process in which one worker runs, or several where machines are few.

    `plan` is pickled, `folder` the working directory of the learner.
    """

    def __init__(self, plan: bytes, folder: str) -> None:
        prepare_process()
        work_in(folder)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray lets an actor without a GPU see them all
        self._plan: SamplingPlan = cloudpickle.loads(plan)
        self._weights = ReceivedWeights()
        self._workers: dict[int, _Hosted] = {}  # by index
        self._is_stopped = False
        self._thread = 0

    def hello(self) -> str:
        """Return the id of the machine, once the actor is up."""
        import ray  # only here: the rest runs in any process

        return str(ray.get_runtime_context().get_node_id())

    def start(self, packed: bytes) -> tuple[Any, ...]:
        """Start a worker: `packed` is its index and `WorkerSetup`. Return `Ready`, guarded."""
        setup: WorkerSetup
        index, setup = cloudpickle.loads(packed)

        def start() -> tuple[Message, _Packed]:
            meter, layouts = Meter(keeps_laps=self._plan.timeline), self._plan.layouts
            worker, ready = start_worker(self._plan, setup, meter)
            meter.lap("start")
            size = sum(map(batch.num_bytes, layouts))
            memory = {v: np.empty(size, np.uint8) for v in setup.vectors}
            fragments = {v: batch.allocate_all(layouts, of) for v, of in memory.items()}
            weights = LatestWeights(self._weights, worker, meter)
            self._workers[index] = _Hosted(
                worker, setup.generation, meter, weights, memory, fragments, self._plan
            )
            return ready, []

        return self._guarded(setup.name, start)

    def fill(self, packed: bytes, flat: Array | bytes | None) -> tuple[Any, ...]:
        """Carry out an order and return `Done`, guarded.

        Args:
            packed: pickled: the worker's index, its `WorkOrder`, and the version of the weights.
                Newer weights may be used, unless the order names a version.
            flat: the weights; None: they were sent before.
        """
        order: WorkOrder
        index, order, version = cloudpickle.loads(packed)
        hosted = self._workers[index]
        hosted.meter.lap("wait")

        def fill() -> tuple[Message, _Packed]:
            if flat is not None:
                self._weights.take(version, flat)
            tasks = [
                RolloutTask(v, hosted.fragments[v], steps, order.changes, order.pool)
                for v, _, steps in order.fragments
            ]
            mark_unwritten(task.fragments for task in tasks)
            hosted.tasks, hosted.order = tasks, order
            result = hosted.weights.collect(
                order, tasks, lambda: hosted.has_left or self._is_stopped
            )
            hosted.order = None
            done = Done(hosted.generation, order, result, hosted.meter.readings())
            whole = tasks if result.whole else []
            layouts = self._plan.layouts
            return done, [
                pack(layout, piece)
                for task in whole
                for layout, piece in zip(
                    layouts, split_memory(layouts, hosted.memory[task.vector]), strict=True
                )
            ]

        returned = self._guarded(f"worker {index}", fill)
        hosted.meter.lap("transport")
        return returned

    def drop(self, index: int) -> None:
        """Close the environments of a worker that has left."""
        if (hosted := self._workers.pop(index, None)) is not None:
            hosted.worker.close()

    def close(self) -> HeadraceError | None:
        """Close all environments. Return the error that this raised."""
        failed = None
        for index in list(self._workers):
            try:
                self.drop(index)
            except HeadraceError as error:
                failed = error
        return failed

    def newer(self, version: int, flat: Array | bytes) -> None:
        """Take weights to act with from the next step on, where orders do not say which."""
        self._weights.take(version, flat)

    def leave(self, index: int) -> None:
        """Have a worker give its orders back."""
        self._workers[index].has_left = True

    def stop(self) -> None:
        """Have all workers give up where they are."""
        self._is_stopped = True

    def beat(self) -> dict[int, Beat]:
        """Return a sign of life of each worker."""
        return {index: hosted.beat() for index, hosted in list(self._workers.items())}

    def stack(self) -> str:
        """Return the stack of the thread that carries orders out."""
        frame = sys._current_frames().get(self._thread)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def _guarded(self, name: str, call: Callable[[], tuple[Message, _Packed]]) -> tuple[Any, ...]:
        """Make a call. Return its errors as a message: Ray would change their words.

        Returns:
            Pickled: the message, and how many final observations each fragment has; then the
            fragments' parts.
        """
        self._thread = threading.get_ident()
        message: Message
        packed: _Packed = []
        try:
            message, packed = call()
        except UsageError as error:  # of this machine: where the run was started it was none
            text = f"{error}\nThat was {name}, on the machine {platform.node()}. {INSTALLED_THERE}"
            message = Failed(WorkerError(text))
        except (Exception, KeyboardInterrupt) as error:
            message = failure(error, name)
        first = cloudpickle.dumps((message, [num_finals for num_finals, _ in packed]))
        return first, *(part for _, parts in packed for part in parts)


def work_in(folder: str) -> None:
    """Change to the learner's working directory, if this machine has it, for relative paths."""
    with contextlib.suppress(OSError):
        os.chdir(folder)
