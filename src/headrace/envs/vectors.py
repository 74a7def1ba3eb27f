"""Makes a vector of environments of any interface."""

import torch

from headrace.envs.api import VectorContext, VectorEnv
from headrace.envs.episodes import DeviceVector
from headrace.envs.factory import EnvMaker, make_all
from headrace.envs.games.vector import GameVector
from headrace.envs.gym.native_vector import NativeVector
from headrace.envs.gym.python_vector import GymVector
from headrace.envs.kernels.vector import KernelVector
from headrace.envs.tensor_vector import TensorVector
from headrace.spec import GAMES, EnvSpec


def make_vector(maker: EnvMaker, context: VectorContext) -> VectorEnv:
    """Make the environments `context.env_id`, stepped in the form that `maker` says.

    Raises:
        EnvError: an environment could not be made.
        UsageError: a game does not always have the same agents.
        MissingExtraError: it needs a package that is not installed.
    """
    if (kernel := maker.kernel()) is not None:
        return KernelVector(kernel, context)
    num_envs = len(context.env_id)
    if maker.native:
        return NativeVector(maker.vector(num_envs, context.num_threads), context)
    kind = GameVector if context.spec.interface in GAMES else GymVector
    return kind(make_all(maker, num_envs), context, remake=maker)


def is_one_vector(maker: EnvMaker, spec: EnvSpec) -> bool:
    """Return whether all environments can be one vector, which `device_vector` makes."""
    is_compiled = maker.native and not maker.wrappers
    return spec.interface == "tensor" or (spec.interface == "kernel" and is_compiled)


def device_vector(maker: EnvMaker, context: VectorContext, device: torch.device) -> DeviceVector:
    """Make the environments `context.env_id` as one vector, on the learner's device.

    Raises:
        UsageError: they cannot be made as one.
        EnvError: making them raised.
    """
    num_envs, interface = len(context.env_id), context.spec.interface
    if interface == "tensor":
        return TensorVector(maker.tensors(num_envs, str(device)), context, device)
    env = maker.kernel()
    assert env is not None, maker.name
    return KernelVector(env, context, target="cuda" if device.type == "cuda" else "cpu")
