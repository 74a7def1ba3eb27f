"""A part of a run in a process of its own: to a rung, and what is measured there.

Left out: which part is run next (`tuning/study.py`).
"""

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cloudpickle

from headrace.distributed import sessions
from headrace.evaluation.evaluate import evaluate
from headrace.evaluation.trained_policies import load_policies
from headrace.learner.frozen import random_names
from headrace.storage.metrics import read_metrics, total_seconds
from headrace.storage.run_dir import has_checkpoint
from headrace.training.job import RunRequest
from headrace.training.launch import Launch
from headrace.training.rank import RunResult


@dataclass(frozen=True)
class Part:
    """A part of a run.

    Attributes:
        until: env steps at which it ends.
        episodes: of the evaluation after it; 0: none.
        eval_seed: of these, the same for all that are compared.
        schedules: settings by which the run goes on, if it is the copy of another.
    """

    request: RunRequest
    run_dir: str
    until: int
    episodes: int
    eval_seed: int
    schedules: Mapping[str, Any] = field(default_factory=dict)


def run_part(orders: bytes, pipe: Any) -> None:
    """Run a part, and send what was measured, or why it failed; `SessionProcess` calls this."""
    sessions.begin_session()
    part: Part = cloudpickle.loads(orders)
    run_dir = Path(part.run_dir)
    run_dir.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    sessions.write_output(str(run_dir.with_suffix(".log")))

    def send(**message: Any) -> None:
        with contextlib.suppress(OSError):  # the study's process has ended
            pipe.send(message)

    try:
        result = _train(part, run_dir)
        if result.stopped_by:
            send(stopped=result.stopped_by)
        else:
            send(measured=_measure(part, result))
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        send(failed=sessions.failure(error))


def _train(part: Part, run_dir: Path) -> RunResult:
    launch = Launch(pause_at=part.until)
    if has_checkpoint(run_dir):
        return launch.resume(run_dir, replace(part.request, explicit=part.schedules))
    if run_dir.exists():  # a process was killed before its first checkpoint
        shutil.rmtree(run_dir)
    return launch.start(part.request, run_dir)


def _measure(part: Part, result: RunResult) -> dict[str, Any]:
    summary, job = result.summary, result.job
    measured = {
        "env_steps": summary["env_steps"],
        "mean_return": summary["mean_return"],
        "episodes": summary["episodes"],
        # Of all the run's processes: those that were cut, too.
        "seconds": total_seconds(read_metrics(Path(part.run_dir)))[-1],
        "env_steps_per_s": summary["env_steps_per_s"],
    }
    if part.episodes:
        frozen = random_names(job.settings.run.frozen)
        policies, shares = load_policies(job.run_dir, job.model, job.settings.algorithm, frozen)
        played = evaluate(
            policies,
            job.eval_maker,
            spec=job.eval_spec,
            shares=shares,
            episodes=part.episodes,
            seed=part.eval_seed,
        )
        assert played is not None  # nobody tells it to stop
        measured["eval_return"] = played.to_json()["mean_return"]
    return measured
