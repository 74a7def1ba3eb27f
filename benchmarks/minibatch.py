"""Milliseconds of one gradient step of PPO on one core, by the rows of its minibatch.

    python -m benchmarks.minibatch      # three minutes

The network and the settings are those of `cheetah.py`: 17 numbers seen, 6 given, 2 × 64 tanh with
separate actor and critic, Adam with a clipped gradient. A batch of 4,096 random rows is learned
from again and again. Of Headrace a step is a share of `Learner.update`, from the difference of
updates with eleven epochs and with one: it includes picking the rows, metrics and the optimizer,
not advantages. Of plain torch it is the step of `peers/plain_ppo.py`, its loss as it stands, and
compiled (`torch.compile`, which needs a C++ compiler). In turns; medians.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import gymnasium as gym
import torch

from benchmarks.gpu import CONTINUOUS, random_experience
from benchmarks.harness.machine import RESULTS, machine
from benchmarks.peers import plain_ppo
from headrace.config.policies import assign_agents
from headrace.config.resolve import resolve
from headrace.learner.learner import Learner
from headrace.meter import Meter
from headrace.spec import EnvSpec, Space

NAME = "minibatch"
BATCH, NUM_ENVS, EPOCHS, LR = 4096, 8, 10, 3e-4
SIZES = (64, 256, 1024, 4096)
SPEC = EnvSpec("random", Space("box", (17,), "float32"), CONTINUOUS)


def of_headrace(rows, arithmetic):
    """A function that measures the seconds of a step of Headrace's learner."""
    fragment = random_experience(SPEC, BATCH // NUM_ENVS, NUM_ENVS)

    def learner(epochs):
        settings = resolve(
            {"env": "random", "num_envs": NUM_ENVS, "num_steps": BATCH // NUM_ENVS}
            | {"envs_per_vector": NUM_ENVS, "arithmetic": arithmetic, "device": "cpu"}
            | {"minibatch_size": rows, "num_epochs": epochs, "lr": LR}
        )
        roles = assign_agents({}, SPEC)
        return Learner(settings, roles, SPEC, None, torch.device("cpu"), Meter())

    learners = learner(1), learner(1 + EPOCHS)

    def step_s():
        seconds = []
        for each in learners:
            batch = each.assemble([fragment])
            start = time.perf_counter()
            each.update(batch, 0, BATCH)
            seconds.append(time.perf_counter() - start)
        return (seconds[1] - seconds[0]) / (EPOCHS * BATCH // rows)

    return step_s


def of_plain_torch(rows, loss):
    """A function that measures the seconds of a step of the plain PPO."""
    action = gym.spaces.Box(-1, 1, CONTINUOUS.shape)
    net = plain_ppo.Mlp(SPEC.observation.shape[0], action)
    optimizer = torch.optim.Adam(net.parameters(), lr=LR, eps=1e-5, fused=True)
    columns = [torch.randn(BATCH, *SPEC.observation.shape), torch.randn(BATCH, *action.shape)]
    columns += [torch.full((BATCH,), -8.0), torch.randn(BATCH), torch.randn(BATCH)]

    def step_s():
        start = time.perf_counter()
        for _ in range(EPOCHS):
            for chosen in torch.randperm(BATCH).split(rows):
                picked = [column[chosen] for column in columns]
                plain_ppo.gradient_step(net, optimizer, picked, 0.0, loss)
        return (time.perf_counter() - start) / (EPOCHS * BATCH // rows)

    return step_s


CONTESTANTS = {
    "Headrace": lambda rows: of_headrace(rows, "auto"),
    "Headrace, --arithmetic plain": lambda rows: of_headrace(rows, "plain"),
    "plain torch": lambda rows: of_plain_torch(rows, plain_ppo.loss),
    "plain torch, compiled": lambda rows: of_plain_torch(rows, torch.compile(plain_ppo.loss)),
}


def measure(rows, turns):
    named = {name: make(rows) for name, make in CONTESTANTS.items()}
    for step_s in named.values():
        step_s()  # compiles, allocates
    seconds = {name: [] for name in named}
    for _ in range(turns):
        for name, step_s in named.items():
            seconds[name].append(step_s())
    return {"rows": rows, "ms": {n: [1e3 * s for s in of] for n, of in seconds.items()}}


def tables(results):
    """The table of benchmarks/README.md."""
    rows = results["rows"]
    names = list(rows[0]["ms"])
    lines = [f"| ms of a gradient step of PPO, rows | {' | '.join(names)} |"]
    lines += ["|---" * (1 + len(names)) + "|"]
    for row in rows:
        cells = (f"{statistics.median(row['ms'][name]):.3f}" for name in names)
        lines.append(f"| {row['rows']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--output", type=Path, default=RESULTS / f"{NAME}.json")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    about = machine() | {"torch": torch.__version__, "turns": flags.turns}
    results = {"machine": about, "rows": [measure(rows, flags.turns) for rows in SIZES]}
    flags.output.write_text(json.dumps(results, indent=2) + "\n")
    print(tables(results))


if __name__ == "__main__":
    main()
