"""A small game with an integer state, and helpers that step kernel environments."""

import gymnasium
import numpy as np
import torch

from headrace import batch
from headrace.batch import each
from headrace.envs.api import VectorContext
from headrace.envs.kernels.env import KernelEnv, uniform
from headrace.envs.kernels.vector import KernelVector
from headrace.envs.spaces import specs


def add(a, b):
    """A function that the game's functions call: it must be compiled as well."""
    return a + b


class Ring(KernelEnv):
    """Agents walk on a ring of cells; one that lands on the bomb leaves, and the last one ends it.

    The bomb moves at random. Whoever stands alone gets 1, and all others are paid what they stand
    in: phases depend on each other, and one has a name that the program uses, too.
    """

    observation_space = gymnasium.spaces.Box(-1000, 1000, (4,), np.float32)
    action_space = gymnasium.spaces.MultiDiscrete([3, 2])
    max_episode_steps = 7
    agents = {"first": 2, "second": 1}  # noqa: RUF012
    state = {"bomb": np.int32, "crowd": (np.int32, (9,))}  # noqa: RUF012
    agent_state = {"at": np.int32}  # noqa: RUF012
    scratch = ("crowd",)
    resets = ("reset_env", "place")
    phases = ("clear", "walk", "observe", "count", "pay", "blow", "end")

    def __init__(self, cells=9):
        pay = np.array([0, 1, 4, 9], np.float32)  # by how many stand in a cell
        self.constants = {"cells": np.int32(cells), "pays": pay}

    @staticmethod
    def reset_env(w, e):
        w.bomb[e] = int(uniform(w, e, 0) * np.float32(w.cells))

    @staticmethod
    def place(w, e, i):
        w.at[e, i] = int(uniform(w, e, 1 + i) * np.float32(w.cells))

    @staticmethod
    def clear(w, e):
        for cell in range(w.cells):
            w.crowd[e, cell] = 0
        w.bomb[e] = int(uniform(w, e, 0) * np.float32(w.cells))

    @staticmethod
    def walk(w, e, i):
        if w.alive[e, i]:
            stride = w.action[e, i, 0] * (1 + w.action[e, i, 1])
            w.at[e, i] = add(w.at[e, i], stride) % w.cells

    @staticmethod
    def observe(w, e, i, out):
        out[0] = w.at[e, i]
        out[1] = w.bomb[e]
        out[2] = w.step[e]
        out[3] = w.alive[e, i]

    @staticmethod
    def count(w, e):
        for i in range(3):
            if w.alive[e, i]:
                w.crowd[e, w.at[e, i]] += 1

    @staticmethod
    def pay(w, e, i):
        if w.alive[e, i]:
            w.reward[e, i] = w.pays[w.crowd[e, w.at[e, i]]]

    @staticmethod
    def blow(w, e, i):
        if w.alive[e, i] and w.at[e, i] == w.bomb[e]:
            w.reward[e, i] -= np.float32(10)
            w.alive[e, i] = False

    @staticmethod
    def end(w, e):
        alone = True
        for i in range(3):
            alone = alone and not w.alive[e, i]
        w.terminated[e] = alone


def spec_of(env):
    return specs.read_kernel(type(env).__name__, env)


def vector_of(env, n, num_steps, target="cpu", seed=3, parts=(), autoreset=True, **kwargs):
    """Return a vector, and a fragment for each part."""
    spec = spec_of(env)
    context = VectorContext(spec, np.arange(n), seed, parts=tuple(parts), **kwargs)
    vector = KernelVector(env, context, target=target, autoreset=autoreset)
    sizes = [size for _, size in parts] or [env.num_agents]
    fragments = [
        batch.allocate(batch.columns(spec, {}, num_steps, n * size), device=vector.device)
        for size in sizes
    ]
    return vector, fragments


def act_at_random(fragments, spec, rng):
    """Fill all actions."""
    for fragment in fragments:
        shape = tuple(fragment.action.shape)
        if spec.action.kind == "box":
            action = rng.normal(size=shape).astype(np.float32)
        else:
            most = spec.action.nvec[0] if spec.action.kind == "discrete" else spec.action.nvec
            action = rng.integers(0, most, shape)
        fragment.action.copy_(torch.from_numpy(action))


def run(vector, fragments):
    vector.bind(*fragments)
    for t in range(fragments[0].num_steps):
        vector.step(t)
    return vector.finish()


def played(env, n, num_steps, target, num_fragments=2, **kwargs):
    """Step fragments of random actions; return the contents of each, and its episodes."""
    vector, fragments = vector_of(env, n, num_steps, target, **kwargs)
    rng = np.random.default_rng(5)
    seen = []
    for _ in range(num_fragments):
        act_at_random(fragments, vector.spec, rng)
        episodes = run(vector, fragments)
        seen.append(([contents(f) for f in fragments], episodes))
    vector.close()
    return seen


def contents(fragment):
    """Return all columns that a vector writes, and the used final observations in order."""
    names = ("obs", "action", "reward", "terminated", "truncated", "valid", "env_id")
    actual = {name: each(lambda o: o.cpu().clone(), getattr(fragment, name)) for name in names}
    obs, step, row = (item.cpu() for item in fragment.finals())
    used = step < fragment.num_steps
    order = torch.argsort(step[used] * fragment.num_envs + row[used])
    for name, column in (("final_obs", obs), ("final_step", step), ("final_row", row)):
        actual[name] = column[used][order].clone()
    return actual


def assert_equal(one, other):
    """Assert that two results of `played` are equal to the bit."""
    for (fragments, episodes), (others, other_episodes) in zip(one, other, strict=True):
        assert episodes == other_episodes
        for actual, expected in zip(fragments, others, strict=True):
            for name, column in actual.items():
                assert torch.equal(column, expected[name]), name
