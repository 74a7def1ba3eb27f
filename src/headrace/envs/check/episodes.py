"""What is checked of a kernel environment's episodes: chance, and ends.

Left out: how it is played, and what else is checked as it is (`kernel_checks.py`).
"""

import numpy as np

from headrace.envs.check.compare import differences, outcomes
from headrace.envs.check.kernel_checks import Case
from headrace.envs.check.plays import Play, Played, play
from headrace.envs.check.report import Check
from headrace.envs.kernels.compiler import Target
from headrace.spec import Array

NAMES = {"python": "interpreted", "cpu": "on the CPU"}
_NUM_CUT = 16
"""Episodes that are cut off on purpose."""
_DRAW = (
    "Draw random numbers with uniform(w, e, draw), and keep all else in the state: no generators, "
    "nothing global."
)


def check_randomness(case: Case) -> Check:
    """Whether an episode depends on seed, environment and index, and on nothing else."""
    wrong = []
    n, num_steps = min(2, case.num_envs), min(10, case.num_watched)
    plays: list[tuple[Target, int, int]] = [("python", n, num_steps)]
    if case.on_cpu is not None:
        plays.append(("cpu", min(8, case.num_envs), min(64, len(case.action))))
    for target, envs, steps in plays:
        one, other = (outcomes(play(case.first(envs, steps), target)) for _ in range(2))
        if found := differences(one, other):
            told = found[0].text(case.env, "the first time", "the second")
            wrong.append(f"the same seed gives other episodes ({NAMES[target]}): {told}")
    done = f"the same seed twice ({' and '.join(NAMES[of] for of, *_ in plays)})"
    if wrong or case.on_cpu is None:
        return Check("randomness", done, wrong=tuple(wrong), remedies=(_DRAW,) if wrong else ())
    wrong, notes = _variety(case, envs, steps)
    done += f"; other seeds, environments and episodes; env {envs - 1} of {envs}, and alone"
    return Check("randomness", done, wrong=tuple(wrong), warnings=tuple(notes))


def _variety(case: Case, n: int, num_steps: int) -> tuple[list[str], list[str]]:
    """Other seeds, environments and episodes are others; an environment is the same alone."""
    agents = case.env.num_agents
    same = np.tile(case.action[:num_steps, :agents], (1, n) + (1,) * (case.action.ndim - 2))
    what = Play(case.env, np.arange(n), same, case.seed)
    one = outcomes(play(what, "cpu"))
    others = {
        "seeds": what._replace(seed=case.seed + 1),
        "environments": what._replace(env_id=np.zeros(n, np.int64)),
        "episodes": what._replace(first_episode=1_000),
    }
    alike = [name for name, of in others.items() if not differences(one, outcomes(play(of, "cpu")))]
    wrong, notes = [], []
    if len(alike) == len(others):
        notes.append("other seeds, environments and episodes are all alike: nothing is random.")
    elif alike:
        wrong.append(f"other {' and '.join(alike)} are alike. Draw with uniform(w, e, draw).")
    last = n - 1
    alone = what._replace(env_id=np.array([last]), action=same[:, :agents])
    in_vector = {name: of[:, last:] for name, of in one.items()}
    if found := differences(in_vector, outcomes(play(alone, "cpu"))):
        first = found[0]._replace(env=last)
        told = first.text(case.env, f"as the last of {n}", "alone")
        wrong.append(f"environment {last} depends on others: {told}\nTouch only the row e.")
    return wrong, notes


def check_ends(case: Case) -> Check:
    """Episodes end in time, begin again in the same step, and who has left stays out."""
    played = case.on_cpu
    assert played is not None
    ended = played.length > 0
    step, episode = played.state["episode_step"], played.state["episode"]
    wrong = _limit(case, played)
    notes: list[str] = []
    begun = (step[1:] == 0) & (episode[1:] == episode[:-1] + 1)
    goes_on = (step[1:] == step[:-1] + 1) & (episode[1:] == episode[:-1])
    if not np.where(ended, begun, goes_on).all():
        t, e = np.argwhere(~np.where(ended, begun, goes_on))[0]
        wrong.append(
            f"after step {t + 1} of env {e}, w.step is {step[t + 1, e]} and w.episode "
            f"{episode[t + 1, e]}.\nThe program counts these itself: only read them."
        )
    if case.env.agents:
        _leaving(case, played, wrong, notes)
    done = f"{int(ended.sum())} ends, {_NUM_CUT} more at the time limit"
    if not case.env.max_episode_steps:
        done = f"{int(ended.sum())} ends, no time limit"
    return Check("ends", done, wrong=tuple(wrong), warnings=tuple(notes))


def _limit(case: Case, played: Played) -> list[str]:
    """Whether an episode is truncated after exactly so many steps, unless it terminates."""
    limit = case.env.max_episode_steps
    if not limit:
        return []
    what = case.one_step(np.resize(np.argwhere(played.length == 0), (_NUM_CUT, 2)))
    start = what.start
    start["episode_step"] = np.where(np.arange(_NUM_CUT) % 2, limit - 1, max(limit - 2, 0))
    found = play(what, "cpu")
    cut = found.rows["truncated"].reshape(_NUM_CUT, -1).any(-1)
    ended, due = found.length[0] > 0, start["episode_step"] == limit - 1
    wrong = [
        f"episodes of {length} steps were met, and max_episode_steps is {limit}."
        for length in np.unique(played.length[played.length > limit])
    ]
    early = played.rows["truncated"].reshape(*played.length.shape, -1).any(-1)
    if (early & (played.length != limit)).any() or (cut & ~due).any():
        wrong.append(f"an episode is truncated before step {limit}.")
    if (due & ~ended).any():
        wrong.append(f"an episode goes on after step {limit}.")
    return wrong


def _leaving(case: Case, played: Played, wrong: list[str], notes: list[str]) -> None:
    """Who has left the game stays out of it until the next episode."""
    valid, reward = played.rows["valid"], played.rows["reward"]
    ended = played.length > 0

    def first(where: Array) -> str:
        t, e, *agent = np.argwhere(where)[0].tolist()
        return f"step {t + 1}, env {e}" + "".join(f", agent {i}" for i in agent)

    back = np.zeros_like(valid)
    back[1:] = valid[1:] & ~valid[:-1] & ~ended[:-1, :, None]
    if back.any():
        wrong.append(
            f"an agent is back before its episode is over ({first(back)}): w.alive is set again.\n"
            "Only clear it, in phases."
        )
    if (paid := ~valid & (reward != 0)).any():
        notes.append(
            f"an agent that has left is rewarded ({first(paid)}: {reward[paid][0]}): its return "
            "has that, and nothing learns from it."
        )
    if (idle := ~valid.any(-1) & ~ended).any():
        notes.append(
            f"all agents have left, and the episode goes on ({first(idle)}).\nSet w.terminated[e] "
            "where the last one leaves."
        )
