"""Env steps per second where steps and resets take unequal time: who waits for whom?

First 24 environments that sleep (`peers/uneven.py`), each in a process of its own: seven
distributions (`peers/step_times.py`), each with a mean of 7 ms of step and reset for each env step.
If nobody ever waited, they would make 24 / measured mean env steps/s, by the mean that the
environments of the same turn measured themselves: the limit of these tables, and "of the limit" is
the sampling efficiency, the share of their time in which environments are busy. On busy cores
sleeps are longer than was asked for, and so the limit is lower: "of 24 / 7 ms" is the rate beside
that of the times that were asked for. "busy" is the same share as seen from outside, whatever the
trainer counts: experience that was made before the first update's end and learned from after it
counts for an asynchronous trainer's rate, and so the two may differ by a few percent.

Then 8 real ones (`peers/real.py`), which compute: 2 cores can keep no more than 2 of them busy, so
the limit is cores / measured mean of CPU time of step and reset, and the efficiency is the share of
the machine's time that went into environments. The rest is inference, transport, learning, and
waiting. Headrace has a worker for each core there, and its peers a process for each environment.

Headrace trains, and is measured from the end of the first update to the end of the last, with
learning in it: at lag 0 (PPO, 4 epochs of 4 minibatches, 2 × 64), where nobody samples during an
update ("while collecting" leaves that time out: the spans of the learner's meter that are not
`wait`), and asynchronously (APPO, lag 2). Peers only sample, with random actions (RLlib with a
small policy), which is in their favor: Stable-Baselines3's and Gymnasium's vectors wait for the
slowest at each step, Tianshou's for the first quarter, RLlib's runners for nobody. RLlib takes one
turn, since it takes long to start.
"""

import dataclasses
import sys

from benchmarks.harness import contestants, turns
from benchmarks.harness.contestants import SCRATCH
from benchmarks.harness.machine import cores
from benchmarks.harness.one_turn import Work
from benchmarks.peers.step_times import DISTRIBUTIONS
from benchmarks.peers.works import SETTINGS

UPDATES = {"uneven": 24, "highway": 7, "minigrid": 24}
"""Of Headrace, in each turn: 10 to 20 s. (Workers begin in step, and are anywhere in their
fragments by the last update: with few updates, what is unfinished then lowers the rate.)"""
REAL = {"highway": "highway-env", "minigrid": "MiniGrid, slow resets"}
SLEEPING, COMPUTING = "24 environments that sleep 7 ms", "8 environments that compute"
"""Titles of tables, up to the colon."""
BETWEEN = ("transport", "learn", "publish", "log")
"""Spans of the learner in each update, while workers wait."""
ASYNCHRONOUS, LAG_0 = "Headrace, asynchronous", "Headrace, lag 0"
LOCK_STEP = "Gymnasium, lock-step"
FASTER = "asynchronous / lock-step"
PUBLISHED = {
    "stalls": f"{FASTER} (published for 24 CPUs where a few steps are very slow: 4 to 5)",
    "gaussian10": f"{FASTER} (published for 24 CPUs and Gaussian times: 1.1 to 1.5)",
    "gaussian50": f"{FASTER} (published for 24 CPUs and Gaussian times: 1.1 to 1.5)",
}


def asleep(result):
    """The limit of environments that sleep, from what they measured."""
    return SETTINGS["uneven"].num_envs / result["mean_s"]


def computing(result):
    """The limit of environments that compute, from what they measured."""
    return cores() / result["mean_cpu_s"]


def while_collecting(settings, limit):
    """Of a result, the share of the limit in the time in which experience was made."""

    def share(result):
        if result.get("algo") != "ppo":  # others sample always
            return None
        updates = result["env_steps"] / settings.batch
        between = sum(result["meter"].get(span, 0.0) for span in BETWEEN) / updates
        collecting_s = settings.batch / result["env_steps_per_s"] - between
        return settings.batch / collecting_s / limit(result)

    return share


def watched(contestant):
    """The same contestant, whose environments say what they did with their time."""
    watch = [
        sys.executable,
        "-m",
        "benchmarks.drivers.measure_busy",
        "--busy",
        f"{SCRATCH}/busy",
        "--",
    ]
    return dataclasses.replace(contestant, command=[*watch, *contestant.command])


def ours(work, kwargs, sizes, updates=None):
    """Headrace, asynchronously and at lag 0."""
    settings, updates = SETTINGS[work], updates or UPDATES[work]
    flags = [*settings.headrace_flags(updates * settings.batch), *sizes, *kwargs]
    return [
        contestants.headrace(ASYNCHRONOUS, [*flags, "--algo", "appo", "--lag", "2"]),
        contestants.headrace(LAG_0, flags),
    ]


def peers(work, kwargs):
    """All of them, by what they wait for."""
    settings = SETTINGS[work]
    flags = ["--env", settings.env, "--num-envs", str(settings.num_envs), *kwargs]
    quarter = str(settings.num_envs // 4)

    def driver(name, venv, module, package="", more=()):
        return contestants.driver(name, venv, module, [*flags, *more], package=package)

    fragment = ["--num-steps", str(settings.num_steps)]
    rllib = driver(f"RLlib, {settings.num_envs} runners", "rllib", "sample_rllib", "ray", fragment)
    wait = ["--wait-num", quarter]
    return [
        driver("Stable-Baselines3, lock-step", "sb3", "sample_sb3", "stable-baselines3"),
        driver(LOCK_STEP, "base", "sample_gymnasium"),
        driver(f"Tianshou, first {quarter} ready", "tianshou", "sample_tianshou", "tianshou", wait),
        dataclasses.replace(rllib, turns=1),
    ]


def comparison(work, title, limit, also, sizes, kwargs=(), faster=FASTER):
    """One table; `also` are its own columns."""
    return turns.Comparison(
        title,
        [watched(c) for c in (*ours(work, kwargs, sizes), *peers(work, kwargs))],
        Work(None),
        also=also | {"of the limit while collecting": while_collecting(SETTINGS[work], limit)},
        ratios={faster: (ASYNCHRONOUS, LOCK_STEP)},
        limit=limit,
    )


def sleeping(distribution):
    """24 environments with these step times."""
    num_envs, mean_s = SETTINGS["uneven"].num_envs, DISTRIBUTIONS[distribution].mean_s
    return comparison(
        "uneven",
        title_of(distribution),
        asleep,
        {
            "measured mean, ms": lambda result: 1000 * result["mean_s"],
            "of 24 / 7 ms": lambda result: result["env_steps_per_s"] / num_envs * mean_s,
            "busy": lambda result: result["busy"] / num_envs,
        },
        ["--num-workers", str(num_envs), "--envs-per-vector", "1"],
        ["--env-kwargs", f"distribution={distribution}"],
        PUBLISHED.get(distribution, FASTER),
    )


def title_of(distribution):
    """Of its table."""
    return f"{SLEEPING}: {DISTRIBUTIONS[distribution].words}"


def real(work):
    """8 environments that compute."""
    return comparison(
        work,
        f"{COMPUTING}: {REAL[work]}",
        computing,
        {
            "measured mean of CPU time, ms": lambda result: 1000 * result["mean_cpu_s"],
            "busy": lambda result: result["busy_cpu"] / cores(),
        },
        ["--num-workers", str(cores())],
    )


def comparisons():
    return [*(sleeping(name) for name in DISTRIBUTIONS), *(real(work) for work in REAL)]


if __name__ == "__main__":
    sys.exit(turns.run("uneven", __doc__, comparisons(), turns=2))
