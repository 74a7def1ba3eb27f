"""The Trainer's checkpoints: resumed to the bit, and read as a run of Headrace's."""

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import headrace
from headrace.errors import CheckpointError, RunDirError
from headrace.lightning import PolicyModule, load_policy, write_run
from headrace.tools.runs.records import load_runs
from tests import python
from tests.lightning import support
from tests.lightning.support import TIMES, differing, experience, fit, fitted, weights
from tests.marks import repeats

pytestmark = support.pytestmark


def saving(folder, **often):
    return {"callbacks": [ModelCheckpoint(folder, filename="last", **often)]}


def saved(folder, every=None, **settings):
    """Train two of three epochs; the path of the newest checkpoint, and the module."""
    module = PolicyModule(experience(num_epochs=1, **settings))
    often = {"every_n_train_steps": every} if every else {}
    fit(module, enable_checkpointing=True, max_epochs=2, **saving(folder, **often))
    return folder / "last.ckpt", module


@repeats("more", [{"lr_schedule": "linear"}, {"num_workers": 2}, {"core": "gru", "core_size": 8}])
def test_a_resumed_trainer_equals_one_that_was_not_interrupted_to_the_bit(tmp_path, more):
    path, _ = saved(tmp_path, **more)
    module = PolicyModule(experience(num_epochs=1, **more))
    ended = fit(module, ckpt_path=path, enable_checkpointing=True, **saving(tmp_path))
    assert ended.current_epoch == 3
    whole = fitted(num_epochs=1, **more)
    assert differing(weights(module.policy), weights(whole.policy)) == []
    metrics = module.experience.metrics, whole.experience.metrics
    assert {k for k in metrics[0] if metrics[0][k] != metrics[1][k]} <= TIMES
    assert metrics[0]["iteration"] == 3


def test_a_checkpoint_within_an_epoch_is_loaded_but_not_resumed(tmp_path):
    path, _ = saved(tmp_path, every=6)
    with pytest.raises(CheckpointError, match=r"(?s)within an epoch.*every_n_epochs=1"):
        fit(
            PolicyModule(experience(num_epochs=1)), ckpt_path=path, enable_checkpointing=True,
            **saving(tmp_path, every_n_train_steps=6),
        )  # fmt: skip
    assert load_policy(path)(np.zeros(4, np.float32)) in (0, 1)


def test_a_checkpoint_s_policy_acts_and_its_run_is_evaluated(tmp_path):
    path, module = saved(tmp_path / "ckpt")
    loaded = load_policy(path)
    assert differing(weights(loaded.module), weights(module.policy)) == []
    run_dir = write_run(path, tmp_path / "run")
    again = headrace.load_policy(run_dir)
    assert differing(weights(again.module), weights(module.policy)) == []
    obs = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    expected = module.policy.act_greedily(torch.from_numpy(obs))["action"]
    assert again(obs).tolist() == loaded(obs).tolist() == expected.flatten().tolist()
    with pytest.raises(RunDirError, match="holds a run already"):
        write_run(path, run_dir)


def test_a_written_run_is_no_run_to_resume(tmp_path):
    path, _ = saved(tmp_path / "ckpt", env="CartPole-v1")
    run_dir = write_run(path, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"(?s)holds policies alone.*--init-from"):
        headrace.resume(run_dir, total_env_steps=512, quiet=True)
    (record,) = load_runs(run_dir)
    assert (record.state, record.env_steps) == ("imported", 128)


def test_a_trainer_s_checkpoint_in_place_of_a_run_is_told_what_to_do(tmp_path):
    path, _ = saved(tmp_path / "ckpt")
    for verb in ("export", "eval"):
        done = python.run(python.command(verb, path))
        assert done.returncode and "headrace.lightning.write_run(" in done.stderr, done.stderr


def test_weights_load_into_a_new_module_by_lightning_s_own_way(tmp_path):
    path, module = saved(tmp_path)
    new = PolicyModule.load_from_checkpoint(path, experience=experience(), weights_only=True)
    assert differing(weights(new.policy), weights(module.policy)) == []


def test_other_checkpoints_are_refused(tmp_path):
    path = tmp_path / "other.ckpt"
    torch.save({"state_dict": {}}, path)
    with pytest.raises(CheckpointError, match="holds no run of Headrace's"):
        load_policy(path)
    path.write_text("hello")
    for file in (path, tmp_path / "none.ckpt"):
        with pytest.raises(CheckpointError, match=f"{file.name} cannot be read"):
            load_policy(file)


def test_nothing_in_a_checkpoint_is_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "made"), "w"))

    path = tmp_path / "evil.ckpt"
    torch.save({"headrace": Evil(), "state_dict": {}}, path)
    with pytest.raises(CheckpointError, match="Weights only load failed"):
        load_policy(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.more
def test_a_written_run_is_evaluated_from_the_command_line(tmp_path):
    path, _ = saved(tmp_path / "ckpt", env="CartPole-v1")
    run_dir = write_run(path, tmp_path / "run")
    done = python.run(python.command("eval", run_dir, "--episodes", "2"), check=True)
    assert "2 episodes" in done.stdout
