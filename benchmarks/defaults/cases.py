"""What is trained: the cases of each part, and what they are held to.

To judge another default, edit `ABLATION`; to judge other environments, `ENVS`. Left out: running
(`runs.py`), and judging (`page.py`).
"""

import re
from dataclasses import dataclass

from benchmarks import own_envs

OWN = tuple(f"benchmarks.own_envs:{kind.__name__}" for kind in own_envs.ALL)
ENVS = (
    "Hopper-v5",
    "Walker2d-v5",
    "BipedalWalker-v3",
    "LunarLander-v3",
    "LunarLanderContinuous-v3",
    "Acrobot-v1",
    "MiniGrid-Empty-8x8-v0",
    *OWN[:2],
)
SLOW = OWN[2:4]
"""Environments with images: at most `SLOW_STEPS` env steps."""
SLOW_STEPS = 200_000

SIZES = (("--num-envs", "1"), ("--num-envs", "64"), ("--core", "lstm"))
SIZES_ENVS = ("Hopper-v5", "LunarLander-v3")
APPO_ENVS = ("Hopper-v5", "LunarLander-v3", "CartPole-v1")
A2C_ENVS = ("CartPole-v1", "LunarLander-v3")
DQN_ENVS = ("Acrobot-v1", "LunarLander-v3", OWN[1], OWN[4])
CRITICS_ENVS = ("Hopper-v5", "BipedalWalker-v3")
CRITICS = ("sac", "td3")
REPLAY_STEPS = 100_000
"""Env steps of a run of DQN, SAC or TD3."""
TWO_WORKERS = ("--num-workers", "2")
ABLATION = {
    "initial log std 0": ("--initial-log-std", "0"),
    "minibatches of 256 rows": ("--minibatch-size", "256"),
    "observations as they are": ("--no-normalize-obs",),
    "rewards as they are": ("--no-normalize-reward",),
    "4 epochs": ("--num-epochs", "4"),
    "no entropy bonus": ("--ent-coef", "0"),
    "Adam's epsilon 1e-5": ("--adam-eps", "1e-5"),
}
"""Each default, and the flags that switch it off."""
ABLATION_ENVS = ("Hopper-v5", "BipedalWalker-v3", "LunarLander-v3", "Acrobot-v1")
ABLATION_ONLY = {
    "initial log std 0": ABLATION_ENVS[:2],
    "no entropy bonus": ABLATION_ENVS[2:],
    "Adam's epsilon 1e-5": ABLATION_ENVS[2:],
}
"""What only continuous, or only discrete, actions have, and where it is tried."""


@dataclass(frozen=True)
class Case:
    """One trainer on one environment, for all its seeds.

    Attributes:
        who: `headrace` or `sb3`.
    """

    env: str
    who: str = "headrace"
    algo: str = "ppo"
    flags: tuple[str, ...] = ()

    @property
    def name(self):
        return " ".join((short(self.env), self.who, self.algo, *self.flags))

    def env_steps(self, wanted):
        if self.algo in ("dqn", *CRITICS):
            return min(wanted, REPLAY_STEPS)
        return min(wanted, SLOW_STEPS) if self.env in SLOW else wanted

    def file_name(self, wanted):
        """Of its results: runs of other lengths have files of their own."""
        words = re.sub(r"[^\w.]+", "-", self.name)
        return f"{words}-{self.env_steps(wanted)}.json"


def short(env):
    """An environment's name in tables: without its module."""
    return env.rpartition(":")[2]


def ablation(what):
    """The cases of one default that is switched off; without the flags that mean nothing there."""
    envs = ABLATION_ONLY.get(what, ABLATION_ENVS)
    return {env: Case(env, flags=ABLATION[what]) for env in envs}


PARTS = {
    "ppo": [Case(env, who) for env in ENVS for who in ("headrace", "sb3")],
    "sizes": [Case(env, flags=flags) for env in SIZES_ENVS for flags in SIZES],
    "appo": [
        case
        for env in APPO_ENVS
        for case in (Case(env), Case(env, "headrace", "appo", TWO_WORKERS))
    ],
    "a2c": [
        case
        for env in A2C_ENVS
        for case in (
            Case(env, "headrace", "a2c"),
            Case(env, "headrace", "impala", TWO_WORKERS),
            Case(env, "sb3", "a2c"),
        )
    ],
    "dqn": [Case(env, who, "dqn") for env in DQN_ENVS for who in ("headrace", "sb3")],
    "critics": [
        Case(env, who, algo)
        for env in CRITICS_ENVS
        for algo in CRITICS
        for who in ("headrace", "sb3")
    ],
    "ablation": [
        *(Case(env) for env in ABLATION_ENVS),
        *(case for what in ABLATION for case in ablation(what).values()),
    ],
    "own": [Case(env, who) for env in OWN for who in ("headrace", "sb3")],
}
SEEDS = {part: (1, 2, 3, 4, 5) if part == "appo" else (1, 2, 3) for part in PARTS}
