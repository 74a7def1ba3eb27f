"""Kernel environments one step at a time, and reset by whoever steps them.

What Gymnasium's and PettingZoo's forms share: an array of actions in, arrays of what they led to
out, all of them new. Left out: those forms (`gym_adapter.py`, `pettingzoo_adapter.py`), and what
samplers step (`vector.py` itself).
"""

from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch

from headrace import batch
from headrace.envs import spaces
from headrace.envs.api import Guards
from headrace.envs.kernels.compiler import Target
from headrace.envs.kernels.env import KernelEnv
from headrace.envs.kernels.vector import KernelVector
from headrace.errors import UsageError
from headrace.meter import Meter
from headrace.spec import Array


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
        self._vector = KernelVector(
            env, spec, np.arange(num_envs), 0, Meter(),
            target=target, num_threads=num_threads, guards=Guards(enabled=False),
            sampler="", encoded=False, autoreset=False,
        )  # fmt: skip
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
