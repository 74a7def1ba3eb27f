"""The published diagnosis, once more: measured here with sleeping environments, and simulated.

    python -m benchmarks.diagnosis      # results/diagnosis.json; three minutes

Published of one team's training: 24 environments whose step takes 3 ms, and rarely 100 ms; 0.8 ms
of inference for the vector (1 ms for each environment where each has its own); 24 ms for each step
in lock-step; 150 s of sampling and 13 s of optimizing in each iteration before, 20 s and 13 s
after. 20 M env steps took 7 to 10 h in lock-step, 1.5 to 2.5 h by batched rollouts on the same 24
CPUs, about 20 min on about 16 times as many.

Assumed, since it was not published (`ASSUMED` goes to the tables): how often a step stalls, how
many env steps an iteration has, and what the small cases are. Left out: real environments.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import gymnasium as gym

from benchmarks.harness.machine import RESULTS, ROOT, machine
from benchmarks.timed import Timed
from headrace.cost_model.costs import Costs, LinearCost, mixture
from headrace.cost_model.model import Topology, lock_step_s, simulate

NAME = "diagnosis"
NUM_ENVS, STALL = 24, 1 / 99
VECTOR_S, EACH_S = 0.0008, 0.001
SAMPLING_S, LEARN_S = 150.0, 13.0
TOTAL = 20_000_000
BATCH = 150_000
ASSUMED = (
    "A step stalls once in 99 (our fit: 24 in lock-step then take 24 ms).",
    "An iteration has 150,000 env steps: 150 s / 24 ms x 24. Its 13 s of optimizing do not get "
    "less with more CPUs; with several learners they are shared, and nothing is lost in between.",
    "Small cases: of k env steps that one process takes after the other, one takes 100 ms and the "
    "others 3 ms; k = 2 (one vector of 2), 3 (batched), 5 (long vectors); 0.8 ms of inference for "
    "the vector. It is the reading by which all three figures come out.",
)
STEP = mixture((0.003, 1 - STALL), (0.1, STALL))
COSTS = Costs(
    step=STEP,
    reset=mixture((0.0, 1.0)),
    resets_per_step=0.0,
    cpu_share=0.0,
    vector=LinearCost(EACH_S, 0.0),
    inference=1.0,
    hand_over=0.0,
    latency=0.0,
    learn=LinearCost(0.0, LEARN_S / BATCH),
    allreduce=LinearCost(0.0, 0.0),
)
SMALL = {"one vector of 2": (2, 52), "batched": (3, 35), "long vectors": (5, 23)}
"""Name -> env steps of which one stalls, and published ms for each."""


def alone(seconds):
    """What a mixture costs, and nothing besides."""
    return replace(
        COSTS, step=mixture(*seconds), vector=LinearCost(VECTOR_S, 0.0), learn=LinearCost(0.0, 0.0)
    )


def small_simulated(k):
    """Milliseconds for each env step of a vector of k that are stepped one after the other."""
    costs = alone([(0.003, 1 - 1 / k), (0.1, 1 / k)])
    top = Topology(num_envs=k, num_steps=1000, envs_per_vector=k)
    return 1e3 / simulate(costs, top)


def small_measured(k, seconds=3.0):
    """The same, asleep: the environments of a vector, of which one always stalls."""
    envs = [Timed("100" if i == 0 else "3") for i in range(k)]
    taken, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        time.sleep(VECTOR_S)
        for env in envs:
            env.step(0)
        taken += k
    return (time.perf_counter() - began) / taken * 1e3


def lock_step_simulated():
    """Milliseconds of a step of all 24."""
    return 1e3 * lock_step_s(replace(COSTS, vector=LinearCost(VECTOR_S, 0.0)), NUM_ENVS)


def lock_step_measured(seconds=20.0):
    """The same, asleep: Gymnasium's vector, each environment in a process of its own."""
    make = partial(Timed, "stalls", mean_ms=1e3 * STEP.mean)
    envs = gym.vector.AsyncVectorEnv([make] * NUM_ENVS, context="forkserver")
    envs.reset(seed=0)
    actions = envs.action_space.sample()
    taken, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        time.sleep(VECTOR_S)
        envs.step(actions)
        taken += 1
    took = time.perf_counter() - began
    envs.close()
    return took / taken * 1e3


def batched_simulated(num_steps):
    """Milliseconds of a step of all 24, each by its own worker, without learning."""
    costs = replace(COSTS, learn=LinearCost(0.0, 0.0))
    top = Topology(NUM_ENVS, num_steps, envs_per_vector=1, num_workers=NUM_ENVS)
    return 1e3 * NUM_ENVS / simulate(costs, top)


def batched_measured(num_steps, updates=12):
    """The same by Headrace, whose learner's own time is taken off: inference is slept as well."""
    command = [
        *(sys.executable, "-m", "headrace", "train", "benchmarks.timed:Timed", "--json"),
        *("--env-kwargs", "times=stalls", f"mean_ms={1e3 * STEP.mean}", f"more_ms={1e3 * EACH_S}"),
        *("--num-envs", str(NUM_ENVS), "--num-workers", str(NUM_ENVS), "--envs-per-vector", "1"),
        *("--num-steps", str(num_steps), "--num-epochs", "1"),
        *("--total-env-steps", str(updates * num_steps * NUM_ENVS)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    return 1e3 * found["meter"]["wait"] / updates / num_steps


def profiled(seconds=30):
    """What `headrace profile` says of those 24 environments, at lag 0."""
    command = [
        *(sys.executable, "-m", "headrace", "profile", "benchmarks.timed:Timed", "--json"),
        *("--env-kwargs", "times=stalls", f"mean_ms={1e3 * STEP.mean}"),
        *("--num-envs", str(NUM_ENVS), "--num-workers", str(NUM_ENVS), "--envs-per-vector", "1"),
        *("--seconds", str(seconds)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    samplers = [of for name, of in found["seconds"].items() if name != "learner"]
    wait = sum(of.get("wait for workers", 0.0) for of in samplers)
    return found["times"]["step"] | {
        "lock_step_ms": 1e3 * NUM_ENVS / found["lock_step_env_steps_per_s"],
        "wait_for_samplers": wait / sum(sum(of.values()) for of in samplers),
        "env_steps_per_s": found["env_steps_per_s"],
        "predicted": found["predicted_env_steps_per_s"],
        "gains": found["gains"],
        "changes": found["changes"],
    }


def hours(costs, topology):
    """Of 20 M env steps, and seconds of sampling and of optimizing in an iteration."""
    rate = simulate(costs, topology, num_updates=20)
    learn_s = costs.learn.at(topology.batch / topology.num_learners)
    return {
        "hours": TOTAL / rate / 3600,
        "sampling_s": topology.batch / rate - learn_s,
        "learn_s": learn_s,
    }


def published_runs():
    """20 M env steps: what was published, and what the model gives."""
    lock_step = replace(COSTS, step=mixture((lock_step_s(COSTS, NUM_ENVS) - EACH_S, 1.0)))
    lock_step = replace(lock_step, vector=LinearCost(VECTOR_S, 0.0))
    # All environments of a lock-step vector end each step together: as one sampler's would.
    one = Topology(NUM_ENVS, BATCH // NUM_ENVS, 1, NUM_ENVS)
    many = Topology(16 * NUM_ENVS, BATCH // (16 * NUM_ENVS), 1, 16 * NUM_ENVS)
    nonstop = replace(one, lag=2, asynchronous=True)
    cases = {
        "24 CPUs, lock-step": ("7 to 10 h", lock_step, one),
        "24 CPUs, batched": ("1.5 to 2.5 h", COSTS, one),
        "24 CPUs, batched, never stopping": ("-", COSTS, nonstop),
        "384 CPUs, batched": ("about 20 min", COSTS, many),
        "384 CPUs, batched, optimizing in 4 s": (
            "about 20 min",
            replace(COSTS, learn=LinearCost(0.0, 4 / BATCH)),
            many,
        ),
    }
    return [
        {"case": name, "published": said, **hours(costs, top)}
        for name, (said, costs, top) in cases.items()
    ]


def learners():
    """1 to 1,024 learners with 8 CPUs each: the same batch divided, and one that grows."""
    rows = []
    for count in (1, 2, 4, 8, 16, 32, 128, 1024):
        workers = 8 * count
        steps = max(1, BATCH // workers)
        divided = Topology(workers, steps, 1, workers, count, cores=9, machines=count)
        grown = replace(divided, num_steps=BATCH // 8)
        many = {"num_updates": 5}
        rows.append(
            {
                "learners": count,
                "divided": simulate(COSTS, divided, **many),
                "grown": simulate(COSTS, grown, **many) if count <= 32 else None,
            }
        )
    return rows


def measure():
    """All of it."""
    small = [
        {"case": name, "published_ms": ms, "measured_ms": small_measured(k),
         "simulated_ms": small_simulated(k)}
        for name, (k, ms) in SMALL.items()
    ]  # fmt: skip
    vectors = [
        {
            "case": "24 in lock-step",
            "published_ms": 24,
            "measured_ms": lock_step_measured(),
            "simulated_ms": lock_step_simulated(),
        },
        {
            "case": "24 batched, 128 steps",
            "published_ms": None,
            "measured_ms": batched_measured(128),
            "simulated_ms": batched_simulated(128),
        },
    ]
    return {
        "profile": profiled(),
        "steps": small + vectors,
        "runs": published_runs(),
        "learners": learners(),
    }


def tables(result):
    """For docs/profile.md."""

    def ms(value):
        return "-" if value is None else f"{value:.1f}"

    def rate(value):
        return "-" if value is None else f"{value:,.0f}"

    of = result["profile"]
    advice = "; ".join(
        " ".join(
            f"`--{name.replace('_', '-')} {value}`" for name, value in change["settings"].items()
        )
        + f" {change['gain'] - 1:+.0%}"
        for change in of["changes"]
    )
    return "\n".join(
        [
            f"`headrace profile` of these 24, each with its worker, at lag 0: a step takes "
            f"{1e3 * of['mean_s']:.2f} ms (median {1e3 * of['p50_s']:.2f}, 99 %: "
            f"{1e3 * of['p99_s']:.0f}, longest {1e3 * of['max_s']:.0f}; the slowest 1 % take "
            f"{of['tail_weight']:.0%} of all time); in lock-step {of['lock_step_ms']:.1f} ms. A "
            f"sampler waits for others {of['wait_for_samplers']:.0%} of its time; "
            f"{of['env_steps_per_s']:,.0f} env steps/s, predicted {of['predicted']:,.0f}. What it "
            f"advises: {advice or 'nothing'}.",
            "",
            "| ms for each step | published | measured | simulated |",
            "|---|---|---|---|",
            *(
                f"| {r['case']} | {'-' if r['published_ms'] is None else r['published_ms']} | "
                f"{ms(r['measured_ms'])} | {ms(r['simulated_ms'])} |"
                for r in result["steps"]
            ),
            "",
            "| 20 M env steps | published | simulated | sampling, optimizing in an iteration |",
            "|---|---|---|---|",
            *(
                f"| {r['case']} | {r['published']} | {r['hours']:.2f} h | "
                f"{r['sampling_s']:.0f} s, {r['learn_s']:.0f} s |"
                for r in result["runs"]
            ),
            "",
            "| learners, 8 CPUs each | env steps/s, batch of 150,000 | of 150,000 each |",
            "|---|---|---|",
            *(
                f"| {r['learners']:,} | {rate(r['divided'])} | {rate(r['grown'])} |"
                for r in result["learners"]
            ),
            "",
            "Assumed: " + " ".join(ASSUMED),
        ]
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULTS / f"{NAME}.json", metavar="PATH")
    arguments = parser.parse_args()
    result = {"benchmark": NAME, "machine": machine(), **measure()}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{tables(result)}\n\nWritten: {arguments.output}")


if __name__ == "__main__":
    main()
