"""The scripts that hold predictions against measurements, and against what was published."""

import json

import pytest

from benchmarks import diagnosis, gpu_autoscale, predict, timed
from headrace.config.resolve import resolve
from headrace.cost_model.model import simulate
from headrace.tools.profile.advice import topology_of
from headrace.training.job import RunRequest, inspect_request
from tests.cost_model.test_model import SLEEPS


def test_there_are_at_least_twelve_cases_of_all_kinds():
    cases = [case.name for case in predict.CASES]
    assert len(cases) == len(set(cases)) >= 12
    for what in ("0.05 ms", "10 ms", "stalls", "constant", "computes", "sleeps", "--lag 2",
                 "--num-learners 2", "--num-workers 24", "--num-workers 1 "):  # fmt: skip
        assert any(what in name for name in cases), what
    for case in predict.CASES:  # settings that go together
        flags = dict(zip(case.flags[::2], case.flags[1::2], strict=True))
        given = {name[2:].replace("-", "_"): value for name, value in flags.items()}
        resolve({"env": case.id} | {k: v if k == "algo" else int(v) for k, v in given.items()})


def test_each_case_is_also_predicted_from_another_one_s_parts():
    def profile(case, factor):
        flags = dict(zip(case.flags[::2], case.flags[1::2], strict=True))
        given = {name[2:].replace("-", "_"): value for name, value in flags.items()}
        given = {k: v if k == "algo" else int(v) for k, v in given.items()}
        costs = SLEEPS.to_json() | {"step": SLEEPS.step.scaled(factor).to_json()}
        return {"settings": resolve({"env": case.id} | given).flat(), "costs": costs}

    # Parts of each case are slower than those of the one before it.
    profiles = [profile(case, 1 + i) for i, case in enumerate(predict.CASES)]
    found = predict.crossed(predict.CASES, profiles)
    second = topology_of(resolve(profiles[1]["settings"]))
    assert found[1] == simulate(SLEEPS, second)  # with those of the first
    assert found[0] < found[1]  # with those of the last one of the same environment


def test_tables_have_errors_with_their_signs():
    rows = [
        {"env": "e", "flags": "f", "measured": 100.0, "predicted": 110.0, "from_another": 80.0},
        {"env": "e", "flags": "g", "measured": 100.0, "predicted": 99.0, "from_another": 100.0},
    ]
    errors = {name: predict.summary(rows, name) for name in predict.FIGURES[1:]}
    text = predict.tables({"rows": rows, "errors": errors, "num_turns": 2})
    assert "| e | f | 100 | 110 | +10% | 80 | -20% |" in text
    assert "median 5.5%, worst 10.0%" in text and "median 10.0%, worst 20.0%" in text


@pytest.mark.parametrize("times", [*timed.TIMES, "3 100"])
def test_timed_environments_take_the_time_that_they_are_told(times, monkeypatch):
    slept = []
    monkeypatch.setattr(timed.time, "sleep", slept.append)
    env = timed.Timed(times, mean_ms=4.0, more_ms=1.0)
    env.reset(seed=0)
    for _ in range(20_000):
        env.step(0)
    mean = sum(slept) / len(slept)
    assert mean == pytest.approx((51.5 + 1) / 1e3 if times == "3 100" else 0.005, rel=0.05)


def test_the_published_figures_come_out_of_the_model():
    # 24 in lock-step 24 ms; of 2, 3 and 5 steps one of 100 ms: 52, 35 and 23 ms
    assert diagnosis.lock_step_simulated() == pytest.approx(24, rel=0.05)
    for k, published in diagnosis.SMALL.values():
        assert diagnosis.small_simulated(k) == pytest.approx(published, rel=0.05)
    runs = {row["case"]: row["hours"] for row in diagnosis.published_runs()}
    assert 6 < runs["24 CPUs, lock-step"] < 10
    assert 1.5 < runs["24 CPUs, batched"] < 2.5
    assert runs["384 CPUs, batched"] < 0.6
    by_learners = {row["learners"]: row["divided"] for row in diagnosis.learners()[:6]}
    assert by_learners[32] > 20 * by_learners[1]


def test_timed_is_an_environment_that_trains():
    request = RunRequest({"env": predict.ENV, "env_kwargs": {"times": "stalls"}})
    task = inspect_request(request).job(None)
    assert json.dumps(task.settings.flat()) and task.spec.action.nvec == (2,)


def test_a_gpu_s_search_is_drawn_and_told(tmp_path):
    trial = {"num_envs": 100, "num_steps": 20, "outcome": "measured", "rate": 5e3,
             "gpu_bytes": 1 << 30, "memory_bytes": 1}  # fmt: skip
    wall = trial | {"num_envs": 400, "outcome": "memory", "rate": None}
    found = {"trials": [wall, trial | {"num_envs": 200}, trial], "settings": {}, "largest": None}
    assert gpu_autoscale.measured(found) == [(100, 20, 5e3, 1.0), (200, 20, 5e3, 1.0)]
    gpu_autoscale.draw(found, tmp_path / "g.png")
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")
    assert "100 envs x 20 steps: 5,000 env steps/s, 1.00 GiB" in gpu_autoscale.shown(found)
