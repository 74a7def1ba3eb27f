"""Measures one limit of this machine, and prints it as contestants do (`limits.py` has the list).

    python -m benchmarks.drivers.measure_limit products --precision fp32 --threads 1
    python -m benchmarks.drivers.measure_limit memory --threads 2
    python -m benchmarks.drivers.measure_limit stepping --env CartPole-v1
    python -m benchmarks.drivers.measure_limit training --env CartPole-v1 --flops 229888

Of products and memory the fastest repetition counts: a limit is what the machine can do when
nothing else disturbs it. Stepping takes random actions, and goes on for a fixed time.
"""

import argparse
import json
import multiprocessing
import time

from benchmarks.harness.machine import cores

STEPPING_S = 2.0
SIDE = 2048
"""Of the square matrices: large enough that only arithmetic counts."""
COPIED_BYTES = 256 * 2**20
REPETITIONS = 8


def products(precision, threads):
    """FLOP/s of a product of two matrices, which takes 2 x SIDE^3 of them."""
    import torch

    torch.set_num_threads(threads)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    a, b = (torch.randn(SIDE, SIDE, dtype=dtype) for _ in range(2))
    out = torch.empty(SIDE, SIDE, dtype=dtype)
    return 2 * SIDE**3 / _fastest(lambda: torch.mm(a, b, out=out))


def memory(threads):
    """Bytes/s of copying a block that no cache holds: each byte is read and written."""
    import torch

    torch.set_num_threads(threads)
    here = torch.ones(COPIED_BYTES, dtype=torch.uint8)
    there = torch.zeros_like(here)
    return COPIED_BYTES / _fastest(lambda: there.copy_(here))


def _fastest(work):
    """Seconds of the fastest repetition."""
    seconds = []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def stepping(env, seconds):
    """Env steps/s on all cores: one process each, for Breakout one thread each."""
    if env.startswith("ALE/"):
        return _stepping_atari(seconds)
    context = multiprocessing.get_context("spawn")
    count = cores()
    ready, results = context.Barrier(count), context.Queue()
    children = [
        context.Process(target=_step_one, args=(env, i, seconds, ready, results))
        for i in range(count)
    ]
    for child in children:
        child.start()
    taken = [results.get(timeout=60 + seconds) for _ in children]
    for child in children:
        child.join()
    return sum(taken)


def _step_one(env_id, seed, seconds, ready, results):
    """One process: one environment, made as Gymnasium makes it."""
    import gymnasium as gym

    env = gym.make(env_id)
    env.action_space.seed(seed)
    actions = [env.action_space.sample() for _ in range(1000)]
    env.reset(seed=seed)
    ready.wait(60)
    taken, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        taken += len(actions)
    results.put(taken / spent)


def _stepping_atari(seconds):
    """Breakout, by ale-py's own threads, one for each core."""
    import numpy as np

    from benchmarks.peers.atari import make_vector

    num_envs = 8
    env = make_vector(num_envs, cores())
    actions = np.random.default_rng(0).integers(0, env.single_action_space.n, (1000, num_envs))
    env.reset(seed=0)
    taken, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        env.step(actions[taken % len(actions)])
        taken += 1
    env.close()
    return taken * num_envs / spent


def training(env_steps_per_s, flops, flops_per_s):
    """Env steps/s of training that did nothing but step and multiply, on all cores."""
    return 1 / (1 / env_steps_per_s + flops / flops_per_s)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["products", "memory", "stepping", "training"])
    parser.add_argument("--env", help="of stepping and training")
    parser.add_argument("--flops", type=int, help="of training: for each env step")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--seconds", type=float, default=STEPPING_S, help="of stepping")
    args = parser.parse_args()
    if args.what == "products":
        result = {"gflops_per_s": products(args.precision, args.threads) / 1e9}
    elif args.what == "memory":
        result = {"gb_per_s": memory(args.threads) / 1e9}
    else:
        rate = stepping(args.env, args.seconds)
        result = {"env_steps_per_s": rate}
        if args.what == "training":
            flops_per_s = products(args.precision, args.threads)
            result = {
                "env_steps_per_s": training(rate, args.flops, flops_per_s),
                "stepping_alone": rate,
                "gflops_per_s": flops_per_s / 1e9,
            }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
