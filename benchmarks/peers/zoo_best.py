"""What RL Baselines3 Zoo's search found: its trials; and the best of them, trained with a new seed.

    benchmarks/.venvs/zoo/bin/python -m benchmarks.peers.zoo_best study.log --env-steps 100000
    ... study.log --env-steps 100000 --seed 2000 --folder logs

The study is the file that the zoo's search keeps (`--storage`). Without a seed: how its trials
ended, and their env steps; a trial that had not ended when the search did is left out. With one:
the best trial's settings are trained by the zoo's own `ExperimentManager`, as `--trial-id` does,
and evaluated. Left out: the search (`benchmarks/tune/cartpole.py` starts it).
"""

import argparse
import importlib.metadata
import json
from collections import Counter
from pathlib import Path

import numpy as np
import optuna
import torch
from rl_zoo3.exp_manager import ExperimentManager
from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy

ALGO, ENV = "ppo", "CartPole-v1"
PACKAGES = ("rl_zoo3", "stable-baselines3", "optuna", "torch", "gymnasium", "numpy")


class UntilSolved(BaseCallback):
    """After each rollout: whether the mean return of the last 100 training episodes is as high."""

    def __init__(self, wanted):
        super().__init__()
        self.wanted, self.env_steps = wanted, None

    def _on_step(self):
        return True

    def mean(self):
        episodes = self.model.ep_info_buffer
        is_full = len(episodes) == episodes.maxlen == 100
        return float(np.mean([each["r"] for each in episodes])) if is_full else None

    def check(self):
        mean = self.mean()
        if self.env_steps is None and mean is not None and mean >= self.wanted:
            self.env_steps = self.num_timesteps

    def _on_rollout_end(self):
        self.check()


def manager_of(params, args, seed):
    """The zoo's own way to train a trial's settings."""
    return ExperimentManager(
        argparse.Namespace(), ALGO, ENV, args.folder, n_timesteps=args.env_steps, eval_freq=-1,
        hyperparams=HYPERPARAMS_CONVERTER[ALGO](params), seed=seed, log_interval=-1, verbose=0,
        device="cpu",
    )  # fmt: skip


def summary(study, args):
    """How the trials ended, and the env steps that they trained."""
    manager = manager_of(study.best_trial.params, args, 0)
    manager.setup_experiment()
    num_envs = manager.n_envs
    # As ExperimentManager.objective has it: after so many env steps it evaluates, and may prune.
    evaluations = max(1, args.env_steps // 100_000)
    interval = max(int(args.env_steps / evaluations) // num_envs, 1) * num_envs
    ends, env_steps = Counter(), 0
    trials = [trial for trial in study.trials if trial.state.is_finished()]
    for trial in trials:
        batch = num_envs * 2 ** trial.params["n_steps_pow"]
        whole = -(-args.env_steps // batch) * batch
        if trial.state.name == "COMPLETE":
            ends["whole"] += 1
            env_steps += whole
        elif trial.state.name == "PRUNED" and trial.intermediate_values:
            ends["pruned"] += 1
            env_steps += min(whole, max(trial.intermediate_values) * interval)
        else:
            ends["failed"] += 1  # its weights were no numbers any more; env steps are not known
    return {
        "trials": len(trials),
        **{name: ends[name] for name in ("whole", "pruned", "failed")},
        "env_steps": env_steps,
        "evaluations_of_a_trial": evaluations,
        "best": {
            "number": study.best_trial.number,
            "value": study.best_trial.value,
            "settings": study.best_trial.params,
        },
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def train(study, args):
    """Train the best trial's settings with a new seed, and evaluate."""
    manager = manager_of(study.best_trial.params, args, args.seed)
    model, _ = manager.setup_experiment()
    until = UntilSolved(args.until_return)
    manager.callbacks.append(until)
    manager.learn(model)
    manager.seed = 1_000_000 + args.seed  # never those of training
    env = manager.create_envs(1, eval_env=True, no_log=True)
    returns, _ = evaluate_policy(
        model, env, args.episodes, deterministic=True, return_episode_rewards=True
    )
    return {
        "seed": args.seed,
        "env_steps": model.num_timesteps,
        "eval_return": float(np.mean(returns)),
        "steps_to": until.env_steps,
        "mean_return": until.mean(),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("--env-steps", type=int, required=True)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--until-return", type=float, default=475.0)
    parser.add_argument("--folder", default="logs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    backend = optuna.storages.journal.JournalFileBackend(str(args.study))
    storage = optuna.storages.JournalStorage(backend)
    study = optuna.load_study(study_name=None, storage=storage)  # the file's only one
    result = summary(study, args) if args.seed is None else train(study, args)
    print(f"RESULT {json.dumps(result)}")


if __name__ == "__main__":
    main()
