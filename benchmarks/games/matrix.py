"""How near to equilibrium rock-paper-scissors is learned, with a league and without.

In headrace/RockPaperScissors-v0 the only equilibrium is to choose each with probability 1/3. A
policy that learns against its newest self goes round in circles: it learns to beat what it did
before. So its end says little. Here the policies of the second half of a run are looked at, by its
snapshots, which are taken 40 times or more:

- the mean of their probabilities, and the exploitability of that mean: the payoff of the best
  answer to it, between 0 (equilibrium) and 1 (a single move);
- the exploitability of each snapshot by itself, in the mean: how far the circles go.

"against itself" is `--league 1 --latest-ratio 1`: it always plays itself, and takes snapshots all
the same. "with a league of 8" is `--league 8`, with the defaults of a league: in half of the
episodes one side is played by one of eight of 40 snapshots. All else is the same: PPO with batches
of 2,048 games, lr 1e-2, an entropy bonus of 0.1.
"""

import numpy as np
import torch

from benchmarks.games import runs
from headrace.evaluation.trained_policies import load_policy

NAME = "games_matrix"
ENV = "headrace/RockPaperScissors-v0"
BATCH = 64 * 32
ENV_STEPS, SEEDS = 100 * BATCH, 3
FORMS = {
    "against itself": ("--league", "1", "--latest-ratio", "1"),
    "with a league of 8": ("--league", "8"),
}
FLAGS = (
    "--num-envs", "64", "--num-steps", "32", "--num-minibatches", "4", "--hidden-sizes", "16",
    "--lr", "1e-2", "--ent-coef", "0.1", *runs.ONE_PROCESS,
)  # fmt: skip
PAYOFF = np.array([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]])
"""Of a row's move against a column's: rock, paper, scissors."""


def add_flags(parser):
    """Those of this part."""
    runs.add_flags(parser, SEEDS)


def exploitability(probabilities):
    """What the best answer to such a player gets from it in the mean; 0 at equilibrium."""
    return float((PAYOFF @ probabilities).max())


def snapshots(run_dir):
    """The probabilities of each snapshot of a run, the oldest first: `[snapshots, 3]`."""
    found = sorted(
        (run_dir / "league").glob("step_*"), key=lambda path: int(path.name.partition("_")[2])
    )
    return np.array([probabilities_of(path) for path in found])


@torch.no_grad()
def probabilities_of(directory):
    """Those of the three moves, of a policy that observes nothing."""
    logits = load_policy(directory).module(torch.zeros(1, 1))[0]
    return torch.softmax(logits, -1)[0].double().numpy()


def figures(found):
    """What is looked at, of a run's snapshots `[snapshots, 3]`: those of its second half."""
    half = found[len(found) // 2 :]
    mean = half.mean(0)
    return {
        "mean": mean.tolist(),
        "exploitability_of_mean": exploitability(mean),
        "mean_exploitability": float(np.mean([exploitability(each) for each in half])),
        "snapshots": [[round(float(p), 4) for p in each] for each in found],
    }


def measure(job):
    """Train one run, and look at its snapshots."""
    form, seed, flags, folder = job
    name = f"{form}, seed {seed}".replace(", ", "-").replace(" ", "_")
    env_steps = max(2, round(ENV_STEPS * flags.share / BATCH)) * BATCH
    more = ["--seed", seed, "--total-env-steps", env_steps]
    trained = runs.train(folder, name, ENV, *FORMS[form], *FLAGS, *more)
    return trained | {"seed": seed} | figures(snapshots(folder / name))


def main(flags, parser):
    """Train all runs, and write what came out; the exit code."""
    folder = runs.fresh(NAME)
    result = runs.about(NAME, flags, env=ENV, forms={})
    jobs = [(form, seed, flags, folder) for form in FORMS for seed in range(flags.seeds)]
    measured = runs.side_by_side(measure, jobs)
    for (form, *_), found in zip(jobs, measured, strict=True):
        result["forms"].setdefault(form, []).append(found)
    runs.write(result, tables, flags)
    return 0


def tables(result):
    """A row for each way to learn: means over the seeds, and each seed."""

    def told(of, name):
        each = [seed[name] for seed in of]
        return f"{np.mean(each):.2f} ({', '.join(f'{one:.2f}' for one in each)})"

    lines = [
        "| learned | mean policies | exploitability of the mean policy "
        "| of single snapshots, mean |",
        "|---|---|---|---|",
    ]
    for form, of in result["forms"].items():
        means = "; ".join(" ".join(f"{p:.2f}" for p in seed["mean"]) for seed in of)
        lines.append(
            f"| {form} | {means} | {told(of, 'exploitability_of_mean')} "
            f"| {told(of, 'mean_exploitability')} |"
        )
    steps = next(iter(result["forms"].values()))[0]["env_steps"]
    lines += ["", f"Seeds: {result['seeds']}, of {steps:,} games each."]
    return "\n".join(lines)
