"""Whether taggers that learned in a league catch runners that they have never met.

headrace/TagGridWorld-v0 with three taggers and a runner on 20 × 20 cells, games of at most 100
steps, all else as in its preset. The taggers have learned in three ways, with 3,000,000 env steps
each, and two seeds:

- against one runner, which had learned against random taggers (1,000,000 env steps) and is frozen;
- while the runner learned too, against its newest self (no league);
- while the runner learned too, with `--league 8`.

Then they play runners that none of them has met: two that learned against random taggers, and two
that learned against taggers which had themselves learned against one of those two; all with other
seeds. 100 games each, actions as they are sampled. Caught is a game that ended before its last
step: then a tagger was on the runner's cell.

What differs: in a league half of the games have a side that is not learned from, so its taggers
learn from fewer rows.
"""

import numpy as np

from benchmarks.games import runs
from headrace.envs.factory import EnvMaker
from headrace.evaluation.evaluate import evaluate
from headrace.evaluation.trained_policies import load_policies

NAME = "games_taggers"
ENV, STEPS = "headrace/TagGridWorld-v0", 100
KWARGS = {"num_taggers": 3, "length": 19, "max_episode_steps": STEPS, "tag_penalty": 5.0}
"""`length` is the largest coordinate."""
RUNNER_STEPS, TAGGER_STEPS, EPISODES, SEEDS = 1_000_000, 3_000_000, 100, 2
LEAST_STEPS = 80_000  # two updates
FORMS = {
    "against one frozen runner": "frozen",
    "both learn, no league": "newest",
    "both learn, a league of 8": "league",
}
POOL = {
    "random_a": "runner, against random taggers (a)",
    "random_b": "runner, against random taggers (b)",
    "chased_a": "runner, against taggers that learned against (a)",
    "chased_b": "runner, against taggers that learned against (b)",
}
"""Runs whose runners the taggers meet -> what they are."""
FLAGS = (*runs.ONE_PROCESS, "--learner-threads", "1")


def add_flags(parser):
    """Those of this part."""
    runs.add_flags(parser, SEEDS)


def plan(seeds):
    """All runs in groups, of which each needs those before it.

    Returns:
        Groups of (name, seed, env steps, flags); a frozen policy's run is named by its folder.
    """

    def runner(name, seed, taggers):
        return name, seed, RUNNER_STEPS, ("--frozen", f"tagger={taggers}")

    def taggers(name, seed, runner):
        return name, seed, TAGGER_STEPS, ("--frozen", f"runner={runner}")

    learners = range(seeds)
    first = [runner(f"runner_{seed}", seed, "random") for seed in learners]
    first += [(f"newest_{seed}", seed, TAGGER_STEPS, ()) for seed in learners]
    first += [(f"league_{seed}", seed, TAGGER_STEPS, ("--league", "8")) for seed in learners]
    first += [runner("random_a", 100, "random"), runner("random_b", 101, "random")]
    second = [taggers(f"frozen_{seed}", seed, f"runner_{seed}") for seed in learners]
    second += [taggers("taggers_a", 102, "random_a"), taggers("taggers_b", 103, "random_b")]
    third = [runner("chased_a", 104, "taggers_a"), runner("chased_b", 105, "taggers_b")]
    return first, second, third


def train(folder, share, run):
    """One of the runs."""
    name, seed, env_steps, flags = run
    steps = max(LEAST_STEPS, round(env_steps * share))
    kwargs = ["--env-kwargs", *(f"{key}={value}" for key, value in KWARGS.items())]
    sizes = ["--seed", seed, "--total-env-steps", steps, *FLAGS]
    return name, runs.train(folder, name, ENV, *flags, *sizes, *kwargs)


def meet(taggers, runner, episodes):
    """The taggers of one run play the runner of another: the share caught, and mean returns."""
    of_taggers, shares = load_policies(taggers)
    of_runner, _ = load_policies(runner)
    played = evaluate(
        {"tagger": of_taggers["tagger"], "runner": of_runner["runner"]},
        EnvMaker(ENV, KWARGS, native=True),
        shares={name: shares[name] for name in ("tagger", "runner")},
        episodes=episodes,
        stochastic=True,
    )
    return {
        "caught": float(np.mean(np.array(played.lengths) < STEPS)),
        "tagger_return": float(np.mean(played.by_policy["tagger"])),
        "runner_return": float(np.mean(played.by_policy["runner"])),
        "mean_length": float(np.mean(played.lengths)),
    }


def main(flags, parser):
    """Train all runs, let them play, and write what came out; the exit code."""
    folder, trained = runs.fresh(NAME), {}
    result = runs.about(NAME, flags, env=ENV, env_kwargs=KWARGS)
    for group in plan(flags.seeds):
        trained |= dict(runs.side_by_side(lambda run: train(folder, flags.share, run), group))
    episodes = max(1, round(EPISODES * flags.share))
    result |= {"episodes": episodes, "runs": trained, "meetings": {}}
    for form, prefix in FORMS.items():
        result["meetings"][form] = [
            {other: meet(folder / f"{prefix}_{seed}", folder / other, episodes) for other in POOL}
            for seed in range(flags.seeds)
        ]
    runs.write(result, tables, flags)
    return 0


def tables(result):
    """A row for each way to learn: the share caught of each runner, and means over the pool."""
    lines = [
        f"| taggers learned | {' | '.join(POOL.values())} | all four, each seed "
        "| a tagger's return |",
        "|---" * (3 + len(POOL)) + "|",
    ]
    for form, seeds in result["meetings"].items():
        cells = [f"{np.mean([seed[other]['caught'] for seed in seeds]):.0%}" for other in POOL]
        of = [np.mean([seed[other]["caught"] for other in POOL]) for seed in seeds]
        returns = [seed[other]["tagger_return"] for seed in seeds for other in POOL]
        cells.append(f"{np.mean(of):.0%} ({', '.join(f'{each:.0%}' for each in of)})")
        lines.append(f"| {form} | {' | '.join(cells)} | {np.mean(returns):.2f} |")
    lines += ["", f"Games in which the runner was caught, of {result['episodes']} of each pair."]
    return "\n".join(lines)
