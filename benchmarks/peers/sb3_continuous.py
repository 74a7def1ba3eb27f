"""stable-baselines3: its SAC and TD3 with their own defaults, but for `continuous_works.py`.

Its vector environment is DummyVecEnv.
"""

import argparse

import numpy as np
import torch
from stable_baselines3 import SAC, TD3
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

from benchmarks.peers import continuous_works as work
from benchmarks.peers.make_env import make_env
from benchmarks.peers.result import Stopwatch
from benchmarks.peers.sb3_dqn import MarkBlocks


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algo", choices=["sac", "td3"], required=True)
    parser.add_argument("--env-steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    env = VecMonitor(DummyVecEnv([lambda: make_env(work.ENV)] * work.NUM_ENVS))
    more = {}
    if args.algo == "td3":
        size = env.action_space.shape[0]
        more["action_noise"] = NormalActionNoise(np.zeros(size), np.full(size, 0.1))
    model = {"sac": SAC, "td3": TD3}[args.algo](
        "MlpPolicy",
        env,
        policy_kwargs={"net_arch": [256, 256]},
        learning_rate=work.LR,
        buffer_size=work.REPLAY_SIZE,
        learning_starts=work.LEARNING_STARTS,
        batch_size=work.BATCH_SIZE,
        train_freq=work.NUM_STEPS,
        gradient_steps=work.BLOCK,
        seed=0,
        device="cpu",
        **more,
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
