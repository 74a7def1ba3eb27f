"""Seconds for 50 CartPole trials of 100,000 env steps, beside RL Baselines3 Zoo; and what came out.

Each search is the command of its documentation, with all else its default. Headrace's search ends
with its last trial; the fresh seeds that follow are counted apart. What differs: Headrace's default
pruning (asha) stops most trials early. The zoo's (median) evaluates once for 100,000 env steps, so
after all of them; what it prunes has been trained whole. `--prune none` is beside it. The zoo's
`n_jobs` are threads of one process. Its documentation's other way, two processes with one storage,
is measured as well. It has one torch thread (`--num-threads 1`, "makes things run faster on cpu").

Then the best setting of each is trained by its own trainer with seeds that no search has seen, two
at a time: the mean return of 20 episodes with the likeliest actions, and env steps until the mean
return of the last 100 training episodes is 475, looked at after each update.

The zoo keeps its study in a file (`--storage`). `--cut-zoo-s` kills the zoo's search after so many
seconds. Its row has these seconds and the trials that had ended by then: the whole search would
take at least as long. (After Ctrl-C it waits for its trials under way, which once took it more than
20 minutes.) Left out: other environments (`helped.py`).
"""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from benchmarks.harness.contestants import headrace
from benchmarks.harness.machine import RESULTS, ROOT, machine
from benchmarks.harness.result import read_result
from benchmarks.peers import install
from benchmarks.tune.commands import HEADRACE, run
from headrace.storage.files import write_whole
from headrace.storage.metrics import read_metrics
from headrace.tools.runs.statistics import bootstrap_interval
from headrace.tuning import results
from headrace.tuning.api import load_study
from headrace.tuning.plan import read_trials

NAME = "tune_cartpole"
ENV, ALGO, GOAL, WINDOW = "CartPole-v1", "ppo", 475.0, 100
PARALLEL = 2
EPISODES = 20
FIRST_SEED = 2000
SEARCH_SEED = 1
"""Of the zoo, which else draws one. With threads, one seed proposes other settings each time."""
SEARCHES = {
    "headrace": "Headrace",
    "headrace_whole": "Headrace, `--prune none`",
    "zoo": "RL Zoo, `--n-jobs 2`",
    "zoo_processes": "RL Zoo, two processes",
}
"""Their folders, and names in tables."""
PEER = "zoo"  # the others are compared with it
STUDY = "study.log"  # where the zoo keeps its own
FRESH = re.compile(r", fresh seed \d+ ")


@dataclass(frozen=True)
class Size:
    """How much is done."""

    trials: int = 50
    env_steps: int = 100_000
    seeds: int = 10
    folder: str = "runs/tune_cartpole"
    output: str = str(RESULTS / f"{NAME}.json")


QUICK = Size(2, 2000, 2, "runs/tune_cartpole_quick", "runs/tune_cartpole_quick/result.json")


def main(size, only, render, cut_zoo_s=None):
    """Search, train the best, and write all that is there."""
    folder = ROOT / size.folder
    if not render and {PEER, "zoo_processes"} & {*(only or SEARCHES)}:
        install.installed_python("zoo")  # before an hour is spent
    for name in () if render else (only or SEARCHES):
        shutil.rmtree(folder / name, ignore_errors=True)
        print(f"{SEARCHES[name]}: searching", flush=True)
        about = {"machine": machine(), "size": [size.trials, size.env_steps, size.seeds]}
        if name.startswith("zoo"):
            about |= zoo(folder / name, size, name, cut_zoo_s)
        else:
            about |= ours(folder / name, size, name)
        print(f"{SEARCHES[name]}: {about['seconds']:.0f} s; training its best", flush=True)
        about["best_again"] = train_best(folder / name, size, name)
        write_whole(folder / name / "about.json", json.dumps(about, indent=1).encode())
    found = {}
    for name, title in SEARCHES.items():
        if (path := folder / name / "about.json").exists():
            about = json.loads(path.read_text())
            if about["size"] == [size.trials, size.env_steps, size.seeds]:
                found[title] = about
    if not found:
        raise SystemExit(f"{folder} has no search yet.")
    result = {
        "benchmark": NAME,
        "machine": next(iter(found.values()))["machine"],
        "trials": size.trials,
        "env_steps_of_a_trial": size.env_steps,
        "parallel": PARALLEL,
        "searches": found,
    }
    write_whole(ROOT / size.output, (json.dumps(result, indent=1) + "\n").encode())
    print(f"\n{tables(result)}\n\nWritten: {ROOT / size.output}")


# Headrace


def ours(folder, size, name):
    """Search as `headrace tune` does."""
    flags = [
        "--trials", size.trials, "--total-env-steps", size.env_steps, "--parallel", PARALLEL,
    ]  # fmt: skip
    flags += ["--prune", "none"] if name == "headrace_whole" else []
    command = [*HEADRACE, "tune", ENV, *flags, "--study", "study"]
    seconds, lines = run(command, folder, "search")
    first = next(i for i, (_, text) in enumerate(lines) if FRESH.search(text))
    study = load_study(folder / "study")
    trials = read_trials(folder / "study")
    rows, best = study.trials, results.best_of(study.plan, trials)
    whole = sum(row["state"] == "whole" for row in rows)
    failed = sum(row["state"] == "failed" for row in rows)
    return {
        "command": " ".join(map(str, ["headrace", *command[3:]])),
        "seconds": lines[first - 1][0],
        "seconds_with_fresh_seeds": seconds,
        "trials": len(rows),
        "whole": whole,
        "pruned": len(rows) - whole - failed,
        "failed": failed,
        "env_steps": sum(row["env_steps"] for row in rows),
        "env_steps_of_fresh_seeds": sum(
            each["env_steps"] for trial in trials for each in trial.fresh.values()
        ),
        "best": {
            "number": best.number,
            "value": rows[best.number]["value"],
            "is_preset": best.is_preset,
            "settings": best.values,
        },
        "versions": headrace("Headrace", []).describe()["versions"],
    }


def train_ours(folder, size, seed):
    """Train the best trial's settings with a new seed, and evaluate."""
    there = f"best/{seed}"
    config = ["--config", "study/best.toml", "--seed", seed, "--run-dir", there]
    run([*HEADRACE, "train", ENV, *config], folder, f"best-{seed}")
    played = ["eval", there, "--episodes", EPISODES, "--json"]
    _, lines = run([*HEADRACE, *played], folder, f"eval-{seed}")
    rows = read_metrics(folder / there)
    full = [row for row in rows if row["episodes"] >= WINDOW]
    steps = [row["env_steps"] for row in full if row["mean_return"] >= GOAL]
    return {
        "seed": seed,
        "env_steps": rows[-1]["env_steps"],
        "eval_return": read_result(lines[-1][1])["mean_return"],
        "steps_to": steps[0] if steps else None,
        "mean_return": full[-1]["mean_return"] if full else None,
    }


# RL Zoo


def zoo(folder, size, name, cut_s):
    """Search as the zoo's documentation has it, for `cut_s` seconds if that is given."""
    python, apart = install.installed_python("zoo"), name == "zoo_processes"
    common = [
        "-m", "rl_zoo3.train", "--algo", ALGO, "--env", ENV, "-n", size.env_steps, "-optimize",
        "--sampler", "tpe", "--pruner", "median", "--num-threads", 1,
    ]  # fmt: skip
    flags = ["--n-trials", size.trials, "--n-jobs", PARALLEL]
    if apart:
        flags = ["--max-total-trials", size.trials]
    flags += ["--storage", folder / STUDY, "--study-name", NAME]
    # Several processes with one seed would try the same settings.
    seeds = range(SEARCH_SEED, SEARCH_SEED + (PARALLEL if apart else 1))
    commands = [[*common, *flags, "--seed", seed] for seed in seeds]
    with ThreadPoolExecutor(len(commands)) as pool:
        took = list(
            pool.map(
                lambda each: run([python, *each[1]], folder, f"search-{each[0]}", True, cut_s),
                enumerate(commands),
            )
        )
    said = [" ".join(map(str, each)).replace(f"{folder}/", "") for each in commands]
    return {
        "command": "; ".join(f"python {each}" for each in said),
        "seconds": max(seconds for seconds, _ in took),
        **of_peer(folder, size),
    }


def of_peer(folder, size, *more):
    """What a driver says of the search's study."""
    command = [
        install.installed_python("zoo"), "-m", "benchmarks.peers.zoo_best", STUDY,
        "--env-steps", size.env_steps, "--episodes", EPISODES, "--until-return", GOAL, *more,
    ]  # fmt: skip
    _, lines = run(command, folder, "-".join(["best", *map(str, more[1:2])]), peer=True)
    return read_result(lines[-1][1])


def train_zoo(folder, size, seed):
    """Train the best trial's settings with a new seed, and evaluate."""
    return of_peer(folder, size, "--seed", seed, "--folder", f"best/{seed}")


# Both


def train_best(folder, size, name):
    """Train the best setting with each of the seeds."""
    train = train_zoo if name.startswith("zoo") else train_ours
    seeds = range(FIRST_SEED, FIRST_SEED + size.seeds)
    with ThreadPoolExecutor(PARALLEL) as pool:
        seen = list(pool.map(lambda seed: train(folder, size, seed), seeds))
    returns = np.array([each["eval_return"] for each in seen])
    low, high = bootstrap_interval(returns)
    reached = [each["steps_to"] for each in seen if each["steps_to"] is not None]
    return {
        "seeds": seen,
        "mean": float(returns.mean()),
        "interval": [float(low), float(high)],
        "least": float(returns.min()),
        "reached": len(reached),
        "mean_steps_to": float(np.mean(reached)) if reached else None,
    }


def tables(result):
    """Format the result for people."""
    searches = result["searches"]
    peer = searches.get(SEARCHES[PEER])
    asked = result["trials"]
    lines = [
        f"| {asked} trials of {result['env_steps_of_a_trial']:,} env steps "
        "| s | RL Zoo's s / these | s with fresh seeds | trials whole, pruned, failed "
        "| env steps | env steps/s | commit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for title, about in searches.items():
        # What was cut bounds what was not; of two that were cut, nothing is known.
        ratio, is_cut = "-", about["trials"] < asked
        if peer and not is_cut:
            least = "≥ " if peer["trials"] < asked else ""
            ratio = f"{least}{peer['seconds'] / about['seconds']:.1f} x"
        fresh = about.get("seconds_with_fresh_seeds")
        ends = ", ".join(str(about[key]) for key in ("whole", "pruned", "failed"))
        cut = f", cut after {about['trials']} trials" if is_cut else ""
        lines.append(
            f"| {title}{cut} | {about['seconds']:,.0f} | {ratio} "
            f"| {f'{fresh:,.0f}' if fresh else '-'} | {ends} | {about['env_steps']:,} "
            f"| {about['env_steps'] / about['seconds']:,.0f} "
            f"| {about['machine']['git_commit'][:7]} |"
        )
    seeds = max(len(about["best_again"]["seeds"]) for about in searches.values())
    lines += [
        "",
        f"| The best setting on {seeds} fresh seeds | return, mean | 95 % interval | least "
        f"| seeds that reached {GOAL:g} in training | their env steps until then, mean |",
        "|---|---|---|---|---|---|",
    ]
    for title, about in searches.items():
        again = about["best_again"]
        interval = " to ".join(f"{each:.1f}" for each in again["interval"])
        steps = again["mean_steps_to"]
        best = " (the preset)" if about["best"].get("is_preset") else ""
        lines.append(
            f"| {title}{best} | {again['mean']:.1f} | {interval} | {again['least']:.1f} "
            f"| {again['reached']} of {len(again['seeds'])} "
            f"| {f'{steps:,.0f}' if steps else '-'} |"
        )
    return "\n".join(lines)
