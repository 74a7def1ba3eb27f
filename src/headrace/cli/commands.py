"""The verbs and their flags. Left out: exit codes (`main.py`)."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import tyro

from headrace.cli.flags import SettingsVerb, explicit
from headrace.cli.verbs import JsonVerb, OptionalPath, RunDir, TrackedVerb, Verb
from headrace.config.resolve import read_config_file
from headrace.config.run_config import Frozen, KeyValues
from headrace.evaluation.evaluate import evaluate as run_episodes
from headrace.evaluation.trained_policies import best_of, load_policies
from headrace.learner.frozen import opponents, random_names
from headrace.models.custom import load_model
from headrace.storage import checkpoint
from headrace.storage import run_dir as rundir
from headrace.tools.trackers.beside import Beside
from headrace.training.job import RunRequest, evaluated_of_run
from headrace.training.launch import Launch, refuse_used
from headrace.training.rank import RunResult


def started_at() -> float:
    """Return the start time of this process, on the clock of `time.perf_counter`."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:  # no /proc on this platform: the interpreter's own start is left out
        age = 0.0
    return time.perf_counter() - age


class _Outcome(Protocol):
    """What a verb has to say of a run at its end."""

    def to_json(self) -> dict[str, Any]: ...
    def describe(self, run_dir: Path) -> str: ...


def run_training(
    verb: TrackedVerb,
    started: float,
    beside: Beside | None,
    begin: Callable[[Launch], RunResult],
    outcome_of: Callable[[Path, int], _Outcome] | None = None,
) -> int:
    """Run a training with its tracker's process; return the exit code.

    Args:
        outcome_of: (directory, env steps) -> what to say of a run that was not stopped.
    """
    on_start = None if beside is None else beside.start
    result = begin(Launch(out=verb.progress, started=started, on_start=on_start))
    if beside is not None and (said := beside.end()):
        verb.say(said)
    summary = result.summary
    if outcome_of is not None and result.rank == 0 and not result.stopped_by:
        outcome = outcome_of(result.job.run_dir, summary["env_steps"])
        verb.say(outcome.describe(result.job.run_dir))
        summary = summary | {"outcome": outcome.to_json()}
    if verb.json and result.rank == 0:
        print(json.dumps(summary))
    return 128 + result.stopped_by if result.stopped_by else 0


@dataclass(frozen=True, kw_only=True)
class _Train(TrackedVerb, SettingsVerb):
    run_dir: OptionalPath = None
    """Directory of the run. Default: a new one below runs/."""
    auto_scale: bool = False
    """First measure which sizes train fastest here, as `headrace autoscale` does (it has more
    options), or use an earlier measurement."""

    def execute(self, argv: list[str]) -> int:
        started = started_at()
        beside = Beside(self.track) if self.track else None
        request = RunRequest(explicit(argv, self), config_file=read_config_file(self.config))
        if self.auto_scale:
            from headrace.tools.autoscale.autoscale import find_sizes  # slow

            if self.run_dir is not None:
                with rundir.locked(self.run_dir):
                    refuse_used(self.run_dir)
            sizes = find_sizes(request, say=self.say)
            self.say(sizes.describe())
            request = replace(request, measured=sizes.settings)
        return run_training(
            self, started, beside, lambda launch: launch.start(request, self.run_dir)
        )


_CODE_AGAIN = tyro.conf.arg(metavar="MODULE:CALLABLE", help_behavior_hint="")


@dataclass(frozen=True, kw_only=True)
class CodeVerb(JsonVerb):
    """A verb that takes the code of a run again."""

    env: Annotated[str, tyro.conf.arg(metavar="ENV", help_behavior_hint="")] = ""
    """The environment again, if it is code (module:EnvId or module:callable)."""
    eval_env: Annotated[str, tyro.conf.arg(metavar="ENV", help_behavior_hint="")] = ""
    """The environment of evaluations again, if it is code."""
    wrapper: Annotated[tuple[str, ...], _CODE_AGAIN] = ()
    """The wrappers again, if the run has some (module:callable)."""
    model: Annotated[str, _CODE_AGAIN] = ""
    """What makes the network again, if it is your own (module:callable)."""
    algo: Annotated[str, tyro.conf.arg(metavar="MODULE:NAME", help_behavior_hint="")] = ""
    """The algorithm again, if it is your own (module:Name)."""

    def request(self, changes: Mapping[str, Any]) -> RunRequest:
        """Return a request with what a run's directory may not name: its code."""
        return RunRequest(
            changes, self.env or None, self.wrapper, self.model, self.algo,
            eval_env=self.eval_env or None,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunVerb(CodeVerb):
    """A verb that takes a run."""

    run_dir: RunDir
    """Directory of the run."""


@dataclass(frozen=True, kw_only=True)
class _Resume(TrackedVerb, RunVerb):
    def execute(self, argv: list[str]) -> int:
        started = started_at()
        beside = Beside(self.track) if self.track else None
        request = self.request(explicit(argv, self))
        return run_training(
            self, started, beside, lambda launch: launch.resume(self.run_dir, request)
        )


@dataclass(frozen=True, kw_only=True)
class _Eval(RunVerb):
    episodes: int = 20
    """Whole episodes to play."""
    best: bool = False
    """Play with the best policy that --eval-every kept, not with the newest."""
    stochastic: bool = False
    """Sample actions as in training. Default: the likeliest."""
    video: OptionalPath = None
    """Film the first episode (MP4)."""
    frozen: Annotated[dict[str, Any], Frozen] = field(default_factory=dict)
    """Policies of another run, or random ones, in place of this run's: tagger=RUN_DIR
    runner=random (RUN_DIR:POLICY, if it has another name there)."""
    seed: int = 0
    """Root of the environments' seeds (never those of training)."""

    def execute(self, argv: list[str]) -> None:
        request = self.request({})
        directory = best_of(self.run_dir) if self.best else self.run_dir
        settings, maker, spec = evaluated_of_run(self.run_dir, request)
        policies, shares = load_policies(
            directory,
            request.model,
            request.algorithm,
            random_names(settings.run.frozen),
        )
        others = opponents(self.frozen, shares, settings, spec, load_model(request.model))
        theirs = {name: (policies[name].spec, agents) for name, agents in shares.items()}
        checkpoint.check_policies(theirs, spec, self.run_dir)
        played = run_episodes(
            policies | others,
            maker,
            spec=spec,
            shares=shares,
            episodes=self.episodes,
            stochastic=self.stochastic,
            seed=self.seed,
            video=self.video,
            say=lambda progress: print(progress, file=sys.stderr),
        )
        assert played is not None  # nobody tells it to stop
        result = played.to_json()
        means = result.get("mean_return_by_policy", {})
        self.answer(
            result | {"video": str(self.video) if self.video else None},
            f"Return {result['mean_return']:.1f} ± {result['std_return']:.1f} over "
            f"{result['episodes']} episodes of {result['mean_length']:.0f} steps on average"
            + "".join(f"\n  {name}: {mean:.2f}" for name, mean in means.items())
            + (f"\nVideo: {self.video}" if self.video else ""),
        )


@dataclass(frozen=True, kw_only=True)
class _CheckEnv(JsonVerb):
    env: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")]
    """Environment: a Gymnasium id, a game of PettingZoo's (classic/rps-v2), module:EnvId, or
    module:callable (a class of one's own)."""
    env_kwargs: Annotated[dict[str, Any], KeyValues] = field(default_factory=dict)
    """Passed to the environment's constructor, as in --env-kwargs size=4 name=maze."""
    num_steps: int = 0
    """Env steps of each env of the longest play; 0: for a kernel environment twice its time limit,
    at least 200 (2,000 without a limit); for others 200."""
    seed: int = 0
    """Of episodes and actions."""

    def execute(self, argv: list[str]) -> int:
        from headrace.envs.check.checker import check_env  # other verbs do not need it

        report = check_env(
            self.env, self.env_kwargs, num_steps=self.num_steps, seed=self.seed, say=self.say
        )
        self.answer(report.to_json(), report.summary)
        return 0 if report.ok else 1


@dataclass(frozen=True, kw_only=True)
class _Doctor(JsonVerb):
    def execute(self, argv: list[str]) -> None:
        from headrace.tools.doctor import describe, examine  # other verbs do not need it

        found = examine()
        self.answer(found, describe(found))


FLAGS: dict[str, type[Verb]] = {
    "train": _Train, "resume": _Resume, "eval": _Eval,
    "check-env": _CheckEnv, "doctor": _Doctor,
}  # fmt: skip
