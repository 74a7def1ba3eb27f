"""Compares the cost model with sums done by hand and with plain random draws."""

import json
from dataclasses import replace

import numpy as np
import pytest

from headrace.cost_model.costs import Costs, LinearCost, TimeDistribution, mixture
from headrace.cost_model.events import EventQueue, Machine
from headrace.cost_model.model import Topology, lock_step_s, simulate
from headrace.errors import ConfigError

NOTHING = LinearCost(0.0, 0.0)
SLEEPS = Costs(  # 5 ms a step, 1 ms of inference a vector step; an update takes 0.1 ms a row
    step=mixture((0.005, 1.0)),
    reset=mixture((0.0, 1.0)),
    resets_per_step=0.0,
    cpu_share=0.0,
    vector=LinearCost(0.001, 0.0),
    inference=1.0,
    hand_over=0.0,
    latency=0.0,
    learn=LinearCost(0.0, 1e-4),
    allreduce=NOTHING,
)
COMPUTES = replace(SLEEPS, cpu_share=1.0)
STALLS = replace(SLEEPS, step=mixture((0.003, 98 / 99), (0.1, 1 / 99)))
EIGHT = Topology(num_envs=8, num_steps=10, envs_per_vector=1, num_workers=8)

MANY = {"num_learners": 1024, "machines": 1024, "cores": 9}


def update_s(costs, topology, **settings):
    return topology.batch / simulate(costs, topology, **settings)


def test_distribution_of_many_samples_keeps_mean_and_tail():
    rng = np.random.default_rng(0)
    samples = np.where(rng.random(50_000) < 0.001, 0.1, 0.003)
    times = TimeDistribution.from_samples(samples)
    assert len(times.values) <= 512
    assert times.mean == pytest.approx(samples.mean(), rel=1e-12)
    assert times.percentile(0.5) == pytest.approx(0.003) and times.summary()["max_s"] == 0.1
    assert times.percentile(0.999) == pytest.approx(np.percentile(samples, 99.9), rel=0.01)
    again = TimeDistribution.from_json(json.loads(json.dumps(times.to_json())))
    assert (again.values == times.values).all() and (again.weights == times.weights).all()


def test_tail_weight_is_time_share_of_slowest_hundredth():
    assert TimeDistribution.from_samples([0.0]).tail_weight == 0.01  # nothing took any time
    assert TimeDistribution.from_samples(np.ones(1000)).tail_weight == pytest.approx(0.01)
    # 1 of 100 takes 99 s, the others 1 s: half of all time
    assert mixture((1.0, 0.99), (99.0, 0.01)).tail_weight == pytest.approx(0.5)
    # 1 of 50: the slowest 1 % is half of them
    assert mixture((1.0, 0.98), (49.0, 0.02)).tail_weight == pytest.approx(0.25)


@pytest.mark.parametrize("count", [777, 1001])
def test_many_equal_durations_are_read_back_as_they_were_written(count):
    """Means of equal numbers differ by rounding: 0.1 is such a number."""
    times = TimeDistribution.from_samples(np.full(count, 0.1))
    assert (np.diff(times.values) >= 0).all()
    assert TimeDistribution.from_json(times.to_json()).to_json() == times.to_json()


@pytest.mark.parametrize("count", [1, 24, 2000])
def test_slowest_and_sums_agree_with_plain_draws(count):
    times = mixture((0.003, 0.9), (0.02, 0.09), (0.1, 0.01))
    rng = np.random.default_rng(1)
    drawn = rng.choice(times.values, (4000, count), p=times.weights)
    assert times.mean_of_slowest(count) == pytest.approx(drawn.max(1).mean(), rel=0.05)
    sums = times.sample_sums(rng, count, 4000)
    assert sums.shape == (4000,)
    assert sums.mean() == pytest.approx(count * times.mean, rel=0.05)
    assert sums.std() == pytest.approx(drawn.sum(1).std(), rel=0.1)


@pytest.mark.parametrize(
    "damaged",
    [
        {"values": [1.0]},
        {"values": [1.0, 2.0], "weights": [1.0]},
        {"values": [-1.0], "weights": [1.0]},
        {"values": [1.0], "weights": [0.5]},
        {"values": [float("nan")], "weights": [1.0]},
        {"values": [], "weights": []},
        {"values": "no", "weights": [1.0]},
    ],
)
def test_damaged_distribution_is_refused(damaged):
    with pytest.raises(ConfigError, match="distribution of times is damaged"):
        TimeDistribution.from_json(damaged)


def test_costs_survive_json_and_damaged_costs_are_refused():
    again = Costs.from_json(json.loads(json.dumps(STALLS.to_json())))
    assert again.to_json() == STALLS.to_json()
    assert again.vector.at(3) == 0.001
    with pytest.raises(ConfigError, match=r"costs of a profile are damaged.*learn"):
        Costs.from_json({k: v for k, v in STALLS.to_json().items() if k != "learn"})
    for wrong in ({"latency": -1.0}, {"learn": [0.0, float("nan")]}, {"cpu_share": "half"}):
        with pytest.raises(ConfigError, match="costs of a profile are damaged"):
            Costs.from_json(STALLS.to_json() | wrong)


def test_linear_cost_fits_both_points_and_is_never_negative():
    assert LinearCost.fit((10, 3.0), (20, 5.0)) == pytest.approx((1.0, 0.2))
    assert LinearCost.fit((10, 3.0), (20, 2.0)) == (2.0, 0.0)  # it fell: noise
    assert LinearCost.fit((10, 1.0), (20, 4.0)) == (0.0, 0.2)  # no part of it is below 0
    assert LinearCost.fit((10, 3.0)) == (0.0, 0.3)


def ends(cores, *jobs):
    """When jobs (sleep, cpu) that begin together end on a machine."""
    events, found = EventQueue(), [0.0] * len(jobs)
    machine = Machine(events, cores)
    for i, job in enumerate(jobs):
        machine.begin(*job, lambda i=i: found.__setitem__(i, events.now))
    events.run(lambda: all(found))
    return found


def test_computing_activities_share_cores_and_sleeping_ones_take_none():
    assert ends(1, (0, 1)) == pytest.approx([1])
    assert ends(1, (0, 1), (0, 1)) == pytest.approx([2, 2], rel=1e-3)
    assert ends(2, (0, 1), (0, 1)) == pytest.approx([1, 1], rel=1e-3)
    assert ends(2, (0, 1), (0, 1), (0, 1)) == pytest.approx([1.5] * 3, rel=1e-3)
    # The second one has the core for itself after the first has ended: 2 + 1.
    assert ends(1, (0, 1), (0, 2)) == pytest.approx([2, 3], rel=1e-3)
    assert ends(1, (5, 0), (0, 2)) == pytest.approx([5, 2], rel=1e-3)
    assert ends(0, (0, 1), (0, 1), (0, 1)) == pytest.approx([1, 1, 1])  # a core for each
    # Each is half asleep: two of them just fill a core; four take twice as long for what computes.
    assert ends(1, (1, 1), (1, 1)) == pytest.approx([2, 2], rel=2e-3)
    assert ends(1, *[(1, 1)] * 4) == pytest.approx([4] * 4, rel=2e-3)


def test_lag_0_adds_sampling_and_learning_times():
    # 10 steps of 5 + 1 ms, then 80 rows
    assert update_s(SLEEPS, EIGHT) == pytest.approx(0.060 + 0.008)
    # Two vectors of each worker, one after the other
    assert update_s(SLEEPS, replace(EIGHT, num_workers=4)) == pytest.approx(0.120 + 0.008)
    # One vector of two: both step, one inference
    of_two = replace(EIGHT, envs_per_vector=2, num_workers=4)
    assert update_s(SLEEPS, of_two) == pytest.approx(0.110 + 0.008)
    inline = replace(EIGHT, envs_per_vector=8, num_workers=0)
    assert update_s(SLEEPS, inline) == pytest.approx(0.410 + 0.008)
    assert simulate(SLEEPS, EIGHT) == pytest.approx(80 / 0.068)


def test_resets_add_their_time_by_frequency():
    resets = replace(SLEEPS, reset=mixture((0.05, 1.0)), resets_per_step=0.1)
    inline = replace(EIGHT, envs_per_vector=8, num_workers=0)
    assert update_s(resets, inline, num_updates=400) == pytest.approx(0.818, rel=0.03)


def test_lag_1_takes_the_longer_of_sampling_and_learning():
    assert update_s(SLEEPS, replace(EIGHT, lag=1)) == pytest.approx(0.060)
    slow = replace(SLEEPS, learn=LinearCost(0.1, 0.0))
    assert update_s(slow, replace(EIGHT, lag=1)) == pytest.approx(0.1)


def test_asynchronous_run_is_limited_by_slower_side():
    nonstop = replace(EIGHT, lag=2, asynchronous=True)
    assert update_s(SLEEPS, nonstop, num_updates=60) == pytest.approx(0.060, rel=0.02)
    slow = replace(SLEEPS, learn=LinearCost(0.1, 0.0))
    assert update_s(slow, nonstop) == pytest.approx(0.1)


def test_rare_stalls_cost_slowest_fragment_at_lag_0_and_mean_if_asynchronous():
    topology = replace(EIGHT, num_envs=24, num_workers=24, num_steps=128)
    rng = np.random.default_rng(2)
    fragments = 0.003 * 128 + 0.097 * rng.binomial(128, 1 / 99, (20_000, 24)) + 0.128
    learn = 24 * 128 * 1e-4
    expected = fragments.max(1).mean() + learn
    assert update_s(STALLS, topology, num_updates=300) == pytest.approx(expected, rel=0.02)
    nonstop = replace(topology, lag=2, asynchronous=True)
    assert update_s(STALLS, nonstop, num_updates=100) == pytest.approx(fragments.mean(), rel=0.02)


def test_lock_step_waits_for_slowest_environment():
    # 1 - (98/99)^24 = 0.216 of the steps have a stall: 3 + 97 * 0.216 = 24 ms, and inference
    assert lock_step_s(STALLS, 24) == pytest.approx(0.02398 + 0.001, abs=1e-5)


def test_number_of_cores_limits_computing_workers():
    assert update_s(COMPUTES, replace(EIGHT, cores=8)) == pytest.approx(0.068)
    # 8 x 60 ms of computing on 2 cores, and an update on one of them
    assert update_s(COMPUTES, replace(EIGHT, cores=2)) == pytest.approx(0.240 + 0.008, rel=0.01)
    beside = replace(EIGHT, cores=2, lag=2, asynchronous=True)
    # Together 480 + 8 ms on 2 cores
    assert update_s(COMPUTES, beside, num_updates=60) == pytest.approx(0.244, rel=0.03)
    # One ms of 6 computes: 8 of them want 1.33 cores, and have them
    assert update_s(SLEEPS, replace(EIGHT, cores=2)) == pytest.approx(0.068, rel=0.01)
    assert update_s(SLEEPS, replace(EIGHT, cores=1)) > 0.085
    spread = replace(EIGHT, cores=2, machines=4, learners_apart=True)
    assert update_s(COMPUTES, spread) == pytest.approx(0.068)


def test_learners_divide_rows_and_pay_for_allreduce():
    costs = replace(SLEEPS, learn=LinearCost(0.0, 1e-2), allreduce=LinearCost(0.01, 0.001))
    one, two = update_s(costs, EIGHT), update_s(costs, replace(EIGHT, num_learners=2))
    assert one == pytest.approx(0.060 + 0.8)
    assert two == pytest.approx(0.060 + 0.4 + 0.012)


def test_hand_over_costs_learner_time_per_worker():
    costs = replace(SLEEPS, hand_over=0.002, latency=0.004)
    # Orders at 1, 2, ... 8 ms; each takes 2 ms to come, and as long to go; answers do not queue up
    # more than orders did, and the last is heard after another 1 ms.
    assert update_s(costs, EIGHT) == pytest.approx(0.008 + 0.002 + 0.060 + 0.002 + 0.001 + 0.008)


@pytest.mark.parametrize(
    ("topology", "limit"),
    [
        # 10,000 workers of 6 ms a step
        (
            replace(EIGHT, num_envs=10_000, num_workers=10_000, lag=2, asynchronous=True),
            10_000 / 6e-3,
        ),
        (
            replace(
                EIGHT, num_envs=8192, num_workers=8192, num_learners=1024, machines=1024, cores=9
            ),
            8192 / 6e-3,
        ),
    ],
    ids=["workers", "learners"],
)
def test_thousands_of_workers_and_learners_reach_expected_rate(topology, limit):
    fast = replace(SLEEPS, learn=LinearCost(0.0, 1e-9))
    found = simulate(fast, topology, num_updates=5)
    assert found == pytest.approx(limit, rel=0.05)


def test_same_seed_gives_same_prediction():
    topology = replace(EIGHT, lag=2, asynchronous=True, cores=2)
    assert simulate(STALLS, topology, seed=3) == simulate(STALLS, topology, seed=3)
    assert simulate(STALLS, topology, seed=3) != simulate(STALLS, topology, seed=4)
