"""RLlib's PPO in a game of several agents, with the settings of `works.py`.

Its new API stack, with the game in its own `ParallelPettingZooEnv`, a policy for each role (agents'
names up to their number), and the games shared out among env runners. An env step is one step of a
game with all its agents, as RLlib counts too. Its minibatches have one size for all policies: so
many rows that the policy with most agents has as many minibatches as the settings say. Policies
with fewer agents go through their rows more often in the same number of minibatches.

With `--episodes` the policies then play whole episodes by their likeliest actions, in games of this
process: `eval_return` is the mean over agents and episodes of the undiscounted return.
"""

import argparse
import importlib
import tempfile
import time
from collections import Counter

import numpy as np
import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
from ray.tune.registry import register_env

from benchmarks.peers.result import Stopwatch
from benchmarks.peers.works import SETTINGS

FIRST_EVAL_SEED = 100_000
OBJECT_STORE_BYTES = 1 << 29


def make_game(name):
    """One game, from `module:callable`."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)()


def role_of(agent, *_, **__):
    """The policy of an agent, by its name."""
    return agent.rpartition("_")[0]


def build(settings, agents, num_runners, seed):
    """The algorithm."""
    register_env("game", lambda config: ParallelPettingZooEnv(make_game(settings.env)))
    roles = Counter(map(role_of, agents))
    rows = settings.batch * max(roles.values())
    model = DefaultModelConfig(
        fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False
    )
    return (
        PPOConfig()
        .environment("game")
        .env_runners(
            num_env_runners=num_runners,
            num_envs_per_env_runner=settings.num_envs // max(1, num_runners),
            rollout_fragment_length=settings.num_steps,
        )
        .multi_agent(policies=set(roles), policy_mapping_fn=role_of)
        .learners(num_learners=0)
        .training(
            train_batch_size_per_learner=settings.batch,
            minibatch_size=rows // settings.num_minibatches,
            num_epochs=settings.num_epochs,
            lr=settings.lr,
            gamma=0.99,
            lambda_=0.95,
            clip_param=0.2,
            entropy_coeff=settings.ent_coef,
            vf_loss_coeff=0.5,
            vf_clip_param=float("inf"),
            use_kl_loss=False,
            grad_clip=0.5,
            grad_clip_by="global_norm",
        )
        .rl_module(model_config=model)
        .debugging(seed=seed)
        .build_algo()
    )


def train(algorithm, stopwatch, env_steps, limit_s):
    """Until so many env steps, or seconds, are over; the mean return of the last, by game."""
    began = time.perf_counter()
    while True:
        result = algorithm.train()
        done = int(result["num_env_steps_sampled_lifetime"])
        stopwatch.mark(done)
        late = limit_s is not None and time.perf_counter() - began > limit_s
        if done >= env_steps or late:
            return result["env_runners"].get("episode_return_mean")


@torch.no_grad()
def evaluate(algorithm, game, episodes):
    """Means over agents of the returns of whole episodes, by the likeliest actions."""
    means = []
    for episode in range(episodes):
        observations, _ = game.reset(seed=FIRST_EVAL_SEED + episode)
        returns = dict.fromkeys(game.possible_agents, 0.0)
        while game.agents:
            actions = {}
            for agent, seen in observations.items():
                batch = {Columns.OBS: torch.from_numpy(np.asarray(seen, np.float32)[None])}
                out = algorithm.get_module(role_of(agent)).forward_inference(batch)
                actions[agent] = int(out[Columns.ACTION_DIST_INPUTS][0].argmax())
            observations, rewards, *_ = game.step(actions)
            for agent, reward in rewards.items():
                returns[agent] += float(reward)
        means.append(float(np.mean(list(returns.values()))))
    return means


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", choices=["spread", "tag"], required=True)
    parser.add_argument("--env-steps", type=int, required=True)
    parser.add_argument("--num-runners", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, help="stop after the update that ends later")
    parser.add_argument("--episodes", type=int, default=0, help="to play afterwards")
    args = parser.parse_args()
    settings = SETTINGS[args.work]
    ray.init(
        num_cpus=args.num_runners + 2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=f"{tempfile.gettempdir()}/ray",  # else /tmp/ray, which nobody removes
    )
    game = make_game(settings.env)
    agents = list(game.possible_agents)
    algorithm = build(settings, agents, args.num_runners, args.seed)
    stopwatch, more = Stopwatch(), {}
    of_games = train(algorithm, stopwatch, args.env_steps, args.limit_s)
    if args.episodes:
        game.reset(seed=0)
        returns = evaluate(algorithm, game, args.episodes)
        more |= {"eval_return": float(np.mean(returns)), "eval_std": float(np.std(returns))}
    algorithm.stop()
    ray.shutdown()
    # RLlib's return is the sum over agents.
    stopwatch.print_result(None if of_games is None else of_games / len(agents), **more)


if __name__ == "__main__":
    main()
