"""Microseconds of one call with one observation: an exported file, and `headrace.load_policy`.

    python -m benchmarks.export      # two minutes

The policies are of runs of two updates. Both get the same observation, as the environment gives it,
and give the environment's action: the file in onnxruntime on the CPU, the policy as `policy(obs)`.
A recurrent policy remembers its state; that of the file is passed on. One thread each. In turns,
blocks of calls: A B A B ...; medians of the blocks.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import onnxruntime
import torch

import headrace
from benchmarks.harness.machine import RESULTS, machine
from headrace.envs.factory import EnvMaker
from headrace.interop.export.to_onnx import OnnxSession

NAME = "export"
SMALL = {"num_envs": 4, "num_steps": 16, "num_workers": 0, "quiet": True, "seed": 0}
RUNS = {
    "CartPole-v1, PPO, 2 x 64": {"env": "CartPole-v1", "num_minibatches": 4},
    "CartPole-v1, PPO, LSTM of 64": {"env": "CartPole-v1", "core": "lstm", "num_minibatches": 1},
    "Pendulum-v1, SAC, 2 x 256": {
        "env": "Pendulum-v1", "algo": "sac", "hidden_sizes": (256, 256), "learning_starts": 64,
    },
    "ALE/Pong-v5, PPO, NatureCNN": {"env": "ALE/Pong-v5", "num_minibatches": 4},
}  # fmt: skip
FILE, POLICY = "file, onnxruntime", "load_policy"


def of_file(exported, obs):
    """A function that calls the exported file once."""
    session, inputs = OnnxSession(exported.path, num_threads=1), {"obs": obs[None]}
    for array in json.loads(exported.metadata["inputs"]):
        if array["name"] == "state":
            inputs["state"] = np.zeros((1, array["shape"][1]), np.float32)

    def call():
        outputs = session(inputs)
        if "state" in inputs:
            inputs["state"] = outputs["next_state"]
        return outputs["action"][0]

    return call


def of_policy(run, obs):
    """A function that calls the policy once."""
    policy = headrace.load_policy(run.dir)
    return lambda: policy(obs)


def measure(name, turns, calls):
    """Microseconds of a call in each block, by contestant."""
    with tempfile.TemporaryDirectory() as folder:
        settings = SMALL | RUNS[name]
        run = headrace.train(run_dir=Path(folder) / "run", total_env_steps=128, **settings)
        exported = headrace.export_policy(run.dir)
        env = EnvMaker(settings["env"])()
        obs = np.asarray(env.reset(seed=0)[0])
        env.close()
        named = {FILE: of_file(exported, obs), POLICY: of_policy(run, obs)}
    microseconds = {who: [] for who in named}
    for call in named.values():
        call()  # allocates
    for _ in range(turns):
        for who, call in named.items():
            start = time.perf_counter()
            for _ in range(calls):
                call()
            microseconds[who].append(1e6 * (time.perf_counter() - start) / calls)
    return {"policy": name, "us": microseconds, "check": [c.to_json() for c in exported.checks]}


def tables(results):
    """The table of docs/export.md: medians, and how many times as fast the file is."""
    lines = [f"| µs of one call | {FILE} | {POLICY} | ratio |", "|---|---|---|---|"]
    for row in results["rows"]:
        file, policy = (statistics.median(row["us"][who]) for who in (FILE, POLICY))
        lines.append(f"| {row['policy']} | {file:.0f} | {policy:.0f} | {policy / file:.1f} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--calls", type=int, default=1000, help="of a block (default: 1000)")
    parser.add_argument("--only", help="policies with this in their name")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{NAME}.json")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    about = machine() | {"turns": flags.turns, "calls": flags.calls}
    about |= {each.__name__: each.__version__ for each in (torch, onnxruntime, np, gym)}
    results = {"benchmark": NAME, "machine": about, "rows": []}
    for name in RUNS:
        if not flags.only or flags.only in name:
            results["rows"].append(measure(name, flags.turns, flags.calls))
    flags.output.write_text(json.dumps(results, indent=2) + "\n")
    print(tables(results))


if __name__ == "__main__":
    main()
