"""Samplers as Ray actors, on any machine of a cluster.

Each seat has a *place* of its own, an actor; it is asked for, and comes when a machine has room.
Until then (or once its machine is gone) who sits there is a guest at another place, and goes home
when that is up. So samplers may outnumber the cluster for a while, and the run goes on with what
there is. A place whose machine is about to be taken away is given up beforehand.

The calling learner owns what is returned: fragments come straight from the sampler's machine, and
weights, one flat object for each version, are fetched once by each machine that needs them. At most
1 + lag calls of each vector are under way; so nobody is ahead by more.

Left out: one actor (`ray_actors.py`), what runs in it (`ray_worker.py`), who is started and told
when (`worker_pool.py`), learners and their cluster (`training/ray/driver.py`).
"""

import contextlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np
import ray
from ray.exceptions import RayError

from headrace.batch import Fragment, unpack
from headrace.collectors.api import SamplingPlan
from headrace.collectors.backends.api import Heard, WorkerSetup, WorkOrder
from headrace.collectors.backends.processes import pickled
from headrace.collectors.backends.ray_worker import INSTALLED_THERE, Beat, WorkerActor
from headrace.collectors.snapshots import EpisodeSnapshots
from headrace.collectors.supervisor import TIMES_AS_LONG_TO_START
from headrace.errors import WorkerError
from headrace.meter import Laps
from headrace.models import policy as policies
from headrace.models.policy import Policy
from headrace.spec import Array
from headrace.timeouts import LEAST_LIMIT_S, RestartRate, StallTimer
from headrace.weights import FlatWeights

# A Ray actor for samplers, as the learner holds it: asked for, looked after, and how it ended.


_BESIDE = "beside"  # what need not wait for a fragment


@dataclass(frozen=True)
class Needs:
    """What an actor needs of a machine.

    Attributes:
        num_cpus: cores.
        resources: Ray's custom resources, and how much of each.
        labels: that its machine must have.
        at_once: for how many actors of this rank there is room now; the others are asked for one
            after the other, so that ranks share what comes.
    """

    num_cpus: float = 1.0
    resources: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    at_once: int = 1 << 30

    def options(self) -> dict[str, Any]:
        """As Ray has them."""
        labels = {"label_selector": self.labels} if self.labels else {}
        return {"num_cpus": self.num_cpus, "resources": self.resources, **labels}


class Place:
    """An actor, from when it is asked for."""

    def __init__(self, needs: Needs, plan: Any) -> None:
        how: Any = {"concurrency_groups": {_BESIDE: 1}, "num_gpus": 0, "max_restarts": 0}
        how["enable_task_events"] = False  # a tenth of what a call takes
        actor: Any = ray.remote(**how)(WorkerActor)
        where = {"scheduling_strategy": "SPREAD"} | needs.options()
        self.actor = actor.options(**where).remote(plan, os.getcwd())
        self.hello = self.actor.hello.remote()
        self.node = ""  # its machine, once it is up
        self.guests: set[int] = set()  # seats of who sits here
        self.beats: dict[int, Beat] = {}
        self.has_weights = False  # was told to fill something, with weights
        self.silence = StallTimer()
        self._asked, self._num_answers = None, 0

    @property
    def is_up(self) -> bool:
        """Whether samplers can sit down here."""
        return bool(self.node)

    def beside(self, method: str, *arguments: Any) -> Any:
        """Call a method that need not wait for a fragment."""
        of = getattr(self.actor, method)
        return of.options(concurrency_group=_BESIDE).remote(*arguments)

    def ask(self) -> None:
        """Read how it does, if it has answered, and ask again."""
        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            with contextlib.suppress(RayError):  # it is lost, which other calls say as well
                self.beats = ray.get(self._asked)
            self._asked, self._num_answers = None, self._num_answers + 1
        if self._asked is None:
            self._asked = self.beside("beat")

    def lost_machine(self) -> bool:
        """Whether it is dead because its machine is gone, or was before it was up."""
        found = ray._private.state.state.actor_table(self.actor._actor_id.hex())
        return bool(found["DeathCause"].actor_died_error_context.HasField("node_death_info"))

    def silent_s(self, now: float) -> float:
        """How long it has not answered."""
        return self.silence.lasts(now, self._num_answers) if self._asked is not None else 0.0


_nodes: Any = ray.nodes  # it has no types


def cause(error: RayError, node: str) -> tuple[str, bool]:
    """How an actor has ended, in words; and whether it may have been its own fault."""
    alive = {each["NodeID"] for each in _nodes() if each["Alive"]}
    if node not in alive or getattr(error, "preempted", False):
        return "was on a machine that is gone", False
    if type(error).__name__ == "ActorUnavailableError":
        return f"cannot be reached\n{error}", False
    return f"died\n{error}", True


_UNREACHABLE_S = 20.0  # without a sign of life, where no step is known to take longer
_LOOK_EVERY_S = 2.0  # at the seldomest: whether all are alive
_STACK_WITHIN_S = 0.5
_WITH_A_CALL = 100 * 1024  # bytes: Ray's own limit for what it does not put into an object store
_LEAVE_BEFORE_S = 10.0  # a machine is taken away; until then another may come
_GUEST_AFTER_S, _FIRST_GUEST_AFTER_S = 5.0, 60.0  # the first ones have room, and need to import


class RayBackend:
    """`Seats` for Ray actors.

    Args:
        plan: what to sample.
        shares: the vectors of each.
        names: theirs.
        needs: what an actor needs.

    Raises:
        UsageError: the environment cannot be sent to another process.
    """

    def __init__(
        self,
        plan: SamplingPlan,
        shares: list[list[int]],
        names: list[str],
        needs: Needs | None = None,
    ) -> None:
        self._plan, self._names, self._needs = plan, names, needs or Needs()
        self._plan_ref, self._layout = ray.put(pickled(plan)), plan.layout
        template = policies.build(plan.spec, plan.network, 0, plan.model)
        self._flat = np.zeros(FlatWeights.num_bytes(template), np.uint8)
        self._to_send = FlatWeights(template, self._flat)
        self._weights: dict[int, Any] = {}  # by version: the newest two
        self._homes: list[Place | None] = [None] * len(shares)
        self._num_asked = 0  # for places, so far
        self._elsewhere: list[Place] = []  # places that are nobody's home any more
        self._waiting: dict[int, tuple[WorkerSetup, float]] = {}  # by seat: since when
        self._sits: dict[int, Place] = {}
        self._calls: dict[Any, int] = {}  # what is under way, and whose it is
        self._heard: dict[int, Heard] = {}  # by seat: what was not told yet
        self._given_back: dict[int, int] = {}  # steps of who is about to leave
        self._fragments: dict[tuple[int, int], Fragment] = {}
        self._node = ray.get_runtime_context().get_node_id()
        self._looked_at, self._look_every_s = 0.0, _LOOK_EVERY_S
        self._came_at = 0.0  # the last of those that are up
        self._draining: dict[str, float] = {}  # machines, until when they are there (epoch, s)
        self._starts = RestartRate(plan.guards.max_restarts)  # that failed
        self._num_bytes = dict.fromkeys(("fragments", "fragments_remote", "weights"), 0)

    def publish(self, policy: Policy, version: int) -> None:
        """See `Seats`."""
        self._to_send.publish(policy)
        # What is as small as this goes along with a call, which Ray has ready sooner.
        is_small = self._flat.nbytes <= _WITH_A_CALL
        self._weights[version] = self._flat.tobytes() if is_small else ray.put(self._flat)
        self._weights.pop(version - 2, None)
        self._num_bytes["weights"] += self._flat.nbytes
        if self._plan.first_ready:
            for place in self._up():
                self._send_newest(place)

    def fragment(self, i: int, vector: int, buffer: int) -> Fragment:
        """See `Seats`."""
        return self._fragments[vector, buffer]

    def prepare(self, i: int, order: WorkOrder) -> None:
        """See `Seats`: what was filled is in the object store, and another one will be."""

    def start(self, i: int, orders: WorkerSetup) -> None:
        """See `Seats`."""
        self._waiting[i] = orders, time.monotonic()
        self._seat()

    def tell(self, i: int, order: WorkOrder) -> None:
        """See `Seats`."""
        version = max(self._weights) if order.version is None else order.version
        place = self._sits.get(i)
        is_there = order.version is None and place is not None and place.has_weights
        weights = None if is_there else self._weights[version]
        self._call(i, "fill", (order, version), weights)
        if place is not None:
            place.has_weights = True

    def listen(self, wait_s: float) -> list[Heard]:
        """See `Seats`."""
        now = time.monotonic()
        if now - self._looked_at >= self._look_every_s:
            self._looked_at = now
            self._look_after()
        self._seat()
        coming = {p.hello: p for p in self._homes if p is not None and not p.is_up}
        refs = [*self._calls, *coming]
        wait_s = 0.0 if self._heard else wait_s
        if not refs:
            time.sleep(wait_s)  # a back-off passes: there is nobody, whose word could be awaited
        elif ray.wait(refs, timeout=wait_s)[0]:
            for ref in ray.wait(refs, num_returns=len(refs), timeout=0)[0]:
                if ref in coming:
                    self._welcome(coming[ref], now)
                elif ref in self._calls:
                    self._receive(ref)
        heard, self._heard = list(self._heard.values()), {}
        return heard

    def _receive(self, ref: Any) -> None:
        """What came of a call: to be told."""
        i = self._calls.pop(ref)
        place = self._sits[i]
        try:
            packed, *parts = ray.get(ref)
        except RayError as error:
            self._lost(place, *cause(error, place.node))
            return
        kind, generation, what, num_finals = cloudpickle.loads(packed)
        if kind == "done":
            order, filled, *_ = what
            if i in self._given_back and not filled.whole:
                self._given_back[i] += filled.taken
                return
            if filled.whole:
                self._keep(order, num_finals, parts, is_remote=place.node != self._node)
        heard = self._heard.setdefault(i, Heard(i, []))
        heard.messages.append((kind, generation, what))

    def _keep(
        self, order: WorkOrder, num_finals: list[int], parts: list[Array], *, is_remote: bool
    ) -> None:
        left = iter(parts)
        for (v, buffer, _), k in zip(order.fragments, num_finals, strict=True):
            self._fragments[v, buffer] = unpack(self._layout, k, left)
        size = sum(part.nbytes for part in parts)
        self._num_bytes["fragments"] += size
        self._num_bytes["fragments_remote"] += size * is_remote

    def _welcome(self, place: Place, now: float) -> None:
        """An actor is up, or could not be made."""
        try:
            place.node, self._came_at = ray.get(place.hello), now
        except RayError as error:
            self._homes[self._homes.index(place)] = None  # and is asked for again
            failed = getattr(error, "actor_init_failed", False)
            if failed or not (place.lost_machine() or self._starts.again(now)):
                raise WorkerError(
                    f"{error}\nA sampler did not start on a machine of the cluster. "
                    f"{INSTALLED_THERE}"
                ) from None
        else:
            if self._plan.first_ready and self._weights:
                self._send_newest(place)

    def _send_newest(self, place: Place) -> None:
        newest = max(self._weights)
        place.beside("newer", newest, self._weights[newest])

    def _lost(self, place: Place, cause: str, counts: bool) -> None:
        """An actor is gone, and who sat there."""
        if place not in (*self._homes, *self._elsewhere):
            return  # another call has said so
        ray.kill(place.actor)
        for i in sorted(place.guests):
            messages = self._heard[i].messages if i in self._heard else []
            self._heard[i] = Heard(i, messages, cause, counts)
        self._forget(place)

    def _forget(self, place: Place) -> None:
        if place in self._homes:
            self._homes[self._homes.index(place)] = None
        else:
            self._elsewhere.remove(place)

    def leaving(self) -> Iterator[tuple[int, int]]:
        """See `Seats`: guests go home, and nobody stays where the machine is taken away."""
        for i, place in list(self._sits.items()):
            if i in self._heard or not (self._can_go_home(i, place) or self._must_go(place)):
                continue
            if i not in self._calls.values():
                self._sits.pop(i)
                self._rise(i, place)
                yield i, self._given_back.pop(i, 0)
            elif self._plan.first_ready and i not in self._given_back:
                # Else there is a moment without orders, before the next batch.
                self._given_back[i] = 0
                place.beside("leave", i)

    def _can_go_home(self, i: int, place: Place) -> bool:
        home = self._homes[i]
        return home is not None and home.is_up and home is not place

    def _must_go(self, place: Place) -> bool:
        """Whether its machine is taken away soon, while there is another."""
        left_s = self._draining.get(place.node, math.inf) - time.time()
        return left_s < _LEAVE_BEFORE_S and place not in self._up()

    def _rise(self, i: int, place: Place) -> None:
        place.guests.discard(i)
        place.actor.drop.remote(i)
        if place in self._elsewhere and not place.guests:
            self._elsewhere.remove(place)
            ray.kill(place.actor)

    def _seat(self) -> None:
        """Ask for places, and have samplers sit down where they can."""
        asked = sum(place is not None and not place.is_up for place in self._homes)
        for i, home in enumerate(self._homes):
            if home is None and (self._num_asked < self._needs.at_once or not asked):
                self._homes[i] = Place(self._needs, self._plan_ref)
                self._num_asked, asked = self._num_asked + 1, asked + 1
        now, up = time.monotonic(), self._up()
        for i, (orders, since) in list(self._waiting.items()):
            home, is_first = self._homes[i], orders.generation == 1 and i < self._needs.at_once
            patience = _FIRST_GUEST_AFTER_S if is_first else _GUEST_AFTER_S
            if home is not None and home.is_up:
                self._sit(i, home, orders)
            elif up and now - max(since, self._came_at) > patience:
                self._sit(i, min(up, key=lambda place: len(place.guests)), orders)

    def _sit(self, i: int, place: Place, orders: WorkerSetup) -> None:
        del self._waiting[i]
        self._sits[i] = place
        place.guests.add(i)
        place.beats.pop(i, None)
        self._call(i, "sit", (orders,))

    def _call(self, i: int, method: str, what: tuple[Any, ...], *arguments: Any) -> None:
        if i in self._sits:  # else it is gone, which is told next
            packed = cloudpickle.dumps((i, *what))
            ref = getattr(self._sits[i].actor, method).remote(packed, *arguments)
            self._calls[ref] = i

    def _up(self) -> list[Place]:
        """Where samplers can sit down; what is given up only if there is nothing else."""
        homes = [place for place in self._homes if place is not None and place.is_up]
        return homes or self._elsewhere

    def _look_after(self) -> None:
        """Ask how all are, and whether machines are about to be taken away."""
        told = ray._private.state.state.get_draining_nodes()
        self._draining = {node: until_ms / 1000 for node, until_ms in told.items()}
        for i, place in enumerate(self._homes):
            if place is not None and place.is_up:
                place.ask()
                if place.node in self._draining:
                    self._homes[i] = None
                    self._elsewhere.append(place)
        for place in self._elsewhere:
            place.ask()

    def watch(self, now: float, limit_s: float) -> None:
        """See `Seats`: a machine that cannot be reached is given up."""
        self._look_every_s = min(_LOOK_EVERY_S, limit_s / 4)  # an answer is read with the next look
        given_s = self._plan.guards.env_timeout_s
        usual_s = limit_s if limit_s > LEAST_LIMIT_S else 0.0
        # A step that holds Python's lock gives no sign of life either.
        patience_s = max(_UNREACHABLE_S, given_s or usual_s)
        for place in [p for p in (*self._homes, *self._elsewhere) if p is not None and p.is_up]:
            making = any(i not in place.beats for i in place.guests)
            longest_s = patience_s * (TIMES_AS_LONG_TO_START if making else 1)
            if place.silent_s(now) > longest_s:
                self._lost(place, f"has given no sign of life for {longest_s:g} s", False)

    def progress(self, i: int, orders: list[WorkOrder]) -> Any:
        """See `Seats`: who waits for a machine need not."""
        if i in self._waiting:
            return object()
        beat = self._sits[i].beats.get(i) if i in self._sits else None
        return beat and (beat.laps, beat.taken)

    def stack(self, i: int) -> str:
        """See `Seats`."""
        if i not in self._sits:
            return ""
        try:
            return str(ray.get(self._sits[i].beside("stack"), timeout=_STACK_WITHIN_S))
        except RayError:
            return ""

    def where(self, i: int, orders: list[WorkOrder], journals: EpisodeSnapshots) -> str:
        """See `Seats`: as it said last."""
        beat = self._beat(i, orders)
        if beat is None:
            return (
                f"between two fragments, or in the first seconds of one, sampler {self._names[i]}"
            )
        n = self._plan.envs_per_vector
        assert beat.order is not None
        vectors = [v for v, _, _ in beat.order.fragments]
        envs = ", ".join(f"{v * n} to {v * n + n - 1}" if n > 1 else f"{v}" for v in vectors)
        return (
            f"after about {beat.taken} env steps of a fragment of env {envs} of "
            f"{self._plan.spec.id}, sampler {self._names[i]}"
        )

    def _beat(self, i: int, orders: list[WorkOrder]) -> Beat | None:
        """The last sign of life of who carries one of these out."""
        beat = self._sits[i].beats.get(i) if i in self._sits else None
        return beat if beat is not None and beat.order in orders else None

    def lose(self, i: int, orders: list[WorkOrder]) -> tuple[int, int]:
        """See `Seats`: steps are those that it spoke of last."""
        beat = self._beat(i, orders)
        taken = (beat.taken if beat is not None else 0) + self._given_back.pop(i, 0)
        whole = self._plan.num_steps * self._plan.envs_per_vector
        left = whole * sum(len(order.fragments) for order in orders) - taken
        self._waiting.pop(i, None)
        self._calls = {ref: of for ref, of in self._calls.items() if of != i}
        if (place := self._sits.pop(i, None)) is not None:
            place.guests.discard(i)
            if place in self._homes or place in self._elsewhere:  # it is stuck there
                self._lost(place, f"shared its process with {self._names[i]}, which hung", False)
        return taken, left

    def stop(self) -> None:
        """See `Seats`."""
        for place in {*self._up(), *self._elsewhere}:
            place.beside("stop")

    def meters(self) -> dict[str, dict[str, float]]:
        """See `Seats`."""
        return {}

    def laps(self) -> dict[str, Laps]:
        """See `Seats`."""
        return {}

    def metrics(self) -> dict[str, float]:
        """See `Seats`: bytes that came and went."""
        found = {f"{name}_bytes": float(count) for name, count in self._num_bytes.items()}
        self._num_bytes = dict.fromkeys(self._num_bytes, 0)
        return found | {"workers_up": float(len(self._up()))}

    def is_taken(self, i: int) -> bool:
        """See `Seats`."""
        return i in self._sits

    def close(self, within_s: float) -> None:
        """See `Seats`."""
        places = [p for p in (*self._homes, *self._elsewhere) if p is not None]
        closing = [place.actor.close.remote() for place in places if place.is_up]
        failed = None
        try:
            closed = (
                ray.wait(closing, num_returns=len(closing), timeout=within_s)[0] if closing else []
            )
            for ref in closed:
                with contextlib.suppress(RayError):  # it is gone already
                    failed = ray.get(ref) or failed
        finally:
            for place in places:
                ray.kill(place.actor)
            self._homes, self._elsewhere = [None] * len(self._homes), []
            self._sits, self._calls, self._waiting = {}, {}, {}
            self._fragments, self._weights = {}, {}
        if failed is not None:
            raise failed
