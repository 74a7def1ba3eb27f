"""Steps of a Minari data set (https://minari.farama.org). Minari is an extra."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.errors import ConfigError, MissingExtraError, install_command
from headrace.replay.steps import Steps, joined
from headrace.spec import ActionCodec, EnvSpec, Space, getter

_ROUNDING = 1e-3  # of half a component's range


def read_minari(source: str, spec: EnvSpec) -> Steps:
    """Return the steps of a data set.

    Args:
        source: its directory, or its id among those that are installed.

    Raises:
        ConfigError: there is none, or it has other spaces.
        MissingExtraError: Minari is not installed.
    """
    try:
        import minari
    except ImportError:
        raise MissingExtraError(
            f"data={source!r} is no directory of a run. To read a Minari data set, install "
            f"Minari:\n{install_command('minari')}"
        ) from None
    try:
        is_dir = Path(source).is_dir()
        data = (
            minari.MinariDataset(Path(source) / "data") if is_dir else minari.load_dataset(source)
        )
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise ConfigError(
            f"data={source!r} is no directory of a run, and no Minari data set ({error}).\n"
            "Expected such a directory, or the id of a data set that is installed."
        ) from None
    return joined([_episode(episode, spec, source) for episode in data.iterate_episodes()])


def _has_action(elements: Any, space: Space) -> bool:
    """Return whether actions `[n, ...]` are of a space; a bound may be passed by rounding."""
    if space.parts:
        keys = [key for key, _ in space.parts]
        of_parts = [elements[key] for key in keys] if hasattr(elements, "keys") else elements
        pairs = zip(of_parts, space.parts, strict=True)
        return all(_has_action(part, of) for part, (_, of) in pairs)
    values, codec = np.asarray(elements), ActionCodec(space)
    if values.shape[1:] != space.shape or (space.kind != "box" and values.dtype.kind not in "iub"):
        return False
    flat = values.reshape(len(values), -1)
    margin = _ROUNDING * np.abs(codec.scale) if space.kind == "box" else 0
    return bool(((flat >= codec.low - margin) & (flat <= codec.high + margin)).all())


def _episode(episode: Any, spec: EnvSpec, source: str) -> Steps:
    obs = {}
    for (key, part), path in zip(spec.observation.leaves, spec.observation.key_paths, strict=True):
        values = np.asarray(getter(path)(episode.observations))
        if values.shape[1:] != part.shape:
            raise ConfigError(
                f"data={source!r} has observations {key or 'of shape'} {values.shape[1:]}, and "
                f"those of {spec.id} are {part.shape}.\nName the environment of the data."
            )
        obs[key] = torch.from_numpy(values.astype(part.dtype))
    if not _has_action(episode.actions, spec.action):
        raise ConfigError(
            f"data={source!r} has actions that are not in {spec.action.describe()}, those of "
            f"{spec.id}.\nName the environment of the data."
        )
    count = len(episode.rewards)
    terminated, truncated = (
        torch.from_numpy(np.array(flags, dtype=bool))
        for flags in (episode.terminations, episode.truncations)
    )
    truncated &= ~terminated
    truncated[-1] = ~terminated[-1]  # what was not recorded to its end is cut off there
    of_step = {key: values[:count] for key, values in obs.items()}
    final = {key: values[1 : count + 1][truncated] for key, values in obs.items()}
    is_dict = spec.observation.kind == "dict"
    return Steps(
        of_step if is_dict else of_step[""],
        torch.from_numpy(ActionCodec(spec.action).from_env(episode.actions)),
        torch.from_numpy(np.array(episode.rewards, dtype=np.float32)),
        terminated,
        truncated,
        final if is_dict else final[""],
    )
