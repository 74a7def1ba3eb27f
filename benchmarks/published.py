"""Seconds until an evaluation is as high as the published return: presets, and the zoo's settings.

From the start of the process until the policy's mean return over 10 episodes, with its likeliest
actions, is what RL Baselines3 Zoo published for its final policy (`headrace list` shows it). Both
evaluate every 25,000 env steps of training, within their time. Headrace has its preset;
Stable-Baselines3 has the settings of the zoo (`peers/sb3_solve.py`), with which that return was
published. A trainer that has not reached it in the env steps of its settings says so in place of a
figure.
"""

import sys

from benchmarks.harness import contestants, turns
from benchmarks.harness.one_turn import Work
from headrace.catalog.returns import published

ENVS = ("LunarLander-v3", "Hopper-v5", "HalfCheetah-v5")
EVALUATE_EVERY = "25000"
LIMIT_S = 3600


def until(env):
    """The comparison on one environment."""
    wanted = published(env)["ppo"].mean_return
    flags = [env, "--mean-return", f"{wanted}", "--evaluate-every", EVALUATE_EVERY]
    flags += ["--seed", contestants.TURN]
    return turns.Comparison(
        f"{env} until {wanted:,.0f}",
        [
            contestants.headrace_driver("Headrace, its preset", "solve_evaluated", flags),
            contestants.driver(
                "Stable-Baselines3, the zoo's settings", "sb3", "sb3_solve", flags,
                package="stable-baselines3",
            ),
        ],
        Work(None, "turn_s", "s", lower_is_better=True, least_return=wanted, limit_s=LIMIT_S),
        also={"env steps": lambda result: result["env_steps"]},
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(turns.run("published", __doc__, [until(env) for env in ENVS], turns=1))
