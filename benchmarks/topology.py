"""Env steps per second of PPO where nobody says how: Headrace's choice, and the best by hand.

Headrace is given the sizes of batch and minibatches and the constants of PPO (`peers/works.py`), as
all contestants are; "no flags" says nothing of processes. Beside it is a grid of topologies: one
process with one vector, workers with one or two vectors each, learners, threads. The plain PPO and
Stable-Baselines3's default step in one process; its SubprocVecEnv has a process for each
environment.

Runs of Headrace have a goal of many env steps and end after some seconds, since its choice depends
on how long a run will take. The rate is that from the end of the first update to the end of the
last: calibration and the start of processes are left out (`calibration.py` has the former).

The works: CartPole-v1 with 8 environments x 64 steps and with 64 x 128; HalfCheetah-v5; Breakout;
MiniGrid with resets of 2 to 220 ms; 24 environments that sleep 7 ms with rare stalls; 8 that sleep
1 ms; and headrace/CartPole-v1 with 1,024 environments x 32 steps, beside which others step
Gymnasium's.
"""

import dataclasses
import sys

from benchmarks.harness import contestants, turns
from benchmarks.harness.machine import cores
from benchmarks.harness.one_turn import Work
from benchmarks.peers.works import SETTINGS

NAME = "topology"
SECONDS = 12
GOAL = 3_000_000  # env steps of a whole run; it is stopped before
NO_FLAGS = "Headrace, no flags"
TITLES = {
    "cartpole8": "CartPole-v1, 8 x 64",
    "cartpole": "CartPole-v1, 64 x 128",
    "cheetah": "HalfCheetah-v5, 8 x 512",
    "atari": "Breakout, 8 x 128",
    "minigrid": "MiniGrid, 8 x 256",
    "uneven": "24 environments that sleep 7 ms",
    "millisecond": "8 environments that sleep 1 ms",
    "cartpole1024": "headrace/CartPole-v1, 1,024 x 32",
}
PEER_STEPS = {
    "cartpole8": 40_000, "cartpole": 120_000, "cheetah": 24_576, "atari": 4_096,
    "minigrid": 12_288, "uneven": 12_288, "millisecond": 8_192, "cartpole1024": 131_072,
}  # fmt: skip
"""Env steps of a turn of the others: some 10 s, and two updates or more."""
NATIVE = {"atari": "ALE/Breakout-v5", "cartpole1024": "headrace/CartPole-v1"}
"""What Headrace steps in its own vector form."""


def settings_of(work):
    """Return the settings of a work as Headrace has them."""
    return dataclasses.replace(SETTINGS[work], env=NATIVE.get(work, SETTINGS[work].env))


def grid(work):
    """Yield name and flags of the topologies that one would try by hand."""
    num_envs, n = SETTINGS[work].num_envs, cores()
    counts = {n, 4, 8, num_envs} if "sleep" in TITLES[work] else {n}
    yield from topologies(num_envs, () if work in NATIVE else sorted(counts))


def topologies(num_envs, counts):
    """Yield name and flags of topologies: those without workers, and those with each count."""
    n = cores()
    yield "one process", f"--num-workers 0 --num-learners 1 --envs-per-vector {num_envs}"
    yield f"{n} threads", f"--num-workers 0 --envs-per-vector {num_envs} --learner-threads {n}"
    yield f"{n} learners", f"--num-learners {n} --num-workers 0 --envs-per-vector {num_envs // n}"
    for workers in counts:
        yield (
            f"{workers} workers",
            f"--num-workers {workers} --envs-per-vector {num_envs // workers}",
        )
        if num_envs % (2 * workers) == 0:
            size = num_envs // (2 * workers)
            flags = f"--num-workers {workers} --envs-per-vector {size}"
            yield f"{workers} workers, 2 vectors each", flags


def comparison(work):
    """Build the table of one work."""
    settings = settings_of(work)
    common = [*settings.headrace_flags(GOAL), "--stop-after-s", str(SECONDS)]
    if work == "atari":
        common += ["--env-kwargs", "use_fire_reset=False"]
    forms = {"no flags": "", **dict(grid(work))}
    sizes = ["--work", work, "--env-steps", str(PEER_STEPS[work]), "--threads", "1"]
    sb3 = {"Stable-Baselines3": []}
    if settings.num_envs <= 64:
        sb3["Stable-Baselines3, a process each"] = ["--subproc"]
    return turns.Comparison(
        TITLES[work],
        [
            *(
                contestants.headrace(f"Headrace, {name}", [*common, *flags.split()])
                for name, flags in forms.items()
            ),
            contestants.driver("plain PPO", "sb3", "plain_ppo", sizes),
            *(
                contestants.driver(
                    name, "sb3", "sb3_bench", [*sizes, *more], package="stable-baselines3"
                )
                for name, more in sb3.items()
            ),
        ],
        Work(None),
        ratios={
            **{f"no flags / {name}": (NO_FLAGS, f"Headrace, {name}") for name, _ in grid(work)},
            **{f"no flags / {name}": (NO_FLAGS, name) for name in ("plain PPO", *sb3)},
        },
    )


def tables(results):
    """The table of a page: what was chosen, beside the best of the grid and the peers."""
    heads = ["", "no flags", "best of the grid", "share", "plain PPO", "Stable-Baselines3", "times"]
    peers = heads[4:6]
    has_peers = any(
        row["is_peer"] for of in results["tables"].values() for row in of["contestants"]
    )
    heads = heads if has_peers else heads[:4]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for title, of in results["tables"].items():
        rates = {row["name"]: row["median"] for row in of["contestants"] if row["median"]}
        found = rates.pop(NO_FLAGS)
        by_hand = {name: rate for name, rate in rates.items() if name.startswith("Headrace, ")}
        best = max(by_hand, key=by_hand.__getitem__)
        cells = [title, f"{found:,.0f}", f"{by_hand[best]:,.0f}, {best.removeprefix('Headrace, ')}"]
        cells.append(f"{found / by_hand[best]:.0%}")
        if has_peers:  # one that is not installed has no figure
            cells += [f"{rates[name]:,.0f}" if name in rates else "-" for name in peers]
            theirs = rates.get("Stable-Baselines3")
            cells.append(f"{found / theirs:.1f}" if theirs else "-")
            if several := rates.get("Stable-Baselines3, a process each"):
                cells[5] += f" (processes: {several:,.0f})"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(turns.run(NAME, __doc__, [comparison(work) for work in TITLES], turns=5))
