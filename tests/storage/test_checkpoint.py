"""Checkpoints: whole or not there, refused when damaged, and never a way to run code."""

import json
import os
import stat

import numpy as np
import pytest
import torch

import headrace
from headrace.errors import CheckpointError, ConfigError, EnvError, RunDirError
from headrace.storage import checkpoint
from headrace.storage.metrics import read_metrics
from tests.support import Counting, short_cartpole

TINY = {"num_envs": 2, "num_steps": 16, "envs_per_vector": 1, "quiet": True, "num_workers": 0}


def write(path, step, value):
    tensors = {"a": torch.full((3,), value), "empty": torch.zeros(0)}
    arrays = {"b": np.arange(4.0), "flag": np.array(True), "zero": np.array(7)}
    return checkpoint.write(
        path / "checkpoints", step, {"one": tensors, "two": arrays}, {"counters": {"n": step}}
    )


def test_written_checkpoints_are_read_back(tmp_path):
    path = write(tmp_path, 10, 1.0)
    saved = checkpoint.newest(tmp_path)
    assert saved.path == path
    assert saved.manifest["counters"] == {"n": 10}
    assert torch.equal(saved.tensors("one")["a"], torch.full((3,), 1.0))
    assert saved.tensors("one")["empty"].shape == (0,)
    arrays = saved.arrays("two")
    assert (arrays["b"].tolist(), bool(arrays["flag"]), int(arrays["zero"])) == (
        [0, 1, 2, 3],
        True,
        7,
    )
    assert (tmp_path / "checkpoints/latest").read_text() == path.name
    assert checkpoint.newest(path).path == path


def test_environments_saved_under_the_old_name_are_read(tmp_path):
    saved = {"samplers": {"steps": np.array(7)}}
    checkpoint.write(tmp_path / "checkpoints", 1, saved, {"counters": {}})
    assert int(checkpoint.newest(tmp_path).arrays("workers")["steps"]) == 7


def test_metrics_written_under_the_old_name_are_read(tmp_path):
    old = {"iteration": 1, "env_steps": 8, "samplers_up": 2, "seconds/samplers/env_step": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(old) + "\n")
    (row,) = read_metrics(tmp_path)
    assert (row["workers_up"], row["seconds/workers/env_step"]) == (2, 0.5)
    assert len(row) == len(old)


def test_checkpoint_files_are_private(tmp_path):
    path = write(tmp_path, 10, 1.0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_prune_keeps_the_newest_checkpoints(tmp_path, keep):
    names = []
    for step in range(1, 8):
        path = write(tmp_path, step, float(step))
        names.append(path.name)
        assert sorted(p.name for p in path.parent.glob("step_*")) == names[-keep - 1 :]
        checkpoint.prune(keep, path)
        assert sorted(p.name for p in path.parent.glob("step_*")) == names[-keep:]


def test_prune_removes_damaged_checkpoints(tmp_path):
    earlier = write(tmp_path, 5, 1.0)
    damaged = write(tmp_path, 99, 1.0)
    (damaged / "one.safetensors").write_bytes(b"")
    good = write(tmp_path, 10, 1.0)  # gone on from the earlier one
    checkpoint.prune(2, good)
    assert checkpoint.newest(tmp_path).path == good
    assert (earlier.exists(), damaged.exists()) == (True, False)


def test_no_usable_checkpoint_raises_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoint.newest(tmp_path)
    (write(tmp_path, 1, 1.0) / "one.safetensors").unlink()
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="no usable checkpoint"):
        checkpoint.newest(tmp_path)


def test_config_file_cannot_name_code_to_run(tmp_path):
    """A run directory from somebody else must not decide what is imported."""
    run = headrace.train(short_cartpole, run_dir=tmp_path / "run", total_env_steps=32, **TINY)
    config = json.loads((run.dir / "config.json").read_text())
    config["settings"]["env"], config["env_is_code"] = "os:mkdir", False
    (run.dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="--env os:mkdir"):
        headrace.resume(run.dir, quiet=True)


def test_a_checkpoint_of_another_environment_is_refused(tmp_path):
    headrace.train("CartPole-v1", run_dir=tmp_path / "a", total_env_steps=32, **TINY)
    with pytest.raises(CheckpointError) as caught:
        headrace.resume(tmp_path / "a", env="Acrobot-v1", quiet=True)
    assert "CartPole-v1, not Acrobot-v1" in str(caught.value)
    assert "Box(4,) float32, environment Box(6,) float32" in str(caught.value)


def test_used_run_directory_is_refused(tmp_path):
    headrace.train(short_cartpole, run_dir=tmp_path / "a", total_env_steps=32, **TINY)
    with pytest.raises(RunDirError, match="holds a run already"):
        headrace.train(short_cartpole, run_dir=tmp_path / "a", total_env_steps=32, **TINY)

    def again(_iteration, _metrics):
        with pytest.raises(RunDirError, match=f"in use by process {os.getpid()}"):
            headrace.resume(tmp_path / "b", env=short_cartpole, quiet=True)

    headrace.train(
        short_cartpole, run_dir=tmp_path / "b", total_env_steps=32, on_update=again, **TINY
    )
    with pytest.raises(RunDirError, match="not a run directory"):
        headrace.resume(tmp_path / "nowhere", quiet=True)


def test_failed_start_leaves_no_run_directory(tmp_path):
    class NotTwice(Counting):
        made = 0

        def __init__(self):
            super().__init__()
            NotTwice.made += 1
            if NotTwice.made == 2:
                raise RuntimeError("no second one")

    with pytest.raises(EnvError, match="no second one"):
        headrace.train(NotTwice, run_dir=tmp_path / "run", total_env_steps=32, **TINY)
    assert not (tmp_path / "run").exists()
    headrace.train(NotTwice, run_dir=tmp_path / "run", total_env_steps=32, **TINY)


def test_resume_keeps_a_new_goal_and_drops_later_metrics(tmp_path):
    run = headrace.train(short_cartpole, run_dir=tmp_path / "run", total_env_steps=64, **TINY)

    class Stop(Exception):  # noqa: N818
        pass

    def crash(iteration, _metrics):
        if iteration == 4:
            raise Stop

    with pytest.raises(Stop):
        headrace.resume(
            run.dir, env=short_cartpole, total_env_steps=256, on_update=crash, quiet=True
        )
    with (run.dir / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 5, "env_st')  # as a crash leaves it
    assert [row["iteration"] for row in read_metrics(run.dir)] == [1, 2, 3, 4]
    resumed = headrace.resume(run.dir, env=short_cartpole, quiet=True)
    assert resumed.summary["env_steps"] == 256
    assert [row["iteration"] for row in read_metrics(run.dir)] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_loaded_policy_acts_as_the_trained_one(tmp_path):
    run = headrace.train(
        "Pendulum-v1", run_dir=tmp_path / "run", total_env_steps=64, num_minibatches=4,
        network=headrace.Network(normalize_obs=True), **TINY,
    )  # fmt: skip
    policy = headrace.load_policy(tmp_path / "run")
    assert float(policy.module.normalize_obs.moments[0].count) == 64
    obs = np.array([0.1, 0.2, 0.3], np.float32)
    action = policy(obs)
    assert action.shape == (1,)
    assert -2 <= action[0] <= 2
    # another shape of the matrix products: equal to rounding
    np.testing.assert_allclose(policy(np.stack([obs, obs]))[1], action, rtol=1e-5)
    np.testing.assert_array_equal(run.policy(obs), action)
    np.testing.assert_array_equal(policy(obs.tolist()), action)
    with pytest.raises(ValueError, match=r"shape \(2,\); expected \(3,\)"):
        policy(obs[:2])
