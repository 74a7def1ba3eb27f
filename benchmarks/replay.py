"""What a full replay buffer takes: memory, and seconds and MiB of its checkpoints.

CartPole-v1 with a million env steps, Breakout with 200,000. A million steps of Breakout take five
times as much as 200,000: each row has its own place. Stable-Baselines3's buffer has its own
settings, in which each observation is stored twice. It saves its buffer only when asked, by another
call.
"""

import sys

from benchmarks.harness import contestants, turns
from benchmarks.harness.one_turn import Work

ENV_STEPS = {"CartPole-v1": 1_000_000, "ALE/Breakout-v5": 200_000}
ALSO = {
    "s to save all": "save_s",
    "MiB on disk": "saved_mib",
    "s to restore": "restore_s",
    "s to save a twentieth more": "save_more_s",
    "MiB more on disk": "more_mib",
}


def title(env):
    """The name of the table of an environment."""
    return f"Replay of {env}, {ENV_STEPS[env]:,} env steps"


def comparison(env):
    """Build the table of one environment."""
    arguments = [env, "--env-steps", str(ENV_STEPS[env])]
    sb3 = contestants.driver(
        "Stable-Baselines3", "sb3", "sb3_replay", arguments, package="stable-baselines3"
    )
    return turns.Comparison(
        title(env),
        [contestants.headrace_driver("Headrace", "replay_cost", arguments), sb3],
        Work(ENV_STEPS[env], "buffer_mib", "MiB", lower_is_better=True, limit_s=1_200),
        also={words: lambda result, name=name: result.get(name) for words, name in ALSO.items()},
        ratios={"Headrace / Stable-Baselines3": ("Headrace", sb3.name)},
    )


if __name__ == "__main__":
    sys.exit(turns.run("replay", __doc__, [comparison(env) for env in ENV_STEPS], turns=1))
