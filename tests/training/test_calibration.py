"""The measurement before a run: what it finds, and that it is made once for a command."""

import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch

import headrace
from headrace.config.run_config import AUTO_WORKERS
from headrace.cost_model.costs import Costs, LinearCost
from headrace.training import calibration
from headrace.training.calibration import calibrated
from headrace.training.job import RunRequest, inspect_request
from tests.support import Counting

SIZES = {"num_envs": 4, "num_steps": 16, "total_env_steps": 100_000}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr("headrace.config.derive.cpu_cores", lambda: 2)
    return tmp_path


class Sleeping(Counting):
    """Sleeps in each step, as an environment does that waits for another program."""

    def step(self, action):
        time.sleep(0.01)
        return super().step(action)


class Slow(Counting):
    """Takes 30 ms for a step, and counts the steps of all of its kind."""

    steps = 0

    def step(self, action):
        Slow.steps += 1
        time.sleep(0.03)
        return super().step(action)


class Failing(Counting):
    """Fails in its second step."""

    def step(self, action):
        if self.t == 1:
            raise RuntimeError("the environment's own message")
        return super().step(action)


def request(env="tests.support:Counting", **given):
    return calibrated(inspect_request(RunRequest({"env": env, **SIZES, **given})))


def files(home):
    return sorted((home / ".cache/headrace/calibrations").glob("*"))


def test_the_same_command_is_measured_once(home):
    first = request()
    (path,) = files(home)
    assert Costs.from_json(json.loads(path.read_text())).to_json() == first.costs.to_json()
    assert request(seed=3).costs.to_json() == first.costs.to_json()  # as it is kept
    request(hidden_sizes=(8,))
    assert len(files(home)) == 2
    path.write_text("{")  # damaged: measured again
    assert request().costs is not None
    assert json.loads(path.read_text())["hand_over"] > 0


def test_costs_are_those_of_the_environment():
    costs = request("tests.training.test_calibration:Sleeping").costs
    assert 0.01 <= costs.step.mean < 0.1 and costs.cpu_share < 0.5
    assert costs.learn.at(64) > 0
    fast = request().costs
    assert fast.step.mean < 0.005 and fast.cpu_share == 1.0


def test_a_slow_environment_is_stepped_a_few_times():
    """A fragment of 16 steps of 8 environments would take 4 s."""
    Slow.steps = 0
    costs = request("tests.training.test_calibration:Slow", num_envs=8).costs
    assert costs.step.mean >= 0.03
    assert Slow.steps <= 1 + 2 * 10 + 3 * 9  # 0.2 s and a fragment, twice


def test_a_replay_is_measured_in_memory_without_its_file(tmp_path):
    """The run refuses this directory; the measurement would hide that, and find no costs."""
    assert request(algo="dqn", replay_dir=str(tmp_path / "missing")).costs is not None


def test_environments_that_sleep_get_a_worker_each(tmp_path):
    run = headrace.train(
        "tests.training.test_calibration:Sleeping", num_envs=4, num_steps=16, quiet=True,
        total_env_steps=4_160, stop_after_s=0.001, run_dir=tmp_path / "run",
    )  # fmt: skip
    config = json.loads((run.dir / "config.json").read_text())
    assert config["settings"]["num_workers"] == 4
    assert config["origin"]["num_workers"].startswith("auto, 2 cores, a step of ")
    assert config["cores"] >= 1


def test_beside_a_gpu_what_learns_on_the_cpu_is_measured_there(home, monkeypatch):
    gpus = {"auto": 1, "cuda": 1, "cpu": 0}
    monkeypatch.setattr("headrace.config.derive.visible_gpus", gpus.get)
    asked = []
    monkeypatch.setattr(
        calibration, "device_of", lambda name, rank: asked.append(name) or torch.device("cpu")
    )
    assert request().costs is not None
    assert set(asked) == {"cpu"}


def test_code_without_a_name_is_measured_each_time(home):
    measured = inspect_request(RunRequest(SIZES, env=lambda: Counting()))
    assert calibrated(measured).costs is not None
    assert files(home) == []


def test_what_cannot_be_sent_to_a_worker_and_what_fails_stay_in_one_process(home):
    lock = threading.Lock()
    local = inspect_request(RunRequest(SIZES, env=lambda: Counting() if lock else None))
    assert calibrated(local).costs is None
    assert calibrated(local).derived().run.num_workers == 0
    assert request("tests.training.test_calibration:Failing").costs is None
    assert files(home) == []


def test_nothing_is_measured_where_nothing_is_auto(monkeypatch):
    monkeypatch.setattr(calibration, "_measure", None)
    for given in ({"num_workers": 0}, {"deterministic": True}, {"total_env_steps": 4_096}):
        assert request(**given).costs is None


@pytest.mark.more
def test_resumed_elsewhere_a_run_has_as_many_workers_as_there_are_cores(tmp_path, monkeypatch):
    run = headrace.train(
        "tests.training.test_calibration:Sleeping", num_envs=4, num_steps=16, quiet=True,
        total_env_steps=4_160, stop_after_s=0.001, run_dir=tmp_path / "run",
    )  # fmt: skip
    path = run.dir / "config.json"
    for cores, workers in ((3, 3), (64, 4)):
        monkeypatch.setattr("headrace.config.resolve.cpu_cores", lambda cores=cores: cores)
        config = json.loads(path.read_text()) | {"cores": 2}
        # As where they do not sleep; and what a busy machine may choose is no matter here.
        config["settings"] |= {"num_workers": 2, "envs_per_vector": 1}
        values, sources = headrace.config.resolve.values_for_resume(config, {})
        assert (values["num_workers"], sources["num_workers"]) == (workers, f"auto, {cores} cores")
        assert values["envs_per_vector"] == 1
        kept, _ = headrace.config.resolve.values_for_resume(config, {"num_workers": 2})
        assert kept["num_workers"] == 2


@pytest.mark.parametrize(("saved", "found"), [(0, 0), (2, 4), (3, 3)])
def test_the_word_in_a_resume_asks_for_the_workers_of_this_machine(monkeypatch, saved, found):
    monkeypatch.setattr("headrace.config.resolve.cpu_cores", lambda: 4)
    settings = {
        "num_workers": saved, "num_learners": 1, "num_envs": 8, "envs_per_vector": 1,
        "device": "cpu", "cluster": "", "machines": 0, "lag": 0, "algo": "ppo",
    }  # fmt: skip
    config = {"settings": settings, "origin": dict.fromkeys(settings, "given"), "cores": 2}
    given, _ = headrace.config.resolve.values_for_resume(config, {"num_workers": AUTO_WORKERS})
    assert given["num_workers"] == found  # 3 on 2 cores: they sleep
    for source in ("auto, 2 cores", "default, 2 cores"):  # the second where nothing was measured
        config["origin"]["num_workers"] = source
        elsewhere, _ = headrace.config.resolve.values_for_resume(config, {})
        assert elsewhere["num_workers"] == found
    config["settings"]["cluster"] = "auto"  # whose cores these are not
    on_cluster, _ = headrace.config.resolve.values_for_resume(config, {})
    assert on_cluster["num_workers"] == saved


@pytest.mark.parametrize(
    ("algo", "lag", "origin", "num_workers", "expected"),
    [
        ("dqn", 2, "auto, 2 cores", 0, 0),
        ("appo", 1, "follows algo and num_workers", 0, 0),
        ("dqn", 2, "auto, 2 cores", 1, 2),
        ("dqn", 1, "auto, 2 cores", 0, 1),  # inline makes the same batches
        ("dqn", 2, "given", 0, 2),
    ],
)
def test_resumed_without_workers_nothing_samples_meanwhile(
    algo, lag, origin, num_workers, expected
):
    settings = {
        "num_workers": 2, "num_learners": 1, "num_envs": 8, "envs_per_vector": 4, "lag": lag,
        "device": "cpu", "cluster": "", "machines": 0, "algo": algo,
    }  # fmt: skip
    config = {"settings": settings, "origin": dict.fromkeys(settings, "given") | {"lag": origin}}
    changes = {"num_workers": num_workers}
    values, sources = headrace.config.resolve.values_for_resume(config, changes)
    assert values["lag"] == expected
    assert sources["lag"] == ("follows num_workers" if lag and not expected else origin)


@pytest.mark.parametrize(("gpus", "cores", "learners"), [(0, 1, 1), (0, 4, 2), (1, 4, 1)])
def test_resumed_elsewhere_a_run_has_no_more_learners_than_fit(monkeypatch, gpus, cores, learners):
    monkeypatch.setattr("headrace.config.resolve.cpu_cores", lambda: cores)
    monkeypatch.setattr("headrace.config.resolve.visible_gpus", lambda device: gpus)
    settings = {
        "num_workers": 0, "num_learners": 2, "num_envs": 8, "envs_per_vector": 4,
        "device": "auto", "cluster": "", "machines": 0, "lag": 0, "algo": "ppo",
    }  # fmt: skip
    origin = dict.fromkeys(settings, "given")
    config = {"settings": settings, "origin": origin | {"num_learners": "auto, 2 cores"}}
    found, _ = headrace.config.resolve.values_for_resume(config, {})
    assert (found["num_learners"], found["envs_per_vector"]) == (learners, 4)
    kept, _ = headrace.config.resolve.values_for_resume({**config, "origin": origin}, {})
    assert kept["num_learners"] == 2


def test_code_of_a_script_has_no_file_to_look_at():
    assert calibration._modified("__main__:make") == 0.0
    assert calibration._modified("tests.support:Counting") > 0.0


def test_code_that_was_changed_is_measured_again(home, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "own_env_of_a_test.py"
    file.write_text("from tests.support import Counting\n")
    for changed in (1, 2):
        os.utime(file, (changed, changed))
        request("own_env_of_a_test:Counting")
        request("own_env_of_a_test:Counting")
        assert len(files(home)) == changed


def test_a_large_batch_is_measured_in_part(monkeypatch):
    rows = []

    class Slow(calibration.Learning):
        def __init__(self, sizes, algo):
            rows.extend(size for size, *_ in sizes)
            super().__init__(sizes, algo)

        def learn(self, seconds):
            super().learn(2.5 * calibration._SLOW_S)

    monkeypatch.setattr(calibration, "Learning", Slow)
    costs = request(num_envs=4, num_steps=64).costs
    assert rows == [4 * 64 // 8] and costs.learn.at(256) > 0


def test_what_does_not_fit_into_memory_is_left_to_the_run(home, monkeypatch):
    def fail(self, seconds):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(calibration.Learning, "learn", fail)
    assert request().costs is None and files(home) == []


@pytest.mark.parametrize("env", ["tests.support:Counting", "headrace/CartPole-v1"])
@pytest.mark.parametrize(("update_s", "epochs"), [(1.0, 1), (0.04, 2), (1e-3, 3)])
def test_half_a_batch_is_measured_with_as_many_minibatches(monkeypatch, env, update_s, epochs):
    """As each of two learners has them, and with as many epochs as are fast.

    First comes a part of the batch, which may be all.
    """
    measured = []
    update_cost = calibration._Calibrator._update_cost

    def note(self, few, wanted, num_epochs):
        measured.append((wanted, num_epochs))
        assert update_cost(self, few, wanted, num_epochs).at(512) > 0
        return LinearCost(update_s, 0.0)

    monkeypatch.setattr(calibration._Calibrator, "_update_cost", note)
    monkeypatch.setattr(calibration, "_SLOW_S", 1e9)
    costs = request(env, num_envs=8, num_steps=64, num_minibatches=16, num_epochs=3).costs
    assert measured == [([(8, 8, 2)], 1), ([(4, 64, 16), (8, 64, 16)], epochs)]
    assert costs.learn == LinearCost(3 / epochs * update_s, 0.0)
    assert costs.allreduce.at(2) == pytest.approx(3 * 16 * calibration.ALLREDUCE_S)


def test_what_is_measured_is_the_share_of_each_learner(monkeypatch):
    """4 of 16 environments, with 4 learners; and 8, if each learner is given 8."""
    measured = []
    update_cost = calibration._Calibrator._update_cost

    def note(self, few, wanted, num_epochs):
        measured.append(max(num_envs for num_envs, *_ in wanted))
        return update_cost(self, few, wanted, num_epochs)

    monkeypatch.setattr(calibration._Calibrator, "_update_cost", note)
    assert request(num_learners=4, num_envs=16).costs is not None
    of_each = {"env": "tests.support:Counting", "num_steps": 16, "total_env_steps": 100_000}
    of_each |= {"num_envs_per_learner": 8, "num_learners": 4}
    assert calibrated(inspect_request(RunRequest(of_each))).costs is not None
    assert set(measured[:2]) == {4} and set(measured[2:]) == {8}


@pytest.mark.parametrize(
    "env", ["headrace/TagGridWorld-v0", "tests.envs.games.turns_support:Table"]
)
def test_the_updates_of_all_policies_of_a_game_are_measured(env, monkeypatch):
    updated, learn = [], calibration.Learning.learn

    def noting(self, seconds):
        learn(self, seconds)
        for _, learner, _ in self._sizes:
            updated.extend(policy.learner_steps for policy in learner.learners.values())

    monkeypatch.setattr(calibration.Learning, "learn", noting)
    assert request(env).costs is not None
    assert len(updated) >= 2
    assert all(updated)


def test_an_error_of_the_measurement_is_not_hidden(monkeypatch):
    def fail(self, seconds):
        raise RuntimeError("a fault of the calibration's own")

    monkeypatch.setattr(calibration.Learning, "learn", fail)
    with pytest.raises(RuntimeError, match="of the calibration's own"):
        request()


@pytest.mark.more
def test_what_is_chosen_runs_and_learns_the_same(tmp_path, monkeypatch):
    """Two learners, as on a machine where updates are dear."""
    dear = LinearCost(1e-3, 1.0)
    monkeypatch.setattr(calibration._Calibrator, "_learn", lambda self, few: dear)
    sizes = {
        "num_envs": 8, "num_steps": 16, "num_minibatches": 2, "total_env_steps": 4_224,
        "seed": 1, "quiet": True, "arithmetic": "plain",
    }  # fmt: skip
    chosen = headrace.train("CartPole-v1", **sizes, run_dir=tmp_path / "chosen")
    config = json.loads((chosen.dir / "config.json").read_text())
    assert config["settings"]["num_learners"] == 2
    assert config["origin"]["num_learners"].startswith("auto, 2 cores")
    by_hand = headrace.train(
        "CartPole-v1", **sizes, run_dir=tmp_path / "one", num_workers=0, num_learners=1
    )
    learned, expected = (run.policy.module.state_dict() for run in (chosen, by_hand))
    for name, tensor in expected.items():
        torch.testing.assert_close(learned[name], tensor, atol=1e-4, rtol=1e-3)
