"""`headrace check-env`: good environments pass, and each way to break one is reported by name.

Checks are made one after the other as they are asked for, so that most of these need no compiler.
"""

import itertools
import json
import os
import random
import re
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import headrace
from headrace.cli.main import _main
from headrace.envs.check import kernel_checks as play
from headrace.envs.check.checker import kernel_checks
from headrace.envs.kernels import compiler
from headrace.envs.kernels.env import KernelEnv, uniform
from headrace.envs.kernels.library.cartpole import CartPole
from tests import python
from tests.envs.kernels.support import Ring
from tests.envs.pettingzoo_support import Camp
from tests.envs.test_tensor_vector import Tensors
from tests.marks import repeats

KERNEL_CHECKS = [
    "class", "python", "types", "play", "states", "resets", "agents", "randomness", "ends", "cpu",
    "gpu",
]  # fmt: skip
ONE, HALF = np.float32(1), np.float32(0.5)
_GENERATOR = np.random.default_rng(0)
_SEEN = []


def line(marker):
    """`FILE:LINE: ` of the line of this file that ends with `# marker`."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (n for n, text in enumerate(lines, 1) if text.endswith(f"# {marker}"))
    return f"{__file__}:{number}: "


def checked(env, until="gpu"):
    """Checks by their names; later ones are not made."""
    last = KERNEL_CHECKS.index(until) + 1
    checks = {check.name: check for check in itertools.islice(kernel_checks(env), last)}
    print(*checks.values(), sep="\n")
    return checks


def interpreted(env, check):
    """One of the checks that look at the interpreted play alone."""
    case = play.case(env, 0, 0)
    play.check_python(case)
    found = check(case)
    print(found)
    return found


class Walk(KernelEnv):
    """One agent, who walks at random, left and right."""

    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    max_episode_steps = 6
    state = {"x": np.float32, "n": np.int32}  # noqa: RUF012

    @staticmethod
    def reset_env(w, e):
        w.x[e] = uniform(w, e, 0)
        w.n[e] = 0

    @staticmethod
    def step_env(w, e):
        w.x[e] += uniform(w, e, 0) if w.action[e] == 1 else -uniform(w, e, 1)
        w.n[e] += 1
        w.reward[e] = ONE
        w.terminated[e] = w.x[e] < -ONE

    @staticmethod
    def observe(w, e, out):
        out[0] = w.x[e]
        out[1] = w.n[e]


class Team(Walk):
    """Three of them, who see the sum of all."""

    agents = {"walker": 3}  # noqa: RUF012
    state = {"total": np.int32}  # noqa: RUF012
    agent_state = {"at": np.int32}  # noqa: RUF012
    resets = ("reset_env", "place")
    phases = ("step_env", "walk", "observe")

    @staticmethod
    def reset_env(w, e):
        w.total[e] = 0

    @staticmethod
    def place(w, e, i):
        w.at[e, i] = int(uniform(w, e, i) * np.float32(5))

    @staticmethod
    def step_env(w, e):
        w.total[e] = 0
        for i in range(3):
            w.total[e] += w.at[e, i]
        w.terminated[e] = w.total[e] > 15

    @staticmethod
    def walk(w, e, i):
        w.at[e, i] += w.action[e, i]
        w.reward[e, i] = ONE

    @staticmethod
    def observe(w, e, i, out):
        out[0] = w.at[e, i]
        out[1] = w.total[e]


@repeats("env", [Ring, CartPole])
def test_a_good_game_passes(env):
    said = []
    report = headrace.check_env(env, say=said.append)
    assert report.ok, report
    assert [check.name for check in report.checks] == KERNEL_CHECKS
    assert {check.status for check in report.checks} <= {"ok", "warning"}
    assert [*said, report.summary] == str(report).splitlines()
    by_name = {check.name: check for check in report.checks}
    assert ("CUDA simulator" in by_name["gpu"].missing) == (not compiler.has_gpu())
    assert report.to_json()["checks"][0]["status"] == "ok"


def test_few_steps_and_other_seeds_are_played_as_asked():
    checks = kernel_checks(Walk(), num_steps=4, seed=1)
    assert next(checks).status == "ok"
    assert "over 4 steps" in next(checks).done


class Declared(Walk):
    """Wrong in each way that can be told from the class alone."""

    observation_space = gymnasium.spaces.Box(-9, 9, (2, 2), np.float32)
    max_episode_steps = 1.5
    agents = {"nobody": 0}  # noqa: RUF012
    state = {"reward": np.float32, "x-1": np.float32, "z": np.complex64, "s": (np.int8, 3)}  # noqa: RUF012
    agent_state = {"z": np.int8}  # noqa: RUF012
    scratch = ("nothing",)
    constants = {"g": 9.8}  # noqa: RUF012
    resets = "reset_env"
    phases = ("step_env", "own", "missing")

    def own(self, w, e):
        """No static method."""

    @staticmethod
    def step_env(w, e, i, j):
        """One parameter too many."""


def test_what_the_class_declares():
    report = headrace.check_env(Declared())
    of_class, *others = report.checks
    expected = [
        "The observation space of the kernel environment Declared",
        "agents['nobody'] is 0",
        "max_episode_steps is 1.5",
        "state['reward']: the name is taken by what every world has",
        "state['x-1']: expected a name",
        "state['z'] is complex64: expected one of bool,",
        "state['s'] has the shape 3",
        "agent_state['z']: the name is taken by state",
        "constants['g'] is 9.8: expected a number with a dtype, np.float32(9.8)",
        "scratch names 'nothing'",
        "resets is the text 'reset_env': expected names in a tuple",
        "phases names observe 0 times",
        "Declared.step_env(w, e, i, j): expected step_env(w, e)",
        "Declared.own: expected a static method",
        "Declared.missing: expected a static method, and has none",
    ]
    assert [text[: len(start)] for text, start in zip(of_class.wrong, expected, strict=True)] == (
        expected
    )
    assert [check.status for check in others] == ["not checked"] * 10
    assert not report.ok


class Unwritten(Walk):
    @staticmethod  # unwritten
    def observe(w, e, out):
        out[0] = w.x[e]


class NotFinite(Walk):
    @staticmethod
    def step_env(w, e):
        w.x[e] = ONE
        w.reward[e] = w.x[e] / np.float32(w.action[e])  # infinite


class Neighbours(Walk):
    @staticmethod
    def step_env(w, e):
        w.n[e] = w.n[e - 1] + 1  # neighbour


class Counts(Walk):
    @staticmethod
    def step_env(w, e):
        w.step[e] += 1  # counts


class Table(Walk):
    constants = {"table": np.zeros(3, np.float32)}  # noqa: RUF012

    @staticmethod
    def step_env(w, e):
        w.table[w.action[e]] += ONE  # table


class ReadsOut(Walk):
    @staticmethod
    def observe(w, e, out):
        out[1] = out[0]  # out
        out[0] = w.x[e]


@repeats(
    ("env", "told", "marker"),
    [
        (Unwritten, "observe: out[1] is not written", "unwritten"),
        (NotFinite, "reward after step 2, env 0 is inf", "infinite"),
        (Neighbours, "step_env: reads the row of environment 1 of n, called for 0", "neighbour"),
        (Counts, "step_env: writes to step (1 -> 2)", "counts"),
        (Table, "step_env: writes to a constant (0.0 -> 1.0)", "table"),
        (ReadsOut, "observe: reads out[0] before it is written", "out"),
    ],
    keep=3,
)
def test_what_plain_python_shows(env, told, marker):
    check = checked(env(), "python")["python"]
    assert told in "".join(check.wrong)
    assert line(marker) in "".join(check.wrong + check.warnings)


class Raises(Walk):
    @staticmethod
    def step_env(w, e):
        w.x[e, 1] = ONE  # raises


def test_an_exception_ends_the_checks():
    report = headrace.check_env(Raises)
    said = "step_env raised IndexError: too many indices for array: array is 1-dimensional"
    (told,) = report.checks[1].wrong
    assert told.startswith(said)
    assert line("raises") in told
    assert [check.status for check in report.checks[2:]] == ["not checked"] * 9


class Apart(Walk):
    """NumPy cuts to 8 bits, a compiler does not; and at a wall, a float32 is not a float64."""

    state = {"x": np.float32, "n": np.int8, "far": np.int8}  # noqa: RUF012

    @staticmethod
    def reset_env(w, e):
        w.x[e] = w.n[e] = w.far[e] = 0

    @staticmethod
    def step_env(w, e):
        w.x[e] += np.float32(0.1)
        w.far[e] = 1 if w.x[e] > 0.3 else 2
        w.n[e] = 100 if w.step[e] == 5 else 1
        w.terminated[e] = w.n[e] + w.n[e] < 0  # overflows


def test_what_a_compiler_does_otherwise_is_told_and_is_wrong_unless_rounding_explains_it():
    checks = checked(Apart(), "cpu")
    python, cpu = checks["python"], checks["cpu"]
    assert python.warnings[0].startswith("overflow encountered")
    assert line("overflows") in python.warnings[0]
    found = re.fullmatch(
        r"terminated after step (\d+), env \d+: True in plain Python, False on the CPU",
        cpu.wrong[0],
    )
    assert int(found[1]) % 6 == 5
    found = re.fullmatch(
        r"rounding decides: w.far after step (\d+), env \d+: 2 in plain Python, 1 on the CPU",
        cpu.notes[0],
    )
    assert int(found[1]) % 6 == 3
    assert "rounding explains" in cpu.done


class Left(Walk):
    @staticmethod
    def reset_env(w, e):
        w.n[e] += 1  # left
        w.x[e] = uniform(w, e, 0)


class LastAction(Walk):
    """Its first observation has the last action of the episode before."""

    @staticmethod
    def observe(w, e, out):
        out[0] = w.x[e]
        out[1] = w.action[e]  # last action


class Scratch(Walk):
    scratch = ("n",)

    @staticmethod
    def observe(w, e, out):
        out[0] = w.x[e]
        out[1] = w.step[e]

    @staticmethod
    def step_env(w, e):
        w.n[e] = w.n[e] + 1  # scratch


@repeats(
    ("env", "told", "marker"),
    [
        (Left, "reset_env: reads n (number 0 of 1), which nothing has written since the e", "left"),
        (LastAction, "observe: reads action (number 0 of 1), which nothing", "last action"),
        (Scratch, "n (number 0 of 1), which nothing has written since the step began", "scratch"),
    ],
)
def test_what_is_not_reset(env, told, marker):
    (wrong,) = interpreted(env(), play.check_resets).wrong
    assert told in wrong
    assert line(marker) in wrong


class Sees(Team):
    """Who walks first sees where the others were."""

    @staticmethod
    def walk(w, e, i):
        if w.at[e, (i + 1) % 3] > 2:  # sees
            w.at[e, i] += w.action[e, i]  # walks


class Adds(Team):
    """Sums come out right in any order, one after the other; at the same time some are lost."""

    @staticmethod
    def walk(w, e, i):
        w.total[e] += w.action[e, i]  # adds


class LastWins(Team):
    @staticmethod
    def place(w, e, i):
        w.at[e, i] = i
        w.total[e] = i  # wins


class AllSayTheSame(Team):
    """This is allowed: whoever is first, the outcome is the same."""

    @staticmethod
    def walk(w, e, i):
        w.at[e, i] += w.action[e, i]
        if w.at[e, i] > 3:
            w.terminated[e] = True


@repeats(
    ("env", "told", "markers"),
    [
        (Sees, "walk: agent 0 reads at (number 1 of 3), which agent 1 writes", ("sees", "walks")),
        (Adds, "walk: agent 1 reads total (number 0 of 1), which agent 0 writes", ("adds",)),
        (LastWins, "place: agents 0 and 1 both write total (number 0 of 1): 0 and 1", ("wins",)),
    ],
)
def test_agents_of_one_phase_that_depend_on_each_other(env, told, markers):
    wrong = interpreted(env(), play.check_agents).wrong
    assert any(told in text and all(line(of) in text for of in markers) for text in wrong)


def test_agents_that_do_not_depend_on_each_other():
    for env in (Team(), AllSayTheSame()):
        assert interpreted(env, play.check_agents).status == "ok"


class Wide(Walk):
    @staticmethod
    def step_env(w, e):
        w.x[e] = 0.5 * w.x[e]  # wide


class NoNumber(Walk):
    @staticmethod
    def step_env(w, e):
        seen = [w.n[e]]  # list
        seen.append(1)
        w.n[e] = seen[1]


class NoName(Walk):
    """Nothing that random play meets."""

    @staticmethod
    def step_env(w, e):
        if w.n[e] > 0:
            w.n[e] = w.nothing[e]  # no name


class Crowded(Team):
    """All agents begin at one place, because all draw the same number."""

    @staticmethod
    def place(w, e, i):
        w.at[e, i] = int(uniform(w, e, 3) * np.float32(5))  # drawn


class Strict(Walk):
    """Raises where random play does not come."""

    @staticmethod
    def step_env(w, e):
        w.n[e] += 1
        if w.n[e] > 10_000:
            raise ValueError("too far")  # too far


class Unpaid(Walk):
    """Returns its reward."""

    @staticmethod
    def step_env(w, e):
        w.n[e] += w.action[e]
        w.terminated[e] = w.n[e] > 5
        return ONE


class Drawn(Walk):
    """Draws itself, with a mistake."""

    def draw(self, world):
        return np.full((4, 4, 3), world["m"], np.uint8)  # m


class Grey(Walk):
    """Draws itself, without colors."""

    def draw(self, world):
        return np.zeros((4, 4))


class Whole(Walk):
    """Adds to a part of an array at once."""

    state = {**Walk.state, "many": (np.float32, (3,))}  # noqa: RUF012

    @staticmethod
    def step_env(w, e):
        w.many[e] += ONE


def test_what_else_authors_do():
    python = checked(Crowded(), "python")["python"]
    assert python.status == "warning"
    assert "place: draw 3 is drawn again in the same step" in python.warnings[0]
    assert line("drawn") in python.warnings[0]
    assert "uniform(w, e, 2 * i)" in python.remedies[-1]
    (raised,) = checked(Strict(), "types")["types"].warnings
    assert raised.startswith("raises, and a GPU would go on: " + line("too far"))
    assert any("paid anything" in of for of in checked(Unpaid(), "play")["play"].warnings)
    (wrong,) = checked(Drawn(), "python")["python"].wrong
    assert "draw raised KeyError: 'm'" in wrong
    assert line("m") in wrong
    assert "the world that draw gets has: " in wrong
    (wrong,) = checked(Grey(), "python")["python"].wrong
    assert wrong.startswith("draw gave float64 (4, 4): expected an array of uint8")
    assert "an array of its own" in checked(Whole(), "types")["types"].wrong[0]
    (wrong,) = checked(NoNumber(), "types")["types"].wrong
    assert wrong.splitlines() == [
        "NoNumber.step_env does not compile: it makes a list, or an array of its own (as w.x[e] + "
        "1 is, of several numbers)",
        f"  {line('list')}seen = [w.n[e]]  # list",
    ]


def test_types():
    wide = checked(Wide(), "types")["types"]
    assert len(wide.wrong) == 1
    assert wide.wrong[0].startswith(line("wide"))
    report = headrace.check_env(NoName())
    (wrong,) = report.checks[2].wrong
    assert wrong.startswith("NoName.step_env does not compile: Unknown attribute 'nothing'")
    assert line("no name") in wrong
    statuses = [check.status for check in report.checks[3:]]
    assert statuses == [*["not checked"] * 2, *["ok"] * 3, *["not checked"] * 3]


class OwnGenerator(Walk):
    @staticmethod
    def reset_env(w, e):
        w.n[e] = 0
        w.x[e] = np.float32(random.random())

    @staticmethod
    def step_env(w, e):
        w.step[e] += 3


class Global(Walk):
    @staticmethod
    def reset_env(w, e):
        _SEEN.append(e)
        w.n[e] = len(_SEEN)
        w.x[e] = uniform(w, e, 0)


class SeedAlone(Walk):
    """All environments, and all episodes of a run, are the same one; with 0 those of all runs."""

    def __init__(self, chance):
        self.constants = {"chance": np.float32(chance)}

    @staticmethod
    def reset_env(w, e):
        w.n[e] = 0
        w.x[e] = w.chance * np.float32(w.seed % np.uint64(1000))

    @staticmethod
    def step_env(w, e):
        w.x[e] += HALF if w.action[e] == 1 else -HALF


def test_chance():
    checks = checked(OwnGenerator())
    assert [text[:60] for text in checks["randomness"].wrong] == [
        "the same seed gives other episodes (interpreted): w.x after ",
        "the same seed gives other episodes (on the CPU): w.x after t",
    ]
    assert checks["cpu"].status == checks["gpu"].status == "not checked"
    limit, early, counted = checks["ends"].wrong
    assert limit == "episodes of 8 steps were met, and max_episode_steps is 6."
    assert early == "an episode is truncated before step 6."
    assert counted.startswith("after step 1 of env 0, w.step is 4 and w.episode 0.")
    (wrong,) = checked(Global(), "randomness")["randomness"].wrong
    assert "(interpreted): w.n after the first reset, env 0: " in wrong
    (wrong,) = checked(SeedAlone(chance=1), "randomness")["randomness"].wrong
    assert wrong.startswith("other environments and episodes are alike")
    check = checked(SeedAlone(chance=0), "randomness")["randomness"]
    assert check.status == "warning"
    assert "nothing is random" in check.warnings[0]


class Astray(Team):
    """Wrong in many ways, most of which show after many steps.

    After a thousand, agents look at others that move at the same time. The first one leaves and
    comes back; who is out is paid; when all are, nothing ends, not even in time. Places leave the
    declared bounds, and one depends on the environment before: in a vector of one that is itself.
    Actions become some that the space does not have.
    """

    max_episode_steps = 0

    @staticmethod
    def step_env(w, e):
        w.total[e] = w.at[e - 1, 0] + w.step[e]

    @staticmethod
    def walk(w, e, i):
        w.at[e, i] += w.action[e, i]
        w.reward[e, i] = ONE
        if w.step[e] > 1000 and w.at[e, (i + 1) % 3] > 0:  # late
            w.reward[e, i] += ONE
        w.alive[e, i] = i == 0 and w.step[e] == 3
        w.action[e, i] = 7


@pytest.mark.more
def test_many_steps():
    checks = checked(Astray(), "ends")
    play, agents, chance, ends = (checks[name] for name in ("play", "agents", "randomness", "ends"))
    (wrong,) = agents.wrong
    assert line("late") in wrong
    assert play.wrong == (
        "action after step 1, env 0, agent 0 is 7, and the space has Discrete(2).",
    )
    assert play.warnings[0].startswith("random play met the end of no episode")
    assert re.fullmatch(
        r"observation\[1\] after step \d+, env \d+, agent 0 is 1\d.0, and the space has -9.0 to "
        r"9.0 there.",
        play.warnings[1],
    )
    (wrong,) = chance.wrong
    assert re.match(r"environment 7 depends on others: w.total after step \d, env 7: ", wrong)
    assert ends.wrong == (
        "an agent is back before its episode is over (step 4, env 0, agent 0): w.alive is set "
        "again.\nOnly clear it, in phases.",
    )
    assert [text.split(" (")[0] for text in ends.warnings] == [
        "an agent that has left is rewarded",
        "all agents have left, and the episode goes on",
    ]


SALTED = """
import os
import gymnasium, numpy as np
from headrace.envs.kernels.env import KernelEnv

SALT = np.int32(os.getpid())  # not the same where the simulator runs

class Salted(KernelEnv):
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    max_episode_steps = 5
    state = {"n": np.int32}

    def __init__(self, start=0):
        self.constants = {"start": np.int32(start)}

    @staticmethod
    def reset_env(w, e):
        w.n[e] = w.start + SALT

    @staticmethod
    def step_env(w, e):
        w.n[e] += w.action[e]

    @staticmethod
    def observe(w, e, out):
        out[0] = w.n[e] - SALT
"""


@pytest.mark.more
def test_the_simulator_of_a_gpu_is_another_process_and_what_differs_there_is_told(tmp_path):
    (tmp_path / "salted.py").write_text(SALTED)
    # As a user without a GPU has it; and nothing of this is kept
    env = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    env |= {"HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = python.run(
        python.command("check-env", "salted:Salted", "--env-kwargs", "start=3",
         "--json"),
        cwd=tmp_path, env=env,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert (report["env"], report["ok"]) == ("salted:Salted", False)
    *others, gpu = report["checks"]
    assert [check["name"] for check in others] == KERNEL_CHECKS[:-1]
    assert not any(check["wrong"] for check in others)
    assert gpu["wrong"][0].startswith("w.n after the first reset, env 0: ")
    assert "CUDA simulator" in gpu["missing"]
    assert f"{gpu['name']:<12}" in done.stderr  # progress


def test_the_command_line_says_what_there_is_not(capsys):
    assert "check-env" in run_verb(capsys, "--help", code=0)
    assert "no module 'nowhere'" in run_verb(capsys, "check-env", "nowhere:Nothing", code=2)
    said = run_verb(capsys, "check-env", "tests.envs.check.test_checker:Wlak", code=2)
    assert "no callable 'Wlak'" in said
    assert "tests.envs.check.test_checker:Walk" in said
    said = run_verb(
        capsys, "check-env", "tests.envs.check.test_checker:Walk", "--env-kwargs", "size=3", code=2
    )
    assert "does not take env_kwargs={'size': 3}" in said


def run_verb(capsys, *argv, code):
    assert _main([*argv]) == code
    return "".join(capsys.readouterr())


def test_other_environments_are_handed_to_gymnasiums_checker(capsys):
    said = run_verb(capsys, "check-env", "CartPole-v1", code=0)
    assert "A Box observation space minimum value is -infinity" in said
    assert "CartPole-v1: nothing is wrong (2 warnings)." in said
    said = run_verb(capsys, "check-env", "tests.envs.check.test_checker:OutOfBounds", code=1)
    assert "wrong       gymnasium" in said
    assert "AssertionError: The" in said
    assert "something is wrong: spaces, gymnasium" in said


class OutOfBounds(gymnasium.Env):
    """What it observes is not in its space; and no policy of ours has such actions."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Text(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.full(1, 2, np.float32), {}

    def step(self, action):
        return np.full(1, 2, np.float32), 0.0, False, False, {}


class Unsure(Camp):
    """A game whose seed is not used."""

    def reset(self, seed=None, options=None):
        return super().reset(seed=int.from_bytes(os.urandom(4)))


class Certain(Camp):
    """A game that is always the same."""

    def reset(self, seed=None, options=None):
        return super().reset(seed=1)


class Columns(Tensors):
    """Rewards of another shape."""

    def step(self, action):
        obs, reward, *more = super().step(action)
        return obs, reward.unsqueeze(-1), *more


def test_games_of_pettingzoo_and_environments_that_step_tensors_are_played():
    for env in (Camp, Tensors):
        report = headrace.check_env(env)
        assert report.ok, report
        assert [(check.name, check.status) for check in report.checks] == [
            ("spaces", "ok"), ("play", "ok"), ("randomness", "ok"),
        ]  # fmt: skip
        assert int(re.search(r"(\d+) episodes ended", report.checks[1].done)[1]) > 8
    *_, chance = headrace.check_env(Unsure).checks
    assert chance.wrong == ("the same seed and actions give other observations or rewards.",)
    report = headrace.check_env(Certain)
    assert report.ok
    assert report.checks[-1].warnings[0].startswith("another seed gives the same")
    play, chance = headrace.check_env(Columns).checks[1:]
    assert "gave a reward as a tensor of (8, 1) torch.float32" in play.wrong[0]
    assert chance.missing == "stepping fails"
    (few,) = headrace.check_env(Camp, num_steps=1).checks[1].warnings
    assert few.startswith("no episode ended")


class Breaking(gymnasium.Env):
    """Fails where Gymnasium's checker does not come."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.random(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 50:
            raise RuntimeError("at 50")
        return self.np_random.random(1, np.float32), 0.0, False, False, {}


def test_environments_of_gymnasium_s_form_are_played_too():
    spaces, play, chance, checker = headrace.check_env(Breaking).checks
    assert [spaces.status, play.status, chance.status] == ["ok", "wrong", "not checked"]
    assert "RuntimeError: at 50" in play.wrong[0]
    assert not checker.wrong
    assert headrace.check_env(Breaking, num_steps=40).ok


def test_what_cannot_be_asked_for():
    with pytest.raises(headrace.HeadraceError, match="is made already"):
        headrace.check_env(Walk(), {"size": 3})
    with pytest.raises(headrace.HeadraceError, match="expected 1 or more"):
        headrace.check_env(Walk, num_steps=-1)
