"""stable-baselines3: its PPO on its DummyVecEnv (one process), with its own defaults otherwise.

Its defaults agree with the comparison's: gamma 0.99, lambda 0.95, clip 0.2, gradients cut at 0.5,
2 × 64 tanh with separate actor and critic, NatureCNN shared.
"""

import argparse

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

from benchmarks.peers.result import Stopwatch

NUM_STEPS, NUM_MINIBATCHES = 128, 4


class MarkUpdates(BaseCallback):
    """Each rollout but the first begins when an update has ended."""

    def __init__(self, stopwatch):
        super().__init__()
        self.stopwatch = stopwatch

    def _on_rollout_start(self):
        if self.num_timesteps:
            self.stopwatch.mark(self.num_timesteps)

    def _on_step(self):
        return True


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", choices=["cartpole", "atari"], required=True)
    parser.add_argument("--num-envs", type=int, required=True)
    parser.add_argument("--env-steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.env == "cartpole":
        policy, make = "MlpPolicy", lambda: gym.make("CartPole-v1")
    else:
        from benchmarks.peers.atari import make_env as make

        policy = "CnnPolicy"
    env = VecMonitor(DummyVecEnv([make] * args.num_envs))
    model = PPO(
        policy,
        env,
        n_steps=NUM_STEPS,
        batch_size=args.num_envs * NUM_STEPS // NUM_MINIBATCHES,
        n_epochs=4,
        learning_rate=2.5e-4,
        ent_coef=0.01,
        seed=0,
        device="cpu",
    )
    stopwatch = Stopwatch()
    model.learn(args.env_steps, callback=MarkUpdates(stopwatch))
    stopwatch.mark(model.num_timesteps)
    returns = [episode["r"] for episode in model.ep_info_buffer]
    stopwatch.print_result(np.mean(returns) if returns else None)
    env.close()


if __name__ == "__main__":
    main()
