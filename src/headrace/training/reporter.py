"""What a run reports of itself, from its parts. Left out: files and terminal (`log.py`)."""

import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import headrace
from headrace.collectors.api import Collector
from headrace.config.resolve import Settings
from headrace.config.run_config import RunConfig
from headrace.distributed.ranks import Ranks
from headrace.learner.learner import Learns
from headrace.meter import Meter
from headrace.spec import EnvSpec
from headrace.training.job import Job
from headrace.training.log import MetricsLog, Shows, means
from headrace.training.loop import Counters

_FLUSH_EVERY_S = 1.0

OnUpdate = Callable[[int, dict[str, Any]], None]
"""Called after each update with its number and its metrics."""


class Reporter:
    """Turns what the loop knows into metrics: files, display, caller, summary."""

    def __init__(
        self,
        task: Job,
        counters: Counters,
        learner: Learns,
        meter: Meter,
        collector: Collector,
        log: MetricsLog | None,
        display: Shows,
        on_update: OnUpdate | None,
    ) -> None:
        self._settings, self._spec = task.settings, task.spec
        self._counters, self._learner = counters, learner
        self._meter, self._collector = meter, collector
        self._log, self._display = log, display
        self._on_update = on_update
        self._first: tuple[float, int] | None = None  # when the first update ended, and its steps
        self._last = (time.perf_counter(), counters.env_steps)
        self._flushed_at = 0.0
        self._seconds: dict[str, float] = {}

    def __call__(self, of_update: dict[str, float]) -> None:
        """Report an update."""
        now, counters = time.perf_counter(), self._counters
        before, self._last = self._last, (now, counters.env_steps)
        self._first = self._first or self._last
        metrics: dict[str, Any] = {
            "iteration": self._learner.version,
            "env_steps": counters.env_steps,
            "learner_steps": self._learner.learner_steps,
            "wall_s": now - self._meter.started,
            "env_steps_per_s": (counters.env_steps - before[1]) / (now - before[0]),
            "mean_return": counters.mean_return,
            "mean_length": counters.mean_length,
            "episodes": counters.episodes,
            **self._of_agents(),
            **of_update,
        }
        if self._log is not None:
            is_due = now - self._flushed_at > _FLUSH_EVERY_S
            self._log.write(metrics | (self._so_far() if is_due else {}))
            if is_due:
                self._log.flush()
                self._flushed_at = now
        self._meter.lap("log")
        seconds = self._meter.seconds()
        total = sum(seconds.values())
        shares = {span: s / total for span, s in seconds.items()}
        self._display.update(metrics | {"env_steps_per_s": self._rate()}, shares)
        if self._on_update is not None:
            self._on_update(self._learner.version, metrics)

    def _of_agents(self) -> dict[str, Any]:
        """Where there are several agents."""
        counters = self._counters
        if self._spec.num_agents == 1:
            return {}
        by_policy = zip(self._learner.policies, counters.mean_by_policy, strict=False)
        return {
            "agent_steps": counters.agent_steps,
            **{f"{policy}/mean_return": mean for policy, mean in by_policy},
        }

    def _so_far(self) -> dict[str, float]:
        """Metrics of where time and steps went; of time, since they were asked for last.

        Of this rank: `seconds/learner/SPAN`, and `seconds/workers/SPAN` of all its workers.
        """
        seconds = {f"seconds/learner/{span}": s for span, s in self._meter.seconds().items()}
        for of_one in self._collector.meters().values():
            for span, s in of_one.items():
                name = f"seconds/workers/{span}"
                seconds[name] = seconds.get(name, 0.0) + s
        before, self._seconds = self._seconds, seconds
        passed = {name: s - before.get(name, 0.0) for name, s in seconds.items()}
        return passed | {f"ledger/{k}": v for k, v in asdict(self._counters.ledger).items()}

    def _rate(self) -> float | None:
        """Env steps per second from the end of the first update to the end of the last."""
        if self._first is None or self._last[0] == self._first[0]:
            return None
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])

    def summary(self, run_dir: Path, worker_meters: dict[str, dict[str, float]]) -> dict[str, Any]:
        """What `--json` prints."""
        counters, run = self._counters, self._settings.run
        seconds, agents = self._meter.seconds(), {}
        if self._spec.num_agents > 1:
            by_policy = dict(zip(self._learner.policies, counters.mean_by_policy, strict=False))
            agents = {"agent_steps": counters.agent_steps, "mean_return_by_policy": by_policy}
        return {
            "run_dir": str(run_dir),
            "env": run.env,
            "algo": run.algo,
            "seed": run.seed,
            "env_steps": counters.env_steps,
            "learner_steps": self._learner.learner_steps,
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


def introduce(
    display: Shows, settings: Settings, spec: EnvSpec, run_dir: Path, ranks: Ranks
) -> None:
    """Print what is going to happen: every setting that is not a class default, and its origin."""
    run = settings.run
    spaces = f"observation {spec.seen.describe()}, action {spec.action.describe()}"
    if spec.of_each:
        spaces = "observations and actions differ among agents: see the notes"
    display.say(
        f"headrace {headrace.__version__}: {run.algo} on {run.env} ({spaces}), "
        f"{run.num_workers or 'no'} workers, {run.num_vectors} vectors of "
        f"{run.envs_per_vector} envs" + (f", lag {run.lag}" if run.lag else "")
    )
    if ranks.size > 1:
        display.say(
            f"  {ranks.size} learners over {ranks.way}, each with {run.num_envs // ranks.size} "
            f"envs; lr_scale={run.lr_scale}: lr={settings.algo.lr:g}"
        )
    flat = settings.flat()
    by_origin: dict[str, list[str]] = {}
    for name, origin in settings.origin.items():
        if origin != "default" and name != "env":
            by_origin.setdefault(origin, []).append(f"{name}={flat[name]}")
    for origin, names in by_origin.items():
        display.say(f"  {origin}: {' '.join(names)}")
    for note in (*spec.notes, *_notes(run)):
        display.say(f"  note: {note}")
    display.say(f"  all settings: {run_dir}/config.json")


def _notes(run: RunConfig) -> list[str]:
    """What can be, and is not what one wants."""
    if run.inference == "learner" and run.num_vectors < 2 * run.num_workers:
        return [
            f"inference=learner: {run.num_vectors} vectors for {run.num_workers} workers; who has "
            "one only does nothing while it waits for actions (a smaller --envs-per-vector helps)"
        ]
    return []


def _describe(ledger: dict[str, int]) -> str:
    """The sums of env steps, and what led to them."""
    said = f"Env steps: {ledger['collected']:,} collected, {ledger['learned']:,} learned from"
    said += f", {ledger['lost']:,} lost"
    if ledger["remade"]:
        said += f", {ledger['remade']:,} taken again"
    causes = [
        f"{ledger[name]} {what}"
        for name, what in (
            ("restarts", "workers replaced"),
            ("dropped_episodes", "episodes dropped"),
        )
        if ledger[name]
    ]
    return said + (f" ({', '.join(causes)})" if causes else "") + "."


def how_to_go_on(task: Job) -> str:
    """The command, for people."""
    maker, model = task.maker, task.settings.run.model
    words = ["To go on: headrace resume", str(task.run_dir)]
    if maker.is_code:
        words += ["--env", maker.env if isinstance(maker.env, str) else "module:callable"]
    if maker.wrappers:
        words.append("--wrapper")
    words += [w if isinstance(w, str) else "module:callable" for w in maker.wrappers]
    return " ".join([*words, *(["--model", model] if model else [])])


def farewell(summary: dict[str, Any], stopped_by: int, task: Job) -> str:
    """The last lines of a run, for people."""
    by_policy = summary.get("mean_return_by_policy", {})
    mean = means(summary["mean_return"], by_policy, "none finished")
    rate = summary["env_steps_per_s"]
    run = task.settings.run
    late = 0 < run.stop_after_s <= summary["wall_s"] and summary["env_steps"] < run.total_env_steps
    why = f"Stopped by {signal.Signals(stopped_by).name}" if stopped_by else "Done"
    if late and not stopped_by:
        why = f"Stopped after {run.stop_after_s:g} s"
    lines = [
        f"{why}: {summary['env_steps']:,} env steps in {summary['wall_s']:.1f} s"
        + (f" ({rate:,.0f}/s after the first update)" if rate else "")
        + f", mean return of the last episodes {mean}."
    ]
    lines.append(_describe(summary["ledger"]))
    if summary["best_return"] is not None:
        lines.append(f"Best evaluation: {summary['best_return']:.1f}, kept in best/ (eval --best).")
    lines.append(f"Saved in {summary['run_dir']}")
    if stopped_by or late:
        lines.append(how_to_go_on(task))
    return "\n".join(lines)
