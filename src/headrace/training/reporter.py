"""A run's metrics, its summary, and the lines at its start and at its end."""

import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import headrace
from headrace.advice.limits import Place, advise
from headrace.algos.off_policy import ReplayConfig
from headrace.collectors.api import WINDOW, Collector
from headrace.distributed.ranks import Ranks, visible_gpus
from headrace.envs.api import Restored
from headrace.envs.changes import EnvChange, as_changes, refuse_changes
from headrace.errors import flag
from headrace.learner.learner import Learner
from headrace.machine.limits import cpu_cores
from headrace.meter import Meter
from headrace.storage import run_dir as rundir
from headrace.storage.metrics import format_means, read_metrics
from headrace.training.counters import Counters
from headrace.training.job import Job, why_no_workers
from headrace.training.log import Display, MetricsLog

_FLUSH_EVERY_S = 1.0

OnUpdate = Callable[[int, dict[str, Any]], list[EnvChange] | None]
"""Called after each update with its number and its metrics. May return changes of all
environments, from `call_envs` and `set_envs`."""


@dataclass
class Reporter:
    """Gives the metrics of each update to the log, the display and the caller."""

    job: Job
    counters: Counters
    learner: Learner
    meter: Meter
    collector: Collector
    log: MetricsLog | None
    display: Display
    on_update: OnUpdate | None

    def __post_init__(self) -> None:
        self._first: tuple[float, int] | None = None  # when the first update ended, and its steps
        self._last = (time.perf_counter(), self.counters.env_steps)
        self._flushed_at = 0.0
        self._has_warned = False
        self._seconds: dict[str, float] = {}

    def __call__(self, update_metrics: dict[str, float]) -> list[EnvChange]:
        """Report an update; return the changes of environments that the caller wants.

        Raises:
            ConfigError: it returned anything else, or environments that have no changes.
        """
        now, counters = time.perf_counter(), self.counters
        before, self._last = self._last, (now, counters.env_steps)
        self._first = self._first or self._last
        metrics: dict[str, Any] = {
            "iteration": self.learner.version,
            "env_steps": counters.env_steps,
            "learner_steps": self.learner.learner_steps,
            "wall_s": now - self.meter.started,
            "env_steps_per_s": (counters.env_steps - before[1]) / (now - before[0]),
            "mean_return": counters.mean_return,
            "mean_length": counters.mean_length,
            "episodes": counters.episodes,
        }
        if self.job.spec.num_agents > 1:
            metrics["agent_steps"] = counters.agent_steps
            for policy, mean in self._mean_by_policy().items():
                metrics[f"{policy}/mean_return"] = mean
        metrics |= update_metrics
        if self.log is not None:
            is_due = now - self._flushed_at > _FLUSH_EVERY_S
            self.log.write(metrics | (self._second_metrics() if is_due else {}))
            if is_due:
                self.log.flush()
                self._flushed_at = now
        if not self._has_warned and (warnings := self.learner.warnings(update_metrics)):
            self._has_warned = True
            self.display.say("\n".join(f"Warning: {warning}" for warning in warnings))
        self.meter.lap("log")
        seconds = self.meter.seconds()
        total = sum(seconds.values())
        shares = {span: s / total for span, s in seconds.items()}
        self.display.update(metrics | {"env_steps_per_s": self._rate()}, shares)
        if self.on_update is None:
            return []
        changes = as_changes(self.on_update(self.learner.version, metrics))
        refuse_changes(changes, self.job.spec, native=self.job.maker.native)
        return changes

    def _mean_by_policy(self) -> dict[str, float]:
        return dict(zip(self.learner.policies, self.counters.mean_by_policy, strict=False))

    def _second_metrics(self) -> dict[str, float]:
        """Return the ledger, and seconds by span since the last call: of rank and workers."""
        seconds = {f"seconds/learner/{span}": s for span, s in self.meter.seconds().items()}
        for worker in self.collector.timings().values():
            for span, s in worker.seconds().items():
                name = f"seconds/workers/{span}"
                seconds[name] = seconds.get(name, 0.0) + s
        before, self._seconds = self._seconds, seconds
        passed = {name: s - before.get(name, 0.0) for name, s in seconds.items()}
        return passed | {f"ledger/{k}": v for k, v in asdict(self.counters.ledger).items()}

    def _rate(self) -> float | None:
        """Return env steps per second from the end of the first update to the end of the last."""
        if self._first is None or self._last[0] == self._first[0]:
            return None
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])

    def summary(self, worker_meters: dict[str, dict[str, float]]) -> dict[str, Any]:
        """Return the summary that `--json` prints."""
        counters, run = self.counters, self.job.settings.run
        seconds, agents = self.meter.seconds(), {}
        ledger = asdict(counters.ledger)
        restarts, lost = ledger.pop("restarts"), ledger.pop("lost")
        if self.job.spec.num_agents > 1:
            by_policy = self._mean_by_policy()
            agents = {"agent_steps": counters.agent_steps, "mean_return_by_policy": by_policy}
        return {
            "run_dir": str(self.job.run_dir),
            "env": run.env,
            "algo": run.algo,
            "seed": run.seed,
            "env_steps": counters.env_steps,
            "learner_steps": self.learner.learner_steps,
            "wall_s": sum(seconds.values()),
            "env_steps_per_s": self._rate(),
            "mean_return": counters.mean_return,
            **agents,
            "best_return": counters.best_return,
            "episodes": counters.episodes,
            "restarts": restarts,
            "lost_env_steps": lost,
            "ledger": {"learned": counters.env_steps, **ledger},
            "meter": seconds,
            "worker_meters": worker_meters,
            "advice": [
                *describe_returns(counters, self.job.spec.num_agents),
                *advise(self.job.settings, seconds, worker_meters, self._place()),
            ],
        }

    def _place(self) -> Place:
        spec = self.job.spec
        return Place(
            cores=cpu_cores(),
            device="cuda" if visible_gpus(self.job.settings.run.device) else "cpu",
            has_gpu=visible_gpus("auto") > 0,
            is_small="autograd" not in self.learner.gradient,
            on_device=self.job.is_on_device,
            may_have_workers=not why_no_workers(spec),
            interface=spec.interface,
        )


def _count(number: int, of: str) -> str:
    return f"{number or 'no'} {of}{'s' if number != 1 else ''}"


def describe_start(job: Job, ranks: Ranks, compute: str) -> str:
    """Return the first lines of a run: sizes, and each setting that is no default, by origin."""
    settings, spec, run = job.settings, job.spec, job.settings.run
    spaces = f"observation {spec.seen.describe()}, action {spec.action.describe()}"
    if spec.agent_spaces:
        spaces = "observations and actions differ among agents: see the notes"
    lines = [
        f"headrace {headrace.__version__}: {run.algo} on {run.env} ({spaces}), "
        f"{_count(run.num_workers, 'worker')}, {_count(run.num_vectors, 'vector')} of "
        f"{_count(run.envs_per_vector, 'env')}" + (f", lag {run.lag}" if run.lag else "")
    ]
    if ranks.size > 1:
        lines.append(
            f"  {ranks.size} learners over {ranks.transport}, each with "
            f"{run.num_envs // ranks.size} envs; lr_scale={run.lr_scale}: lr={settings.algo.lr:g}"
        )
    lines.append(f"  {compute}")
    flat = settings.flat()
    by_origin: dict[str, list[str]] = {}
    for name, origin in settings.source.items():
        if origin != "default" and name != "env":
            # What was found for this machine is given as flags, to be repeated on others.
            is_auto = origin.startswith("auto,")
            word = f"{flag(name)} {flat[name]}" if is_auto else f"{name}={flat[name]}"
            by_origin.setdefault(origin, []).append(word)
    lines += [f"  {each}: {' '.join(by_origin[each])}" for each in sorted(by_origin, key=_place)]
    lines += [f"  note: {note}" for note in spec.notes]
    if run.inference == "learner" and run.num_vectors < 2 * run.num_workers:
        lines.append(
            f"  note: inference=learner: {run.num_vectors} vectors for {run.num_workers} workers. "
            "A worker with one vector waits for its actions (a smaller --envs-per-vector helps)"
        )
    return "\n".join([*lines, f"  all settings: {job.run_dir}/config.json"])


def _place(origin: str) -> int:
    """Return the place of a line of `describe_start`: what the user gave, or a file, is first."""
    kinds = ("preset", "defaults", "auto", "follows")
    return next((i for i, kind in enumerate(kinds, 1) if origin.startswith(kind)), 0)


def describe_resume(job: Job, learner: Learner, counters: Counters, restored: Restored) -> str:
    """Return what a run resumes from, and what may surprise the user about that."""
    settings, run = job.settings, job.settings.run
    assert job.saved is not None
    lines = [
        f"Resumed from {job.saved.path.name}: {counters.env_steps:,} env steps, "
        f"{learner.version:,} updates. Episodes under way: {restored.set_state} restored, "
        f"{restored.replayed} replayed, {restored.new_episode} begun anew."
    ]
    source = job.saved.manifest.get("imported")
    if source and counters.env_steps == source.get("env_steps", counters.env_steps):
        lines.append(f"It was imported from {source['from']}: optimizers begin anew.")
    if counters.is_done(run):
        lines.append(
            f"Nothing to do: the goal of {run.total_env_steps:,} env steps or the wanted return "
            "was reached. A new goal: --total-env-steps N"
        )
    elif falling := settings.ended_schedules():
        lines.append(
            f"{' and '.join(falling)}: linear, and 0 from {run.schedule_env_steps:,} env steps on. "
            f"To learn on: --schedule-env-steps {run.total_env_steps}"
        )
    refills = [
        algo.learning_starts
        for algo in (settings.of(name).algo for name in learner.learners)
        if isinstance(algo, ReplayConfig) and not algo.save_replay and not counters.is_done(run)
    ]
    if refills:
        lines.append(
            "Its checkpoints have no transitions (--no-save-replay): it collects "
            f"learning_starts={max(refills)} env steps before it goes on to learn."
        )
    if restored.new_episode or refills:
        lines.append("From here on this run differs from one that was not interrupted.")
    return "\n".join(lines)


def describe_end(summary: dict[str, Any], stopped_by: int, job: Job) -> str:
    """Return the last lines of a run."""
    run, rate = job.settings.run, summary["env_steps_per_s"]
    means = format_means(summary["mean_return"], summary.get("mean_return_by_policy", {}), "none")
    ended = f"mean return of the last episodes {means}"
    if summary["mean_return"] is None:
        ended = "no episode ended"
    late = 0 < run.stop_after_s <= summary["wall_s"] and summary["env_steps"] < run.total_env_steps
    cause = "Done"
    if stopped_by:
        cause = f"Stopped by {signal.Signals(stopped_by).name}"
    elif late:
        cause = f"Stopped after {run.stop_after_s:g} s"
    lines = [
        f"{cause}: {summary['env_steps']:,} env steps in {summary['wall_s']:.1f} s"
        + (f" ({rate:,.0f}/s after the first update)" if rate else "")
        + f", {ended}.",
        _describe_ledger(summary),
    ]
    if summary["best_return"] is not None:
        lines.append(f"Best evaluation: {summary['best_return']:.1f}, kept in best/ (eval --best).")
    lines.append(f"Saved in {summary['run_dir']}")
    lines.append(resume_command(job) if stopped_by or late else f"To play: {_command('eval', job)}")
    lines += summary["advice"]
    if summary["env_steps"]:
        lines.append(f"Curves, time and faults on one page: headrace report {summary['run_dir']}")
    return "\n".join(lines)


def describe_returns(counters: Counters, num_agents: int) -> list[str]:
    """Return a sentence if all episodes of a run had one return, and so taught nothing."""
    least = counters.least_return
    differ = least is None or least != counters.greatest_return
    # In games of several agents, what one wins another may lose.
    if num_agents > 1 or counters.episodes < WINDOW or differ:
        return []
    return [
        f"All {counters.episodes:,} episodes had the same return, {least:g}: no action seemed "
        "better than another. Reward steps towards the goal as well, or begin closer to it."
    ]


def describe_vanished(run_dir: Path) -> str:
    """Return what is known of a locked directory's last process if it vanished, else ""."""
    if (mark := rundir.left_mark(run_dir)) is None:
        return ""
    rows = read_metrics(run_dir) if (run_dir / "metrics.jsonl").exists() else []
    saved = sorted(run_dir.glob("checkpoints/step_*"))
    steps = [row["env_steps"] for row in rows[-1:]]  # written down about once a second
    steps += [int(path.name.removeprefix("step_")) for path in saved[-1:]]
    lines = [
        f"The last process of the run in {run_dir} vanished: process {mark.pid} on {mark.host} "
        "wrote neither an end nor an error.",
        f"It was last heard of at {_local_time(rundir.last_written(run_dir))}, after "
        f"{max(steps, default=0):,} env steps; "
        + (f"its last checkpoint is {saved[-1]}." if saved else "it had saved no checkpoint."),
        "Its code may have ended it (os._exit, or a crash of a library), something may have killed "
        "it (the kernel's out-of-memory killer, for one), or the machine lost power.",
    ]
    if mark.stacks:
        lines.append(f"A crash of a library leaves Python's stack in {mark.stacks}.")
    if mark.may_have_workers:
        lines.append(
            "Its environments ran in the same process. With --num-workers 1 or more they have "
            "their own: a worker that dies is reported and replaced."
        )
    return "\n".join(lines)


def _local_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _describe_ledger(summary: dict[str, Any]) -> str:
    ledger = summary["ledger"]
    text = f"Env steps: {ledger['collected']:,} collected, {ledger['learned']:,} learned from"
    effects = {"workers replaced": summary["restarts"]}
    effects["episodes dropped"] = ledger["dropped_episodes"]
    causes = [f"{count} {effect}" for effect, count in effects.items() if count]
    lost = summary["lost_env_steps"]
    text += f", {lost:,} {'lost' if causes or not lost else 'unfinished at the end'}"
    if ledger["remade"]:
        text += f", {ledger['remade']:,} taken again"
    return text + (f" ({', '.join(causes)})" if causes else "") + "."


def resume_command(job: Job) -> str:
    """Return a line with the command that resumes the run."""
    return f"To go on: {_command('resume', job)}"


def _command(verb: str, job: Job) -> str:
    """Return the command of a verb for this run, which names the user's own code again."""
    run, maker = job.settings.run, job.maker
    words = ["headrace", verb, str(job.run_dir)]
    makers = {"--env": maker} | ({"--eval-env": job.eval_maker} if run.eval_env else {})
    for name, each in makers.items():
        if each.is_code:
            words += [name, each.env if isinstance(each.env, str) else "module:callable"]
    wrappers = [w if isinstance(w, str) else "module:callable" for w in maker.wrappers]
    words += ["--wrapper", *wrappers] if wrappers else []
    words += ["--model", run.model] if run.model else []
    words += ["--algo", run.algo] if ":" in run.algo else []
    return " ".join(words)
