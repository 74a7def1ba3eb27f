"""Tests of the search on known rates."""

import math

import pytest

from headrace.tools.autoscale.search import Search
from headrace.tools.autoscale.sizes import SIZE_NAMES, SearchSpace, Sizes
from headrace.tools.autoscale.trial import Trial

FOREVER = float("inf")


def search(space, trial, *, allowed=lambda _: True, cores=4, **more):
    """A search whose trials are `trial(sizes)`: a rate, or a `Trial`."""

    def measure(sizes, to_beat):
        found = trial(sizes)
        return found if isinstance(found, Trial) else Trial("measured", found, took_s=1.0)

    return Search(space, allowed, measure, **{"time_left": lambda: FOREVER, "cores": cores} | more)


def device(*free, envs=64, batch=None, **more):
    """All environments are one vector of the learner."""
    return SearchSpace(Sizes(1, 0, envs, 32, envs), frozenset(free), batch, True, **more)


def workers(*free, envs=8, steps=128, vector=4, count=0):
    return SearchSpace(
        Sizes(1, count, envs, steps, vector), frozenset(free or SIZE_NAMES), envs * steps
    )


def peak(at, n):
    return 1000 * math.exp(-(math.log2(n / at) ** 2))


@pytest.mark.parametrize("at", [3, 20, 64, 90, 448, 512, 5000])
def test_doubling_and_halving_find_peak(at):
    found = search(device("num_envs"), lambda s: peak(at, s.num_envs))
    assert peak(at, found.run().num_envs) > 0.94 * 1000
    assert len(found.tried) <= 14


@pytest.mark.parametrize("wall", [200, 1000, 5000, 100_000])
def test_search_stops_at_memory_limit(wall):
    def trial(sizes):
        n = sizes.num_envs
        return Trial("memory", why="no more") if n > wall else n**0.5

    found = search(device("num_envs"), trial)
    best = found.run()
    assert best.num_envs <= wall < 1.3 * best.num_envs


def test_open_batch_stays_near_settings_if_rates_are_close():
    found = search(device("num_envs"), lambda s: 1000 + 20 * math.log2(s.num_envs))
    assert found.run().num_envs == 64 and found.tried[Sizes(1, 0, 128, 32, 128)].rate > 1120


def test_search_stops_where_rate_is_flat():
    found = search(device("num_envs"), lambda s: min(s.num_envs, 1000))
    assert 900 <= found.run().num_envs <= 1100
    assert max(s.num_envs for s in found.tried) <= 4096


def test_search_skips_one_doubling_without_gain():
    noisy = {64: 1000, 128: 950, 256: 1500}
    found = search(device("num_envs"), lambda s: noisy.get(s.num_envs, 100))
    assert found.run().num_envs == 256
    steep = {64: 1000, 128: 800, 256: 1500}
    found = search(device("num_envs"), lambda s: steep.get(s.num_envs, 100))
    assert found.run().num_envs == 64


@pytest.mark.parametrize("killed", [128, 256, 512])
def test_search_continues_after_crashed_trial(killed):
    def trial(sizes):
        n = sizes.num_envs
        return Trial("crashed", why="died (SIGKILL)") if n == killed else peak(1024, n)

    found = search(device("num_envs"), trial)
    assert peak(1024, found.run().num_envs) > 0.94 * 1000
    assert found.tried[Sizes(1, 0, killed, 32, killed)].outcome == "crashed"


def test_first_trial_without_memory_leads_to_smaller_sizes():
    def trial(sizes):
        n = sizes.num_envs
        return Trial("memory", why="no more") if n > 20 else n

    assert search(device("num_envs"), trial).run().num_envs == 20


def test_search_without_any_rate_ends_at_smallest_sizes():
    found = search(device("num_envs"), lambda _: Trial("memory"))
    found.run()
    assert not found.rates
    assert min(s.num_envs for s in found.tried) == 1


def test_computing_environments_get_one_worker_per_core():
    def rate(s):
        each = max(1, s.num_workers)
        return 1000 * min(each, 4) - 30 * s.num_workers - 10 * s.num_learners

    best = search(workers("num_workers", "envs_per_vector"), rate).run()
    assert (best.num_workers, best.envs_per_vector, best.num_learners) == (4, 2, 1)


def test_sleeping_environments_get_many_workers_and_more_environments():
    def trial(s):
        stepping = max(1, s.num_workers)
        return Trial("measured", 100.0 * min(stepping, 64), busy_cores=0.01 * stepping)

    space = workers(envs=8, steps=128)
    found = search(space, trial, cores=2)
    best = found.run()
    assert best.num_workers >= 64
    assert best.batch == 1024
    assert len(found.tried) <= 16


def test_cheap_environments_get_learners_without_workers():
    def rate(s):
        return 1000 * min(s.num_learners, 2) / (1 + s.workers_per_learner) + min(s.num_envs, 32)

    best = search(workers(), rate, cores=4).run()
    assert (best.num_learners, best.num_workers) == (2, 0)
    assert best.num_envs >= 32


def test_close_configuration_may_win_with_more_environments():
    def rate(s):
        return 1000 if s.num_workers else (900 if s.num_envs < 32 else 1200)

    best = search(workers("num_workers", "num_envs", "num_steps", "envs_per_vector"), rate).run()
    assert (best.num_workers, best.num_envs) == (0, 32)


def test_learners_without_gain_are_not_added():
    best = search(workers(), lambda s: 1000 - 0.1 * s.num_learners).run()
    assert best.num_learners == 1


def test_one_learner_per_gpu():
    found = search(device("num_envs", "num_learners"), lambda s: peak(128, s.num_envs), gpus=4)
    assert found.run().num_learners == 4
    assert {s.num_learners for s in found.tried} == {4}


@pytest.mark.parametrize("fixed", SIZE_NAMES)
def test_fixed_sizes_stay(fixed):
    space = workers(*(name for name in SIZE_NAMES if name != fixed), count=2)
    found = search(space, lambda s: s.num_envs + 10 * s.num_workers + s.num_learners)
    best = found.run()
    assert {getattr(s, fixed) for s in found.tried} == {getattr(space.base, fixed)}
    assert len(found.tried) > 1
    assert {s.batch for s in found.tried} == {space.base.batch}
    assert fixed not in space.settings(best)


def test_batch_on_device_is_open_unless_fixed():
    def rate(s):
        return peak(512, s.num_envs) * peak(64, s.num_steps)

    both = ("num_envs", "num_steps")
    best = search(device(*both), rate).run()
    assert rate(best) > 0.9 * 1000**2 and (best.num_envs, best.num_steps) != (64, 32)
    given = search(device(*both, batch=2048), rate)
    given.run()
    assert {s.batch for s in given.tried} == {2048}


def test_environments_per_learner_grow_with_learners():
    base = Sizes(1, 0, 16, 32, 16)
    space = SearchSpace(base, frozenset({"num_learners", "num_workers"}), None, envs_per_learner=16)
    found = search(space, lambda s: 100 * s.num_learners)
    best = found.run()
    assert (best.num_learners, best.num_envs, best.num_steps) == (4, 64, 32)
    assert space.settings(best) == {"num_learners": 4, "num_workers": 0}


def test_refused_sizes_are_not_tried():
    found = search(workers(), lambda s: s.num_envs, allowed=lambda s: s.num_steps % 8 == 0)
    assert found.run().num_steps == 8


def test_search_without_time_returns_result():
    left = iter([5.0, 5.0, 5.0, *[0.0] * 100])
    found = search(workers(), lambda s: 1.0, time_left=lambda: next(left))
    assert found.run() in found.tried
    assert len(found.tried) == 2 and not found.finished


def test_best_few_are_compared_in_turns():
    seen = []

    def rate(s):
        seen.append(s.num_envs)
        lucky = {64: 1000, 128: 1020}  # and the second time
        return {64: 1000, 128: 900}[s.num_envs] if s.num_envs in seen[:-1] else lucky[s.num_envs]

    found = search(device("num_envs"), rate, allowed=lambda s: s.num_envs in (64, 128))
    assert found.run().num_envs == 64
    assert len(seen) == 6 and seen[2:] in ([64, 128, 64, 128], [128, 64, 128, 64])


def test_lucky_measurement_does_not_win():
    seen = []

    def rate(s):
        seen.append(s.num_envs)
        is_lucky = s.num_envs == 64 and seen.count(64) == 1
        return 1300 if is_lucky else {64: 800, 128: 1300, 256: 1250}.get(s.num_envs, 100)

    found = search(device("num_envs"), rate, allowed=lambda s: s.num_envs in (64, 128, 256))
    assert found.run().num_envs == 128


@pytest.mark.parametrize("most", [64, 100, 1000, 50_000])
@pytest.mark.parametrize("guess", [1.0, 10.0, 1000.0])
def test_largest_batch_that_fits_is_found(most, guess):
    found = search(device("num_envs"), lambda s: 1.0)
    found.run()
    asked = []

    def fits(sizes):
        asked.append(sizes.num_envs)
        return sizes.num_envs <= most

    largest = found.largest(fits, guess)
    assert largest.num_envs <= most < 1.3 * largest.num_envs
    assert len(asked) <= 12


def test_vector_sizes_load_workers_evenly():
    space = workers(envs=64, steps=16)

    def sizes(workers):
        found = space.at(learners=1, workers=workers, envs=64, steps=16)
        return found and found.envs_per_vector

    assert [sizes(n) for n in (0, 1, 2, 4, 64)] == [64, 64, 32, 16, 1]
    assert sizes(6) == 4  # 16 vectors: no worker has more than three, and 64 / 6 are 10.7 each
    assert sizes(65) is None
