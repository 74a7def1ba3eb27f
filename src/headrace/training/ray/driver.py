"""A run on a Ray cluster: its learners are placed, watched, and started again when one is lost.

This process, the driver, starts learners (actors in one placement group), shows the progress of
rank 0 and passes signals on; neither batches nor weights come here. A learner that is lost, alone
or with its machine, is replaced, if the others can go on (`training/rejoin.py`): on its machine, or
on another one that has room. While none has, it is a *guest* of another learner's machine. From a
machine that is about to be taken away a learner moves in the same way, and hands over what it has.
If that cannot be, all start again from the newest checkpoint. If the driver dies, its actors end,
and the run can be resumed.
"""

import contextlib
import os
import signal
import time
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from headrace.collectors.backends.ray_host import own_address
from headrace.config.run_config import demands
from headrace.distributed import ray_internals
from headrace.distributed.channel import pickled
from headrace.distributed.groups import JOIN_WITHIN_S, announce, has_come, host_store
from headrace.distributed.local_ranks import Failure, first_cause
from headrace.distributed.process import StopSignals
from headrace.distributed.ranks import RankInfo
from headrace.envs.changes import as_changes
from headrace.errors import RankError, RankLostError
from headrace.meter import Meter
from headrace.storage import checkpoint
from headrace.storage.run_dir import has_checkpoint
from headrace.timeouts import RestartRate
from headrace.training.job import Job
from headrace.training.log import Display
from headrace.training.rank import RunResult
from headrace.training.ray.connect import machines_for
from headrace.training.ray.learner_actor import LearnerActor, Meeting
from headrace.training.ray.placement import Places, num_gpus, wait_for_placement
from headrace.training.rejoin import OfOneRank, max_replaced, may_move
from headrace.training.reporter import OnUpdate

_ray: Any = ray  # not all of it has types
_BESIDE = "beside"  # group of calls that run while a learner trains
_POLL_EVERY_S = 0.5
_FETCH_WITHIN_S = 1.0
_REPORT_WITHIN_S = 3.0  # for other learners to report, after the driver saw one die
_GUEST_AFTER_S = 3.0  # for Ray to place a successor on another machine, if one has room

_Outcome = tuple[dict[str, Any], int] | OfOneRank | Failure  # the first: summary and signal


def run_on_cluster(
    job: Job, stop: StopSignals, meter: Meter, display: Display, on_update: OnUpdate | None
) -> RunResult:
    """Run a job on the cluster that this process is connected to; `on_update` is called here.

    Raises:
        ConfigError: no machines have room for the learners.
        HeadraceError: the first error of a rank; RankError if learners were lost too often.
    """
    started = time.time() - (time.perf_counter() - meter.started)
    saved = job.saved and replace(job.saved, path=job.saved.path.resolve())
    job = replace(job, run_dir=job.run_dir.resolve(), saved=saved)
    run = job.settings.run
    losses = RestartRate(run.max_worker_restarts)
    with stop.installed(), job.marked():
        while True:
            with contextlib.ExitStack() as stack:
                placement = wait_for_placement(run, stop, display)
                stack.callback(remove_placement_group, placement)
                group = _LearnerGroup(placement, job, stop, display, on_update, losses)
                stack.callback(group.end)
                ended = group.run(started)
            if ended is not None:
                return RunResult(job, *ended, rank=0)
            if group.lost and run.on_worker_loss == "fail":
                raise RankError(f"{group.lost}\nThe run ends here (--on-worker-loss fail).")
            if group.lost and not losses.again(time.monotonic()):
                raise RankError(
                    f"{group.lost}\nThat was more than {run.max_worker_restarts} times in 10 "
                    "minutes (--max-worker-restarts)."
                )
            job = _from_newest_checkpoint(job, group, display)


def _from_newest_checkpoint(job: Job, group: "_LearnerGroup", display: Display) -> Job:
    """Return the job as it continues from its newest checkpoint, or from the beginning."""
    saved = None
    if has_checkpoint(job.run_dir):
        saved = checkpoint.newest(job.run_dir, with_rows=True)
    saved_steps = 0 if saved is None else int(saved.manifest["counters"]["env_steps"])
    again = max(0, group.env_steps - saved_steps)
    display.say(
        f"{group.lost or 'A machine of the learners is about to be taken away.'}\n"
        f"The learners begin again from {'the beginning' if saved is None else saved.path.name}; "
        f"{again:,} env steps are to be taken again."
    )
    # A checkpoint written since then holds the earlier losses.
    is_new = saved is not None and (job.saved is None or saved.path != job.saved.path)
    before = 0 if is_new else job.rolled_back or 0
    return replace(job, saved=saved, rolled_back=before + again)


@dataclass
class _Move:
    """The way of a rank from its actor to another one.

    Attributes:
        loaded: call that ends when the new actor has loaded its code.
        host: the machine that it is a guest of; "": it is in its own place.
        is_told: whether the old actor was told to leave.
    """

    actor: Any
    loaded: Any
    host: str
    is_told: bool = False


class _LearnerGroup:
    """The learners, from one start to their end; `lost` describes a lost one."""

    def __init__(
        self,
        placement: Any,
        job: Job,
        stop: StopSignals,
        display: Display,
        on_update: OnUpdate | None,
        losses: RestartRate,
    ) -> None:
        self._stop, self._display, self._on_update = stop, display, on_update
        self._placement, self._losses, run = placement, losses, job.settings.run
        self._places = Places(placement)
        taken: dict[str, float] = {}
        for node in self._places.all():
            taken[node] = taken.get(node, 0.0) + run.learner_threads
        self._job = replace(job, machines=tuple(machines_for(run, taken)))
        self._store = host_store(own_address())
        self._group, self._coming = 0, dict[int, float]()  # successors, and since when
        self._moves: dict[int, _Move] = {}
        device = "cuda" if num_gpus(run) else "cpu"
        self._replaces = run.num_learners > 1 and max_replaced(job.settings, device) > 0
        self._has_guests = self._replaces and device == "cpu"  # a GPU has no room for another one
        self._may_move = self._has_guests and may_move(job.settings)
        self._actors = [self._start(rank) for rank in range(run.num_learners)]
        self.env_steps, self.lost, self._leaving = 0, "", False
        self._told_to_stop: list[Any] = []
        self._polled_at = time.monotonic()
        self._runs: dict[Any, int] = {}  # calls under way, and their ranks
        self._fetches: dict[Any, Any] = {}  # calls under way, and their actors

    def _start(self, rank: int, host: str = "") -> Any:
        """Start the actor of a rank in its place, or as a guest of this machine."""
        # Two threads: a call that waits for something to show must not hold up a stop.
        actor: Any = _ray.remote(concurrency_groups={_BESIDE: 2})(LearnerActor)
        run = self._job.settings.run
        gpus = num_gpus(run)
        amounts, _ = demands(run.learner_resources)
        where: Any = PlacementGroupSchedulingStrategy(
            self._placement, placement_group_bundle_index=rank
        )
        takes = {"num_cpus": run.learner_threads, "num_gpus": gpus, "resources": amounts}
        if host:  # which has no room of its own
            where, takes = NodeAffinitySchedulingStrategy(host, soft=False), {"num_cpus": 0}
        options = takes | {"max_restarts": 0, "scheduling_strategy": where}
        return actor.options(**options).remote(has_gpu=gpus > 0)

    def run(self, started: float) -> tuple[dict[str, Any], int] | None:
        """Return the run's summary and the signal that stopped it; None: start again."""
        try:
            self._begin(started)
        except RayError as error:
            self.lost = f"A learner could not be started: {error}"
            return None
        outcomes = self._watch()
        if cause := first_cause(o for o in outcomes.values() if isinstance(o, Failure)):
            began_again = self._group and isinstance(cause.error, RankLostError)
            if cause.at < float("inf") and not began_again:
                raise cause.error
            self.lost = str(cause.error)
        elif 0 not in outcomes:
            self.lost = "A learner was lost when another had ended."
        if self.lost or (self._leaving and not self._stop.received):
            return None
        return outcomes[0]  # type: ignore[return-value]  # no failure

    def _begin(self, started: float) -> None:
        self._sent, self._started = pickled(self._job, "other learners"), started
        for rank in range(len(self._actors)):
            self._run(rank)

    def _run(self, rank: int, left: OfOneRank | None = None) -> None:
        """Have a rank join the present group, and run; with what another actor of it has left."""
        info = RankInfo(rank, len(self._actors), 0)
        meeting = Meeting(own_address(), self._store.port, self._group, self._replaces)
        wants_updates = self._on_update is not None
        call = self._actors[rank].run.remote(
            self._sent, info, meeting, self._started, os.getcwd(), wants_updates, left
        )
        self._runs[call] = rank
        self._fetch(self._actors[rank])

    def _watch(self) -> dict[int, _Outcome]:
        """Wait until all ranks have ended or one was lost for good; return their outcomes."""
        outcomes: dict[int, _Outcome] = {}
        give_up_at = float("inf")
        while self._runs and time.monotonic() < give_up_at:
            self._pass_on_signals()
            for call in _ray.wait([*self._runs, *self._fetches], timeout=_POLL_EVERY_S)[0]:
                if call in self._runs:
                    rank = self._runs.pop(call)
                    outcome = _outcome(call, rank)
                    if isinstance(outcome, OfOneRank):
                        self._take_over(rank, outcome)
                    elif outcomes or not self._replace(outcome, rank):
                        outcomes[rank] = outcome
                elif self._show(call, actor := self._fetches.pop(call)) and actor in self._actors:
                    self._fetch(actor)
            if (missing := self._missing()) is not None:
                outcomes[missing.rank] = missing
            self._move()
            if any(isinstance(each, Failure) for each in outcomes.values()):
                # Others may be stuck and not notice.
                give_up_at = min(give_up_at, time.monotonic() + _REPORT_WITHIN_S)
            elif outcomes and self._group:
                # One may have ended before it saw the loss for which others wait for it.
                give_up_at = min(give_up_at, time.monotonic() + JOIN_WITHIN_S)
        ended = [self._actors[rank] for rank in outcomes]
        for call, actor in list(self._fetches.items()):  # what ranks showed last
            if actor in ended and self._show(call, actor):
                self._show(self._fetch(actor, 0.0), actor)
        return outcomes

    def _replace(self, outcome: _Outcome, rank: int) -> bool:
        """Start a successor of a rank, if it is lost and may be replaced; return whether it is.

        If its machine is lost, Ray starts the successor on another one, once there is room.
        """
        if not isinstance(outcome, Failure) or outcome.at < float("inf"):
            return False
        if not self._replaces or self._leaving:
            return False
        # Ray may have placed a successor on the lost machine, before it knew.
        is_again = rank in self._coming and ray_internals.died_with_its_node(self._actors[rank])
        if not is_again:
            if not self._losses.again(time.monotonic()):
                return False
            if rank == 0:
                self._display.stop()
            self._display.say(f"{outcome.error}\nA new one is started; the others wait for it.")
            self._places.suspect(rank)
        self._places.guests.pop(rank, None)
        if (move := self._moves.pop(rank, None)) is not None:
            _ray.kill(move.actor)
        self._put_in_place(rank, self._start(rank))
        return True

    def _put_in_place(self, rank: int, actor: Any, left: OfOneRank | None = None) -> None:
        """Have an actor take the place of a rank: all form another group, with it."""
        self._group += 1
        self._coming[rank] = time.monotonic()
        self._actors[rank] = actor
        self._run(rank, left)
        announce(self._store, self._group, "", [rank])

    def _missing(self) -> Failure | None:
        """Return why a successor does not come; None: none is missing."""
        places = self._places
        if not self._coming:
            places.trust()
            return None
        places.refresh()
        self._cut_off(places.find_gone())
        for rank, since in list(self._coming.items()):
            waited = time.monotonic() - since
            if has_come(self._store, self._group, rank):
                del self._coming[rank]
            elif waited > JOIN_WITHIN_S:
                text = f"Learner {rank + 1} was lost, and the one in its place did not come."
                return Failure(float("inf"), rank, RankError(text))
            elif self._is_without_machine(rank, waited):
                self._start_guest(rank)
        return None

    def _is_without_machine(self, rank: int, waited: float) -> bool:
        """Return whether no machine has room for a rank's successor, after so many seconds."""
        places = self._places
        if not self._has_guests or rank in places.guests or not places.is_home_lost(rank):
            return False
        return waited > _GUEST_AFTER_S or not places.does_ray_know(rank)

    def _start_guest(self, rank: int) -> None:
        """Start a rank's successor as a guest, in place of the actor for which there is no room.

        It reserves no cores. If the machines of all other learners are lost, it is not started.
        """
        if (found := self._places.host(rank, len(self._actors))) is None:
            return
        _ray.kill(self._actors[rank])
        self._runs = {call: each for call, each in self._runs.items() if each != rank}
        self._places.guests[rank], neighbour = found
        self._display.say(
            f"No other machine has room for learner {rank + 1}: it shares that of learner "
            f"{neighbour + 1}" + (", until one has." if self._may_move else ".")
        )
        self._put_in_place(rank, self._start(rank, found[0]))

    def _move(self) -> None:
        """Move learners off machines that are leaving, and guests to machines with room for them.

        The others go on until the new actor has loaded its code. Then the old one leaves.
        """
        places = self._places
        if self._coming or self._told_to_stop or not (places.guests or places.leaving):
            return
        if not self._may_move:
            return
        places.refresh()
        for rank in range(len(self._actors)):
            if (move := self._moves.get(rank)) is not None:
                if not move.is_told and _ray.wait([move.loaded], timeout=0)[0]:
                    if self._show(move.loaded, move.actor):
                        move.is_told = True
                        self._actors[rank].leave.options(concurrency_group=_BESIDE).remote()
                    else:  # it was lost meanwhile
                        del self._moves[rank]
                continue
            host = ""
            if not places.can_go_home(rank):
                found = places.host(rank, len(self._actors))
                if places.of(rank) not in places.leaving or found is None:
                    continue
                host = found[0]
            actor = self._start(rank, host)
            self._moves[rank] = _Move(actor, actor.fetch.remote(0.0), host)

    def _take_over(self, rank: int, left: OfOneRank) -> None:
        """Have the new actor of a rank go on with the environments of the one that left."""
        move, why = self._moves.pop(rank), "a machine has room for it"
        if rank == 0:
            self._display.stop()
        _ray.kill(self._actors[rank])
        self._places.guests.pop(rank, None)
        if move.host:
            self._places.guests[rank] = move.host
            why = "its machine is about to be taken away"
        self._display.say(f"Learner {rank + 1} moves: {why}.")
        self._put_in_place(rank, move.actor, left)

    def _cut_off(self, addresses: list[str]) -> None:
        """Have learners end their connections to lost machines, which cannot end them any more."""
        for actor in self._actors if addresses else []:
            actor.cut_off.options(concurrency_group=_BESIDE).remote(addresses)

    def _fetch(self, actor: Any, within_s: float = _FETCH_WITHIN_S) -> Any:
        """Begin to fetch what an actor has to show; return the call."""
        call = actor.fetch.options(concurrency_group=_BESIDE).remote(within_s)
        self._fetches[call] = actor
        return call

    def _show(self, call: Any, actor: Any) -> bool:
        """Show what an actor has to show; return whether it is alive."""
        try:
            env_steps, shown = _ray.get(call)
        except RayError:
            return False
        self.env_steps = max(self.env_steps, env_steps)
        for method, *arguments in shown:
            if method == "on_update":
                self._answer(actor, *arguments)
            else:
                getattr(self._display, method)(*arguments)
        return True

    def _answer(self, actor: Any, number: int, metrics: dict[str, Any]) -> None:
        """Call `on_update`. The actor, of rank 0, waits for what it returns."""
        assert self._on_update is not None
        returned = self._on_update(number, metrics)
        # Here its type, before it is sent; rank 0 knows the environments, and checks them.
        actor.answer.options(concurrency_group=_BESIDE).remote(as_changes(returned))

    def _pass_on_signals(self) -> None:
        """Stop all ranks after a signal, or when one of their machines is to be taken away."""
        if self._stop.received:
            self._pass_on(self._stop.received)
        elif not self._told_to_stop and time.monotonic() - self._polled_at > _POLL_EVERY_S:
            self._polled_at = time.monotonic()
            self._places.find_leaving()
            places, size = self._places, len(self._actors)
            moves = [rank for rank in range(size) if places.of(rank) in places.leaving]
            can_move = self._may_move and all(places.host(rank, size) for rank in moves)
            self._leaving = bool(moves) and not can_move
            if self._leaving:
                self._pass_on(signal.SIGTERM)

    def _pass_on(self, number: int) -> None:
        """Stop each rank that was not told to stop yet."""
        for actor in self._actors:
            if actor not in self._told_to_stop:
                self._told_to_stop.append(actor)
                actor.stop.options(concurrency_group=_BESIDE).remote(int(number))

    def end(self) -> None:
        """End the learners, whatever they do; Ray ends their workers, which they own."""
        for actor in [*self._actors, *(move.actor for move in self._moves.values())]:
            _ray.kill(actor)


def _outcome(call: Any, rank: int) -> _Outcome:
    try:
        outcome: _Outcome = _ray.get(call)
    except RayError as error:
        lost = RankError(f"Learner {rank + 1} was lost: {error}")
        return Failure(float("inf"), rank, lost)
    return outcome
