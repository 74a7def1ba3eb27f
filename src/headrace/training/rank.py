"""One rank of a run: build its parts, restore them, run the loop, and clear up after it.

Left out: the loop (`loop.py`), every part of it, and who starts ranks (`launch.py`).
"""

import contextlib
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

import headrace
from headrace.collectors.api import Collector, SamplingPlan, Say, ShouldStop
from headrace.collectors.asynchronous import AsynchronousCollector
from headrace.collectors.backends.api import BackendFactory
from headrace.collectors.device import Acting, DeviceCollector
from headrace.collectors.inline import InlineCollector
from headrace.collectors.snapshots import regroup
from headrace.collectors.synchronous import SynchronousCollector
from headrace.config.resolve import Settings, cpu_cores
from headrace.config.run_config import RunConfig, demands
from headrace.distributed.ranks import SINGLE_RANK, Ranks, device_of, gather_json
from headrace.envs.api import Guards, Restored
from headrace.envs.factory import EnvMaker
from headrace.envs.vectors import is_one_vector
from headrace.errors import EnvError
from headrace.learner.learner import Learner, Learns
from headrace.learner.multi_policy import MultiPolicyLearner
from headrace.meter import Meter
from headrace.models.custom import ModelFactory
from headrace.spec import Agents, Array, EnvSpec
from headrace.storage import checkpoint
from headrace.storage import run_dir as rundir
from headrace.storage.sections import Section, restore
from headrace.storage.timeline import tracks_of, write_timeline
from headrace.training.job import Job
from headrace.training.log import Display, MetricsLog, Shows
from headrace.training.loop import Counters, train
from headrace.training.process import StopSignals, check_open_files, math_threads
from headrace.training.reporter import OnUpdate, Reporter, introduce
from headrace.training.saver import Evaluations, Saver


@dataclass(frozen=True)
class RunResult:
    """What is left of a run.

    Attributes:
        run_dir: its directory.
        summary: what `--json` prints.
        stopped_by: the signal that ended it early (0: none did).
        maker: makes its environments.
        model: makes its network, if it is the user's own.
        spec: of the environment.
        shares: the agents of each policy.
        rank: of this process: 0 writes to the directory, and speaks.
    """

    run_dir: Path
    summary: dict[str, Any]
    stopped_by: int
    maker: EnvMaker
    model: ModelFactory | None
    spec: EnvSpec
    shares: dict[str, Agents]
    rank: int


def follow(ranks: Ranks, task: Job) -> None:
    """A rank that another process started: the display is rank 0's."""
    display = Display(None, task.settings.run.total_env_steps)
    say = said_by(ranks.rank, quiet=task.quiet)
    run_rank(task, ranks, StopSignals(patient=True), Meter(), display, say)


def run_rank(
    task: Job,
    ranks: Ranks,
    stop: StopSignals,
    meter: Meter,
    display: Shows,
    say: Say,
    on_update: OnUpdate | None = None,
) -> RunResult:
    """Build the parts, restore them if there is a checkpoint, run the loop, and clear up.

    Args:
        task: what all ranks are told.
        ranks: of the job. Rank 0 alone writes, reports and evaluates.
        stop: told when to stop.
        meter: of this process.
        display: where progress is shown: of rank 0.
        say: told what the user should know of this rank's samplers.
        on_update: called on rank 0 after each update.
    """
    settings, run, is_first = task.settings, task.settings.run, ranks.rank == 0
    meter.keep_laps(wanted=run.timeline)
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop.installed())
        stack.enter_context(math_threads(run.learner_threads))
        device = device_of(run.device, ranks.local_rank)
        learner = learner_of(task, device, meter, ranks)
        counters, under_way = Counters(), dict[str, Array]()
        sections = [
            *learner.sections(),
            counters.section(),
            Section(
                "workers",
                lambda: (checkpoint.gathered(ranks, collector.state()), {}),
                lambda tensors, _: under_way.update({k: t.numpy() for k, t in tensors.items()}),
                is_collective=True,
            ),
        ]
        if task.saved is None:
            _init_from(task, learner)
        else:
            restore(sections, task.saved)
        counters.ledger.collected += task.rolled_back or 0
        counters.ledger.lost += task.rolled_back or 0
        if task.rolled_back is None:
            introduce(display, settings, task.spec, task.run_dir, ranks)
        collector = _collector(task, learner, ranks, meter, stop, say, device, under_way)
        stack.push(_closing(collector))
        meter.lap("start")
        # From here on it is a run: what could not be built has been refused.
        if is_first:
            rundir.write_config(task.run_dir, _describe(settings, task.maker))
        if task.saved is not None:
            restored = Restored()
            for each in gather_json(ranks, asdict(collector.restored)):
                restored.add(Restored(**each))
            _tell_of_resume(task, task.saved, learner, counters, restored, display)
        meter.lap("checkpoint")
        saver = Saver(task, sections, counters, learner, ranks)
        log = None
        if is_first:
            log = MetricsLog(task.run_dir, learner.version, counters.env_steps)
            stack.enter_context(contextlib.closing(log))
        reporter = Reporter(task, counters, learner, meter, collector, log, display, on_update)
        evaluate = Evaluations(task, counters, learner, saver, stop) if is_first else dict
        stack.callback(display.stop)
        display.start()
        train(
            run, collector, learner, counters, meter,
            ranks=ranks, evaluate=evaluate, on_update=reporter, save=saver,
            save_is_due=saver.is_due, write_down=saver.write_down,
        )  # fmt: skip
        worker_meters = _meters(task, ranks, meter, collector)
        stopped_by = max(gather_json(ranks, stop.received))  # whichever rank it came to
    saver.require()
    summary = reporter.summary(task.run_dir, worker_meters)
    return RunResult(
        task.run_dir, summary, stopped_by, task.maker, task.model, task.spec, task.shares,
        ranks.rank,
    )  # fmt: skip


def _meters(
    task: Job, ranks: Ranks, meter: Meter, collector: Collector
) -> dict[str, dict[str, float]]:
    """Seconds by span of every process of the job but this one, by name; writes the timeline."""
    if task.settings.run.timeline:
        tracks = tracks_of(ranks, meter.take_laps(), collector.laps())
        write_timeline(task.run_dir, ranks.rank, tracks)
    own = collector.meters()
    if ranks.size == 1:
        return own
    named: dict[str, dict[str, float]] = {}
    for rank, (learner, samplers) in enumerate(gather_json(ranks, [meter.seconds(), own])):
        if rank != ranks.rank:
            named[f"rank {rank}"] = learner
        named |= {f"rank {rank}, {name}": seconds for name, seconds in samplers.items()}
    return named


def _closing(collector: Collector) -> Callable[..., None]:
    """Close at the end of a `with`; an error in closing must not hide the one that ended it."""

    def close(kind: type[BaseException] | None, *_: object) -> None:
        try:
            collector.close()
        except EnvError:
            if kind is None:
                raise

    return close


def learner_of(task: Job, device: torch.device, meter: Meter, ranks: Ranks = SINGLE_RANK) -> Learns:
    """One; or one for each of several policies."""
    settings, shares = task.settings, task.shares
    if len(shares) > 1:
        model, saved = task.model, task.saved
        return MultiPolicyLearner(settings, shares, task.spec, model, device, meter, ranks, saved)
    [(name, share)] = shares.items()
    return Learner(
        settings.of(name), task.spec.of(share), task.model, device, meter, ranks,
        name=name, num_agents=share.size,
    )  # fmt: skip


def _init_from(task: Job, learner: Learns) -> None:
    """Begin with the weights of another run, if that was asked for."""
    source = task.settings.run.init_from
    if source:
        saved = checkpoint.newest(Path(source))
        for name, policy in learner.policies.items():
            if name not in task.settings.run.frozen:
                theirs = checkpoint.policy_name(saved, name)
                with checkpoint.as_written(saved.path):
                    spec = EnvSpec.from_json(saved.manifest["policies"][theirs]["spec"])
                checkpoint.check_fits(spec, task.spec.of(task.shares[name]), Path(source))
                checkpoint.load_into(policy, saved, theirs)


def said_by(rank: int, *, quiet: bool) -> Say:
    """What another rank has to say of its samplers: the display is rank 0's."""

    def say(text: str) -> None:
        if not quiet:
            print(f"Rank {rank}: {text}", file=sys.stderr, flush=True)

    return say


def _collector(
    task: Job,
    learner: Learns,
    ranks: Ranks,
    meter: Meter,
    stop: ShouldStop,
    say: Say,
    device: torch.device,
    state: dict[str, Array],
) -> Collector:
    run = task.settings.run
    num_workers = run.num_workers // ranks.size
    plan = plan_of(task, learner, device, ranks)
    if task.saved is not None:
        with checkpoint.as_written(task.saved.path):
            state = regroup(state, run.num_envs, plan.envs_per_vector)
    if on_device(task):
        return DeviceCollector(plan, acting_of(task, learner), device, meter, stop, state)
    if num_workers == 0:
        return InlineCollector(plan, meter, stop, state, say)
    kind = AsynchronousCollector if plan.first_ready else SynchronousCollector
    if run.cluster:
        return kind(plan, num_workers, stop, state, say, _actors(run, task.room_for))
    check_open_files(num_workers)
    return kind(plan, num_workers, stop, state, say)


def on_device(task: Job) -> bool:
    """Whether all environments are one vector, where the learner is."""
    return not task.settings.run.num_workers and is_one_vector(task.maker, task.spec)


def acting_of(task: Job, learner: Learns) -> list[Acting]:
    """Who acts for which agents there."""
    frozen = task.settings.run.frozen
    return [
        Acting(share, learner.networks[name], name not in frozen)
        for name, share in task.shares.items()
    ]


def plan_of(
    task: Job, learner: Learns, device: torch.device, ranks: Ranks = SINGLE_RANK
) -> SamplingPlan:
    """What the samplers of a rank are told."""
    run = task.settings.run
    share = run.num_envs // ranks.size
    return SamplingPlan(
        maker=task.maker,
        spec=task.spec,
        network=learner.networks[next(iter(task.shares))],
        model=task.model,
        stored_outputs=task.settings.algo_module.STORED_OUTPUTS,
        num_steps=run.num_steps,
        num_envs=share,
        first_env=share * ranks.rank,
        envs_per_vector=share if on_device(task) else run.envs_per_vector,
        seed=run.seed,
        reseed_episodes=run.reseed_episodes,
        replay_limit_s=run.replay_limit_s,
        threads_per_worker=_threads(run, ranks.size),
        lag=run.lag,
        timeline=run.timeline,
        first_ready=run.lag > 0 and task.settings.algo_module.CORRECTS_LAG,
        inference_device=device if run.inference == "learner" else None,
        guards=Guards(
            on_env_error=run.on_env_error,
            on_worker_loss=run.on_worker_loss,
            env_timeout_s=run.env_timeout_s,
            max_restarts=run.max_worker_restarts,
            enabled=run.guards,
        ),
    )


def _threads(run: RunConfig, num_ranks: int) -> int:
    """That each sampler may have."""
    if run.cluster and run.num_workers:
        return max(1, int(run.cpus_per_worker))
    # Cores that learners compute on while samplers sample.
    taken = num_ranks * run.learner_threads if run.lag else 0
    return max(1, (cpu_cores() - taken) // max(run.num_workers, num_ranks))


def _actors(run: RunConfig, room_for: int) -> BackendFactory:
    """Workers on a cluster."""
    # Ray is an extra
    from headrace.collectors.backends.ray_actors import Needs, RayBackend

    resources, labels = demands(run.worker_resources)
    return partial(RayBackend, needs=Needs(run.cpus_per_worker, resources, labels, room_for))


def _tell_of_resume(
    task: Job,
    saved: checkpoint.Checkpoint,
    learner: Learns,
    counters: Counters,
    restored: Restored,
    display: Shows,
) -> None:
    settings, run = task.settings, task.settings.run
    display.say(
        f"Resumed from {saved.path.name}: {counters.env_steps:,} env steps, {learner.version:,} "
        f"updates. Episodes under way: {restored.set_state} restored, "
        f"{restored.replayed} replayed, {restored.new_episode} begun anew."
    )
    if counters.done(run):
        display.say(
            f"Nothing to do: the goal of {run.total_env_steps:,} env steps or the wanted return "
            "was reached. A new goal: --total-env-steps N"
        )
    elif falling := settings.ended_schedules():
        display.say(
            f"{' and '.join(falling)}: linear, and 0 from {run.schedule_env_steps:,} env steps on. "
            f"To learn on: --schedule-env-steps {run.total_env_steps}"
        )
    if restored.new_episode:
        display.say("From here on this run differs from one that was not interrupted.")


def _describe(settings: Settings, maker: EnvMaker) -> dict[str, Any]:
    """config.json."""
    return {
        "headrace": headrace.__version__,
        "settings": settings.flat(),
        "origin": settings.origin,
        "env_is_code": maker.is_code,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "gymnasium": gymnasium.__version__,
        },
    }
