"""A kernel environment alone: random actions, no policy; resets and random numbers included.

    python -m benchmarks.drivers.step_kernel --env headrace/CartPole-v1 --num-envs 9 --env-steps 999

`--form gymnasium` steps Gymnasium's own vector form of an id instead (NumPy, one core), with the
same actions. Actions are drawn beforehand: what is measured is stepping. `--processes 2` gives
each of two processes half of the environments, as `--num-learners 2` does. It prints the same line
as the other drivers do.
"""

import argparse
import json
import multiprocessing

import gymnasium
import numpy as np
import torch

from benchmarks.peers.result import Stopwatch
from headrace import batch
from headrace.envs.api import VectorContext
from headrace.envs.factory import EnvMaker, env_spec
from headrace.envs.kernels.vector import KernelVector

NUM_STEPS = 32


def random_actions(space, num_rows):
    """`[NUM_STEPS, rows, ...]`: the policy's, of a Box within it."""
    rng = np.random.default_rng(0)
    if space.kind == "box":
        return rng.uniform(-1, 1, (NUM_STEPS, num_rows, space.size)).astype(np.float32)
    shape = (NUM_STEPS, num_rows, *space.shape)
    return rng.integers(0, space.nvec if space.shape else space.nvec[0], shape)


def step_headrace(env, kwargs, num_envs, threads, env_steps, stopwatch, barrier=None):
    maker = EnvMaker(env, kwargs, native=True)
    kernel, spec = maker.kernel(), env_spec(maker)
    context = VectorContext(spec, np.arange(num_envs), 0, num_threads=threads, last_episodes=100)
    vector = KernelVector(kernel, context)
    rows = num_envs * spec.num_agents
    capacity = vector.finals_per_row(NUM_STEPS) * rows
    fragment = batch.allocate(batch.columns(spec, {}, NUM_STEPS, rows, capacity=capacity))
    fragment.action.numpy()[:] = random_actions(spec.action, rows)
    done, alive = 0, 0
    vector.bind(fragment)
    vector.step(0)  # compiles, or loads
    if barrier is not None:
        barrier.wait(60)
    while done < env_steps:
        vector.bind(fragment)
        for t in range(NUM_STEPS):
            vector.step(t)
            done += num_envs
            stopwatch.mark(done)
        vector.finish()
        alive = int(fragment.valid.sum())
    vector.close()
    return {"agents": spec.num_agents, "agents_in_the_game": alive / fragment.valid.numel()}


def step_gymnasium(env, kwargs, num_envs, env_steps, stopwatch):
    vector = gymnasium.make_vec(env, num_envs, "vector_entry_point", **kwargs)
    vector.reset(seed=0)
    rng = np.random.default_rng(0)
    actions = rng.integers(0, vector.single_action_space.n, (NUM_STEPS, num_envs))
    done = 0
    while done < env_steps:
        for action in actions:
            vector.step(action)
            done += num_envs
            stopwatch.mark(done)
    return {"agents": 1, "agents_in_the_game": 1.0}


def one_process(how, threads, env_steps, barrier, results):
    """A share of the work, begun together with the others'."""
    torch.set_num_threads(1)
    stopwatch = Stopwatch()
    more = step_headrace(*how, threads, env_steps, stopwatch, barrier)
    results.put((stopwatch.rate(), more))


def in_processes(count, env, kwargs, num_envs, threads, env_steps):
    """The sum of their rates, as the drivers' line."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(count), context.Queue()
    share = (env, kwargs, num_envs // count), threads, env_steps // count, barrier, results
    children = [context.Process(target=one_process, args=share) for _ in range(count)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    found = [results.get(timeout=1) for _ in children]
    rate = sum(rate for rate, _ in found)
    print(f"RESULT {json.dumps({'env_steps': env_steps, 'env_steps_per_s': rate, **found[0][1]})}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", required=True)
    parser.add_argument("--env-kwargs", type=json.loads, default={}, help="JSON")
    parser.add_argument("--num-envs", type=int, required=True)
    parser.add_argument("--env-steps", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--form", choices=["headrace", "gymnasium"], default="headrace")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the accounts of a fragment: idle threads of torch's would spin
    stopwatch = Stopwatch()
    how = args.env, args.env_kwargs, args.num_envs
    if args.processes > 1:
        in_processes(args.processes, *how, args.threads, args.env_steps)
        return
    if args.form == "gymnasium":
        more = step_gymnasium(*how, args.env_steps, stopwatch)
    else:
        more = step_headrace(*how, args.threads, args.env_steps, stopwatch)
    stopwatch.print_result(**more)


if __name__ == "__main__":
    main()
