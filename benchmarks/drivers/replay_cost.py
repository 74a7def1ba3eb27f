"""What a full replay buffer costs Headrace: memory, disk, and seconds of saving and resuming.

    python -m benchmarks.drivers.replay_cost CartPole-v1 --env-steps 1000000

Next to nothing is learned: one gradient step is due at the end. The memory is that of the
process in its last update, less that of a tenth of the run with a buffer of two batches. The run is
saved once, at its end; then it is resumed and makes a twentieth more, which is saved as well: what
a checkpoint costs that is not the first.
Prints one line.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import headrace

NUM_ENVS, NUM_STEPS = 8, 64


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env")
    parser.add_argument("--env-steps", type=int, required=True)
    parser.add_argument("--replay-size", type=int, default=0, help="default: all env steps")
    args = parser.parse_args()
    size = args.replay_size or args.env_steps
    memory, ratio = [], 1.5 / args.env_steps
    run = headrace.train(
        args.env,
        on_update=lambda *_: memory.append(resident_mib()),
        algo=headrace.DQN(replay_ratio=ratio, replay_size=size, learning_starts=0),
        num_envs=NUM_ENVS, num_steps=NUM_STEPS, num_workers=0, seed=0, quiet=True, run_dir="run",
        total_env_steps=args.env_steps, checkpoint_every_s=1e9,
    )  # fmt: skip
    found = {"env_steps": run.summary["env_steps"], "rss_mib": memory[-1]}
    found |= {"save_s": run.summary["meter"]["checkpoint"], "saved_mib": mib(run.dir)}
    if not args.replay_size:
        small = without_buffer(args)
        found["buffer_mib"] = found["rss_mib"] - small["rss_mib"]
        found |= resumed(run)
    print(json.dumps(found))


def without_buffer(args):
    """The same in a process of its own, with room for two batches."""
    command = [sys.executable, "-m", "benchmarks.drivers.replay_cost", args.env]
    command += ["--env-steps", str(args.env_steps // 10)]
    command += ["--replay-size", str(2 * NUM_ENVS * NUM_STEPS)]
    Path("small").mkdir()
    ended = subprocess.run(
        command, cwd="small", capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    return json.loads(ended.stdout.splitlines()[-1])


def resumed(run):
    """Seconds until it goes on, all parts built anew; seconds and MiB of its next checkpoint."""
    before, env_steps = mib(run.dir), run.summary["env_steps"]
    # There is nothing to do, and so nothing to save.
    began = time.perf_counter()
    headrace.resume(run.dir, total_env_steps=env_steps, quiet=True)
    restored = time.perf_counter()
    more = headrace.resume(run.dir, total_env_steps=env_steps + env_steps // 20, quiet=True)
    return {
        "restore_s": restored - began,
        "save_more_s": more.summary["meter"]["checkpoint"],
        "more_mib": mib(run.dir) - before,
    }


def mib(run_dir):
    """What its checkpoints take on disk."""
    files = [path for path in (run_dir / "checkpoints").rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files) / 2**20


def resident_mib():
    """The memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


if __name__ == "__main__":
    main()
