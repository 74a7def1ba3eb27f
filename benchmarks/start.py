"""How long until the first env step and the first update; until 24 workers are up; their memory.

First a small run with no workers and with two, beside a Python that imports torch and nothing else.
Its first update is timed by its own clock, which begins with its process. The measurement that
chooses numbers of processes is not part of it: all of them are given.

Measured from outside, by environments that say so themselves (`watch_start.py`): from starting the
program to the first step of the last worker, with all imports. PSS counts what processes share in
parts, USS only what a process has for itself: the memory that one worker more takes.

Headrace's workers are forked by a server that has torch imported; Stable-Baselines3's are made by
its default, too, a server, without its imports. Below, one fresh Python that imports torch and
gymnasium: what a worker takes if nothing is shared, on a machine that does nothing else.
"""

import sys

from benchmarks.harness import contestants, turns
from benchmarks.harness.contestants import SCRATCH
from benchmarks.harness.one_turn import Work
from benchmarks.peers.works import SETTINGS

REPORTING = SETTINGS["reporting"]


def watched(name, contestant, workers):
    """The same contestant, watched by `watch_start.py`."""
    watch = [sys.executable, "-m", "benchmarks.drivers.watch_start", "--workers", str(workers)]
    command = [*watch, "--reports", f"{SCRATCH}/reports", "--", *contestant.command]
    return contestants.Contestant(
        name, command, 1, contestant.packages, contestant.venv, contestant.is_peer
    )


def first_steps():
    """Small runs, beside the import of torch, which all of them need."""
    flags = SETTINGS["reporting2"].headrace_flags(2 * SETTINGS["reporting2"].batch)

    def small(name, workers, num_workers):
        sizes = ["--num-workers", str(num_workers), "--num-learners", "1"]
        return watched(name, contestants.headrace("", [*flags, *sizes]), workers)

    return turns.Comparison(
        "From the start of the process to the first env step",
        [
            small("Headrace, no workers", 2, 0),
            small("Headrace, 2 workers", 2, 2),
            contestants.headrace_driver("import torch", "time_import", [], is_limit=True),
        ],
        Work(None, "start_s", "s", lower_is_better=True),
        also={"first update, s": lambda result: result.get("first_update_s")},
        turns=5,
    )


def comparison(title, contestants):
    return turns.Comparison(
        title,
        contestants,
        Work(None, "start_s", "s", lower_is_better=True),
        also={
            "PSS of each, MiB": lambda result: result["pss_mib"],
            "USS of each, MiB": lambda result: result["uss_mib"],
        },
    )


def comparisons():
    count, env_steps = REPORTING.num_envs, 2 * REPORTING.batch
    flags = REPORTING.headrace_flags(env_steps)
    flags += ["--num-workers", str(count), "--envs-per-vector", "1"]
    sizes = ["--work", "reporting", "--env-steps", str(env_steps), "--threads", "1", "--subproc"]
    sb3 = contestants.driver("", "sb3", "sb3_bench", sizes, package="stable-baselines3")
    fresh = contestants.headrace_driver("", "fresh_import", [])
    many = [
        watched(f"Headrace, {count} workers", contestants.headrace("", flags), count),
        watched(f"Stable-Baselines3, {count} processes", sb3, count),
    ]
    return [
        first_steps(),
        comparison(f"Start of {count} workers", many),
        comparison("Start of one Python", [watched("a fresh one, with torch", fresh, 1)]),
    ]


if __name__ == "__main__":
    sys.exit(turns.run("start", __doc__, comparisons(), turns=3))
