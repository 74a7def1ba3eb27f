"""RLlib's env runners alone: an actor for each environment, each with a copy of a small policy.

Each makes `--num-steps` env steps when asked, and is asked again as soon as it has answered, as
RLlib's asynchronous algorithms do. Its PPO, which waits for all of them, is not measured.
"""

import tempfile

import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.registry import register_env

from benchmarks.peers import sampling

WAIT_S = 0.02


def make_group(args):
    """The env runners of an algorithm that never learns."""
    ray.init(
        num_cpus=args.num_envs + 2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=1 << 29,
        _temp_dir=f"{tempfile.gettempdir()}/ray",  # else /tmp/ray, which nobody removes
    )
    make = sampling.maker(args)
    register_env("bench", lambda config: make())
    model = DefaultModelConfig(
        fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False
    )
    batch = args.num_envs * args.num_steps
    config = (
        PPOConfig()
        .environment("bench")
        .env_runners(
            num_env_runners=args.num_envs,
            num_envs_per_env_runner=1,
            num_cpus_per_env_runner=0.01,
            rollout_fragment_length=args.num_steps,
        )
        .learners(num_learners=0)
        .training(train_batch_size_per_learner=batch, minibatch_size=batch)
        .rl_module(model_config=model)
    )
    algorithm = config.build_algo()
    return algorithm, algorithm.env_runner_group


def make_steps(runner):
    """What a runner does when it is asked; how many env steps it made."""
    return sum(len(episode) for episode in runner.sample())


def main():
    parser = sampling.parser(__doc__)
    parser.add_argument("--num-steps", type=int, required=True)
    args = parser.parse_args()
    algorithm, group = make_group(args)

    def step():
        done = 0
        for runner, steps in group.fetch_ready_async_reqs(tags="bench", timeout_seconds=WAIT_S):
            done += steps
            group.foreach_env_runner_async(make_steps, tag="bench", remote_worker_ids=[runner])
        return done

    group.foreach_env_runner_async(make_steps, tag="bench")
    sampling.sample(step, args.seconds)
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
