"""`headrace import-zoo`: settings of RL Zoo become a `--config` file of Headrace.

Here are the environment, its wrappers and normalizers. Left out: reading RL Zoo's file
(`zoo_file.py`), and the settings of algorithms and networks (`sb3_settings.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config.algorithms import ALGORITHMS
from headrace.config.checks import checked_values
from headrace.config.run_config import RunConfig
from headrace.errors import ConfigError
from headrace.interop.sb3_settings import DEFAULTS, translate
from headrace.interop.zoo_file import ATARI, read_entry, split_unread
from headrace.models.normalization import CLIP
from headrace.models.policy import Network
from headrace.storage.files import write_output
from headrace.storage.toml_text import toml_text

_ATARI_WRAPPER = "AtariWrapper"


@dataclass(frozen=True)
class Converted:
    """A file of settings that was made from an entry of RL Zoo's.

    Attributes:
        notes: what was not understood, or has no counterpart.
    """

    output: Path
    settings: dict[str, Any]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return vars(self) | {"output": str(self.output)}

    def describe(self) -> str:
        """Return where the settings are, and what was not taken over."""
        notes = [f"  {note}" for note in self.notes]
        return "\n".join(
            [
                f"Settings: {self.output}",
                *(["Not taken over, or not alike:", *notes] if notes else []),
                f"To train with them: headrace train {self.settings['env']} --config {self.output}",
            ]
        )


def import_zoo(path: Path, env: str, *, algo: str = "", output: Path | None = None) -> Converted:
    """Write the `--config` file for an environment's entry in a file of RL Zoo's.

    Args:
        path: RL Zoo's file, named after its algorithm, or a run's `config.yml`.
        env: the entry.
        algo: the algorithm, if the file is not named after it.
        output: the new file; default: named after environment and algorithm, in this directory.

    Raises:
        ConfigError: there is no such entry or algorithm, a value is not one that Headrace takes,
            or the new file exists or cannot be written.
        MissingExtraError: PyYAML is not installed.
    """
    algo = (algo or path.stem).lower()
    if algo not in DEFAULTS:
        raise ConfigError(
            f"The settings in {path} are of {algo}: expected {', '.join(DEFAULTS)}.\nIf the file "
            "has another name than its algorithm, say it: --algo ppo."
        )
    settings, notes = convert(algo, env, read_entry(path, env))
    plain = settings["env"].rpartition("/")[2]
    output = output or Path(f"{plain}_{algo}.toml")
    if output.exists():
        raise ConfigError(f"{output} exists already.\nName another file: --output FILE.")
    about = [f"Settings of RL Zoo for {env}, from {path.name}, with their meaning in Headrace."]
    about += ["Not taken over, or not alike:", *(f"  {note}" for note in notes)] if notes else []
    write_output(output, toml_text(about, settings).encode())
    return Converted(output, settings, notes)


def convert(algo: str, env: str, entry: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return Headrace's settings for an entry of RL Zoo's, and what could not be translated.

    Raises:
        ConfigError: a value is not one that Headrace takes.
    """
    given, notes = dict[str, Any](), list[str]()
    for name, value in entry.items():
        known, unread = split_unread(value)
        notes += [f"{name}: not understood: {text}" for text in unread]
        if known is not None or not unread:
            given[name] = known
    try:
        of_env = _environment(env, given, notes) | _normalizers(given, notes)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"A value of the settings of {env} is not of the kind that RL Zoo takes: {error}."
        ) from None
    noise, deviation = given.pop("noise_type", None), given.pop("noise_std", None)
    if noise is not None:
        given["action_noise"] = deviation
        if noise != "normal":
            notes.append(f"noise_type={noise}: the noise is Gaussian, new at each step")
    if "n_timesteps" in given:
        of_env["total_env_steps"] = given.pop("n_timesteps")
    translation = translate(algo, given)
    settings = translation.settings | of_env
    groups = (RunConfig, Network, ALGORITHMS[algo].Config)
    return checked_values(settings, groups, "RL Zoo"), [*notes, *translation.notes]


def _environment(env: str, given: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Take the environment's own settings out of `given`, and return Headrace's."""
    settings: dict[str, Any] = {"env": env}
    kwargs = dict(given.pop("env_kwargs", None) or {})
    if kwargs:
        settings["env_kwargs"] = kwargs
    wrappers = given.pop("env_wrapper", None) or []
    names = [wrappers] if isinstance(wrappers, str | Mapping) else list(wrappers)
    frames = given.pop("frame_stack", None)
    game = ATARI.fullmatch(env)
    if game and any(str(name).endswith(_ATARI_WRAPPER) for name in names):
        # ALE's vector form does the same: 84x84 gray, four frames skipped, four stacked
        names = [name for name in names if not str(name).endswith(_ATARI_WRAPPER)]
        # Of the old ids, version 4 alone has no sticky actions; an id of ALE's own has its default
        sticky = {"repeat_action_probability": 0.0} if env.endswith("NoFrameskip-v4") else {}
        settings |= {
            "env": f"ALE/{game[1]}-v5",
            "env_kwargs": sticky | {"episodic_life": True} | kwargs,
            "eval_env_kwargs": {"episodic_life": False},
            "clip_reward": 1.0,
        }
        frames = None if frames == 4 else frames
    notes += [
        f"env_wrapper={name}: name a wrapper of your own by --wrapper module:callable"
        for name in names
    ]
    if frames:
        notes.append(f"frame_stack={frames}: stack frames by a wrapper (--wrapper)")
    return settings


def _normalizers(given: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Take RL Zoo's settings of VecNormalize out of `given`, and return Headrace's."""
    wanted = given.pop("normalize", False)
    named = dict(wanted) if isinstance(wanted, Mapping) else {}
    named |= given.pop("normalize_kwargs", None) or {}
    settings = {
        "normalize_obs": bool(wanted) and named.pop("norm_obs", True),
        "normalize_reward": bool(wanted) and named.pop("norm_reward", True),
    }
    same = {"clip_obs": CLIP, "clip_reward": CLIP, "gamma": given.get("gamma", 0.99)}
    notes += [
        f"normalize: {name}={value}: no counterpart"
        for name, value in named.items()
        if value != same.get(name)
    ]
    return settings
