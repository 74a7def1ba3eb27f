"""Kernel environments in Gymnasium's forms: one environment, and a vector of them.

These are for other libraries. `headrace train` uses them only where environments are wrapped or
interpreted; otherwise it steps `vector.py`. Games of several agents: `pettingzoo_adapter.py`.
"""

from copy import deepcopy
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from headrace import batch
from headrace.envs import spaces
from headrace.envs.api import Guards, VectorContext
from headrace.envs.kernels.compiler import Target
from headrace.envs.kernels.env import KernelEnv
from headrace.envs.kernels.registry import build
from headrace.envs.kernels.vector import KernelVector
from headrace.errors import UsageError
from headrace.spec import Array

KernelSource = str | type[KernelEnv] | KernelEnv


class StepResult(NamedTuple):
    """The result of a step. Rows are agents: those of env 0, then those of env 1, ...

    Attributes:
        obs: `[rows, size]`; where an episode ended, its last observation.
        reward: `[rows]` float32.
        terminated, truncated: `[rows]` bool.
        ended: `[envs]` bool: the episode ended.
    """

    obs: Array
    reward: Array
    terminated: Array
    truncated: Array
    ended: Array


def check_discrete_action(space: gymnasium.Space[Any], action: Any) -> None:
    """UsageError for a discrete action outside of the space: compiled code checks no index."""
    if not isinstance(space, gymnasium.spaces.Box) and not space.contains(action):
        raise UsageError(f"The action {action!r} is not in the action space {space}.")


class KernelStepper:
    """Kernel environments that the caller steps and resets; every result is a new array.

    Raises:
        MissingExtraError: Numba is not installed.
    """

    def __init__(self, env: KernelEnv, num_envs: int, target: Target, num_threads: int = 1) -> None:
        spec = spaces.read_kernel(type(env).__name__, env)
        self._is_box, self._num_envs = spec.action.kind == "box", num_envs
        context = VectorContext(
            spec, np.arange(num_envs), 0,
            worker="", guards=Guards(enabled=False), num_threads=num_threads,
        )  # fmt: skip
        self._vector = KernelVector(env, context, target=target, encoded=False, autoreset=False)
        columns = batch.columns(spec, {}, 1, num_envs * env.num_agents)
        self._fragment = batch.allocate(columns)
        self._started = False

    def reset(self, seed: int | None, rng: np.random.Generator) -> Array:
        """Begin the first episodes of a seed; None: the next ones (at first, those of any seed).

        Returns:
            All observations, `[rows, size]`.
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

    def step(self, action: Array) -> StepResult:
        """Take `action`, `[rows, ...]`, in the units of the space.

        Raises:
            gymnasium.error.ResetNeeded: no episode was begun.
            UsageError: the action has the wrong shape.
        """
        if not self._started:
            raise gymnasium.error.ResetNeeded("step was called before reset.")
        row = self._fragment.action[0]
        array = np.asarray(action, np.float32 if self._is_box else np.int64)
        if array.size != row.numel():
            raise UsageError(f"Actions of shape {array.shape}; expected {tuple(row.shape)}.")
        self._vector.bind(self._fragment)
        row.copy_(torch.from_numpy(array.reshape(row.shape)))
        self._vector.step(0)
        self._vector.finish()
        now = self._fragment
        assert isinstance(now.obs, torch.Tensor)
        tensors = (now.obs[1], now.reward[0], now.terminated[0], now.truncated[0])
        ended = self._vector.ended
        return StepResult(*(tensor.numpy().copy() for tensor in (*tensors, ended)))

    def close(self) -> None:
        """End the threads."""
        self._vector.close()

    def _obs(self) -> Array:
        return self._vector.obs()["obs."].reshape(-1, self._vector.spec.observation.size)


class KernelGymEnv(gymnasium.Env[Any, Any]):
    """One environment; interpreted, so that a debugger stops in the author's functions.

    `reset(seed=s)` begins the first episode of seed s; a reset without a seed begins the next one.

    Args:
        kernel_env: `module:Class`, a class, or a kernel environment.
        compiled: compile it for the CPU.
        render_mode: only None is allowed.
        **kwargs: arguments of the class, and `max_episode_steps`.

    Raises:
        UsageError: it is a game of several agents, or does not take `kwargs`.
        MissingExtraError: Numba is not installed.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  # as in Gymnasium's own class

    def __init__(
        self,
        kernel_env: KernelSource,
        *,
        compiled: bool = False,
        render_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        env = _require_one_agent(build(kernel_env, **kwargs), render_mode)
        # Copies, since each has its own generator to sample with
        self.observation_space = deepcopy(env.observation_space)
        self.action_space = deepcopy(env.action_space)
        self._stepper = KernelStepper(env, 1, "cpu" if compiled else "python")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """See Gymnasium; there are no options."""
        super().reset(seed=seed)
        return self._stepper.reset(seed, self.np_random)[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """See Gymnasium; UsageError for a discrete action outside of the space."""
        check_discrete_action(self.action_space, action)
        result = self._stepper.step(np.expand_dims(action, 0))
        ends = bool(result.terminated[0]), bool(result.truncated[0])
        return result.obs[0], float(result.reward[0]), *ends, {}

    def close(self) -> None:
        """See Gymnasium."""
        self._stepper.close()


class KernelGymVectorEnv(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Environments that are compiled for the CPU and stepped together.

    Where an episode ends, the same step begins the next one; `info["final_obs"]` has the true last
    observation. `reset(seed=s)` takes one seed; each environment has its own random numbers.

    Args:
        kernel_env: `module:Class`, a class, or a kernel environment.
        num_envs: number of environments.
        num_threads: threads that share the environments.
        render_mode: only None is allowed.
        **kwargs: arguments of the class, and `max_episode_steps`.

    Raises:
        UsageError: it is a game of several agents, or does not take `kwargs`.
        MissingExtraError: Numba is not installed.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012  # as in Gymnasium's own class
        "render_modes": [],
        "autoreset_mode": AutoresetMode.SAME_STEP,
    }

    def __init__(
        self,
        kernel_env: KernelSource,
        num_envs: int = 1,
        *,
        num_threads: int = 1,
        render_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        env = _require_one_agent(build(kernel_env, **kwargs), render_mode)
        self.num_envs = num_envs
        self.single_observation_space = deepcopy(env.observation_space)
        self.single_action_space = deepcopy(env.action_space)
        self.observation_space = batch_space(env.observation_space, num_envs)
        self.action_space = batch_space(env.action_space, num_envs)
        self._stepper = KernelStepper(env, num_envs, "cpu", num_threads)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """See Gymnasium; UsageError for a list of seeds, and for the option `reset_mask`."""
        if options and "reset_mask" in options:
            raise UsageError("reset_mask: all environments of this vector are reset together.")
        if not (seed is None or isinstance(seed, int | np.integer)):
            raise UsageError(f"seed={seed!r}: expected one number for all environments, or None.")
        super().reset(seed=seed)
        return self._stepper.reset(seed, self.np_random), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """See Gymnasium; UsageError for discrete actions outside of the space."""
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
        """See Gymnasium."""
        self._stepper.close()


def from_registry(
    kernel_env: KernelSource,
    *,
    compiled: bool = False,
    render_mode: str | None = None,
    **kwargs: Any,
) -> KernelGymEnv:
    """Make an environment for `gymnasium.make`, which limits the time by a wrapper of its own."""
    env = build(kernel_env, **kwargs)
    env.max_episode_steps = 0
    return KernelGymEnv(env, compiled=compiled, render_mode=render_mode)


def _require_one_agent(env: KernelEnv, render_mode: str | None) -> KernelEnv:
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
