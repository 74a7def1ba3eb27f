"""The checks of a kernel environment, interpreted and on the CPU: one function for each line."""

import itertools
import warnings
from dataclasses import dataclass, field, replace

import numpy as np

from headrace.envs.api import VectorContext
from headrace.envs.check import access_trace, plays
from headrace.envs.check.access_trace import AccessTrace, Kind, describe_failure
from headrace.envs.check.declarations import find_problems
from headrace.envs.check.plays import Play, PlayResult, compare, play
from headrace.envs.check.report import Check
from headrace.envs.kernels import compiler
from headrace.envs.kernels.compiler import Target
from headrace.envs.kernels.env import KernelEnv
from headrace.envs.kernels.vector import KernelVector
from headrace.spec import ActionCodec, Array, EnvSpec

_MAX_NUMBERS = 60_000_000
"""Numbers that a play may store: 240 MB, and a few times that during a comparison."""
_NUM_TRACED = 2  # environments of the interpreted play
_NUM_TRUNCATED = 16  # episodes that are truncated on purpose
_TARGETS = {"python": "interpreted", "cpu": "on the CPU"}

_REMEDIES: dict[Kind, str] = {
    "out": "Write all of `out` in every call, and read the world instead.",
    "rows": "Access only the row e.",
    "own": "Only read w.step, w.episode, w.env_id and constants.",
    "draws": (
        "Number the draws of a step 0, 1, 2, ... over all functions and agents: "
        "uniform(w, e, 2 * i). Ignore this if the same number is intended."
    ),
}
_WRITE = (
    "Write it in a reset, or before it is read. A value that differs between episodes can depend "
    "on w.episode[e]."
)
_SPLIT = (
    "On a GPU the agents of one phase run at the same time. Split the phase: write what another "
    "agent reads in an earlier phase, or in a function of (w, e)."
)
_NARROW = "Write constants as np.float32(9.8), and convert integers by np.float32(w.step[e])."
_NUMBERS_ONLY = (
    "Functions are compiled for a GPU as well. Use numbers, one number of an array at a time, "
    "`math`, and functions like these. Use no lists, no strings, and no new arrays."
)
_DRAW = (
    "Draw random numbers with uniform(w, e, draw), and keep all else in the state. Use no "
    "generators and no globals."
)


@dataclass
class KernelCase:
    """A kernel environment that is being checked, and the plays of it so far.

    Attributes:
        action: `[T, n * agents, ...]`; plays take these actions, or the first of them.
        trace, traced: the interpreted play of the first environments and steps.
        on_cpu: the compiled play.
        places: `[states, 2]`, step and environment of chosen states of it.
        expected: one interpreted step from each of these states.
    """

    env: KernelEnv
    spec: EnvSpec
    action: Array
    seed: int
    trace: AccessTrace
    traced: PlayResult | None = None
    on_cpu: PlayResult | None = None
    places: Array = field(default_factory=lambda: np.empty((0, 2), np.int64))
    expected: PlayResult | None = None

    @property
    def num_envs(self) -> int:
        """Environments of the compiled play."""
        return int(self.action.shape[1]) // self.env.num_agents

    @property
    def is_integer(self) -> bool:
        """True if the state has no floats: then rounding errors cannot add up."""
        fields = [*self.env.state.values(), *self.env.agent_state.values()]
        kinds = [np.dtype(f[0] if isinstance(f, tuple) else f).kind for f in fields]
        return "f" not in kinds and self.spec.action.kind != "box"

    @property
    def num_traced_steps(self) -> int:
        """Steps of the interpreted play."""
        per_agent = 2_000 // (_NUM_TRACED * self.env.num_agents)
        return min(len(self.action), max(6, min(per_agent, 200)))

    def vector(self) -> KernelVector:
        """Make one interpreted environment."""
        context = VectorContext(self.spec, np.arange(1), self.seed)
        return KernelVector(self.env, context, target="python")

    def one_step(self, places: Array) -> Play:
        """Return a play of one step from states of the compiled play; `places` as above."""
        assert self.on_cpu is not None
        t, e = places.T
        rest = self.action.shape[2:]
        action = self.action.reshape(len(self.action), self.num_envs, -1, *rest)[t, e]
        start = {name: array[t, e] for name, array in self.on_cpu.state.items()}
        return Play(self.env, e, action.reshape(1, -1, *rest), self.seed, start)

    def first(self, n: int, num_steps: int) -> Play:
        """Return a play of the first `n` environments and the first steps."""
        action = self.action[:num_steps, : n * self.env.num_agents]
        return Play(self.env, np.arange(n), action, self.seed)


def make_case(env: KernelEnv, num_steps: int, seed: int) -> KernelCase:
    """Choose the size of the plays; `num_steps` 0: twice the time limit, or 2,000."""
    spec = plays.kernel_spec(env)
    fields = [*env.state.values(), *([*env.agent_state.values()] * env.num_agents)]
    numbers = sum(int(np.prod(f[1])) if isinstance(f, tuple) else 1 for f in fields)
    numbers += env.num_agents * (spec.observation.size + 25)
    default = max(200, 2 * env.max_episode_steps) if env.max_episode_steps else 2_000
    n = max(2, min(_MAX_NUMBERS // ((num_steps or default) * numbers), 32))
    steps = num_steps or max(1, min(default, _MAX_NUMBERS // (n * numbers)))
    action = plays.random_actions(spec, (steps, n * env.num_agents), seed)
    return KernelCase(env, spec, action, seed, AccessTrace(env))


def check_class(env: KernelEnv) -> Check:
    """Check the declarations of the class."""
    functions = len({*env.resets, *env.phases})
    fields = len(env.state) + len(env.agent_state) + len(env.constants)
    return Check("class", f"{functions} functions, {fields} fields", tuple(find_problems(env)))


def check_python(case: KernelCase) -> Check:
    """Play interpreted and traced, which shows what a compiler does not report."""
    n, num_steps = min(_NUM_TRACED, case.num_envs), case.num_traced_steps
    done = f"{n} environments interpreted over {num_steps} steps"
    check, case.traced = _play_traced(case, "python", case.first(n, num_steps), done)
    if case.traced is None:
        return check
    return replace(check, wrong=check.wrong + _check_picture(case))


def _check_picture(case: KernelCase) -> tuple[str, ...]:
    if type(case.env).draw is KernelEnv.draw:
        return ()
    vector = case.vector()
    vector.restart(case.seed)
    world = {name: tensor[0].numpy().copy() for name, tensor in vector.world.items()}
    try:
        picture = case.env.draw(world)
    except Exception as error:
        return (f"{describe_failure(error)}\n  (draw's argument has: {', '.join(world)})",)
    if isinstance(picture, np.ndarray) and picture.dtype == np.uint8 and picture.shape[2:] == (3,):
        return ()
    kind = getattr(picture, "dtype", type(picture).__name__), getattr(picture, "shape", ())
    return (f"draw gave {kind[0]} {kind[1]}: expected an array of uint8, (height, width, 3).",)


def check_states(case: KernelCase) -> Check:
    """Play traced steps from states of the compiled play, which is longer."""
    case.places = _choose_places(case)
    done = f"interpreted in a step from each of {len(case.places)} states of that play"
    check, case.expected = _play_traced(case, "states", case.one_step(case.places), done)
    return check


def _play_traced(
    case: KernelCase, name: str, request: Play, done: str
) -> tuple[Check, PlayResult | None]:
    """Play interpreted and traced, and report what earlier plays did not find."""
    before = {kind: len(findings) for kind, findings in case.trace.findings.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            env = access_trace.trace_env(case.env, case.trace)
            result = play(request._replace(env=env), "python", quiet=False)
        except Exception as error:
            return Check(name, done, (describe_failure(error),)), None
    new = {kind: case.trace.findings[kind][before[kind] :] for kind in _REMEDIES}
    remedies = tuple(_REMEDIES[kind] for kind, findings in new.items() if findings)
    draws = new.pop("draws")
    lines = dict.fromkeys((str(w.message), (w.filename, w.lineno)) for w in caught)
    texts = [f"{text}\n  {access_trace.show_line(line)}" for text, line in lines]
    wrong = (*_find_nonfinite(case, result), *itertools.chain(*new.values()))
    done = f"{done}, {_count_ends(result)}"
    return Check(name, done, wrong, (*texts, *draws), remedies), result


def _choose_places(case: KernelCase) -> Array:
    """Choose places of the compiled play, `[states, 2]`; half of them are ends, if it has any."""
    assert case.on_cpu is not None
    rng = np.random.default_rng(case.seed)
    most = max(8, min(1_000 // case.env.num_agents, 400))
    ends = rng.permutation(np.argwhere(case.on_cpu.length))[: most // 2]
    others = rng.permutation(np.argwhere(case.on_cpu.length == 0))[: most - len(ends)]
    order = np.argsort(np.r_[2 * np.arange(len(ends)), 2 * np.arange(len(others)) + 1])
    return np.concatenate([ends, others])[order]


def check_resets(case: KernelCase) -> Check:
    """Check that an episode does not depend on the one before."""
    assert case.traced is not None
    num_episodes = case.traced.num_episodes
    if case.expected is not None:
        num_episodes += int((case.expected.length > 0).sum())
    done = f"reads of {num_episodes} episodes compared with their writes"
    return _check_trace(case, "resets", done, _WRITE)


def check_agents(case: KernelCase) -> Check:
    """Check that agents of one phase do not depend on each other: a GPU runs them in parallel."""
    calls = f"{sum(map(case.env.per_agent, case.env.functions()))} functions"
    done = f"{calls}, each called for every agent: reads compared with the writes of others"
    return _check_trace(case, "agents", done if case.env.agents else "one agent", _SPLIT)


def _check_trace(case: KernelCase, kind: Kind, done: str, remedy: str) -> Check:
    findings = case.trace.findings[kind]
    return Check(kind, done, tuple(findings), remedies=(remedy,) if findings else ())


def check_types(case: KernelCase) -> Check:
    """Check that each function compiles, and that types stay as narrow as declared."""
    try:
        findings = compiler.find_float64(case.env, case.vector().w)
    except Exception as error:
        failure = describe_failure(error, case.env)
        return Check("types", wrong=(failure,), remedies=(_NUMBERS_ONLY,))
    if findings is None:
        return Check("types", missing="float64 is declared, so it may occur anywhere")
    return Check(
        "types",
        "functions compiled, and searched for float64 where narrower types are declared",
        wrong=tuple(findings),
        warnings=tuple(
            f"raises, which a GPU ignores: {access_trace.show_line(line)}"
            for line in access_trace.lines_with(case.env, "RAISE_VARARGS")
        ),
        remedies=(_NARROW,) if findings else (),
    )


def check_play(case: KernelCase) -> Check:
    """Play whole episodes on the CPU."""
    n, num_steps = case.num_envs, len(case.action)
    done = f"{n} environments on the CPU over {num_steps} steps"
    try:
        result = case.on_cpu = play(case.first(n, num_steps), "cpu")
    except Exception as error:
        return Check("play", done, (describe_failure(error),))
    notes = []
    if not result.length.any():
        notes.append(
            "no episode of the random play ended: play longer (--num-steps), or set "
            "max_episode_steps."
        )
    if not result.seen["reward"].any():
        notes.append("every reward of the random play was 0: is it written to w.reward[e]?")
    done = f"{done}, {_count_ends(result)}"
    wrong = [*_find_nonfinite(case, result), *_find_bad_actions(case, result)]
    return Check("play", done, tuple(wrong), (*notes, *_find_bad_observations(case, result)))


def _count_ends(result: PlayResult) -> str:
    ended = result.length > 0
    truncated = result.truncated & ended
    return (
        f"{ended.sum()} episodes ended ({(ended & ~truncated).sum()} terminated, "
        f"{truncated.sum()} truncated)"
    )


def _find_nonfinite(case: KernelCase, result: PlayResult) -> list[str]:
    return [
        text
        for name in ("observation", "reward")
        for text in _report_first(case, name, result.seen[name], ~np.isfinite(result.seen[name]))
    ]


def _find_bad_actions(case: KernelCase, result: PlayResult) -> list[str]:
    codec, action = ActionCodec(case.spec.action), result.action
    bad = (action < codec.low) | (action > codec.high)
    space = f", outside of the space: {case.spec.action.describe()}"
    return _report_first(case, "action", action, bad, space, first_step=1)


def _find_bad_observations(case: KernelCase, result: PlayResult) -> list[str]:
    space, obs = case.env.observation_space, result.seen["observation"]
    bad = (obs < space.low) | (obs > space.high)
    index = np.argwhere(bad)[0][-1] if bad.any() else 0
    bounds = f", and the space has {space.low[index]} to {space.high[index]} there"
    return _report_first(case, "observation", obs, bad, bounds)


def _report_first(
    case: KernelCase, name: str, array: Array, bad: Array, comment: str = "", first_step: int = 0
) -> list[str]:
    """Describe the first number of an array, `[T, n, ...]`, that is `bad`; [] if none is."""
    if not bad.any():
        return []
    step, *rest = np.argwhere(bad)[0].tolist()
    place = plays.describe_place(case.env, name, step + first_step, *rest)
    return [f"{place} is {array[bad][0]}{comment}."]


def check_randomness(case: KernelCase) -> Check:
    """Check that an episode depends on seed, environment and index, and on nothing else."""
    wrong = []
    n, num_steps = min(2, case.num_envs), min(10, case.num_traced_steps)
    plays: list[tuple[Target, int, int]] = [("python", n, num_steps)]
    if case.on_cpu is not None:
        plays.append(("cpu", min(8, case.num_envs), min(64, len(case.action))))
    for target, n, num_steps in plays:
        one, other = (play(case.first(n, num_steps), target).seen for _ in range(2))
        if differences := compare(one, other):
            difference = differences[0].describe(case.env, "the first time", "the second")
            wrong.append(f"the same seed gives other episodes ({_TARGETS[target]}): {difference}")
    done = f"the same seed twice ({' and '.join(_TARGETS[target] for target, *_ in plays)})"
    if wrong or case.on_cpu is None:
        return Check("randomness", done, wrong=tuple(wrong), remedies=(_DRAW,) if wrong else ())
    wrong, notes = _compare_seeds(case, n, num_steps)
    done += f"; other seeds, environments and episodes; env {n - 1} of {n}, and alone"
    return Check("randomness", done, wrong=tuple(wrong), warnings=tuple(notes))


def _compare_seeds(case: KernelCase, n: int, num_steps: int) -> tuple[list[str], list[str]]:
    agents = case.env.num_agents
    action = np.tile(case.action[:num_steps, :agents], (1, n) + (1,) * (case.action.ndim - 2))
    request = Play(case.env, np.arange(n), action, case.seed)
    one = play(request, "cpu").seen
    others = {
        "seeds": request._replace(seed=case.seed + 1),
        "environments": request._replace(env_id=np.zeros(n, np.int64)),
        "episodes": request._replace(first_episode=1_000),
    }
    alike = [k for k, other in others.items() if not compare(one, play(other, "cpu").seen)]
    wrong, notes = [], []
    if len(alike) == len(others):
        notes.append("other seeds, environments and episodes are all alike: nothing is random.")
    elif alike:
        wrong.append(f"other {' and '.join(alike)} are alike. Draw with uniform(w, e, draw).")
    last = n - 1
    alone = request._replace(env_id=np.array([last]), action=action[:, :agents])
    in_vector = plays.rows_of(one, slice(None), slice(last, None))
    if differences := compare(in_vector, play(alone, "cpu").seen):
        first = differences[0]._replace(env=last)
        difference = first.describe(case.env, f"as the last of {n}", "alone")
        wrong.append(f"environment {last} depends on others: {difference}\nAccess only the row e.")
    return wrong, notes


def check_ends(case: KernelCase) -> Check:
    """Check that episodes end in time and begin again, and that agents that left stay out."""
    result = case.on_cpu
    assert result is not None
    ended = result.length > 0
    step, episode = result.state["episode_step"], result.state["episode"]
    wrong = _check_time_limit(case, result)
    notes: list[str] = []
    begins = (step[1:] == 0) & (episode[1:] == episode[:-1] + 1)
    continues = (step[1:] == step[:-1] + 1) & (episode[1:] == episode[:-1])
    is_right = np.where(ended, begins, continues)
    if not is_right.all():
        t, e = np.argwhere(~is_right)[0]
        wrong.append(
            f"after step {t + 1} of env {e}, w.step is {step[t + 1, e]} and w.episode "
            f"{episode[t + 1, e]}.\nThe program counts these itself: only read them."
        )
    if case.env.agents:
        _check_leaving(result, wrong, notes)
    done = f"{int(ended.sum())} ends, {_NUM_TRUNCATED} more at the time limit"
    if not case.env.max_episode_steps:
        done = f"{int(ended.sum())} ends, no time limit"
    return Check("ends", done, wrong=tuple(wrong), warnings=tuple(notes))


def _check_time_limit(case: KernelCase, result: PlayResult) -> list[str]:
    """Check that an episode is truncated at exactly the time limit, unless it terminates."""
    limit = case.env.max_episode_steps
    if not limit:
        return []
    request = case.one_step(np.resize(np.argwhere(result.length == 0), (_NUM_TRUNCATED, 2)))
    start = request.start
    steps = np.where(np.arange(_NUM_TRUNCATED) % 2, limit - 1, max(limit - 2, 0))
    start["episode_step"] = steps
    at_limit = play(request, "cpu")
    ended, due = at_limit.length[0] > 0, steps == limit - 1
    wrong = [
        f"an episode had {length} steps, and max_episode_steps is {limit}."
        for length in np.unique(result.length[result.length > limit])
    ]
    early = result.truncated & (result.length != limit)
    if early.any() or (at_limit.truncated[0] & ~due).any():
        wrong.append(f"an episode is truncated before step {limit}.")
    if (due & ~ended).any():
        wrong.append(f"an episode goes on after step {limit}.")
    return wrong


def _check_leaving(result: PlayResult, wrong: list[str], notes: list[str]) -> None:
    valid, reward = result.seen["valid"][1:], result.seen["reward"][1:]
    ended = result.length > 0

    def first(bad: Array) -> str:
        t, e, *agent = np.argwhere(bad)[0].tolist()
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
            "includes that, but nothing learns from it."
        )
    if (idle := ~valid.any(-1) & ~ended).any():
        notes.append(
            f"all agents have left, and the episode goes on ({first(idle)}).\nSet w.terminated[e] "
            "where the last one leaves."
        )
