"""Workers and learner on Ray, on this machine: what Ray costs, and where starting goes.

All of it is `headrace train ... --cluster local`, which starts a Ray of its own for the run, beside
the same command without it, whose workers are processes (`--num-workers`). Network, batch and
learning are those of the other benchmarks (2 × 64, T = 128 steps of each environment, 4 epochs of 4
minibatches); each environment has a worker of its own.

- Cost: 8 environments that sleep 1 ms or 5 ms a step (`peers/even.py`), at lag 0 and
  asynchronously (APPO, lag 2). The ratio is what is left with Ray.
- Uneven: 24 environments that sleep 7 ms in the mean, with rare stalls (`uneven.py` says how it is
  measured); RLlib's runners beside them, one turn. "of the limit" is the sampling efficiency.
- Scaling: 2 to 24 environments that sleep 10 ms; APPO; one turn. The limit is N / the mean which
  they measured themselves, "of N / 10 ms" is beside what was asked for; and a figure.
- Start: from the command to the end of the first update, with 2, 8 and 24 workers, seen from
  outside (`watch_phases.py`). Columns are the seconds of each phase, one after the other: the
  command's own imports; starting Ray; the learner's process, up to its first words; the first
  worker; all others; the first batch and update. Then what was computed in it, in all and by each
  worker: on these cores it takes at least CPU s / cores.

Rates are from the end of the first update to the end of the last. Left out: who holds how many
bytes (`cluster_bytes.py`), more machines than this one.
"""

import dataclasses
import sys

from benchmarks import uneven
from benchmarks.harness import contestants, turns
from benchmarks.harness.contestants import SCRATCH
from benchmarks.harness.one_turn import Work
from benchmarks.peers.works import SETTINGS, Settings

SLEEPING = "benchmarks.peers.even:Sleeping"
CLUSTER = ["--cluster", "local"]
ASYNCHRONOUS = ["--algo", "appo", "--lag", "2"]
COST_S, COST_ENVS = 14, 8
"""How long a run of them is to take, without its start."""
SCALING, SCALING_MS, SCALING_UPDATES = (2, 4, 8, 16, 24), 10, 12
STARTED = (2, 8, 24)
LEFT = "Ray / processes"
RAY, PROCESSES = "workers on Ray", "processes"
RAY_24, PROCESSES_24 = "Headrace, 24 workers on Ray", "Headrace, 24 processes"
UNEVEN = "24 environments that sleep 7 ms, rare stalls: workers on Ray"
SCALED = "Workers on Ray whose environments sleep 10 ms a step"
START = "From the command to the end of the first update"
PHASES = {
    "imports, s": ("imported_s",),
    "Ray, s": ("imported_s", "ray_s"),
    "learner, s": ("ray_s", "introduced_s"),
    "first worker, s": ("introduced_s", "first_made_s"),
    "all workers, s": ("first_made_s", "sampling_s"),
    "first batch and update, s": ("sampling_s", "first_update_s"),
}


def asleep(result):
    """The limit of environments that sleep, one in each worker, from what they measured."""
    return len(result["worker_meters"]) / result["mean_s"]


def sleeping(num_envs, step_ms, updates, *flags):
    """Flags of a run in which each of these has a worker of its own."""
    settings = Settings(SLEEPING, num_envs)
    sizes = ["--num-workers", str(num_envs), "--envs-per-vector", "1"]
    kwargs = ["--env-kwargs", f"step_ms={step_ms}"]
    return [*settings.headrace_flags(updates * settings.batch), *sizes, *flags, *kwargs]


def measured_mean(result):
    return 1000 * result["mean_s"]


def cost(step_ms, how, *flags):
    """Workers on Ray against processes."""
    updates = round(COST_S * 1000 / step_ms / Settings(SLEEPING, COST_ENVS).num_steps)
    given = sleeping(COST_ENVS, step_ms, updates, *flags)
    both = [
        contestants.headrace(RAY, [*given, *CLUSTER]),
        contestants.headrace(PROCESSES, given, is_peer=True),
    ]
    return turns.Comparison(
        f"Workers on Ray, {COST_ENVS} environments that sleep {step_ms} ms a step, {how}",
        [uneven.watched(each) for each in both],
        Work(None),
        also={"measured mean, ms": measured_mean},
        ratios={LEFT: (RAY, PROCESSES)},
        limit=asleep,
    )


def costs():
    return [
        cost(step_ms, how, *flags)
        for step_ms in (1, 5)
        for how, flags in (("lag 0", ()), ("asynchronous", ASYNCHRONOUS))
    ]


def uneven_on_ray():
    """24 workers of the uneven environment, and RLlib's 24 runners."""
    settings = SETTINGS["uneven"]
    num_envs = settings.num_envs
    flags = settings.headrace_flags(uneven.UPDATES["uneven"] * settings.batch)
    flags += ["--num-workers", str(num_envs), "--envs-per-vector", "1", *ASYNCHRONOUS]
    *_, rllib = uneven.peers("uneven", ["--env-kwargs", "distribution=stalls"])
    return turns.Comparison(
        UNEVEN,
        [
            uneven.watched(contestants.headrace(RAY_24, flags + CLUSTER)),
            uneven.watched(contestants.headrace(PROCESSES_24, flags)),
            uneven.watched(rllib),
        ],
        Work(None),
        also={
            "measured mean, ms": measured_mean,
            "busy": lambda result: result["busy"] / num_envs,
        },
        ratios={LEFT: (RAY_24, PROCESSES_24)},
        limit=uneven.asleep,
    )


def scaling():
    def of_asked(result):
        return result["env_steps_per_s"] * SCALING_MS / 1000 / len(result["worker_meters"])

    flags = [*ASYNCHRONOUS, *CLUSTER]
    return turns.Comparison(
        SCALED,
        [
            dataclasses.replace(
                uneven.watched(
                    contestants.headrace(
                        f"{count} workers", sleeping(count, SCALING_MS, SCALING_UPDATES, *flags)
                    )
                ),
                turns=1,
            )
            for count in SCALING
        ],
        Work(None),
        also={
            "measured mean, ms": measured_mean,
            f"of N / {SCALING_MS} ms": of_asked,
            "busy": lambda result: result["busy"] / len(result["worker_meters"]),
        },
        limit=asleep,
    )


def starting(name, count, *flags):
    """A run of two updates, watched from outside."""
    settings = Settings(SETTINGS["reporting"].env, count)
    given = settings.headrace_flags(2 * settings.batch)
    given += ["--num-workers", str(count), "--envs-per-vector", "1", *flags]
    watch = [sys.executable, "-m", "benchmarks.drivers.watch_phases", "--workers", str(count)]
    run = contestants.headrace(name, given)
    command = [*watch, "--reports", f"{SCRATCH}/reports", "--", *run.command]
    return contestants.Contestant(name, command, 1, run.packages)


def start():
    def seconds(*marks):
        return lambda result: result[marks[-1]] - (result[marks[0]] if len(marks) > 1 else 0.0)

    return turns.Comparison(
        START,
        [
            starting(f"{count} {what}", count, *flags)
            for count in STARTED
            for what, flags in ((RAY, CLUSTER), (PROCESSES, ()))
        ],
        Work(None, "first_update_s", "s", lower_is_better=True),
        also={name: seconds(*marks) for name, marks in PHASES.items()}
        | {
            "CPU s": lambda result: result["cpu_s"],
            "CPU s of each worker": lambda result: result["worker_cpu_s"],
        },
    )


def comparisons():
    return [*costs(), uneven_on_ray(), scaling(), start()]


if __name__ == "__main__":
    sys.exit(turns.run("cluster", __doc__, comparisons(), turns=2))
