"""stable-baselines3 with no settings but a seed and the policy class for such observations.

    benchmarks/.venvs/sb3/bin/python -m benchmarks.peers.sb3_defaults Hopper-v5 --seed 1

Its defaults are one environment in its own process, a Monitor around it, and no normalization. It
refuses the text of MiniGrid, and so sees these by `FlatObsWrapper`, as its users do. One torch
thread. Prints RESULT {json}: the mean return of the last 100 training episodes, the evaluation of
the final policy (likeliest actions), and the seconds of `learn`.
"""

import argparse
import json
import time

import gymnasium as gym
import numpy as np
import stable_baselines3
import torch
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import DummyVecEnv

from benchmarks.peers.make_env import make_env

EPISODES = 100


def make(name):
    env = make_env(name)
    if name.startswith("MiniGrid-"):
        from minigrid.wrappers import FlatObsWrapper

        env = FlatObsWrapper(env)
    return env


def policy_for(space):
    """The policy class that its documentation names for such observations."""
    if isinstance(space, gym.spaces.Dict):
        return "MultiInputPolicy"
    return "CnnPolicy" if is_image_space(space) else "MlpPolicy"


def mean_return(model):
    """Of the last 100 training episodes; None before the first."""
    returns = [episode["r"] for episode in model.ep_info_buffer]
    return float(np.mean(returns)) if returns else None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env")
    parser.add_argument("--algo", choices=["ppo", "a2c", "dqn", "sac", "td3"], default="ppo")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--env-steps", type=int, default=500_000)
    parser.add_argument("--episodes", type=int, default=EPISODES, help="of the evaluation")
    args = parser.parse_args()
    torch.set_num_threads(1)
    env = make(args.env)
    algorithm = getattr(stable_baselines3, args.algo.upper())
    model = algorithm(policy_for(env.observation_space), env, seed=args.seed)
    began = time.perf_counter()
    model.learn(args.env_steps)
    seconds = time.perf_counter() - began
    fresh = DummyVecEnv([lambda: Monitor(make(args.env))])
    fresh.seed(1_000_000 + args.seed)  # never those of training
    mean, _ = evaluate_policy(model, fresh, args.episodes, deterministic=True)
    result = {
        "env_steps": model.num_timesteps,
        "seconds": seconds,
        "mean_return": mean_return(model),
        "eval_return": float(mean),
        "versions": {
            "stable-baselines3": stable_baselines3.__version__,
            "torch": torch.__version__,
            "gymnasium": gym.__version__,
        },
    }
    print(f"RESULT {json.dumps(result)}")


if __name__ == "__main__":
    main()
