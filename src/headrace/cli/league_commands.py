"""The verbs `exploit` and `tournament`, and their flags."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from headrace.cli.commands import CodeVerb, run_training, started_at
from headrace.cli.flags import SettingsVerb, explicit
from headrace.cli.verbs import OptionalPath, TrackedVerb, Verb
from headrace.config.policies import RANDOM
from headrace.config.resolve import read_config_file
from headrace.distributed.process import StopSignals
from headrace.errors import ConfigError
from headrace.leagues.tournament import EPISODES
from headrace.tools.exploit import exploit_request, exploited
from headrace.tools.tournament import tournament_of_runs
from headrace.tools.trackers.beside import Beside

_RunDirs = Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN_DIR ...")]
_Against = Annotated[
    tuple[str, ...], tyro.conf.arg(metavar="random|first|MODULE:CALLABLE", help_behavior_hint="")
]


@dataclass(frozen=True, kw_only=True)
class _Exploit(TrackedVerb, SettingsVerb):
    run_dir: OptionalPath = None
    """Directory of the exploiter's run. Default: a new one below runs/."""
    env: str | None = None
    """ENV is the directory of the run to exploit. If its environment is code, name it again here
    (module:callable). The exploiter trains in the same environment, for as many env steps as that
    run unless others are asked for, with the defaults of its algorithm."""

    def execute(self, argv: list[str]) -> int:
        started = started_at()
        settings = explicit(argv, self)
        against = Path(settings.pop("env", ""))
        if not against.name or not against.is_dir():
            raise ConfigError(
                f"{str(against)!r} is no directory: expected that of the run to exploit, as in "
                "headrace exploit runs/NAME."
            )
        beside = Beside(self.track) if self.track else None
        request = exploit_request(against, settings, self.env, read_config_file(self.config))
        return run_training(
            self,
            started,
            beside,
            lambda launch: launch.start(request, self.run_dir),
            lambda run_dir, env_steps: exploited(run_dir, env_steps, against),
        )


@dataclass(frozen=True, kw_only=True)
class _Tournament(CodeVerb):
    run_dirs: _RunDirs
    """Directories of runs of one game, whose newest policies play each other."""
    against: _Against = (RANDOM,)
    """Further players: random; first, the first snapshot of each run's league; a function
    (observation, agent) -> action. Default: random; --against alone: none."""
    episodes: int = EPISODES
    """Episodes of each pair of players, all seats together."""
    stochastic: bool = False
    """Sample actions, as in training. This is the default."""
    greedy: bool = False
    """Choose the likeliest actions."""
    seed: int = 0
    """Root of the environments' seeds, which are the same for each pair."""

    def execute(self, argv: list[str]) -> int:
        """Play, and print the tables; ConfigError, CheckpointError, PlayerError, EnvError."""
        if self.stochastic and self.greedy:
            raise ConfigError("--stochastic and --greedy: expected one of them.")
        stop = StopSignals("the games so far follow. Again: stop without them.")
        with stop.installed():
            result = tournament_of_runs(
                self.run_dirs,
                self.request({}),
                against=self.against,
                episodes=self.episodes,
                stochastic=not self.greedy,
                seed=self.seed,
                stop=stop,
                say=lambda progress: print(progress, file=sys.stderr, flush=True),
            )
        self.answer(result.to_json(), result.describe())
        return 128 + stop.received if stop.received else 0


FLAGS: dict[str, type[Verb]] = {"exploit": _Exploit, "tournament": _Tournament}
