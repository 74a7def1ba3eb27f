"""Sample Factory's APPO, asynchronous (as it is meant to be used), in worker processes.

Sampling goes on while the learner learns, so that experience is a little old; that is its design,
not PPO's. An iteration has as many env steps, epochs and minibatches as the others'.
"""

import argparse

import gymnasium as gym
import numpy as np
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.algo.utils.misc import EPISODIC, ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

from benchmarks.peers import works
from benchmarks.peers.result import Stopwatch

SETTINGS = works.SETTINGS["cartpole"]


def make_cartpole(full_env_name, cfg=None, env_config=None, render_mode=None):
    return gym.make("CartPole-v1")


class MarkUpdates(AlgoObserver):
    def __init__(self, stopwatch, batch):
        self.stopwatch, self.batch, self.returns = stopwatch, batch, []

    def on_training_step(self, runner, training_iteration_since_resume):
        # What it has learned from; its own count comes a message later.
        self.stopwatch.mark(training_iteration_since_resume * self.batch)

    def on_episode(self, runner, message, policy_id):
        self.returns.append(float(message[EPISODIC]["reward"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-workers", type=int, required=True)
    parser.add_argument("--env-steps", type=int, required=True)
    parser.add_argument("--train-dir", required=True)
    args = parser.parse_args()
    register_env("bench_cartpole", make_cartpole)
    options = {
        "env": "bench_cartpole",
        "algo": "APPO",
        "experiment": "bench",
        "train_dir": args.train_dir,
        "train_for_env_steps": args.env_steps,
        "device": "cpu",
        "seed": 0,
        # sampling
        "num_workers": args.num_workers,
        "num_envs_per_worker": SETTINGS.num_envs // args.num_workers,
        "worker_num_splits": 2,
        "rollout": SETTINGS.num_steps,
        "async_rl": True,
        "serial_mode": False,
        "decorrelate_experience_max_seconds": 0,
        "decorrelate_envs_on_one_worker": False,
        # the same network as the others
        "use_rnn": False,
        "recurrence": 1,
        "nonlinearity": "tanh",
        "actor_critic_share_weights": False,
        "normalize_input": False,
        "normalize_returns": False,
        # the same learning
        "batch_size": SETTINGS.batch // SETTINGS.num_minibatches,
        "num_batches_per_epoch": SETTINGS.num_minibatches,
        "num_epochs": SETTINGS.num_epochs,
        "learning_rate": SETTINGS.lr,
        "adam_eps": 1e-5,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "ppo_clip_ratio": 0.2,
        "exploration_loss_coeff": SETTINGS.ent_coef,
        "value_loss_coeff": 0.5,
        "max_grad_norm": 0.5,
        # nothing on the side
        "save_every_sec": 100_000,
        "with_wandb": False,
    }
    argv = [f"--{name}={value}" for name, value in options.items()]
    argv += ["--encoder_mlp_layers", "64", "64"]
    config_parser, _ = parse_sf_args(argv)
    _, runner = make_runner(parse_full_cfg(config_parser, argv))
    stopwatch = Stopwatch()
    observer = MarkUpdates(stopwatch, SETTINGS.batch)
    runner.register_observer(observer)
    runner.register_episodic_stats_handler(observer.on_episode)
    status = runner.init()
    if status == ExperimentStatus.SUCCESS:
        status = runner.run()
    if status != ExperimentStatus.SUCCESS:
        raise SystemExit(f"Sample Factory ended with status {status}; expected SUCCESS.")
    stopwatch.print_result(np.mean(observer.returns[-100:]) if observer.returns else None)


if __name__ == "__main__":
    main()
