"""Rungs 2, 5 and 6 for replay: workers equal inline, and resumed runs equal whole ones."""

import dataclasses

import pytest
import torch

import headrace
from headrace.errors import ConfigError
from headrace.replay.memory import zeros_in_file
from headrace.storage import checkpoint
from headrace.storage.metrics import read_metrics
from tests.algos.reach import Reach
from tests.marks import repeats
from tests.support import saved_rows, short_cartpole

SETTINGS = {
    "num_envs": 4, "num_steps": 16, "envs_per_vector": 2, "seed": 5, "quiet": True,
    "schedule_env_steps": 10 * 64,
    "algo": headrace.DQN(
        lr=3e-3, learning_starts=100, batch_size=24, replay_size=400, replay_ratio=0.2, n_step=3,
        target_update_interval=7, exploration_fraction=0.5,
    ),
}  # fmt: skip


PRIORITIZED = dataclasses.replace(SETTINGS["algo"], priority_alpha=0.6)
RAINBOW = dataclasses.replace(
    PRIORITIZED, dueling=True, noisy=True, distribution="c51", v_min=0.0, v_max=100.0
)
RECURRENT = dataclasses.replace(SETTINGS["algo"], sequence_length=6, burn_in=3)
SIZES = {"learning_starts": 100, "batch_size": 24, "replay_size": 400, "replay_ratio": 0.2}
SAC = headrace.SAC(lr=3e-3, n_step=3, **SIZES)
RECURRENT_SAC = headrace.SAC(lr=3e-3, n_step=3, sequence_length=6, burn_in=3, **SIZES)
CROSSQ = headrace.CROSSQ(lr=3e-3, **SIZES)
TD3 = headrace.TD3(lr=3e-3, priority_alpha=0.6, **SIZES)
ALGORITHMS = {
    "rainbow": RAINBOW, "crossq": CROSSQ, "sac": SAC, "td3": TD3, "prioritized": PRIORITIZED,
    "even": SETTINGS["algo"], "recurrent": RECURRENT,
    "recurrent sac": RECURRENT_SAC,
}  # fmt: skip


def env_of(algo):
    return Reach if isinstance(algo, headrace.SAC | headrace.TD3) else short_cartpole


def train(path, updates=10, *, save_replay=True, **more):
    settings = SETTINGS | more
    if settings["algo"] in (RECURRENT, RECURRENT_SAC):
        settings |= {"core": "lstm", "core_size": 8}
    env = env_of(settings["algo"])
    if not save_replay:
        settings["algo"] = dataclasses.replace(settings["algo"], save_replay=False)
    return headrace.train(env, run_dir=path, total_env_steps=updates * 64, **settings)


def learned(run):
    saved = checkpoint.newest(run.dir)
    rows = saved_rows(run.dir)
    assert "obs0" in rows
    return saved.tensors("policy_default") | saved.tensors("learner_default") | rows


def assert_same(one, other):
    left, right = learned(one), learned(other)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
    for name in ("env_steps", "mean_return", "episodes", "learner_steps"):
        assert one.summary[name] == other.summary[name], name


@repeats("algo", ALGORITHMS.values(), ids=ALGORITHMS)
@repeats("lag", [0, 1])
def test_workers_learn_what_inline_learns(tmp_path, lag, algo):
    inline = train(tmp_path / "inline", num_workers=0, lag=lag, algo=algo)
    assert inline.summary["learner_steps"] == int(0.2 * (640 - 100))
    assert_same(inline, train(tmp_path / "workers", num_workers=2, lag=lag, algo=algo))


@repeats("algo", ALGORITHMS.values(), ids=ALGORITHMS)
@repeats("lag", [0, 1])
def test_a_resumed_run_equals_one_that_was_not_stopped(tmp_path, lag, algo):
    """The replay is full by then: it has 400 rows, and the run takes 640."""
    whole = train(tmp_path / "whole", lag=lag, num_workers=0, algo=algo)
    train(tmp_path / "part", updates=7, lag=lag, num_workers=0, algo=algo)
    resumed = headrace.resume(tmp_path / "part", env=env_of(algo), total_env_steps=640, quiet=True)
    if lag:  # the batch under way is made again, with the saved, newer weights
        assert resumed.summary["learner_steps"] == whole.summary["learner_steps"]
    else:
        assert_same(whole, resumed)


def test_workers_that_never_stop_keep_the_ratio(tmp_path):
    run = train(tmp_path / "run", num_workers=2, lag=3)
    assert run.summary["learner_steps"] == int(0.2 * (run.summary["env_steps"] - 100))


@repeats("algo", [PRIORITIZED, SETTINGS["algo"]], ids=["prioritized", "even"])
def test_observations_in_a_file_are_learned_from_as_those_in_memory(tmp_path, algo):
    # `replace` gives all settings, so that no default of the kind is added: to both
    algo = dataclasses.replace(algo, replay_dir="")
    in_file = dataclasses.replace(algo, replay_dir=str(tmp_path))
    assert_same(train(tmp_path / "memory", algo=algo), train(tmp_path / "file", algo=in_file))
    train(tmp_path / "resumed", updates=6, algo=in_file)
    resumed = headrace.resume(
        tmp_path / "resumed", env=short_cartpole, total_env_steps=640, quiet=True, replay_dir=""
    )
    assert_same(train(tmp_path / "whole", algo=in_file), resumed)


@repeats("algo", [PRIORITIZED, RECURRENT], ids=["prioritized", "recurrent"])
def test_a_run_without_saved_transitions_collects_some_before_it_goes_on(tmp_path, capsys, algo):
    run = train(tmp_path / "run", updates=5, algo=algo, save_replay=False)
    assert run.summary["learner_steps"] == int(0.2 * (320 - 100))
    assert not (run.dir / "checkpoints" / "rows").exists()
    saved = checkpoint.newest(run.dir).tensors("learner_default")
    assert [name for name in saved if "replay" in name] == ["modules.replay.refilled"]
    for updates, refills in ((10, 1), (15, 2)):
        run = headrace.resume(
            run.dir, env=short_cartpole, total_env_steps=updates * 64, quiet=False
        )
        said = "".join(capsys.readouterr())
        assert "it collects learning_starts=100 env steps before" in said
        assert "this run differs from one that was not interrupted" in said
        # Two batches of 64 are the least with 100 env steps: no gradient steps follow from them.
        assert run.summary["learner_steps"] == int(0.2 * (updates * 64 - 128 * refills - 100))
    rows = read_metrics(run.dir)
    assert [("td_error" in row) for row in rows[5:8]] == [False, False, True]


def test_a_run_stopped_before_it_learned_collects_no_more_than_it_would_have(tmp_path):
    """It has 64 of 100 env steps, and loses these."""
    algo = dataclasses.replace(SETTINGS["algo"], save_replay=False)
    run = train(tmp_path / "run", algo=algo, stop_after_s=1e-9)
    assert run.summary["env_steps"] == 64
    run = headrace.resume(run.dir, env=short_cartpole, stop_after_s=0, quiet=True)
    assert run.summary["learner_steps"] == int(0.2 * (640 - 64 - 100))


def test_a_directory_that_cannot_have_the_observations_is_refused_in_words(tmp_path):
    gone = dataclasses.replace(SETTINGS["algo"], replay_dir=str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"(?s)gone' cannot hold.*No such file"):
        train(tmp_path / "run", algo=gone)
    with pytest.raises(ConfigError, match=r"(?s)GB of observations: .*smaller --replay-s"):
        zeros_in_file(str(tmp_path), (10**14,), torch.uint8)
