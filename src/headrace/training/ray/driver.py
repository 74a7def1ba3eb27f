"""A run on a Ray cluster: its learners placed, watched, and formed again when one is lost.

This process, the driver, starts learners (actors in one placement group), shows what rank 0 tells,
and passes signals on; neither experience nor weights come here. If a learner is lost, or its
machine is about to be taken away, all begin again from the newest checkpoint; before a machine is
taken, that is one that was just saved. If this process is lost, its actors end, and the run can be
resumed.

Left out: samplers (`collectors/backends/ray_actors.py`), a rank (`learner_actor.py`), Ray's start
(`connect.py`).
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace.config.run_config import RunConfig, demands
from headrace.distributed.local_ranks import pickled
from headrace.distributed.ranks import RankInfo
from headrace.errors import ConfigError, HeadraceError, RankError
from headrace.meter import Meter
from headrace.storage import checkpoint
from headrace.timeouts import RestartRate
from headrace.training.job import Job
from headrace.training.log import Display
from headrace.training.process import StopSignals
from headrace.training.rank import RunResult
from headrace.training.ray.connect import room_for
from headrace.training.ray.learner_actor import RemoteRank
from headrace.training.reporter import OnUpdate

_ray: Any = ray  # not all of it has types
_BESIDE = "beside"  # what need not wait for the run's end
_LOOK_EVERY_S = 0.5
_WORDS_WITHIN_S = 1.0
_REPORT_WITHIN_S = 3.0  # between a learner's death as this process sees it, and others' words
_START_WITHIN_S = 300.0  # imports from a slow disk
_TRY_FOR_S, _PLACE_WITHIN_S = 5, 600.0  # a machine may have to be started first


def see_through(
    task: Job, stop: StopSignals, meter: Meter, display: Display, on_update: OnUpdate | None
) -> RunResult:
    """Run a task on the cluster that this process is connected to.

    Args:
        task: of all ranks.
        stop: told when to stop.
        meter: of this process.
        display: where progress is shown.
        on_update: called here, after each update.

    Raises:
        ConfigError: no machines have room for the learners.
        RankError: learners were lost again and again.
        HeadraceError: the first that a rank raised, with its rank.
    """
    begun = time.time() - (time.perf_counter() - meter.started)
    saved = task.saved and replace(task.saved, path=task.saved.path.resolve())
    task = replace(task, run_dir=task.run_dir.resolve(), saved=saved)
    losses = RestartRate(task.settings.run.max_worker_restarts)
    with stop.installed():
        while True:
            with _group(task.settings.run, stop, display) as group:
                if group is None:  # told to stop, before they had begun
                    raise SystemExit(128 + stop.received)
                summary, stopped_by = group.see_through(task, stop, display, on_update, begun)
            if summary is not None:
                break
            if group.lost and not losses.again(time.monotonic()):
                raise RankError(
                    f"{group.lost}\nThat was more than {task.settings.run.max_worker_restarts} "
                    "times in 10 minutes (--max-worker-restarts)."
                )
            task = _from_newest(task, group, display)
    return RunResult(task, summary, stopped_by, rank=0)


def _from_newest(task: Job, group: "_Group", display: Display) -> Job:
    """The same task, from its newest checkpoint; or from the beginning, if there is none yet."""
    saved = None
    if any(task.run_dir.glob("checkpoints/step_*")):
        saved = checkpoint.newest(task.run_dir)
    there = 0 if saved is None else int(saved.manifest["counters"]["env_steps"])
    again = max(0, group.env_steps - there)
    since = "the beginning" if saved is None else saved.path.name
    display.say(
        f"{group.lost or 'A machine of the learners is about to be taken away.'}\n"
        f"The learners begin again from {since}; {again:,} env steps are to be taken again."
    )
    if saved is not None and (task.saved is None or saved.path != task.saved.path):
        before = 0  # it was saved since, with the losses before
    else:
        before = task.rolled_back or 0
    return replace(task, saved=saved, rolled_back=before + again)


@contextlib.contextmanager
def _group(run: RunConfig, stop: StopSignals, display: Display) -> Iterator["_Group | None"]:
    """Learners, each on a machine with room for it; None: told to stop before there was."""
    placed = _room(run, stop, display)
    group = None
    try:
        if placed is not None:
            group = _Group(placed, run)
        yield group
    finally:
        if group is not None:
            group.end()
        if placed is not None:
            remove_placement_group(placed)


def _placed(run: RunConfig) -> Any:
    """A placement group for the learners; the first one here, if it can be."""
    bundle = _bundle(run)
    amounts, labels = demands(run.learner_resources)
    bundles = [bundle | amounts for _ in range(run.num_learners)]
    here = _ray.get_runtime_context().get_node_id()
    free = _ray._private.state.available_resources_per_node().get(here, {})
    own = next((name for name in free if name.startswith("node:") and "__" not in name), None)
    if own and all(free.get(name, 0.0) >= amount for name, amount in bundles[0].items()):
        bundles[0] = bundles[0] | {own: 0.001}
    where = {"bundle_label_selector": [labels] * len(bundles)} if labels else {}
    return placement_group(bundles, strategy="PACK", **where)


def _bundle(run: RunConfig) -> dict[str, float]:
    return {"CPU": float(run.learner_threads)} | ({"GPU": g} if (g := _num_gpus(run)) else {})


def _num_gpus(run: RunConfig) -> int:
    """Of each learner."""
    if run.gpus_per_learner >= 0 or run.device == "cpu":
        return max(0, run.gpus_per_learner)
    has = _ray.cluster_resources().get("GPU", 0.0)
    return int(run.device == "cuda" or has >= run.num_learners)


def _room(run: RunConfig, stop: StopSignals, display: Display) -> Any:
    """A placement group that has its place; None: told to stop before it had."""
    began, said = time.monotonic(), False
    while not stop():
        placed = _placed(run)
        for _ in range(_TRY_FOR_S):
            if _has_place(placed):
                return placed
            if stop():
                break
        remove_placement_group(placed)  # it may have been forgotten
        waited = time.monotonic() - began
        why = (
            f"{run.num_learners} learners need machines that have "
            f"{_bundle(run) | run.learner_resources} for each; the cluster's have {_nodes()}"
        )
        if waited > _PLACE_WITHIN_S:
            raise ConfigError(f"{why}.\nWaited {waited:,.0f} s for them.")
        if not said:
            said = True
            display.say(f"Waiting: {why}.")
    return None


def _has_place(placed: Any) -> bool:
    """Whether it has within a second."""
    try:
        return bool(placed.wait(timeout_seconds=1))  # it takes whole seconds
    except Exception as error:  # it has no name of its own
        if "does not exist" not in str(error):
            raise
        return False  # Ray forgets one, if a machine was just about to have room, or has gone


def _nodes() -> str:
    kept = ("CPU", "GPU")
    return "; ".join(
        ", ".join(
            f"{name} {amount:g}"
            for name, amount in sorted(node["Resources"].items())
            if name in kept or not (name.startswith("node:") or "memory" in name)
        )
        for node in _ray.nodes()
        if node["Alive"]
    )


class _Group:
    """The learners, once.

    Attributes:
        env_steps: that they had learned from when they were heard last.
        lost: how one was lost; "": none was.
    """

    def __init__(self, placed: Any, run: RunConfig) -> None:
        nodes = placement_group_table(placed)["bundles_to_node_id"]
        self._nodes = set(nodes.values())
        taken: dict[str, float] = {}
        for node in nodes.values():
            taken[node] = taken.get(node, 0.0) + run.learner_threads
        self._room_for = max(1, room_for(run, taken) // run.num_learners)
        # Two threads: who waits for words must not hold up who says stop.
        actor: Any = _ray.remote(concurrency_groups={_BESIDE: 2})(RemoteRank)
        gpus = _num_gpus(run)
        amounts, _ = demands(run.learner_resources)
        self._actors = [
            actor.options(
                num_cpus=run.learner_threads,
                num_gpus=gpus,
                resources=amounts,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placed, placement_group_bundle_index=rank
                ),
            ).remote(has_gpu=gpus > 0)
            for rank in range(run.num_learners)
        ]
        self.env_steps, self.lost, self._leaving = 0, "", False
        self._runs: dict[Any, int] = {}  # what is under way, of which rank

    def see_through(
        self,
        task: Job,
        stop: StopSignals,
        display: Display,
        on_update: OnUpdate | None,
        begun: float,
    ) -> tuple[dict[str, Any] | None, int]:
        """The run's summary, and the signal that stopped it; None: it is to begin again."""
        try:
            self._begin(task, begun, wants_updates=on_update is not None)
        except RayError as error:
            self.lost = f"A learner could not be started: {error}"
            return None, 0
        outcomes = self._watch(stop, display, on_update)
        self.lost = _raise_or_lost(outcomes)
        if self.lost or (self._leaving and not stop.received):
            return None, 0
        _, summary, stopped_by = outcomes[0]
        return summary, stopped_by

    def _begin(self, task: Job, begun: float, *, wants_updates: bool) -> None:
        sent, size = pickled(replace(task, room_for=self._room_for)), len(self._actors)
        meeting = _ray.get(self._actors[0].meet.remote(), timeout=_START_WITHIN_S)
        here = os.getcwd()
        for rank, actor in enumerate(self._actors):
            place = RankInfo(rank, size, 0)
            ref = actor.run.remote(sent, place, meeting, begun, here, each=wants_updates)
            self._runs[ref] = rank

    def _watch(
        self, stop: StopSignals, display: Display, on_update: OnUpdate | None
    ) -> dict[int, Any]:
        """Until all ranks have ended, or one was lost: what became of each."""
        words = {self._ask(rank): rank for rank in range(len(self._actors))}
        outcomes: dict[int, Any] = {}
        told, looked_at, give_up_at = False, time.monotonic(), float("inf")
        while self._runs and time.monotonic() < give_up_at:
            if stop.received and not told:
                told = self._stop(stop.received)
            if not self._leaving and time.monotonic() - looked_at > _LOOK_EVERY_S:
                looked_at = time.monotonic()
                if self._nodes & set(_ray._private.state.state.get_draining_nodes()):
                    self._leaving = self._stop(signal.SIGTERM)
            for ref in _ray.wait([*self._runs, *words], timeout=_LOOK_EVERY_S)[0]:
                if ref in self._runs:
                    outcomes[self._runs.pop(ref)] = result = _result(ref)
                    if result[0] != "ended":  # others may be stuck, and not notice
                        give_up_at = min(give_up_at, time.monotonic() + _REPORT_WITHIN_S)
                elif self._hear(ref, display, on_update):
                    words[self._ask(words[ref])] = words[ref]
                words.pop(ref, None)
        for ref, rank in words.items():  # what was said last
            if rank in outcomes and self._hear(ref, display, on_update):
                self._hear(self._ask(rank, 0.0), display, on_update)
        return outcomes

    def _ask(self, rank: int, within_s: float = _WORDS_WITHIN_S) -> Any:
        return self._actors[rank].words.options(concurrency_group=_BESIDE).remote(within_s)

    def _hear(self, ref: Any, display: Display, on_update: OnUpdate | None) -> bool:
        """Show what a rank tells; whether it is there still."""
        try:
            env_steps, said = _ray.get(ref)
        except RayError:
            return False
        self.env_steps = max(self.env_steps, env_steps)
        for kind, *what in said:
            if kind == "on_update":
                assert on_update is not None
                on_update(*what)
            else:
                getattr(display, kind)(*what)
        return True

    def _stop(self, number: int) -> bool:
        for actor in self._actors:
            actor.stop.options(concurrency_group=_BESIDE).remote(int(number))
        return True

    def end(self) -> None:
        """Whatever they do; their samplers, which they own, end with them."""
        for actor in self._actors:
            _ray.kill(actor)


def _result(ref: Any) -> tuple[Any, ...]:
    """What a rank has returned, or ("died", why)."""
    try:
        return tuple(_ray.get(ref))
    except RayError as error:
        return "died", str(error)


def _raise_or_lost(outcomes: dict[int, Any]) -> str:
    """How a learner was lost; "" if none was. Raises what began it, if that was something else."""
    failures = sorted((of[1], rank, of[2]) for rank, of in outcomes.items() if of[0] == "failed")
    errors: list[HeadraceError] = [error for _, _, error in failures]
    for error in errors:
        if type(error) is not RankError:
            raise error
    for rank, of in sorted(outcomes.items()):
        if of[0] == "died":
            return f"Learner {rank + 1} was lost: {of[1]}"
    if errors:
        raise errors[0]
    return ""
