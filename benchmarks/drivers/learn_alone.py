"""PPO's updates alone, on one batch that is learned from again and again: the learner's limit.

    python -m benchmarks.drivers.learn_alone --num-envs 1024 --num-steps 32 --env-steps 999999

Each process learns from its share of the environments, and none waits for another. The batch is
that of a first policy's play of headrace/CartPole-v1. It prints the same line as the other drivers.
"""

import argparse
import json
import multiprocessing
import time

import numpy as np

from benchmarks.peers.works import SETTINGS

ENV = "headrace/CartPole-v1"


def learn(flags, barrier, results):
    """One process: env steps learned from per second."""
    import torch

    from headrace.collectors.api import PolicyPlan, SamplingPlan
    from headrace.collectors.device import DeviceCollector
    from headrace.config.policies import assign_agents
    from headrace.config.resolve import resolve
    from headrace.envs.factory import EnvMaker, env_spec
    from headrace.learner.learner import Learner
    from headrace.meter import Meter
    from headrace.spec import Agents

    torch.set_num_threads(1)
    num_envs = flags.num_envs // flags.processes
    given = {"env": ENV, "num_envs": num_envs, "num_steps": flags.num_steps, "device": "cpu"}
    work = SETTINGS["cartpole"]
    given |= {"num_epochs": work.num_epochs, "num_minibatches": work.num_minibatches}
    settings = resolve(given)
    maker = EnvMaker(ENV, native=True)
    spec, device = env_spec(maker), torch.device("cpu")
    policy = PolicyPlan(
        Agents(0, 1), spec, settings.network, settings.algorithm.stored_outputs,
        lambda: settings.algorithm.build_policy(spec, settings.network, settings.algo),
    )  # fmt: skip
    plan = SamplingPlan(
        maker=maker, spec=spec, policies={"default": policy},
        num_steps=flags.num_steps, num_envs=num_envs,
        first_env=0, envs_per_vector=num_envs, seed=0, reseed_episodes=True, replay_limit_s=1.0,
        threads_per_worker=1,
    )  # fmt: skip
    learner = Learner(settings, assign_agents({}, spec), spec, None, device, Meter())
    collector = DeviceCollector(plan, device, Meter(), lambda: False)
    collector.publish(learner.policies, 0)
    batch = learner.assemble(collector.collect().fragments)
    learner.update(batch, 0)
    barrier.wait(120)
    began, done = time.perf_counter(), 0
    while done < flags.env_steps // flags.processes:
        learner.update(batch, 0)
        done += num_envs * flags.num_steps
    results.put((done, time.perf_counter() - began))
    collector.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--num-envs", type=int, required=True)
    parser.add_argument("--num-steps", type=int, required=True)
    parser.add_argument("--env-steps", type=int, required=True)
    flags = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(flags.processes), context.Queue()
    children = [
        context.Process(target=learn, args=(flags, barrier, results))
        for _ in range(flags.processes)
    ]
    for child in children:
        child.start()
    found = np.array([results.get(timeout=280) for _ in children])
    for child in children:
        child.join()
    done, seconds = found.T
    print(json.dumps({"env_steps": int(done.sum()), "env_steps_per_s": (done / seconds).sum()}))


if __name__ == "__main__":
    main()
