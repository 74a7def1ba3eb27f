"""The results of tasks as JSON: a file per task, and two with those of others by environment.

The two are the returns of random actions, and those of Stable-Baselines3.
"""

import json
import statistics

RANDOM, PEER = "random.json", "stable-baselines3.json"
SPEED = ("num_workers", "envs_per_vector", "learner_threads")
"""Settings that change how fast a run is. They change what a run learns only by rounding and, with
APPO and IMPALA, by the age of its data."""


def read(folder):
    """Results by task's name."""
    paths = sorted(path for path in folder.glob("*.json") if path.name not in (RANDOM, PEER))
    return {path.stem: json.loads(path.read_text()) for path in paths}


def read_others(folder, name):
    """The results of `RANDOM` or `PEER`, by environment."""
    path = folder / name
    return json.loads(path.read_text()) if path.exists() else {}


def add_other(folder, name, env, found):
    """Keep a result of `RANDOM` or `PEER`."""
    _write(folder / name, dict(sorted((read_others(folder, name) | {env: found}).items())))


def add_seed(folder, task, found):
    """Keep a seed's result beside those that were made with the same settings."""
    before = read(folder).get(task.name, {"runs": []})["runs"]
    others = [
        run
        for run in before
        if run["seed"] != found["seed"] and same_settings(run["settings"], found["settings"])
    ]
    runs = sorted([*others, found], key=lambda run: run["seed"])
    of = {"family": task.family, "env": task.env, "algo": task.algo, "label": task.label}
    _write(folder / f"{task.name}.json", {**of, "flags": task.flags, "runs": runs})


def same_settings(settings, other):
    """Whether two runs learn with the same settings: `SPEED`, seed and deadline may differ.

    Old results have None in place of settings.
    """
    if None in (settings, other):
        return settings is other
    names = (settings.keys() | other.keys()) - {"seed", "stop_after_s", *SPEED}
    return all(settings.get(name, ...) == other.get(name, ...) for name in names)


def _write(path, data):
    """Write JSON with a line for each entry, and for each seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for key, value in data.items():
        if key == "runs":
            value = ",\n  ".join(json.dumps(run) for run in value)
            lines.append(f' "runs": [\n  {value}\n ]')
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    new = path.with_suffix(".new")
    new.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    new.rename(path)


def mean_and_error(values):
    """The mean of seeds and its standard error; None with one seed."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return statistics.fmean(values), error


def is_preset(flags):
    """Whether a task is a preset as it is, or with other env steps."""
    return not flags or (len(flags) == 2 and flags[0] == "--total-env-steps")


def is_comparable(algo, flags):
    """Whether a task is PPO by its preset, which Stable-Baselines3's PPO is comparable with."""
    return algo == "ppo" and is_preset(flags)


def write_own_returns(path, found):
    """Write what `headrace list` shows of ours: presets, evaluated, and their env steps."""
    own = {}
    for task in found.values():
        runs = [run for run in task["runs"] if run["evaluation"]]
        if not is_preset(task["flags"]) or ":" in task["env"] or not runs:
            continue
        mean, error = mean_and_error([run["evaluation"]["mean_return"] for run in runs])
        own.setdefault(task["env"], {})[task["algo"]] = {
            "mean_return": mean,
            "standard_error": error,
            "env_steps": max(run["env_steps"] for run in runs),
            "seeds": len(runs),
        }
    _write(path, own)
