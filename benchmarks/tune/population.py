"""Whether population-based training helps where a fixed learning rate is poor.

CartPole's PPO with learning rates drawn from 1e-5 to 0.1: nearly all are poor for a whole run.
The same eight members are trained twice for as many env steps: as a population (`--pbt`), and each
with the learning rate that it began with. What is compared are the members' returns at the end, of
the same 20 episodes for all. Left out: fresh seeds (`helped.py`).
"""

import json
import shutil
import statistics

from benchmarks.harness.contestants import headrace
from benchmarks.harness.machine import RESULTS, ROOT, machine
from benchmarks.tune.commands import HEADRACE, run
from headrace.storage.files import write_whole
from headrace.tuning.plan import read_plan, read_trials

NAME = "tune_population"
ENV, MEMBERS, PARALLEL = "CartPole-v1", 8, 2
SPACE = "lr = { log = [1e-5, 0.1] }\n"
ENV_STEPS, QUICK_ENV_STEPS = 100_000, 8_000
FOLDER = ROOT / "runs/tune_population"
OUTPUT = RESULTS / f"{NAME}.json"
KINDS = {
    "population": ("--pbt", "--population", MEMBERS),
    "alone": ("--sampler", "random", "--prune", "none", "--trials", MEMBERS),
}


def main(quick):
    """Train both, and write the result."""
    env_steps = QUICK_ENV_STEPS if quick else ENV_STEPS
    folder = FOLDER / ("quick" if quick else "studies")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "space.toml").write_text(SPACE)
    result = {"benchmark": NAME, "machine": machine(), "env": ENV, "env_steps": env_steps}
    result["versions"] = headrace("Headrace", []).describe()["versions"]
    for kind, options in KINDS.items():
        command = [
            *HEADRACE, "tune", ENV, *options, "--space", "space.toml", "--parallel", PARALLEL,
            "--total-env-steps", env_steps, "--lr-schedule", "constant", "--final-seeds", 0,
            "--study", kind,
        ]  # fmt: skip
        print(f"{kind}: training", flush=True)
        seconds, _ = run(command, folder, f"{kind}-output")
        result[kind] = of_study(folder / kind) | {"seconds": seconds}
    began = [result[kind]["began"] for kind in KINDS]
    assert began[0] == began[1], "both have the same members at first"
    output = FOLDER / "quick.json" if quick else OUTPUT
    write_whole(output, (json.dumps(result, indent=1) + "\n").encode())
    print(f"\n{tables(result)}\n\nWritten: {output}")


def of_study(folder):
    """The members' learning rates at first, and the returns of those at the end."""
    plan, trials = read_plan(folder), read_trials(folder)
    seed = str(plan.seeds[0])
    ended = [trial for trial in trials if trial.state == "whole"]
    best = max(ended, key=lambda trial: trial.measured[-1][seed]["eval_return"])
    return {
        "began": [trial.values["lr"] for trial in trials if trial.parent < 0],
        "returns": sorted(trial.measured[-1][seed]["eval_return"] for trial in ended),
        "failed": sum(trial.state == "failed" for trial in trials),
        "copies": sum(trial.parent >= 0 for trial in trials),
        "best_schedule": best.changes.get("lr_schedule"),
        "env_steps": sum(
            trial.measured[-1][seed]["env_steps"]
            - (trial.measured[trial.born][seed]["env_steps"] if trial.parent >= 0 else 0)
            for trial in trials
            if trial.measured
        ),
    }


def tables(result):
    """Format the result for people."""
    lines = ["| 8 members | worst | median | best | env steps | s |", "|---|---|---|---|---|---|"]
    for kind, title in (("population", "with `--pbt`"), ("alone", "each with its first rate")):
        about = result[kind]
        returns = about["returns"]
        lines.append(
            f"| {title} | {returns[0]:.1f} | {statistics.median(returns):.1f} | {returns[-1]:.1f} "
            f"| {about['env_steps']:,} | {about['seconds']:,.0f} |"
        )
    return "\n".join(lines)
