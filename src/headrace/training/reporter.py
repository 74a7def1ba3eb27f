"""A run's metrics, its summary, and the lines at its start and at its end."""

import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import headrace
from headrace.collectors.api import Collector
from headrace.distributed.ranks import Ranks
from headrace.envs.api import Restored
from headrace.learner.learner import Learner
from headrace.meter import Meter
from headrace.training.counters import Counters
from headrace.training.job import Job
from headrace.training.log import Display, MetricsLog, format_means

_FLUSH_EVERY_S = 1.0

OnUpdate = Callable[[int, dict[str, Any]], None]
"""Called after each update with its number and its metrics."""


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
        self._seconds: dict[str, float] = {}

    def __call__(self, update_metrics: dict[str, float]) -> None:
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
        self.meter.lap("log")
        seconds = self.meter.seconds()
        total = sum(seconds.values())
        shares = {span: s / total for span, s in seconds.items()}
        self.display.update(metrics | {"env_steps_per_s": self._rate()}, shares)
        if self.on_update is not None:
            self.on_update(self.learner.version, metrics)

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
            "ledger": {"learned": counters.env_steps, **asdict(counters.ledger)},
            "meter": seconds,
            "worker_meters": worker_meters,
        }


def describe_start(job: Job, ranks: Ranks, compute: str) -> str:
    """Return the first lines of a run: sizes, and each setting that is no default, by origin."""
    settings, spec, run = job.settings, job.spec, job.settings.run
    spaces = f"observation {spec.seen.describe()}, action {spec.action.describe()}"
    if spec.agent_spaces:
        spaces = "observations and actions differ among agents: see the notes"
    lines = [
        f"headrace {headrace.__version__}: {run.algo} on {run.env} ({spaces}), "
        f"{run.num_workers or 'no'} workers, {run.num_vectors} vectors of "
        f"{run.envs_per_vector} envs" + (f", lag {run.lag}" if run.lag else "")
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
            by_origin.setdefault(origin, []).append(f"{name}={flat[name]}")
    lines += [f"  {origin}: {' '.join(names)}" for origin, names in by_origin.items()]
    lines += [f"  note: {note}" for note in spec.notes]
    if run.inference == "learner" and run.num_vectors < 2 * run.num_workers:
        lines.append(
            f"  note: inference=learner: {run.num_vectors} vectors for {run.num_workers} workers. "
            "A worker with one vector waits for its actions (a smaller --envs-per-vector helps)"
        )
    return "\n".join([*lines, f"  all settings: {job.run_dir}/config.json"])


def describe_resume(job: Job, learner: Learner, counters: Counters, restored: Restored) -> str:
    """Return what a run resumes from, and what may surprise the user about that."""
    settings, run = job.settings, job.settings.run
    assert job.saved is not None
    lines = [
        f"Resumed from {job.saved.path.name}: {counters.env_steps:,} env steps, "
        f"{learner.version:,} updates. Episodes under way: {restored.set_state} restored, "
        f"{restored.replayed} replayed, {restored.new_episode} begun anew."
    ]
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
    if restored.new_episode:
        lines.append("From here on this run differs from one that was not interrupted.")
    return "\n".join(lines)


def describe_end(summary: dict[str, Any], stopped_by: int, job: Job) -> str:
    """Return the last lines of a run."""
    run, rate = job.settings.run, summary["env_steps_per_s"]
    means = format_means(
        summary["mean_return"], summary.get("mean_return_by_policy", {}), "none finished"
    )
    late = 0 < run.stop_after_s <= summary["wall_s"] and summary["env_steps"] < run.total_env_steps
    cause = "Done"
    if stopped_by:
        cause = f"Stopped by {signal.Signals(stopped_by).name}"
    elif late:
        cause = f"Stopped after {run.stop_after_s:g} s"
    lines = [
        f"{cause}: {summary['env_steps']:,} env steps in {summary['wall_s']:.1f} s"
        + (f" ({rate:,.0f}/s after the first update)" if rate else "")
        + f", mean return of the last episodes {means}.",
        _describe_ledger(summary["ledger"]),
    ]
    if summary["best_return"] is not None:
        lines.append(f"Best evaluation: {summary['best_return']:.1f}, kept in best/ (eval --best).")
    lines.append(f"Saved in {summary['run_dir']}")
    lines.append(resume_command(job) if stopped_by or late else f"To play: {_command('eval', job)}")
    return "\n".join(lines)


def _describe_ledger(ledger: dict[str, int]) -> str:
    text = f"Env steps: {ledger['collected']:,} collected, {ledger['learned']:,} learned from"
    text += f", {ledger['lost']:,} lost"
    if ledger["remade"]:
        text += f", {ledger['remade']:,} taken again"
    effects = {"restarts": "workers replaced", "dropped_episodes": "episodes dropped"}
    causes = [f"{ledger[name]} {effect}" for name, effect in effects.items() if ledger[name]]
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
