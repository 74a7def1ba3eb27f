"""Makes a vector of environments of any interface."""

import torch

from headrace.envs.api import VectorContext, VectorEnv
from headrace.envs.episodes import DeviceVector
from headrace.envs.factory import EnvMaker, make_all
from headrace.envs.gym.native_vector import NativeVector
from headrace.envs.gym.python_vector import GymVector
from headrace.envs.kernels.vector import KernelVector
from headrace.envs.pettingzoo_vector import ParallelVector
from headrace.envs.tensor_vector import TensorVector
from headrace.errors import UsageError
from headrace.spec import EnvSpec


def make_vector(maker: EnvMaker, context: VectorContext) -> VectorEnv:
    """Make the environments `context.env_id`, stepped in the form that `maker` says.

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
        return KernelVector(kernel, context)
    num_envs = len(context.env_id)
    if maker.native:
        return NativeVector(maker.vector(num_envs, context.num_threads), context)
    return GymVector(make_all(maker, num_envs), context, remake=maker)


def is_one_vector(maker: EnvMaker, spec: EnvSpec) -> bool:
    """Return whether all environments are one vector, which `device_vector` makes."""
    is_compiled = maker.native and not maker.wrappers
    return spec.interface in ("tensor", "parallel") or (spec.interface == "kernel" and is_compiled)


def device_vector(maker: EnvMaker, context: VectorContext, device: torch.device) -> DeviceVector:
    """Make the environments `context.env_id` as one vector, on the learner's device.

    Raises:
        UsageError: they cannot be made as one.
        EnvError: making them raised.
    """
    num_envs, interface = len(context.env_id), context.spec.interface
    if interface == "tensor":
        return TensorVector(maker.tensors(num_envs, str(device)), context, device)
    if interface == "parallel":
        return ParallelVector(make_all(maker, num_envs), context)
    env = maker.kernel()
    assert env is not None, maker.name
    return KernelVector(env, context, target="cuda" if device.type == "cuda" else "cpu")
