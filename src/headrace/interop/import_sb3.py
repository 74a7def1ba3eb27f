"""`headrace import-sb3`: a model of Stable-Baselines3 becomes a run, to evaluate and to train on.

The run is what `headrace train` would have made with the model's settings: its checkpoint has the
model's weights, normalizers and env steps. Optimizers and episodes begin anew, and a replay is
empty. Left out: reading the file (`sb3_zip.py`), and what its settings (`sb3_settings.py`), weights
(`sb3_weights.py`) and normalizer (`sb3_normalizer.py`) mean.
"""

import warnings
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.algos.action_values.dqn import DQN
from headrace.algos.action_values.q_learning import explore
from headrace.algos.off_policy import ReplayConfig
from headrace.collectors.api import Ledger
from headrace.distributed.ranks import SINGLE_RANK
from headrace.interop.sb3_normalizer import Normalizer, read_normalizer
from headrace.interop.sb3_settings import translate
from headrace.interop.sb3_weights import (
    check_settings,
    check_spaces,
    hidden_sizes,
    load_weights,
    num_actions,
    num_critics,
)
from headrace.interop.sb3_zip import Sb3Model, read_model
from headrace.learner.learner import Learner
from headrace.meter import Meter
from headrace.models.critics.actor import ActorPolicy
from headrace.storage import checkpoint
from headrace.storage import run_dir as rundir
from headrace.storage.checkpoint import Section
from headrace.training.counters import Counters
from headrace.training.job import Job, RunRequest, inspect_request
from headrace.training.launch import refuse_used
from headrace.training.rank import build_learner, describe_job
from headrace.training.saver import Saver

SOURCE = "Stable-Baselines3"


@dataclass(frozen=True)
class Imported:
    """A run that was made from a model.

    Attributes:
        algo: of the model.
        env_steps: that the model was trained for.
        notes: what has no counterpart, or could not be read.
    """

    run_dir: Path
    algo: str
    env_steps: int
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return vars(self) | {"run_dir": str(self.run_dir)}

    def describe(self) -> str:
        """Return what was made, what differs, and what can follow."""
        notes = [f"  {note}" for note in self.notes]
        more = ["What differs, or may differ:", *notes] if notes else []
        return "\n".join(
            [
                f"Imported {self.algo.upper()} after {self.env_steps:,} env steps: {self.run_dir}",
                "Weights and normalizers are those of the model. Optimizers begin anew.",
                *more,
                f"To evaluate:  headrace eval {self.run_dir}",
                f"To train on:  headrace resume {self.run_dir} --total-env-steps N",
            ]
        )


def import_sb3(
    path: Path,
    env: str,
    *,
    algo: str = "",
    normalizer: Path | None = None,
    run_dir: Path | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    wrapper: tuple[str, ...] = (),
) -> Imported:
    """Make a run directory from a model of Stable-Baselines3.

    Args:
        path: what `model.save` wrote.
        env: the environment that it was trained in, by a name that `headrace train` takes.
        algo: which algorithm wrote it, if the file does not say so.
        normalizer: the .npz file of its VecNormalize; None: it had none.
        run_dir: of the new run; default: a new one below `runs/`.
        env_kwargs, wrapper: arguments of the environment, and its wrappers.

    Raises:
        CheckpointError: the file cannot be read, or Headrace has no network that acts the same.
        UsageError: the environment cannot be made.
        RunDirError: the directory holds a run already.
    """
    model = read_model(path, algo)
    check_settings(model)
    moments = None if normalizer is None else read_normalizer(normalizer)
    settings, notes = _settings(model, moments)
    given: dict[str, Any] = {"env": env}
    given |= {"env_kwargs": dict(env_kwargs)} if env_kwargs else {}
    given |= {"wrapper": wrapper} if wrapper else {}
    settings |= given
    request = inspect_request(RunRequest(settings))
    assert request.spec is not None
    check_spaces(model, request.spec)
    run_dir = run_dir or rundir.default(env, model.algo, settings["seed"])
    job = _as_imported(request.job(run_dir), settings.keys() - given.keys())
    learner = build_learner(job, torch.device("cpu"), Meter())
    (name,) = learner.learners
    load_weights(model, learner.learners[name].modules, request.spec)
    if moments is not None:
        moments.load_into(learner.policies[name], request.spec)
    elif model.algo in ("ppo", "a2c") and model.data.get("_last_original_obs") is not None:
        warnings.warn(
            f"{path} was trained with VecNormalize, and may act otherwise without it: give its "
            "statistics by --normalizer (docs/import.md).",
            stacklevel=2,
        )
    elif model.algo in ("dqn", "sac"):  # whose files do not tell
        notes.append(
            "if it was trained with VecNormalize, it acts otherwise without the statistics: give "
            "them by --normalizer"
        )
    env_steps = max(0, int(model.number("num_timesteps") or 0))
    with rundir.locked(run_dir):
        refuse_used(run_dir)
        _write(job, learner, env_steps)
    return Imported(run_dir, model.algo, env_steps, notes)


def _settings(model: Sb3Model, moments: Normalizer | None) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of the run, and notes on what has no counterpart or is unreadable."""
    given, unread = model.arguments()
    given["policy_kwargs"].pop("net_arch", None)  # the weights say it
    translation = translate(model.algo, given)
    settings, notes = translation.settings, translation.notes
    notes += [f"{name}: cannot be read without unpickling; its default is used" for name in unread]
    settings["hidden_sizes"] = hidden_sizes(model)
    settings.setdefault("seed", 0)
    least = 1
    if model.algo in ("dqn", "sac"):
        # A resumed run collects transitions before it learns; its checkpoints have none either.
        settings["save_replay"] = False
        least = settings["learning_starts"] + 1
    if model.algo == "sac":
        settings["num_critics"] = num_critics(model)
        target = model.number("target_entropy")
        if target is not None and not settings["ent_coef"]:
            settings["target_entropy"] = target / num_actions(model)
    steps = [model.number(name) or 0 for name in ("num_timesteps", "_total_timesteps")]
    settings["total_env_steps"] = max(least, *map(int, steps))
    return settings | (moments.settings() if moments else {}), notes


def _as_imported(job: Job, names: Container[str]) -> Job:
    """Return the job with `import` as the source of the settings of these names."""
    source = {
        name: "import" if of == "given" and name in names else of
        for name, of in job.settings.source.items()
    }
    return replace(job, settings=replace(job.settings, source=source))


def _write(job: Job, learner: Learner, env_steps: int) -> None:
    """Write a checkpoint and config.json, as a run that has made so many env steps; RunDirError."""
    counters = Counters(env_steps=env_steps, ledger=Ledger(collected=env_steps))
    (name,) = learner.learners
    policy, algo = learner.policies[name], job.settings.algo
    if isinstance(algo, ReplayConfig):
        learner.learners[name].learner_steps = algo.learner_steps_after(env_steps)
        if isinstance(algo, DQN):
            progress = env_steps / job.settings.run.schedule_env_steps
            explore(policy, algo.epsilon(progress))
        elif isinstance(policy, ActorPolicy):
            policy.head.is_random.fill_(float(env_steps < algo.learning_starts))
    begun = {"steps": np.zeros((), np.int64)}  # no episode is under way
    imported = {"from": SOURCE, "env_steps": env_steps}
    sections = [
        *learner.sections(),
        counters.section(),
        Section("workers", lambda: (begun, {}), lambda *_: None, is_collective=True),
        Section("imported", lambda: ({}, imported), lambda *_: None),
    ]
    saver = Saver(job, sections, counters, learner, SINGLE_RANK)
    files, manifest = saver.contents({section.name: section.state() for section in sections})
    with rundir.writable(job.run_dir):
        checkpoint.write(job.run_dir / "checkpoints", env_steps, files, manifest)
    rundir.write_config(job.run_dir, describe_job(job))  # the last: without it there is no run
