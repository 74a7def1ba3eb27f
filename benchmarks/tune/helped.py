"""Whether `headrace tune` helps within twenty minutes: tuned against preset, on fresh seeds.

Each environment gets `headrace tune ENV --budget-s 1200`, with no other flag. If the budget ends
before the fresh seeds have been measured, a larger one goes on with these alone; it is checked that
the search does not go on. The best trial is chosen among three on the same fresh seeds with which
it is compared, which is a little in its favour; so the trial that the search alone puts first is
beside it. Left out: peers (`cartpole.py`).
"""

import copy
import json
import shutil

from benchmarks.harness.contestants import headrace
from benchmarks.harness.machine import RESULTS, ROOT, machine
from benchmarks.tune.commands import HEADRACE, run
from headrace.storage.files import write_whole
from headrace.tuning import results
from headrace.tuning.plan import read_plan, read_trials
from headrace.tuning.study import finalists, ranked

NAME = "tune_helped"
BUDGET_S = 1200
RAISE = 1.25
"""A new budget is this many times the seconds spent. What it adds is less than the share of a
budget that is kept for fresh seeds, so the search does not go on."""
FOLDER = ROOT / "runs/tune_helped"
OUTPUT = RESULTS / f"{NAME}.json"
QUICK = ("--total-env-steps", "4000", "--trials", "4")
QUICK_BUDGET_S = 12


def main(envs, study, quick):
    """Search, or take a study that is there; measure it to its end, and write the result."""
    output = FOLDER / "quick.json" if quick else OUTPUT
    found = json.loads(output.read_text()) if output.exists() else {}
    result = {"benchmark": NAME, "machine": machine(), "envs": found.get("envs", {})}
    for env in envs:
        folder = study or FOLDER / ("quick" if quick else "studies") / env
        if study is None:
            shutil.rmtree(folder, ignore_errors=True)
            budget, more = (QUICK_BUDGET_S, QUICK) if quick else (BUDGET_S, ())
            command = ["tune", env, "--budget-s", budget, *more, "--study", folder]
            print(f"{env}: searching", flush=True)
            run([*HEADRACE, *command], folder.parent, env)
        result["envs"][env] = {"machine": result["machine"]} | of_study(folder, env)
        write_whole(output, (json.dumps(result, indent=1) + "\n").encode())
    print(f"\n{tables(result)}\n\nWritten: {output}")


def of_study(folder, env):
    """Measure what is missing of the fresh seeds; what became of the study."""
    plan, trials = read_plan(folder), read_trials(folder)
    if plan.env != env:
        raise SystemExit(f"{folder} is a study of {plan.env}, not of {env}.")
    budget, spent, known = plan.budget_s, _spent(trials), searched(trials)
    missing = _missing(plan, trials)
    while _missing(plan, trials):
        print(f"{env}: {_missing(plan, trials)} runs with fresh seeds are missing", flush=True)
        more = ["--budget-s", max(plan.budget_s, RAISE * _spent(trials))]
        run([*HEADRACE, "tune", "--resume", folder, *more], folder.parent, f"{env}-fresh")
        plan, trials = read_plan(folder), read_trials(folder)
        if searched(trials) != known:
            raise SystemExit(f"{folder}: the search went on with --budget-s {more[1]:g}.")
    best = results.best_of(plan, trials)
    preset = next(trial for trial in trials if trial.is_preset)
    rows = results.rows(plan, trials)
    first = next(trial for trial in ranked(plan, trials) if not trial.is_preset)
    return {
        "command": f"headrace tune {env} --budget-s {budget:g}",
        "budget_s": budget,
        "seconds": spent,
        "runs_missing_then": missing,
        "seconds_until_all_fresh_seeds": _spent(trials),
        "trials": len(trials),
        "whole": sum(trial.state == "whole" for trial in trials),
        "failed": sum(trial.state == "failed" for trial in trials),
        "env_steps_of_a_whole_trial": plan.total_env_steps,
        "env_steps_searched": sum(row["env_steps"] for row in rows),
        "env_steps_of_fresh_seeds": sum(
            each["env_steps"] for trial in trials for each in trial.fresh.values()
        ),
        "metric": plan.metric.title,
        "fresh_seeds": plan.final_seeds,
        "best": best.number,
        "first_of_search": first.number,
        "finalists": {
            trial.number: {"name": trial.name, "settings": trial.changes}
            | _fresh(plan, trial, preset, plan.final_seeds)
            for trial in finalists(plan, trials)
        },
        "verdict": results.verdict(plan, trials),
        "versions": headrace("Headrace", []).describe()["versions"],
    }


def searched(trials):
    """What the search knows of its trials."""
    return copy.deepcopy([(trial.number, trial.state, trial.measured) for trial in trials])


def _spent(trials):
    return max(trial.spent_s for trial in trials)


def _missing(plan, trials):
    """How many runs with fresh seeds have not ended."""
    return sum(
        not trial.has_fresh(seed) for trial in finalists(plan, trials) for seed in plan.final_seeds
    )


def _fresh(plan, trial, preset, seeds):
    fresh, of_preset = (results.fresh_of(plan, each, seeds) for each in (trial, preset))
    told = {"values": list(fresh.values), "mean": fresh.mean, "interval": fresh.interval}
    if trial is not preset and None not in (*fresh.values, *of_preset.values):
        told["gain"], told["gain_interval"] = results.gain(fresh, of_preset)
    return told


def tables(result):
    """Format the result for people."""
    lines = [
        "| | preset on fresh seeds | best | gain, 95 % interval | the search's first: gain "
        "| trials (whole) | env steps searched | s, and until all fresh seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for env, about in result["envs"].items():
        # Numbers are text in a file.
        trials = {int(number): each for number, each in about["finalists"].items()}
        best, first = trials[about["best"]], trials[about["first_of_search"]]
        preset = next(each for each in trials.values() if each["name"] == "preset")
        lines.append(
            f"| {env} | {_words(preset['mean'], preset['interval'])} "
            f"| {best['name']}: {_words(best['mean'], best['interval'])} "
            f"| {_words(best.get('gain'), best.get('gain_interval'))} "
            f"| {first['name']}: {_words(first.get('gain'), first.get('gain_interval'))} "
            f"| {about['trials']} ({about['whole']}) | {about['env_steps_searched']:,} "
            f"| {about['seconds']:,.0f}, {about['seconds_until_all_fresh_seeds']:,.0f} |"
        )
    return "\n".join(lines)


def _words(mean, interval):
    if mean is None:
        return "-"
    text = f"{mean:,.1f}"
    return f"{text} [{interval[0]:,.1f}, {interval[1]:,.1f}]" if interval else text
