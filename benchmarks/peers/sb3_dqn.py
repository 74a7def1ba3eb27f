"""stable-baselines3: its DQN with its own defaults, but for what `replay_works.py` says.

Its vector environment is DummyVecEnv. It counts the interval of the target network in env steps.
"""

import argparse

import numpy as np
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

from benchmarks.peers import atari
from benchmarks.peers.make_env import make_env
from benchmarks.peers.replay_works import REPLAY_SETTINGS, TRAINING_STEPS
from benchmarks.peers.result import Stopwatch


class MarkBlocks(BaseCallback):
    """A rollout begins when a block of gradient steps has ended."""

    def __init__(self, stopwatch):
        super().__init__()
        self.stopwatch = stopwatch

    def _on_rollout_start(self):
        if self.model._n_updates:
            self.stopwatch.mark(self.num_timesteps)

    def _on_step(self):
        return True


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=list(REPLAY_SETTINGS), required=True)
    parser.add_argument("--env-steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    settings = REPLAY_SETTINGS[args.work]
    is_image = settings.env.startswith("ALE/")
    maker = atari.make_env if is_image else lambda: make_env(settings.env)
    env = VecMonitor(DummyVecEnv([maker] * settings.num_envs))
    model = DQN(
        "CnnPolicy" if is_image else "MlpPolicy",
        env,
        policy_kwargs=None if is_image else {"net_arch": [256, 256]},
        learning_rate=settings.lr,
        buffer_size=settings.replay_size,
        learning_starts=settings.learning_starts,
        batch_size=settings.batch_size,
        train_freq=TRAINING_STEPS,
        gradient_steps=int(settings.block * settings.ratio),
        target_update_interval=int(settings.target_interval / settings.ratio),
        exploration_fraction=0.1,
        exploration_final_eps=0.05,
        seed=0,
        device="cpu",
    )
    stopwatch = Stopwatch()
    model.learn(args.env_steps, callback=MarkBlocks(stopwatch))
    stopwatch.mark(model.num_timesteps)
    returns = [episode["r"] for episode in model.ep_info_buffer]
    mean = np.mean(returns) if returns else None
    stopwatch.print_result(mean, learner_steps=model._n_updates)
    env.close()


if __name__ == "__main__":
    main()
