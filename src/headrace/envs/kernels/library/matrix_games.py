"""Games of one move, by a matrix of payoffs."""

from typing import Any

import gymnasium
import numpy as np

from headrace.envs.kernels.env import KernelEnv


class RockPaperScissors(KernelEnv):
    """Two players choose rock (0), paper (1) or scissors (2) at once, and the episode ends.

    Who wins gets 1, who loses -1. They observe nothing (0). The only equilibrium is to choose each
    with probability 1/3. Players that learn against each other's last choices go round in circles.
    """

    observation_space = gymnasium.spaces.Box(0, 0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)
    agents = {"player": 2}  # noqa: RUF012
    phases = ("observe", "pay", "end")
    resets = ()

    @staticmethod
    def observe(w: Any, e: int, i: int, out: Any) -> None:
        """Write the observation, which is always 0."""
        out[0] = np.float32(0)

    @staticmethod
    def pay(w: Any, e: int, i: int) -> None:
        """Pay a player."""
        ahead = (w.action[e, i] - w.action[e, 1 - i]) % 3
        if ahead == 1:
            w.reward[e, i] = np.float32(1)
        elif ahead == 2:
            w.reward[e, i] = np.float32(-1)

    @staticmethod
    def end(w: Any, e: int) -> None:
        """End the episode."""
        w.terminated[e] = True
