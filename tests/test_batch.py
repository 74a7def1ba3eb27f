"""Memory: laid out once, poisoned, joined, and split by env."""

import mmap

import numpy as np
import pytest
import torch

from headrace import batch
from headrace.batch import pack, unpack
from headrace.spec import EnvSpec, Space

SPEC = EnvSpec(
    "test",
    Space("box", (3,), "float32"),
    Space("discrete", (), "int64", nvec=(2,), start=(0,)),
)
MASK = Space("multi_binary", (2,), "int8")
MASKED = EnvSpec(
    "masked in info",
    Space("dict", parts=(("", SPEC.observation), ("mask", MASK))),
    SPEC.action,
    "mask",
    True,
)
OUT = {"value": ((), torch.float32), "hidden": ((5,), torch.float32)}


def fragment(num_steps=4, num_envs=2, **kwargs):
    return batch.allocate(batch.columns(SPEC, OUT, num_steps, num_envs), **kwargs)


def test_a_fresh_fragment_is_poisoned():
    fresh = fragment()
    assert fresh.obs.shape == (5, 2, 3)
    assert fresh.stored_outputs["hidden"].shape == (4, 2, 5)
    for name in ("obs", "reward"):
        assert torch.isnan(getattr(fresh, name)).all(), name
    assert torch.isnan(fresh.stored_outputs["value"]).all()
    assert (fresh.action == torch.iinfo(torch.int64).min).all()
    assert not fresh.valid.any()
    assert int(fresh.num_final) == 0


def test_columns_do_not_overlap_and_two_views_of_one_memory_agree():
    layout = batch.columns(SPEC, OUT, 4, 2)
    memory = mmap.mmap(-1, batch.num_bytes(layout))
    ours = batch.allocate(layout, memory)
    columns = [ours.obs, ours.action, ours.reward, ours.env_id, *ours.stored_outputs.values()]
    for number, column in enumerate(columns):
        column.fill_(number)
    theirs = batch.allocate(layout, memory, fresh=False)
    again = [
        theirs.obs,
        theirs.action,
        theirs.reward,
        theirs.env_id,
        *theirs.stored_outputs.values(),
    ]
    for number, column in enumerate(again):
        assert (column == number).all()


def test_join_puts_envs_side_by_side_and_shifts_final_rows():
    a, b = fragment(), fragment(num_envs=3)
    for number, f in enumerate((a, b)):
        f.obs.fill_(number)
        f.env_id.copy_(torch.arange(f.num_envs) + 10 * number)
    a.num_final[0], a.final_step[0], a.final_row[0] = 1, 3, 1
    a.final_obs[0] = 7.0
    b.num_final[0] = 2
    b.final_step[:2], b.final_row[:2] = torch.tensor([0, 2]), torch.tensor([2, 0])
    b.final_obs[:2] = 8.0
    joined = batch.join([a, b], torch.device("cpu"))
    assert joined.env_id.tolist() == [0, 1, 10, 11, 12]
    assert joined.obs[0, :, 0].tolist() == [0, 0, 1, 1, 1]
    obs, step, row = joined.finals()
    # b's columns 2 and 0 are columns 4 and 2 of the batch
    assert (step.tolist(), row.tolist()) == ([3, 0, 2], [1, 4, 2])
    assert obs[:, 0].tolist() == [7, 8, 8]


def test_each_minibatch_has_the_same_number_of_steps_of_every_env():
    order = torch.stack([torch.randperm(12) for _ in range(5)], 1)
    minibatches = batch.stratify(order, 3)
    assert minibatches.shape == (3, 20)
    for index in minibatches:
        assert torch.equal((index % 5).bincount(), torch.full((5,), 4))
    assert torch.equal(minibatches.flatten().sort().values, torch.arange(60))


def test_minibatches_of_two_learners_equal_those_of_one():
    """What lets two learners make the minibatches that one makes: rows depend on the env alone."""
    order = torch.stack([torch.randperm(8) for _ in range(4)], 1)
    whole = batch.stratify(order, 2)
    left, right = batch.stratify(order[:, :2], 2), batch.stratify(order[:, 2:], 2)
    for m in range(2):
        ours = {(int(i) // 4, int(i) % 4) for i in whole[m]}
        theirs = {(int(i) // 2, int(i) % 2) for i in left[m]}
        theirs |= {(int(i) // 2, int(i) % 2 + 2) for i in right[m]}
        assert ours == theirs


def test_minibatches_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="10 steps do not split into 3"):
        batch.stratify(torch.zeros(10, 2, dtype=torch.int64), 3)


def test_whole_runs_assign_every_env_once_for_any_split():
    """8 envs in 4 minibatches, held by two learners: together they are those of one."""
    T, M = 3, 4
    place = torch.tensor([[5, 0, 2, 7, 1, 4, 6, 3], [0, 1, 2, 3, 4, 5, 6, 7]])

    def envs_of(held, first):
        """The envs of each minibatch, which must be whole and in time's order."""
        index, sizes = batch.whole_runs(held, T, 8, M)
        n = held.shape[1]
        assert index.shape == (2 * M, max(sizes))
        found = []
        for row, size in zip(index, sizes, strict=True):
            run = row[: size or T].view(T, -1)
            assert torch.equal(run // n, torch.arange(T).unsqueeze(1).expand_as(run))
            assert torch.equal(run % n, run[:1].expand_as(run) % n)
            found.append({first + int(i) % n for i in run[0]} if size else set())
        return found

    alone = envs_of(place, 0)
    assert alone == [{1, 4}, {2, 7}, {0, 5}, {3, 6}, {0, 1}, {2, 3}, {4, 5}, {6, 7}]
    left, right = envs_of(place[:, :4], 0), envs_of(place[:, 4:], 4)
    assert left[4:] == [{0, 1}, {2, 3}, set(), set()]
    assert [a | b for a, b in zip(left, right, strict=True)] == alone


def test_whole_runs_need_a_divisor_of_the_envs():
    with pytest.raises(ValueError, match="10 envs do not split into 3 minibatches"):
        batch.whole_runs(torch.zeros(1, 5, dtype=torch.int64), 4, 10, 3)


@pytest.mark.parametrize(("spec", "k"), [(SPEC, 0), (SPEC, 3), (MASKED, 3)])
def test_unpack_restores_a_packed_fragment(spec, k):
    layout = batch.columns(spec, OUT, 4, 2, state_size=3)
    memory = np.empty(batch.num_bytes(layout), np.uint8)
    ours = batch.allocate(layout, memory)
    for number, tensor in enumerate(batch.named_tensors(ours).values()):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + number)
    ours.num_final[0] = k
    count, parts = pack(layout, memory)
    assert (count, len(parts)) == (k, 1 + (k > 0))
    room_for_one = 8 + 8 + 3 * 4
    assert sum(part.nbytes for part in parts) <= memory.nbytes - (8 - k) * room_for_one + 128
    theirs = batch.named_tensors(unpack(layout, count, iter(parts)))
    for name, tensor in batch.named_tensors(batch.trim(ours)).items():
        assert theirs[name].dtype == tensor.dtype
        assert theirs[name].equal(tensor), name
