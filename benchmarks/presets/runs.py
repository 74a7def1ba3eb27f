"""One seed of a task: trained, resumed if it was cut, and evaluated, each in a process.

A run's directory has three notes of this script: `preset.json`, the settings that it was begun
with, `finished`, that its result is kept, and `stderr.txt`, what its processes said.
"""

import contextlib
import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field, fields
from pathlib import Path

from benchmarks.harness.machine import ROOT, machine
from benchmarks.harness.result import read_result
from benchmarks.peers import install
from benchmarks.presets.results import same_settings
from benchmarks.presets.tasks import tasks
from headrace.cli.commands import FLAGS
from headrace.cli.flags import explicit, parse
from headrace.config.algorithms import load_algorithm
from headrace.config.resolve import read_settings
from headrace.config.run_config import RunConfig
from headrace.errors import RunDirError
from headrace.models.policy import Network
from headrace.storage.files import write_whole
from headrace.storage.metrics import read_metrics
from headrace.training.job import RunRequest, inspect_request

POINTS = 50  # of a curve
_PARSING = threading.Lock()  # tyro has state of its own while it parses
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)


class CutError(Exception):
    """A run was stopped, and can be resumed."""


@dataclass
class Processes:
    """The processes that this script has under way; `stop` sends SIGINT to each, once."""

    on_line: object = None
    """Called with each line of progress of a process."""
    _running: set = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    stopping: bool = False

    def run(self, command, log, python=sys.executable):
        """The last line of output, as JSON; CutError: stopped; RuntimeError: it failed."""
        # In a session of its own: Ctrl-C reaches this script alone, which passes it on.
        with self._lock:
            if self.stopping:
                raise CutError
            process = subprocess.Popen(
                [str(python), "-m", *map(str, command)], cwd=ROOT, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            self._running.add(process)
        lines = []
        with process, log.open("a") as file:
            for line in process.stderr:
                lines.append(line)
                file.write(line)
                if self.on_line is not None:
                    self.on_line(line)
            output = process.stdout.read()
        with self._lock:
            self._running.discard(process)
        # A process that is still importing ends with a traceback when it is stopped.
        if process.returncode in STOPPED or (process.returncode and self.stopping):
            raise CutError
        if process.returncode:
            last = "".join(lines[-15:])
            raise RuntimeError(f"{' '.join(map(str, command))} failed, and said:\n{last}")
        return read_result(output.splitlines()[-1])

    def stop(self):
        """Stop all; they save, and `run` raises CutError. Nothing else is started."""
        with self._lock:
            self.stopping = True
            for process in self._running:
                process.send_signal(signal.SIGINT)


def settings_of(task, seed, more=()):
    """What flags, preset and defaults by kind set: a run that was begun so can be resumed."""
    argv = [task.env, "--algo", task.algo, "--seed", str(seed), *task.flags, *more]
    with _PARSING:
        given = explicit(argv, parse("train", "", FLAGS["train"], argv))
    settings = read_settings(given, spec=_spec(task.env))
    flat = settings.flat()
    names = [name for name, source in settings.source.items() if source != "default"]
    return json.loads(json.dumps({name: flat[name] for name in sorted(names)}))


@functools.cache
def _spec(env):
    return inspect_request(RunRequest({"env": env})).spec


def is_as_now(task, settings, seed, more=()):
    """Whether settings of a result, or None, learn as those that the task and `more` have now.

    What was set to the default of its class is the same as what is not set.
    """
    classes = (RunConfig, Network, load_algorithm(task.algo).Config)
    unset = {f.name: f.default for each in classes for f in fields(each)}
    now = settings_of(task, seed, more)
    return settings is not None and same_settings(unset | settings, unset | now)


def outdated(found, more=()):
    """Names of results that were made with other settings than their task, and `more`, have now."""
    return {
        task.name
        for task in tasks()
        if task.name in found
        and any(
            not is_as_now(task, run["settings"], run["seed"], more)
            for run in found[task.name]["runs"]
        )
    }


def is_under_way(run_dir, settings):
    """Whether a run of these settings was begun there, and is not finished."""
    return not (run_dir / "finished").exists() and _begun_with(run_dir) == settings


def mark_finished(run_dir):
    """Note that the run's result is kept, so that there is nothing to resume."""
    (run_dir / "finished").touch()


def _begun_with(run_dir):
    with contextlib.suppress(FileNotFoundError):
        return json.loads((run_dir / "preset.json").read_text())
    return None


def measure_seed(task, seed, run_dir, processes, more=(), episodes=100, at_once=1):
    """Train or resume a seed and evaluate it: what is kept of it. CutError, RuntimeError."""
    settings = settings_of(task, seed, more)
    command = ["headrace", "resume", run_dir, *_code(task)]
    if not is_under_way(run_dir, settings) or not any(run_dir.glob("checkpoints/step_*")):
        _set_aside(run_dir)
        run_dir.mkdir(mode=0o700, parents=True)
        write_whole(run_dir / "preset.json", json.dumps(settings).encode())  # others read it
        command = ["headrace", "train", task.env, "--algo", task.algo, "--seed", seed]
        command += ["--run-dir", run_dir, *task.flags, *more]
        if at_once > 1 and settings.get("learner_threads") == 0:  # all cores, which others share
            command += ["--learner-threads", max(1, (os.cpu_count() or 1) // at_once)]
    log = run_dir / "stderr.txt"
    summary = processes.run([*command, "--json"], log)
    played = ["headrace", "eval", run_dir, "--episodes", episodes, "--json", *_code(task)]
    evaluation = processes.run(played, log)
    config = json.loads((run_dir / "config.json").read_text())
    curve = curve_of(read_metrics(run_dir))
    return {
        "seed": seed,
        "settings": settings,
        "env_steps": summary["env_steps"],
        "wall_s": curve["wall_s"][-1],
        "mean_return": summary["mean_return"],
        "evaluation": {
            "mean_return": evaluation["mean_return"],
            "standard_error": evaluation["std_return"] / math.sqrt(max(1, episodes - 1)),
            "episodes": episodes,
        },
        "curve": curve,
        "versions": config["versions"],
        "machine": machine(),
        "runs_at_once": at_once,
    }


def measure_random(env, folder, processes, episodes=100):
    """The return of random actions. CutError, RuntimeError."""
    command = ["benchmarks.presets.random_play", env, "--episodes", episodes]
    return processes.run(command, folder / "random.stderr.txt")


def measure_peer(env, env_steps, folder, processes, episodes=100):
    """What Stable-Baselines3's PPO reaches with its defaults, seed 1. CutError, RuntimeError."""
    python = install.installed_python("sb3")
    command = ["benchmarks.peers.sb3_defaults", env, "--env-steps", env_steps, "--seed", 1]
    found = processes.run([*command, "--episodes", episodes], folder / "peer.stderr.txt", python)
    names = ("env_steps", "seconds", "mean_return", "eval_return", "versions")
    return {name: found[name] for name in names} | {"machine": machine()}


def _code(task):
    return ["--env", task.env] if task.is_code else []


def _set_aside(run_dir):
    """Keep the run before, in place of the one that was set aside before that."""
    if run_dir.exists():
        before = run_dir.with_name(f"{run_dir.name}.before")
        shutil.rmtree(before, ignore_errors=True)
        run_dir.rename(before)


def curve_of(rows):
    """Some 50 points of a run; seconds of all its processes together, whose clocks begin at 0."""
    if not rows:
        raise RunDirError("The run made no update: it has no curve.")
    seconds, passed = [], 0.0
    for i, row in enumerate(rows):
        if i and row["wall_s"] < rows[i - 1]["wall_s"]:
            passed += rows[i - 1]["wall_s"]
        seconds.append(passed + row["wall_s"])
    every = -(-len(rows) // POINTS)
    kept = range((len(rows) - 1) % every, len(rows), every)
    return {
        "env_steps": [rows[i]["env_steps"] for i in kept],
        "wall_s": [round(seconds[i], 2) for i in kept],
        "mean_return": [rows[i]["mean_return"] for i in kept],
    }


@dataclass(frozen=True)
class Folders:
    """Where runs and what is made of them are kept."""

    runs: Path
    results: Path
    page: Path
    own_returns: Path

    def run_dir(self, task, seed):
        """The directory of a seed's run."""
        return self.runs / f"{task.name}-{seed}"


HERE = Folders(
    ROOT / "runs/presets",
    ROOT / "benchmarks/results/presets",
    ROOT / "docs/presets.md",
    ROOT / "src/headrace/catalog/own_returns.json",
)


def trial(root):
    """Folders for a trial: nothing that is kept is changed."""
    return Folders(root / "runs", root / "results", root / "presets.md", root / "own_returns.json")
