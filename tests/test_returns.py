"""The mathematics against numbers worked out by hand and against plain double loops."""

import numpy as np
import pytest
import torch

from headrace.returns import discounted_sum, gae, vtrace


def row(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype).unsqueeze(1)


def test_gae_by_hand():
    # gamma 0.5, lambda 0.5. delta = r + 0.5 * next_value - value:
    #   t=0: 1 + 0.5*3 - 2 = 0.5    t=1: 1 + 0.5*4 - 3 = 0    t=2: 1 + 0.5*5 - 4 = -0.5
    # adv2 = -0.5; adv1 = 0 + 0.25 * -0.5 = -0.125; adv0 = 0.5 + 0.25 * -0.125 = 0.46875
    no = row(0, 0, 0, dtype=torch.bool)
    result = gae(row(1, 1, 1), row(2, 3, 4), row(3, 4, 5), no, no, 0.5, 0.5)
    torch.testing.assert_close(result, row(0.46875, -0.125, -0.5))


def test_a_terminal_state_is_worth_nothing_and_a_time_limit_is_bootstrapped():
    # One step, value 2, next value 10, reward 1, gamma 0.9:
    #   terminated: 1 - 2 = -1.  truncated: 1 + 9 - 2 = 8.  both: terminated wins, -1.
    yes, no = row(1, dtype=torch.bool), row(0, dtype=torch.bool)
    args = row(1), row(2), row(10)
    assert gae(*args, yes, no, 0.9, 1.0).item() == pytest.approx(-1)
    assert gae(*args, no, yes, 0.9, 1.0).item() == pytest.approx(8)
    assert gae(*args, yes, yes, 0.9, 1.0).item() == pytest.approx(-1)


def plain_gae(reward, value, next_value, terminated, truncated, gamma, lam):
    """Equation 16 as it stands: a sum over the rest of the episode, for each step."""
    T, n = reward.shape
    out = np.zeros((T, n))
    for i in range(n):
        for t in range(T):
            factor = 1.0
            for k in range(t, T):
                alive = 0.0 if terminated[k, i] else 1.0
                delta = reward[k, i] + gamma * alive * next_value[k, i] - value[k, i]
                out[t, i] += factor * delta
                factor *= gamma * lam
                if terminated[k, i] or truncated[k, i]:
                    break
    return out


def test_gae_against_the_plain_sum_with_ends_everywhere():
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(12, 30)) for _ in range(3)]
    ends = [rng.random((12, 30)) < 0.2 for _ in range(2)]
    expected = plain_gae(*arrays, *ends, 0.97, 0.9)
    tensors = [torch.from_numpy(a) for a in (*arrays, *ends)]
    torch.testing.assert_close(gae(*tensors, 0.97, 0.9), torch.from_numpy(expected))


def test_vtrace_by_hand():
    # gamma 0.5, lambda 1, ratios 2, 0.5, 1 against clips of 1: rho = c = 1, 0.5, 1.
    # delta = rho * (1 + 0.5 * next_value - value):
    #   t=0: 1 * (1 + 1.5 - 2) = 0.5    t=1: 0.5 * (1 + 2 - 3) = 0    t=2: 1 + 2.5 - 4 = -0.5
    # v2 = 4 - 0.5 = 3.5;  v1 = 3 + 0.25 * -0.5 = 2.875;  v0 = 2 + 0.5 + 0.5 * -0.125 = 2.4375
    # advantage: 1 * (1 + 0.5 * 2.875 - 2) = 0.4375;  0.5 * (1 + 0.5 * 3.5 - 3) = -0.125;  -0.5
    no = row(0, 0, 0, dtype=torch.bool)
    ratio = row(2, 0.5, 1).log()
    found = vtrace(ratio, row(1, 1, 1), row(2, 3, 4), row(3, 4, 5), no, no, 0.5, 1.0, 1.0, 1.0)
    torch.testing.assert_close(found.target, row(2.4375, 2.875, 3.5))
    torch.testing.assert_close(found.advantage, row(0.4375, -0.125, -0.5))


def plain_vtrace(log_ratio, reward, value, next_value, terminated, truncated, *how):
    """Section 4.1 as it stands: for each step a sum over the rest of its episode."""
    gamma, lam, rho_clip, c_clip = how
    T, n = reward.shape
    ratio = np.exp(log_ratio)
    target, advantage = np.zeros((T, n)), np.zeros((T, n))
    for i in range(n):
        for s in range(T):
            factor, total = 1.0, value[s, i]
            for t in range(s, T):
                alive = 0.0 if terminated[t, i] else 1.0
                delta = reward[t, i] + gamma * alive * next_value[t, i] - value[t, i]
                total += factor * min(rho_clip, ratio[t, i]) * delta
                factor *= gamma * lam * min(c_clip, ratio[t, i])
                if terminated[t, i] or truncated[t, i]:
                    break
            target[s, i] = total
        for s in range(T):
            if terminated[s, i]:
                after = 0.0
            elif truncated[s, i] or s == T - 1:
                after = next_value[s, i]
            else:
                after = target[s + 1, i]
            gain = reward[s, i] + gamma * after - value[s, i]
            advantage[s, i] = min(rho_clip, ratio[s, i]) * gain
    return target, advantage


def same_as_plain(arrays, how):
    found = vtrace(*map(torch.from_numpy, arrays), *how)
    for ours, plain in zip(found, plain_vtrace(*arrays, *how), strict=False):
        torch.testing.assert_close(ours, torch.from_numpy(plain))


@pytest.mark.parametrize("how", [(0.97, 1.0, 1.0, 1.0), (0.9, 0.8, 2.0, 0.7), (1.0, 1.0, 1e9, 1e9)])
def test_vtrace_against_the_plain_sum_with_ends_everywhere(how):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(12, 30)) for _ in range(4)]
    same_as_plain([*arrays, *(rng.random((12, 30)) < 0.2 for _ in range(2))], how)


def test_vtrace_against_the_plain_sum_with_each_end_at_each_position():
    rng = np.random.default_rng(1)
    T = 7
    for at in range(T):
        for terminates, truncates in ((True, False), (False, True), (True, True)):
            ends = np.zeros((2, T, 3), bool)
            ends[:, at, 1] = terminates, truncates
            ends[0, :, 2] = rng.random(T) < 0.3  # beside others
            arrays = [rng.normal(size=(T, 3)) for _ in range(4)]
            same_as_plain([*arrays, *ends], (0.95, 0.9, 1.0, 1.0))


def test_rung_7_vtrace_on_its_own_policy_has_the_targets_of_gae_1():
    rng = np.random.default_rng(2)
    arrays = [torch.from_numpy(rng.normal(size=(20, 10))) for _ in range(3)]
    ends = [torch.from_numpy(rng.random((20, 10)) < 0.15) for _ in range(2)]
    value, next_value = arrays[1:]
    within = ~(ends[0] | ends[1])[:-1]
    next_value[:-1][within] = value[1:][within]
    found = vtrace(torch.zeros(20, 10).double(), *arrays, *ends, 0.98, 1.0, 1.0, 1.0)
    advantage = gae(*arrays, *ends, 0.98, 1.0)
    torch.testing.assert_close(found.target, advantage + arrays[1])
    torch.testing.assert_close(found.advantage, advantage)


def test_vtrace_with_clips_of_0_counts_each_ratio_as_1():
    rng = np.random.default_rng(3)
    arrays = [torch.from_numpy(rng.normal(size=(20, 10))) for _ in range(4)]
    ends = [torch.from_numpy(rng.random((20, 10)) < 0.15) for _ in range(2)]
    found = vtrace(*arrays, *ends, 0.98, 0.9, 0.0, 0.0)
    expected = vtrace(torch.zeros(20, 10).double(), *arrays[1:], *ends, 0.98, 0.9, 1.0, 1.0)
    torch.testing.assert_close(found.target, expected.target)
    torch.testing.assert_close(found.advantage, expected.advantage)


def test_discounted_sum_by_hand():
    # gamma 0.5, carried in 4: 1 + 2 = 3; 1 + 1.5 = 2.5 (ends here); 1 + 0 = 1; carried out: 1
    done = row(0, 1, 0, dtype=torch.bool)
    result = discounted_sum(row(1, 1, 1), done, torch.tensor([4.0], dtype=torch.float64), 0.5)
    torch.testing.assert_close(result, row(3, 2.5, 1, 1))


def test_wrong_shapes_are_refused():
    a, b = torch.zeros(3, 2), torch.zeros(3, 1)
    no = torch.zeros(3, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="next_value has shape"):
        gae(a, a, b, no, no, 0.9, 0.9)
    with pytest.raises(ValueError, match=r"\[T, n\]"):
        gae(a[0], a[0], a[0], no[0], no[0], 0.9, 0.9)
    with pytest.raises(ValueError, match="log_ratio has shape"):
        vtrace(b, a, a, a, no, no, 0.9, 0.9, 1.0, 1.0)
    with pytest.raises(ValueError, match="start"):
        discounted_sum(a, no, torch.zeros(3), 0.9)
