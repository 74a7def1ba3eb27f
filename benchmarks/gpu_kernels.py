"""Kernel environments on a GPU: stepping alone and training, from a thousand to a million of them.

Stepping is the device collector's rollout without learning from it: the policy's forward pass,
sampling, phases, resets and observations, as one CUDA graph, and step by step ("eager"). "Kernels
only" is what `KernelVector` does for a batch, with actions drawn once. Training is PPO, whole, by
`Learner` and `DeviceCollector` as `headrace train` has them: CartPole with 4 epochs of 4
minibatches, the games of tag with one update of a batch. Each line is the median of some batches
after two that warm up; memory is the peak of what torch allocated on the device.

Left out: the table's printing (`gpu.py`).
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from headrace.collectors.device import DeviceCollector
from headrace.meter import Meter
from headrace.training.job import RunRequest, inspect_request
from headrace.training.rank import build_learner, sampling_plan

TAG = {"num_taggers": 10, "num_runners": 100, "length": 20.0, "max_episode_steps": 500,
       "full_observation": False, "num_other_agents_observed": 10, "tagging_distance": 0.02,
       "min_acceleration": -0.1, "max_acceleration": 0.1, "num_acceleration_levels": 20,
       "min_turn": -2.356, "max_turn": 2.356, "num_turn_levels": 20,
       "tag_reward": 10.0, "tag_penalty": -10.0}  # fmt: skip
ONCE = {"num_epochs": 1, "num_minibatches": 1}  # as where these games were first measured


@dataclass(frozen=True)
class Game:
    """What is stepped and learned."""

    env: str
    sizes: tuple[int, ...]
    num_steps: int
    kwargs: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)


GAMES = (
    Game(
        "headrace/CartPole-v1", (1024, 16384, 131072, 1048576), 32,
        settings={"num_epochs": 4, "num_minibatches": 4},
    ),
    Game(
        "headrace/TagGridWorld-v0", (2000, 16384, 131072, 524288), 32,
        {"num_taggers": 4, "length": 100},
        {"policies": {"all": ":"}, "hidden_sizes": (32, 32), "lr": 1e-3} | ONCE,
    ),
    Game(
        "headrace/TagContinuous-v0", (100, 1024, 8192), 16, TAG,
        {"hidden_sizes": (256, 256), "policies": {"runner": {"lr": 5e-3}, "tagger": {"lr": 1e-3}}}
        | ONCE,
    ),
)  # fmt: skip


class Bench:
    """A game with so many environments, ready to be stepped and learned from."""

    def __init__(self, game, num_envs, device):
        given = {
            "env": game.env, "num_envs": num_envs, "num_steps": game.num_steps, "device": device,
            "env_kwargs": game.kwargs, "num_workers": 0, "num_learners": 1,
            "total_env_steps": 10**12,
        }  # fmt: skip
        job = inspect_request(RunRequest(given | game.settings)).job(Path())
        self.device, self.agents = torch.device(device), job.spec.num_agents
        self.learner = build_learner(job, self.device, Meter())
        plan = sampling_plan(job, self.learner, self.device)
        self.collector = DeviceCollector(plan, self.device, Meter(), lambda: False)
        self.env_steps = num_envs * game.num_steps
        self.num_envs, self.num_steps = num_envs, game.num_steps

    def roll_out(self):
        self.collector.publish(self.learner.policies, self.learner.version)
        return self.collector.collect()

    def train(self):
        batch = self.learner.assemble(self.roll_out().fragments)
        self.learner.update(batch, 0)

    def kernels_only(self):
        vector = self.collector._vector
        vector.bind(*self.collector._fragments)
        for t in range(self.num_steps):
            vector.step(t)
        vector.finish()


def median_s(work, device, limit_s):
    """Seconds of the typical call, after two."""
    seconds = []
    began = time.perf_counter()
    while len(seconds) < 12 and (len(seconds) < 3 or time.perf_counter() - began < limit_s):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[2:]))


def measure(game, num_envs, device, limit_s):
    """All figures of one size."""
    bench = Bench(game, num_envs, device)
    is_cuda = bench.device.type == "cuda"
    row = {"name": f"{game.env}, {num_envs:,} envs", "num_envs": num_envs, "agents": bench.agents}
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
        act, bench.collector._roll_out = bench.collector._roll_out, bench.collector._act
        row["eager"] = bench.env_steps / median_s(bench.roll_out, bench.device, limit_s)
        bench.collector._roll_out = act
    for name, work in (
        ("rollout", bench.roll_out),
        ("kernels_only", bench.kernels_only),
        ("training", bench.train),
    ):
        row[name] = bench.env_steps / median_s(work, bench.device, limit_s)
    if is_cuda:
        row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    bench.collector.close()
    return row


def rows(device, limit_s, most_envs=None):
    """A line for each game and size; one that does not fit into memory says so."""
    for game in GAMES:
        for num_envs in game.sizes:
            if most_envs is None or num_envs <= most_envs:
                try:
                    yield measure(game, num_envs, device, limit_s)
                except torch.OutOfMemoryError as error:
                    yield {"name": f"{game.env}, {num_envs:,} envs", "failed": str(error)[:200]}
                    torch.cuda.empty_cache()
