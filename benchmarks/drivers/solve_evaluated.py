"""Headrace with its preset, until an evaluation of the policy is as high as a given return.

    python -m benchmarks.drivers.solve_evaluated Hopper-v5 --mean-return 2410 --evaluate-every 25000

It prints the same line as `benchmarks.peers.sb3_solve`, also if the return was not reached.
"""

import argparse
import contextlib
import json

import headrace
from benchmarks.peers.works import EVALUATED_EPISODES


class ReachedError(Exception):
    """The return is reached: nothing more is to be trained."""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--mean-return", type=float, required=True)
    parser.add_argument("--evaluate-every", type=int, required=True, help="env steps")
    parser.add_argument("--env-steps", type=int, help="at most; default: the preset's")
    args = parser.parse_args()
    last = {"env_steps": 0, "mean_return": None}

    def on_update(_, metrics):
        last["env_steps"] = metrics["env_steps"]
        if "eval_return" in metrics:
            last["mean_return"] = metrics["eval_return"]
            if last["mean_return"] >= args.mean_return:
                last["env_steps"] = metrics["eval_env_steps"]
                raise ReachedError

    settings = {
        "seed": args.seed,
        "eval_every": args.evaluate_every,
        "eval_episodes": EVALUATED_EPISODES,
    } | ({"total_env_steps": args.env_steps} if args.env_steps else {})
    with contextlib.suppress(ReachedError):
        headrace.train(args.env, run_dir="run", quiet=True, on_update=on_update, **settings)
    print(f"RESULT {json.dumps(last)}")


if __name__ == "__main__":
    main()
