"""A kernel environment: a ball falls, and the agent moves a paddle to catch it.

    headrace check-env catch:Catch       # in this folder
    headrace train catch:Catch --num-envs 1024 --num-steps 32 --total-env-steps 500000

docs/kernels.md explains it.
"""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from headrace import KernelEnv, uniform

WIDTH, HEIGHT = 5, 10
COLUMNS = np.float32(WIDTH)
ACROSS, DOWN = np.float32(1 / (WIDTH - 1)), np.float32(1 / (HEIGHT - 1))


class Catch(KernelEnv):
    """The reward at the end is 1 if the ball is caught, else -1."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)  # left, stay, right
    state: Mapping[str, Any] = {"column": np.int32, "row": np.int32, "paddle": np.int32}

    @staticmethod
    def reset_env(w: Any, e: int) -> None:
        """Put the ball in a random column of the top row, and the paddle in the middle."""
        w.column[e] = int(uniform(w, e, 0) * COLUMNS)
        w.row[e] = HEIGHT - 1
        w.paddle[e] = WIDTH // 2

    @staticmethod
    def step_env(w: Any, e: int) -> None:
        """Move the paddle, then the ball."""
        w.paddle[e] = min(max(w.paddle[e] + w.action[e] - 1, 0), WIDTH - 1)
        w.row[e] -= 1
        if w.row[e] == 0:
            w.reward[e] = 1 if w.paddle[e] == w.column[e] else -1
            w.terminated[e] = True

    @staticmethod
    def observe(w: Any, e: int, out: Any) -> None:
        """Write the positions of the ball and the paddle."""
        out[0] = np.float32(w.column[e]) * ACROSS
        out[1] = np.float32(w.row[e]) * DOWN
        out[2] = np.float32(w.paddle[e]) * ACROSS
