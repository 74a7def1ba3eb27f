"""Kernel environments in Gymnasium's forms: one environment, and a vector of them.

For everything that takes Gymnasium's environments; `headrace train` steps kernel environments
without them (`vector.py`), but where they are wrapped, or interpreted. Left out: games of
several agents (`pettingzoo_adapter.py`), and drawing.
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

# Kernel environments one step at a time, and reset by whoever steps them.
#
# What Gymnasium's and PettingZoo's forms share: an array of actions in, arrays of what they led to
# out, all of them new.


class Taken(NamedTuple):
    """What a step led to. Rows are agents: those of env 0, then those of env 1, ...

    Attributes:
        obs: `[rows, size]`, also where an episode ended.
        reward: `[rows]` float32.
        terminated, truncated: `[rows]` bool.
        over: `[envs]` bool: the episode ended.
    """

    obs: Array
    reward: Array
    terminated: Array
    truncated: Array
    over: Array


def check_choices(space: gymnasium.Space[Any], action: Any) -> None:
    """A choice that there is not may be an index out of bounds to compiled code: UsageError."""
    if not isinstance(space, gymnasium.spaces.Box) and not space.contains(action):
        raise UsageError(f"The action {action!r} is not in the action space {space}.")


class Stepper:
    """n environments.

    Args:
        env: the environment.
        num_envs: n.
        target: what it is compiled for.
        num_threads: of the CPU.

    Raises:
        MissingExtraError: Numba is not installed.
    """

    def __init__(self, env: KernelEnv, num_envs: int, target: Target, num_threads: int = 1) -> None:
        spec = spaces.of_kernel(type(env).__name__, env)
        self._is_box, self._num_envs = spec.action.kind == "box", num_envs
        context = VectorContext(
            spec, np.arange(num_envs), 0,
            worker="", guards=Guards(enabled=False), num_threads=num_threads,
        )  # fmt: skip
        self._vector = KernelVector(env, context, target=target, encoded=False, autoreset=False)
        columns = batch.columns(spec, {}, 1, num_envs * env.num_agents)
        self._fragment = batch.allocate(columns)
        self._begun = False

    def reset(self, seed: int) -> Array:
        """Begin the first episodes of this seed: the observations, `[rows, size]`."""
        self._vector.restart(seed)
        self._begun = True
        return self._obs()

    def go_on(self, over: Array | None = None) -> Array:
        """Begin the next episodes where `over`, `[envs]` bool, is True (None: everywhere).

        Returns:
            All observations, `[rows, size]`.
        """
        if over is None:
            over = np.ones(self._num_envs, bool)
        self._vector.go_on(torch.from_numpy(over))
        return self._obs()

    def step(self, action: Array) -> Taken:
        """Take `action`, `[rows, ...]`, as the space has it.

        Raises:
            gymnasium.error.ResetNeeded: no episode was begun.
            UsageError: it has not the shape that it should.
        """
        if not self._begun:
            raise gymnasium.error.ResetNeeded("step was called before reset.")
        to = self._fragment.action[0]
        given = np.asarray(action, np.float32 if self._is_box else np.int64)
        if given.size != to.numel():
            raise UsageError(f"Actions of shape {given.shape}; expected {tuple(to.shape)}.")
        self._vector.bind(self._fragment)
        to.copy_(torch.from_numpy(given.reshape(to.shape)))
        self._vector.step(0)
        self._vector.finish()
        now = self._fragment
        assert isinstance(now.obs, torch.Tensor)
        arrays = (now.obs[1], now.reward[0], now.terminated[0], now.truncated[0])
        over = self._vector.books["over"]
        return Taken(*(of.numpy().copy() for of in (*arrays, over)))

    def close(self) -> None:
        """End what was started."""
        self._vector.close()

    def _obs(self) -> Array:
        obs = self._vector.obs()["obs."]
        size = self._vector.spec.observation.size
        return obs.reshape(-1, size)


Kernel = str | type[KernelEnv] | KernelEnv


class KernelGymEnv(gymnasium.Env[Any, Any]):
    """One environment; interpreted, so that a debugger stops in the author's functions.

    `reset(seed=s)` begins the first episode of this seed, and a reset without one the next episode.

    Args:
        kernel_env: `module:Class`, a class, or a kernel environment.
        compiled: whether to compile it, for the CPU.
        render_mode: None; for Gymnasium.
        **kwargs: of the class's constructor, and `max_episode_steps`.

    Raises:
        UsageError: it is a game of several agents, or does not take `kwargs`.
        MissingExtraError: Numba is not installed.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  # as in Gymnasium's own class

    def __init__(
        self,
        kernel_env: Kernel,
        *,
        compiled: bool = False,
        render_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        env = _of_one_agent(build(kernel_env, **kwargs), render_mode)
        # Copies: each has a generator of its own to sample with.
        self.observation_space = deepcopy(env.observation_space)
        self.action_space = deepcopy(env.action_space)
        self._stepper = Stepper(env, 1, "cpu" if compiled else "python")
        self._begun = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """See Gymnasium; there are no options."""
        super().reset(seed=seed)
        if seed is None and not self._begun:
            seed = int(self.np_random.integers(1 << 31))
        self._begun = True
        obs = self._stepper.go_on() if seed is None else self._stepper.reset(seed)
        return obs[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """See Gymnasium.

        Raises:
            UsageError: the action is not one of the space; a Box's may leave its bounds.
        """
        check_choices(self.action_space, action)
        taken = self._stepper.step(np.expand_dims(action, 0))
        ends = bool(taken.terminated[0]), bool(taken.truncated[0])
        return taken.obs[0], float(taken.reward[0]), *ends, {}

    def close(self) -> None:
        """See Gymnasium."""
        self._stepper.close()


class KernelGymVectorEnv(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Environments that are compiled for the CPU and stepped together.

    An episode that ends is followed by the next one in the same step; its true last observation is
    in `info["final_obs"]`. `reset(seed=s)` takes one seed for all: each has its own random numbers.

    Args:
        kernel_env: `module:Class`, a class, or a kernel environment.
        num_envs: how many.
        num_threads: of the CPU, among which they are shared out.
        render_mode: None; for Gymnasium.
        **kwargs: of the class's constructor, and `max_episode_steps`.

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
        kernel_env: Kernel,
        num_envs: int = 1,
        *,
        num_threads: int = 1,
        render_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        env = _of_one_agent(build(kernel_env, **kwargs), render_mode)
        self.num_envs = num_envs
        self.single_observation_space = deepcopy(env.observation_space)
        self.single_action_space = deepcopy(env.action_space)
        self.observation_space = batch_space(env.observation_space, num_envs)
        self.action_space = batch_space(env.action_space, num_envs)
        self._stepper = Stepper(env, num_envs, "cpu", num_threads)
        self._begun = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """See Gymnasium.

        Raises:
            UsageError: a list of seeds, or the option `reset_mask`: all are reset, with one seed.
        """
        if options and "reset_mask" in options:
            raise UsageError("reset_mask: all environments of this vector are reset together.")
        if not (seed is None or isinstance(seed, int | np.integer)):
            raise UsageError(f"seed={seed!r}: expected one number for all environments, or None.")
        super().reset(seed=seed)
        if seed is None and not self._begun:
            seed = int(self.np_random.integers(1 << 31))
        self._begun = True
        return self._stepper.go_on() if seed is None else self._stepper.reset(int(seed)), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """See Gymnasium; raises UsageError as `KernelGymEnv.step`."""
        actions = np.asarray(actions)
        check_choices(self.action_space, actions)
        taken = self._stepper.step(actions)
        obs = taken.obs
        info: dict[str, Any] = {}
        if taken.over.any():
            for i in np.flatnonzero(taken.over).tolist():
                info = self._add_info(info, {"final_obs": obs[i], "final_info": {}}, i)
            obs = self._stepper.go_on(taken.over)
        return obs, taken.reward, taken.terminated, taken.truncated, info

    def close_extras(self, **kwargs: Any) -> None:
        """See Gymnasium."""
        self._stepper.close()


def from_registry(
    kernel_env: Kernel, *, compiled: bool = False, render_mode: str | None = None, **kwargs: Any
) -> KernelGymEnv:
    """One for `gymnasium.make`, whose own wrapper keeps the time limit, as `make` is told."""
    env = build(kernel_env, **kwargs)
    env.max_episode_steps = 0
    return KernelGymEnv(env, compiled=compiled, render_mode=render_mode)


def _of_one_agent(env: KernelEnv, render_mode: str | None) -> KernelEnv:
    """The environment, if it has one of these forms; else UsageError."""
    name = type(env).__name__
    if env.agents:
        raise UsageError(
            f"{name} is a game of several agents ({', '.join(env.agents)}), and Gymnasium's form "
            "has one.\nUse PettingZoo's form: "
            "headrace.envs.kernels.pettingzoo_adapter.KernelParallelEnv."
        )
    if render_mode is not None:
        raise UsageError(f"render_mode={render_mode!r}: {name} does not draw itself.")
    return env
