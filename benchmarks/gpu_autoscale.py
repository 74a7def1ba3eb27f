"""What `headrace autoscale` finds on a GPU: throughput over num_envs, and where memory ends.

    python -m benchmarks.gpu_autoscale     # results/gpu_autoscale.json and .png; two minutes

The game has 110 agents in each environment, and all of it is on the GPU. Left out: whether a full
grid has something faster (`autoscale.py`).
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.harness.machine import RESULTS, ROOT, machine

ENV = "headrace/TagContinuous-v0"
BUDGET_S = 75.0


def measure(device, budget_s):
    """The search, as `headrace autoscale --json` prints it."""
    command = [sys.executable, "-m", "headrace", "autoscale", ENV, "--device", device, "--again"]
    done = subprocess.run(
        [*command, "--budget-s", str(budget_s), "--json"],
        capture_output=True, text=True, cwd=ROOT, timeout=3 * budget_s + 60, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def measured(found):
    """(num_envs, num_steps, env steps/s, GiB) of what was measured, by num_envs."""
    return sorted(
        (t["num_envs"], t["num_steps"], t["rate"], (t["gpu_bytes"] or t["memory_bytes"]) / 2**30)
        for t in found["trials"]
        if t["outcome"] == "measured"
    )


def draw(found, output):
    """Throughput and memory over num_envs; where memory ended, a line."""
    from matplotlib.figure import Figure

    points = measured(found)
    figure = Figure(figsize=(7, 4), layout="constrained")
    rates = figure.subplots()
    memory = rates.twinx()
    rates.plot([p[0] for p in points], [p[2] for p in points], "o", color="#1f6fb4")
    memory.plot([p[0] for p in points], [p[3] for p in points], "x", color="#cf5a3c")
    for trial in found["trials"]:
        if trial["outcome"] == "memory":
            rates.axvline(trial["num_envs"], color="#cf5a3c", linestyle="--")
    rates.set(xscale="log", xlabel="num_envs", ylabel="env steps/s (o)", ylim=(0, None), title=ENV)
    memory.set(ylabel="GiB (x); dashed: more than there is", ylim=(0, None))
    figure.savefig(output, dpi=120)


def shown(found):
    """A few lines."""
    lines = [
        f"{ENV}: {envs:,} envs x {steps} steps: {rate:,.0f} env steps/s, {gib:.2f} GiB"
        for envs, steps, rate, gib in measured(found)
    ]
    return "\n".join([*lines, f"Found: {found['settings']}; the largest: {found['largest']}"])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cpu: only to see that it works")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="of the search")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_autoscale.json")
    flags = parser.parse_args()
    found = measure(flags.device, flags.budget_s)
    result = {"benchmark": "gpu_autoscale", "machine": machine(), "found": found}
    flags.output.write_text(json.dumps(result, indent=1) + "\n")
    try:
        draw(found, flags.output.with_suffix(".png"))
    except ModuleNotFoundError as error:  # a machine without a network may lack what draws
        print(f"No figure: {error}. Its data is in {flags.output}.")
    print(shown(found))


if __name__ == "__main__":
    main()
