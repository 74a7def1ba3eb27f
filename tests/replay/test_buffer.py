"""The replay buffer against a list of everything that happened, walked step by step."""

import dataclasses

import numpy as np
import pytest
import torch

from headrace import batch
from headrace.errors import ConfigError
from headrace.replay.buffer import ReplayBuffer, Rows
from headrace.replay.memory import row_bytes
from headrace.spec import EnvSpec, Space
from tests.marks import repeats

N, T = 3, 5
SPEC = EnvSpec("stream", Space("box", (2,), "float32"), Space("discrete", (), "int64", nvec=(4,)))
GAMMA = 0.9


class Stream:
    """Random fragments of N envs, and all their transitions."""

    spec = SPEC

    def __init__(self, seed, p_end=0.3):
        self.rng, self.p_end = np.random.default_rng(seed), p_end
        self.count = 0
        self.obs = [self.first() for _ in range(N)]
        # Of each env: [obs, action, reward, terminated, truncated, next obs]
        self.steps = [[] for _ in range(N)]

    def new(self):
        """An observation that is like no other."""
        self.count += 1
        return torch.tensor([float(self.count), -1.0])

    def first(self):
        """The first observation of an episode."""
        return self.new()

    def after(self, obs):
        """The observation after `obs`."""
        return self.new()

    def cuts(self, obs, following):
        """Whether the buffer is to end the episode here."""
        return False

    def fragment(self, envs=range(N), *, lost=()):
        """The next T steps of some envs; the fragment before those in `lost` never arrived."""
        envs = list(envs)
        out = batch.allocate(batch.columns(self.spec, {}, T, len(envs)))
        out.env_id[:] = torch.tensor(envs)
        out.policy_version.zero_()
        num_final = 0
        for column, env in enumerate(envs):
            if env in lost:
                if self.steps[env] and not any(self.steps[env][-1][3:5]):
                    self.steps[env][-1][4] = True  # its next observation was the last one seen
                self.obs[env] = self.first()
            out.obs[0, column] = self.obs[env]
            for t in range(T):
                action, reward = int(self.rng.integers(4)), float(self.rng.normal())
                terminated = self.rng.random() < self.p_end / 2
                truncated = not terminated and self.rng.random() < self.p_end / 2
                following = self.after(self.obs[env])
                cut = truncated or self.cuts(self.obs[env], following)
                self.steps[env].append([self.obs[env], action, reward, terminated, cut, following])
                if truncated:
                    out.final_obs[num_final] = following
                    out.final_step[num_final], out.final_row[num_final] = t, column
                    num_final += 1
                self.obs[env] = self.first() if terminated or truncated else following
                out.obs[t + 1, column] = self.obs[env]
                out.action[t, column], out.reward[t, column] = action, reward
                out.terminated[t, column], out.truncated[t, column] = terminated, truncated
                out.valid[t, column] = True
        out.num_final[0] = num_final
        return out

    def walked(self, env, i, n_step):
        """A transition over up to n steps, as a textbook would walk it."""
        reward, discount = 0.0, 1.0
        for step in self.steps[env][i : i + n_step]:
            reward += discount * np.float32(step[2])
            discount *= GAMMA
            following = step[5]
            if step[3]:
                return reward, 0.0, None
            if step[4]:
                break
        return reward, discount, following


class Frames(Stream):
    """The same with stacks of three frames, filled up in several ways where an episode begins.

    Now and then a stack is no continuation of the one before.
    """

    spec = dataclasses.replace(SPEC, observation=Space("box", (3, 2), "float32"), num_frames=3)

    def first(self):
        way = self.rng.integers(3)
        if way == 0:
            return torch.stack([torch.zeros(2), torch.zeros(2), self.new()])
        return torch.stack([self.new()] * 3 if way == 1 else [self.new() for _ in range(3)])

    def after(self, obs):
        if self.rng.random() < 0.05:
            return self.first()
        return torch.cat((obs[1:], self.new().unsqueeze(0)))

    def cuts(self, obs, following):
        return not torch.equal(obs[1:], following[:-1])


def all_rows(buffer):
    """All transitions that can be drawn, by env, oldest first."""
    for env in range(N):
        for place in range(int(buffer.num_gone[env]), int(buffer.num_starts[env])):
            number = buffer.starts[place % buffer.capacity, env]
            yield env, place, Rows(number[None], torch.tensor([env]), torch.tensor([0]))


def by_step(buffer, *address):
    """Draws as `[steps, batch_size]`."""
    rows, sizes = buffer.draw(*address)
    assert sizes == [address[-1]] * address[-2]
    return Rows(*(column.view(len(sizes), -1) for column in vars(rows).values()))


def check(buffer, stream, n_step):
    for env, i, row in all_rows(buffer):
        got = buffer.transitions(row, n_step, GAMMA, lambda reward: reward)
        obs, action, *_ = stream.steps[env][i]
        reward, discount, following = stream.walked(env, i, n_step)
        assert torch.equal(got["obs"][0], obs)
        assert int(got["action"]) == action
        assert float(got["reward"]) == pytest.approx(reward, abs=1e-5)
        assert float(got["discount"]) == pytest.approx(discount)
        if following is not None:
            assert torch.equal(got["next_obs"][0], following), (env, i)


@repeats(
    ("kind", "n_step"),
    [(Stream, 3), (Frames, 3), (Stream, 1), (Stream, 7), (Frames, 1), (Frames, 7)],
    keep=2,
)
@repeats("seed", range(3))
def test_transitions_are_those_of_a_walk(seed, n_step, kind):
    stream, buffer = kind(seed), ReplayBuffer(kind.spec, 40 * N, N)
    least = 20 if kind is Stream else 10
    for _ in range(30):
        buffer.insert(stream.fragment())
        check(buffer, stream, n_step)
        for env in range(N):  # the newest, and no gap
            assert int(buffer.num_starts[env]) == len(stream.steps[env])
            kept = int(buffer.num_starts[env] - buffer.num_gone[env])
            if len(stream.steps[env]) < least:
                assert kept == len(stream.steps[env])
            else:
                assert kept >= least


def test_a_stack_takes_no_more_room_than_its_newest_frame():
    stream = Frames(0, p_end=0.0)
    buffer = ReplayBuffer(Frames.spec, 40 * N, N)
    assert buffer.obs0.shape == (40 + 3, N, 2)
    stream.after = lambda obs: torch.cat((obs[1:], stream.new().unsqueeze(0)))
    for _ in range(20):
        buffer.insert(stream.fragment())
    assert len(buffer) == 40 * N
    assert row_bytes(Frames.spec) == row_bytes(SPEC)
    check(buffer, stream, 3)


def test_stacks_of_images_lie_in_memory_as_convolutions_read_them():
    """So no network copies them again: `test_transitions_are_those_of_a_walk` has their values."""
    seen = Space("box", (3, 4, 5), "uint8")
    buffer = ReplayBuffer(dataclasses.replace(SPEC, observation=seen, num_frames=3), 40 * N, N)
    number, env = torch.tensor([7, 9, 8]), torch.tensor([0, 2, 1])
    stacks = buffer.observations(number, env)
    assert stacks.shape == (3, 3, 4, 5)
    assert stacks.is_contiguous(memory_format=torch.channels_last)


def test_without_ends_the_newest_are_kept():
    stream, buffer = Stream(0, p_end=0.0), ReplayBuffer(SPEC, 40 * N, N)
    for _ in range(20):
        buffer.insert(stream.fragment())
    assert len(buffer) == 40 * N
    assert int(buffer.num_gone[0]) == 100 - 40


@repeats("batches", [3, 2, 6])
def test_a_batch_of_more_rows_than_the_buffer_keeps_is_refused(batches):
    """Each episode of stacks takes rows of older frames as well: rows would mix."""
    refused = 0
    for seed in range(8):
        for p_end in (0.0, 0.6, 0.9):
            stream = Frames(seed, p_end=p_end)
            buffer = ReplayBuffer(Frames.spec, batches * T * N, N)
            try:
                for _ in range(8):
                    buffer.insert(stream.fragment())
                    check(buffer, stream, 3)
            except ConfigError as error:
                assert "times as large" in str(error)
                assert p_end > 0
                refused += 1
    assert (refused > 0) == (batches < 6)


@repeats("kind", [Frames, Stream])
@repeats("seed", range(3))
def test_lost_fragments_are_cut_and_never_crossed(seed, kind):
    stream, buffer = kind(seed, p_end=0.1), ReplayBuffer(kind.spec, 60 * N, N)
    rng = np.random.default_rng(seed)
    for _ in range(40):
        buffer.insert(stream.fragment(lost=[e for e in range(N) if rng.random() < 0.3]))
        check(buffer, stream, 3)


@pytest.mark.parametrize("kind", [Stream, Frames])
def test_an_environment_may_come_twice_or_not_at_all(kind):
    stream, buffer = kind(5), ReplayBuffer(kind.spec, 40 * N, N)
    for envs in ([1], [0, 2], [2, 1, 1], [0, 1, 0, 2], [1, 1, 1]):
        buffer.insert(stream.fragment(envs))
        check(buffer, stream, 3)


def test_rows_that_are_no_transitions_are_not_drawn():
    stream, buffer = Stream(1), ReplayBuffer(SPEC, 40 * N, N)
    fragment = stream.fragment()
    fragment.valid[2, 1] = False
    buffer.insert(fragment)
    numbers = [int(row.number) for env, _, row in all_rows(buffer) if env == 1]
    assert len(buffer) == N * T - 1
    assert len(numbers) == T - 1


def test_draws_are_even_and_belong_to_their_gradient_step():
    stream, buffer = Stream(2), ReplayBuffer(SPEC, 40 * N, N)
    for envs in ([0, 1, 2], [0, 1], [0]):  # unequal numbers: 15, 10 and 5
        buffer.insert(stream.fragment(envs))
    rows = by_step(buffer, 7, 0, 3000, 8)
    flat = {(e, int(r.number)): 0 for e, _, r in all_rows(buffer)}
    for env, number in zip(
        rows.env.flatten().tolist(), rows.number.flatten().tolist(), strict=True
    ):
        flat[env, number] += 1
    expected = 3000 * 8 / 30
    chi2 = sum((count - expected) ** 2 / expected for count in flat.values())
    assert chi2 < 58.3  # 0.1 % of 29 degrees of freedom; strata make it smaller
    alone = by_step(buffer, 7, 1234, 1, 8)
    assert torch.equal(alone.number[0], rows.number[1234])
    assert torch.equal(alone.env[0], rows.env[1234])
    assert not torch.equal(by_step(buffer, 8, 1234, 1, 8).number, alone.number)


@pytest.mark.parametrize("kind", [Stream, Frames])
def test_the_state_is_all_there_is(kind):
    stream, buffer = kind(3), ReplayBuffer(kind.spec, 40 * N, N)
    for _ in range(12):
        buffer.insert(stream.fragment())
    again = ReplayBuffer(kind.spec, 40 * N, N)
    again.load_state_dict({name: tensor.clone() for name, tensor in buffer.state_dict().items()})
    fragment = stream.fragment()
    for of in (buffer, again):
        of.insert(fragment)
    rows = [by_step(of, 1, 5, 4, 6) for of in (buffer, again)]
    assert torch.equal(rows[0].number, rows[1].number)
    taken = [
        of.transitions(Rows(r.number[2], r.env[2], r.slot[2]), 3, GAMMA, lambda x: x)
        for of, r in zip((buffer, again), rows, strict=True)
    ]
    assert all(torch.equal(taken[0][name], taken[1][name]) for name in taken[0])


@pytest.mark.parametrize("kind", [Stream, Frames])
@repeats("seed", range(3))
def test_rows_by_priority_are_transitions_that_are_kept(seed, kind):
    stream, buffer = kind(seed), ReplayBuffer(kind.spec, 40 * N, N, prioritized=True)
    rng = np.random.default_rng(seed)
    for step in range(40):
        buffer.insert(stream.fragment(lost=[e for e in range(N) if rng.random() < 0.2]))
        rows, _ = buffer.draw_by_priority(1, step, 16, 0.5)
        kept = {(env, int(row.number)) for env, _, row in all_rows(buffer)}
        assert set(zip(rows.env.tolist(), rows.number.tolist(), strict=True)) <= kept
        buffer.set_priorities(rows, torch.from_numpy(rng.uniform(0.1, 3, 16)))
        with_priority = (buffer.priorities.level0 > 0).sum(1)
        assert torch.equal(with_priority, buffer.num_starts - buffer.num_gone)
    assert float(buffer.priorities.greatest) > 2.5


def test_weights_undo_the_bias_of_priorities_by_hand():
    stream, buffer = Stream(0, p_end=0.0), ReplayBuffer(SPEC, 40 * N, N, prioritized=True)
    buffer.insert(stream.fragment())
    first = Rows(torch.zeros(N, dtype=torch.int64), torch.arange(N), torch.arange(N))
    buffer.set_priorities(first, torch.full((N,), 8.0))  # 3 of 8, 12 of 1: P = 8/36 and 1/36
    rows, weight = buffer.draw_by_priority(3, 0, 64, 0.5)
    is_first = rows.number == 0
    assert is_first.sum() == pytest.approx(64 * 24 / 36, abs=2)
    assert weight[~is_first].tolist() == [1.0] * int((~is_first).sum())
    assert weight[is_first].tolist() == pytest.approx([(1 / 8) ** 0.5] * int(is_first.sum()))


@pytest.mark.parametrize("n_step", [1, 3])
def test_a_step_that_failed_first_in_a_fragment_ends_the_episode_before(n_step):
    """Nobody could truncate the row before: it was in the batch before."""
    stream, buffer = Stream(0, p_end=0.0), ReplayBuffer(SPEC, 40 * N, N)
    buffer.insert(stream.fragment())
    fragment = stream.fragment()
    fragment.valid[0], fragment.truncated[0] = False, True
    fragment.obs[1:] += 1_000  # of new episodes
    buffer.insert(fragment)
    last = buffer.transitions(
        Rows(torch.full((N,), T - 1), torch.arange(N), torch.arange(N)),
        n_step,
        GAMMA,
        lambda reward: reward,
    )
    assert last["discount"].tolist() == pytest.approx([GAMMA] * N)
    assert torch.equal(last["next_obs"], fragment.obs[0])
    assert len(buffer) == N * (2 * T - 1)


def test_an_error_that_is_not_finite_spoils_no_priority():
    buffer = ReplayBuffer(SPEC, 40 * N, N, prioritized=True)
    buffer.insert(Stream(0).fragment())
    rows, _ = buffer.draw_by_priority(1, 0, 2, 0.5)
    buffer.set_priorities(rows, torch.tensor([float("nan"), float("inf")]))
    assert buffer.priorities.sums().isfinite().all()
    assert float(buffer.priorities.greatest) == 1.0
