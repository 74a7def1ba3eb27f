"""The settings of a league: those that follow from others, and those that contradict each other.

Left out: what a league does (`leagues/`).
"""

from collections.abc import Mapping
from typing import Any

from headrace.algos.base import Algorithm
from headrace.config.run_config import RunConfig
from headrace.config.settings import Settings
from headrace.errors import ConfigError, flag
from headrace.models.policy import Network

_DEFAULTS = RunConfig()
SNAPSHOTS = 40
"""Snapshots of a run, where nobody says how often one is taken."""


def derive_league(settings: Settings) -> Settings:
    """Return the settings with the env steps between snapshots."""
    run = settings.run
    if not run.league or run.snapshot_every:
        return settings
    every = max(1, run.total_env_steps // SNAPSHOTS)
    return settings.follow("follows total_env_steps", snapshot_every=every)


_OF_LEAGUE = ("snapshot_every", "opponents", "latest_ratio", "league_members")


def check_league(
    run: RunConfig, network: Network, algorithm: Algorithm[Any], sources: Mapping[str, str]
) -> None:
    """Refuse settings of a league without one, and what a league cannot have."""
    if not run.league:
        for name in _OF_LEAGUE:
            asked = sources.get(name, "").startswith(("given", "config "))
            if asked and getattr(run, name) != getattr(_DEFAULTS, name):
                raise ConfigError(
                    f"{name}={getattr(run, name)}, but there is no league: league=0.\n"
                    f"Use --league 8, or leave {flag(name)} out."
                )
        return
    refused = None
    if algorithm.data == "replay":
        refused = f"algo={run.algo}", "learns from replay", "Use --algo ppo, for example."
    elif network.core != "none":
        refused = f"core={network.core!r}", "has a memory, which members lack", "Leave --core out."
    elif run.inference == "learner":
        refused = "inference='learner'", "leaves members no place", "Use --inference worker."
    elif run.frozen:
        refused = f"frozen={run.frozen}", "plays its agents always", "Use --league-members."
    if refused is not None:
        what, why, remedy = refused
        raise ConfigError(f"league={run.league} and {what}, which {why}.\n{remedy}")
    if run.snapshot_every == -1 and not run.league_members:
        raise ConfigError(
            f"league={run.league} and snapshot_every=-1: nobody would be in the league.\n"
            "Name members (--league-members RUN_DIR), or leave --snapshot-every out."
        )
    needed = len(run.league_members) + (run.snapshot_every >= 0)
    if run.league < needed:
        raise ConfigError(
            f"league={run.league}, but league_members names {len(run.league_members)}: expected "
            "no more than the league has at a time, beside the newest snapshot.\n"
            f"Use --league {needed}."
        )
