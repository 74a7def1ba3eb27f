"""The curves that the presets give: trains each with its seeds, and writes docs/presets.md.

    python -m benchmarks.presets                 # what has no result yet, two runs at a time
    python -m benchmarks.presets --only Lander   # again, those with this in their name
    python -m benchmarks.presets --render        # docs/presets.md from the results that are there

Results are in `results/presets/`, one file per preset and algorithm. Left out: comparing (see
`cartpole.py`, `atari.py`); the rates here are of runs that share the machine.
"""

import argparse
import concurrent.futures
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/presets"
PAGE = ROOT / "docs/presets.md"
POINTS = 25  # of a curve


@dataclass(frozen=True)
class Task:
    """A preset, as it is trained here; or settings of one, with a label."""

    family: str
    env: str
    algo: str = "ppo"
    seeds: tuple[int, ...] = (1, 2, 3)
    flags: tuple[str, ...] = ()
    label: str = ""

    @property
    def name(self):
        env = self.env.replace("/", "-").partition(":")[0]
        return "-".join(filter(None, (env, self.algo, self.label)))


def memory(core):
    """A task that takes a memory, with and without one."""
    flags = (
        f"--core {core} --normalize-obs --normalize-reward --lr 5e-4 --lr-schedule linear "
        "--clip-schedule linear --num-epochs 10 --num-minibatches 1 --num-envs 8 "
        "--envs-per-vector 4 --num-steps 64 --total-env-steps 149504"
    )
    env = "examples.cartpole_without_velocities:make"
    return Task("Memory", env, flags=tuple(flags.split()), label=core)


TASKS = (
    Task("Classic control", "CartPole-v1"),
    Task("Classic control", "CartPole-v1", "a2c"),
    *(
        Task("Classic control", "CartPole-v1", algo, flags=("--lag", str(lag)), label=f"lag-{lag}")
        for algo in ("appo", "impala")
        for lag in (2, 4)
    ),
    Task("Classic control", "Acrobot-v1"),
    Task("Classic control", "Pendulum-v1"),
    *(memory(core) for core in ("lstm", "gru", "none")),
    Task("Box2D", "LunarLander-v3"),
    Task("MiniGrid", "MiniGrid-Empty-8x8-v0"),
    Task("MuJoCo", "HalfCheetah-v5"),
    Task("Atari", "ALE/Breakout-v5", seeds=(1,), flags=("--total-env-steps", "299008")),
)


def train(task, seed):
    """One run in a process of its own: its summary, and its curve."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [Path(sys.executable).with_name("headrace"), "train", task.env, "--json"]
        command += ["--algo", task.algo, "--seed", str(seed), "--run-dir", run_dir, *task.flags]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise RuntimeError(f"{task.name}, seed {seed}, failed:\n{done.stderr[-2000:]}")
        summary = json.loads(done.stdout.splitlines()[-1])
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        config = json.loads((run_dir / "config.json").read_text())
    every = max(1, len(rows) // POINTS)
    curve = [[r["env_steps"], r["mean_return"]] for r in rows[every - 1 :: every]]
    print(f"{task.name}, seed {seed}: {summary['mean_return']:.2f}", flush=True)
    return {
        "seed": seed,
        "curve": curve,
        "versions": config["versions"],
        **{
            name: summary[name]
            for name in ("env_steps", "wall_s", "env_steps_per_s", "mean_return")
        },
    }


def save(task, runs):
    RESULTS.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    found = {
        "env": task.env,
        "algo": task.algo,
        "flags": task.flags,
        "commit": commit.stdout.strip() or None,
        "machine": platform.machine(),
        "runs": runs,
    }
    (RESULTS / f"{task.name}.json").write_text(json.dumps(found, indent=1) + "\n")


def sparkline(curve, low, high):
    """A curve in one line of text, between the least and the highest return of all seeds."""
    marks = "▁▂▃▄▅▆▇█"
    known = [mean for _, mean in curve if mean is not None]
    span = (high - low) or 1
    return "".join(marks[round((mean - low) / span * (len(marks) - 1))] for mean in known)


def render():
    lines = [
        "# Presets and the curves they give",
        "",
        "Made by `python -m benchmarks.presets`; do not edit. A preset applies when its",
        "environment is trained without further flags (the command stands beside each), and is",
        "printed at the start of a run. Returns are the mean of the last 100 training episodes",
        "(raw rewards). Each curve is one seed, from the first to the last env step, between the",
        "least and the highest value of all seeds of its table. Two runs shared the machine, so",
        "that the rates are no benchmark.",
    ]
    family = None
    for task in TASKS:
        path = RESULTS / f"{task.name}.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        if task.family != family:
            family = task.family
            lines += ["", f"## {family}"]
        means = [mean for run in found["runs"] for _, mean in run["curve"] if mean is not None]
        algo = "" if task.algo == "ppo" else f" --algo {task.algo}"
        flags = "".join(f" {word}" for word in found["flags"])
        lines += [
            "",
            f"`headrace train {task.env}{algo}{flags}`: median at the end "
            f"{statistics.median(run['mean_return'] for run in found['runs']):.2f}; the curves lie "
            f"between {min(means):.2f} and {max(means):.2f}",
            "",
            "| seed | curve | at the end | env steps | wall s | env steps/s |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {run['seed']} | `{sparkline(run['curve'], min(means), max(means))}` "
            f"| {run['mean_return']:.2f} | {run['env_steps']:,} | {run['wall_s']:.0f} "
            f"| {run['env_steps_per_s']:,.0f} |"
            for run in found["runs"]
        ]
    PAGE.write_text("\n".join(lines) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a name: train those, again")
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time")
    parser.add_argument("--render", action="store_true", help="train nothing")
    args = parser.parse_args()
    wanted = [
        task
        for task in TASKS
        if not args.render
        and (args.only in task.name if args.only else not (RESULTS / f"{task.name}.json").exists())
    ]
    with concurrent.futures.ThreadPoolExecutor(args.at_once) as pool:
        runs = {task: [pool.submit(train, task, seed) for seed in task.seeds] for task in wanted}
        for task, futures in runs.items():
            save(task, [future.result() for future in futures])
    render()


if __name__ == "__main__":
    main()
