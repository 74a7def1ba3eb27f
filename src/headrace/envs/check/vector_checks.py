"""Checks of environments that are no kernel environments: random steps on the CPU, twice."""

from collections.abc import Iterator

import numpy as np
import torch

from headrace import batch
from headrace.batch import Fragment
from headrace.envs.api import VectorContext, VectorEnv
from headrace.envs.check.plays import random_actions
from headrace.envs.check.report import Check
from headrace.envs.factory import EnvMaker
from headrace.envs.vectors import device_vector, is_one_vector, make_vector
from headrace.errors import EnvError
from headrace.spec import Agents, Array, EnvSpec, Space

_NUM_ENVS, _NUM_STEPS = 8, 200
_REMEDY = "Draw all random numbers from a generator that reset(seed=...) seeds."


def vector_checks(maker: EnvMaker, spec: EnvSpec, num_steps: int, seed: int) -> Iterator[Check]:
    """Yield the checks `play` and `randomness`; see `check_env`."""
    num_steps = num_steps or _NUM_STEPS
    done = f"{_NUM_ENVS} environments stepped at random over {num_steps} steps"
    try:
        first, num_ended = _play(maker, spec, num_steps, seed, seed)
    except EnvError as error:
        yield Check("play", done, wrong=(str(error),))
        yield Check("randomness", missing="stepping fails")
        return
    few = "no episode ended: play longer (--num-steps), or make sure that episodes end."
    yield Check("play", f"{done}, {num_ended} episodes ended", warnings=() if num_ended else (few,))
    wrong: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    if not _are_equal(first, _play(maker, spec, num_steps, seed, seed)[0]):
        wrong = ("the same seed and actions give other observations or rewards.",)
    elif _are_equal(first, _play(maker, spec, num_steps, seed + 1, seed)[0]):
        warnings = ("another seed gives the same results: nothing is random, or seeds are unused.",)
    remedies = (_REMEDY,) if wrong or warnings else ()
    yield Check("randomness", "the same seed twice, and another one", wrong, warnings, remedies)


def _play(
    maker: EnvMaker, spec: EnvSpec, num_steps: int, seed: int, action_seed: int
) -> tuple[list[Array], int]:
    """Return the columns of all fragments, and the number of ended episodes; EnvError."""
    parts = [Agents(i, 1) for i in range(spec.num_agents)]  # each may have its own spaces
    context = VectorContext(spec, np.arange(_NUM_ENVS), seed, worker="check", parts=tuple(parts))
    vector: VectorEnv = (
        device_vector(maker, context, torch.device("cpu"))
        if is_one_vector(maker, spec)
        else make_vector(maker, context)
    )
    fragments = []
    try:
        for part in parts:
            part_spec = spec.for_agents(part)
            fragment = batch.allocate(batch.columns(part_spec, {}, num_steps, _NUM_ENVS))
            action = random_actions(part_spec, (num_steps, _NUM_ENVS), action_seed)
            fragment.action.copy_(torch.from_numpy(action))
            fragments.append(fragment)
        vector.bind(*fragments)
        for t in range(num_steps):
            for fragment, part in zip(fragments, parts, strict=True):
                _allow(fragment, spec.for_agents(part), t)
            vector.step(t)
        episodes = vector.finish()
        columns = [
            np.asarray(column)
            for f in fragments
            for obs in (f.obs.values() if isinstance(f.obs, dict) else [f.obs],)
            for column in (*obs, f.reward, f.terminated, f.truncated, f.valid)
        ]
        return columns, len(episodes)
    finally:
        vector.close()


def _allow(fragment: Fragment, spec: EnvSpec, t: int) -> None:
    """Replace the choices of step t that a mask forbids by the next ones that it allows."""
    if not spec.mask_key:
        return
    mask = fragment.obs[spec.mask_key][t].numpy()  # type: ignore[index]
    rows = fragment.action[t].numpy().reshape(len(mask), -1)
    choices = np.flatnonzero([bool(n) for n in _choices_of_row(spec.action)])
    first = 0
    for column, count in zip(choices, spec.action.nvec, strict=True):
        allowed = mask.reshape(len(mask), -1)[:, first : first + count] != 0
        wanted = rows[:, column].astype(np.int64)
        ahead = (wanted[:, None] + np.arange(count)) % count
        found = np.take_along_axis(allowed, ahead, 1).argmax(1)
        rows[:, column] = np.take_along_axis(ahead, found[:, None], 1)[:, 0]
        first += count


def _choices_of_row(action: Space) -> list[int]:
    """Return the choices of each number of an action's row; 0: it is continuous."""
    if action.parts:
        return [n for _, part in action.parts for n in _choices_of_row(part)]
    return list(action.nvec) or [0] * action.size


def _are_equal(one: list[Array], other: list[Array]) -> bool:
    return all(np.array_equal(*pair, equal_nan=True) for pair in zip(one, other, strict=True))
