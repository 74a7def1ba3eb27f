"""stable-baselines3: its PPO with its own defaults, but for what `works.py` says.

Its vector environment is DummyVecEnv (one process), or SubprocVecEnv (one process per environment,
all of which wait for the slowest at each step). Its defaults agree with the comparison's: gamma
0.99, lambda 0.95, clip 0.2, gradients cut at 0.5, 2 × 64 tanh with separate actor and critic,
NatureCNN shared.
"""

import argparse
import time

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecMonitor

from benchmarks.peers import atari
from benchmarks.peers.make_env import make_env
from benchmarks.peers.result import Stopwatch
from benchmarks.peers.works import SETTINGS


class MarkUpdates(BaseCallback):
    """Each rollout but the first begins when an update has ended.

    Attributes:
        collecting_s: in rollouts, all of them.
    """

    def __init__(self, stopwatch):
        super().__init__()
        self.stopwatch, self.collecting_s, self._began = stopwatch, 0.0, 0.0

    def _on_rollout_start(self):
        if self.num_timesteps:
            self.stopwatch.mark(self.num_timesteps)
        self._began = time.perf_counter()

    def _on_rollout_end(self):
        self.collecting_s += time.perf_counter() - self._began

    def _on_step(self):
        return True


def maker(work):
    """Return what makes one environment of the work."""
    return atari.make_env if work == "atari" else lambda: make_env(SETTINGS[work].env)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=list(SETTINGS), required=True)
    parser.add_argument("--env-steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--subproc", action="store_true", help="a process for each environment")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    settings = SETTINGS[args.work]
    vector = SubprocVecEnv if args.subproc else DummyVecEnv
    env = VecMonitor(vector([maker(args.work)] * settings.num_envs))
    model = PPO(
        "CnnPolicy" if args.work == "atari" else "MlpPolicy",
        env,
        n_steps=settings.num_steps,
        batch_size=settings.batch // settings.num_minibatches,
        n_epochs=settings.num_epochs,
        learning_rate=settings.lr,
        ent_coef=settings.ent_coef,
        seed=0,
        device="cpu",
    )
    stopwatch = Stopwatch()
    marks = MarkUpdates(stopwatch)
    model.learn(args.env_steps, callback=marks)
    stopwatch.mark(model.num_timesteps)
    returns = [episode["r"] for episode in model.ep_info_buffer]
    stopwatch.print_result(np.mean(returns) if returns else None, collecting_s=marks.collecting_s)
    env.close()


if __name__ == "__main__":
    main()
