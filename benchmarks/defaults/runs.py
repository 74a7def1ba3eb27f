"""One run of a case: trained in a process of its own, evaluated, and kept.

Results are in one file for each case. Left out: what is trained (`cases.py`), and which of it
(`__main__.py`).
"""

import contextlib
import fcntl
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness.machine import ROOT, machine
from benchmarks.harness.result import read_result
from benchmarks.own_players import at_random, play
from benchmarks.peers import install
from benchmarks.peers.make_env import make_env
from benchmarks.presets.results import same_settings

EPISODES = 100  # of an evaluation


def command_of(case, env_steps):
    """The command line of a case, without what differs from run to run."""
    if case.who == "sb3":
        words = ("benchmarks.peers.sb3_defaults", case.env, "--env-steps", str(env_steps))
    else:
        words = ("benchmarks.no_preset", "train", case.env, "--total-env-steps", str(env_steps))
        words = (*words, *case.flags)
    return [*words, "--algo", case.algo]


def call(python, words):
    """Run a module of Python's; the JSON of its last line."""
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    done = subprocess.run(
        [str(python), "-m", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | threads | {"PYTHONPATH": paths},
    )
    if done.returncode:
        raise RuntimeError(f"ended with {done.returncode}:\n{(done.stderr or done.stdout)[-2000:]}")
    return read_result(done.stdout.splitlines()[-1])


def run_headrace(command, seed, run_dir, *more):
    """Run Headrace without a preset: its summary, and its config.json."""
    words = [*command, "--seed", seed, "--run-dir", run_dir, "--json", *more]
    summary = call(sys.executable, words)
    config = json.loads((run_dir / "config.json").read_text())
    if presets := [key for key, of in config["origin"].items() if "preset" in of]:
        raise RuntimeError(f"A preset set {', '.join(presets)}: expected none (no_preset.py).")
    return summary, config


def train_headrace(command, env, seed):
    """One run of Headrace, and its evaluation: what is kept of it."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        summary, config = run_headrace(command, seed, run_dir)
        words = ["headrace", "eval", run_dir, "--episodes", EPISODES, "--json"]
        evaluated = call(sys.executable, [*words, *(("--env", env) if ":" in env else ())])
    return {
        "env_steps": summary["env_steps"],
        "seconds": summary["wall_s"] - summary["meter"]["start"],
        "mean_return": summary["mean_return"],
        "eval_return": evaluated["mean_return"],
        "versions": config["versions"],
        "settings": config["settings"],
    }


def train(case, seed, env_steps):
    """One run of a case: what is kept of it."""
    command = command_of(case, env_steps)
    if case.who == "headrace":
        return train_headrace(command, case.env, seed)
    python = install.installed_python("sb3")
    return call(python, [*command, "--seed", seed]) | {"settings": pins()}


def pins():
    """What stands for the settings of Stable-Baselines3, which are those of its version."""
    return {"pins": install.PEERS["sb3"][:1]}


@functools.cache
def settings_now(case, env_steps):
    """What the case's settings are today: those of a run that stops after its first update."""
    if case.who == "sb3":
        return pins()
    with tempfile.TemporaryDirectory() as folder:
        first = ("--stop-after-s", "0.001")
        _, config = run_headrace(command_of(case, env_steps), 0, Path(folder) / "run", *first)
    return config["settings"]


def is_done(results, case, seed, wanted):
    """Whether the run has a result of the same command line and settings."""
    path, env_steps = results / case.file_name(wanted), case.env_steps(wanted)
    if not path.exists():
        return False
    found = json.loads(path.read_text())
    is_same = found["command"] == command_of(case, env_steps)
    return (
        is_same
        and str(seed) in found["runs"]
        and same_settings(found["settings"], settings_now(case, env_steps))
    )


@contextlib.contextmanager
def locked(folder):
    """Hold the folder against another of these benchmarks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def save(results, case, seed, run, wanted):
    """Add a run to its case's file; runs of another command line or other settings leave it."""
    path, settings = results / case.file_name(wanted), run.pop("settings")
    head = {"command": command_of(case, case.env_steps(wanted)), "settings": settings}
    with locked(results):
        before = json.loads(path.read_text()) if path.exists() else {}
        is_same = before.get("command") == head["command"] and same_settings(
            before["settings"], settings
        )
        runs = (before["runs"] if is_same else {}) | {str(seed): run | {"machine": machine()}}
        text = ",\n".join(f" {json.dumps(key)}: {json.dumps(runs[key])}" for key in sorted(runs))
        new = path.with_suffix(".new")
        new.write_text(f'{json.dumps(head)[:-1]}, "runs": {{\n{text}\n}}}}\n')
        new.replace(path)


def measure_random(results, envs, again=False):
    """Keep what random actions return in each environment that has no figure yet; `again`: all."""
    path = results / "random.json"
    with locked(results):
        known = json.loads(path.read_text()) if path.exists() else {}
        for env in sorted(set(envs) - set(() if again else known)):
            returns, _ = play(make_env(env), at_random, EPISODES)
            known[env] = sum(returns) / len(returns)
        path.write_text(json.dumps(known, indent=1) + "\n")
