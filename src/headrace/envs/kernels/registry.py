"""Ids of kernel environments in Gymnasium's registry; nothing here imports torch or Numba."""

import inspect
from collections.abc import Callable
from typing import Any, cast

import gymnasium

from headrace.envs.kernels.env import KernelEnv
from headrace.errors import EnvNotFoundError, UsageError
from headrace.importing import load_callable

_VECTOR_ENTRY_POINT = "headrace.envs.kernels.gym_adapter:KernelGymVectorEnv"


def register(env_id: str, kernel_env: type[KernelEnv]) -> None:
    """Register an id, such as `mine/Game-v0`, for Gymnasium and for `headrace train`.

    Args:
        kernel_env: a class at the top level of its module. If its constructor takes
            `max_episode_steps`, the default must equal the class attribute.
    """
    gymnasium.register(
        env_id,
        entry_point="headrace.envs.kernels.gym_adapter:from_registry",
        vector_entry_point=_VECTOR_ENTRY_POINT,
        max_episode_steps=kernel_env.max_episode_steps or None,
        kwargs={"kernel_env": f"{kernel_env.__module__}:{kernel_env.__qualname__}"},
    )


def registered_class(env_id: str) -> type[KernelEnv] | None:
    """Return the class that was registered with this id; None if `register` did not make it."""
    spec = gymnasium.registry.get(env_id)
    if spec is None or spec.vector_entry_point != _VECTOR_ENTRY_POINT:
        return None
    kernel_env = load_callable(spec.kwargs["kernel_env"], EnvNotFoundError)
    return cast(type[KernelEnv], kernel_env)


def check_kwargs(name: str, function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Raise UsageError if the function `name` does not take these arguments."""
    try:
        inspect.signature(function).bind(**kwargs)
    except TypeError as error:
        raise UsageError(
            f"{name} does not take the arguments {kwargs}: {error}.\n"
            "Its arguments: --env-kwargs NAME=VALUE ..., in Python env_kwargs={...}."
        ) from None
    except ValueError:
        pass  # built-ins have no signature


def build(kernel_env: str | type[KernelEnv] | KernelEnv, **kwargs: Any) -> KernelEnv:
    """Build a kernel environment.

    Args:
        kernel_env: `module:Class`, a class, or an environment (then without kwargs).
        **kwargs: arguments of the constructor. `max_episode_steps` is allowed for every class;
            below 1: no limit.

    Raises:
        EnvNotFoundError: there is no such class, or it is no kernel environment.
        UsageError: the class does not take these arguments.
    """
    if isinstance(kernel_env, KernelEnv):
        if kwargs:
            name = type(kernel_env).__name__
            raise UsageError(f"{name} is an object already, and takes no arguments: {kwargs}.")
        return kernel_env
    cls: Any = kernel_env
    if isinstance(kernel_env, str):
        cls = load_callable(kernel_env, EnvNotFoundError)
    if not (isinstance(cls, type) and issubclass(cls, KernelEnv)):
        raise EnvNotFoundError(
            f"{kernel_env!r}: expected a subclass of headrace's KernelEnv, its module:Class, or an "
            "object of it."
        )
    arguments, limit = dict(kwargs), None
    if "max_episode_steps" in kwargs:
        limit = arguments["max_episode_steps"] = max(0, kwargs["max_episode_steps"])
        if "max_episode_steps" not in inspect.signature(cls).parameters:
            del arguments["max_episode_steps"]
    check_kwargs(cls.__name__, cls, arguments)
    env = cls(**arguments)
    if limit is not None:
        env.max_episode_steps = limit
    return env
