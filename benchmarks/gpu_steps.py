"""Gradient steps on few rows: on a GPU as a graph, on it operation by operation, and on one core.

    python -m benchmarks.gpu_steps      # a minute, on a machine with a CUDA device

By PPO: two epochs of four minibatches; by the others: with what is drawn and inserted. A batch of
random experience, made once, is learned from again and again. The table shows where a GPU begins to
be faster (`LEAST_GPU_WORK`).
"""

import json
from dataclasses import replace

from benchmarks.gpu import IMAGES, NUMBERS, Row, begin, measure, options

NAME = "gpu_steps"
RAINBOW = {
    "dueling": True, "priority_alpha": 0.5, "noisy": True, "distribution": "c51",
    "layer_norm": False,
}  # fmt: skip


def rows(device):
    """Three for each line of the table, in the order of its columns."""
    for width in (64, 256):
        for size in (64, 512, 4096, 32768):  # 4 of 128 steps of so many environments
            name = f"PPO, 2 x {width}, {size:,} rows"
            yield from _each_way(name, device, NUMBERS, size // 32, hidden_sizes=(width, width))
    wide = {"hidden_sizes": (256, 256)}
    for size in (128, 1024, 8192):
        dqn = {"algo": "dqn", "also": {"layer_norm": True}, "batch_size": size, **wide}
        yield from _each_way(f"DQN, 2 x 256, {size:,} rows", device, NUMBERS, 4, **dqn)
    rainbow = {"algo": "dqn", "also": RAINBOW, "batch_size": 128, **wide}
    yield from _each_way("Rainbow, 2 x 256, 128 rows", device, NUMBERS, 4, **rainbow)
    for algo in ("sac", "td3"):
        for size in (256, 2048, 32768):
            name, of = f"{algo.upper()}, 2 x 256, {size:,} rows", {"algo": algo, **wide}
            yield from _each_way(name, device, NUMBERS, 4, batch_size=size, **of)
    for size in (32, 256):
        of = {"algo": "dqn", "also": {"layer_norm": False}, "hidden_sizes": ()}
        yield from _each_way(
            f"DQN, images, {size:,} rows", device, IMAGES, 1, batch_size=size, **of
        )


def _each_way(name, device, observation, num_envs, **more):
    alone = Row(name, observation, num_envs, "cpu", num_threads=1, **more)
    on_gpu = replace(alone, device=device, num_threads=None)
    yield from (on_gpu, replace(on_gpu, arithmetic="plain"), alone)


def tables(results):
    columns = "GPU, as a graph", "GPU, operation by operation", "one core"
    lines = [f"{results['machine']['gpu']}, torch {results['machine']['torch']}.", ""]
    lines += [f"| milliseconds of a gradient step | {' | '.join(columns)} |", "|---" * 4 + "|"]
    found = results["rows"]
    for three in zip(found[::3], found[1::3], found[2::3], strict=True):
        cells = (f"{1e3 * row['gradient_step_s']:.2f}" for row in three)
        lines.append(f"| {three[0]['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    flags, results = begin(options(__doc__, NAME, 1.5))
    results["rows"] = [measure(row, flags.limit_s) for row in rows(flags.device)]
    flags.output.write_text(json.dumps(results, indent=2) + "\n")
    print(tables(results))
    print(f"Written: {flags.output}")


if __name__ == "__main__":
    main()
