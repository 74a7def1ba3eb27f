"""Other names of settings: former ones, which are still read, and those of other libraries."""

from collections.abc import Collection, Mapping
from typing import Any

from headrace.configclass import PEER_NAMES
from headrace.errors import ConfigError, flag

NAMES = {"on_sampler_loss": "on_worker_loss", "max_sampler_restarts": "max_worker_restarts"}
_PEER_FLAGS = {"n_eval_episodes": "episodes", "render": "video", "render_mode": "video"}
"""As `PEER_NAMES`, for flags that are no settings."""
REMOVED = {"is_clip"}
"""Settings of former versions that have no successor."""
VALUES = {("inference", "sampler"): "worker"}


def rename_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` with today's names and values; ConfigError if one has both of its names."""
    for old, new in NAMES.items():
        if old in settings and new in settings:
            raise ConfigError(
                f"{old}={settings[old]!r} and {new}={settings[new]!r}: {old} is the former name of "
                f"{new}, and one of the two was expected.\nLeave {old} out."
            )
    renamed = {NAMES.get(name, name): value for name, value in settings.items()}
    for (name, old_value), value in VALUES.items():
        if renamed.get(name) == old_value:
            renamed[name] = value
    return renamed


def settings_of_file(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file that a former version may have written, for today's version."""
    kept = {name: value for name, value in settings.items() if name not in REMOVED}
    return rename_settings(kept)


def refuse_peer_flags(names: Collection[str], known: Collection[str]) -> None:
    """Raise ConfigError for a flag of another library, where this command has one like it."""
    theirs = PEER_NAMES | _PEER_FLAGS
    for name in names:
        if name not in known and theirs.get(name) in known:
            raise ConfigError(f"There is no {flag(name)}. Did you mean {flag(theirs[name])}?")
