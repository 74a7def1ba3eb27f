"""The classic-control kernel environments: as Gymnasium's, and the same whatever runs them.

Floats are compared one step at a time from a shared state, since small differences grow. Where the
quantity that decides on an end, or on hitting the wall, is within 1e-5 of its threshold, rounding
may decide otherwise: such states are counted and printed, are few, and are not compared.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import gymnasium
import numpy as np
import pytest
import torch

from headrace.envs.kernels.env import KernelEnv
from headrace.envs.kernels.library.classic_control import (
    Acrobot,
    CartPole,
    MountainCar,
    MountainCarContinuous,
    Pendulum,
)
from tests.envs.kernels.support import act_at_random, run, vector_of
from tests.marks import repeats

TOLERANCE = 1e-5
PI = math.pi


def near_cartpole(state, by):
    x, theta = np.abs(state[:, 0]), np.abs(state[:, 2])
    return (np.abs(x - 2.4) < by) | (np.abs(theta - math.radians(12)) < by)


def near_acrobot(state, by):
    height = -np.cos(state[:, 0]) - np.cos(state[:, 0] + state[:, 1])
    return np.abs(height - 1) < by


def near_car(goal, state, by):
    position, velocity = state.T
    top = (np.abs(position - goal) < by) & (velocity > -by)
    turning = (position > goal - by) & (np.abs(velocity) < by)
    wall = (position > -1.2) & (position < -1.2 + by)
    return top | turning | wall


class Twin(NamedTuple):
    """A kernel environment, and its counterpart in Gymnasium.

    States are in the order of `env.state`. random: bounds of random states; starts: of the first
    states; brink: a state in which the episode ends with the next step, for good if it can. near:
    which states are as near to a decision: `[n]` bool. calm: an action for an observation, with
    which no episode ends before the limit. num_angles: so many states are angles modulo 2 pi.
    """

    env: type[KernelEnv]
    random: list[tuple[float, float]]
    starts: list[tuple[float, float]]
    brink: tuple[float, ...]
    near: Callable
    calm: Callable = lambda obs: torch.zeros(len(obs), 1)
    num_angles: int = 0


def balance(obs):
    return (obs @ torch.tensor([0.05, 0.1, 1.0, 0.3]) > 0).long()


TWINS = {
    "CartPole-v1": Twin(
        CartPole,
        random=[(-2.4, 2.4), (-3, 3), (-0.209, 0.209), (-3, 3)],
        starts=[(-0.05, 0.05)] * 4,
        brink=(2.39, 2, 0, 0),
        near=near_cartpole,
        calm=balance,
    ),
    "Acrobot-v1": Twin(
        Acrobot,
        # Faster still, a step of the integrator makes a float32's rounding a thousand times larger:
        # up to the highest speeds that there can be (4 pi, 9 pi), 4 of 1,000 states miss 1e-5.
        random=[(-PI, PI), (-PI, PI), (-6, 6), (-10, 10)],
        starts=[(-0.1, 0.1)] * 4,
        brink=(2.8, 0.1, 0.5, 0),
        near=near_acrobot,
        calm=lambda obs: torch.ones(len(obs), dtype=torch.int64),
        num_angles=2,
    ),
    "MountainCar-v0": Twin(
        MountainCar,
        random=[(-1.2, 0.6), (-0.07, 0.07)],
        starts=[(-0.6, -0.4), (0, 0)],
        brink=(0.48, 0.05),
        near=lambda state, by: near_car(0.5, state, by),
        calm=lambda obs: torch.ones(len(obs), dtype=torch.int64),
    ),
    "MountainCarContinuous-v0": Twin(
        MountainCarContinuous,
        random=[(-1.2, 0.6), (-0.07, 0.07)],
        starts=[(-0.6, -0.4), (0, 0)],
        brink=(0.43, 0.05),
        near=lambda state, by: near_car(0.45, state, by),
    ),
    "Pendulum-v1": Twin(
        Pendulum,
        random=[(-PI, PI), (-8, 8)],
        starts=[(-PI, PI), (-1, 1)],
        brink=(3.1, 8),
        near=lambda state, by: np.zeros(len(state), bool),
        num_angles=1,
    ),
}
each_twin = pytest.mark.parametrize("name", TWINS)


class Steps(NamedTuple):
    """One step of many environments. Values that a reset has overwritten are NaN."""

    before: np.ndarray
    action: np.ndarray
    after: np.ndarray
    obs: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


def state_of(vector, env):
    return np.stack([vector.world[name].cpu().numpy() for name in env.state], 1).astype(float)


def set_state(vector, env, state):
    for name, column in zip(env.state, state.T, strict=True):
        vector.world[name].copy_(torch.from_numpy(column))


def step(vector, fragment, t, env):
    """Step t of a vector; the last row of its observations is the next's first."""
    before = state_of(vector, env)
    vector.step(t)
    ends = [getattr(fragment, name)[t].numpy().copy() for name in ("terminated", "truncated")]
    after, obs = state_of(vector, env), fragment.obs[t + 1].numpy().astype(float)
    after[ends[0] | ends[1]] = np.nan
    obs[ends[0]] = np.nan
    final, at, row = fragment.finals()
    obs[row[at == t]] = final[at == t]
    action = vector.world["action"].numpy().copy()
    return Steps(before, action, after, obs, fragment.reward[t].numpy().copy(), *ends)


def random_states(twin, n):
    bounds = np.transpose(twin.random)
    return np.random.default_rng(1).uniform(*bounds, (n, len(twin.random))).astype(np.float32)


def states_before_decisions(twin, n):
    """Their next states lie on both sides of thresholds, most within 0.002 (if there are any)."""
    states = random_states(twin, 200_000)
    actual = states[twin.near(from_states(twin, "cpu", states).after, 1e-3)]
    if not len(actual):
        return states[:n]
    rng = np.random.default_rng(4)
    around = np.resize(actual, (n, actual.shape[1])) + rng.normal(scale=1e-3, size=(n, 1))
    return np.clip(around, *np.transpose(twin.random)).astype(np.float32)


def from_states(twin, target, states):
    """A step of random actions from each state; the last one before the limit for some of them."""
    env, n = twin.env(), len(states)
    vector, (fragment,) = vector_of(env, n, 1, target)
    act_at_random([fragment], vector.spec, np.random.default_rng(1))
    vector.bind(fragment)
    set_state(vector, env, states)
    vector.world["step"][: n // 10] = env.max_episode_steps - 1
    steps = step(vector, fragment, 0, env)
    vector.close()
    return steps


def along_play(twin, n, num_fragments, num_steps):
    """The last step of each fragment of play in which most actions are those of the step before."""
    env, rng = twin.env(), np.random.default_rng(2)
    vector, (fragment,) = vector_of(env, n, num_steps)
    seen = []
    for _ in range(num_fragments):
        act_at_random([fragment], vector.spec, rng)
        for t in range(1, num_steps):
            same = torch.from_numpy(rng.random(n) < 0.9)
            fragment.action[t][same] = fragment.action[t - 1][same]
        vector.bind(fragment)
        for t in range(num_steps - 1):
            vector.step(t)
        seen.append(step(vector, fragment, num_steps - 1, env))
        vector.finish()
    vector.close()
    return Steps(*map(np.concatenate, zip(*seen, strict=True)))


def of_gymnasium(name, steps):
    """Take the same steps in Gymnasium's environment, in float64."""
    env = gymnasium.make(name).unwrapped
    env.reset(seed=0)
    actual = []
    actions = steps.action.tolist() if steps.action.ndim == 1 else steps.action
    for state, action in zip(steps.before, actions, strict=True):
        env.state, env.steps_beyond_terminated = state, None
        obs, reward, terminated, _, _ = env.step(action)
        actual.append((env.state, obs, reward, terminated))
    env.close()
    after, obs, reward, terminated = (np.array(item) for item in zip(*actual, strict=True))
    return Steps(steps.before, steps.action, after, obs, reward, terminated, steps.truncated)


def far_apart(actual, expected):
    """Return where values differ by more than 1e-5, relatively beyond 1; NaN always differs."""
    return ~(np.abs(actual - expected) <= TOLERANCE * np.maximum(1, np.abs(expected)))


def assert_same(actual, expected, twin):
    """Equal but for those near a decision: how many these are, and how many of them differ."""
    near = twin.near(expected.after, TOLERANCE) | twin.near(actual.after, TOLERANCE)
    other = actual.terminated != expected.terminated
    assert not (other & ~near).any()
    assert not (far_apart(actual.reward, expected.reward) & ~near).any()
    goes_on = ~near & ~actual.terminated
    assert not far_apart(actual.obs, expected.obs)[goes_on].any()
    after, angles = actual.after.copy(), slice(0, twin.num_angles)
    turns = np.rint((after[:, angles] - expected.after[:, angles]) / (2 * PI))
    after[:, angles] -= 2 * PI * turns
    assert not far_apart(after, expected.after)[goes_on & ~actual.truncated].any()
    return near.sum(), (near & other).sum()


@repeats("name", TWINS)
def test_step_equals_gymnasium_s(name):
    twin = TWINS[name]
    states = [random_states(twin, 45_000), states_before_decisions(twin, 5_000)]
    parts = from_states(twin, "cpu", np.concatenate(states)), along_play(twin, 2_500, 20, 20)
    steps = Steps(*map(np.concatenate, zip(*parts, strict=True)))
    near, other = assert_same(steps, of_gymnasium(name, steps), twin)
    ended, cut = steps.terminated.mean(), steps.truncated.mean()
    print(f"{name}: {len(steps.before)} states, {near} of them near a decision, {other} differ;")
    print(f"{ended:.2%} terminated, {cut:.2%} truncated")
    assert near < 100
    assert ended > 0.01 or name == "Pendulum-v1"
    assert cut > 0.01
    if "Mountain" in name:
        assert (steps.after[:, 0] == np.float32(-1.2)).sum() > 100  # at the wall


@each_twin
def test_spaces_and_time_limit_equal_gymnasium_s(name):
    env, twin = TWINS[name].env(), TWINS[name]
    expected = gymnasium.make(name)
    assert env.observation_space == expected.observation_space
    assert env.action_space == expected.action_space
    limit = expected.spec.max_episode_steps
    vector, (fragment,) = vector_of(env, 8, limit + 1)
    vector.bind(fragment)
    for t in range(limit + 1):
        fragment.action[t] = twin.calm(fragment.obs[t])
        vector.step(t)
    assert not fragment.terminated.any()
    assert fragment.truncated[limit - 1].all()
    assert fragment.truncated.sum() == 8
    assert [episode.num_steps for episode in vector.finish()] == [limit] * 8
    assert vector.world["step"].tolist() == [1] * 8
    vector.close()


def assert_uniform(sample, bounds):
    """Each column of a sample fills its bounds, evenly.

    By chance, 1 of 22,000 leaves more room at a bound, and 7 of 10,000 are less even (Kolmogorov
    and Smirnov); the seeds are fixed.
    """
    quantiles = (np.arange(len(sample)) + 0.5) / len(sample)
    for column, (low, high) in zip(sample.T, bounds, strict=True):
        assert (column >= np.float32(low)).all()
        assert (column <= np.float32(high)).all()
        if low < high:
            actual = np.sort((column - low) / (high - low))
            assert max(actual[0], 1 - actual[-1]) < 10 / len(sample)
            assert np.abs(actual - quantiles).max() < 2 / math.sqrt(len(sample))


@repeats("name", TWINS, keep=2)
def test_initial_states_have_gymnasium_s_distribution(name):
    env, twin, n = TWINS[name].env(), TWINS[name], 20_000
    other = gymnasium.make(name).unwrapped
    other.reset(seed=0)
    starts = []
    for _ in range(2_000):
        other.reset()
        starts.append(other.state)
    assert_uniform(np.array(starts), twin.starts)
    vector, (fragment,) = vector_of(env, n, 1)
    fragment.action.fill_(0)
    vector.bind(fragment)
    first = state_of(vector, env)
    vector.world["step"].fill_(env.max_episode_steps - 1)
    run(vector, [fragment])
    assert fragment.truncated.all()
    second = state_of(vector, env)
    vector.close()
    for sample in (first, second):
        assert_uniform(sample, twin.starts)
    varied = [low < high for low, high in twin.starts]
    related = np.corrcoef(np.concatenate([first[:, varied], second[:, varied]], 1).T)
    assert np.abs(related - np.eye(len(related))).max() < 5 / math.sqrt(n)


@repeats("name", TWINS, keep=2)
@repeats(("target", "n"), [("cpu", 2_000), ("cuda", 20)])
def test_step_is_equal_on_all_targets(name, target, n):
    twin = TWINS[name]
    states = random_states(twin, n)
    actual, expected = (from_states(twin, item, states) for item in (target, "python"))
    assert np.array_equal(actual.before, expected.before)
    assert np.array_equal(actual.truncated, expected.truncated)
    assert_same(actual, expected, twin)
    assert expected.truncated.any()


def played(twin, target, num_steps=9):
    """Few environments: one about to terminate, two about to be truncated, one of them both."""
    env, n = twin.env(), 4
    vector, (fragment,) = vector_of(env, n, num_steps, target)
    act_at_random([fragment], vector.spec, np.random.default_rng(3))
    vector.bind(fragment)
    state = state_of(vector, env).astype(np.float32)
    state[:2] = np.float32(twin.brink)
    set_state(vector, env, state)
    vector.world["step"][1] = env.max_episode_steps - 1
    vector.world["step"][2] = env.max_episode_steps - 4
    for t in range(num_steps):
        vector.step(t)
    episodes = vector.finish()
    vector.close()
    return fragment, episodes


@repeats("name", TWINS, keep=2)
@repeats("target", ["cpu", "cuda"])
def test_episodes_are_equal_on_all_targets(name, target):
    (actual, episodes), (expected, others) = (
        played(TWINS[name], item) for item in (target, "python")
    )
    for column in ("terminated", "truncated", "valid", "action"):
        assert torch.equal(getattr(actual, column), getattr(expected, column))
    close = {"rtol": TOLERANCE, "atol": TOLERANCE}
    torch.testing.assert_close(actual.obs[1:], expected.obs[1:], **close)
    torch.testing.assert_close(actual.reward, expected.reward, **close)
    assert [episode[:2] for episode in episodes] == [other[:2] for other in others]
    ends = name != "Pendulum-v1"
    assert expected.terminated[0].tolist() == [ends, ends, False, False]
    assert expected.truncated[:4].nonzero().tolist() == [[3, 2]] if ends else [[0, 1], [3, 2]]
