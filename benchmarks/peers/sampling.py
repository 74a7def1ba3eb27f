"""What the drivers that only sample have in common: their arguments, and the clock.

    python -m benchmarks.peers.sample_NAME --env MODULE:CALLABLE [--env-kwargs KEY=VALUE ...]
        --num-envs N [--seconds S]

Actions are random, and nothing is learned (RLlib samples only with a policy: a small one). The rate
is that of `--seconds` in which everything runs as it will, after `WARM_S` that are not counted.
"""

import argparse
import functools
import importlib
import time

from benchmarks.peers.result import Stopwatch

WARM_S = 2.0


def parser(description):
    """For the arguments that all have; a driver may add its own."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--env", required=True, metavar="MODULE:CALLABLE")
    made.add_argument("--env-kwargs", nargs="*", default=[], metavar="KEY=VALUE")
    made.add_argument("--num-envs", type=int, required=True)
    made.add_argument("--seconds", type=float, default=8.0)
    return made


def maker(args):
    """What makes one environment; can be pickled."""
    module, _, name = args.env.partition(":")
    kwargs = dict(text.split("=", 1) for text in args.env_kwargs)
    return functools.partial(getattr(importlib.import_module(module), name), **kwargs)


def sample(step, seconds):
    """Call `step`, which says how many env steps it made, for so long; print the result."""
    stopwatch, done, began = Stopwatch(), 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < WARM_S + seconds:
        done += step()
        if passed >= WARM_S:
            stopwatch.mark(done)
    stopwatch.print_result()
