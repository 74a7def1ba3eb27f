"""What a GPU gives the learner: rows learned from per second, and the memory that takes.

A batch of random experience, made once, is learned from again and again by PPO, so that nothing
waits for an environment: Atari's images (NatureCNN) and CartPole's numbers, in fp32 and bf16, the
batch whole and in four accumulated parts. Beside it, the same on this machine's CPU (one thread per
core). Then whole runs of `headrace train ... --device cuda`, from `--json` (PPO with workers, SAC
and TD3 on a kernel environment), and kernel environments (`gpu_kernels.py`). The tables come last.
Left out: gradient steps on few rows (`gpu_steps.py`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks import gpu_kernels
from benchmarks.harness.machine import RESULTS, machine
from headrace import batch
from headrace.algos.ppo import PPOAlgorithm
from headrace.config.policies import assign_agents
from headrace.config.resolve import resolve
from headrace.learner.learner import Learner
from headrace.meter import Meter
from headrace.spec import EnvSpec, Space

NAME = "gpu"
IMAGES = Space("box", (4, 84, 84), "uint8")
NUMBERS = Space("box", (4,), "float32")
CHOICE = Space("discrete", (), "int64", nvec=(6,), start=(0,))
CONTINUOUS = Space("box", (6,), "float32", low=(-1.0,) * 6, high=(1.0,) * 6)
REACHER = ("headrace/Reacher-v0", "--num-steps", "8", "--hidden-sizes", "256", "256")
AT_RATIO_1 = ("--num-envs", "8", "--replay-ratio", "1", "--total-env-steps", "16384")
PARALLEL = (
    "--num-envs", "4096", "--replay-ratio", "0.00048828125", "--batch-size", "32768",
    "--precision", "bf16", "--total-env-steps", "20971520",
)  # fmt: skip
"""Two gradient steps for each step of all environments; FastTD3 has 2 to 8 (arXiv:2505.22642)."""
RUNS = {
    "headrace train CartPole-v1, 4 workers": (
        "CartPole-v1", "--num-workers", "4", "--num-envs", "64", "--num-steps", "128",
        "--envs-per-vector", "16", "--total-env-steps", "300000",
    ),
    **{
        f"headrace train headrace/Reacher-v0 --algo {algo}, {name}": (*REACHER, "--algo", algo, *of)
        for name, of in (
            ("8 environments, a gradient step of 256 rows for each env step", AT_RATIO_1),
            ("4,096 environments, 16 gradient steps of 32,768 rows for 32,768 env steps", PARALLEL),
        )
        for algo in ("sac", "td3")
    },
}  # fmt: skip
"""Whole runs, by name: the words after `headrace train`."""
RUN_LIMIT_S = 100


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    observation: Space
    num_envs: int
    device: str = "cuda"
    precision: str = "fp32"
    num_parts: int = 1
    hidden_sizes: tuple[int, ...] = (64, 64)
    num_threads: int | None = None  # None: one per core
    arithmetic: str = "auto"
    algo: str = "ppo"
    batch_size: int = 0  # of an algorithm with replay
    also: dict = field(default_factory=dict)  # settings

    @property
    def settings(self):
        given = {"num_epochs": 2, "num_minibatches": 4}
        if self.batch_size:
            given = {
                "batch_size": self.batch_size, "replay_size": 20_000, "replay_ratio": 1 / 32,
                "learning_starts": 0,
            }  # fmt: skip
        return resolve(
            {"env": "random", "num_envs": self.num_envs, "num_steps": 128}
            | {"envs_per_vector": self.num_envs, "device": self.device}
            | {"precision": self.precision, "num_accumulation_steps": self.num_parts}
            | {"hidden_sizes": self.hidden_sizes, "arithmetic": self.arithmetic}
            | {"algo": self.algo}
            | given
            | self.also
        )

    @property
    def gradient_steps(self):
        """Of an update."""
        return 8 if not self.batch_size else self.num_envs * 128 // 32


def rows(device):
    sizes = {"images": (IMAGES, 64), "numbers": (NUMBERS, 4096)}
    for name, (space, num_envs) in sizes.items():
        yield Row(f"{name}, fp32", space, num_envs, device)
        yield Row(f"{name}, bf16", space, num_envs, device, "bf16")
        yield Row(f"{name}, fp32, 4 parts", space, num_envs, device, num_parts=4)
        if device == "cuda":
            yield Row(f"{name}, fp32, on the CPU", space, num_envs, "cpu")


def random_experience(spec, num_steps, num_envs):
    generator = torch.Generator().manual_seed(0)
    made = batch.allocate(batch.columns(spec, PPOAlgorithm.stored_outputs, num_steps, num_envs))
    if spec.observation.dtype == "uint8":
        made.obs.random_(0, 256, generator=generator)
    else:
        made.obs.normal_(generator=generator)
    if spec.action is CHOICE:
        made.action.random_(0, spec.action.nvec[0], generator=generator)
    else:
        made.action.uniform_(-1, 1, generator=generator)
    made.reward.normal_(generator=generator)
    made.terminated.copy_(torch.rand(num_steps, num_envs, generator=generator) < 0.01)
    made.valid.fill_(True)
    made.policy_version.zero_()
    made.env_id.copy_(torch.arange(num_envs))
    made.stored_outputs["value"].normal_(generator=generator)
    made.stored_outputs["log_prob"].fill_(-1.0)
    return made


def measure(row, limit_s):
    """Rows per second over updates after the first, and the peak of memory on the device."""
    action = CONTINUOUS if row.algo in ("sac", "td3") else CHOICE
    spec, settings = EnvSpec("random", row.observation, action), row.settings
    device, is_cuda = torch.device(row.device), row.device == "cuda"
    torch.set_num_threads(row.num_threads or len(os.sched_getaffinity(0)))
    learner = Learner(settings, assign_agents({}, spec), spec, None, device, Meter())
    fragments = [random_experience(spec, settings.run.num_steps, row.num_envs)]
    env_steps, done = settings.run.num_steps * row.num_envs, 0
    for _ in range(2):  # chooses kernels, allocates, records
        learner.update(learner.assemble(fragments), done, env_steps)
        done += env_steps
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    began = time.perf_counter()
    while len(seconds) < 20 and time.perf_counter() - began < limit_s:
        start = time.perf_counter()
        learner.update(learner.assemble(fragments), done, env_steps)  # waits for the device
        seconds.append(time.perf_counter() - start)
        done += env_steps
    typical = sorted(seconds)[len(seconds) // 2]
    return {
        "name": row.name,
        "env_steps_per_update": env_steps,
        "updates": len(seconds),
        "gradient_step_s": typical / row.gradient_steps,
        "env_steps_per_s": env_steps / typical,
        "slowest": env_steps / max(seconds),
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if is_cuda else None,
    }


def whole_run(name, words, device):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "headrace", "train", *words, "--device", device, "--json"]
        try:
            done = subprocess.run(
                [*command, "--run-dir", str(Path(folder) / "run")],
                capture_output=True, text=True, timeout=RUN_LIMIT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"name": name, "failed": f"no end after {RUN_LIMIT_S} s"}
    if done.returncode:
        return {"name": name, "failed": done.stderr[-2000:]}
    summary = json.loads(done.stdout.splitlines()[-1])
    kept = ("env_steps_per_s", "mean_return", "meter")
    return {"name": name} | {each: summary[each] for each in kept}


def tables(results):
    """The tables of docs/scaling.md, of the parts that are there."""
    lines = [f"{results['machine']['gpu']}, torch {results['machine']['torch']}.", ""]
    lines += ["| learning by PPO, 2 epochs of 4 minibatches | env steps/s | MiB at most |"]
    lines += ["|---|---|---|"]
    for row in results.get("rows", []):
        peak = f"{row['peak_mib']:,.0f}" if row["peak_mib"] else "-"
        lines.append(f"| {row['name']} | {row['env_steps_per_s']:,.0f} | {peak} |")
    kernels = results.get("kernels", [])
    if kernels:
        columns = "kernels only", "rollout", "rollout without a graph", "training", "MiB at most"
        lines += ["", f"| env steps/s of kernel environments | {' | '.join(columns)} |"]
        lines += ["|---" * 6 + "|"]
    for row in kernels:
        names = "kernels_only", "rollout", "eager", "training", "peak_mib"
        cells = [f"{row[name]:,.0f}" if name in row else "-" for name in names]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    lines += [""] + [f"{row['name']}: {row['failed']}" for row in kernels if "failed" in row]
    for row in results.get("run", []):
        rate = row.get("failed") or f"{row['env_steps_per_s']:,.0f} env steps/s"
        lines.append(f"{row['name']}, which learns on the GPU: {rate}.")
    return "\n".join(lines)


def options(doc, name, limit_s):
    """A parser with the flags of each benchmark of a GPU."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--device", default="cuda", help="cpu: only to see that it works")
    parser.add_argument("--limit-s", type=float, default=limit_s, help="for each figure")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{name}.json")
    return parser


def begin(parser):
    """The flags, and results that name the machine; ends the process if it has no such device."""
    flags = parser.parse_args()
    if flags.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here")
    name = torch.cuda.get_device_name() if flags.device == "cuda" else "none"
    return flags, {"machine": machine() | {"gpu": name, "torch": torch.__version__}}


def main():
    parser = options(__doc__, NAME, 15.0)
    parser.add_argument("--most-envs", type=int, help="of kernel environments")
    flags, results = begin(parser)
    parts = {
        "rows": lambda: [measure(row, flags.limit_s) for row in rows(flags.device)],
        "run": lambda: [whole_run(*run, flags.device) for run in RUNS.items()],
        "kernels": lambda: list(gpu_kernels.rows(flags.device, flags.limit_s / 4, flags.most_envs)),
    }
    for part, measured in parts.items():
        results[part] = measured()
        flags.output.write_text(json.dumps(results, indent=2) + "\n")
    print(tables(results))
    print(f"Written: {flags.output}")


if __name__ == "__main__":
    main()
