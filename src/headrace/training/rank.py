"""One rank of a run: its parts are built, restored from a checkpoint, run, and closed."""

import contextlib
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

import headrace
from headrace.algos.off_policy import ReplayConfig
from headrace.collectors.api import (
    Collector,
    LeaguePlan,
    Ledger,
    PolicyPlan,
    SamplingPlan,
    Say,
    ShouldStop,
)
from headrace.collectors.asynchronous import AsynchronousCollector
from headrace.collectors.backends.api import BackendFactory
from headrace.collectors.data import DataCollector
from headrace.collectors.device import DeviceCollector
from headrace.collectors.inline import InlineCollector
from headrace.collectors.snapshots import regroup
from headrace.collectors.synchronous import SynchronousCollector
from headrace.config.run_config import RunConfig, demands
from headrace.datasets.read import read_steps
from headrace.distributed.process import (
    StopSignals,
    check_open_files,
    freed_memory_kept,
    math_threads,
)
from headrace.distributed.ranks import SINGLE_RANK, Ranks, device_of, gather_json, host_id, share_of
from headrace.envs.api import Restored
from headrace.envs.changes import Changes
from headrace.envs.goal_reward import goal_reward
from headrace.errors import EnvError
from headrace.leagues.league import FOLDER, League
from headrace.leagues.members import MemberLoader, with_policies
from headrace.learner.learner import Learner
from headrace.learner.optimizer import Outside
from headrace.machine.limits import cpu_cores
from headrace.meter import Meter
from headrace.models.fast_paths import ACTING, choose, describe_choice
from headrace.models.policy import Policy
from headrace.replay.memory import check_memory
from headrace.spec import Array, EnvSpec
from headrace.storage import checkpoint
from headrace.storage import run_dir as rundir
from headrace.storage.checkpoint import Section, restore
from headrace.storage.timeline import tracks_of, write_timeline
from headrace.training.counters import Counters
from headrace.training.evaluator import Evaluate, Evaluator, no_evaluation
from headrace.training.job import Job, guards_of
from headrace.training.log import Display, MetricsLog
from headrace.training.loop import Loop
from headrace.training.rejoin import STAYS, Handover, Iteration, OfOneRank, agree
from headrace.training.reporter import OnUpdate, Reporter, describe_resume, describe_start
from headrace.training.saver import Saver, write_policies


@dataclass(frozen=True)
class RunResult:
    """The end of a run.

    Attributes:
        stopped_by: the signal that ended it early; 0: none did.
        rank: of this process. Rank 0 writes to the run directory and to the terminal.
    """

    job: Job
    summary: dict[str, Any]
    stopped_by: int
    rank: int


def run_rank(
    job: Job,
    ranks: Ranks,
    stop: StopSignals,
    meter: Meter,
    display: Display,
    say: Say,
    on_update: OnUpdate | None = None,
    handover: Handover = STAYS,
) -> RunResult:
    """Build the parts of a rank, restore them if there is a checkpoint, and run the loop.

    Rank 0 alone writes, shows progress, evaluates, and calls `on_update`. `say` gets messages
    about this rank's workers. LeavingError: the handover was due.
    """
    run, is_first = job.settings.run, ranks.rank == 0
    meter.keep_laps(keep=run.timeline)
    with stop.installed(), _marked(job, ranks), contextlib.ExitStack() as stack:
        stack.enter_context(math_threads(run.learner_threads))
        stack.enter_context(freed_memory_kept())
        device = device_of(run.device, ranks.local_rank)
        learner, counters = build_learner(job, device, meter, ranks), Counters()
        league, iteration = build_league(job, learner, ranks), Iteration()
        saved_episodes: dict[str, Array] = {}
        episodes = workers_section(ranks, lambda: collector, saved_episodes)
        sections = [*learner.sections(), counters.section(), episodes]
        sections += [league.section()] if league else []
        if ranks.is_successor:
            display.say(agree(ranks, learner, counters, league, iteration)[0].describe())
            meter.lap("start")
            saved_episodes |= _taken_over(handover.left, learner, run, iteration)
        else:
            _load_weights(job, learner, sections, counters)
        plan = sampling_plan(job, learner, device, ranks, counters.env_changes, league)
        if job.rolled_back is None and not ranks.is_successor:
            display.say(describe_start(job, ranks, _describe_compute(plan, learner)))
        collector = build_collector(job, plan, ranks, meter, stop, say, saved_episodes)
        stack.enter_context(closing(collector))
        saver = Saver(job, sections, counters, learner, ranks, iteration.saved_version)
        evaluate = stack.enter_context(_evaluations(job, ranks, counters, learner, saver, stop))
        meter.lap("start")
        if is_first:  # what cannot be built was refused before: only a run leaves a config.json
            rundir.write_config(job.run_dir, describe_job(job))
        _begin_league(league, collector)
        if job.saved is not None and not ranks.is_successor:
            display.say(describe_resume(job, learner, counters, _restored_on_all(ranks, collector)))
        meter.lap("checkpoint")
        log = saver.log = stack.enter_context(_metrics_log(job, learner, counters, ranks))
        reporter = Reporter(job, counters, learner, meter, collector, log, display, on_update)
        stack.callback(display.stop)
        display.start()
        Loop(
            job.run_of_loop, collector, learner, counters, meter, ranks, saver, evaluate, reporter,
            display.say, _may_change_envs(job, ranks), league, iteration, handover,
        ).train()  # fmt: skip
        worker_meters = _other_meters(job, ranks, meter, collector)
        stopped_by = max(gather_json(ranks, stop.received))  # any rank may have got the signal
        stop.pass_on_to = []  # they end, and their ids may become those of other processes
    saver.check_saved()
    return RunResult(job, reporter.summary(worker_meters), stopped_by, ranks.rank)


def _marked(job: Job, ranks: Ranks) -> contextlib.AbstractContextManager[None]:
    """Mark the run directory, if this is the process that has locked it."""
    locked_here = ranks.rank == 0 and not job.settings.run.cluster  # on a cluster, by the driver
    return job.marked() if locked_here else contextlib.nullcontext()


def _taken_over(
    left: OfOneRank | None, learner: Learner, run: RunConfig, iteration: Iteration
) -> Mapping[str, Array]:
    """Return the state from which the environments of a lost rank, or of one that left, go on."""
    if left is None:  # with episodes that no lost rank has begun
        fragments = learner.version + (run.lag + 2) * (1 + iteration.ledger_before.restarts)
        return {"steps": np.array(fragments * run.num_steps)}
    for name, returns in left.returns.items():
        learner.learners[name].return_so_far.copy_(returns)
    return left.envs


def _may_change_envs(job: Job, ranks: Ranks) -> bool:
    """Return whether any rank's caller may; those of torchrun differ."""
    here = job.has_on_update
    return here if ranks.is_successor else any(gather_json(ranks, here))


def follow(ranks: Ranks, job: Job) -> None:
    """Run a rank that rank 0 started. It shows no progress, and stops when rank 0 says so."""
    say = stderr_say(ranks.rank, quiet=job.quiet)
    run_rank(job, ranks, StopSignals(patient=True), Meter(), Display(), say)


def stderr_say(rank: int, *, quiet: bool) -> Say:
    """Return the message function of a rank without a display."""

    def say(text: str) -> None:
        if not quiet:
            print(f"Rank {rank}: {text}", file=sys.stderr, flush=True)

    return say


def build_learner(
    job: Job,
    device: torch.device,
    meter: Meter,
    ranks: Ranks = SINGLE_RANK,
    outside: Outside | None = None,
) -> Learner:
    """Build the learner of a job's policies; ConfigError if settings do not fit its device.

    Args:
        outside: the policy that is trained, if its gradient steps are made elsewhere.
    """
    taken, host = 0, host_id().encode()
    for name, agents in job.shares.items():
        algo = job.settings.of(name).algo
        if isinstance(algo, ReplayConfig) and name not in job.settings.run.frozen:
            taken += check_memory(
                job.spec.for_agents(agents),
                algo.replay_size,
                device,
                algo.replay_dir,
                prioritized=algo.priority_alpha > 0,
                hindsight=algo.hindsight > 0,
                taken=taken,
                num_ranks=ranks.size,
                # The other ranks have their buffers already, and do not take part in a gather now.
                num_local=1 if ranks.is_successor else ranks.gather_bytes(host).count(host),
            )
    learner = Learner(
        job.settings, job.shares, job.spec, job.model, device, meter, ranks, job.saved,
        outside=outside,
    )  # fmt: skip
    for each in learner.learners.values():
        each.set_goal_reward(partial(goal_reward, job.maker))
    return learner


def _begin_league(league: League | None, collector: Collector) -> None:
    """Take the first snapshot, unless a resumed run has it, and let the collector draw members."""
    if league is not None:
        league.begin()
        collector.set_pool(league.pool)


@contextlib.contextmanager
def _metrics_log(
    job: Job, learner: Learner, counters: Counters, ranks: Ranks
) -> Iterator[MetricsLog | None]:
    """Yield the log of the run's metrics, which rank 0 has; it is closed after the `with`."""
    if ranks.rank:
        yield None
        return
    with contextlib.closing(MetricsLog(job.run_dir, learner.version, counters.env_steps)) as log:
        yield log


def _load_weights(job: Job, learner: Learner, sections: list[Section], counters: Counters) -> None:
    """Restore a run that is resumed; load the policies of another run, if `init_from` names one."""
    if job.saved is not None:
        restore(sections, job.saved)
    counters.ledger += Ledger(collected=job.rolled_back or 0, lost=job.rolled_back or 0)
    if job.saved is not None:
        return
    if not (source := job.settings.run.init_from):
        return
    saved = checkpoint.newest(Path(source))
    for name, policy in learner.policies.items():
        if name not in job.settings.run.frozen:
            saved_name = checkpoint.policy_name(saved, name)
            with checkpoint.as_written(saved.path):
                spec = EnvSpec.from_json(saved.manifest["policies"][saved_name]["spec"])
            checkpoint.check_fits(spec, job.spec.for_agents(job.shares[name]), Path(source))
            checkpoint.load_into(policy, saved, saved_name)


def workers_section(
    ranks: Ranks, collector: Callable[[], Collector], saved: dict[str, Array]
) -> Section:
    """Return the section of the environments under way.

    Loading fills `saved`, from which the collector is built afterwards.
    """
    return Section(
        "workers",
        lambda: (checkpoint.gather_arrays(ranks, collector().state()), {}),
        lambda tensors, _: saved.update({name: t.numpy() for name, t in tensors.items()}),
        is_collective=True,
    )


def _restored_on_all(ranks: Ranks, collector: Collector) -> Restored:
    total = Restored()
    for each in gather_json(ranks, asdict(collector.restored)):
        total.add(Restored(**each))
    return total


def _describe_compute(plan: SamplingPlan, learner: Learner) -> str:
    """Return which fast paths replace policies' acting and the gradients of losses, in words."""
    if plan.inference_device is not None:
        act = "torch (in the learner's process)"
    else:
        each = []
        for plans in plan.policies.values():
            policy = plans.build()
            path, reason = choose(ACTING, type(policy).act, policy, plans.spec, plans.network)
            each.append(describe_choice(path, "torch", reason))
        act = " and ".join(dict.fromkeys(each))
    return f"compute: act = {act}, gradient = {learner.gradient} (reference: --arithmetic plain)"


def policy_plans(job: Job, learner: Learner) -> dict[str, PolicyPlan]:
    """Return the plan of each policy, by name."""
    settings, plans = job.settings, {}
    for side, (name, agents) in job.sides.items():
        spec, network = job.spec.for_agents(agents), learner.networks[name]
        build: Callable[[], Policy] = partial(
            settings.algorithm.build_policy, spec, network, settings.of(name).algo, job.model
        )
        stored_outputs = settings.algorithm.stored_outputs
        if (frozen := learner.frozen.get(name)) is not None:  # maybe of another algorithm
            build, stored_outputs = frozen.build or build, {}
        plans[side] = PolicyPlan(
            agents, spec, network, stored_outputs, build, name, job.shares[name]
        )
    return plans


def build_league(job: Job, learner: Learner, ranks: Ranks) -> League | None:
    """Build the league of a rank, if the run has one."""
    run = job.settings.run
    if not run.league:
        return None

    def take(env_steps: int) -> Path:
        return write_policies(job, learner, job.run_dir / FOLDER, env_steps)

    return League(run, job.run_dir, ranks, take, sends_data=bool(run.cluster))


def _league_plan(job: Job, league: League | None) -> LeaguePlan | None:
    if league is None:
        return None
    sides = {name: (agents, job.spec.for_agents(agents)) for name, (_, agents) in job.sides.items()}
    load = MemberLoader(sides, job.model, job.settings.algorithm)
    for source in job.settings.run.league_members:
        load.load(source)  # what cannot play is refused before the run begins
    pack = with_policies if job.settings.run.cluster else None
    return LeaguePlan(job.settings.run.league, load, league.pool, pack)


def sampling_plan(
    job: Job,
    learner: Learner,
    device: torch.device,
    ranks: Ranks = SINGLE_RANK,
    env_changes: Changes = (),
    league: League | None = None,
) -> SamplingPlan:
    """Return the sampling plan of a rank's workers."""
    run = job.settings.run
    num_envs = run.num_envs // ranks.size
    return SamplingPlan(
        maker=job.maker,
        spec=job.spec,
        policies=policy_plans(job, learner),
        num_steps=run.num_steps,
        num_envs=num_envs,
        first_env=num_envs * ranks.rank,
        envs_per_vector=num_envs if job.is_on_device else run.envs_per_vector,
        seed=run.seed,
        reseed_episodes=run.reseed_episodes,
        replay_limit_s=run.replay_limit_s,
        threads_per_worker=_threads_per_worker(run, ranks.size),
        lag=run.lag,
        env_changes=env_changes,
        timeline=run.timeline,
        asynchronous=job.settings.algorithm.is_asynchronous(run.lag),
        inference_device=device if run.inference == "learner" else None,
        guards=guards_of(run),
        league=_league_plan(job, league),
    )


def _threads_per_worker(run: RunConfig, num_ranks: int) -> int:
    if run.cluster and run.num_workers:
        return max(1, int(run.cpus_per_worker))
    # With a lag, learners compute while workers sample.
    taken = num_ranks * run.learner_threads if run.lag else 0
    return max(1, (cpu_cores() - taken) // max(run.num_workers, num_ranks))


def build_collector(
    job: Job,
    plan: SamplingPlan,
    ranks: Ranks,
    meter: Meter,
    stop: ShouldStop,
    say: Say,
    saved: dict[str, Array],
) -> Collector:
    """Build the collector of a rank. `saved` has the environments under way of a resumed run."""
    run = job.settings.run
    num_workers = share_of(run.num_workers, ranks.rank, ranks.size)
    if job.saved is not None and not ranks.is_successor:
        with checkpoint.as_written(job.saved.path):
            saved = regroup(saved, run.num_envs, plan.envs_per_vector)
    if run.data:
        steps = read_steps(run.data, plan.spec)
        return DataCollector(plan, steps, ranks.size, stop, saved)
    if job.is_on_device:
        device = device_of(run.device, ranks.local_rank)
        return DeviceCollector(plan, device, meter, stop, saved)
    if num_workers == 0:
        return InlineCollector(plan, meter, stop, saved, say)
    kind = AsynchronousCollector if plan.asynchronous else SynchronousCollector
    if run.cluster:
        machines = job.machines[ranks.rank :: ranks.size]
        return kind(plan, num_workers, stop, saved, say, _ray_backend(run, machines))
    check_open_files(num_workers)
    return kind(plan, num_workers, stop, saved, say)


def _ray_backend(run: RunConfig, machines: Sequence[str]) -> BackendFactory:
    # Ray is an extra.
    from headrace.collectors.backends.ray_backend import RayBackend
    from headrace.collectors.backends.ray_requests import Needs

    resources, labels = demands(run.worker_resources)
    return partial(RayBackend, needs=Needs(run.cpus_per_worker, resources, labels, machines))


@contextlib.contextmanager
def closing(closed: Collector | Evaluator) -> Iterator[None]:
    """Close it after the `with`, and do not let that hide the error that ended the run."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(EnvError):  # it must not hide the error that ended the run
            closed.close()
        raise
    closed.close()


@contextlib.contextmanager
def _evaluations(
    job: Job, ranks: Ranks, counters: Counters, learner: Learner, saver: Saver, stop: ShouldStop
) -> Iterator[Evaluate]:
    """Yield what the loop calls for evaluations; its process ends with the `with`."""
    if ranks.rank or not job.settings.run.eval_every:
        yield no_evaluation
        return
    evaluator = Evaluator(job, counters, learner, saver, stop)
    with closing(evaluator):
        yield evaluator


def _other_meters(
    job: Job, ranks: Ranks, meter: Meter, collector: Collector
) -> dict[str, dict[str, float]]:
    """Return seconds by span of the job's other processes, by name. Write the timeline."""
    timings = collector.timings()
    if job.settings.run.timeline:
        tracks = tracks_of(ranks, meter.take_laps(), {n: t.laps for n, t in timings.items()})
        write_timeline(job.run_dir, ranks, tracks)
    workers = {name: each.seconds() for name, each in timings.items()}
    if ranks.size == 1:
        return workers
    named: dict[str, dict[str, float]] = {}
    for rank, (learner, others) in enumerate(gather_json(ranks, [meter.seconds(), workers])):
        if rank != ranks.rank:
            named[f"rank {rank}"] = learner
        named |= {f"rank {rank}, {name}": seconds for name, seconds in others.items()}
    return named


def describe_job(job: Job) -> dict[str, Any]:
    """Return the content of config.json."""
    return {
        "headrace": headrace.__version__,
        "settings": job.settings.flat(),
        "origin": job.settings.source,
        "env_is_code": job.maker.is_code,
        "cores": cpu_cores(),
        "eval_env_is_code": bool(job.settings.run.eval_env) and job.eval_maker.is_code,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "gymnasium": gymnasium.__version__,
        },
    }
