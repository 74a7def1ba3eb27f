"""Tests of what trials are compared by."""

import math

import pytest

from headrace.errors import ConfigError
from headrace.tuning.metric import Metric, parse_metric


def measured(mean_return, env_steps=1000, seconds=2.0, eval_return=None, episodes=100):
    return {
        "episodes": episodes,
        "mean_return": mean_return,
        "env_steps": env_steps,
        "seconds": seconds,
        "eval_return": eval_return,
    }


def test_returns():
    runs = [measured(1.0, eval_return=10.0), measured(3.0, eval_return=30.0)]
    assert Metric().score(runs) == 20.0
    assert Metric("mean_return").score(runs) == 2.0
    assert Metric("mean_return").score([measured(None), measured(3.0)]) == -math.inf


@pytest.mark.parametrize(("kind", "column"), [("steps_to", "env_steps"), ("seconds_to", "seconds")])
def test_the_sooner_a_goal_is_reached_the_better_and_returns_decide_before_it(kind, column):
    metric = Metric(kind, 100.0)
    reached = [measured(100.0, **{column: n}) for n in (10, 20, 500_000, 2_000_000)]
    missed = [measured(r) for r in (99.9, 50.0, -1e6, None)]
    scores = [metric.score([run]) for run in (*reached, *missed)]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == len(scores)
    assert [metric.value(run) for run in (reached[0], missed[0])] == [10, None]
    assert [metric.ends(run) for run in (reached[0], missed[0])] == [True, False]


def test_seeds_count_by_their_mean_figure():
    metric = Metric("steps_to", 100.0)
    even = [measured(100.0, 50_000), measured(100.0, 50_000)]
    uneven = [measured(100.0, 10_000), measured(100.0, 190_000)]
    half = [measured(100.0, 10), measured(99.9, 10)]
    assert metric.score(even) > metric.score(uneven) > metric.score(half)


def test_a_goal_counts_from_a_hundred_episodes_on():
    metric = Metric("steps_to", 100.0)
    early = measured(120.0, episodes=99)
    assert metric.value(early) is None
    assert not metric.ends(early)
    assert metric.score([early]) < metric.score([measured(100.0, 10**9)])


def test_only_a_goal_ends_a_run_early():
    assert not Metric("mean_return").ends(measured(1e9))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["return"], "there is no metric 'return'"),
        ([], "there is no metric 'nothing'"),
        (["steps_to"], "expected a return after it"),
        (["eval_return", "5"], "expected no more words"),
        (["steps_to", "high"], "'high' is no number"),
        (["steps_to", "nan"], "finite"),
    ],
)
def test_wrong_words_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        parse_metric(words)


def test_words():
    assert parse_metric(["seconds_to", "475"]) == Metric("seconds_to", 475.0)
    assert parse_metric(["eval_return"]) == Metric()
