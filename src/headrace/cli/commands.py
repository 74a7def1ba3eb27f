"""The verbs and their flags. Left out: exit codes (`main.py`)."""

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from headrace.cli.flags import (
    JsonFlag,
    OptionalPath,
    ResumeFlags,
    RunFlags,
    SettingFlags,
    explicit,
    parse,
    with_settings,
)
from headrace.config.run_config import Frozen, KeyValues
from headrace.envs.check.checker import check_env as check
from headrace.envs.factory import env_spec
from headrace.errors import ConfigError
from headrace.evaluation.evaluate import evaluate as run_episodes
from headrace.evaluation.trained_policies import load_policies
from headrace.learner.frozen import opponents
from headrace.models.custom import load_model
from headrace.storage import checkpoint
from headrace.storage import run_dir as rundir
from headrace.tools.doctor import describe, examine
from headrace.tools.plotting import draw_curves
from headrace.training.job import RunRequest, settings_of_run
from headrace.training.launch import Launch
from headrace.training.rank import RunResult


@dataclass(frozen=True, kw_only=True)
class TrainFlags(SettingFlags):
    """The flags of `headrace train`."""

    run_dir: OptionalPath = None
    """Directory of the run. Default: a new one below runs/."""
    auto_scale: bool = False
    """First measure which sizes train fastest here, as `headrace autoscale` does (it has more
    options), or use an earlier measurement."""


@dataclass(frozen=True, kw_only=True)
class _EvalFlags(RunFlags):
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


@dataclass(frozen=True, kw_only=True)
class _CheckEnvFlags(JsonFlag):
    env: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")]
    """Environment: a Gymnasium id, module:EnvId, or module:callable (a class of one's own)."""
    env_kwargs: Annotated[dict[str, Any], KeyValues] = field(default_factory=dict)
    """Passed to the environment's constructor, as in --env-kwargs size=4 name=maze."""
    num_steps: int = 0
    """Env steps per env of the longest play; 0: twice a kernel env's time limit, else 200."""
    seed: int = 0
    """Of episodes and actions."""


@dataclass(frozen=True)
class _PlotFlags:
    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of runs."""
    output: OptionalPath = None
    """The picture (PNG); default: curve.png in the first directory."""


def _started() -> float:
    """Return the start time of this process, on the clock of `time.perf_counter`."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:  # no /proc on this platform: the interpreter's own start is left out
        age = 0.0
    return time.perf_counter() - age


def train(argv: list[str]) -> int:
    """Run `headrace train`."""
    started = _started()
    flags = parse("train", with_settings(TrainFlags, argv), argv)
    request = RunRequest(explicit(argv, flags), config_file=flags.config)
    if flags.auto_scale:
        from headrace.tools.autoscale.autoscale import find_sizes  # slow

        if flags.run_dir is not None:
            rundir.refuse_used(flags.run_dir)
        sizes = find_sizes(request, say=flags.say)
        flags.say(sizes.describe())
        request = replace(request, measured=sizes.settings)
    return _end(Launch(out=flags.out, started=started).start(request, flags.run_dir), flags.json)


def _request_again(flags: RunFlags, changes: Mapping[str, Any]) -> RunRequest:
    """Return a request with what a run's directory may not name: its code."""
    return RunRequest(changes, flags.env or None, flags.wrapper, flags.model, flags.algo)


def resume(argv: list[str]) -> int:
    """Run `headrace resume`."""
    started = _started()
    flags = parse("resume", ResumeFlags, argv)
    request = _request_again(flags, explicit(argv, flags))
    return _end(Launch(out=flags.out, started=started).resume(flags.run_dir, request), flags.json)


def _end(result: RunResult, as_json: bool) -> int:
    if as_json and result.rank == 0:
        print(json.dumps(result.summary))
    return 128 + result.stopped_by if result.stopped_by else 0


def evaluate(argv: list[str]) -> int:
    """Run `headrace eval`."""
    flags = parse("eval", _EvalFlags, argv)
    request = _request_again(flags, {})
    settings, maker = settings_of_run(flags.run_dir, request)
    best = flags.run_dir / "best"
    if flags.best and not best.is_dir():
        raise ConfigError(
            f"{flags.run_dir} has no best policy: it was trained without --eval-every N, or ended "
            "before the first evaluation.\nLeave out --best to play with the newest policy."
        )
    policies, shares = load_policies(
        best if flags.best else flags.run_dir, request.model, request.algorithm
    )
    spec = env_spec(maker)
    others = opponents(flags.frozen, shares, settings, spec, load_model(request.model))
    theirs = {name: (policies[name].spec, agents) for name, agents in shares.items()}
    checkpoint.check_policies(theirs, spec, flags.run_dir)
    played = run_episodes(
        policies | others,
        maker,
        spec=spec,
        shares=shares,
        episodes=flags.episodes,
        stochastic=flags.stochastic,
        seed=flags.seed,
        video=flags.video,
        say=lambda progress: print(progress, file=sys.stderr),
    )
    assert played is not None  # nobody tells it to stop
    result = played.to_json()
    if flags.json:
        print(json.dumps(result | {"video": str(flags.video) if flags.video else None}))
    else:
        print(
            f"Return {result['mean_return']:.1f} ± {result['std_return']:.1f} over "
            f"{result['episodes']} episodes of {result['mean_length']:.0f} steps on average"
            + "".join(
                f"\n  {name}: {mean:.2f}"
                for name, mean in result.get("mean_return_by_policy", {}).items()
            )
            + (f"\nVideo: {flags.video}" if flags.video else "")
        )
    return 0


def check_env(argv: list[str]) -> int:
    """Run `headrace check-env`."""
    flags = parse("check-env", _CheckEnvFlags, argv)
    report = check(
        flags.env, flags.env_kwargs, num_steps=flags.num_steps, seed=flags.seed, say=flags.say
    )
    print(json.dumps(report.to_json()) if flags.json else report.summary)
    return 0 if report.ok else 1


def plot(argv: list[str]) -> int:
    """Run `headrace plot`."""
    flags = parse("plot", _PlotFlags, argv)
    print(f"Learning curve: {draw_curves(list(flags.run_dirs), flags.output)}")
    return 0


def doctor(argv: list[str]) -> int:
    """Run `headrace doctor`."""
    flags = parse("doctor", JsonFlag, argv)
    found = examine()
    print(json.dumps(found) if flags.json else describe(found))
    return 0
