"""What is made of fresh seeds when a budget ends before all of them have."""

import tomllib
from dataclasses import replace
from types import SimpleNamespace

import pytest

from headrace.training.job import RunRequest
from headrace.tuning import results
from headrace.tuning.metric import Metric
from headrace.tuning.plan import Plan, Trial
from headrace.tuning.study import Search

SEEDS = [1000, 1001, 1002, 1003]


def plan_of(seeds):
    return Plan(
        "tune", "CartPole-v1", "ppo", {}, {}, [], {"lr": {"log": [1e-4, 1e-2]}}, "random", "none",
        Metric(), 4, 2, 0, [0], [1000], 20, 2, seeds, 60.0, "0",
    )  # fmt: skip


def trial_of(number, score, *fresh):
    changes = {"lr": number * 1e-3} if number else {}
    runs = {str(seed): run(value) for seed, value in zip(SEEDS, fresh, strict=False)}
    return Trial(number, changes, changes, "whole", measured=[{"0": run(score)}], fresh=runs)


def run(value):
    return {"env_steps": 1000, "eval_return": value, "mean_return": value, "episodes": 100}


def test_the_preset_and_the_best_are_trained_seed_by_seed_and_then_others(tmp_path):
    trials = [trial_of(0, 5.0), trial_of(1, 7.0), trial_of(2, 9.0), trial_of(3, 1.0)]
    search = Search(plan_of(SEEDS[:2]), RunRequest(), tmp_path, trials, print)
    runner, asked = SimpleNamespace(keys=[]), []
    while (key := search._next_of_final(runner)) is not None:
        runner.keys.append(key)
        asked.append((key.number, key.seed))
    first = [(number, seed) for seed in SEEDS[:2] for number in (0, 2)]
    assert asked == [*first, (1, 1000), (1, 1001)]


@pytest.mark.parametrize(
    ("of_preset", "of_best", "compared"),
    [
        ((), (), 0), ((1.0,), (2.0,), 0), ((1.0, 1.0, 1.0), (2.0, 4.0), 2),
        ((1.0, 1.0, 1.0, 1.0), (2.0, 2.0, 2.0, 2.0), 4),
    ],
)  # fmt: skip
def test_what_a_budget_left_is_compared(of_preset, of_best, compared):
    plan = plan_of(SEEDS)
    trials = [trial_of(0, 5.0, *of_preset), trial_of(1, 9.0, *of_best), trial_of(2, 7.0)]
    assert results.fresh_seeds(plan, trials) == SEEDS[:compared]
    assert results.best_of(plan, trials) is trials[1]
    said = " ".join(results.verdict(plan, trials))
    if compared:
        assert f"Best on {compared} fresh seeds" in said
        assert ("(2 more have not ended)" in said) == (compared == 2)
        assert f"That is {sum(of_best) / compared - 1:.1f} more than the preset" in said
    else:
        assert said == "Best: trial 1, eval_return 9.0."


@pytest.mark.parametrize("seeds", [2, 3])
def test_two_seeds_have_no_interval(seeds):
    values = (1.0, 3.0, 5.0)[:seeds]
    fresh = results.fresh_of(plan_of(SEEDS[:seeds]), trial_of(0, 5.0, *values), SEEDS[:seeds])
    assert fresh.mean == sum(values) / seeds
    assert (fresh.interval is None) == (seeds == 2)


def test_one_seed_is_no_proof():
    plan = plan_of(SEEDS[:1])
    said = " ".join(results.verdict(plan, [trial_of(0, 5.0, 1.0), trial_of(1, 9.0, 2.0)]))
    assert "Best on 1 fresh seed: trial 1" in said
    assert "1.0 more than the preset with 1 seed: it may be chance." in said


def test_best_toml_says_what_toml_cannot_hold():
    plan = replace(plan_of(SEEDS), fixed={"env_kwargs": {"map": None}, "num_envs": 4})
    trials = [trial_of(0, 5.0)]
    text = results.best_toml(plan, trials, trials[0])
    assert tomllib.loads(text) == {
        "algo": "ppo", "total_env_steps": 1000, "num_envs": 4,
    }  # fmt: skip
    assert "# Give this yourself, since TOML has no None: env_kwargs={'map': None}" in text


def test_what_a_cut_study_has_not_done():
    plan, trials = plan_of(SEEDS[:2]), [trial_of(0, 5.0, 1.0), trial_of(1, 9.0, 2.0, 2.0)]
    assert results.unfinished(plan, trials) == [
        "Not finished: 2 of 4 trials have not begun, 1 of 4 runs with fresh seeds have not ended."
    ]
    trials += [trial_of(2, 1.0), trial_of(3, 1.0)]
    trials[2].state, trials[2].measured = "running", []
    runs = {"1001": run(1.0)}
    trials[0].fresh |= runs
    assert results.unfinished(replace(plan, final_trials=1), trials) == [
        "Not finished: 1 has begun and not ended."
    ]
    trials[2].state = "failed"
    assert results.unfinished(replace(plan, final_trials=1), trials) == []
    members = replace(plan, final_seeds=[], population=2)
    trials[1].state = "waiting"
    assert results.unfinished(members, trials[:2]) == ["Not finished: 1 has begun and not ended."]


def test_the_best_comes_first_and_says_how_far_it_was_trained():
    plan = plan_of(SEEDS[:2])
    trials = [trial_of(0, 5.0, 1.0, 1.0), trial_of(1, 9.0, 0.0, 0.0), trial_of(2, 7.0, 2.0, 2.0)]
    assert [t.number for t in results.best_first(plan, trials)] == [2, 1, 0]
    early = trial_of(1, 9.0)
    early.state = "waiting"
    (said,) = results.verdict(plan, [early])
    assert said == "Best: trial 1, eval_return 9.0 after 1,000 env steps."


def test_a_failed_preset_is_said():
    plan, preset = plan_of(SEEDS[:2]), Trial(0, {}, {}, "failed", "env: broken")
    trials = [preset, trial_of(1, 9.0, 1.0, 1.0)]
    assert "preset failed: env: broken" in results.describe(plan, trials)
    assert "The preset failed, so there is nothing to compare with." in results.verdict(
        plan, trials
    )


def test_how_to_train_with_the_best(tmp_path):
    plan = plan_of(SEEDS)
    assert plan.train_command(tmp_path) == f"headrace train CartPole-v1 --config {tmp_path}"
    unnamed = replace(plan, env="Point", code=["env"])
    assert unnamed.train_command(tmp_path) == (
        f"headrace.train(Point, config='{tmp_path}') in Python"
    )
