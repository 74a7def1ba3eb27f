"""Kernel environments by name: ids in Gymnasium's registry, and an environment from its class.

Nothing here imports torch or Numba: registering an id costs nothing. Left out: what an id is made
into (`gym_adapter.py`, `vector.py`).
"""

import inspect
from typing import Any

import gymnasium

from headrace.envs.kernels.env import KernelEnv
from headrace.errors import EnvNotFoundError, UsageError
from headrace.importing import load_callable

_VECTOR_FORM = "headrace.envs.kernels.gym_adapter:KernelGymVectorEnv"


def register(env_id: str, kernel_env: type[KernelEnv]) -> None:
    """Give a kernel environment an id, for Gymnasium and for `headrace train`.

    Args:
        env_id: such as `mine/Game-v0`.
        kernel_env: its class, which its module has by its name. Where it takes a
            `max_episode_steps`, the default is that of the class.
    """
    gymnasium.register(
        env_id,
        entry_point="headrace.envs.kernels.gym_adapter:from_registry",
        vector_entry_point=_VECTOR_FORM,
        max_episode_steps=kernel_env.max_episode_steps or None,
        kwargs={"kernel_env": f"{kernel_env.__module__}:{kernel_env.__qualname__}"},
    )


def registered(env_id: str) -> type[KernelEnv] | None:
    """The class of which `register` made this id; None if the id is another's, or there is none."""
    spec = gymnasium.registry.get(env_id)
    if spec is None or spec.vector_entry_point != _VECTOR_FORM:
        return None
    return _loaded(spec.kwargs["kernel_env"])


def build(kernel_env: str | type[KernelEnv] | KernelEnv, **kwargs: Any) -> KernelEnv:
    """A kernel environment from what names it.

    Args:
        kernel_env: `module:Class`, the class, or the environment itself (which takes no kwargs).
        **kwargs: of its constructor. `max_episode_steps` is always taken; below 1: no limit.

    Raises:
        EnvNotFoundError: there is no such class.
        UsageError: it does not take these, or makes no kernel environment.
    """
    if isinstance(kernel_env, KernelEnv):
        if kwargs:
            raise UsageError(
                f"A {type(kernel_env).__name__} that is made already takes no {kwargs}."
            )
        return kernel_env
    kernel = _loaded(kernel_env) if isinstance(kernel_env, str) else kernel_env
    if not (isinstance(kernel, type) and issubclass(kernel, KernelEnv)):
        raise UsageError(
            f"{kernel!r} is a {type(kernel).__name__}; expected a subclass of headrace's "
            "KernelEnv, module:Class, or one that is made already."
        )
    own, limit = dict(kwargs), None
    if "max_episode_steps" in kwargs:
        limit = own["max_episode_steps"] = max(0, kwargs["max_episode_steps"])
        if "max_episode_steps" not in inspect.signature(kernel).parameters:
            del own["max_episode_steps"]
    try:
        inspect.signature(kernel).bind(**own)
    except TypeError as error:
        raise UsageError(f"{kernel.__name__} does not take env_kwargs={kwargs}: {error}") from None
    env = kernel(**own)
    if limit is not None:
        env.max_episode_steps = limit
    return env


def _loaded(text: str) -> type[KernelEnv]:
    kernel_env = load_callable(text, EnvNotFoundError)
    if not (isinstance(kernel_env, type) and issubclass(kernel_env, KernelEnv)):
        raise EnvNotFoundError(f"{text}: expected a subclass of headrace's KernelEnv.")
    return kernel_env
