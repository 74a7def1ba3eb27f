"""What a league costs: agent steps per second of training with one, beside training without.

headrace/TagContinuous-v0 with the settings of `tag.py`, with `--league 8` and without, on one
learner and on two. A run takes 40 snapshots, so 8 are in play for four fifths of it.

"agent steps/s" are env steps/s × 110 agents: the rows that members play count as well, since the
world steps them and a network acts in them, though nothing is learned from them. "learned from" is
the share of these rows that is learned from: without a league those of agents that were tagged are
missing, with one those of members too.
"""

from benchmarks.games.speed import LIMIT_S, whole
from benchmarks.harness import contestants, turns
from benchmarks.harness.machine import cores
from benchmarks.harness.one_turn import Work
from benchmarks.tag import GAMES

NAME = "games_league"
TURNS = 5
ENV_STEPS = 40_000
LEAGUE = ("--league", "8")
TAG = GAMES[1]
AGENTS = TAG.kwargs["num_taggers"] + TAG.kwargs["num_runners"]


def agent_steps(result):
    """Per second, of all agents: those that members play, and those that were tagged, too."""
    return result["env_steps_per_s"] * AGENTS


def learned_from(result):
    """The share of all agents' steps."""
    return result["agent_steps"] / (result["env_steps"] * AGENTS)


def comparisons(share=1.0):
    """The table."""
    env_steps = whole(ENV_STEPS, share, 1000)
    flags = [TAG.env, *TAG.flags, "--device", "cpu", "--learner-threads", "1"]
    flags += ["--total-env-steps", str(env_steps), "--num-workers", "0"]
    kwargs = ["--env-kwargs", *(f"{key}={value}" for key, value in TAG.kwargs.items())]
    found, ratios = [], {}
    for learners in dict.fromkeys((1, cores())):
        name = f"{learners} learner{'s' if learners > 1 else ''}"
        sizes = ["--num-learners", str(learners)]
        pair = f"{name}, without a league", f"{name}, a league of 8"
        found += [
            contestants.headrace(pair[0], [*flags, *sizes, *kwargs]),
            contestants.headrace(pair[1], [*flags, *sizes, *LEAGUE, *kwargs]),
        ]
        ratios[f"with a league / without, {name}"] = pair[::-1]
    return [
        turns.Comparison(
            "PPO training, headrace/TagContinuous-v0, 110 agents",
            found,
            Work(env_steps, limit_s=LIMIT_S),
            also={"agent steps/s": agent_steps, "learned from": learned_from},
            ratios=ratios,
        )
    ]


def add_flags(parser):
    """Those of this part."""
    turns.add_flags(parser, NAME, TURNS)


def main(flags, parser):
    """Measure, and print the table; the exit code."""
    return turns.measure(NAME, comparisons(flags.share), TURNS, flags, parser)
