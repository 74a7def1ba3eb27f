"""Training from Python."""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.algos.base import Algorithm
from headrace.config.algorithms import AlgorithmLike, algorithm_name, load_algorithm, name_of_config
from headrace.config.old_names import rename_settings
from headrace.config.resolve import MAY_CHANGE, read_config_file
from headrace.config.settings import Settings
from headrace.configclass import explicit_values
from headrace.envs.factory import EnvLike, EnvMaker, WrapperLike
from headrace.errors import ConfigError
from headrace.evaluation.evaluate import Evaluation, evaluate, play_episode
from headrace.evaluation.trained_policies import (
    TrainedPolicy,
    folder_of,
    load_policies,
    load_policy,
)
from headrace.learner.frozen import opponents, random_names
from headrace.models.custom import ModelFactory, load_model
from headrace.models.policy import Network
from headrace.spec import Agents, Array, EnvSpec
from headrace.storage import checkpoint
from headrace.training.job import Job, RunRequest, evaluated_of_run
from headrace.training.launch import Launch
from headrace.training.rank import RunResult
from headrace.training.reporter import OnUpdate


@dataclass(frozen=True)
class Run:
    """A run that has ended; `summary` is what `headrace train --json` prints."""

    dir: Path
    summary: dict[str, Any] = field(repr=False)
    _job: Job = field(repr=False)

    @property
    def mean_return(self) -> float | None:
        """Mean return of the last (up to) 100 finished training episodes; None without one."""
        value: float | None = self.summary["mean_return"]
        return value

    @property
    def policy(self) -> TrainedPolicy:
        """The trained policy: `policy(obs) -> action`."""
        return load_policy(self.dir, self._job.model, algo=self._job.settings.algorithm)

    @property
    def policies(self) -> dict[str, TrainedPolicy]:
        """The trained policies, by name, where there are several."""
        settings = self._job.settings
        random = random_names(settings.run.frozen)
        return load_policies(self.dir, self._job.model, settings.algorithm, random)[0]

    def resume(self, *, quiet: bool = False, **changed: Any) -> "Run":
        """Continue the run with its own code: `headrace.resume` documents what may change."""
        job = self._job
        return resume(
            self.dir,
            env=job.maker.env,
            eval_env=job.eval_maker.env if job.settings.run.eval_env else None,
            wrapper=job.maker.wrappers,
            model=job.model,
            algo=job.settings.algorithm,
            quiet=quiet,
            **changed,
        )

    def episode(self, *, seed: int = 0, stochastic: bool = False) -> dict[str, Array]:
        """Play and record one episode of a kernel environment: `evaluate.play_episode`."""
        return play_episode(
            self.policies,
            self._job.eval_maker,
            shares=self._job.shares,
            seed=seed,
            stochastic=stochastic,
        )

    def evaluate(
        self,
        episodes: int = 20,
        *,
        stochastic: bool = False,
        video: str | Path | None = None,
        policies: Mapping[str, TrainedPolicy] | None = None,
    ) -> Evaluation:
        """Play whole episodes with the trained policy; see `headrace.evaluation.evaluate.evaluate`.

        Args:
            stochastic: sample actions, as in training; default: the likeliest.
            video: file for the first episode (MP4).
            policies: replacements for some of this run's, by name, such as `other_run.policies`.

        Raises:
            ConfigError: this run has no policy of that name.
        """
        if unknown := set(policies or {}) - set(self._job.shares):
            raise ConfigError(
                f"policies={sorted(unknown)}: this run has {', '.join(self._job.shares)}."
            )
        played = evaluate(
            self.policies | dict(policies or {}),
            self._job.eval_maker,
            spec=self._job.eval_spec,
            shares=self._job.shares,
            episodes=episodes,
            stochastic=stochastic,
            video=None if video is None else Path(video),
        )
        assert played is not None  # nobody tells it to stop
        return played


def train(
    env: EnvLike,
    *,
    algo: Any = None,
    network: Network | None = None,
    model: str | ModelFactory | None = None,
    wrapper: WrapperLike | Sequence[WrapperLike] = (),
    eval_env: EnvLike | None = None,
    config: str | os.PathLike[str] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    on_update: OnUpdate | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Run:
    """Train an agent.

    Args:
        env: a Gymnasium id, a game of PettingZoo's (`classic/rps-v2`), `module:EnvId`,
            `module:callable`, or a callable (a lambda will do).
        algo: settings such as `headrace.PPO(lr=3e-4)` (others come from file, preset, or default);
            a name, `"a2c"`; or your own algorithm's class or `"module:Name"`. Default: PPO.
        network: settings such as `headrace.Network(hidden_sizes=(256, 256))`.
        model: makes your own network from the spec, or its name; see examples/own_network.py.
        wrapper: wraps each environment: `module:callable`, a callable, or several.
        eval_env: the environment of evaluations, in one of the forms of `env`, with the same spaces
            and wrappers; default: `env`.
        config: a TOML file with settings.
        run_dir: default: a new directory below `runs/`.
        on_update: called with (number of the update, metrics) after each. May return changes of
            all environments: `headrace.call_envs`, `headrace.set_envs`, or a sum of these.
        **settings: every other setting of `headrace train --help` by its name.

    Returns:
        The run, when it has ended.

    Raises:
        UsageError: the settings or the environment are invalid (a ValueError, too).
        EnvError: the environment raised; the message begins with its traceback.
        HeadraceError: all other expected errors; see `headrace.errors`.
        KeyboardInterrupt: Ctrl-C, after the run was saved.
    """
    return _finish(
        Launch(on_update, None if quiet else sys.stdout).start(
            request_for(env, algo, network, model, wrapper, eval_env, config, **settings),
            None if run_dir is None else Path(run_dir),
        )
    )


def request_for(
    env: EnvLike,
    algo: Any = None,
    network: Network | None = None,
    model: str | ModelFactory | None = None,
    wrapper: WrapperLike | Sequence[WrapperLike] = (),
    eval_env: EnvLike | None = None,
    config: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> RunRequest:
    """Return the request for the arguments of `train`; ConfigError if they are of another type."""
    explicit = rename_settings(settings)
    if isinstance(algo, str):
        explicit["algo"] = algo
    elif (name := name_of_config(algo)) is not None:
        explicit |= explicit_values(algo) | {"algo": name}
    elif algo is not None:
        if not isinstance(algo, type | Algorithm):
            raise ConfigError(f"algo={algo!r}: expected settings such as headrace.PPO(lr=3e-4).")
        explicit["algo"] = algorithm_name(type(load_algorithm(algo)))
    if isinstance(network, Network):
        explicit |= explicit_values(network)
    elif network is not None:
        raise ConfigError(f"network={network!r}: expected headrace.Network(hidden_sizes=...).")
    file = read_config_file(None if config is None else Path(config))
    # The algorithm travels as code: one of a script has no name that others could import.
    return RunRequest(
        explicit, env, several(wrapper), model, explicit.get("algo"), file, eval_env=eval_env
    )


def several(wrapper: WrapperLike | Sequence[WrapperLike]) -> tuple[WrapperLike, ...]:
    """Return one wrapper or several as a tuple."""
    return (wrapper,) if isinstance(wrapper, str) or callable(wrapper) else tuple(wrapper)


def resume(
    run_dir: str | os.PathLike[str],
    *,
    env: EnvLike | None = None,
    model: str | ModelFactory | None = None,
    wrapper: WrapperLike | Sequence[WrapperLike] = (),
    eval_env: EnvLike | None = None,
    algo: AlgorithmLike | None = None,
    on_update: OnUpdate | None = None,
    quiet: bool = False,
    **changed: Any,
) -> Run:
    """Go on with a run from its newest whole checkpoint. Return it when it has ended.

    Pass `env` and `eval_env` again unless they are plain ids, and the run's own model, wrappers and
    algorithm.
    `changed` are settings of `headrace resume --help`, by name.

    Raises:
        ConfigError: a setting cannot be changed, or its new value is invalid.
        RunDirError: there is nothing to resume, it is in use, or of another environment.
        HeadraceError, KeyboardInterrupt: as `train`.
    """
    changed = rename_settings(changed)
    for name in changed:
        if name not in MAY_CHANGE:
            raise ConfigError(
                f"A run goes on with the {name} that it has; resume takes {', '.join(MAY_CHANGE)}."
            )
    changes = {name: value for name, value in changed.items() if value is not None}
    return _finish(
        Launch(on_update, None if quiet else sys.stdout).resume(
            Path(run_dir),
            RunRequest(changes, env, several(wrapper), model, algo, eval_env=eval_env),
        )
    )


def evaluate_run(
    run_dir: Path,
    request: RunRequest,
    *,
    best: bool = False,
    saved: Path | None = None,
    frozen: Mapping[str, str] | None = None,
    **options: Any,
) -> Evaluation:
    """Play whole episodes with the policies of a run's directory.

    Args:
        request: the run's code, if it has some.
        best: play with the best policies, not with the newest.
        saved: the checkpoint to play with, in place of either.
        frozen: policies to replace, as in the setting.
        **options: of `headrace.evaluation.evaluate.evaluate`, such as `episodes` and `seed`.

    Raises:
        ConfigError: there is no best policy, or some of the run's code is not named again.
        CheckpointError: policies cannot be loaded, or are of another environment.
    """
    found = players_of_run(run_dir, request, best=best, saved=saved)
    policies, shares, settings, maker, spec = found
    others = opponents(frozen or {}, shares, settings, spec, load_model(request.model))
    played = evaluate(policies | others, maker, spec=spec, shares=shares, **options)
    assert played is not None  # nobody tells it to stop
    return played


def players_of_run(
    run_dir: Path, request: RunRequest, *, best: bool = False, saved: Path | None = None
) -> tuple[dict[str, TrainedPolicy], dict[str, Agents], Settings, EnvMaker, EnvSpec]:
    """Return a run's policies and the agents of each, by name, and where it is evaluated.

    Args:
        request: the run's code, if it has some.
        best: the best policies, not the newest.
        saved: the checkpoint that they are of, in place of either.

    Raises:
        ConfigError: there is no best policy, or some of the run's code is not named again.
        CheckpointError: policies cannot be loaded, or are of another environment.
    """
    folder = saved or folder_of(run_dir, best=best)
    settings, maker, spec = evaluated_of_run(run_dir, request)
    random = random_names(settings.run.frozen)
    policies, shares = load_policies(folder, request.model, request.algorithm, random)
    theirs = {name: (policies[name].spec, agents) for name, agents in shares.items()}
    checkpoint.check_policies(theirs, spec, run_dir)
    return policies, shares, settings, maker, spec


def _finish(result: RunResult) -> Run:
    """Return the run; pass on the signal that ended it."""
    if result.stopped_by == signal.SIGINT:
        raise KeyboardInterrupt
    if result.stopped_by:
        raise SystemExit(128 + result.stopped_by)
    return Run(result.job.run_dir, result.summary, result.job)
