"""Kernel environments in Gymnasium's forms, for wrappers, interpreting, and other libraries."""

from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from headrace import batch
from headrace.envs.api import Guards, VectorContext
from headrace.envs.kernels.compiler import Target
from headrace.envs.kernels.env import KernelEnv
from headrace.envs.kernels.registry import build
from headrace.envs.kernels.vector import KernelVector
from headrace.envs.spaces import specs
from headrace.errors import UsageError
from headrace.spec import Array

KernelSource = str | type[KernelEnv] | KernelEnv


def check_discrete_action(space: gymnasium.Space[Any], action: Any) -> None:
    """Raise UsageError for a discrete action outside of the space: the program checks no index."""
    if not isinstance(space, gymnasium.spaces.Box) and not space.contains(action):
        raise UsageError(f"The action {action!r} is not in the action space {space}.")


class KernelStepper:
    """Kernel environments that the caller steps and resets; every result is a new array."""

    def __init__(self, env: KernelEnv, num_envs: int, target: Target, num_threads: int = 1) -> None:
        spec = specs.read_kernel(type(env).__name__, env)
        self._action_dtype = np.float32 if spec.action.kind == "box" else np.int64
        self._num_envs = num_envs
        context = VectorContext(
            spec, np.arange(num_envs), 0,
            worker="", guards=Guards(enabled=False), num_threads=num_threads,
        )  # fmt: skip
        self._vector = KernelVector(env, context, target=target, encoded=False, autoreset=False)
        columns = batch.columns(spec, {}, 1, num_envs * env.num_agents)
        self._fragment = batch.allocate(columns)
        self._started = False

    def reset(self, seed: int | None, rng: np.random.Generator) -> Array:
        """Begin the first episodes of a seed; None: the next ones, at first those of any seed.

        Returns all observations, `[rows, size]`.
        """
        if seed is None and self._started:
            return self.begin_episodes(np.ones(self._num_envs, bool))
        self._vector.restart(int(rng.integers(1 << 31) if seed is None else seed))
        self._started = True
        return self._obs()

    def begin_episodes(self, ended: Array) -> Array:
        """Begin the next episodes where `ended`, `[envs]` bool, and return all observations."""
        self._vector.begin_episodes(torch.from_numpy(ended))
        return self._obs()

    def step(self, action: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Take `action`, `[rows, ...]`, in the units of the space; rows are agents of env 0, 1, ...

        Returns:
            Observations `[rows, size]` (where an episode ended, its last), rewards, terminated and
            truncated `[rows]`, and `[envs]`: the episode ended.

        Raises:
            gymnasium.error.ResetNeeded: no episode was begun.
            UsageError: the action has the wrong shape.
        """
        if not self._started:
            raise gymnasium.error.ResetNeeded("step was called before reset.")
        row = self._fragment.action[0]
        array = np.asarray(action, self._action_dtype)
        if array.size != row.numel():
            raise UsageError(f"Actions of shape {array.shape}; expected {tuple(row.shape)}.")
        self._vector.bind(self._fragment)
        row.copy_(torch.from_numpy(array.reshape(row.shape)))
        self._vector.step(0)
        self._vector.finish()
        f = self._fragment
        rows = f.obs[1], f.reward[0], f.terminated[0], f.truncated[0]  # type: ignore[index]
        obs, reward, terminated, truncated = (tensor.numpy().copy() for tensor in rows)
        return obs, reward, terminated, truncated, self._vector.ended.numpy().copy()

    def close(self) -> None:
        """End the threads."""
        self._vector.close()

    def _obs(self) -> Array:
        return self._vector.obs()["obs."].reshape(-1, self._vector.spec.observation.size)


class KernelGymEnv(gymnasium.Env[Any, Any]):
    """One environment; interpreted unless `compiled`, so that a debugger stops in its functions.

    `reset(seed=s)` begins the first episode of seed s; a reset without a seed begins the next one.

    Args:
        kernel_env: `module:Class`, a class, or a kernel environment.
        **kwargs: arguments of the class, and `max_episode_steps`.

    Raises:
        UsageError: it is a game of several agents, or does not take `kwargs`.
        MissingExtraError: Numba is not installed.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  # as in Gymnasium's own class

    def __init__(self, kernel_env: KernelSource, *, compiled: bool = False, **kwargs: Any) -> None:
        env = _build_one_agent(kernel_env, **kwargs)
        # Copies, since each has its own generator to sample with
        self.observation_space = deepcopy(env.observation_space)
        self.action_space = deepcopy(env.action_space)
        self._stepper = KernelStepper(env, 1, "cpu" if compiled else "python")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; there are no options."""
        super().reset(seed=seed)
        return self._stepper.reset(seed, self.np_random)[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step. Raise UsageError for a discrete action outside of the space."""
        check_discrete_action(self.action_space, action)
        obs, reward, terminated, truncated, _ = self._stepper.step(np.expand_dims(action, 0))
        return obs[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}

    def close(self) -> None:
        """End the threads."""
        self._stepper.close()


class KernelGymVectorEnv(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Environments that are compiled for the CPU and stepped together.

    Where an episode ends, the same step begins the next one; `info["final_obs"]` has the true last
    observation. `reset(seed=s)` takes one seed; each environment has its own random numbers. Other
    arguments and errors are those of `KernelGymEnv`.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012  # as in Gymnasium's own class
        "render_modes": [],
        "autoreset_mode": AutoresetMode.SAME_STEP,
    }

    def __init__(
        self, kernel_env: KernelSource, num_envs: int = 1, *, num_threads: int = 1, **kwargs: Any
    ) -> None:
        env = _build_one_agent(kernel_env, **kwargs)
        self.num_envs = num_envs
        self.single_observation_space = deepcopy(env.observation_space)
        self.single_action_space = deepcopy(env.action_space)
        self.observation_space = batch_space(env.observation_space, num_envs)
        self.action_space = batch_space(env.action_space, num_envs)
        self._stepper = KernelStepper(env, num_envs, "cpu", num_threads)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin all episodes. Raise UsageError for a list of seeds or the option `reset_mask`."""
        if options and "reset_mask" in options:
            raise UsageError("reset_mask: all environments of this vector are reset together.")
        if not (seed is None or isinstance(seed, int | np.integer)):
            raise UsageError(f"seed={seed!r}: expected one number for all environments, or None.")
        super().reset(seed=seed)
        return self._stepper.reset(seed, self.np_random), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take a step. Raise UsageError for discrete actions outside of the space."""
        actions = np.asarray(actions)
        check_discrete_action(self.action_space, actions)
        obs, reward, terminated, truncated, ended = self._stepper.step(actions)
        info: dict[str, Any] = {}
        if ended.any():
            for i in np.flatnonzero(ended).tolist():
                info = self._add_info(info, {"final_obs": obs[i], "final_info": {}}, i)
            obs = self._stepper.begin_episodes(ended)
        return obs, reward, terminated, truncated, info

    def close_extras(self, **kwargs: Any) -> None:
        """End the threads."""
        self._stepper.close()


def from_registry(
    kernel_env: KernelSource, *, compiled: bool = False, **kwargs: Any
) -> KernelGymEnv:
    """Make an environment for `gymnasium.make`, which limits the time by a wrapper of its own."""
    env = _build_one_agent(kernel_env, **kwargs)
    env.max_episode_steps = 0
    return KernelGymEnv(env, compiled=compiled)


def _build_one_agent(
    kernel_env: KernelSource, render_mode: str | None = None, **kwargs: Any
) -> KernelEnv:
    env = build(kernel_env, **kwargs)
    name = type(env).__name__
    if env.agents:
        raise UsageError(
            f"{name} is a game of several agents ({', '.join(env.agents)}); Gymnasium's form has "
            "one.\nUse PettingZoo's form: "
            "headrace.envs.kernels.pettingzoo_adapter.KernelParallelEnv."
        )
    if render_mode is not None:
        raise UsageError(f"render_mode={render_mode!r}: {name} does not draw itself.")
    return env
