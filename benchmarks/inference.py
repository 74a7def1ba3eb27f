"""Env steps per second of PPO training with `--inference worker` and `learner`: where each wins.

worker: each worker acts with its own copy of the network, on its core; each has one vector of
environments. learner: the learner's process acts, one batch for all vectors that are ready; each
worker has two vectors, half as large, and steps one while the other waits for actions. Batches are
those of lag 0 (16 environments × 64 steps), and learned from in one epoch of four minibatches, so
that learning takes the least part that it can. The learner's math has one thread with networks of
up to 256 units, else as many as there are cores. Where a GPU is, it learns, and with `learner` it
acts as well.

- CartPole-v1: a step takes 6 µs. Two workers.
- Sleeping (`peers/even.py`): a step takes 3 ms and no core. Eight workers.
- Frames: images of 84 × 84 × 4 that cost nothing to make, NatureCNN. Two workers.

The tables' "inferring" is the share of the workers' sampling time that goes by with acting, or
waiting for actions. Each row is the same work for both.
"""

import sys

from benchmarks.harness import contestants, turns
from benchmarks.harness.one_turn import Work
from benchmarks.peers.works import Settings

NETS = {
    "2 x 64": (64, 64),
    "2 x 256": (256, 256),
    "2 x 1024": (1024, 1024),
    "3 x 2048": (2048, 2048, 2048),
}
NUM_ENVS = 16
# Environment: its id, workers, and env steps with each network: some seconds, after the start.
WORKS = {
    "CartPole-v1": ("CartPole-v1", 2, (100_000, 50_000, 12_000, 3_000)),
    "Sleeping": ("benchmarks.peers.even:Sleeping", 8, (8_000, 8_000, 8_000, 3_000)),
}
FRAMES = ("benchmarks.peers.even:Frames", 2, 5_000)
ONE_THREAD = ("2 x 64", "2 x 256")  # the work of more would be less than meeting costs


def inferring(result):
    """Share of the workers' time that is not waiting for orders."""
    meters = [m for name, m in result["worker_meters"].items() if name.startswith("worker")]
    sampling = sum(s for m in meters for span, s in m.items() if span not in ("start", "wait"))
    return sum(m.get("infer", 0.0) for m in meters) / sampling


def both(title, env, num_workers, env_steps, *network):
    settings = Settings(env, NUM_ENVS, num_steps=64, num_epochs=1)
    env_steps = -(-env_steps // settings.batch) * settings.batch
    flags = [*settings.headrace_flags(env_steps), "--num-workers", str(num_workers), *network]
    flags += ["--lag", "0"]

    def one(who, vectors_each):
        size = NUM_ENVS // num_workers // vectors_each
        return contestants.headrace(
            who, [*flags, "--inference", who, "--envs-per-vector", str(size)]
        )

    return turns.Comparison(
        title,
        [one("worker", 1), one("learner", 2)],
        Work(env_steps),
        also={"inferring": inferring},
        ratios={"learner / worker": ("learner", "worker")},
    )


def comparisons():
    found = []
    for name, (env, num_workers, sizes) in WORKS.items():
        for (net, hidden), env_steps in zip(NETS.items(), sizes, strict=True):
            network = ["--hidden-sizes", *map(str, hidden)]
            network += ["--learner-threads", "1" if net in ONE_THREAD else "0"]
            found.append(both(f"{name}, {net}", env, num_workers, env_steps, *network))
    nature = ("--image-net", "nature", "--learner-threads", "0")
    return [*found, both("Frames, NatureCNN", *FRAMES, *nature)]


if __name__ == "__main__":
    sys.exit(turns.run("inference", __doc__, comparisons(), turns=3))
