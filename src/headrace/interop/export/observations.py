"""Inputs to check an exported policy with: observations drawn at random, states, and noise.

Left out: observations of the environment (`evaluation/evaluate.py`), the comparison (`check.py`).
"""

import numpy as np
import torch
from torch import Tensor

from headrace.batch import Obs
from headrace.interop.export.arrays import observed_arrays
from headrace.models.normalization import NormalizeObs
from headrace.models.policy import Policy
from headrace.seeding import action_noise
from headrace.spec import Array, EnvSpec, Space

_DEVIATIONS = (0.1, 1.0, 3.0, 30.0)  # of random numbers; the last ones leave what is usual
_MOST_OF_INTEGERS = 100
_STEPS_TO_STATES = 3


def random_observations(spec: EnvSpec, policy: Policy, num_rows: int, seed: int) -> Obs:
    """Return random elements of the observation space as they are stored, `[num_rows, ...]`.

    Numbers without bounds are around what the policy's normalizer has seen, or else around 0.
    """
    random = np.random.default_rng(seed)
    drawn = dict[str, Tensor]()
    for key, space in spec.observation.leaves:
        if key == spec.mask_key and key:
            array = _masks(spec.action.nvec, num_rows, random).reshape(num_rows, *space.shape)
        else:
            array = _elements(space, num_rows, random)
            if policy.normalize_obs is not None and space.dtype == "float32":
                array = _as_seen(policy.normalize_obs, key, array)
        drawn[key] = torch.from_numpy(array.astype(space.dtype))
    return drawn if spec.observation.kind == "dict" else drawn[""]


def _elements(space: Space, num_rows: int, random: np.random.Generator) -> Array:
    found: Array
    shape = (num_rows, *space.shape)
    if space.nvec:
        choices = np.floor(random.random(shape) * np.reshape(space.nvec, space.shape))
        found = choices + np.reshape(space.start, space.shape)
    elif space.kind == "multi_binary" or space.dtype == "bool":
        found = random.integers(0, 2, shape)
    elif space.dtype == "float32":
        deviation = np.resize(_DEVIATIONS, num_rows).reshape(-1, *(1 for _ in space.shape))
        found = random.standard_normal(shape) * deviation
    else:
        info = np.iinfo(space.dtype)
        most = 255 if space.dtype == "uint8" else min(_MOST_OF_INTEGERS, info.max)
        found = random.integers(max(-most, info.min), most + 1, shape)
    return found


def _as_seen(normalizer: NormalizeObs, key: str, array: Array) -> Array:
    """Return numbers of mean 0 with the mean and deviation that the normalizer has seen."""
    mean, scale = (each.numpy() for each in normalizer.of(key).scaling())
    seen: Array = array / scale + mean
    return seen


def _masks(nvec: tuple[int, ...], num_rows: int, random: np.random.Generator) -> Array:
    """Return masks that allow at least one choice of each component."""
    masks = random.integers(0, 2, (num_rows, sum(nvec)))
    first = 0
    for count in nvec:
        masks[np.arange(num_rows), first + random.integers(0, count, num_rows)] = 1
        first += count
    return masks


@torch.no_grad()
def states_for(policy: Policy, obs: Obs, num_rows: int) -> Tensor:
    """Return recurrent states to check with: zeros, and such as a few steps lead to."""
    state = torch.zeros(num_rows, policy.state_size)
    if policy.state_size:
        for _ in range(_STEPS_TO_STATES):
            state = policy.one_row(obs, state)[2]["state"].roll(1, 0)
        state[::4] = 0.0
    return state


def noise_for(policy: Policy, num_rows: int, seed: int) -> Tensor:
    """Return noise for the actions of so many rows, as it is drawn in training."""
    drawn = action_noise(seed, np.arange(num_rows), 0, 1, policy.num_draws)
    return torch.from_numpy(drawn[0])


def inputs_of(spec: EnvSpec, obs: Obs) -> dict[str, Tensor]:
    """Return stored observations as inputs of the exported policy, by name."""
    return {
        array.name: obs[key] if isinstance(obs, dict) else obs
        for key, array in observed_arrays(spec)
    }
