"""Tests of `headrace simulate`."""

import json

import pytest

from headrace.errors import ConfigError
from headrace.tools.forecast import MeasuredRun, forecasts
from tests import python
from tests.cost_model.test_model import SLEEPS

RUN = {"num_envs": 8, "num_steps": 10, "envs_per_vector": 1, "num_workers": 4, "lag": 0}


@pytest.fixture
def profile(tmp_path):
    """A profile of sleeping environments, two for each worker."""

    def written(**settings):
        path = tmp_path / "P.json"
        run = RUN | {"algo": "ppo"} | settings
        path.write_text(json.dumps({"settings": run, "costs": SLEEPS.to_json()}))
        return path

    return written


def test_workers_have_as_many_environments_as_in_profile(profile):
    top = MeasuredRun.read(profile()).topology(100, 2)
    assert (top.num_envs, top.num_steps, top.num_workers, top.num_learners) == (200, 10, 100, 2)
    assert not top.asynchronous and top.machines == 1 and top.cores == 0
    kept = MeasuredRun.read(profile()).topology(100, 1, env_steps_per_update=400)
    assert (kept.num_envs, kept.num_steps) == (200, 2)
    spread = MeasuredRun.read(profile()).topology(100, 1, cores_per_machine=8, learners_apart=True)
    assert (spread.machines, spread.cores, spread.learners_apart) == (13, 8, True)
    appo = MeasuredRun.read(profile(algo="appo", lag=2)).topology(1, 1)
    assert appo.asynchronous and appo.lag == 2


def test_limit_moves_from_environments_to_learning(profile):
    found = {
        (of.num_workers, of.num_learners): of
        for of in forecasts(MeasuredRun.read(profile()), [10, 1000], [1, 10])
    }
    # 2 x 10 steps of 6 ms, and 0.1 ms for each row: 200, 20,000, or a tenth of these
    assert found[10, 1].env_steps_per_s == pytest.approx(200 / (0.12 + 0.02), rel=0.01)
    assert found[1000, 1].env_steps_per_s == pytest.approx(20_000 / (0.12 + 2.0), rel=0.01)
    assert found[1000, 10].env_steps_per_s == pytest.approx(20_000 / (0.12 + 0.2), rel=0.01)
    assert (found[10, 1].limit, found[1000, 1].limit) == ("env", "learning")
    assert found[1000, 1].gain == pytest.approx(2.12 / 0.12, rel=0.01)


@pytest.mark.parametrize(
    ("workers", "learners", "says"),
    [
        ([0], [1], "num_workers=0: expected 1 to 10,000"),
        ([10_001], [1], "num_workers=10001"),
        ([8], [2000], "num_learners=2000: expected 1 to 1,024"),
        ([10, 20], [3], "num_workers=10 cannot be divided among 3 learners"),
    ],
)
def test_invalid_numbers_are_refused(profile, workers, learners, says):
    with pytest.raises(ConfigError, match=says):
        list(forecasts(MeasuredRun.read(profile()), workers, learners))


def test_several_learners_of_a_replay_are_refused(profile):
    run = MeasuredRun.read(profile(algo="dqn"))
    assert [of.num_learners for of in forecasts(run, [4], [1])] == [1]
    with pytest.raises(ConfigError, match=r"num_learners=2: .* no faster than one"):
        list(forecasts(run, [4], [1, 2]))


@pytest.mark.parametrize("text", ["", "{}", '{"settings": {}, "costs": {}}', "[1]"])
def test_file_without_profile_is_refused(tmp_path, text):
    (tmp_path / "P.json").write_text(text)
    with pytest.raises(ConfigError, match=r"(?s)no profile.*headrace profile ENV --json"):
        MeasuredRun.read(tmp_path / "P.json")


def test_command_prints_a_line_for_each_combination(profile):
    command = python.command("simulate", str(profile()))
    command += [
        "--num-workers",
        "10",
        "100",
        "--num-learners",
        "1",
        "2",
        "--cores-per-machine",
        "8",
    ]
    done = python.run(command, timeout=60)
    assert done.returncode == 0, done.stderr
    _, *lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["10", "1"], ["100", "1"], ["10", "2"], ["100", "2"],
    ]  # fmt: skip
    as_json = python.run([*command, "--json"], timeout=60)
    found = json.loads(as_json.stdout)["forecasts"]
    assert [f"{of['env_steps_per_s']:,.0f}" for of in found] == [line.split()[3] for line in lines]
