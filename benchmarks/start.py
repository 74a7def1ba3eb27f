"""How long until 24 workers are up, and how much memory each of them has.

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
        comparison(f"Start of {count} workers", many),
        comparison("Start of one Python", [watched("a fresh one, with torch", fresh, 1)]),
    ]


if __name__ == "__main__":
    sys.exit(turns.run("start", __doc__, comparisons(), turns=3))
