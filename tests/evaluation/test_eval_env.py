"""Evaluations in another environment than the training one."""

import json

import gymnasium as gym
import numpy as np
import pytest

import headrace
from headrace.cli import main
from headrace.errors import ConfigError
from headrace.storage.metrics import read_metrics
from tests.support import Counting

TINY = {"num_envs": 4, "num_steps": 16, "envs_per_vector": 2, "num_minibatches": 2, "quiet": True}
HERE = "tests.evaluation.test_eval_env"


class Short(Counting):
    """Episodes of 5 steps, or of as many as it is told."""

    def __init__(self, steps=5):
        super().__init__(terminate_at=steps)


class Long(Short):
    """Episodes of 9 steps."""

    def __init__(self, steps=9):
        super().__init__(steps)


class Wide(Short):
    """Another observation."""

    def __init__(self):
        super().__init__()
        self.observation_space = gym.spaces.Box(-1, 1, (7,), np.float32)


def doubled(env):
    """Wrap: rewards count twice."""
    return gym.wrappers.TransformReward(env, lambda reward: 2 * reward)


def train(tmp_path, env=Short, name="run", **more):
    return headrace.train(
        env, run_dir=tmp_path / name, **TINY | {"total_env_steps": 128, "eval_every": 64} | more
    )


def returns(run):
    rows = read_metrics(run.dir)
    return {row[key] for key in ("mean_return", "eval_return") for row in rows if row.get(key)}


def evaluated(run_dir, *flags, capsys):
    """The mean return that `headrace eval` prints, or its exit code and error."""
    capsys.readouterr()
    code = main._main(["eval", str(run_dir), "--episodes", "2", "--json", *flags])
    said = capsys.readouterr()
    return json.loads(said.out.splitlines()[-1])["mean_return"] if not code else (code, said.err)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {5.0}),
        ({"eval_env": Long}, {5.0, 9.0}),
        ({"eval_env": Long, "eval_env_kwargs": {"steps": 3}}, {5.0, 3.0}),
        ({"eval_env": lambda: Long(8)}, {5.0, 8.0}),
        ({"eval_env_kwargs": {"steps": 4}}, {5.0, 4.0}),
        ({"env_kwargs": {"steps": 6}, "eval_env": f"{HERE}:Long"}, {6.0, 9.0}),
        ({"eval_env": Long, "wrapper": doubled}, {10.0, 18.0}),
    ],
)
def test_evaluations_are_in_eval_env(tmp_path, given, expected):
    run = train(tmp_path, **given)
    assert returns(run) == expected
    # what is evaluated after training, too
    assert np.mean(run.evaluate(2).returns) in expected
    assert len(expected) == 1 or np.mean(run.evaluate(2).returns) != run.mean_return


def test_training_is_the_same_whatever_is_evaluated(tmp_path):
    runs = [train(tmp_path), train(tmp_path, name="other", eval_env=Long)]
    first, second = (run.policy.module.state_dict() for run in runs)
    assert all((first[name] == second[name]).all() for name in first)


def test_other_spaces_are_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(ConfigError) as refused:
        train(tmp_path, eval_env=Wide)
    said = str(refused.value)
    assert "the spaces of Wide are not those of Short" in said
    assert "observation: evaluation Box(7,) float32, training Box(2,) float32" in said
    assert not (tmp_path / "run/config.json").exists()


def test_the_form_of_a_kernel_environment_is_not_asked_of_another_one(tmp_path):
    settings = {"total_env_steps": 256, "num_steps": 64, "envs_per_vector": 4, "eval_episodes": 2}
    run = train(tmp_path, "headrace/CartPole-v1", eval_env="CartPole-v1", **settings)
    assert not run._job.eval_maker.native
    assert "eval_return" in read_metrics(run.dir)[-1]
    back = train(tmp_path, "CartPole-v1", "back", eval_env="headrace/CartPole-v1", **settings)
    assert back._job.eval_maker.native
    assert back._job.eval_spec.interface == "kernel"


@pytest.mark.more
def test_resume_and_eval_keep_it(tmp_path, capsys):
    run = train(tmp_path, eval_env=Long, eval_env_kwargs={"steps": 7})
    with pytest.raises(ConfigError, match=r"--eval-env module:callable \(eval_env=\.\.\. in Pyth"):
        headrace.resume(run.dir, env=Short, total_env_steps=256)
    resumed = headrace.resume(run.dir, env=Short, eval_env=Long, total_env_steps=256, quiet=True)
    assert returns(resumed) == {5.0, 7.0}
    assert returns(resumed.resume(total_env_steps=320, quiet=True)) == {5.0, 7.0}
    code, said = evaluated(run.dir, capsys=capsys)
    assert code == 2
    assert "Name it again: --eval-env module:callable" in said  # and nothing of --env
    assert evaluated(run.dir, "--eval-env", f"{HERE}:Long", capsys=capsys) == 7.0
    assert evaluated(run.dir, "--env", f"{HERE}:Short", capsys=capsys) == 5.0


def test_eval_keeps_other_arguments_and_plain_ids(tmp_path, capsys):
    run = train(tmp_path, eval_env_kwargs={"steps": 4})
    assert evaluated(run.dir, "--env", f"{HERE}:Short", capsys=capsys) == 4.0
    run = train(
        tmp_path, lambda: gym.make("CartPole-v1"), "ids", eval_env="CartPole-v1",
        eval_env_kwargs={"max_episode_steps": 3},
    )  # fmt: skip
    assert evaluated(run.dir, capsys=capsys) == 3.0


def test_flags_and_commands_name_it(tmp_path, capsys):
    run_dir = str(tmp_path / "run")
    flags = [
        "--num-envs", "2", "--num-steps", "16", "--envs-per-vector", "2", "--num-minibatches", "2",
        "--total-env-steps", "32", "--eval-every", "32",
    ]  # fmt: skip
    argv = ["train", f"{HERE}:Short", "--run-dir", run_dir, "--eval-env", f"{HERE}:Long"]
    assert main._main([*argv, "--eval-env-kwargs", "steps=6", *flags]) == 0
    said = capsys.readouterr().out
    assert "evaluated: 6.0" in said
    assert f"headrace eval {run_dir} --env {HERE}:Short --eval-env {HERE}:Long" in said
    assert main._main(["report", run_dir]) == 0
    assert f"--eval-env {HERE}:Long" in (tmp_path / "run/report.html").read_text()
