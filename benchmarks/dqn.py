"""Env steps per second of DQN: a small network at one and at half a gradient step per env step.

The same for all: `peers/replay_works.py`; one thread of math, two for Breakout. Headrace chooses
its processes itself. Each contestant alternates 32 steps of each of 8 environments with the
gradient steps that are due. Rates go from the end of the first block of gradient steps to that of
the last; Headrace's begins one batch earlier, and so has the first block as well.

Breakout has NatureCNN, minibatches of 32 and a quarter of a gradient step per env step. bf16 is
another precision, not the same arithmetic, and has a limit of its own (`limits.py`).
"""

import sys

from benchmarks.harness import contestants, turns
from benchmarks.harness.one_turn import Work
from benchmarks.limits import replay_limit
from benchmarks.peers.replay_works import REPLAY_SETTINGS

ENV_STEPS = {"cartpole": 10_240, "cartpole_half": 20_480, "breakout": 4_096}
TITLES = {
    "cartpole": "DQN, CartPole-v1, one gradient step per env step",
    "cartpole_half": "DQN, CartPole-v1, half a gradient step per env step",
    "breakout": "DQN, Breakout, a quarter of a gradient step per env step",
}
LIMIT, LIMIT_BF16 = "limit of this machine, fp32", "limit of this machine, bf16"


def replay_share(result):
    """Percent of Headrace's time after its start; None for the others."""
    if (meter := result.get("meter")) is None:
        return None
    return 100 * meter["replay"] / (sum(meter.values()) - meter["start"])


def comparison(work):
    """Build the table of one work."""
    env_steps = ENV_STEPS[work]
    flags = REPLAY_SETTINGS[work].headrace_flags(env_steps)
    threads = 2 if work == "breakout" else 1
    sizes = ["--work", work, "--env-steps", str(env_steps), "--threads", str(threads)]
    peers = [
        contestants.driver("plain DQN", "sb3", "plain_dqn", sizes, threads),
        contestants.driver(
            "Stable-Baselines3", "sb3", "sb3_dqn", sizes, threads, "stable-baselines3"
        ),
        contestants.driver("Tianshou", "tianshou", "tianshou_dqn", sizes, threads, "tianshou"),
    ]
    if work == "breakout":
        flags += ["--clip-reward", "1", "--env-kwargs", "use_fire_reset=False"]
        flags += ["--learner-threads", str(threads)]
        bf16 = contestants.headrace(
            "Headrace, bf16", [*flags, "--precision", "bf16"], threads, compared_with=LIMIT_BF16
        )
        ours = [contestants.headrace("Headrace", flags, threads), bf16]
        limits = [replay_limit(work, "fp32", LIMIT), replay_limit(work, "bf16", LIMIT_BF16)]
    else:
        ours, limits = [contestants.headrace("Headrace", flags)], []
    return turns.Comparison(
        TITLES[work],
        [*ours, *peers, *limits],
        Work(env_steps),
        also={
            "gradient steps": lambda result: result.get("learner_steps"),
            "% of the time storing and drawing": replay_share,
        },
        ratios={f"Headrace / {each.name}": ("Headrace", each.name) for each in peers},
    )


if __name__ == "__main__":
    sys.exit(turns.run("dqn", __doc__, [comparison(work) for work in TITLES], turns=5))
