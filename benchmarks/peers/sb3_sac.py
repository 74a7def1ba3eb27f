"""stable-baselines3's SAC for so many seconds, with the settings that its zoo tuned.

    benchmarks/.venvs/sb3/bin/python -m benchmarks.peers.sb3_sac HalfCheetah-v5 --seconds 3600 \
        --evaluate-every 10000 --out sb3.jsonl

Settings are of rl-baselines3-zoo's hyperparams/sac.yml; of an environment's earlier version, where
today's is not in there. Writes a line of JSON after each evaluation (likeliest actions), whose time
counts. One torch thread. Seconds begin with the process's first line. Left out: a return at which
it would stop.
"""

import argparse
import json
import time

BEGAN = time.time()

import gymnasium as gym  # noqa: E402
import stable_baselines3  # noqa: E402
import torch  # noqa: E402
from stable_baselines3 import SAC  # noqa: E402
from stable_baselines3.common.callbacks import BaseCallback  # noqa: E402
from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402
from stable_baselines3.common.monitor import Monitor  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv  # noqa: E402

from benchmarks.peers.works import EVALUATED_EPISODES  # noqa: E402


def falling(value):
    return lambda left: value * left


SETTINGS = {
    "HalfCheetah-v5": (1_000_000, {"learning_starts": 10_000}),
    "LunarLanderContinuous-v3": (
        500_000,
        {
            "batch_size": 256, "learning_rate": falling(7.3e-4), "buffer_size": 1_000_000,
            "gamma": 0.99, "tau": 0.01, "learning_starts": 10_000,
            "policy_kwargs": {"net_arch": [400, 300]},
        },
    ),
}  # fmt: skip
"""Env steps of the run, and settings of SAC where they are not its defaults, by environment."""


class Evaluate(BaseCallback):
    def __init__(self, env, every, ends, out):
        super().__init__()
        self.env, self.every, self.ends, self.out = env, every, ends, out

    def _on_step(self):
        if self.num_timesteps % self.every == 0:
            mean, _ = evaluate_policy(self.model, self.env, EVALUATED_EPISODES, deterministic=True)
            row = {
                "wall_s": time.time() - BEGAN,
                "env_steps": self.num_timesteps,
                "eval_return": float(mean),
            }
            print(json.dumps(row), file=self.out, flush=True)
        return time.time() < self.ends


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env", choices=list(SETTINGS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--evaluate-every", type=int, required=True, help="env steps")
    parser.add_argument("--out", required=True, help="file of the lines")
    args = parser.parse_args()
    torch.set_num_threads(1)
    env_steps, settings = SETTINGS[args.env]
    env = DummyVecEnv([lambda: Monitor(gym.make(args.env))])
    model = SAC("MlpPolicy", env, seed=args.seed, device="cpu", **settings)
    fresh = DummyVecEnv([lambda: Monitor(gym.make(args.env))])
    fresh.seed(1_000_000 + args.seed)  # never those of training
    with open(args.out, "w") as out:
        callback = Evaluate(fresh, args.evaluate_every, BEGAN + args.seconds, out)
        model.learn(env_steps, callback=callback)
    result = {
        "env_steps": model.num_timesteps,
        "versions": {
            "stable-baselines3": stable_baselines3.__version__,
            "torch": torch.__version__,
            "gymnasium": gym.__version__,
        },
    }
    print(f"RESULT {json.dumps(result)}")


if __name__ == "__main__":
    main()
