"""Has Headrace become slower? Four short comparisons, in three minutes, before a release.

    make bench-regression
    python -m benchmarks.regression --accept     # the new figures become the accepted ones

Each figure is a ratio to something else that ran in the same minutes, so that a slower machine is
no regression: training on CartPole-v1 and HalfCheetah-v5, by two workers, beside the plain PPO;
asynchronous sampling of uneven environments beside the ideal; and the time from starting `headrace
train` to its end, after one small update, beside `import torch`. The accepted figures, and by how
much a figure may fall below, are in `regression.toml`. The exit code is 1 if one does.
"""

import argparse
import statistics
import sys
import tomllib
from pathlib import Path

from benchmarks import uneven
from benchmarks.harness import contestants, turns
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.one_turn import TurnError, Work
from benchmarks.peers.works import SETTINGS

ACCEPTED = Path(__file__).with_suffix(".toml")
OURS, OTHER = "Headrace", "other"
IMPORT = 'import json, torch; print(json.dumps({"env_steps": 0}))'


def training(work, env_steps):
    """Env steps/s beside the plain PPO."""
    flags = [*SETTINGS[work].headrace_flags(env_steps), "--num-workers", "2"]
    sizes = ["--work", work, "--env-steps", str(env_steps), "--threads", "1"]
    plain = [sys.executable, "-m", "benchmarks.peers.plain_ppo", *sizes]
    pair = [contestants.headrace(OURS, flags), Contestant(OTHER, plain)]
    return turns.Comparison(work, pair, Work(env_steps))


def start():
    """Seconds of a process with one small update, beside one that imports torch."""
    sizes = ["--num-envs", "8", "--num-steps", "32", "--total-env-steps", "256"]
    ours = contestants.headrace(OURS, ["CartPole-v1", *sizes])
    pair = [ours, Contestant(OTHER, [sys.executable, "-c", IMPORT])]
    return turns.Comparison("start", pair, Work(None, "turn_s", "s", lower_is_better=True))


def uneven_sampling():
    """Env steps/s where step times differ; the ideal is what the environments measured."""
    stalls = uneven.sleeping("stalls")
    first = stalls.contestants[0]
    return turns.Comparison("uneven", [first], stalls.work, limit=stalls.limit, turns=1)


def comparisons():
    return [
        training("cartpole", 20 * SETTINGS["cartpole"].batch),
        training("cheetah", 6 * SETTINGS["cheetah"].batch),
        uneven_sampling(),
        start(),
    ]


def measure(comparison, num_turns):
    """The ratio: how many times as fast as the other, or the share of the ideal; larger is better.

    Raises:
        TurnError: a contestant failed.
    """
    results = turns.compare(comparison, comparison.turns or num_turns)
    rows = results["contestants"]
    if failed := [row["failed"] for row in rows if row["failed"]]:
        raise TurnError(f"{comparison.title}: {failed[0]}")
    if len(rows) == 1:
        return rows[0]["of_limit"]
    pairs = zip(*(row["turns"] for row in rows), strict=True)
    of_turns = [ours / other for ours, other in pairs]
    if comparison.work.lower_is_better:
        of_turns = [1 / ratio for ratio in of_turns]
    return statistics.median(of_turns)


def is_slower(ratio, accepted):
    return ratio < accepted["ratio"] * (1 - accepted["tolerance"])


def verdict(name, ratio, accepted):
    """One line for people."""
    word = "SLOWER" if is_slower(ratio, accepted) else "not slower"
    known = f"accepted {accepted['ratio']:.3f} - {accepted['tolerance']:.0%}"
    return f"{name:<9}{ratio:7.3f}  {known}  {word} ({ratio / accepted['ratio'] - 1:+.0%})"


def accept(found, before):
    """The text of `regression.toml` with new ratios; tolerances stay."""
    lines = [
        f"{name} = {{ ratio = {ratio:.3f}, tolerance = {before[name]['tolerance']} }}"
        for name, ratio in found.items()
    ]
    return "\n".join(["# Written by python -m benchmarks.regression --accept", *lines, ""])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--accept", action="store_true", help=f"write {ACCEPTED.name}")
    flags = parser.parse_args()
    accepted = tomllib.loads(ACCEPTED.read_text())
    found = {each.title: measure(each, flags.turns) for each in comparisons()}
    lines = [verdict(name, ratio, accepted[name]) for name, ratio in found.items()]
    print("\n" + "\n".join(lines))
    if flags.accept:
        ACCEPTED.write_text(accept(found, accepted))
        return 0
    return int(any(is_slower(ratio, accepted[name]) for name, ratio in found.items()))


if __name__ == "__main__":
    sys.exit(main())
