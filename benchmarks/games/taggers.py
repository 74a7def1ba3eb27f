"""Whether taggers that learned in a league catch runners that they have never met.

headrace/TagGridWorld-v0 with two taggers and a runner on 20 × 20 cells, games of at most 100
steps, all else as in its preset. The taggers have learned in three ways, with 3,000,000 env steps
each, and eight seeds, since two seeds once said the opposite of two others:

- against one runner, which had learned against random taggers (1,000,000 env steps) and is frozen;
- while the runner learned too, against its newest self (no league);
- while the runner learned too, with `--league 8`.

Then they play runners that none of them has met: four that learned against random taggers, and
four that learned against taggers which had themselves learned against one of those four; all with
other seeds. 100 games with each, actions as they are sampled. Caught is a game that ended before
its last step: then a tagger was on the runner's cell.

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
KWARGS = {"num_taggers": 2, "length": 19, "max_episode_steps": STEPS, "tag_penalty": 5.0}
"""`length` is the largest coordinate."""
RUNNER_STEPS, TAGGER_STEPS, EPISODES, SEEDS = 1_000_000, 3_000_000, 100, 8
LEAST_STEPS = 80_000  # two updates
FORMS = {
    "against one frozen runner": "frozen",
    "both learn, no league": "newest",
    "both learn, a league of 8": "league",
}
KINDS = {"random": "random taggers", "chased": "taggers that learned"}
"""Kinds of the pool's runners -> whom they learned against."""
PAIRS, FIRST_SEED = "abcd", 100
POOL = [f"{kind}_{pair}" for kind in KINDS for pair in PAIRS]
"""Runs whose runners the taggers meet."""
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
    second = [taggers(f"frozen_{seed}", seed, f"runner_{seed}") for seed in learners]
    third = []
    for seed, pair in enumerate(PAIRS, start=FIRST_SEED):
        first.append(runner(f"random_{pair}", seed, "random"))
        second.append(taggers(f"taggers_{pair}", seed, f"random_{pair}"))
        third.append(runner(f"chased_{pair}", seed, f"taggers_{pair}"))
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
    """A row for each way to learn: the share caught of each kind of runners, and of all."""
    heads = [f"runners against {against}" for against in KINDS.values()]
    lines = [
        f"| taggers learned | {' | '.join(heads)} | all | standard error | each seed "
        "| a tagger's return |",
        "|---" * (5 + len(KINDS)) + "|",
    ]
    for form, seeds in result["meetings"].items():
        cells = [f"{np.mean(caught(seeds, kind)):.1%}" for kind in KINDS]
        of = caught(seeds)
        error = np.std(of, ddof=1) / np.sqrt(len(of)) if len(of) > 1 else np.nan
        returns = [met["tagger_return"] for seed in seeds for met in seed.values()]
        cells += [f"{np.mean(of):.1%}", f"{error:.1%}", ", ".join(f"{each:.0%}" for each in of)]
        lines.append(f"| {form} | {' | '.join(cells)} | {np.mean(returns):.2f} |")
    lines += [
        "",
        f"Games in which the runner was caught, of {result['episodes']} with each of "
        f"{len(POOL)} runners; the standard error is over the seeds of the taggers.",
    ]
    return "\n".join(lines)


def caught(seeds, kind=""):
    """Shares of games in which runners of a kind, or all, were caught: one for each seed."""
    return [
        np.mean([met["caught"] for other, met in seed.items() if other.startswith(kind)])
        for seed in seeds
    ]
