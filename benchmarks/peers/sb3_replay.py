"""The memory that stable-baselines3's replay buffer takes, full, with its own settings.

Breakout's observations are four frames of 84 x 84 bytes, CartPole's four numbers. Their values do
not matter; each transition is written.
"""

import argparse
import json
import os
from pathlib import Path

import gymnasium as gym
import numpy as np
from stable_baselines3.common.buffers import ReplayBuffer

SPACES = {
    "ALE/Breakout-v5": gym.spaces.Box(0, 255, (4, 84, 84), np.uint8),
    "CartPole-v1": gym.spaces.Box(-10, 10, (4,), np.float32),
}
NUM_ENVS = 8


def resident_mib():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env", choices=SPACES)
    parser.add_argument("--env-steps", type=int, required=True)
    args = parser.parse_args()
    space = SPACES[args.env]
    before = resident_mib()
    buffer = ReplayBuffer(args.env_steps, space, gym.spaces.Discrete(4), "cpu", n_envs=NUM_ENVS)
    obs = np.ones((NUM_ENVS, *space.shape), space.dtype)
    action, zero = np.ones((NUM_ENVS, 1), np.int64), np.ones(NUM_ENVS, np.float32)
    for _ in range(args.env_steps // NUM_ENVS):
        buffer.add(obs, obs, action, zero, zero, [{}] * NUM_ENVS)
    found = {"env_steps": args.env_steps, "buffer_mib": resident_mib() - before}
    print(f"RESULT {json.dumps(found)}")


if __name__ == "__main__":
    main()
