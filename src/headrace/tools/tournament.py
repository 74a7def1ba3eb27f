"""Tournaments of runs: their newest policies, and players that stay the same, meet each other.

Left out: who meets whom, and how they are ranked (`leagues/tournament.py`).
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace import importing
from headrace.config.policies import RANDOM
from headrace.envs.factory import EnvMaker
from headrace.errors import ConfigError, did_you_mean
from headrace.evaluation.trained_policies import load_policies
from headrace.leagues.players import (
    Player,
    agent_names,
    first_snapshot,
    random_player,
    scripted_player,
)
from headrace.leagues.tournament import Tournament, play_tournament
from headrace.learner.frozen import random_names
from headrace.spec import EnvSpec
from headrace.storage import checkpoint
from headrace.training.job import RunRequest, evaluated_of_run

FIRST = "first"
"""In place of a script: the first snapshot of each run's league."""


def tournament_of_runs(
    run_dirs: Sequence[str | Path],
    request: RunRequest | None = None,
    *,
    against: Sequence[str] = (RANDOM,),
    **options: Any,
) -> Tournament:
    """Let the policies of runs of the same game play each other.

    Args:
        request: the code of the runs, if they have some of their own.
        against: further players: `random`, `first`, or a script's `module:callable`.
        **options: those of `play_tournament`: episodes, stochastic, seed, stop, say.

    Raises:
        ConfigError: the runs are not of one game, there is no such player, or some of the runs'
            code is not named again.
        CheckpointError: a run has no usable checkpoint.
        PlayerError, EnvError: as `play_tournament`.
    """
    players, maker, spec = _players(list(map(Path, run_dirs)), request or RunRequest(), against)
    return play_tournament(players, maker, spec, **options)


def _players(
    run_dirs: list[Path], request: RunRequest, against: Sequence[str]
) -> tuple[list[Player], EnvMaker, EnvSpec]:
    """Load all players. Return them with the first run's environment, in which they play."""
    if not run_dirs:
        raise ConfigError("A tournament of no run: expected one or more, as in runs/A runs/B.")
    players, firsts = list[Player](), list[Player]()
    game: tuple[EnvMaker, EnvSpec] | None = None
    for run_dir in run_dirs:
        settings, maker, spec = evaluated_of_run(run_dir, request)
        if game is None:
            game = maker, spec
        _check_same(run_dirs[0], *game, run_dir, maker, spec)

        def load(directory: Path, run: Any = settings.run, spec: EnvSpec = spec) -> Player:
            model = request.model if run.model else None  # of other runs, there is none to name
            random = random_names(run.frozen)
            policies, shares = load_policies(directory, model, request.algorithm, random)
            theirs = {name: (policies[name].spec, agents) for name, agents in shares.items()}
            checkpoint.check_policies(theirs, spec, directory)
            return Player(str(directory), policies, shares)

        players.append(load(run_dir))
        if FIRST in against and (snapshot := first_snapshot(run_dir)) is not None:
            firsts.append(load(snapshot))
    assert game is not None
    for word in against:
        if word == FIRST and not firsts:
            raise ConfigError(
                f"against={FIRST}, but none of {', '.join(map(str, run_dirs))} has snapshots.\n"
                "Runs take them in a league (--league 8). Leave it out."
            )
        players += firsts if word == FIRST else [_other(word, *game)]
    return players, *game


def _other(word: str, maker: EnvMaker, spec: EnvSpec) -> Player:
    """Return the player that a word names: a random one, or a script."""
    if word == RANDOM:
        return random_player(spec)
    if ":" not in word:
        raise ConfigError(
            f"against={word!r}: expected {RANDOM}, {FIRST} or module:callable."
            + did_you_mean(word, (RANDOM, FIRST))
            + "\nRuns are named before --against."
        )
    script = importing.load_callable(word, ConfigError)
    return scripted_player(script, word, spec, agent_names(maker, spec))


def _check_same(
    first: Path, maker: EnvMaker, spec: EnvSpec, other: Path, its_maker: EnvMaker, its: EnvSpec
) -> None:
    """Refuse a run of another game, and warn of one whose game has other arguments."""
    if spec != its:
        raise ConfigError(
            "The runs of a tournament are of one game, and these differ:\n"
            f"  {first}: {_describe(spec)}\n  {other}: {_describe(its)}\n"
            "Name runs of the same environment."
        )
    if maker.kwargs != its_maker.kwargs:
        warnings.warn(
            f"{other} was trained with env_kwargs={its_maker.kwargs}. All play with those of "
            f"{first}: {maker.kwargs}.",
            stacklevel=2,
        )


def _describe(spec: EnvSpec) -> str:
    agents = ", ".join(f"{size} {role}" for role, size in spec.roles) or "1"
    seen, taken = spec.observation.describe(), spec.action.describe()
    return f"{spec.id}, agents: {agents}, observation: {seen}, action: {taken}"
