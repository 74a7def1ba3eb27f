"""`headrace check-env`: correct environments pass, and each kind of error is reported.

Checks run lazily, one after the other, so most of these tests need no compiler.
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
from headrace.envs.check import kernel_checks
from headrace.envs.check.checker import check_kernel
from headrace.envs.kernels import compiler
from headrace.envs.kernels.env import KernelEnv, uniform
from headrace.envs.kernels.library.classic_control import CartPole
from tests import python
from tests.envs.games.support import Camp
from tests.envs.kernels.support import Ring
from tests.envs.test_tensor_vector import Tensors
from tests.marks import repeats

KERNEL_CHECKS = [
    "class", "python", "types", "play", "states", "resets", "agents", "randomness", "ends", "cpu",
    "gpu",
]  # fmt: skip
ONE, HALF = np.float32(1), np.float32(0.5)
_GENERATOR = np.random.default_rng(0)
_CALLS = []


def line(marker):
    """`FILE:LINE: ` of the line of this file that ends with `# marker`."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (n for n, text in enumerate(lines, 1) if text.endswith(f"# {marker}"))
    return f"{__file__}:{number}: "


def checked(env, until="gpu"):
    """Return checks by name, up to and including `until`."""
    last = KERNEL_CHECKS.index(until) + 1
    checks = {check.name: check for check in itertools.islice(check_kernel(env), last)}
    print(*checks.values(), sep="\n")
    return checks


def interpreted(env, check):
    """Run one of the checks that need the interpreted play only."""
    case = kernel_checks.make_case(env, 0, 0)
    kernel_checks.check_python(case)
    result = check(case)
    print(result)
    return result


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
def test_correct_kernel_environments_pass_every_check(env):
    printed = []
    report = headrace.check_env(env, say=printed.append)
    assert report.ok, report
    assert [check.name for check in report.checks] == KERNEL_CHECKS
    assert {check.status for check in report.checks} <= {"ok", "warning"}
    assert [*printed, report.summary] == str(report).splitlines()
    by_name = {check.name: check for check in report.checks}
    assert ("CUDA simulator" in by_name["gpu"].missing) == (not compiler.has_gpu())
    assert report.to_json()["checks"][0]["status"] == "ok"


def test_num_steps_sets_the_length_of_the_play():
    checks = check_kernel(Walk(), num_steps=4, seed=1)
    assert next(checks).status == "ok"
    assert "over 4 steps" in next(checks).done


class Declared(Walk):
    """Every declaration is wrong."""

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


def test_every_wrong_declaration_is_reported():
    report = headrace.check_env(Declared())
    of_class, *others = report.checks
    expected = [
        "The observation space of the kernel environment Declared",
        "agents['nobody'] is 0",
        "max_episode_steps is 1.5",
        "state['reward']: the name is in use, by every world",
        "state['x-1']: expected a name",
        "state['z'] is complex64: expected one of bool,",
        "state['s'] has the shape 3",
        "agent_state['z']: the name is in use, by state",
        "constants['g'] is 9.8: expected a number with a dtype, np.float32(9.8)",
        "scratch names 'nothing'",
        "resets is the string 'reset_env': expected names in a tuple",
        "phases names observe 0 times",
        "Declared.step_env(w, e, i, j): expected step_env(w, e)",
        "Declared.own: expected a static method",
        "Declared.missing: expected a static method, and there is none",
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
    ("env", "message", "marker"),
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
def test_errors_of_the_interpreted_play_are_reported_with_their_line(env, message, marker):
    check = checked(env(), "python")["python"]
    assert message in "".join(check.wrong)
    assert line(marker) in "".join(check.wrong + check.warnings)


class Raises(Walk):
    @staticmethod
    def step_env(w, e):
        w.x[e, 1] = ONE  # raises


def test_an_exception_is_reported_and_later_checks_are_skipped():
    report = headrace.check_env(Raises)
    (wrong,) = report.checks[1].wrong
    assert wrong.startswith("step_env raised IndexError: too many indices for array: array is 1-")
    assert line("raises") in wrong
    assert [check.status for check in report.checks[2:]] == ["not checked"] * 9


class Apart(Walk):
    """NumPy keeps 8 bits, a compiler does not; and 0.3 as float32 is not 0.3 as float64."""

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


def test_differences_of_the_compiled_play_are_wrong_unless_rounding_explains_them():
    checks = checked(Apart(), "cpu")
    python, cpu = checks["python"], checks["cpu"]
    assert python.warnings[0].startswith("overflow encountered")
    assert line("overflows") in python.warnings[0]
    match = re.fullmatch(
        r"terminated after step (\d+), env \d+: True in plain Python, False on the CPU",
        cpu.wrong[0],
    )
    assert int(match[1]) % 6 == 5
    match = re.fullmatch(
        r"rounding decides: w.far after step (\d+), env \d+: 2 in plain Python, 1 on the CPU",
        cpu.notes[0],
    )
    assert int(match[1]) % 6 == 3
    assert "rounding explains" in cpu.done


class Left(Walk):
    @staticmethod
    def reset_env(w, e):
        w.n[e] += 1  # left
        w.x[e] = uniform(w, e, 0)


class LastAction(Walk):
    """The first observation contains the last action of the previous episode."""

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
    ("env", "message", "marker"),
    [
        (Left, "reset_env: reads n (number 0 of 1), which was not written since the ep", "left"),
        (LastAction, "observe: reads action (number 0 of 1), which was not", "last action"),
        (Scratch, "n (number 0 of 1), which was not written since the step began", "scratch"),
    ],
)
def test_reads_of_numbers_from_an_earlier_episode_or_step_are_reported(env, message, marker):
    (wrong,) = interpreted(env(), kernel_checks.check_resets).wrong
    assert message in wrong
    assert line(marker) in wrong


class Sees(Team):
    """The first agent reads positions before the others move."""

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
    """Allowed: all agents write the same value."""

    @staticmethod
    def walk(w, e, i):
        w.at[e, i] += w.action[e, i]
        if w.at[e, i] > 3:
            w.terminated[e] = True


@repeats(
    ("env", "message", "markers"),
    [
        (Sees, "walk: agent 0 reads at (number 1 of 3), which agent 1 writes", ("sees", "walks")),
        (Adds, "walk: agent 1 reads total (number 0 of 1), which agent 0 writes", ("adds",)),
        (LastWins, "place: agents 0 and 1 both write total (number 0 of 1): 0 and 1", ("wins",)),
    ],
)
def test_dependent_agents_of_one_phase_are_reported(env, message, markers):
    wrong = interpreted(env(), kernel_checks.check_agents).wrong
    assert any(
        message in text and all(line(marker) in text for marker in markers) for text in wrong
    )


def test_independent_agents_pass():
    for env in (Team(), AllSayTheSame()):
        assert interpreted(env, kernel_checks.check_agents).status == "ok"


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
    """The wrong name is in code that random play does not reach."""

    @staticmethod
    def step_env(w, e):
        if w.n[e] > 0:
            w.n[e] = w.nothing[e]  # no name


class Crowded(Team):
    """All agents begin at the same place, since all draw the same number."""

    @staticmethod
    def place(w, e, i):
        w.at[e, i] = int(uniform(w, e, 3) * np.float32(5))  # drawn


class Strict(Walk):
    """Raises in code that random play does not reach."""

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
    """`draw` uses a field that does not exist."""

    def draw(self, world):
        return np.full((4, 4, 3), world["m"], np.uint8)  # m


class Grey(Walk):
    """`draw` returns a picture without colors."""

    def draw(self, world):
        return np.zeros((4, 4))


class Whole(Walk):
    """Adds to a part of an array at once."""

    state = {**Walk.state, "many": (np.float32, (3,))}  # noqa: RUF012

    @staticmethod
    def step_env(w, e):
        w.many[e] += ONE


def test_draws_exceptions_rewards_pictures_and_lists_are_reported():
    python = checked(Crowded(), "python")["python"]
    assert python.status == "warning"
    assert "place: draw 3 is drawn again in the same step" in python.warnings[0]
    assert line("drawn") in python.warnings[0]
    assert "uniform(w, e, 2 * i)" in python.remedies[-1]
    (raised,) = checked(Strict(), "types")["types"].warnings
    assert raised.startswith("raises, which a GPU ignores: " + line("too far"))
    warnings = checked(Unpaid(), "play")["play"].warnings
    assert any("every reward of the random play was 0" in text for text in warnings)
    (wrong,) = checked(Drawn(), "python")["python"].wrong
    assert "draw raised KeyError: 'm'" in wrong
    assert line("m") in wrong
    assert "(draw's argument has: " in wrong
    (wrong,) = checked(Grey(), "python")["python"].wrong
    assert wrong.startswith("draw gave float64 (4, 4): expected an array of uint8")
    assert "makes a list or an array" in checked(Whole(), "types")["types"].wrong[0]
    (wrong,) = checked(NoNumber(), "types")["types"].wrong
    assert wrong.splitlines() == [
        "NoNumber.step_env does not compile: it makes a list or an array (as w.x[e] + 1 does, of "
        "several numbers)",
        f"  {line('list')}seen = [w.n[e]]  # list",
    ]


def test_wider_types_and_compile_errors_are_reported_with_their_line():
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
        _CALLS.append(e)
        w.n[e] = len(_CALLS)
        w.x[e] = uniform(w, e, 0)


class SeedAlone(Walk):
    """All environments and episodes of a run are equal; with `chance` 0, those of all runs."""

    def __init__(self, chance):
        self.constants = {"chance": np.float32(chance)}

    @staticmethod
    def reset_env(w, e):
        w.n[e] = 0
        w.x[e] = w.chance * np.float32(w.seed % np.uint64(1000))

    @staticmethod
    def step_env(w, e):
        w.x[e] += HALF if w.action[e] == 1 else -HALF


def test_wrong_randomness_and_counts_are_reported():
    checks = checked(OwnGenerator())
    assert [text[:60] for text in checks["randomness"].wrong] == [
        "the same seed gives other episodes (interpreted): w.x after ",
        "the same seed gives other episodes (on the CPU): w.x after t",
    ]
    assert checks["cpu"].status == checks["gpu"].status == "not checked"
    limit, early, counted = checks["ends"].wrong
    assert limit == "an episode had 8 steps, and max_episode_steps is 6."
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
    """Errors of many kinds, most of which appear after many steps.

    After a thousand steps agents read others that move in the same phase. The first agent leaves
    and comes back. Agents that left are rewarded. When all have left, the episode goes on, without
    a time limit. Positions leave the declared bounds, and a total depends on the previous
    environment (in a vector of one, on itself). Actions leave the space.
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
def test_errors_after_many_steps_are_reported():
    checks = checked(Astray(), "ends")
    names = ("play", "agents", "randomness", "ends")
    play, agents, randomness, ends = (checks[name] for name in names)
    (wrong,) = agents.wrong
    assert line("late") in wrong
    assert play.wrong == (
        "action after step 1, env 0, agent 0 is 7, outside of the space: Discrete(2).",
    )
    assert play.warnings[0].startswith("no episode of the random play ended")
    assert re.fullmatch(
        r"observation\[1\] after step \d+, env \d+, agent 0 is 1\d.0, and the space has -9.0 to "
        r"9.0 there.",
        play.warnings[1],
    )
    (wrong,) = randomness.wrong
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
def test_differences_on_the_simulated_gpu_are_reported(tmp_path):
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


def test_unknown_environments_and_arguments_are_refused_by_the_command(capsys):
    assert "check-env" in run_verb(capsys, "--help", code=0)
    assert "no module 'nowhere'" in run_verb(capsys, "check-env", "nowhere:Nothing", code=2)
    output = run_verb(capsys, "check-env", "tests.envs.check.test_checker:Wlak", code=2)
    assert "no callable 'Wlak'" in output
    assert "tests.envs.check.test_checker:Walk" in output
    output = run_verb(
        capsys, "check-env", "tests.envs.check.test_checker:Walk", "--env-kwargs", "size=3", code=2
    )
    assert "does not take the arguments {'size': 3}" in output


def run_verb(capsys, *argv, code):
    assert _main([*argv]) == code
    return "".join(capsys.readouterr())


def test_gymnasium_s_checker_is_part_of_the_report(capsys):
    output = run_verb(capsys, "check-env", "CartPole-v1", code=0)
    assert "A Box observation space minimum value is -infinity" in output
    assert "CartPole-v1: nothing is wrong (2 warnings)." in output
    output = run_verb(capsys, "check-env", "tests.envs.check.test_checker:OutOfBounds", code=1)
    assert "wrong       gymnasium" in output
    assert "AssertionError: The" in output
    assert "something is wrong: spaces, gymnasium" in output


def test_gymnasium_s_checker_knows_no_masks(capsys):
    """An environment may refuse what its mask forbids."""
    output = run_verb(capsys, "check-env", "tests.envs.check.test_checker:Forbidding", code=0)
    assert "it plays forbidden actions, and the environment says: AssertionError: no" in output
    assert "nothing is wrong" in output


class Forbidding(gymnasium.Env):
    """One action is allowed, another one in each step."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(500)

    def _seen(self):
        return np.zeros(1, np.float32), {"action_mask": np.arange(500) == self.allowed}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.allowed, self.steps = 0, 0
        return self._seen()

    def step(self, action):
        assert action == self.allowed, "no"
        self.allowed, self.steps = (self.allowed + 3) % 500, self.steps + 1
        obs, info = self._seen()
        return obs, 1.0, self.steps == 10, False, info


class OutOfBounds(gymnasium.Env):
    """Observations are outside of the space, and no policy here supports the actions."""

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


@pytest.mark.more
def test_pettingzoo_and_tensor_environments_are_stepped():
    for env in (Camp, Tensors):
        report = headrace.check_env(env)
        assert report.ok, report
        assert [(check.name, check.status) for check in report.checks] == [
            ("spaces", "ok"), ("play", "ok"), ("randomness", "ok"),
        ]  # fmt: skip
        assert int(re.search(r"(\d+) episodes ended", report.checks[1].done)[1]) > 8
    *_, randomness = headrace.check_env(Unsure).checks
    assert randomness.wrong == ("the same seed and actions give other observations or rewards.",)
    report = headrace.check_env(Certain)
    assert report.ok
    assert report.checks[-1].warnings[0].startswith("another seed gives the same")
    play, randomness = headrace.check_env(Columns).checks[1:]
    assert "gave a reward as a tensor of (8, 1) torch.float32" in play.wrong[0]
    assert randomness.missing == "stepping fails"
    (few,) = headrace.check_env(Camp, num_steps=1).checks[1].warnings
    assert few.startswith("no episode ended")


class Breaking(gymnasium.Env):
    """Fails after more steps than Gymnasium's checker takes."""

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


def test_an_exception_of_a_gymnasium_environment_is_reported():
    spaces, play, randomness, checker = headrace.check_env(Breaking).checks
    assert [spaces.status, play.status, randomness.status] == ["ok", "wrong", "not checked"]
    assert "RuntimeError: at 50" in play.wrong[0]
    assert not checker.wrong
    assert headrace.check_env(Breaking, num_steps=40).ok


class Plain:
    """An environment that inherits nothing."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    num_open = 0

    def __init__(self):
        type(self).num_open += 1

    def reset(self, *, seed=None, options=None):
        self.rng = np.random.default_rng(seed)
        return self.rng.random(1, np.float32), {}

    def step(self, action):
        return self.rng.random(1, np.float32), 0.0, self.rng.random() < 0.1, False, {}

    def close(self):
        type(self).num_open -= 1


class PlainOutOfBounds(Plain):
    """No policy here supports its actions."""

    action_space = gymnasium.spaces.Text(3)


@pytest.mark.parametrize("env", [Plain, PlainOutOfBounds])
def test_an_environment_that_inherits_nothing_is_checked_without_gymnasium_s_checker(env):
    checks = headrace.check_env(env).checks
    assert checks[-1].name == "gymnasium"
    assert checks[-1].missing.startswith(f"{env.__name__} is no subclass of gymnasium.Env")
    assert not checks[-1].wrong
    assert not env.num_open


def test_environments_that_cannot_be_made_or_closed_are_reported(capsys):
    faulty = ("check-env", "headrace.envs.faulty:Faulty", "--env-kwargs")
    output = run_verb(capsys, *faulty, "faults=crash@close", code=1)
    assert "FaultyError: told to crash at close (0 steps so far)" in output
    assert "The environment failed while closing, headrace.envs.faulty:Faulty" in output
    assert "something is wrong: making (0 warnings)" in output
    output = run_verb(capsys, *faulty, "faults=crash@init", code=1)
    assert "something is wrong: making (0 warnings)" in output


class Stuck(Plain, gymnasium.Env):
    """Fails to close once a reset had options, which only Gymnasium's checker passes."""

    stuck = False

    def reset(self, *, seed=None, options=None):
        gymnasium.Env.reset(self, seed=seed)
        self.stuck |= options is not None
        return super().reset(seed=seed)

    def close(self):
        if self.stuck:
            raise RuntimeError("no door")


def test_a_failing_close_after_gymnasium_s_checker_is_reported():
    *others, checker = headrace.check_env(Stuck).checks
    assert not any(check.wrong for check in others)
    assert "RuntimeError: no door" in checker.wrong[-1]
    assert "failed while closing, Stuck, after Gymnasium's checker" in checker.wrong[-1]


def test_wrong_arguments_are_refused():
    with pytest.raises(headrace.HeadraceError, match="is an object already"):
        headrace.check_env(Walk(), {"size": 3})
    with pytest.raises(headrace.HeadraceError, match="expected 1 or more"):
        headrace.check_env(Walk, num_steps=-1)
    with pytest.raises(headrace.HeadraceError, match="seed=-1: expected 0 or more"):
        headrace.check_env(Walk, seed=-1)
