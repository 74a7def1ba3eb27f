"""Environments that live on a device, as one vector. Left out: their kinds (beside this)."""

import torch

from headrace.envs.api import Guards
from headrace.envs.kernel import Target
from headrace.envs.kernel_vector import KernelVector
from headrace.envs.make import EnvMaker
from headrace.meter import Meter
from headrace.spec import Array, EnvSpec


def device_vector(
    maker: EnvMaker,
    spec: EnvSpec,
    env_id: Array,
    seed: int,
    meter: Meter,
    *,
    device: torch.device,
    num_threads: int,
    guards: Guards,
) -> KernelVector:
    """Make the environments `env_id` on a device; args are those of `KernelVector`."""
    env = maker.kernel()
    assert env is not None, maker.name
    target: Target = "cuda" if device.type == "cuda" else "cpu"
    return KernelVector(
        env, spec, env_id, seed, meter, target=target, num_threads=num_threads, guards=guards
    )
