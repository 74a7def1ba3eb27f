"""What the defaults learn: Headrace without presets, beside Stable-Baselines3 with no settings.

    python -m benchmarks.defaults                            # all parts, what has no result yet
    python -m benchmarks.defaults --part ppo --only Hopper   # one part, cases with such a name
    python -m benchmarks.defaults --render                   # the page, from the results there are

Each run is a process of its own. It is saved as soon as it has ended, in `results/defaults/`, one
file for each case, so that a benchmark that was cut goes on where it was. A case is trained anew if
its command line or its settings (the defaults) have changed. A change of `own_envs.py` or of an
algorithm is not seen: `--again`. Several of these can run at once. The runs share the machine, so
that their seconds are no benchmark. Left out: what is trained (`cases.py`), one run (`runs.py`),
and the page (`page.py`).
"""

import argparse
import concurrent.futures
import re
import sys
from pathlib import Path

from benchmarks.defaults import page, runs
from benchmarks.defaults.cases import PARTS, SEEDS
from benchmarks.harness.machine import ROOT

RESULTS = ROOT / "benchmarks/results/defaults"
PAGE = ROOT / "docs/defaults.md"
ENV_STEPS = 500_000


def run_all(args, work):
    """Train what has no result; the names of the runs that failed."""
    failed = []

    def one(case, seed):
        name = f"{case.name}, seed {seed}"
        try:
            if not args.again and runs.is_done(args.results, case, seed, args.env_steps):
                print(f"{name}: there already", flush=True)
                return
            run = runs.train(case, seed, case.env_steps(args.env_steps))
            runs.save(args.results, case, seed, run, args.env_steps)
        except (RuntimeError, ValueError, OSError) as error:
            failed.append(name)
            print(f"{name} failed: {error}", flush=True)
        else:
            figures = f"return {run['mean_return']}, evaluated {run['eval_return']}"
            print(f"{name}: {figures}, {run['seconds']:.0f} s", flush=True)

    with concurrent.futures.ThreadPoolExecutor(args.at_once) as pool:
        futures = [pool.submit(one, case, seed) for case, seed in work]
        try:
            for future in futures:
                future.result()
        except BaseException:  # Ctrl-C, which ends the runs under way as well
            pool.shutdown(cancel_futures=True)
            raise
    return failed


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=list(PARTS), help="default: all of them")
    parser.add_argument("--only", default="", help="a regular expression that a case's name has")
    parser.add_argument("--who", choices=["headrace", "sb3"], help="default: both")
    parser.add_argument("--seeds", help="as in 1,2,3; default: those of the part")
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time")
    parser.add_argument("--env-steps", type=int, default=ENV_STEPS)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results and page")
    parser.add_argument("--again", action="store_true", help="train also what has a result")
    parser.add_argument("--render", action="store_true", help="train nothing")
    args = parser.parse_args(argv)
    if args.env_steps != ENV_STEPS and args.results == RESULTS:
        parser.error(
            f"--env-steps {args.env_steps}: docs/defaults.md is of {ENV_STEPS}. Name another "
            "folder for other results and their page: --results FOLDER"
        )
    args.results.mkdir(parents=True, exist_ok=True)
    # Several parts have cases in common. The first seed of every case comes first, so that a
    # benchmark that is cut has something of each.
    work = {
        (case, seed): None
        for part in ([args.part] if args.part else PARTS)
        for case in PARTS[part]
        for seed in (map(int, args.seeds.split(",")) if args.seeds else SEEDS[part])
        if re.search(args.only, case.name) and args.who in (None, case.who) and not args.render
    }
    runs.measure_random(args.results, {case.env for case, _ in work}, args.again)
    failed = run_all(args, sorted(work, key=lambda each: each[1]))
    place = PAGE if args.results == RESULTS else args.results / "README.md"
    place.write_text(page.render(args.results, args.env_steps))
    if failed:
        sys.exit(f"Failed: {'; '.join(failed)}. The others are saved; run this again.")


if __name__ == "__main__":
    main()
