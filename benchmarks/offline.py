"""Learning from recorded steps: four algorithms on the replay of an SAC that has just learned.

    python -m benchmarks.offline             # half an hour on two cores
    python -m benchmarks.offline --share 0.1

For each seed, SAC learns Pendulum-v1 for 4,992 env steps, which begin with random actions. Then
each algorithm learns from its replay alone, with 9,984 steps read. It prints a table of mean
returns of 100 evaluated episodes: mean of the seeds ± its standard error. All have two hidden
layers of 64 units. Left out: learning on in the environment.
"""

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.defaults.runs import EPISODES, call
from benchmarks.harness.machine import RESULTS, machine
from benchmarks.presets.results import mean_and_error

NAME = "offline"
ENV = "Pendulum-v1"
ALGORITHMS = ("bc", "td3bc", "cql", "iql")
SEEDS = (1, 2, 3)
RECORDED, READ = 4_992, 9_984
NETWORK = ("--hidden-sizes", "64", "64")


def train(folder, algo, seed, env_steps, *more):
    """Train and evaluate a run: its return."""
    run_dir = folder / algo
    words = ["headrace", "train", ENV, "--algo", algo, "--seed", seed, *NETWORK, *more]
    call(sys.executable, [*words, "--total-env-steps", env_steps, "--run-dir", run_dir, "--json"])
    played = ["headrace", "eval", run_dir, "--episodes", EPISODES, "--json"]
    return call(sys.executable, played)["mean_return"]


def measure(seed, share):
    """The returns of one seed, by algorithm."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        found = {"sac": train(folder, "sac", seed, int(RECORDED * share))}
        for algo in ALGORITHMS:
            data = ("--data", folder / "sac")
            found[algo] = train(folder, algo, seed, int(READ * share), *data)
            print(f"seed {seed}, {algo}: {found[algo]:.1f}", flush=True)
    return found


def tables(results):
    """The only table."""
    seeds = results["seeds"].values()
    lines = ["| | return | ± |", "|---|---|---|"]
    for algo in ("sac", *ALGORITHMS):
        mean, error = mean_and_error([found[algo] for found in seeds])
        name = "SAC, which recorded" if algo == "sac" else f"`{algo}`"
        lines.append(f"| {name} | {mean:.1f} | {error:.1f} |")
    return "\n".join([*lines, "", f"{ENV}, {len(seeds)} seeds."])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--share", type=float, default=1.0, help="of the env steps: for a look")
    share = parser.parse_args().share
    found = {str(seed): measure(seed, share) for seed in SEEDS}
    path = RESULTS / f"{NAME}.json"
    path.write_text(json.dumps({"machine": machine(), "share": share, "seeds": found}))
    print(tables(json.loads(path.read_text())))
    print(f"Written: {path}")


if __name__ == "__main__":
    main()
