"""Runs parts of runs on the machines of a Ray cluster, and hears what becomes of them.

Each place is a Ray actor (`part_actor.py`), which takes one part after the other. A part whose
machine or actor is lost is started again elsewhere, and goes on from its newest checkpoint; one
whose machine is about to be taken away is saved before. Left out: the connection to the cluster
(`training/ray/connect.py`).
"""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from headrace.config.run_config import RunConfig
from headrace.distributed import ray_internals
from headrace.distributed.channel import pickled
from headrace.storage.files import write_whole
from headrace.storage.run_dir import writable
from headrace.training.ray.connect import describe_machines, room_for
from headrace.tuning.runners.api import BY_NAME, STOP_TIMEOUT_S, Ended, Runner
from headrace.tuning.runners.part import Part
from headrace.tuning.runners.part_actor import TOKEN, PartActor

_ray: Any = ray  # not all of it has types
_BESIDE = "beside"  # group of calls that an actor takes while a part runs
_POLL_EVERY_S = 0.5
_ANSWER_WITHIN_S = 10.0
_SAY_AFTER_S = 20.0  # without a machine for a part; imports from a slow disk take long
_MOST_LOSSES = 3
"""How often a part is started again after a loss."""


class _Place:
    """An actor, from when it is requested."""

    def __init__(self, folder: Path, token: str, cores: int) -> None:
        actor: Any = _ray.remote(concurrency_groups={_BESIDE: 1})(PartActor)
        self._actor = actor.options(num_cpus=cores, num_gpus=0, max_restarts=0).remote(
            str(folder), token, os.getcwd(), cores
        )
        self._arrival = self._actor.arrive.remote()
        self._machine = ""

    @property
    def machine(self) -> str:
        """The id of its machine; "" before it is up."""
        if not self._machine and _ray.wait([self._arrival], timeout=0)[0]:
            with contextlib.suppress(RayError):  # then the call of its part fails, too
                self._machine = _ray.get(self._arrival)
        return self._machine

    def run(self, orders: bytes, run_dir: Path) -> Any:
        """Have it run a part; return the call."""
        return self._actor.run.remote(orders, str(run_dir))

    def end_part(self, *, saves: bool) -> None:
        """Have it end its part."""
        self._actor.end.options(concurrency_group=_BESIDE).remote(saves=saves)

    def close(self) -> None:
        """End the actor, whatever it does."""
        _ray.kill(self._actor)


@dataclass
class _Running:
    key: Any
    orders: bytes
    run_dir: Path
    place: _Place
    call: Any
    since: float = field(default_factory=time.monotonic)
    losses: int = 0
    is_leaving: bool = False


class ClusterRunner(Runner):
    """Parts on the cluster that this process is connected to; to be closed.

    Args:
        parallel: how many at a time; 0: as many as the machines have room for, at any time.
        cores: CPUs, in Ray's terms, that a part takes.
        folder: the study's directory, which all machines must see.
        say: is told of losses, and of waiting for a machine.

    Raises:
        RunDirError: the directory cannot be written.
    """

    def __init__(self, parallel: int, cores: int, folder: Path, say: Callable[[str], None]) -> None:
        self._parallel, self._cores, self._say = parallel, cores, say
        self._folder, self._token = folder.resolve(), secrets.token_hex(16)
        self._running: list[_Running] = []
        self._idle: list[_Place] = []
        self._is_stopping = self._has_said = False
        with writable(folder):
            write_whole(folder / TOKEN, self._token.encode())

    @property
    def slots(self) -> int:
        needs = RunConfig(cpus_per_worker=self._cores)
        # At least one: a cluster may start machines when something waits for them.
        return self._parallel or max(1, room_for(needs))

    @property
    def keys(self) -> list[Any]:
        return [each.key for each in self._running]

    def start(self, key: Any, part: Part) -> None:
        run_dir = Path(part.run_dir).resolve()
        orders = pickled(replace(part, run_dir=str(run_dir)), "the cluster's machines", BY_NAME)
        place = self._free_place()
        self._running.append(_Running(key, orders, run_dir, place, place.run(orders, run_dir)))

    def _free_place(self) -> _Place:
        return self._idle.pop() if self._idle else _Place(self._folder, self._token, self._cores)

    def wait(self, deadline: float) -> list[Ended]:
        slots, ended = self.slots, list[Ended]()
        while self._running and not ended:
            left = deadline - time.monotonic()
            if left <= 0 or self.slots > slots:
                break
            calls = [each.call for each in self._running]
            ready, _ = _ray.wait(calls, timeout=min(left, _POLL_EVERY_S))
            ended = [
                end
                for each in list(self._running)
                if each.call in ready
                for end in self._ends(each)
            ]
            self._leave_machines()
            self._tell_of_waiting()
        return ended

    def stop(self) -> list[Ended]:
        self._is_stopping = True
        ended: list[Ended] = []
        self._end([each for each in self._running if not each.place.machine])  # nothing to save
        for each in self._running:
            each.place.end_part(saves=True)
        deadline = time.monotonic() + STOP_TIMEOUT_S + _ANSWER_WITHIN_S
        while self._running and time.monotonic() < deadline:
            ended += self.wait(deadline)
        self._end(list(self._running))
        self._is_stopping = False
        return ended

    def cancel(self, key: Any) -> None:
        self._end([each for each in self._running if each.key == key])

    def close(self) -> None:
        self._end(list(self._running))
        self._drop_idle()
        (self._folder / TOKEN).unlink(missing_ok=True)

    def _end(self, running: list[_Running]) -> None:
        """End parts at once, with their children, and their places."""
        calls = []
        for each in running:
            if each.place.machine:
                each.place.end_part(saves=False)
                calls.append(each.call)
        if calls:
            _ray.wait(calls, num_returns=len(calls), timeout=_ANSWER_WITHIN_S)
        for each in running:
            each.place.close()
            self._running.remove(each)

    def _drop_idle(self) -> None:
        for place in self._idle:
            place.close()
        self._idle.clear()

    def _ends(self, running: _Running) -> Iterator[Ended]:
        """Yield how a part has ended, unless it is started again elsewhere."""
        try:
            ended: Ended = _ray.get(running.call)
        except RayError as error:
            yield from self._lost(running, error)
            return
        # While it starts or evaluates, nothing heeds the signal, and it looks as if it crashed.
        was_told = running.is_leaving and ended.outcome in ("stopped", "crashed")
        if was_told and not self._is_stopping:
            running.place.close()
            self._begin(running, self._free_place())
            return
        self._running.remove(running)
        if running.is_leaving or self._is_stopping:  # it was told to end
            running.place.close()
        else:
            self._use_again(running.place)
        yield replace(ended, key=running.key)

    def _lost(self, running: _Running, error: RayError) -> Iterator[Ended]:
        running.place.close()  # it may be alive, on a machine that is only cut off
        self._drop_idle()  # others may have been on the same machine
        running.losses += 1
        cause = str(error).strip().splitlines()[0]
        if self._is_stopping or running.losses > _MOST_LOSSES:
            self._running.remove(running)
            why = f"its process or machine was lost {running.losses} times. The last time: {cause}"
            yield Ended(running.key, "stopped" if self._is_stopping else "crashed", why=why)
            return
        self._say(
            f"{running.run_dir.name}: its process or machine was lost ({cause}). It goes on "
            "elsewhere, from its newest checkpoint."
        )
        self._begin(running, self._free_place())

    def _use_again(self, place: _Place) -> None:
        """Give a place to a part that waits for a machine, which it may wait for in vain."""
        for each in self._running:
            if not each.place.machine:
                each.place.close()
                self._begin(each, place)
                return
        self._idle.append(place)

    def _begin(self, running: _Running, place: _Place) -> None:
        running.place = place
        running.call = place.run(running.orders, running.run_dir)
        running.since, running.is_leaving = time.monotonic(), False

    def _leave_machines(self) -> None:
        """Save the parts on machines that are about to be taken away."""
        if self._is_stopping or not (draining := ray_internals.draining_nodes()):
            return
        for each in self._running:
            if each.place.machine in draining and not each.is_leaving:
                each.is_leaving = True
                each.place.end_part(saves=True)
                self._say(f"{each.run_dir.name}: its machine is about to be taken away.")
        self._drop_idle()

    def _tell_of_waiting(self) -> None:
        latest = time.monotonic() - _SAY_AFTER_S
        if not self._has_said and any(
            each.since < latest and not each.place.machine for each in self._running
        ):
            self._has_said = True
            self._say(
                f"Waiting: a run needs a machine with {self._cores} free CPUs; the cluster's "
                f"have {describe_machines()}."
            )
