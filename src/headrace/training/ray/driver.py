"""A run on a Ray cluster: its learners are placed, watched, and started again when one is lost.

This process, the driver, starts learners (actors in one placement group), shows the progress of
rank 0 and passes signals on; neither batches nor weights come here. A learner that is lost, alone
or with its machine, is replaced, if the others can go on (`training/rejoin.py`): on its machine, or
on another one that has room. While none has, it is a *guest* of another learner's machine. If that
cannot be, all start again from the newest checkpoint, and also if a machine is about to be taken
away; then the run is saved before. If the driver dies, its actors end, and the run can be resumed.
"""

import contextlib
import os
import signal
import socket
import time
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from headrace.config.run_config import RunConfig, demands
from headrace.distributed import ray_internals
from headrace.distributed.channel import pickled
from headrace.distributed.groups import JOIN_WITHIN_S, announce, has_come, host_store
from headrace.distributed.local_ranks import Failure, first_cause
from headrace.distributed.process import StopSignals
from headrace.distributed.ranks import RankInfo
from headrace.envs.changes import as_changes
from headrace.errors import ConfigError, RankError, RankLostError
from headrace.meter import Meter
from headrace.storage import checkpoint
from headrace.timeouts import RestartRate
from headrace.training.job import Job
from headrace.training.log import Display
from headrace.training.rank import RunResult
from headrace.training.ray.connect import describe_machines, room_for
from headrace.training.ray.learner_actor import LearnerActor, Meeting, own_address
from headrace.training.rejoin import max_replaced
from headrace.training.reporter import OnUpdate

_ray: Any = ray  # not all of it has types
_BESIDE = "beside"  # group of calls that run while a learner trains
_POLL_EVERY_S = 0.5
_FETCH_WITHIN_S = 1.0
_REPORT_WITHIN_S = 3.0  # for other learners to report, after the driver saw one die
_TRY_FOR_S = 5
_GIVE_UP_AFTER_S = 600.0  # for a cloud to start machines
_ANSWER_WITHIN_S = 1.0
_GUEST_AFTER_S = 3.0  # for Ray to place a successor on another machine, if one has room

_Outcome = tuple[dict[str, Any], int] | Failure  # summary and signal, or the failure


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
                placement = _wait_for_placement(run, stop, display)
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
    if any(job.run_dir.glob("checkpoints/step_*")):
        saved = checkpoint.newest(job.run_dir)
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


def _wait_for_placement(run: RunConfig, stop: StopSignals, display: Display) -> Any:
    """Return a placement group with its machines; SystemExit if stopped before."""
    began, is_shown = time.monotonic(), False
    while not stop():
        placement = _request_placement(run)
        for _ in range(_TRY_FOR_S):
            if _is_placed(placement):
                return placement
            if stop():
                break
        remove_placement_group(placement)  # Ray may have forgotten it: ask again
        waited = time.monotonic() - began
        needs = (
            f"{run.num_learners} learners need machines that have "
            f"{_bundle(run) | run.learner_resources} for each; the cluster's have "
            f"{describe_machines()}"
        )
        if waited > _GIVE_UP_AFTER_S:
            raise ConfigError(f"{needs}.\nWaited {waited:,.0f} s for them.")
        if not is_shown:
            display.say(f"Waiting: {needs}.")
            is_shown = True
    raise SystemExit(128 + stop.received)


def _request_placement(run: RunConfig) -> Any:
    """Request a placement group for the learners, the first on this machine if it has room."""
    amounts, labels = demands(run.learner_resources)
    bundles = [_bundle(run) | amounts for _ in range(run.num_learners)]
    here = _ray.get_runtime_context().get_node_id()
    free = ray_internals.free_by_node().get(here, {})
    node = next((name for name in free if name.startswith("node:") and "__" not in name), None)
    if node and all(free.get(name, 0.0) >= amount for name, amount in bundles[0].items()):
        bundles[0] = bundles[0] | {node: 0.001}
    selector = {"bundle_label_selector": [labels] * len(bundles)} if labels else {}
    return placement_group(bundles, strategy="PACK", **selector)


def _bundle(run: RunConfig) -> dict[str, float]:
    return {"CPU": float(run.learner_threads)} | ({"GPU": g} if (g := _num_gpus(run)) else {})


def _num_gpus(run: RunConfig) -> int:
    if run.gpus_per_learner >= 0 or run.device == "cpu":
        return max(0, run.gpus_per_learner)
    gpus = _ray.cluster_resources().get("GPU", 0.0)
    return int(run.device == "cuda" or gpus >= run.num_learners)


def _is_placed(placement: Any) -> bool:
    try:
        return bool(placement.wait(timeout_seconds=1))  # it takes whole seconds
    except Exception as error:  # Ray's class of it has no public name
        if "does not exist" not in str(error):
            raise
        return False  # Ray forgets one if a machine was just about to have room, or has gone


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
        self._node_of: dict[int, str] = _node_of(placement)
        taken: dict[str, float] = {}
        for node in self._node_of.values():
            taken[node] = taken.get(node, 0.0) + run.learner_threads
        room = max(1, room_for(run, taken) // run.num_learners)
        self._job = replace(job, room_for=room)
        self._store = host_store(own_address())
        self._group, self._coming = 0, dict[int, float]()  # successors, and until when
        self._guests: dict[int, str] = {}  # and the machines that they are on
        self._moving: dict[int, Any] = {}  # actors to take the places of guests
        self._suspected: set[str] = set()  # machines whose learners were lost, until all is well
        self._gone: set[str] = set()  # machines that are lost, whether Ray knows it yet or not
        device = "cuda" if _num_gpus(run) else "cpu"
        self._replaces = run.num_learners > 1 and max_replaced(job.settings, device) > 0
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
        gpus = _num_gpus(run)
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

    def _run(self, rank: int) -> None:
        """Have a rank join the present group, and run."""
        info = RankInfo(rank, len(self._actors), 0)
        meeting = Meeting(own_address(), self._store.port, self._group, self._replaces)
        wants_updates = self._on_update is not None
        call = self._actors[rank].run.remote(
            self._sent, info, meeting, self._started, os.getcwd(), wants_updates
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
                    if outcomes or not self._replace(outcome, rank):
                        outcomes[rank] = outcome
                elif self._show(call, actor := self._fetches.pop(call)) and actor in self._actors:
                    self._fetch(actor)
            if (missing := self._missing()) is not None:
                outcomes[missing.rank] = missing
            self._move_guests()
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
            self._suspected.add(self._machine_of(rank))
        self._guests.pop(rank, None)
        self._put_in_place(rank, self._start(rank))
        return True

    def _put_in_place(self, rank: int, actor: Any) -> None:
        """Have an actor take the place of a rank: all form another group, with it."""
        self._group += 1
        self._coming[rank] = time.monotonic() + JOIN_WITHIN_S
        self._actors[rank] = actor
        self._run(rank)
        announce(self._store, self._group, "", [rank])

    def _missing(self) -> Failure | None:
        """Return why a successor does not come; None: none is missing."""
        if not self._coming:
            self._suspected.clear()
            return None
        self._node_of = _node_of(self._placement)
        self._find_gone()
        living, known = self._living(), _living_nodes()
        for rank, until in list(self._coming.items()):
            if has_come(self._store, self._group, rank):
                del self._coming[rank]
            elif time.monotonic() > until:
                text = f"Learner {rank + 1} was lost, and the one in its place did not come."
                return Failure(float("inf"), rank, RankError(text))
            elif rank not in self._guests and (node := self._node_of.get(rank)) not in living:
                # Once Ray knows of the loss, it looks for another machine.
                waited = time.monotonic() - (until - JOIN_WITHIN_S)
                if node in known or waited > _GUEST_AFTER_S:
                    self._host(rank, living)
        return None

    def _find_gone(self) -> None:
        """Find which of the suspected machines are lost.

        Ray takes up to 20 s to know. Learners end their connections to them, which may not end by
        themselves.
        """
        nodes = [node for node in _ray.nodes() if node["NodeID"] in self._suspected]
        gone = [node for node in nodes if not (node["Alive"] and _answers(node))]
        self._gone |= {node["NodeID"] for node in gone}
        self._suspected -= self._gone
        self._cut_off([node["NodeManagerAddress"] for node in gone])

    def _living(self) -> set[str]:
        """Return the machines that are not lost, as far as anybody knows."""
        return _living_nodes() - self._gone

    def _host(self, rank: int, living: set[str]) -> None:
        """Start a rank's successor on the machine of another learner, in place of one that waits.

        There it uses what cores are free of work. Of those machines the one with the fewest
        learners is taken; if all are lost, the successor is not started.
        """
        others = [self._machine_of(each) for each in range(len(self._actors)) if each != rank]
        hosts = [node for node in others if node in living]
        if not hosts:
            return
        host = min(hosts, key=hosts.count)
        self._drop(rank)
        self._guests[rank] = host
        self._actors[rank] = self._start(rank, host)
        self._run(rank)
        self._coming[rank] = time.monotonic() + JOIN_WITHIN_S
        self._display.say(
            f"No other machine has room for learner {rank + 1}. Until one has, it shares the "
            f"machine of learner {others.index(host) + (others.index(host) >= rank) + 1}."
        )

    def _move_guests(self) -> None:
        """Move guests to machines that have room for them by now.

        The others go on until the new actor has loaded all its code.
        """
        if self._coming or self._leaving or self._stop.received:
            return
        for rank in list(self._guests):
            if rank not in self._moving:
                if _node_of(self._placement).get(rank) in self._living():
                    actor = self._start(rank)
                    self._moving[rank] = actor, actor.fetch.remote(0.0)
            elif _ray.wait([self._moving[rank][1]], timeout=0)[0]:
                actor, call = self._moving.pop(rank)
                if not self._show(call, actor):  # it is lost
                    continue
                self._display.say(f"A machine has room for learner {rank + 1}: it moves there.")
                if rank == 0:
                    self._display.stop()
                self._drop(rank)
                del self._guests[rank]
                self._put_in_place(rank, actor)
                return  # the next one when this one has come

    def _machine_of(self, rank: int) -> str:
        return self._guests.get(rank) or self._node_of.get(rank, "")

    def _drop(self, rank: int) -> None:
        """End a rank's actor, whose outcome nobody waits for any more."""
        _ray.kill(self._actors[rank])
        self._runs = {call: each for call, each in self._runs.items() if each != rank}

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
            draining = set(ray_internals.draining_nodes())
            self._leaving = bool(draining & set(self._node_of.values()))
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
        for actor in [*self._actors, *(actor for actor, _ in self._moving.values())]:
            _ray.kill(actor)


def _node_of(placement: Any) -> dict[int, str]:
    """Return the machine of each rank, as far as Ray has one for it."""
    return dict(placement_group_table(placement)["bundles_to_node_id"])


def _living_nodes() -> set[str]:
    return {node["NodeID"] for node in _ray.nodes() if node["Alive"]}


def _answers(node: dict[str, Any]) -> bool:
    """Return whether Ray's process on a machine takes connections."""
    address = node["NodeManagerAddress"], node["NodeManagerPort"]
    try:
        socket.create_connection(address, _ANSWER_WITHIN_S).close()
    except OSError:
        return False
    return True


def _outcome(call: Any, rank: int) -> _Outcome:
    try:
        outcome: _Outcome = _ray.get(call)
    except RayError as error:
        lost = RankError(f"Learner {rank + 1} was lost: {error}")
        return Failure(float("inf"), rank, lost)
    return outcome
