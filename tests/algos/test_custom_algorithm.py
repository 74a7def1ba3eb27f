"""Algorithms outside the package: trained by name, resumed, evaluated, and what they need."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import headrace
from examples.own_algorithm import Reinforce, ReinforceConfig, loss
from headrace.algos.base import Algorithm, AlgorithmConfig
from headrace.algos.base import policy_loss as one_loss
from headrace.config.algorithms import ALGORITHMS, load_algorithm
from headrace.configclass import configclass
from headrace.errors import CheckpointError, ConfigError
from headrace.storage import checkpoint
from headrace.storage.metrics import read_metrics
from headrace.training.reporter import resume_command
from tests import python
from tests.algos.replay_toy import ToyReplay, ToyReplayConfig

ROOT = Path(__file__).parents[2]
NAME = "examples.own_algorithm:Reinforce"
SMALL = {"num_envs": 8, "num_steps": 64, "seed": 1, "quiet": True}
REPLAY = {"num_envs": 4, "num_steps": 8, "seed": 1, "quiet": True}


class Uphill(Reinforce):
    """The same with the sign of the loss flipped."""

    def losses(self, modules, config):
        def flipped(policy, minibatch, cfg):
            total, metrics = loss(policy, minibatch, cfg)
            return -total, metrics

        return one_loss(flipped, modules, config)


def equal_policies(first, second):
    a, b = (checkpoint.newest(run_dir).tensors("policy_default") for run_dir in (first, second))
    return all(torch.equal(a[name], b[name]) for name in a)


def test_own_algorithm_learns_and_with_the_sign_flipped_it_does_not(tmp_path):
    learned, flipped = (
        headrace.train(
            "CartPole-v1", algo=algorithm, run_dir=tmp_path / algorithm.__name__,
            total_env_steps=24_000, **SMALL,
        ).mean_return
        for algorithm in (Reinforce, Uphill)
    )  # fmt: skip
    assert learned > 50 > 30 > flipped


def test_what_prepares_a_minibatch_adds_columns_through_which_no_gradient_flows(tmp_path):
    seen = []

    class Prepared(Reinforce):
        def losses(self, modules, config):
            def prepare(minibatch):
                return {"target": modules["policy"].value(minibatch["obs"]) + 2.0}

            def checked(policy, minibatch, cfg):
                seen.append(minibatch["target"].requires_grad)
                total, metrics = loss(policy, minibatch, cfg)
                return total, {"baseline_loss": metrics["baseline_loss"]}

            (of_policy,) = one_loss(checked, modules, config).values()
            return {"policy": dataclasses.replace(of_policy, prepare=prepare)}

    headrace.train(
        "CartPole-v1", algo=Prepared, run_dir=tmp_path / "run", total_env_steps=1024, **SMALL
    )
    assert seen == [False, False]
    losses = [row["baseline_loss"] for row in read_metrics(tmp_path / "run")]
    assert losses == pytest.approx([4.0, 4.0])


@pytest.mark.more
def test_own_algorithm_is_named_on_the_command_line_and_again_to_go_on(tmp_path):
    def run(*words, code=0):
        done = python.run(python.command(*words), cwd=ROOT, env=dict(os.environ))
        assert done.returncode == code, done.stderr
        return done

    sizes = ("--num-envs", 4, "--num-steps", 32, "--seed", 3, "--schedule-env-steps", 512)
    flags = (*sizes, "--algo", NAME, "--baseline-coef", 0.25, "--num-workers", 1)
    whole = tmp_path / "whole"
    done = run("train", "CartPole-v1", *flags, "--total-env-steps", 512, "--run-dir", whole)
    assert f"To play: headrace eval {whole} --algo {NAME}" in done.stdout
    run("train", "CartPole-v1", *flags, "--total-env-steps", 256, "--run-dir", tmp_path / "part")
    for verb in ("resume", "eval"):
        assert f"--algo {NAME}" in run(verb, tmp_path / "part", code=2).stderr
    run("resume", tmp_path / "part", "--algo", NAME, "--total-env-steps", 512)
    assert equal_policies(tmp_path / "whole", tmp_path / "part")
    run("eval", tmp_path / "part", "--algo", NAME, "--episodes", 2)
    with pytest.raises(ConfigError, match=r"(?s)algorithm of its own.*load_policy.*algo="):
        headrace.load_policy(tmp_path / "part")
    policy = headrace.load_policy(tmp_path / "part", algo=NAME)
    assert policy(np.zeros(4, np.float32)) in (0, 1)


def test_settings_of_an_own_algorithm_choose_it_in_python(tmp_path):
    run = headrace.train(
        "CartPole-v1", algo=ReinforceConfig(lr=0.25, baseline_coef=2.0), total_env_steps=512,
        run_dir=tmp_path / "run", **SMALL,
    )  # fmt: skip
    settings = run._job.settings
    assert (settings.run.algo, settings.algo.lr) == (NAME, 0.25)
    assert resume_command(run._job).endswith(f"--algo {NAME}")
    assert run.policy(np.zeros(4, np.float32)) in (0, 1)


@pytest.mark.parametrize(
    ("algo", "words"),
    [
        ("pppo", f"expected one of {', '.join(ALGORITHMS)}, or module:Name"),
        ("examples.own_algorithm:loss", "a class derived from headrace"),
        ("examples.own_algorithm:Nothing", "no callable 'Nothing'"),
        ("no_such_module:Name", "There is no module"),
        ("examples/own_algorithm.py:Reinforce", "Did you mean examples.own_algorithm:Reinforce"),
    ],
)
def test_what_is_no_algorithm_is_refused_in_words(algo, words):
    with pytest.raises(ConfigError, match=words):
        load_algorithm(algo)


def test_an_algorithm_without_settings_or_methods_is_refused():
    class Bare(Algorithm):
        pass

    class Half(Bare):
        def update(self, source, ctx): ...

    class Methods(Half):
        def losses(self, modules, config): ...

    for kind, message in (
        (Bare, "has no losses and no update"),
        (Half, "has no losses. Expected"),
        (Methods, "Config is a @configclass"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_algorithm(kind)


def test_settings_of_no_algorithm_are_refused():
    @configclass
    class Lonely(AlgorithmConfig):
        pass

    with pytest.raises(ConfigError, match="expected settings such as headrace"):
        headrace.train("CartPole-v1", algo=Lonely())


@pytest.mark.more
def test_replay_algorithm_learns_and_resumes_to_the_bit(tmp_path):
    whole = headrace.train(
        "CartPole-v1", algo=ToyReplay, total_env_steps=10_016, run_dir=tmp_path / "whole", **REPLAY
    )
    assert whole.mean_return > 40  # at random: 22
    assert whole.summary["learner_steps"] == int(0.25 * (10_016 - 500))
    headrace.train(
        "CartPole-v1", algo=ToyReplayConfig(), total_env_steps=5_024, run_dir=tmp_path / "part",
        schedule_env_steps=10_016, **REPLAY,
    )  # fmt: skip
    headrace.resume(tmp_path / "part", algo=ToyReplay, total_env_steps=10_016, quiet=True)
    assert equal_policies(tmp_path / "whole", tmp_path / "part")


def test_replay_algorithm_accepts_any_lag_of_workers(tmp_path):
    run = headrace.train(
        "CartPole-v1", algo=ToyReplay, total_env_steps=1_024, num_workers=2, lag=3,
        envs_per_vector=2, run_dir=tmp_path / "run", **REPLAY,
    )  # fmt: skip
    assert run.summary["learner_steps"] >= int(0.25 * (1_024 - 500))


def test_replay_algorithm_learns_from_kernel_vectors_and_in_parts(tmp_path):
    errors = []
    for parts in (1, 2):
        run = headrace.train(
            "headrace/CartPole-v1", algo=ToyReplay, total_env_steps=1_024, num_envs=16, seed=1,
            num_steps=32, num_accumulation_steps=parts, run_dir=tmp_path / str(parts), quiet=True,
        )  # fmt: skip
        errors.append(read_metrics(run.dir)[-1]["td_error"])
    assert errors[0] > 0
    assert errors[1] == pytest.approx(errors[0], rel=0.01)


def test_what_an_algorithm_does_not_learn_with_is_refused():
    for algo, setting, message in (
        (ToyReplay, {"num_learners": 2}, "learns from replay, which one learner holds"),
        (ToyReplay, {"core": "lstm"}, "does not learn with a recurrent core"),
        (Reinforce, {"core": "gru"}, "does not learn with a recurrent core"),
    ):
        with pytest.raises(ConfigError, match=message):
            headrace.train("CartPole-v1", algo=algo, **SMALL | setting)


def test_tiny_numbers_are_zero_in_updates_alone(tmp_path):
    """Most CPUs compute with denormal numbers some ten times slower."""
    if not torch.set_flush_denormal(False):
        pytest.skip("this CPU cannot flush denormal numbers")
    seen = []

    def tiny():
        return float(torch.tensor(1e-40) * 1)

    class Looks(Reinforce):
        def update(self, source, ctx):
            seen.append(tiny())
            return super().update(source, ctx)

    headrace.train(
        "CartPole-v1", algo=Looks, run_dir=tmp_path / "run", total_env_steps=512, **SMALL,
        on_update=lambda *_: seen.append(tiny()),
    )  # fmt: skip
    assert seen[0] == 0 < seen[1]


def test_mistakes_of_an_algorithm_are_explained(tmp_path):
    class Misspelled(Reinforce):
        def update(self, source, ctx):
            return ctx.step("value", {}, ctx.config.lr)

    class Other(ToyReplay):
        def build(self, policy, spec, network, config, num_rows, ranks):
            modules = super().build(policy, spec, network, config, num_rows, ranks)
            return modules | {"critic": torch.nn.Linear(2, 2)}

    with pytest.raises(ConfigError, match="expected a loss of the algorithm: policy"):
        headrace.train("CartPole-v1", algo=Misspelled, run_dir=tmp_path / "a", **SMALL)
    headrace.train(
        "CartPole-v1", algo=ToyReplay, total_env_steps=64, run_dir=tmp_path / "b", **REPLAY
    )
    with pytest.raises(CheckpointError, match=r"critic.weight .* \(2, 2\) now, and missing"):
        headrace.resume(tmp_path / "b", algo=Other, total_env_steps=128, quiet=True)


def test_rewards_are_scaled_before_an_own_algorithm_learns_from_them(tmp_path):
    weights = []
    for clip in (0.0, 0.01):
        run = headrace.train(
            "CartPole-v1", algo=Reinforce, total_env_steps=512, clip_reward=clip,
            run_dir=tmp_path / str(clip), **SMALL,
        )  # fmt: skip
        weights.append(run.policy.module.state_dict()["model.critic.weight"])
    assert not torch.equal(*weights)


# What a replay algorithm of the package touches outside its own file: file -> (before, after).
REGISTER = {
    "config/algorithms.py": [
        (
            "from headrace.algos.impala import IMPALAAlgorithm\n",
            "from headrace.algos.impala import IMPALAAlgorithm\n"
            "from headrace.algos.replay_toy import ToyReplay\n",
        ),
        ("        dqn.DQNAlgorithm(),\n", "        dqn.DQNAlgorithm(),\n        ToyReplay(),\n"),
    ],
    # Only to make its settings a public name, headrace.ToyReplayConfig:
    "__init__.py": [
        (
            '    "PPO": "headrace.algos.ppo",\n',
            '    "PPO": "headrace.algos.ppo",\n'
            '    "ToyReplayConfig": "headrace.algos.replay_toy",\n',
        ),
    ],
}


@pytest.mark.more
def test_replay_algorithm_of_the_package_touches_two_files_besides_its_own(tmp_path):
    assert len(REGISTER) <= 6
    package = tmp_path / "src" / "headrace"
    shutil.copytree(ROOT / "src/headrace", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "tests/algos/replay_toy.py", package / "algos")
    for name, edits in REGISTER.items():
        text = (package / name).read_text()
        for before, after in edits:
            assert text.count(before) == 1, (name, before)
            text = text.replace(before, after)
        (package / name).write_text(text)
    script = (
        "import headrace\n"
        "run = headrace.train('CartPole-v1', algo='toy_replay', total_env_steps=1024, num_envs=4,\n"
        "    num_steps=8, run_dir='run', quiet=True)\n"
        "run = headrace.resume('run', total_env_steps=2048, quiet=True)\n"
        "settings = headrace.ToyReplayConfig(replay_size=99)\n"
        "print(len(run.evaluate(2).returns), run.summary['learner_steps'], settings.replay_size)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "src")}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True,
        text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["2", "387", "99"], done.stderr
