"""Environments that are stepped as one vector where the learner is: which, and by what.

Left out: their kinds (`vector.py`, `tensor_vector.py`, `pettingzoo_vector.py`).
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.envs.api import GUARDS, Guards, VectorEnv
from headrace.envs.factory import EnvMaker, make_all
from headrace.envs.kernels.compiler import Target
from headrace.envs.kernels.vector import KernelVector
from headrace.envs.pettingzoo_vector import ParallelVector
from headrace.envs.tensor_vector import TensorVector
from headrace.meter import Meter
from headrace.spec import Agents, Array, EnvSpec


class DeviceVector(VectorEnv, Protocol):
    """A `VectorEnv` that writes into fragments on a device, one of each policy.

    Attributes:
        num_ended: how many episodes ended in the last fragment.
        can_be_recorded: whether a step is work for the device only, always in the same memory: a
            CUDA graph of it does the same.
    """

    num_ended: int
    can_be_recorded: bool

    def finals_per_row(self, num_steps: int) -> int:
        """How many final observations of each row there must be a place for."""

    def tensors(self) -> list[Tensor]:
        """What a fragment changes, and can be changed back."""


def is_one_vector(maker: EnvMaker, spec: EnvSpec) -> bool:
    """Whether `device_vector` steps what `maker` makes, of which `env_spec` gave `spec`.

    Kernel environments only where they are compiled: else each is stepped as Gymnasium's are.
    """
    is_compiled = maker.native and not maker.wrappers
    return spec.kind in ("tensor", "parallel") or (spec.kind == "kernel" and is_compiled)


def device_vector(
    maker: EnvMaker,
    spec: EnvSpec,
    env_id: Array,
    seed: int,
    meter: Meter,
    *,
    parts: Sequence[Agents],
    device: torch.device,
    num_threads: int,
    role: str = "env",
    sampler: str = "inline",
    guards: Guards = GUARDS,
    reseed: bool = True,
    last_episodes: int = 0,
) -> DeviceVector:
    """Make the environments `env_id` where they are one vector; args are those of its kinds.

    Raises:
        UsageError: they cannot be.
        EnvError: making them raised.
    """
    common: dict[str, Any] = {
        "role": role,
        "sampler": sampler,
        "guards": guards,
        "last_episodes": last_episodes,
    }
    if spec.kind == "tensor":
        tensors = maker.tensors(len(env_id), str(device))
        return TensorVector(tensors, spec, env_id, seed, meter, device, **common)
    if spec.kind == "parallel":
        games = make_all(maker, len(env_id))
        return ParallelVector(
            games, spec, env_id, seed, meter, parts=parts, reseed=reseed, **common
        )
    env = maker.kernel()
    assert env is not None, maker.name
    target: Target = "cuda" if device.type == "cuda" else "cpu"
    return KernelVector(
        env, spec, env_id, seed, meter,
        parts=parts, target=target, num_threads=num_threads, **common,
    )  # fmt: skip
