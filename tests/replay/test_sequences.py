"""Sequences of the replay buffer: what they hold, their recurrent states, and which are drawn."""

import dataclasses
import itertools

import pytest
import torch

from headrace.replay.buffer import Rows
from headrace.replay.sequences import SequenceBuffer
from tests.replay.test_buffer import GAMMA, SPEC, N, Stream

BURN_IN, LENGTH = 2, 6


class Remembered(Stream):
    """A stream whose recurrent state is the sum of an episode's observations so far."""

    def __init__(self, seed):
        self.total = {}  # of each observation, which are all different
        super().__init__(seed)

    def first(self):
        obs = super().first()
        self.total[float(obs[0])] = float(obs[0])
        return obs

    def after(self, obs):
        following = super().after(obs)
        self.total[float(following[0])] = self.total[float(obs[0])] + float(following[0])
        return following

    def fragment(self, envs=range(N), *, lost=()):
        out = super().fragment(envs, lost=lost)
        first = [float(x) for x in out.obs[0, :, 0]]
        state = torch.zeros(2, len(first), 1)
        state[0, :, 0] = torch.tensor([self.total[x] - x for x in first])
        return dataclasses.replace(out, recurrent_state=state)


def filled(seed, fragments, size=75, length=LENGTH):
    stream = Remembered(seed)
    replay = SequenceBuffer(SPEC, size, N, state_size=1, burn_in=BURN_IN, length=length, n_step=3)
    for number in range(fragments):
        lost = [number % N] if number % 7 == 6 else []
        replay.insert(stream.fragment(lost=lost))
    return stream, replay


@pytest.mark.parametrize(("seed", "fragments"), [(1, 4), (2, 9), (3, 40)])
def test_rows_states_and_next_rows_are_those_of_the_stream(seed, fragments):
    stream, replay = filled(seed, fragments)
    first, _ = replay.draw(5, 0, 1, 50)
    found = replay.sequences(first, GAMMA, lambda reward: reward)
    obs = found["obs"]
    state, sums = found["state"][:, 0].clone(), []
    for row, reset in zip(obs[..., 0], found["reset"], strict=True):
        state = torch.where(reset, 0.0, state) + row
        sums.append(state)
    sums = torch.stack(sums)[BURN_IN:]
    number = first.number + BURN_IN + torch.arange(LENGTH).unsqueeze(1)
    env = first.env.expand_as(number)
    expected = replay.transitions(Rows(number, env, env), 3, GAMMA, lambda reward: reward)
    column = torch.arange(50)
    next_obs = obs[BURN_IN:][found["next_row"], column]
    is_step = found["is_step"]
    assert 0.6 < is_step.float().mean() < 1
    assert torch.equal(obs[BURN_IN : BURN_IN + LENGTH], expected["obs"])
    for name in ("action", "reward", "discount"):
        assert torch.equal(found[name][is_step], expected[name][is_step]), name
    assert torch.equal(next_obs[is_step], expected["next_obs"][is_step])
    goes_on = is_step & (found["discount"] > 0)
    for rows, where, sums_of in (
        (obs[BURN_IN:], is_step, sums),
        (next_obs, goes_on, sums[found["next_row"], column]),
    ):
        truth = [stream.total[float(x)] for x in rows[:LENGTH][where][:, 0]]
        assert sums_of[:LENGTH][where].tolist() == truth
    steps = {float(step[0][0]) for of_env in stream.steps for step in of_env}
    kept = obs[BURN_IN : BURN_IN + LENGTH][..., 0]
    assert {float(x) for x in kept[is_step]} <= steps
    assert is_step[torch.isin(kept, torch.tensor(sorted(steps)))].all()


@pytest.mark.parametrize("length", [6, 14])  # half of it is less, or more, than a batch's steps
def test_sequences_are_complete_apart_and_begin_with_batches(length):
    _, replay = filled(4, 30, 200, length)
    first, _ = replay.draw(5, 0, 20, 50)
    rows = BURN_IN + length + 3
    assert (first.number + rows - 1 <= replay.end[first.env]).all()
    assert (first.number > replay.end[first.env] - replay.capacity).all()
    for env in range(N):
        begun = sorted(set(first.number[first.env == env].tolist()))
        assert len(begun) == int(replay.left()[env])
        assert min(b - a for a, b in itertools.pairwise(begun)) >= length // 2
        kept = range(int(replay.num_gone[env]), int(replay.num_starts[env]))
        listed = [int(replay.starts[place % replay.capacity, env]) for place in kept]
        assert begun == [number for number in listed if number + rows - 1 <= replay.end[env]]
        assert len(listed) > len(begun) > 0
    _, new = filled(4, 1)
    assert len(new) == 0
