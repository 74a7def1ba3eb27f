"""SAC and Stable-Baselines3's SAC, an hour each on one core: evaluated return by wall time.

    python -m benchmarks.one_hour                                 # both environments, an hour each
    python -m benchmarks.one_hour --env HalfCheetah-v5 --seconds 600
    python -m benchmarks.one_hour --render                        # from runs/one_hour as it is

Headrace has no flag but the algorithm, the seed and evaluations; Stable-Baselines3 has its zoo's
settings (`peers/sb3_sac.py`). Both run at the same time, each on a core of its own, and evaluate 10
episodes (likeliest actions) after every 10,000 env steps; evaluations take their core's time.
Seconds begin with the process. Needs two cores that nothing else uses. Runs stay in runs/one_hour:
`headrace resume` goes on with Headrace's; later rows of its metrics are of seconds that its cores
may share. Left out: more than one seed.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys

from benchmarks.harness.machine import ROOT, machine
from benchmarks.peers import install
from benchmarks.peers.works import EVALUATED_EPISODES
from headrace.storage.files import write_whole
from headrace.storage.metrics import read_metrics

RETURNS = {"HalfCheetah-v5": (5_000, 9_000), "LunarLanderContinuous-v3": (260,)}
"""Environment -> returns whose seconds are given."""
EVERY = 10_000
SEED = 1
FOLDER = ROOT / "runs/one_hour"
RESULT = ROOT / "benchmarks/results/one_hour.json"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", choices=list(RETURNS), help="default: all, one after the other")
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--render", action="store_true", help="train nothing")
    args = parser.parse_args()
    for env in [args.env] if args.env else RETURNS:
        if not args.render:
            train(env, args.seconds)
    write()


def train(env, seconds):
    """Train both, each on one core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit(f"one_hour: it has {len(cores)} core, and needs two.")
    folder = FOLDER / env
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ours = [
        sys.executable, "-m", "headrace", "train", env, "--algo", "sac", "--seed", str(SEED),
        "--eval-every", str(EVERY), "--eval-episodes", str(EVALUATED_EPISODES),
        "--stop-after-s", str(seconds), "--run-dir", str(folder / "headrace"), "--json",
    ]  # fmt: skip
    theirs = [
        str(install.installed_python("sb3")), "-m", "benchmarks.peers.sb3_sac", env,
        "--seed", str(SEED), "--seconds", str(seconds), "--evaluate-every", str(EVERY),
        "--out", str(folder / "sb3.jsonl"),
    ]  # fmt: skip
    processes = []
    for name, command, core in (("headrace", ours, cores[0]), ("sb3", theirs, cores[1])):
        with (folder / f"{name}.txt").open("w") as log:
            os.sched_setaffinity(0, {core})
            surroundings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            processes.append(
                subprocess.Popen(command, cwd=ROOT, env=surroundings, stdout=log, stderr=log)
            )
    os.sched_setaffinity(0, cores)
    try:
        for process in processes:
            process.wait()
    except BaseException:
        for process in processes:
            process.send_signal(signal.SIGINT)
        raise
    if any(process.returncode for process in processes):
        sys.exit(f"one_hour: a run failed; see {folder}")
    about = {"machine": machine(), "seconds": seconds, "seed": SEED}
    (folder / "about.json").write_text(json.dumps(about))


def write():
    """Write the result of all that has been trained."""
    tables = {}
    for env, returns in RETURNS.items():
        folder = FOLDER / env
        if not (folder / "about.json").exists():
            continue
        about = json.loads((folder / "about.json").read_text())
        curves = {"Headrace": of_run(folder / "headrace"), "Stable-Baselines3": of_peer(folder)}
        tables[env] = about | {
            name: {
                "curve": [row for row in curve if row["wall_s"] <= about["seconds"]],
                "seconds_to": {str(wanted): seconds_to(curve, wanted) for wanted in returns},
            }
            for name, curve in curves.items()
        }
        for name in curves:
            last = tables[env][name]["curve"][-1:] or "no evaluation yet"
            print(f"{env}  {name:18} {last}  seconds to: {tables[env][name]['seconds_to']}")
    write_whole(RESULT, json.dumps(tables, indent=1).encode())


def of_run(run_dir):
    """Evaluations of a run of Headrace: the seconds are those of the update that reports them."""
    rows = [row for row in read_metrics(run_dir) if "eval_return" in row]
    return [
        {
            "wall_s": round(row["wall_s"], 1),
            "env_steps": row["eval_env_steps"],
            "eval_return": round(row["eval_return"], 1),
        }
        for row in rows
    ]


def of_peer(folder):
    """Evaluations of Stable-Baselines3."""
    rows = map(json.loads, (folder / "sb3.jsonl").read_text().splitlines())
    return [
        row | {"wall_s": round(row["wall_s"], 1), "eval_return": round(row["eval_return"], 1)}
        for row in rows
    ]


def seconds_to(curve, wanted):
    """Seconds until an evaluation is as high; None: none is."""
    return next((row["wall_s"] for row in curve if row["eval_return"] >= wanted), None)


if __name__ == "__main__":
    sys.exit(main())
