"""An environment that steps tensors: many boats at a time, each of which is to reach a buoy.

You can train on any `gymnasium.vector.VectorEnv` whose arrays are torch's, on the CPU or on a GPU.
Nothing leaves the device. The callable that makes it takes `num_envs` and `device`.

    python examples/tensor_env.py
    headrace train tensor_env:Boats --num-envs 256 --num-steps 32     # in this folder
"""

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

import headrace

MAX_STEPS = 50
REACHED = 0.1


class Boats(gymnasium.vector.VectorEnv):
    """Boats observe the way to the buoy and their speed. The action pushes, distance costs."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int, device: str = "cpu") -> None:
        self.num_envs, self.device = num_envs, torch.device(device)
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.single_action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.random = torch.Generator(self.device)

    def reset(
        self, *, seed: int | None = None, options: object = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Begin all episodes."""
        if seed is not None:
            self.random.manual_seed(seed)
        self.to_buoy, self.speed, self.steps = self._start()
        return self._obs(), {}

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Push, drift, and begin the next episode of those that ended."""
        self.speed = 0.9 * self.speed + 0.1 * action
        self.to_buoy = self.to_buoy - 0.1 * self.speed
        self.steps = self.steps + 1
        terminated = self.to_buoy.norm(dim=-1) < REACHED
        truncated = (self.steps >= MAX_STEPS) & ~terminated
        reward = terminated.float() - 0.1 * self.to_buoy.norm(dim=-1)
        final, ended = self._obs(), terminated | truncated
        # Draw for all boats, and use it where an episode ended: the host need not know where.
        to_buoy, speed, steps = self._start()
        self.to_buoy = torch.where(ended.unsqueeze(-1), to_buoy, self.to_buoy)
        self.speed = torch.where(ended.unsqueeze(-1), speed, self.speed)
        self.steps = torch.where(ended, steps, self.steps)
        return self._obs(), reward, terminated, truncated, {"final_obs": final}

    def _start(self) -> tuple[Tensor, Tensor, Tensor]:
        shape = (self.num_envs, 2)
        to_buoy = 2 * torch.rand(shape, device=self.device, generator=self.random) - 1
        steps = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        return to_buoy, torch.zeros(shape, device=self.device), steps

    def _obs(self) -> Tensor:
        return torch.cat([self.to_buoy, self.speed], -1)


def main(total_env_steps: int = 1_000_000) -> None:
    """Train, then evaluate."""
    run = headrace.train(
        Boats, num_envs=256, num_steps=32, total_env_steps=total_env_steps, device="cpu"
    )
    print("Returns:", run.evaluate(episodes=5).returns)


if __name__ == "__main__":
    main()
