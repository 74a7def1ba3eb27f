"""What a compiler makes wider than an environment's author declared, and where: `kernel.wider`."""

import math
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from headrace.envs.kernels import compiler
from headrace.envs.kernels.env import KernelEnv
from headrace.envs.kernels.library.classic_control import (
    Acrobot,
    CartPole,
    MountainCar,
    MountainCarContinuous,
    Pendulum,
)
from headrace.envs.kernels.library.tag_continuous import TagContinuous
from headrace.envs.kernels.library.tag_gridworld import TagGridWorld
from tests.envs.kernels.support import vector_of
from tests.marks import repeats

GRAVITY = 9.8
HALF = np.float32(0.5)


def clip(x, most):  # wide: clip: most is float64
    return min(x, most)  # wide: clip: a value is float64


class Wide(KernelEnv):
    """Wider than declared in each way that there is, and narrowed again in others."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    agents = {"player": 2}  # noqa: RUF012
    state = {"x": np.float32}  # noqa: RUF012
    phases = ("step_env", "pay", "observe")

    @staticmethod
    def reset_env(w, e):
        w.x[e] = 0.5
        w.x[e] = np.float32(0.5) * w.x[e] if w.x[e] > HALF else np.float32(e)

    @staticmethod
    def step_env(w, e):
        x = 0.5 * w.x[e]  # wide: Wide.step_env: x is float64
        w.x[e] = HALF * np.float32(x)
        w.x[e] += GRAVITY  # wide: Wide.step_env: a value is float64
        w.x[e] = 2 * w.x[e]  # wide: Wide.step_env: a value is float64
        if w.x[e] > 0.1:  # wide: Wide.step_env: a value is float64
            w.x[e] = clip(w.x[e], np.float64(1))  # wide: Wide.step_env: a value is float64

    @staticmethod
    def pay(w, e, i):
        w.reward[e, i] = math.sqrt(i)  # wide: Wide.pay: a value is float64

    @staticmethod
    def observe(w, e, i, out):
        out[0] = w.x[e]


class DeclaredField(Wide):
    state = {"x": np.float32, "exact": np.float64}  # noqa: RUF012


class DeclaredConstant(Wide):
    constants = {"exact": np.float64(1)}  # noqa: RUF012


def wider(env):
    vector, _ = vector_of(env, 1, 1, "python")
    findings = compiler.find_float64(env, vector.w) or []
    print(*findings, sep="\n")
    return findings


LIBRARY = [Acrobot, MountainCar, MountainCarContinuous, Pendulum]


@repeats("env", [CartPole, TagGridWorld, *LIBRARY, TagContinuous], keep=2)
def test_library_has_no_wider_types_than_declared(env):
    assert wider(env()) == []


def test_wider_values_are_reported_with_their_line():
    findings = wider(Wide())
    lines = Path(__file__).read_text().splitlines()
    expected = [n for n, line in enumerate(lines, 1) if line.endswith(" is float64")]
    assert [report.split(": ")[0] for report in findings] == [f"{__file__}:{n}" for n in expected]
    for report, n in zip(findings, expected, strict=True):
        what = lines[n - 1].split("# wide: ")[1]
        assert report == f"{__file__}:{n}: {what}: {lines[n - 1].strip()}"


@pytest.mark.parametrize("env", [DeclaredField, DeclaredConstant])
def test_declared_float64_is_not_reported(env):
    assert wider(env()) == []
