"""What is checked of a kernel environment as it is played, interpreted and on the CPU.

One function for each line of the report. Left out: in which order, and what follows from it
(`checker.py`); chance and ends (`episodes.py`); what must be the same whatever runs it
(`equivalence.py`).
"""

import itertools
import warnings
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from headrace.envs.api import VectorContext
from headrace.envs.check.access_trace import Kind, Watch, failure, line_of, lines_with, watched
from headrace.envs.check.declarations import problems
from headrace.envs.check.plays import (
    Play,
    Played,
    differences,
    outcomes,
    play,
    random_actions,
    spec_of,
)
from headrace.envs.check.report import Check
from headrace.envs.kernels import compiler
from headrace.envs.kernels.compiler import Target
from headrace.envs.kernels.env import KernelEnv
from headrace.envs.kernels.vector import KernelVector
from headrace.spec import ActionCodec, Array, EnvSpec

_NUMBERS = 60_000_000
"""So many may be kept of a play: 240 MB, and a few times that while they are compared."""
_WATCHED = 2
"""Environments that are interpreted, and watched."""
_REMEDIES: dict[Kind, str] = {
    "out": "Write all of `out`, in every call, and read the world.",
    "rows": "Touch only the row e.",
    "own": "Only read w.step, w.episode, w.env_id and constants.",
}
_NUMBER = (
    "Number the draws of a step 0, 1, 2, ... over all functions and agents: uniform(w, e, 2 * i). "
    "Unless the same number is what you want."
)
_WRITE = (
    "Write it in a reset, or before it is read. What is to differ from one episode to the next can "
    "depend on w.episode[e]."
)
_SPLIT = (
    "On a GPU the agents of one phase run at the same time. Split it: what one reads is to be "
    "written in an earlier phase, or by a function of (w, e)."
)
_NARROW = "Write constants as np.float32(9.8), and turn whole numbers into np.float32(w.step[e])."
_NUMBERS_ONLY = (
    "Functions are compiled for a GPU as well: numbers, one number of an array at a time, `math`, "
    "and functions like that; no lists, texts, or arrays of their own."
)


@dataclass
class Case:
    """An environment that is being checked, and what was seen of it so far.

    Attributes:
        env: the environment; `spec`: what it offers.
        action: `[T, n * agents, ...]`: what all plays are of, or the beginning of it.
        seed: of the run.
        watch, watched: what the interpreted play was, of the first environments and steps.
        on_cpu: the compiled play; `places`: `[states, 2]`, t and env of states of it; `expected`: a
            step from each, interpreted.
    """

    env: KernelEnv
    spec: EnvSpec
    action: Array
    seed: int
    watch: Watch
    watched: Played | None = None
    on_cpu: Played | None = None
    places: Array = field(default_factory=lambda: np.empty((0, 2), np.int64))
    expected: Played | None = None

    @property
    def num_envs(self) -> int:
        """Of the compiled play."""
        return int(self.action.shape[1]) // self.env.num_agents

    @property
    def is_whole(self) -> bool:
        """Whether the state is of whole numbers: then nothing is rounded from step to step."""
        fields = [*self.env.state.values(), *self.env.agent_state.values()]
        kinds = [np.dtype(of[0] if isinstance(of, tuple) else of).kind for of in fields]
        return "f" not in kinds and self.spec.action.kind != "box"

    @property
    def num_watched(self) -> int:
        """Steps of the interpreted play."""
        per_agent = 2_000 // (_WATCHED * self.env.num_agents)
        return min(len(self.action), max(6, min(per_agent, 200)))

    def one_step(self, places: Array) -> Play:
        """One step from each state of the compiled play that is named: `[states, 2]`, t and env."""
        assert self.on_cpu is not None
        t, e = places.T
        rest = self.action.shape[2:]
        action = self.action.reshape(len(self.action), self.num_envs, -1, *rest)[t, e]
        start = self.on_cpu.at(t, e)
        return Play(self.env, e, action.reshape(1, -1, *rest), self.seed, start)

    def first(self, n: int, num_steps: int) -> Play:
        """The first `n` environments, over the first steps."""
        action = self.action[:num_steps, : n * self.env.num_agents]
        return Play(self.env, np.arange(n), action, self.seed)


def case(env: KernelEnv, num_steps: int, seed: int) -> Case:
    """Choose how much to play: over whole episodes, if the time limit allows.

    Args:
        env: an environment whose class is right.
        num_steps: steps of each environment; 0: twice the time limit, or 2,000.
        seed: of the plays.
    """
    spec = spec_of(env)
    fields = [*env.state.values(), *([*env.agent_state.values()] * env.num_agents)]
    numbers = sum(int(np.prod(of[1])) if isinstance(of, tuple) else 1 for of in fields)
    numbers += env.num_agents * (spec.observation.size + 25)
    wanted = num_steps or (max(200, 2 * env.max_episode_steps) if env.max_episode_steps else 2_000)
    n = max(2, min(_NUMBERS // (wanted * numbers), 32))
    steps = num_steps or max(1, min(wanted, _NUMBERS // (n * numbers)))
    action = random_actions(spec, (steps, n * env.num_agents), seed)
    return Case(env, spec, action, seed, Watch(env))


def check_class(env: KernelEnv) -> Check:
    """What the class declares."""
    functions = len({*env.resets, *env.phases})
    fields = len(env.state) + len(env.agent_state) + len(env.constants)
    return Check("class", f"{functions} functions, {fields} fields", tuple(problems(env)))


def check_python(case: Case) -> Check:
    """Interpreted, as the functions are written, and watched: what a compiler does not tell."""
    n, num_steps = min(_WATCHED, case.num_envs), case.num_watched
    check, case.watched = _interpreted(case, case.first(n, num_steps))
    done = f"{n} environments interpreted over {num_steps} steps"
    wrong = check.wrong
    if case.watched is not None:
        done += f", {_episodes(case.watched)}"
        wrong += _picture(case)
    return replace(check, name="python", done=done, wrong=wrong)


def _picture(case: Case) -> tuple[str, ...]:
    """What is wrong with the picture of a first state, if the environment draws itself."""
    if type(case.env).draw is KernelEnv.draw:
        return ()
    context = VectorContext(case.spec, np.arange(1), case.seed)
    vector = KernelVector(case.env, context, target="python", autoreset=False)
    vector.restart(case.seed)
    world = {name: of[0].numpy().copy() for name, of in vector.world.items()}
    vector.close()
    try:
        picture = case.env.draw(world)
    except Exception as error:
        return (f"{failure(error)}\n  (the world that draw gets has: {', '.join(world)})",)
    if isinstance(picture, np.ndarray) and picture.dtype == np.uint8 and picture.shape[2:] == (3,):
        return ()
    kind = getattr(picture, "dtype", type(picture).__name__), getattr(picture, "shape", ())
    return (f"draw gave {kind[0]} {kind[1]}: expected an array of uint8, (height, width, 3).",)


def check_states(case: Case) -> Check:
    """The same from states of the compiled play, which goes further."""
    case.places = _places(case)
    check, case.expected = _interpreted(case, case.one_step(case.places))
    done = f"interpreted in a step from each of {len(case.places)} states of that play"
    if case.expected is not None:
        done += f", {_episodes(case.expected)}"
    return replace(check, name="states", done=done)


def _interpreted(case: Case, what: Play) -> tuple[Check, Played | None]:
    """What shows as it is interpreted and watched, but for what was found before."""
    before = {kind: len(found) for kind, found in case.watch.found.items()}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        try:
            env = watched(case.env, case.watch)
            played = play(what._replace(env=env), "python", quiet=False)
        except Exception as error:
            return Check("", wrong=(failure(error),)), None
    found = {kind: case.watch.found[kind][before[kind] :] for kind in _REMEDIES}
    lines = dict.fromkeys((str(of.message), (of.filename, of.lineno)) for of in told)
    drawn = case.watch.found["draws"][before["draws"] :]
    check = Check(
        "",
        wrong=(*_not_finite(case, played), *itertools.chain(*found.values())),
        warnings=(*(f"{text}\n  {line_of(place)}" for text, place in lines), *drawn),
        remedies=(
            *(_REMEDIES[kind] for kind in found if found[kind]),
            *([_NUMBER] if drawn else []),
        ),
    )
    return check, played


def _places(case: Case) -> Array:
    """Places of the compiled play, `[states, 2]`: t, env. Every second one is before an end.

    As far as there are any.
    """
    assert case.on_cpu is not None
    rng = np.random.default_rng(case.seed)
    most = max(8, min(1_000 // case.env.num_agents, 400))
    ends = rng.permutation(np.argwhere(case.on_cpu.length))[: most // 2]
    others = rng.permutation(np.argwhere(case.on_cpu.length == 0))[: most - len(ends)]
    order = np.argsort(np.r_[2 * np.arange(len(ends)), 2 * np.arange(len(others)) + 1])
    return np.concatenate([ends, others])[order]


def check_resets(case: Case) -> Check:
    """Whether an episode depends on the one before."""
    assert case.watched is not None
    found = case.watch.found["resets"]
    begun = case.watched.num_begun
    if case.expected is not None:
        begun += int((case.expected.length > 0).sum())
    done = f"what {begun} episodes read was held against what they wrote"
    return Check("resets", done, wrong=tuple(found), remedies=(_WRITE,) if found else ())


def check_agents(case: Case) -> Check:
    """Whether agents of one phase depend on each other: on a GPU they run at the same time."""
    calls = [name for name in {*case.env.resets, *case.env.phases} if case.env.per_agent(name)]
    found = case.watch.found["agents"]
    done = (
        f"{len(calls)} functions are called for each of {case.env.num_agents} agents: what each "
        "reads was held against what others write"
        if case.env.agents
        else "there is one"
    )
    return Check("agents", done, wrong=tuple(found), remedies=(_SPLIT,) if found else ())


def check_types(case: Case) -> Check:
    """Whether each function compiles, and stays as narrow as declared."""
    context = VectorContext(case.spec, np.arange(1), case.seed)
    vector = KernelVector(case.env, context, target="python")
    try:
        found = compiler.wider(case.env, vector.world)
    except Exception as error:
        return Check("types", wrong=(failure(error, case.env),), remedies=(_NUMBERS_ONLY,))
    finally:
        vector.close()
    if any(of.dtype == torch.float64 for of in vector.world.values()) or any(
        np.asarray(of).dtype == np.float64 for of in case.env.constants.values()
    ):
        return Check("types", missing="float64 is declared, so that it may come out anywhere")
    return Check(
        "types",
        "functions compiled, and looked through for what is float64 and declared narrower",
        wrong=tuple(found),
        warnings=tuple(
            f"raises, and a GPU would go on: {line_of(place)}"
            for place in lines_with(case.env, "RAISE_VARARGS")
        ),
        remedies=(_NARROW,) if found else (),
    )


def check_play(case: Case) -> Check:
    """Whole episodes on the CPU."""
    n, num_steps = case.num_envs, len(case.action)
    done = f"{n} environments on the CPU over {num_steps} steps"
    try:
        played = case.on_cpu = play(case.first(n, num_steps), "cpu")
    except Exception as error:
        return Check("play", done, (failure(error),))
    notes = []
    if not played.length.any():
        notes.append(
            "random play met the end of no episode: play longer (--num-steps), or set "
            "max_episode_steps."
        )
    if not played.rows["reward"].any():
        notes.append("no step of random play paid anything: is it written to w.reward[e]?")
    done = f"{done}, {_episodes(played)}"
    wrong = [*_not_finite(case, played), *_outside(case, played)]
    return Check("play", done, tuple(wrong), (*notes, *_beyond(case, played)))


def _episodes(played: Played) -> str:
    """How many ended, and how."""
    ended = played.length > 0
    cut = played.rows["truncated"].reshape(*ended.shape, -1).any(-1) & ended
    return (
        f"{ended.sum()} episodes ended ({(ended & ~cut).sum()} terminated, {cut.sum()} truncated)"
    )


def _place(case: Case, where: Array, *, first_step: int = 1) -> str:
    """The first of some places: `where` is `[T, n, ...]` bool."""
    step, env, *rest = np.argwhere(where)[0].tolist()
    agent = f", agent {rest.pop(0)}" if case.env.agents else ""
    at = f"[{', '.join(map(str, rest))}]" if rest else ""
    step += first_step
    return f"{at} after {f'step {step}' if step else 'the first reset'}, env {env}{agent}"


def _not_finite(case: Case, played: Played) -> list[str]:
    """NaN and infinity."""
    found = []
    for name, of, first_step in (
        ("observation", played.obs, 0),
        ("reward", played.rows["reward"], 1),
    ):
        if (bad := ~np.isfinite(of)).any():
            what = of[bad][0]
            found.append(f"{name}{_place(case, bad, first_step=first_step)} is {what}.")
    return found


def _outside(case: Case, played: Played) -> list[str]:
    """Actions that the space does not have."""
    codec, action = ActionCodec(case.spec.action), played.rows["action"]
    bad = (action < codec.low) | (action > codec.high)
    if not bad.any():
        return []
    has = case.spec.action.describe()
    return [f"action{_place(case, bad)} is {action[bad][0]}, and the space has {has}."]


def _beyond(case: Case, played: Played) -> list[str]:
    """Observations that the space does not have."""
    space, obs = case.env.observation_space, played.obs
    bad = (obs < space.low) | (obs > space.high)
    if not bad.any():
        return []
    index = np.argwhere(bad)[0][-1]
    return [
        f"observation{_place(case, bad, first_step=0)} is {obs[bad][0]}, and the space has "
        f"{space.low[index]} to {space.high[index]} there."
    ]


# What is checked of a kernel environment's episodes: chance, and ends.


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
