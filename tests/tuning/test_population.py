"""Population-based training: who replaces whom, and whole studies with real runs."""

import signal
import subprocess
import tomllib

import pytest

import headrace
from headrace.errors import ConfigError
from headrace.storage.metrics import read_metrics
from headrace.tuning.metric import Metric
from headrace.tuning.plan import Plan, Trial, read_trials
from headrace.tuning.population import (
    copy_run,
    describe_replay,
    exchanges,
    is_exchanged,
    make_generations,
)
from headrace.tuning.results import best_toml
from headrace.tuning.space import Parameter
from tests import python
from tests.tuning.test_study import SETTINGS, rows, without_clocks

READY = 192
SEARCH = {
    "pbt": True, "population": 4, "ready_env_steps": READY, "parallel": 1,
    "final_trials": 1, "final_seeds": 1, "quiet": True,
}  # fmt: skip
SETTINGS = SETTINGS | {"total_env_steps": 3 * READY}


def plan_of(population, generations=4):
    return Plan(
        "tune", "CartPole-v1", "ppo", {}, {}, [], {}, "random", "none", Metric(), population, 1, 0,
        [0], [100 * (i + 1) for i in range(generations)], 0, 0, [], 0.0, "0", population,
    )  # fmt: skip


def member(number, *scores, state="waiting", **more):
    measured = [{"0": {"eval_return": score}} for score in scores]
    return Trial(number, {"lr": 1.0}, {}, state, measured=measured, **more)


def test_the_worst_quarter_is_replaced_by_the_best_quarter():
    scores = [5.0, 9.0, 1.0, 7.0, 3.0, 8.0, 2.0, 6.0]
    trials = [member(i, score) for i, score in enumerate(scores)]
    found = exchanges(plan_of(8), trials, 0)
    assert {each.loser.number for each in found} == {2, 6}
    assert {each.donor.number for each in found} <= {1, 5}


def test_what_has_been_replaced_changes_nothing_of_who_is():
    trials = [member(i, float(i)) for i in range(7)]
    (before,) = exchanges(plan_of(7), trials, 0)
    assert (before.loser.number, before.donor.number) == (0, 6)
    trials[0].state = "replaced"
    trials.append(member(7, 6.0, parent=6, born=0, replaces=0))
    (after,) = exchanges(plan_of(7), trials, 0)
    assert (after.loser.number, after.donor.number) == (0, 6)
    for trial, score in zip(trials[1:], (1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 6.0), strict=True):
        trial.measured.append({"0": {"eval_return": score}})
    (later,) = exchanges(plan_of(7), trials, 1)
    assert (later.loser.number, later.donor.number) == (1, 6)


def test_an_exchange_is_done_once_a_member_has_gone_on():
    trials = [member(i, float(i)) for i in range(4)]
    assert not is_exchanged(plan_of(4), trials, 0)
    trials[0] = member(0, state="failed")  # on its way there
    assert not is_exchanged(plan_of(4), trials, 0)
    for gone_on in (
        member(1, 1.0, 5.0), member(1, 1.0, state="running"), member(1, 1.0, state="failed")
    ):  # fmt: skip
        assert is_exchanged(plan_of(4), [trials[0], gone_on, *trials[2:]], 0)


def test_equals_stay_and_the_failed_are_replaced():
    trials = [member(i, 5.0) for i in range(4)]
    assert exchanges(plan_of(4), trials, 0) == []
    trials[1] = member(1, state="failed")
    (one,) = exchanges(plan_of(4), trials, 0)
    assert (one.loser.number, one.donor.number) == (1, 0)
    trials.append(member(4, 5.0, parent=0, born=0, replaces=1))
    for trial in (trials[0], *trials[2:]):
        trial.measured.append({"0": {"eval_return": 5.0}})
    assert exchanges(plan_of(4), trials, 1) == []


@pytest.mark.parametrize(
    ("parameter", "value", "factor", "expected"),
    [
        (Parameter("lr", "log", (1e-5, 1e-2)), 1e-3, 1.25, 1.25e-3),
        (Parameter("lr", "log", (1e-5, 1e-2)), 9e-3, 1.25, 1e-2),
        (Parameter("lr", "log", (1e-5, 1e-2)), 0.5, 1.25, 0.5),  # a preset's, outside
        (Parameter("lr", "log", (1e-5, 1e-2)), 0.5, 0.8, 0.4),
        (Parameter("gamma", "one_minus_log", (1e-3, 0.1)), 0.99, 1.25, 0.9875),
        (Parameter("c", "uniform", (0.3, 1.0)), 0.5, 0.8, 0.4),
    ],
    ids=str,
)
def test_a_value_times_a_factor_stays_in_its_range(parameter, value, factor, expected):
    assert parameter.times(value, factor) == pytest.approx(expected)


def test_a_copy_of_a_run_is_whole_and_shares_its_checkpoints(tmp_path):
    source, target = tmp_path / "0001", tmp_path / "0009"
    for name in ("config.json", "metrics.jsonl", ".lock", ".running", "checkpoints/step_1/weights"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    for left in (target, tmp_path / ".0009.copy"):  # by a process that was killed
        left.mkdir()
        (left / "half").touch()
    copy_run(source, target)
    assert sorted(p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file()) == [
        "checkpoints/step_1/weights", "config.json", "metrics.jsonl"
    ]  # fmt: skip
    assert (target / "checkpoints/step_1/weights").samefile(source / "checkpoints/step_1/weights")
    (target / "metrics.jsonl").write_text("more")
    assert (source / "metrics.jsonl").read_text() == "metrics.jsonl"
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["0001", "0009"]


def test_what_becomes_of_a_replay_is_said():
    assert describe_replay(headrace.PPO()) == ""
    assert describe_replay(headrace.DQN()) == "its replay is linked"
    assert describe_replay(headrace.DQN(save_replay=False)) == "its replay is filled anew"


@pytest.mark.slow
def test_a_population_with_a_replay_goes_on_with_that_of_the_other(tmp_path, capsys):
    """A copy is one run by its schedules: it learned from the other's transitions."""
    algo = headrace.DQN(learning_starts=64, replay_size=2000)
    sizes = {name: SETTINGS[name] for name in ("num_workers", "seed", "total_env_steps")}
    study = headrace.tune(
        "CartPole-v1", study=tmp_path / "s", algo=algo, **sizes | {"num_envs": 1, "num_steps": 4},
        **SEARCH | {"quiet": False, "final_seeds": 0},
    )  # fmt: skip
    assert "; its replay is linked" in capsys.readouterr().out
    assert set(study.plan.space) == {"lr"}
    trials = read_trials(study.dir)
    child = max(children_of(trials), key=lambda trial: trial.rung(1))
    path = tmp_path / "best.toml"
    path.write_text(best_toml(study.plan, trials, child))
    until = study.plan.rungs[child.rung(1)]
    run = headrace.train(
        "CartPole-v1", config=path, seed=3, run_dir=tmp_path / "run", quiet=True,
        total_env_steps=until, schedule_env_steps=SETTINGS["total_env_steps"],
    )  # fmt: skip
    assert rows(run.dir) == rows(study.dir / f"trials/{child.number:04d}")


def test_generations():
    assert make_generations(1000, 300, 10) == [300, 600, 900, 1000]
    assert make_generations(1000, 0, 10) == [100 * i for i in range(1, 11)]
    assert make_generations(1000, 0, 64) == [320, 640, 960, 1000]
    assert make_generations(1000, 0, 10, learning_starts=150) == [100 * i for i in range(3, 11)]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A population that nothing cut."""
    folder = tmp_path_factory.mktemp("population") / "uncut"
    return headrace.tune("CartPole-v1", study=folder, **SEARCH, **SETTINGS)


def children_of(trials):
    return [trial for trial in trials if trial.parent >= 0]


@pytest.mark.more
def test_a_population_replaces_its_worst_in_each_generation(study):
    trials = read_trials(study.dir)
    assert study.plan.rungs == [READY, 2 * READY, 3 * READY]
    assert trials[0].changes == {}
    assert set(study.plan.space) == {"lr", "gae_lambda", "clip_coef", "ent_coef"}
    born = [trial.born for trial in children_of(trials)]
    assert born
    assert set(born) <= {0, 1}
    for child in children_of(trials):
        loser, donor = trials[child.replaces], trials[child.parent]
        rung = child.born
        values = [t.measured[rung]["3"]["eval_return"] for t in (loser, donor, child)]
        assert values[0] < values[1] == values[2]
        assert loser.state == "replaced"
        assert loser.rung(1) == rung
    living = [trial for trial in trials if trial.state == "whole"]
    assert len(living) == 4
    assert f", copy of {children_of(trials)[0].parent}" in study.describe()
    assert study.plan.space["clip_coef"] == {"uniform": [0.1, 0.3]}


@pytest.mark.more
def test_a_copied_member_learns_by_its_own_values_from_the_next_update_on(study):
    """Ray's open fault: values that were perturbed are overwritten by the checkpoint's."""
    for child in children_of(read_trials(study.dir)):
        at = study.plan.rungs[child.born]
        (*_, before), *_ = child.changes["lr_schedule"]
        last = child.changes["lr_schedule"][-1][1]
        rates = {
            r["env_steps"]: r["lr"] for r in read_metrics(study.dir / f"trials/{child.number:04d}")
        }
        after = [rate for env_steps, rate in rates.items() if env_steps > at]
        assert after == pytest.approx([last] * len(after))
        assert next(iter(rates.values())) == pytest.approx(before)
        assert last == child.values["lr"]


@pytest.mark.more
def test_a_member_is_one_run_by_its_schedules(study, tmp_path):
    """Its directory holds the metrics of a run from the start with `best.toml`, to the bit."""
    trials = read_trials(study.dir)
    child = max(children_of(trials), key=lambda trial: trial.rung(1))
    path = tmp_path / "best.toml"
    path.write_text(best_toml(study.plan, trials, child))
    assert tomllib.loads(path.read_text())["lr_schedule"] == child.changes["lr_schedule"]
    until = study.plan.rungs[child.rung(1)]
    assert until > study.plan.rungs[child.born]
    run = headrace.train(
        "CartPole-v1", config=path, seed=3, run_dir=tmp_path / "run", quiet=True,
        total_env_steps=until, schedule_env_steps=SETTINGS["total_env_steps"],
    )  # fmt: skip
    assert rows(run.dir) == rows(study.dir / f"trials/{child.number:04d}")


PROGRAM = """
import sys, headrace
headrace.tune(study=sys.argv[1], env="CartPole-v1", **{search} | {settings})
"""


@pytest.mark.slow
def test_a_population_that_is_killed_goes_on_to_the_same_end(study, tmp_path):
    """It is killed as soon as it has said that a member replaces another."""
    folder = tmp_path / "cut"
    program = PROGRAM.format(search=SEARCH | {"quiet": False}, settings=SETTINGS)
    command = [python.sys.executable, "-c", program, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert any(" replaces " in line for line in process.stdout)
        process.send_signal(signal.SIGKILL)
    assert without_clocks(folder) != without_clocks(study.dir)
    headrace.tune(study=folder, quiet=True)
    assert without_clocks(folder) == without_clocks(study.dir)
    with pytest.raises(ConfigError, match="goes on with its 4 members"):
        headrace.tune(study=folder, trials=9, quiet=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pbt": True, "trials": 9}, "trials: no option of a population"),
        ({"pbt": True, "sampler": "grid"}, "sampler: no option of a population"),
        ({"population": 9}, "population: an option of population-based training. Add --pbt"),
        ({"pbt": True, "population": 1}, "population=1: expected at least 2"),
        ({"pbt": True, "ready_env_steps": 576}, "nothing would be replaced"),
        ({"pbt": True, "space": {"num_epochs": {"choice": [1, 2]}}}, "num_epochs: a population"),
        (
            {"pbt": True, "lr": 1e-3, "gae_lambda": 0.9, "clip_coef": 0.2, "ent_coef": 0.0},
            "All settings that a population could vary .* are fixed",
        ),
        ({"pbt": True, "metric": "steps_to 100"}, "a population is compared by a return"),
    ],
    ids=str,
)
def test_what_a_population_cannot_be(tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        headrace.tune("CartPole-v1", study=tmp_path / "s", quiet=True, **options, **SETTINGS)
    assert not (tmp_path / "s").exists()
