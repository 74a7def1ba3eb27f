"""Tianshou: its DQN with its own collector and buffer, in the loop of its examples.

Its DummyVectorEnv steps in this process. Frames of Breakout are stored once, as it recommends.
"""

import argparse

import numpy as np
import torch
from tianshou.algorithm.modelfree.dqn import DQN, DiscreteQLearningPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, CollectStats, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.utils.net.common import Net
from tianshou.utils.torch_utils import policy_within_training_step

from benchmarks.peers import atari
from benchmarks.peers.make_env import make_env
from benchmarks.peers.replay_works import REPLAY_SETTINGS, TRAINING_STEPS
from benchmarks.peers.result import Stopwatch


def network(space, num_actions, is_image):
    if not is_image:
        return Net(state_shape=space.shape, action_shape=num_actions, hidden_sizes=[256, 256])
    from tianshou.env.atari.atari_network import DQNet, ScaledObsInputActionReprNet

    return ScaledObsInputActionReprNet(DQNet(*space.shape, action_shape=num_actions))


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
    single = maker()  # the vector's spaces are those of environments without their wrappers
    space, actions = single.observation_space, single.action_space
    envs = DummyVectorEnv([maker] * settings.num_envs)
    envs.seed(0)
    policy = DiscreteQLearningPolicy(
        model=network(space, int(actions.n), is_image), action_space=actions
    )
    algorithm = DQN(
        policy=policy,
        optim=AdamOptimizerFactory(lr=settings.lr),
        target_update_freq=settings.target_interval,
        is_double=False,
        huber_loss_delta=1.0,
    )
    frames = {"stack_num": 4, "ignore_obs_next": True, "save_only_last_obs": True}
    buffer = VectorReplayBuffer(
        settings.replay_size, settings.num_envs, **(frames if is_image else {})
    )
    collector = Collector[CollectStats](algorithm, envs, buffer, exploration_noise=True)
    collector.reset()
    env_steps = gradient_steps = 0
    returns, stopwatch = [], Stopwatch()
    while env_steps < args.env_steps:
        policy.set_eps_training(max(0.05, 1 - 0.95 * env_steps / (0.1 * args.env_steps)))
        with policy_within_training_step(policy):
            collected = collector.collect(n_step=settings.num_envs * TRAINING_STEPS)
            returns.extend(collected.returns)
            env_steps += settings.block
            due = int(settings.ratio * max(0, env_steps - settings.learning_starts))
            if gradient_steps == due:
                continue
            while gradient_steps < due:
                algorithm.update(buffer=buffer, sample_size=settings.batch_size)
                gradient_steps += 1
        stopwatch.mark(env_steps)
    mean = np.mean(returns[-100:]) if returns else None
    stopwatch.print_result(mean, learner_steps=gradient_steps)
    envs.close()


if __name__ == "__main__":
    main()
