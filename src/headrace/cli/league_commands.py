"""The verb `tournament`, and its flags."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from headrace.cli.commands import CodeVerb
from headrace.cli.verbs import Verb
from headrace.errors import ConfigError
from headrace.leagues.members import RANDOM
from headrace.leagues.tournament import EPISODES
from headrace.tools.tournament import tournament_of_runs
from headrace.training.process import StopSignals

_RunDirs = Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN_DIR ...")]
_Against = Annotated[
    tuple[str, ...], tyro.conf.arg(metavar="random|first|MODULE:CALLABLE", help_behavior_hint="")
]


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


FLAGS: dict[str, type[Verb]] = {"tournament": _Tournament}
