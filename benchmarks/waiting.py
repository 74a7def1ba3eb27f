"""How threads of math wait for each other: env steps per second of SAC, by how long they spin.

A thread without work spins for a while, and then gives its core up. GOMP_SPINCOUNT says how often
it spins: 2,000 times with Headrace (some tens of microseconds), 300,000 times by the library's
default (some milliseconds), and with 0 not at all. A learner with one thread is beside them.
Measured on an idle machine, and beside a process that keeps a core busy. The work is that of
`continuous.py`, with fewer env steps.
"""

import dataclasses
import sys

from benchmarks.harness import contestants, turns
from benchmarks.harness.machine import cores
from benchmarks.harness.one_turn import Work
from benchmarks.peers.continuous_works import headrace_flags

ENV_STEPS = 1_280
SPINS = {"no spinning": "0", "300,000 spins": "300000"}


def comparison(title, *before):
    """Build a table. `before` is put before each command."""
    flags = headrace_flags("sac", ENV_STEPS)
    all_cores = [*flags, "--learner-threads", str(cores())]
    default = contestants.headrace("Headrace", all_cores, cores())
    one = contestants.headrace("one thread", [*flags, "--learner-threads", "1"])
    others = [
        dataclasses.replace(default, name=name, command=_with_spins(count, default.command))
        for name, count in SPINS.items()
    ]
    all_of_them = [
        dataclasses.replace(each, command=[*before, *each.command])
        for each in (default, *others, one)
    ]
    ratios = {f"Headrace / {each.name}": ("Headrace", each.name) for each in (*others, one)}
    return turns.Comparison(title, all_of_them, Work(ENV_STEPS), ratios=ratios)


def _with_spins(count, command):
    return ["/usr/bin/env", f"GOMP_SPINCOUNT={count}", *command]


def comparisons():
    beside = sys.executable, "-m", "benchmarks.drivers.beside"
    return [
        comparison("SAC, HalfCheetah-v5, idle machine"),
        comparison("SAC, HalfCheetah-v5, beside a busy process", *beside),
    ]


if __name__ == "__main__":
    sys.exit(turns.run("waiting", __doc__, comparisons(), turns=3))
