"""The normalizer of a run of Stable-Baselines3 (VecNormalize), from arrays in an .npz file.

The script in docs/import.md writes such a file where Stable-Baselines3 is installed. Left out: its
own file, which is a pickle; other limits of clipping, and images, which are refused.
"""

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.errors import CheckpointError
from headrace.models.networks import image_layout
from headrace.models.normalization import CLIP, EPS, RunningMoments
from headrace.models.policy import Policy
from headrace.spec import Array, EnvSpec

_MOMENTS = ("mean", "var", "count")
_REWARD = "reward"


@dataclass(frozen=True)
class Normalizer:
    """Running moments: of each key of an observation ("" of one that is no Dict), and of returns.

    Attributes:
        obs: key -> mean, variance and count; {}: observations are not normalized.
        reward: mean, variance and count of returns; None: rewards are not normalized.
    """

    path: Path
    obs: dict[str, dict[str, Array]]
    reward: dict[str, Array] | None

    def settings(self) -> dict[str, Any]:
        """Return the settings of the network that has these normalizers."""
        return {"normalize_obs": bool(self.obs), "normalize_reward": self.reward is not None}

    def load_into(self, policy: Policy, spec: EnvSpec) -> None:
        """Set the normalizers of a policy; CheckpointError if they are of other observations."""
        if self.obs and policy.normalize_obs is not None:
            boxes = {key: part for key, part in spec.seen.leaves if part.kind == "box"}
            if any(image_layout(part) is not None for part in boxes.values()):
                self._refuse("it normalizes each pixel of images, and Headrace each channel")
            if set(boxes) != set(self.obs):
                self._refuse(
                    f"it normalizes {_words(self.obs)}, and Headrace would normalize "
                    f"{_words(boxes)} of {spec.id}"
                )
            for key in boxes:
                self._set(policy.normalize_obs.of(key), self.obs[key], f"observation {key}".strip())
        if self.reward is not None and policy.normalize_reward is not None:
            self._set(policy.normalize_reward, self.reward, _REWARD)

    def _set(self, moments: RunningMoments, found: dict[str, Array], what: str) -> None:
        for name in _MOMENTS:
            own: torch.Tensor = getattr(moments, name)
            if found[name].shape != tuple(own.shape):
                self._refuse(
                    f"{name} of the {what} has the shape {found[name].shape}, expected "
                    f"{tuple(own.shape)}"
                )
            own.copy_(torch.from_numpy(np.asarray(found[name], dtype=np.float64)))

    def _refuse(self, why: str) -> None:
        raise CheckpointError(f"The normalizer {self.path} does not fit: {why}.")


def read_normalizer(path: Path) -> Normalizer:
    """Read an .npz file, whose arrays are plain numbers: none is unpickled.

    Raises:
        CheckpointError: it cannot be read, lacks an array, or normalizes in another way.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: np.asarray(file[name]) for name in file.files}
    except (OSError, ValueError, TypeError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        # NumPy's own words on pickles advise to load them.
        why = "it is no .npz file of numbers" if "pickle" in str(error) else error
        raise CheckpointError(
            f"The normalizer {path} cannot be read: {why}.\nExpected an .npz file, as the script "
            "in docs/import.md writes it."
        ) from None
    for name, array in arrays.items():
        is_usable = array.dtype.kind in "iuf" and np.isfinite(array).all()
        if not is_usable or ("_var" in name and (array < 0).any()):
            raise CheckpointError(
                f"The normalizer {path}: its {name} has other than usable numbers."
            )
        if name in ("clip_obs", "clip_reward", "epsilon") and array.size != 1:
            raise CheckpointError(f"The normalizer {path}: its {name} is not one number.")
    for name, expected in (("clip_obs", CLIP), ("clip_reward", CLIP), ("epsilon", EPS)):
        if name in arrays and float(arrays[name]) != expected:
            raise CheckpointError(
                f"The normalizer {path} has {name}={float(arrays[name]):g}: Headrace's has "
                f"{expected:g}, so that actions or values would differ.\nTrain it anew."
            )
    try:
        obs = {
            name.removeprefix("obs_mean").removeprefix("."): {
                of: arrays[name.replace("obs_mean", f"obs_{of}", 1)] for of in _MOMENTS
            }
            for name in arrays
            if name.startswith("obs_mean")
        }
        reward = None
        if "reward_mean" in arrays:
            reward = {of: arrays[f"reward_{of}"] for of in _MOMENTS}
    except KeyError as error:
        raise CheckpointError(f"The normalizer {path} has no array {error}.") from None
    if not obs and reward is None:
        raise CheckpointError(
            f"The normalizer {path} has neither obs_mean nor reward_mean: expected an .npz file as "
            "the script in docs/import.md writes it."
        )
    return Normalizer(path, obs, reward)


def _words(keys: Any) -> str:
    return ", ".join(sorted(key or "the observation" for key in keys))
