"""Tests of whole studies with real runs: what they end with, cuts, failures, and the files left."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import threading
import tomllib

import pytest

import headrace
from headrace.errors import ConfigError, HeadraceError, RunDirError
from headrace.machine.limits import cpu_cores
from headrace.storage.metrics import read_metrics, starts, total_seconds
from headrace.training.api import request_for
from headrace.training.job import inspect_request
from headrace.tuning.api import load_study
from headrace.tuning.plan import Trial, read_plan, read_trials
from headrace.tuning.planning import Options, plan_of
from headrace.tuning.results import best_toml
from headrace.tuning.study import Search
from tests import python
from tests.faults.support import small_disk
from tests.marks import repeats
from tests.support import Counting, children, leaders, still_alive

SPACE = {"lr": {"log": [1e-4, 1e-2]}, "num_epochs": {"choice": [1, 4]}}
SETTINGS = {"total_env_steps": 1152, "num_envs": 4, "num_steps": 16, "num_workers": 0, "seed": 3}
RUNGS = [384, 1152]
SEARCH = {
    "space": SPACE, "trials": 6, "sampler": "random", "parallel": 1,
    "final_trials": 1, "final_seeds": 2, "quiet": True,
}  # fmt: skip
CLOCKS = ("wall_s", "env_steps_per_s")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study that nothing cut."""
    before = children()
    folder = tmp_path_factory.mktemp("study") / "uncut"
    found = headrace.tune("CartPole-v1", study=folder, **SEARCH, **SETTINGS)
    assert still_alive(leaders(children() - before), 10) == []
    return found


def rows(run_dir):
    """All that a run wrote down, but for what the clock says."""
    return [
        {
            k: v
            for k, v in row.items()
            if k not in CLOCKS and not k.startswith(("seconds/", "ledger/"))
        }
        for row in read_metrics(run_dir)
    ]


def without_clocks(folder):
    """All that is known of a study's trials, but for what the clock says."""

    def plain(part):
        return {k: v for k, v in part.items() if k not in ("seconds", "env_steps_per_s")}

    return [
        (
            trial.number, trial.changes, trial.values, trial.state, trial.reason,
            [{seed: plain(part) for seed, part in rung.items()} for rung in trial.measured],
            {seed: plain(part) for seed, part in trial.fresh.items()},
        )
        for trial in read_trials(folder)
    ]  # fmt: skip


def test_a_study_trains_the_best_on_and_measures_them_again(study):
    trials = read_trials(study.dir)
    assert [trial.number for trial in trials] == list(range(6))
    assert trials[0].changes == {}
    assert trials[0].values == {"lr": 1e-3, "num_epochs": 5}  # the preset's
    assert {len(trial.measured) for trial in trials} == {1, 2}
    assert {t.measured[0]["3"]["env_steps"] for t in trials} == {RUNGS[0]}
    first = {t.number: t.measured[0]["3"]["eval_return"] for t in trials}
    best = sorted(first, key=lambda number: (-first[number], number))
    whole = [t.number for t in trials if t.state == "whole"]
    assert len(whole) == 2
    assert best[0] in whole
    again = [t for t in trials if t.fresh]
    assert 0 in [t.number for t in again]
    assert {seed for t in again for seed in t.fresh} == {"1003", "1004"}


def test_seconds_are_those_of_all_processes_of_a_run(study):
    trials = read_trials(study.dir)
    for trial in trials:
        ends = [total_seconds(read_metrics(study.dir / f"trials/{trial.number:04d}"))[-1]]
        if trial.fresh:
            runs = [study.dir / f"fresh/{trial.number:04d}-s{seed}" for seed in trial.fresh]
            ends += [total_seconds(read_metrics(run))[-1] for run in runs]
        assert trial.measured[-1]["3"]["seconds"] == ends[0]
        assert trial.seconds == pytest.approx(sum(ends))
    parts = read_metrics(study.dir / "trials/0000")
    assert sum(starts(parts)) == len(trials[0].measured)


def test_a_study_keeps_its_lock_for_others_to_wait_at(study):
    assert (study.dir / ".lock").exists()


def test_the_command_that_goes_on_names_code_again(study):
    plan = dataclasses.replace(
        study.plan, env="m:Env", algo="m:Algo", code=["env", "wrapper", "model", "algo"],
        fixed={"wrapper": ["m:one", "m:two"], "model": "m:net"},
    )  # fmt: skip
    assert plan.command(study.dir) == (
        "headrace tune m:Env --wrapper m:one m:two --model m:net --algo m:Algo "
        f"--resume {study.dir}"
    )


def test_a_trial_that_went_on_is_as_one_that_was_run_through(study, tmp_path):
    trial = next(t for t in read_trials(study.dir) if t.state == "whole" and t.changes)
    parts = read_metrics(study.dir / f"trials/{trial.number:04d}")
    steps = [row["env_steps"] for row in parts]
    assert RUNGS[0] in steps
    assert steps[-1] == RUNGS[1]
    through = tmp_path / "through"
    settings = SETTINGS | trial.changes | read_plan(study.dir).sizes
    headrace.train("CartPole-v1", run_dir=through, quiet=True, deterministic=True, **settings)
    assert rows(study.dir / f"trials/{trial.number:04d}") == rows(through)


def test_best_toml_trains_what_was_measured(study, tmp_path):
    text = (study.dir / "best.toml").read_text()
    assert "# Measured again with seeds 1003 and 1004." in text
    assert {name: tomllib.loads(text)[name] for name in study.best} == study.best
    trials = read_trials(study.dir)
    other = next(trial for trial in trials if trial.fresh and trial.changes)  # as if it were best
    path = tmp_path / "best.toml"
    path.write_text(best_toml(study.plan, trials, other))
    run = headrace.train("CartPole-v1", config=path, seed=1004, run_dir=tmp_path / "r", quiet=True)
    assert rows(run.dir) == rows(study.dir / f"fresh/{other.number:04d}-s1004")
    assert run.mean_return == other.fresh["1004"]["mean_return"]


def test_what_python_gets(study):
    table = study.table()
    assert table["number"] == list(range(6))
    assert len({len(column) for column in table.values()}) == 1
    assert table["lr"][0] == 1e-3
    assert "fresh" in study.describe()
    data = json.loads(json.dumps(study.to_json()))
    assert data["best_settings"] == study.best
    assert len(data["trials"]) == 6


PROGRAM = """
import sys, headrace
headrace.tune(study=sys.argv[1], env="{env}", **{search} | {settings})
"""


@pytest.mark.parametrize(
    "kills", [pytest.param(2, marks=pytest.mark.more), pytest.param(10, marks=pytest.mark.slow)]
)
def test_a_study_that_is_killed_goes_on_to_the_same_end(study, tmp_path, kills):
    """Each process is killed as soon as it has said what one more part has measured."""
    folder = tmp_path / "cut"
    began = PROGRAM.format(env="CartPole-v1", search=SEARCH | {"quiet": False}, settings=SETTINGS)
    went_on = "import sys, headrace; headrace.tune(study=sys.argv[1], trials=6)"
    before = children()
    for kill in range(kills):
        program = went_on if (folder / "study.json").exists() else began
        command = [python.sys.executable, "-c", program, str(folder)]
        with python.Python(command, stdout=subprocess.PIPE, text=True) as process:
            lines = (line for line in process.stdout if " after " in line)
            next((line for _, line in zip(range(1 + kill % 2), lines, strict=False)), None)
            os.kill(process.pid, signal.SIGKILL)
    headrace.tune(study=folder, quiet=True)
    assert without_clocks(folder) == without_clocks(study.dir)
    assert still_alive(leaders(children() - before), 10) == []


class Announcing(Counting):
    """Opens a pipe at its 40th step, if somebody reads it."""

    def __init__(self, pipe):
        super().__init__(truncate_at=100)
        self.pipe = pipe

    def step(self, action):
        if self.t == 40:
            with contextlib.suppress(OSError):
                os.close(os.open(self.pipe, os.O_WRONLY | os.O_NONBLOCK))
        return super().step(action)


def test_a_signal_saves_what_is_under_way(tmp_path):
    folder, pipe = tmp_path / "stopped", tmp_path / "pipe"
    os.mkfifo(pipe)
    settings = SETTINGS | {"total_env_steps": 10**9, "env_kwargs": {"pipe": str(pipe)}}
    program = PROGRAM.format(
        env="tests.tuning.test_study:Announcing",
        search=SEARCH | {"quiet": False, "prune": "none"},
        settings=settings,
    )
    command = [python.sys.executable, "-c", program, str(folder)]
    with python.Python(command, stdout=subprocess.PIPE, text=True) as process:
        pipe.read_bytes()  # until the pipe was opened and closed
        process.send_signal(signal.SIGINT)
        said = process.stdout.read()
        assert process.wait(60) != 0
    code = "tests.tuning.test_study:Announcing"
    assert f"To go on: headrace tune {code} --resume {folder}" in said
    assert list((folder / "trials/0000/checkpoints").glob("step_*"))
    (trial,) = read_trials(folder)
    assert trial.state == "running"
    told = load_study(folder).describe()
    assert "Not finished: 5 of 6 trials have not begun, 1 has begun and not ended." in told
    assert f"To go on: headrace tune {code} --resume {folder}" in told
    known = load_study(folder)
    plan = dataclasses.replace(known.plan, budget_s=60.0)
    told = dataclasses.replace(known, plan=plan).describe()
    assert f"{code} --resume {folder} --budget-s 120 (seconds of the whole study, which has" in told
    with pytest.raises(RunDirError, match=f"go on with it: headrace tune {code} --resume {folder}"):
        headrace.sweep("CartPole-v1", {"lr": [1e-3]}, study=folder, quiet=True)


class Picky(Counting):
    """Fails in its own way where there are more of it than 4."""

    made = 0

    def __init__(self, way):
        super().__init__(truncate_at=10)
        self.way, self.number = way, Picky.made
        Picky.made += 1

    def step(self, action):
        if self.number > 16 and self.way == "raise":
            raise ValueError("one too many")
        if self.number > 16 and self.way == "memory":
            raise MemoryError("no room")
        if self.number > 16 and self.way == "die":
            os._exit(3)
        return super().step(action)


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("raise", "env: ValueError: one too many"),
        ("memory", "memory: "),
        ("die", "crashed: died (exit code 3)"),
    ],
)
def test_a_trial_that_fails_is_in_the_table_and_the_study_goes_on(tmp_path, way, reason):
    study = headrace.tune(
        lambda: Picky(way), study=tmp_path / "s", space={"num_envs": {"choice": [4, 64]}},
        sampler="grid", trials=3, parallel=1, prune="none", final_seeds=0, quiet=True,
        metric="mean_return", total_env_steps=512, num_steps=8,
    )  # fmt: skip
    failed = [row for row in study.trials if row["state"] == "failed"]
    assert [row["values"]["num_envs"] for row in failed] == [64]
    assert failed[0]["reason"].startswith(reason)
    assert [row["state"] for row in study.trials].count("whole") == 2
    assert f"failed: {reason}" in study.describe()


class InTurns(Counting):
    """Of the processes that step it, the first waits for ever, and the second raises."""

    def __init__(self, folder):
        super().__init__(truncate_at=10)
        self.folder, self.turn = folder, None

    def step(self, action):
        while self.turn is None:
            turn = len(list(self.folder.iterdir()))
            with contextlib.suppress(FileExistsError):
                (self.folder / str(turn)).touch(exist_ok=False)
                self.turn = turn
        if self.turn == 0:
            threading.Event().wait()
        if self.turn == 1:
            raise ValueError("not this seed")
        return super().step(action)


def test_other_seeds_of_a_trial_that_failed_end_with_it(tmp_path):
    turns = tmp_path / "turns"
    turns.mkdir()
    study = headrace.tune(
        lambda: InTurns(turns), study=tmp_path / "s", space={"lr": {"choice": [1e-3]}}, trials=2,
        sampler="grid", seeds=2, parallel=2, metric="mean_return", prune="none", final_seeds=0,
        quiet=True, num_envs=1, num_steps=64, num_workers=0, total_env_steps=128, guards=False,
    )  # fmt: skip
    assert [row["state"] for row in study.trials] == ["failed", "whole"]


def test_a_gradient_that_is_not_finite_fails_its_trial_alone(tmp_path):
    study = headrace.tune(
        "CartPole-v1", study=tmp_path / "s", space={"lr": {"choice": [1e-3, 1e38]}}, trials=9,
        sampler="grid", metric="mean_return", prune="none", final_seeds=0, quiet=True, **SETTINGS,
    )  # fmt: skip
    assert len(study.trials) == 3  # the preset, and the points of the grid
    (failed,) = (row for row in study.trials if row["state"] == "failed")
    assert failed["values"]["lr"] == 1e38
    assert failed["reason"].startswith("diverged: Update ")


def test_a_study_whose_first_trials_all_fail_ends_with_their_reason(tmp_path):
    def broken():
        raise RuntimeError("no such file: maze.txt")

    class Broken(Counting):
        def step(self, action):
            broken()

    with pytest.raises(HeadraceError, match=r"The first 2 trials all failed[\s\S]*maze\.txt"):
        headrace.tune(
            Broken, study=tmp_path / "s", trials=2, parallel=1, sampler="random", quiet=True,
            total_env_steps=512,
        )  # fmt: skip
    told = load_study(tmp_path / "s").describe()
    assert "begin a new study" in told
    assert "To go on" not in told
    with pytest.raises(ConfigError, match="The first 2 trials all failed"):
        headrace.tune(Broken, study=tmp_path / "s", trials=3, quiet=True)


def test_no_trial_begins_after_three_failures_while_others_are_under_way(tmp_path):
    class Broken(Counting):
        def step(self, action):
            raise RuntimeError("no such file: maze.txt")

    with pytest.raises(HeadraceError, match=r"The first [34] trials all failed"):
        headrace.tune(
            Broken, study=tmp_path / "s", trials=12, parallel=2, sampler="random", quiet=True,
            total_env_steps=512,
        )  # fmt: skip
    assert len(load_study(tmp_path / "s").trials) <= 4


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({"lr": {"choice": [1e-3, -1.0]}}, "The space's lr: lr=-1.0"),
        ({"gamma": {"uniform": [0.9, 1.5]}}, "The space's gamma: gamma=1.5"),
        ({"activation": {"choice": ["tanh", "gelu"]}}, "The space's activation: .*gelu"),
    ],
)
def test_values_outside_a_setting_s_own_bounds_are_refused_at_the_start(tmp_path, space, words):
    with pytest.raises(ConfigError, match=words):
        headrace.tune("CartPole-v1", space=space, study=tmp_path / "s", quiet=True, **SETTINGS)
    assert not (tmp_path / "s").exists()
    with pytest.raises(ConfigError, match=r"The grid's lr: lr=-1\.0"):
        headrace.sweep("CartPole-v1", {"lr": [1e-3, -1.0]}, study=tmp_path / "s", **SETTINGS)


def test_a_study_in_which_something_was_measured_does_not_end_at_failures(study):
    """As after a resume, once a fault of the environment has been mended."""
    request = inspect_request(request_for("CartPole-v1", **SETTINGS))
    failed = [Trial(i, {}, {}, "failed", "env: broken") for i in range(3)]
    measured = read_trials(study.dir)[3:]
    Search(study.plan, request, study.dir, failed + measured, print)._end_if_all_failed("another")
    with pytest.raises(HeadraceError, match="The first 3 trials all failed"):
        Search(study.plan, request, study.dir, failed, print)._end_if_all_failed("another")
    under_way = [Trial(3, {}, {}, "running")]
    Search(study.plan, request, study.dir, failed + under_way, print)._end_if_all_failed("another")


def test_a_study_is_not_told_to_have_less_than_it_has(study):
    spent = max(trial.spent_s for trial in read_trials(study.dir))
    for changes, words in (
        ({"trials": 2}, "trials=2, but the study has"),
        ({"budget_s": spent / 2}, "but the study has taken .* s already"),
    ):
        with pytest.raises(ConfigError, match=words):
            headrace.tune(study=study.dir, quiet=True, **changes)


@pytest.mark.more
def test_several_seeds_and_a_goal(tmp_path):
    """All episodes have a return of 10: the smaller batch sees the hundredth of them sooner."""
    study = headrace.tune(
        "tests.tuning.test_study:short", study=tmp_path / "s", sampler="grid", trials=3, seeds=2,
        space={"num_steps": {"choice": [8, 96]}}, metric="steps_to 10", final_seeds=0,
        quiet=True, num_envs=4, total_env_steps=100_000, seed=3,
    )  # fmt: skip
    assert {row["values"]["num_steps"]: row["value"] for row in study.trials[1:]} == {
        8: 1024,
        96: 1152,
    }
    assert {row["state"] for row in study.trials} == {"whole"}  # at the first rung
    assert study.best == {"num_steps": 8}
    assert (tmp_path / "s/trials/0001-s3/config.json").exists()
    assert (tmp_path / "s/trials/0001-s4/config.json").exists()
    assert tomllib.loads((tmp_path / "s/best.toml").read_text())["stop_at_return"] == 10


def test_a_sweep_trains_each_combination_with_each_seed(tmp_path):
    study = headrace.sweep(
        "CartPole-v1", {"lr": [1e-3, 1e-4], "num_epochs": [1, 2]}, seeds=2, study=tmp_path / "s",
        metric="mean_return", quiet=True, **SETTINGS | {"total_env_steps": 1024},
    )  # fmt: skip
    assert [row["values"] for row in study.trials] == [
        {"lr": lr, "num_epochs": epochs} for lr in (1e-3, 1e-4) for epochs in (1, 2)
    ]
    assert {row["state"] for row in study.trials} == {"whole"}
    runs = sorted(path.parent.name for path in study.dir.glob("trials/*/config.json"))
    assert runs == [f"{i:04d}-s{seed}" for i in range(4) for seed in (3, 4)]


@pytest.mark.more
def test_a_full_disk_ends_a_study_in_words_and_it_goes_on_when_there_is_room(study, tmp_path):
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        disk.fill(leave_bytes=400 << 10)  # room for some of its runs
        folder = disk.path / "s"
        with pytest.raises(RunDirError, match="No space left on device"):
            headrace.tune("CartPole-v1", study=folder, **SEARCH, **SETTINGS)
        assert 0 < sum(bool(trial.measured) for trial in read_trials(folder)) < 6
        disk.clear()
        headrace.tune(study=folder, quiet=True)
        assert without_clocks(folder) == without_clocks(study.dir)


@repeats("final_seeds", [2, 0])
def test_a_budget_ends_the_search(tmp_path, final_seeds):
    settings = SETTINGS | {"total_env_steps": 50_000_000}
    search = SEARCH | {"budget_s": 4.0, "prune": "none", "final_seeds": final_seeds}
    study = headrace.tune("CartPole-v1", study=tmp_path / "s", **search, **settings)
    assert [row["state"] for row in study.trials] == ["running"]
    assert study.best is None
    assert read_trials(tmp_path / "s")[0].spent_s >= 4.0
    assert list((tmp_path / "s/trials/0000/checkpoints").glob("step_*"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"space": {"lrr": {"log": [1e-5, 1e-2]}}}, "Did you mean lr"),
        ({"space": {"lr": {"choice": [-1.0]}}}, "lr"),
        ({"space": {"seed": {"int": [0, 5]}}}, "a study decides this itself"),
        ({"space": {"total_env_steps": {"int": [1, 5000]}}}, "a study decides this itself"),
        ({"space": {"model": {"choice": ["m:a"]}}}, "a study decides this itself"),
        ({"lr": 1e-3}, "fixed by a flag or file, and in the space as well"),
        ({"stop_at_return": 0.0}, "steps_to RETURN"),
        ({"trials": 0}, "expected at least 1"),
        ({"sampler": "bayes"}, "expected one of tpe"),
        ({"prune": "hard"}, "expected one of asha"),
        ({"metric": "speed"}, "there is no metric"),
        ({"cluster": "127.0.0.1:1"}, "There is no Ray cluster at this address"),
        ({"cluster": "local", "cpus_per_worker": 2.0}, "Leave --cpus-per-worker out"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(tmp_path, changes, said):
    arguments = SEARCH | SETTINGS | changes
    with pytest.raises(ConfigError, match=said):
        headrace.tune("CartPole-v1", study=tmp_path / "s", **arguments)
    assert not (tmp_path / "s").exists()


def test_a_study_goes_on_only_as_it_was(study, tmp_path):
    with pytest.raises(ConfigError, match=r"the study in .* goes on as it began"):
        headrace.tune(study=study.dir, total_env_steps=5)
    for other in ({"env": "Acrobot-v1"}, {"algo": "dqn"}):
        with pytest.raises(ConfigError, match=r"the study in .* goes on as it began"):
            headrace.tune(study=study.dir, **other)
    with pytest.raises(ConfigError, match="trials=0"):
        headrace.tune(study=study.dir, trials=0)
    with pytest.raises(ConfigError, match=r"sampler, seeds: the study in .* goes on as it began"):
        headrace.tune(study=study.dir, sampler="grid", seeds=2)
    with pytest.raises(RunDirError, match="holds a study already"):
        headrace.sweep("CartPole-v1", {"lr": [1e-3]}, study=study.dir, quiet=True)
    with pytest.raises(RunDirError, match="is no study"):
        headrace.tuning.api.load_study(tmp_path)
    with pytest.raises(ConfigError, match="No environment was given"):
        headrace.tune(study=tmp_path / "new", sampler="random")


def test_code_must_be_named_again(tmp_path):
    search = SEARCH | {"trials": 1, "final_seeds": 0, "prune": "none"}
    settings = SETTINGS | {"total_env_steps": 512}
    env = "tests.tuning.test_study:short"
    headrace.tune(env, study=tmp_path / "s", **search, **settings)
    with pytest.raises(ConfigError, match=r"Name it again \(env\)"):
        headrace.tune(study=tmp_path / "s", trials=2, quiet=True)
    with pytest.raises(ConfigError, match=r"^env: the study in .* goes on as it began"):
        headrace.tune("tests.tuning.test_study:broken", study=tmp_path / "s", trials=2, quiet=True)
    again = headrace.tune(env, study=tmp_path / "s", trials=2, quiet=True)
    assert [row["state"] for row in again.trials] == ["whole", "whole"]


def short():
    """An environment that is code."""
    return Counting(truncate_at=10)


@pytest.mark.parametrize(
    ("algo", "given", "parallel", "threads"),
    [
        ("ppo", {}, 0, 1), ("ppo", {}, 1, 1),  # no more than without a study
        ("sac", {}, 0, 1), ("sac", {}, 1, cpu_cores()), ("sac", {"learner_threads": 3}, 0, 3),
    ],
)  # fmt: skip
def test_a_run_has_its_share_of_the_cores(algo, given, parallel, threads):
    request = inspect_request(request_for("Pendulum-v1", algo=algo, deterministic=True, **given))
    plan = plan_of(request, Options(parallel=parallel), "")
    assert plan.sizes["learner_threads"] == threads


def test_the_command_that_goes_on_names_an_environment_that_is_code(tmp_path):
    name = "tests.tuning.test_study:Counting"
    plan = plan_of(inspect_request(request_for(name, deterministic=True)), Options(), "")
    assert plan.command(tmp_path) == f"headrace tune {name} --resume {tmp_path}"
    plan = plan_of(inspect_request(request_for("CartPole-v1", deterministic=True)), Options(), "")
    assert plan.command(tmp_path) == f"headrace tune --resume {tmp_path}"
