"""A vector of environments of any kind.

Left out: stepping it (`python_vector.py`, `native_vector.py`, `vector.py`).
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.envs.api import GUARDS, Guards, VectorEnv
from headrace.envs.factory import EnvMaker, make_all
from headrace.envs.gym.native_vector import NativeVector
from headrace.envs.gym.python_vector import GymVector
from headrace.envs.kernels.compiler import Target
from headrace.envs.kernels.vector import KernelVector
from headrace.envs.pettingzoo_vector import ParallelVector
from headrace.envs.tensor_vector import TensorVector
from headrace.errors import UsageError
from headrace.meter import Meter
from headrace.spec import Agents, Array, EnvSpec


def make_vector(
    maker: EnvMaker,
    spec: EnvSpec,
    env_id: Array,
    seed: int,
    meter: Meter,
    *,
    num_threads: int,
    role: str = "env",
    reseed: bool = True,
    replay_limit_s: float = 30.0,
    sampler: str = "inline",
    guards: Guards = GUARDS,
) -> VectorEnv:
    """Make the environments `env_id` and step them in the form that `maker` says.

    Args are those of `GymVector` and `EnvMaker.vector`.

    Raises:
        EnvError: an environment could not be made.
        UsageError: it is a kernel environment of several agents.
        MissingExtraError: it needs a package that is not installed.
    """
    if (kernel := maker.kernel()) is not None:
        if kernel.agents:
            raise UsageError(
                f"{maker.name} is a game of several agents ({', '.join(kernel.agents)}); expected "
                "one agent in each environment of a vector."
            )
        return KernelVector(
            kernel, spec, env_id, seed, meter,
            num_threads=num_threads, role=role, sampler=sampler, guards=guards,
        )  # fmt: skip
    if maker.native:
        native = maker.vector(len(env_id), num_threads)
        return NativeVector(
            native, spec, env_id, seed, meter, role=role, sampler=sampler, guards=guards
        )
    return GymVector(
        make_all(maker, len(env_id)),
        spec,
        env_id,
        seed,
        meter,
        role=role,
        reseed=reseed,
        replay_limit_s=replay_limit_s,
        sampler=sampler,
        guards=guards,
        remake=maker,
    )


# Environments that are stepped as one vector where the learner is: which, and by what.


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
