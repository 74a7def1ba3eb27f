"""Env steps per second of DQN: a small network at one and at half a gradient step per env step.

The same for all: `peers/replay_works.py`; one thread of math. All make blocks of gradient steps
between 32 steps of each of 8 environments, after the first of these. The rate is that from the end
of the first block to the end of the last; Headrace's begins one batch earlier, which has none.

Breakout has NatureCNN, minibatches of 32 and a quarter of a gradient step per env step.
"""

import sys

from benchmarks.harness import contestants, turns
from benchmarks.harness.one_turn import Work
from benchmarks.peers.replay_works import REPLAY_SETTINGS

ENV_STEPS = {"cartpole": 20_480, "cartpole_half": 30_720, "breakout": 4_096}
TITLES = {
    "cartpole": "DQN, CartPole-v1, one gradient step per env step",
    "cartpole_half": "DQN, CartPole-v1, half a gradient step per env step",
    "breakout": "DQN, Breakout, a quarter of a gradient step per env step",
}


def comparison(work):
    """Build the table of one work."""
    env_steps = ENV_STEPS[work]
    flags = REPLAY_SETTINGS[work].headrace_flags(env_steps)
    if breakout := work == "breakout":
        flags += ["--clip-reward", "1", "--env-kwargs", "use_fire_reset=False"]
    sizes = ["--work", work, "--env-steps", str(env_steps), "--threads", "1"]
    peers = [
        contestants.driver("plain DQN", "sb3", "plain_dqn", sizes),
        contestants.driver(
            "Stable-Baselines3", "sb3", "sb3_dqn", sizes, package="stable-baselines3"
        ),
        contestants.driver("Tianshou", "tianshou", "tianshou_dqn", sizes, package="tianshou"),
    ]
    return turns.Comparison(
        TITLES[work],
        [
            contestants.headrace("Headrace", flags),
            *(
                [contestants.headrace("Headrace, bf16", [*flags, "--precision", "bf16"])]
                if breakout
                else []
            ),
            *peers,
        ],
        Work(env_steps),
        also={"gradient steps": lambda result: result.get("learner_steps")},
        ratios={f"Headrace / {each.name}": ("Headrace", each.name) for each in peers},
    )


if __name__ == "__main__":
    sys.exit(turns.run("dqn", __doc__, [comparison(work) for work in TITLES], turns=5))
