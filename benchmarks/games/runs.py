"""What the parts that train have in common: runs by the command line, and their results' file.

Run directories, and what the commands printed, stay in runs/games/ until the part is measured
again. Left out: what is trained (`classic.py`, `matrix.py`, `taggers.py`, `spread.py`).
"""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

from benchmarks.harness.contestants import headrace
from benchmarks.harness.machine import RESULTS, ROOT, cores, machine
from benchmarks.harness.result import read_result
from benchmarks.tune.commands import HEADRACE, run
from headrace.storage.files import write_whole

FOLDER = ROOT / "runs/games"
ONE_PROCESS = ("--num-learners", "1", "--num-workers", "0", "--device", "cpu")
"""So that a seed gives the same run on each machine of a kind, and runs can go side by side."""


def add_flags(parser, seeds):
    """Those of a part that trains with several seeds."""
    parser.add_argument("--seeds", type=int, default=seeds, help=f"how many; default: {seeds}")
    parser.add_argument("--output", metavar="PATH", help="default: benchmarks/results/NAME.json")


def train(folder, name, env, *flags):
    """One run, in `folder / name`: what `headrace train --json` says at its end."""
    command = ["train", env, *flags, "--run-dir", name, "--json"]
    _, lines = run([*HEADRACE, *command], folder, name)
    told = read_result(lines[-1][1])
    rate = told["env_steps_per_s"] or 0.0
    print(f"{name}: {told['env_steps']:,} env steps, {rate:,.0f}/s", flush=True)
    shown = " ".join(map(str, command)).replace(f"{FOLDER}/", "runs/games/")
    return {
        "command": f"headrace {shown}",
        "env_steps": told["env_steps"],
        "env_steps_per_s": told["env_steps_per_s"],
        "wall_s": told["wall_s"],
        "mean_return": told["mean_return"],
    }


def side_by_side(function, each):
    """The results of a function, of as many at a time as there are cores; in their order."""
    with ThreadPoolExecutor(cores()) as pool:
        return list(pool.map(function, each))


def fresh(name):
    """An empty folder for a part's runs."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def about(name, flags, **more):
    """What the results of each part begin with."""
    return {
        "benchmark": name,
        "machine": machine(),
        "versions": headrace("Headrace", []).describe()["versions"],
        "share": flags.share,
        "seeds": flags.seeds,
        **more,
    }


def path_of(name, flags):
    """The results' file of a part."""
    return ROOT / (flags.output or RESULTS / f"{name}.json")


def save(result, flags):
    """Write the results so far; the file."""
    path = path_of(result["benchmark"], flags)
    write_whole(path, (json.dumps(result, indent=1) + "\n").encode())
    return path


def write(result, tables, flags):
    """Write the results, and print them as tables."""
    path = save(result, flags)
    print(f"\n{tables(result)}\n\nWritten: {path}")
