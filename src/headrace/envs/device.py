"""Environments that live on a device, as one vector. Left out: their kinds (beside this)."""

from collections.abc import Sequence

import torch

from headrace.envs.api import Guards
from headrace.envs.kernel import Target
from headrace.envs.kernel_vector import KernelVector
from headrace.envs.make import EnvMaker
from headrace.meter import Meter
from headrace.spec import Agents, Array, EnvSpec


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
    guards: Guards,
    role: str = "env",
    last_episodes: int = 0,
) -> KernelVector:
    """Make the environments `env_id` on a device; args are those of `KernelVector`."""
    env = maker.kernel()
    assert env is not None, maker.name
    target: Target = "cuda" if device.type == "cuda" else "cpu"
    return KernelVector(
        env,
        spec,
        env_id,
        seed,
        meter,
        parts=parts,
        target=target,
        num_threads=num_threads,
        guards=guards,
        role=role,
        last_episodes=last_episodes,
    )
