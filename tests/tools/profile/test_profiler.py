"""Tests of `headrace profile`: spans, costs, bottleneck, advice."""

import json
from dataclasses import replace

import numpy as np
import pytest

import headrace
from headrace.cli.main import _main
from headrace.config.resolve import read_config_file, resolve
from headrace.cost_model.costs import Costs
from headrace.cost_model.model import gains, simulate
from headrace.errors import ConfigError, EnvError
from headrace.meter import SPANS, Laps
from headrace.tools.profile import advice, profiler, timeline_plots
from headrace.tools.profile.probe import Probe
from headrace.tools.profile.profiler import profile_env, profile_run
from headrace.tools.profile.result import format_profile
from headrace.tools.profile.timeline_plots import FOR_LEARNER, FOR_WORKERS
from headrace.training.job import RunRequest, inspect_request
from tests import python
from tests.cost_model.test_model import COMPUTES, SLEEPS, STALLS

FAULTY = "headrace.envs.faulty:Faulty"
SIZES = {"num_envs": 4, "num_steps": 16, "num_workers": 2, "envs_per_vector": 1}


def laps(*parts):
    """From (span, end), from 0 on."""
    made = Laps(0.0)
    for span, end in parts:
        made.add(SPANS.index(span), end)
    return made


def test_worker_wait_is_for_workers_while_learner_waits():
    tracks = {
        "learner": laps(("wait", 2.0), ("learn", 3.0), ("wait", 5.0), ("learn", 6.0)),
        # Of its wait from 1.5 to 3.5, the learner waits from 1.5 to 2 and from 3 to 3.5.
        "worker 0": laps(("env_step", 1.5), ("wait", 3.5), ("infer", 6.0)),
    }
    found = timeline_plots.seconds_by_process(tracks)
    assert found["learner"] == {"wait": 4.0, "learn": 2.0}
    assert found["worker 0"] == pytest.approx(
        {
            "env_step": 1.5,
            "infer": 2.5,
            FOR_WORKERS: 1.0,
            FOR_LEARNER: 1.0,
        }
    )
    later = timeline_plots.seconds_by_process(tracks, 2.5)
    assert later["learner"] == {"wait": 2.0, "learn": 1.5}
    assert later["worker 0"][FOR_WORKERS] == pytest.approx(0.5)


def test_worker_waits_for_learner_of_its_rank():
    tracks = {
        "rank 0": laps(("wait", 4.0)),
        "rank 1": laps(("learn", 4.0)),
        "rank 0, worker 0": laps(("wait", 4.0)),
        "rank 1, worker 0": laps(("wait", 4.0)),
    }
    found = timeline_plots.seconds_by_process(tracks)
    assert found["rank 0, worker 0"] == {
        FOR_WORKERS: 4.0,
        FOR_LEARNER: 0.0,
    }
    assert found["rank 1, worker 0"] == {
        FOR_WORKERS: 0.0,
        FOR_LEARNER: 4.0,
    }


def probed(seconds=1.0, **given):
    return Probe(inspect_request(RunRequest(given)).job(None), seconds, lambda text: None).costs()


@pytest.mark.more
def test_sleeping_environments_have_small_cpu_share():
    costs = probed(env=FAULTY, env_kwargs={"slow_step": 0.004, "slow_reset": 0.01}, **SIZES)
    assert costs.cpu_share < 0.5
    assert costs.step.mean >= 0.0036 and costs.reset.mean >= 0.009
    assert 0 < costs.resets_per_step < 0.1  # walks of at most 100 steps
    assert costs.vector.at(1) > 0 and costs.learn.at(64) > 0
    assert 0 < costs.inference < 1 and costs.hand_over > 0 and costs.device == "cpu"
    computes = probed(env="CartPole-v1", **SIZES)
    assert computes.cpu_share == 1.0
    assert computes.step.mean < costs.step.mean
    # An untrained policy drops the pole after 9 steps at least, 22 on average.
    assert 1 / 60 < computes.resets_per_step < 1 / 9


@pytest.mark.more
def test_one_vector_costs_are_divided_among_environments():
    def of(n):
        return probed(env="headrace/CartPole-v1", num_envs=n, num_steps=8, device="cpu")

    few, many = of(8), of(4096)
    for costs in (few, many):
        assert costs.cpu_share == 1.0 and costs.hand_over == costs.latency == 0.0
        assert costs.vector.base == 0.0 < costs.vector.slope
    # Each has its share of a vector step, which takes longer for many, but not as many times.
    assert 0 < many.step.mean < few.step.mean


@pytest.mark.slow
def test_environment_without_a_step_in_time_is_an_error():
    with pytest.raises(EnvError, match="no step ended within"):
        probed(0.2, env=FAULTY, env_kwargs={"slow_step": 8.0}, **SIZES)


def settings(**given):
    return resolve({"env": "CartPole-v1", **given})


def changes(costs, **given):
    now = settings(**given)
    predicted = simulate(costs, advice.topology_of(now))
    found = advice.find_changes(
        costs, now, predicted, lambda more: settings(**given | more), on_device=False
    )
    return {tuple(change.settings.items()): change.gain for change in found}


def gained(costs, topology):
    return gains(costs, topology, simulate(costs, topology))


def test_more_workers_are_advised_for_sleeping_environments():
    given = {"num_envs": 8, "num_steps": 32, "num_workers": 2, "envs_per_vector": 4}
    found = changes(SLEEPS, **given)
    (name, count), *_ = next(iter(found))
    assert (name, count) == ("num_workers", 8)
    # 4 x 5 + 1 ms before, 5 + 1 ms then, and 26 ms of learning for 32 of these steps
    assert next(iter(found.values())) == pytest.approx(
        (0.672 + 0.0256) / (0.192 + 0.0256), rel=0.02
    )


def test_changes_without_gain_are_not_advised():
    free = replace(SLEEPS, step=SLEEPS.step.scaled(0.0), vector=SLEEPS.vector._replace(base=1e-9))
    given = {
        "num_envs": 8,
        "num_steps": 32,
        "num_workers": 0,
        "num_learners": 2,
        "envs_per_vector": 4,
    }
    found = changes(free, **given)
    assert all(gain >= 1.03 for gain in found.values())
    assert not any("num_workers" in dict(change) for change in found)


def test_advised_sizes_fit_together():
    given = {"num_envs": 6, "num_steps": 32, "num_workers": 3, "envs_per_vector": 2}
    for change in changes(SLEEPS, **given):
        resolve({"env": "CartPole-v1", **given, **dict(change)})  # raises if they do not


@pytest.mark.parametrize(
    ("costs", "part"),
    [
        (SLEEPS, "env"),
        (replace(SLEEPS, step=SLEEPS.step.scaled(0.0)), "inference"),
        (replace(SLEEPS, learn=SLEEPS.learn._replace(base=10.0)), "learning"),
        (replace(SLEEPS, hand_over=1.0), "transport"),
        (STALLS, "waiting"),
    ],
    ids=["env", "inference", "learning", "transport", "waiting"],
)
def test_limit_is_part_with_greatest_gain(costs, part):
    top = advice.topology_of(settings(num_envs=8, num_steps=32, num_workers=8, envs_per_vector=1))
    found = gained(costs, replace(top, cores=8))
    if part == "waiting":  # stalls are in the environments: without them nobody would wait either
        del found["env"]
    assert max(found, key=found.get) == part


def test_cores_are_limit_of_more_computing_workers_than_cores():
    top = advice.topology_of(settings(num_envs=8, num_steps=32, num_workers=8, envs_per_vector=1))
    found = gained(COMPUTES, replace(top, cores=1))
    assert found["cores"] > 4.0


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    run = headrace.train(
        FAULTY, run_dir=tmp_path_factory.mktemp("profile") / "run", timeline=True, quiet=True,
        total_env_steps=640, **SIZES,
    )  # fmt: skip
    return run.dir


@pytest.fixture
def quick(monkeypatch):
    """Let a profile take less time than it needs to be exact."""
    monkeypatch.setattr(profiler, "_MIN_S", 1.0)


@pytest.mark.more
def test_run_with_timeline_can_be_profiled(run_dir, quick):
    found = profile_run(run_dir, RunRequest(env=FAULTY), 2.0)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    passed = rows[-1]["wall_s"] - rows[0]["wall_s"]
    assert found.env_steps_per_s == pytest.approx((640 - 64) / passed)
    assert set(found.seconds) == {"learner", "worker 0", "worker 1"}
    assert found.predicted == pytest.approx(
        simulate(found.costs, advice.topology_of(found.settings))
    )
    plain = json.loads(json.dumps(found.to_json()))
    assert Costs.from_json(plain["costs"]).to_json() == found.costs.to_json()
    assert plain["rates"]["batch"] == 64 and plain["rates"]["lag"] == 0
    text = format_profile(found)
    for words in (
        "env_step",
        "2 workers, mean",
        "lock-step",
        "Ceilings",
        "predicted",
        "What to change",
    ):
        assert words in text


def test_runs_that_cannot_be_profiled_are_refused(run_dir, tmp_path):
    with pytest.raises(ConfigError, match="Name it again: --env"):
        profile_run(run_dir, RunRequest(), 10.0)
    plain = headrace.train(
        "CartPole-v1", run_dir=tmp_path / "run", total_env_steps=64, quiet=True, **SIZES
    )
    with pytest.raises(ConfigError, match=r"(?s)no timeline.*headrace profile ENV"):
        profile_run(plain.dir, RunRequest(), 10.0)
    with pytest.raises(ConfigError, match="seconds=1: expected 10 or more"):
        profile_env(RunRequest({"env": "CartPole-v1"}), 1.0)
    with pytest.raises(ConfigError, match="cluster='local': a profile is made on one machine"):
        profile_env(RunRequest({"env": "CartPole-v1", "cluster": "local"}), 10.0)


def headrace_profile(*flags):
    command = python.command("profile", *map(str, flags))
    return python.run(command, timeout=100, check=False)


def test_command_prints_json_and_writes_picture_and_trace(tmp_path, quick, capsys):
    picture, trace = tmp_path / "p.png", tmp_path / "p.json"
    flags = (
        "CartPole-v1", "--num-envs", 4, "--num-steps", 16, "--num-workers", 2,
        "--envs-per-vector", 2, "--seconds", 4,
        "--plot", picture, "--trace", trace, "--json",
    )  # fmt: skip
    assert _main(["profile", *map(str, flags)]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["settings"]["num_workers"] == 2
    assert found["env_steps_per_s"] > 0 and found["predicted_env_steps_per_s"] > 0
    assert set(found["ceilings"]) == {"env", "inference", "learning", "together"}
    assert np.isfinite(list(found["gains"].values())).all()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())["traceEvents"]
    assert "Bottleneck" in err


@pytest.mark.slow
def test_advice_respects_settings_of_config_file(tmp_path):
    config = tmp_path / "four.toml"
    config.write_text("num_envs = 4\nnum_workers = 2\nenvs_per_vector = 1\n")
    given = {"env": FAULTY, "env_kwargs": {"slow_step": 0.01}}
    found = profile_env(RunRequest(given, config_file=read_config_file(config)), 10.0)
    # Four workers cannot share out the one vector that is the default.
    assert found.changes[0].settings == {"num_workers": 4} and found.changes[0].gain > 1.5


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--plot", "p.xyz"], "expected a name that ends in one of"),
        (["--plot", "nowhere/p.png"], "there is no nowhere"),
        (["--trace", "nowhere/p.json"], "expected a file in a folder that exists"),
    ],
)
def test_unwritable_outputs_are_refused_before_training(flags, says):
    done = headrace_profile("CartPole-v1", *flags)
    assert done.returncode == 2 and says in done.stderr
    assert "Training" not in done.stderr


def test_settings_beside_run_directory_are_refused(run_dir):
    done = headrace_profile(run_dir, "--num-workers", 3, "--env", FAULTY)
    assert done.returncode == 2
    assert "num_workers: a run's directory is profiled with the settings" in done.stderr
