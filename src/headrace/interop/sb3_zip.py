"""Reads a model file of Stable-Baselines3, without running anything of it.

The file is a zip. Its tensors (`policy.pth`) are read by torch with `weights_only`. Its `data` are
JSON, in which objects that are not plain are pickles in base64, beside what of them is readable:
the pickles are left alone. Left out: what tensors and settings mean (`sb3_weights.py`,
`sb3_settings.py`).
"""

import io
import json
import re
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from headrace.errors import CheckpointError
from headrace.interop.sb3_settings import DEFAULTS
from headrace.storage.files import memory_bytes
from headrace.storage.metrics import is_number
from headrace.storage.torch_file import load_plain

_MAX_JSON_BYTES = 1 << 26
_PICKLE = ":serialized:"
_ALGORITHMS = {"stable_baselines3.dqn.policies": "dqn", "stable_baselines3.sac.policies": "sac"}
_ACTOR_CRITIC = "stable_baselines3.common.policies"
_OTHERS = {
    "stable_baselines3.td3.": "TD3 or DDPG",
    "sb3_contrib.common.recurrent.": "RecurrentPPO",
    "sb3_contrib.common.maskable.": "MaskablePPO",
    "sb3_contrib.": "an algorithm of sb3-contrib",
}
READ = ("ppo", "a2c", "dqn", "sac")
"""The algorithms whose models are read."""
_SCHEDULE = re.compile(r"ConstantSchedule\(val=([-+.0-9e]+)\)")


@dataclass(frozen=True)
class Sb3Model:
    """What a model file holds.

    Attributes:
        algo: one of `READ`.
        data: the readable part of its settings; of an object the names and values that stand beside
            its pickle.
        policy: the policy's tensors, by their names there.
        variables: other tensors that are learned.
    """

    path: Path
    algo: str
    data: dict[str, Any]
    policy: dict[str, Tensor]
    variables: dict[str, Tensor]

    def number(self, name: str) -> float | int | None:
        """Return a number of `data`; None if it has none there that can be read."""
        value = self.data.get(name)
        if isinstance(value, Mapping):  # a schedule that is constant
            match = _SCHEDULE.fullmatch(str(value.get("value_schedule", "")))
            value = float(match[1]) if match else None
        return value if is_number(value) else None

    def object(self, name: str) -> dict[str, Any]:
        """Return what is readable of an object; {} if nothing is."""
        value = self.data.get(name)
        return dict(value) if isinstance(value, Mapping) else {}

    def kind(self, name: str) -> str:
        """Return the name of an object's class, such as `Box`; "" if there is none."""
        return str(self.object(name).get(":type:", "")).rpartition(".")[2].strip("'>")

    def arguments(self) -> tuple[dict[str, Any], list[str]]:
        """Return the constructor's arguments, as `translate` takes them, and which are unreadable.

        The entropy to aim at is left out: there it is of a whole action.
        """
        found: dict[str, Any] = {"policy_kwargs": self._plain("policy_kwargs")}
        unread = []
        for name in ("n_envs", "seed", *DEFAULTS[self.algo]):
            value = self.data.get(name)
            if isinstance(value, Mapping):
                value = self.number(name)
                unread += [name] if value is None else []
            if isinstance(value, int | float | str):
                found[name] = value
        found.pop("target_entropy", None)
        if ".her." in str(self.object("replay_buffer_class").get("__module__", "")):
            found["replay_buffer_class"] = "HerReplayBuffer"
            found["replay_buffer_kwargs"] = self._plain("replay_buffer_kwargs")
        return found, [name for name in unread if name != "replay_buffer_class"]

    def _plain(self, name: str) -> dict[str, Any]:
        return {key: value for key, value in self.object(name).items() if key != ":type:"}


def read_model(path: Path, algo: str = "") -> Sb3Model:
    """Read a model file.

    Args:
        path: what `model.save` was given, with `.zip` or without.
        algo: which algorithm wrote it, one of `READ`; "": what the file says.

    Raises:
        CheckpointError: it cannot be read, has more than plain tensors where tensors should be, or
            is of an algorithm that is not read.
    """
    if not path.suffix and not path.exists():  # save() adds it, and load() takes the name without
        path = path.with_name(f"{path.name}.zip")
    try:
        with zipfile.ZipFile(path) as file:
            data = _json(path, _member(path, file, "data", _MAX_JSON_BYTES))
            policy = _tensors(path, file, "policy.pth")
            variables = {}
            if "pytorch_variables.pth" in file.namelist():
                variables = _tensors(path, file, "pytorch_variables.pth")
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}.\nExpected a zip, as Stable-Baselines3's "
            "model.save() writes it."
        ) from None
    return Sb3Model(path, _algorithm(path, data, algo), data, policy, variables)


def _member(path: Path, file: zipfile.ZipFile, name: str, most_bytes: int) -> bytes:
    """Return the content of one file in the zip."""
    if name not in file.namelist():
        raise CheckpointError(
            f"{path} has no {name}: expected a model of Stable-Baselines3, as model.save() "
            "writes it."
        )
    if (size := file.getinfo(name).file_size) > most_bytes:
        raise CheckpointError(f"{path}: its {name} has {size:,} bytes, more than can be read here.")
    return file.read(name)


def _json(path: Path, text: bytes) -> dict[str, Any]:
    """Return `data` without its pickles."""
    try:
        data = json.loads(text, object_pairs_hook=_without_pickle)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its data are no JSON ({error}).") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: its data are {type(data).__name__}, not a dict.")
    return data


def _without_pickle(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in pairs if name != _PICKLE}


def _tensors(path: Path, file: zipfile.ZipFile, name: str) -> dict[str, Tensor]:
    """Return the named tensors of a file that torch wrote."""
    data = io.BytesIO(_member(path, file, name, memory_bytes()))
    found = load_plain(data, f"{path}: its {name}", "Expected what model.save() writes.")
    is_plain = isinstance(found, dict) and all(isinstance(of, Tensor) for of in found.values())
    if not is_plain:
        raise CheckpointError(f"{path}: its {name} is no dict of tensors.")
    return {str(key): tensor.detach() for key, tensor in found.items()}


def _algorithm(path: Path, data: Mapping[str, Any], asked: str) -> str:
    """Return which algorithm wrote the file; CheckpointError if it is not read."""
    policy = data.get("policy_class")
    module = str(policy.get("__module__", "")) if isinstance(policy, Mapping) else ""
    found = _ALGORITHMS.get(module, "")
    if module == _ACTOR_CRITIC:
        found = "ppo" if "n_epochs" in data else "a2c"
        if "cg_max_steps" in data:
            module, found = "sb3_contrib.", ""
    known = ", ".join(name.upper() for name in READ)
    for start, name in _OTHERS.items():
        if module.startswith(start):
            raise CheckpointError(
                f"{path} is a model of {name}, which is not read: expected one of {known}.\n"
                "Train it anew: docs/import.md says how its settings are translated."
            )
    if asked and found and asked != found:
        raise CheckpointError(
            f"--algo {asked}, but {path} is a model of {found}.\nLeave --algo out."
        )
    if not (found or asked):
        raise CheckpointError(
            f"{path} does not say which algorithm wrote it (its policy is of "
            f"{module or 'an unknown class'}).\nSay it: --algo {', '.join(READ)}."
        )
    return found or asked
