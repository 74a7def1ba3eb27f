"""The page: its tables, and whether each row is as good as it has to be.

Left out: training (`runs.py`).
"""

import json
import math
import statistics
from dataclasses import dataclass

from benchmarks.defaults.cases import (
    A2C_ENVS,
    ABLATION,
    ABLATION_ENVS,
    APPO_ENVS,
    ENVS,
    OWN,
    PARTS,
    REPLAY_STEPS,
    SLOW,
    SLOW_STEPS,
    TWO_WORKERS,
    Case,
    ablation,
    short,
)
from benchmarks.own_envs import ALL
from benchmarks.own_players import PLAYERS, play
from benchmarks.presets.page import places
from benchmarks.presets.results import mean_and_error
from headrace.catalog.returns import format_return

INTRODUCTION = """\
# What the defaults learn

Made by `python -m benchmarks.defaults`; do not edit. Headrace without presets stands beside
Stable-Baselines3 with its defaults. Both get the environment, a seed and the env steps:
{env_steps:,}; {slow}: at most {slow_steps:,}; DQN, SAC and TD3: {replay_steps:,}. Headrace also
gets the flags or workers that a table names. Stable-Baselines3 sees MiniGrid by `FlatObsWrapper`.
Ferry, House, Orchard, Courier and Crane are in `benchmarks/own_envs.py`: nobody tuned anything for
them; *scripted* is a policy written by hand.

A figure is the return of the last 100 training episodes: mean of the seeds ± its standard error
(number of seeds). *Evaluated* is the final policy in 100 episodes, likeliest actions. *Passes*: our
mean is at least Stable-Baselines3's (often of one seed: a run of it takes long). APPO: its gain
over random actions is at least 85 % of PPO's, and that of its worst seed at least half. *Open*:
seeds of ours are missing. With one seed (1), a difference below the spread of others says nothing.
*s* are seconds of training; runs shared the machine, so that they are no benchmark."""


@dataclass(frozen=True)
class Figures:
    """What the seeds of a case returned.

    Attributes:
        returns: mean of the last 100 training episodes, of each seed.
        evaluated: mean of 100 episodes of the final policy, likeliest actions, of each seed.
        seconds: of training, the median.
    """

    returns: tuple[float, ...]
    evaluated: tuple[float, ...] = ()
    seconds: float = math.nan

    @property
    def mean(self):
        return statistics.mean(self.returns)

    def __str__(self):
        mean, error = mean_and_error(self.returns)
        spread = "" if error is None else f" ± {format_return(error)}"
        return f"{mean:,.4g}{spread} ({len(self.returns)})"

    @property
    def cells(self):
        return [str(self), f"{statistics.mean(self.evaluated):,.4g}", f"{self.seconds:,.0f}"]


def beats(ours, theirs, seeds=3):
    """Whether our mean is at least theirs: "yes", "**no**", or "open" if seeds of ours are missing.

    `ours` or `theirs` is None if there is no figure. One seed of theirs is enough: the page
    shows how many there are.
    """
    if ours is None or theirs is None or len(ours.returns) < seeds:
        return "open"
    return "yes" if ours.mean >= theirs.mean else "**no**"


def keeps_up(appo, ppo, random, seeds=5):
    """Shares of PPO's mean that APPO's mean and its worst seed reach, from random; and a verdict.

    At least 85 % and half are expected. "open" as with `beats`.
    """
    if None in (appo, ppo, random) or min(len(appo.returns), len(ppo.returns)) < seeds:
        return ["-", "-", "open"]
    gain = ppo.mean - random
    if gain <= 0:
        return ["-", "-", "**no**: PPO is no better than random"]
    mean, worst = (appo.mean - random) / gain, (min(appo.returns) - random) / gain
    return [f"{mean:.0%}", f"{worst:.0%}", "yes" if mean >= 0.85 and worst >= 0.5 else "**no**"]


def table(title, head, rows):
    return [
        "",
        f"## {title}",
        "",
        *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)),
    ]


def render(results, env_steps):
    """The page, of the results in that folder."""

    def figures(case):
        path = results / case.file_name(env_steps)
        runs = list(json.loads(path.read_text())["runs"].values()) if path.exists() else []
        # An agent that ended no episode has no return.
        runs = [run for run in runs if run["mean_return"] is not None]
        if not runs:
            return None
        columns = ([run[key] for run in runs] for key in ("mean_return", "eval_return", "seconds"))
        returns, evaluated, seconds = columns
        return Figures(tuple(returns), tuple(evaluated), statistics.median(seconds))

    def cells(case):
        found = figures(case)
        return found.cells if found else ["-"] * 3

    path = results / "random.json"
    known = json.loads(path.read_text()) if path.exists() else {}

    def random(env):
        return f"{known[env]:,.3g}" if env in known else "-"

    def judged(case, peer):
        """Cells of ours and theirs, and whether ours are as good."""
        return [*cells(case), *cells(peer), beats(figures(case), figures(peer))]

    three = ["Headrace", "evaluated", "s", "Stable-Baselines3", "evaluated", "s"]
    slow = " and ".join(map(short, SLOW))
    text = INTRODUCTION.format(
        env_steps=env_steps, slow=slow, slow_steps=SLOW_STEPS, replay_steps=REPLAY_STEPS
    )
    lines = text.splitlines()
    # Those of our own have a table below, with a scripted player.
    known_envs = [env for env in ENVS if env not in OWN]
    rows = [[short(env), random(env), *judged(Case(env), Case(env, "sb3"))] for env in known_envs]
    head = ["environment", "random", *three, "passes"]
    lines += table("PPO", head, rows)
    rows = [
        [short(case.env), f"`{' '.join(case.flags)}`", *judged(case, Case(case.env, "sb3"))]
        for case in PARTS["sizes"]
    ]
    lines += table("Other sizes", ["environment", "flags", *three, "passes"], rows)
    rows = []
    for env in APPO_ENVS:
        ppo, appo = Case(env), Case(env, "headrace", "appo", TWO_WORKERS)
        shares = keeps_up(figures(appo), figures(ppo), known.get(env))
        rows.append([short(env), random(env), *cells(ppo), *cells(appo), *shares])
    head = ["environment", "random", "PPO", "evaluated", "s", "APPO", "evaluated", "s"]
    lines += table("APPO, two workers", [*head, "of PPO's", "worst seed", "passes"], rows)
    rows = []
    for env in A2C_ENVS:
        peer = Case(env, "sb3", "a2c")
        for case in (Case(env, "headrace", "a2c"), Case(env, "headrace", "impala", TWO_WORKERS)):
            rows.append([short(env), case.algo, *judged(case, peer)])
    head = ["environment", "algorithm", *three[:3], "Stable-Baselines3's A2C", *three[4:], "passes"]
    lines += table("A2C and IMPALA", head, rows)
    rows = [
        [short(ours.env), ours.algo, random(ours.env), *judged(ours, theirs)]
        for part in (PARTS["dqn"], PARTS["critics"])
        for ours, theirs in zip(part[::2], part[1::2], strict=True)
    ]
    head = ["environment", "algorithm", "random", *three, "passes"]
    lines += table("DQN, SAC and TD3", head, rows)
    changed = {"none": {env: Case(env) for env in ABLATION_ENVS}} | {
        w: ablation(w) for w in ABLATION
    }
    rows = [
        [what, *(str((env in of and figures(of[env])) or "-") for env in ABLATION_ENVS)]
        for what, of in changed.items()
    ]
    head = ["switched off", *map(short, ABLATION_ENVS)]
    lines += table("What each default brings", head, rows)
    rows = []
    for env, kind in zip(OWN, ALL, strict=True):
        best = statistics.mean(play(kind(), PLAYERS[kind], 100)[0])
        row = judged(Case(env), Case(env, "sb3"))
        rows.append([short(env), random(env), f"{best:,.3g}", *row])
    head = ["environment", "random", "scripted", *three, "passes"]
    lines += table("Environments of one's own", head, rows)
    return "\n".join([*lines, "", f"Measured: {measured(results, env_steps)}."]) + "\n"


def measured(results, env_steps):
    """The machines and commits of all runs, with the number of each."""
    cases = dict.fromkeys(case for part in PARTS.values() for case in part)
    paths = [results / case.file_name(env_steps) for case in cases]
    found = [json.loads(path.read_text())["runs"] for path in paths if path.exists()]
    return places([run["machine"] for runs in found for run in runs.values()])
