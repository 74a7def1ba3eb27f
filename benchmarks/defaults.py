"""What the defaults learn: Headrace without presets, beside Stable-Baselines3 with no settings.

    python -m benchmarks.defaults                            # all parts, what has no result yet
    python -m benchmarks.defaults --part ppo --only Hopper   # one part, cases with such a name
    python -m benchmarks.defaults --render                   # the page, from the results there are

Each run is a process of its own. It is saved as soon as it has ended, in `results/defaults/`, one
file for each case, so that a benchmark that was cut goes on where it was. A case is trained anew if
its command line or its settings (the defaults) have changed. A change of `own_envs.py` or of an
algorithm is not seen: `--again`. Several of these can run at once. The runs share the machine, so
that their seconds are no benchmark. Left out: what is trained (`defaults_cases.py`), and the page
(`defaults_page.py`).
"""

import argparse
import concurrent.futures
import contextlib
import fcntl
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import defaults_page
from benchmarks.defaults_cases import PARTS, SEEDS
from benchmarks.machine import ROOT, machine
from benchmarks.own_players import at_random, play
from benchmarks.peers import install
from benchmarks.peers.make_env import make_env
from benchmarks.presets.results import same_settings

RESULTS = ROOT / "benchmarks/results/defaults"
PAGE = ROOT / "docs/defaults.md"
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
    return json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))


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


def measure_random(results, envs):
    """Keep what random actions return in each environment that has no figure yet."""
    path = results / "random.json"
    with locked(results):
        known = json.loads(path.read_text()) if path.exists() else {}
        for env in sorted(set(envs) - set(known)):
            returns, _ = play(make_env(env), at_random, EPISODES)
            known[env] = sum(returns) / len(returns)
        path.write_text(json.dumps(known, indent=1) + "\n")


def run_all(args, work):
    """Train what has no result; the names of the runs that failed."""
    failed = []

    def one(case, seed):
        name = f"{case.name}, seed {seed}"
        try:
            if not args.again and is_done(args.results, case, seed, args.env_steps):
                print(f"{name}: there already", flush=True)
                return
            run = train(case, seed, case.env_steps(args.env_steps))
            save(args.results, case, seed, run, args.env_steps)
        except (RuntimeError, ValueError, OSError) as error:
            failed.append(name)
            print(f"{name} failed: {error}", flush=True)
        else:
            figures = f"return {run['mean_return']}, evaluated {run['eval_return']}"
            print(f"{name}: {figures}, {run['seconds']:.0f} s", flush=True)

    with concurrent.futures.ThreadPoolExecutor(args.at_once) as pool:
        futures = [pool.submit(one, case, seed) for case, seed in work]
        try:
            for future in futures:
                future.result()
        except BaseException:  # Ctrl-C, which ends the runs under way as well
            pool.shutdown(cancel_futures=True)
            raise
    return failed


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=list(PARTS), help="default: all of them")
    parser.add_argument("--only", default="", help="a regular expression that a case's name has")
    parser.add_argument("--who", choices=["headrace", "sb3"], help="default: both")
    parser.add_argument("--seeds", help="as in 1,2,3; default: those of the part")
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time")
    parser.add_argument("--env-steps", type=int, default=500_000)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results and page")
    parser.add_argument("--again", action="store_true", help="train also what has a result")
    parser.add_argument("--render", action="store_true", help="train nothing")
    args = parser.parse_args(argv)
    args.results.mkdir(parents=True, exist_ok=True)
    # Several parts have cases in common. The first seed of every case comes first, so that a
    # benchmark that is cut has something of each.
    work = {
        (case, seed): None
        for part in ([args.part] if args.part else PARTS)
        for case in PARTS[part]
        for seed in (map(int, args.seeds.split(",")) if args.seeds else SEEDS[part])
        if re.search(args.only, case.name) and args.who in (None, case.who) and not args.render
    }
    measure_random(args.results, {case.env for case, _ in work})
    failed = run_all(args, sorted(work, key=lambda each: each[1]))
    page = defaults_page.render(args.results, args.env_steps)
    place = PAGE if args.results == RESULTS else args.results / "README.md"
    place.write_text(page)
    if failed:
        sys.exit(f"Failed: {'; '.join(failed)}. The others are saved; run this again.")


if __name__ == "__main__":
    main()
