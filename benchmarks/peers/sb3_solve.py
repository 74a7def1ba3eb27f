"""stable-baselines3 until a mean return is reached, with the settings that its zoo tuned.

Those are of rl-baselines3-zoo's hyperparams/ppo.yml; of an environment's earlier version, where
today's is not in there. Reached: the mean return of the last 100 training episodes, before rewards
are normalized; asked after each step, not after each update, which is a little in its favor. With
--evaluate-every: its mean return in an evaluation (likeliest actions), by its own callbacks.
Prints RESULT {json}, also if it was not reached.
"""

import argparse
import collections
import json

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import (
    BaseCallback,
    EvalCallback,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize

from benchmarks.peers.works import EVALUATED_EPISODES

EPISODES = 100
WIDE = {
    "policy_kwargs": {
        "log_std_init": -2,
        "ortho_init": False,
        "activation_fn": torch.nn.ReLU,
        "net_arch": {"pi": [256, 256], "vf": [256, 256]},
    }
}


def falling(value):
    return lambda left: value * left


SETTINGS = {
    "CartPole-v1": (
        {"num_envs": 8, "env_steps": 100_000, "normalize": False},
        {
            "n_steps": 32, "batch_size": 256, "n_epochs": 20, "gamma": 0.98, "gae_lambda": 0.8,
            "learning_rate": falling(1e-3), "clip_range": falling(0.2), "ent_coef": 0.0,
        },
    ),
    "LunarLander-v3": (
        {"num_envs": 16, "env_steps": 1_000_000, "normalize": False},
        {
            "n_steps": 1024, "batch_size": 64, "n_epochs": 4, "gamma": 0.999, "gae_lambda": 0.98,
            "ent_coef": 0.01,
        },
    ),
    "Hopper-v5": (
        {"num_envs": 1, "env_steps": 1_000_000, "normalize": True},
        {
            "n_steps": 512, "batch_size": 32, "n_epochs": 5, "gamma": 0.999, "gae_lambda": 0.99,
            "learning_rate": 9.80828e-05, "ent_coef": 0.00229519, "max_grad_norm": 0.7,
            "vf_coef": 0.835671, **WIDE,
        },
    ),
    "HalfCheetah-v5": (
        {"num_envs": 1, "env_steps": 1_000_000, "normalize": True},
        {
            "n_steps": 512, "batch_size": 64, "n_epochs": 20, "gamma": 0.98, "gae_lambda": 0.92,
            "learning_rate": 2.0633e-05, "ent_coef": 0.000401762, "clip_range": 0.1,
            "max_grad_norm": 0.8, "vf_coef": 0.58096, **WIDE,
        },
    ),
}  # fmt: skip
"""Settings of the run, and of PPO where they are not its defaults, by environment."""


class StopWhenReached(BaseCallback):
    def __init__(self, wanted):
        super().__init__()
        self.wanted, self.returns = wanted, collections.deque(maxlen=EPISODES)

    def _on_step(self):
        self.returns += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        return len(self.returns) < EPISODES or np.mean(self.returns) < self.wanted

    @property
    def mean_return(self):
        """Of the last 100 training episodes; None before there are so many."""
        return float(np.mean(self.returns)) if len(self.returns) == EPISODES else None


class StopWhenEvaluated(EvalCallback):
    def __init__(self, env, wanted, every):
        stop = StopTrainingOnRewardThreshold(wanted, verbose=0)
        episodes = EVALUATED_EPISODES
        super().__init__(env, stop, n_eval_episodes=episodes, eval_freq=every, verbose=0)

    @property
    def mean_return(self):
        """Of the last evaluation; None before the first."""
        return float(self.last_mean_reward) if np.isfinite(self.last_mean_reward) else None


def make(env, count, settings, *, is_trained):
    """Environments as the zoo has them. Those of an evaluation take over the statistics."""
    made = VecMonitor(DummyVecEnv([lambda: gym.make(env)] * count))
    if not settings["normalize"]:
        return made
    return VecNormalize(made, gamma=settings["gamma"], training=is_trained, norm_reward=is_trained)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env", choices=list(SETTINGS))
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--mean-return", type=float, required=True)
    parser.add_argument("--evaluate-every", type=int, help="env steps; default: training returns")
    parser.add_argument("--env-steps", type=int, help="at most; default: the zoo's")
    args = parser.parse_args()
    torch.set_num_threads(1)
    of, settings = SETTINGS[args.env]
    of = of | {"gamma": settings["gamma"]}
    env = make(args.env, of["num_envs"], of, is_trained=True)
    model = PPO("MlpPolicy", env, **settings, seed=args.seed, device="cpu")
    if args.evaluate_every:
        fresh = make(args.env, 1, of, is_trained=False)
        every = args.evaluate_every // of["num_envs"]
        stop = StopWhenEvaluated(fresh, args.mean_return, every)
    else:
        stop = StopWhenReached(args.mean_return)
    model.learn(args.env_steps or of["env_steps"], callback=stop)
    result = {"env_steps": model.num_timesteps, "mean_return": stop.mean_return}
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
