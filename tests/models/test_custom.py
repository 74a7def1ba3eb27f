"""What users bring and ask for beside an environment: networks, wrappers, other runs' weights."""

import itertools
import json
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import headrace
from headrace.cli import commands
from headrace.envs.factory import EnvMaker
from headrace.errors import CheckpointError, ConfigError, EnvError, UsageError
from tests import python
from tests.support import Counting, inline, plan_for, policies_for, short_cartpole, workers
from tests.training.test_api import TINY

ROOT = Path(__file__).parents[2]


class Linear(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.both = nn.Linear(spec.seen.size, headrace.num_params(spec) + 1)

    def forward(self, obs):
        out = self.both(obs)
        return out[..., :-1], out[..., -1]


class Doubled(gym.RewardWrapper):
    def reward(self, reward):
        return 2 * reward


def wrapped_twice(env):
    return Doubled(env)


def test_an_own_network_trains_with_workers_resumes_and_loads(tmp_path):
    given = dict(env="CartPole-v1", model=Linear, **TINY)
    whole = headrace.train(run_dir=tmp_path / "a", total_env_steps=192, num_workers=2, **given)
    headrace.train(run_dir=tmp_path / "b", total_env_steps=64, schedule_env_steps=192, **given)
    with pytest.raises(ConfigError, match=r"again: --model tests[.]models[.]test_custom:Linear"):
        headrace.resume(tmp_path / "b")
    again = headrace.resume(tmp_path / "b", model=Linear, total_env_steps=192, quiet=True)
    policy = headrace.load_policy(tmp_path / "a", model="tests.models.test_custom:Linear")
    assert type(policy.module.model) is Linear
    state = again.policy.module.state_dict()
    for name, value in policy.module.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert len(whole.evaluate(episodes=2).returns) == 2
    with pytest.raises(ConfigError, match="a network of its own"):
        headrace.load_policy(tmp_path / "a")
    plain = headrace.train("CartPole-v1", run_dir=tmp_path / "c", total_env_steps=64, **TINY)
    with pytest.raises(ConfigError, match="takes no model"):
        headrace.load_policy(plain.dir, model=Linear)


def test_an_own_network_s_batches_are_the_same_inline_and_in_workers():
    plan = plan_for(short_cartpole, model=Linear)
    actions = []
    for make in (inline, workers):
        collector = make(plan)
        collector.publish(policies_for(plan), 0)
        actions.append(torch.cat([f.action.clone() for f in collector.collect().fragments], 1))
        collector.close()
    assert torch.equal(*actions)


def wrong_shape(spec):
    model = Linear(spec)
    model.both = nn.Linear(4, 9)
    return model


def raises(spec):
    model = Linear(spec)
    model.both = nn.Linear(3, 3)
    return model


def with_layer(layer):
    """A network that acts otherwise than it learns."""

    def make(spec):
        model = Linear(spec)
        model.both = nn.Sequential(nn.Linear(4, 64), layer, nn.Linear(64, 3))
        return model

    return make


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (with_layer(nn.Dropout()), "other values for the same observations.*LayerNorm"),
        (with_layer(nn.BatchNorm1d(64)), "changed itself.*BatchNorm"),
        (lambda spec: 3, "is a int: expected .* torch.nn.Module"),
        (lambda: 3, "too many .*takes the environment's spec"),
        (nn.Linear(4, 2), "not the module itself"),
        (wrong_shape, r"returned shapes \[\(2, 8\), \(2,\)\] .*\[n, 2\]"),
        (raises, r"Linear failed: RuntimeError.*\n?.*expected that forward"),
        ("tests.models.test_custom:Linea", "Did you mean tests.models.test_custom:Linear"),
        ("tests.nowhere:Linear", "no module"),
        ("Linear", "expected module:callable"),
    ],
)
def test_a_network_that_does_not_fit_is_refused_in_words(tmp_path, model, words):
    with pytest.raises(UsageError, match=f"(?s){words}"):
        headrace.train("CartPole-v1", model=model, run_dir=tmp_path / "r", **TINY)


class LikeGymnasium:
    """An environment that is none of Gymnasium's classes, and draws itself."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    steps = None

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, seed=None):
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.steps, self.color = 0, self.random.integers(0, 256, 3)  # fails if never seeded
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), 1.0, self.steps == 5, False, {}

    def render(self):
        picture = np.full((32, 48, 3), self.color, np.uint8)
        picture[: self.steps] = 0
        return picture

    def close(self):
        pass


def test_an_environment_that_is_only_like_gymnasium_s_trains_and_is_filmed(tmp_path):
    run = headrace.train(LikeGymnasium, run_dir=tmp_path / "r", total_env_steps=64, **TINY)
    assert run.mean_return == 5
    assert run.evaluate(episodes=2, video=tmp_path / "film.mp4").returns == (5, 5)
    assert (tmp_path / "film.mp4").read_bytes()[4:8] == b"ftyp"  # MP4's first box


def test_wrappers_are_applied_and_must_be_named_again(tmp_path):
    env = "tests.support:Counting"
    kwargs = {"env_kwargs": {"terminate_at": 5}, **TINY}
    run = headrace.train(
        env, wrapper=["tests.models.test_custom:wrapped_twice", Doubled], run_dir=tmp_path / "r",
        total_env_steps=64, num_workers=2, **kwargs,
    )  # fmt: skip
    assert run.mean_return == 4 * 5  # doubled twice
    assert run.evaluate(episodes=2).returns == (20, 20)
    settings = json.loads((run.dir / "config.json").read_text())["settings"]
    assert settings["wrapper"] == ["tests.models.test_custom:wrapped_twice", "Doubled"]
    with pytest.raises(ConfigError, match=r"tests[.]models[.]test_custom:wrapped_twice Doubled"):
        headrace.resume(run.dir, env=env)
    again = headrace.resume(
        run.dir, env=env, wrapper=[wrapped_twice, Doubled], total_env_steps=128, quiet=True
    )
    assert again.mean_return == 20
    with pytest.raises(ConfigError, match="no best policy: it was trained without --eval-every"):
        again = {"env": env, "wrapper": ("a:b", "c:d")}
        commands.FLAGS["eval"](run_dir=run.dir, best=True, **again).execute([])


def test_a_wrapper_s_error_is_its_own():
    def broken(env):
        raise RuntimeError("the wrapper's own message")

    with pytest.raises(EnvError, match=r"(?s)the wrapper's own message.*while broken wrapped"):
        headrace.train(Counting, wrapper=broken, **TINY)


def test_a_wrapper_makes_atari_step_its_python_form(tmp_path):
    from headrace.config.resolve import resolve

    given = {"env": "ALE/Breakout-v5"}
    assert resolve(given).run.vectorization == "native"
    wrapped = resolve(given | {"wrapper": ("a:b",)})
    assert wrapped.run.vectorization == "python"
    auto = resolve(given | {"vectorization": "auto"})
    assert (auto.run.vectorization, auto.run.envs_per_vector) == ("native", 8)


@pytest.mark.more
def test_a_run_can_begin_with_the_weights_of_another(tmp_path):
    network = headrace.Network(normalize_obs=True)
    first = headrace.train("CartPole-v1", run_dir=tmp_path / "a", total_env_steps=64,
                           network=network, **TINY)  # fmt: skip
    # A learning rate of 0: what it begins with is what it ends with
    second = headrace.train(
        "CartPole-v1", run_dir=tmp_path / "b", total_env_steps=64, network=network,
        algo=headrace.PPO(lr=0.0), init_from=str(first.dir), seed=9, **TINY,
    )  # fmt: skip
    theirs = second.policy.module.state_dict()
    for name, value in first.policy.module.state_dict().items():
        if "moments" in name:
            assert not torch.equal(theirs[name], value)  # more was seen
        else:
            assert torch.equal(theirs[name], value), name
    assert second.summary["env_steps"] == 64
    with pytest.raises(CheckpointError, match=r"another environment \(CartPole-v1, not Acrobot-v1"):
        headrace.train("Acrobot-v1", run_dir=tmp_path / "c", init_from=str(first.dir), **TINY)
    with pytest.raises(CheckpointError, match=r"another network:\n.*\(2, 64\), here \(2, 8\)"):
        headrace.train(
            "CartPole-v1", run_dir=tmp_path / "d", init_from=str(first.dir),
            network=headrace.Network(hidden_sizes=(8,)), **TINY,
        )  # fmt: skip


@pytest.mark.more
def test_evaluations_come_on_time_and_the_best_policy_is_kept(tmp_path, capsys):
    seen = []
    run = headrace.train(
        "CartPole-v1", run_dir=tmp_path / "best", total_env_steps=4096, eval_every=1000,
        eval_episodes=4, num_envs=8, num_steps=64, seed=2,
        on_update=lambda _, m: seen.append((m.get("eval_env_steps"), m.get("eval_return"))),
    )  # fmt: skip
    due = [steps for steps, value in seen if value is not None]
    assert due == [1024, 2048, 3072, 4096]
    returns = [value for _, value in seen if value is not None]
    assert run.summary["best_return"] == max(returns)
    said = capsys.readouterr().out
    for value in returns:
        assert f"evaluated: {value:.1f}" in said
    assert f"Best evaluation: {max(returns):.1f}" in said
    (best,) = (run.dir / "best").glob("step_*")
    assert best.name.endswith(str(due[returns.index(max(returns))]))
    from headrace.evaluation.evaluate import evaluate

    assert headrace.load_policy(run.dir).spec.id == "CartPole-v1"  # a run may be called best, too
    kept = headrace.load_policy(run.dir / "best")
    again = evaluate(kept, run._job.maker, episodes=4, seed=2)
    assert np.mean(again.returns) == max(returns)
    out = python.run(
        python.command("eval", str(run.dir), "--best", "--episodes", "4",
         "--seed", "2", "--json"), check=True,
    )  # fmt: skip
    assert json.loads(out.stdout)["mean_return"] == max(returns)


def test_an_evaluation_of_episodes_that_do_not_end_is_refused(tmp_path, monkeypatch):
    from headrace.evaluation import evaluate

    monkeypatch.setattr(evaluate, "_MAX_STEPS_WITHOUT_END", 500)
    run = headrace.train(Counting, run_dir=tmp_path / "r", total_env_steps=64, **TINY)
    with pytest.raises(EnvError, match="An episode of Counting did not end in 500 steps"):
        run.evaluate(episodes=2)

    class SometimesEndless(Counting):
        """By its first seed, all its episodes end at once, or none does."""

        def reset(self, **kwargs):
            obs, info = super().reset(**kwargs)
            if not hasattr(self, "ends"):
                self.ends = self.salt < 0.5
            return obs, info

        def step(self, action):
            obs, reward, _, truncated, info = super().step(action)
            return obs, reward, self.ends, truncated, info

    asked = itertools.count()

    def stop():
        assert next(asked) < 5_000, "it goes on although an episode does not end"
        return False

    with pytest.raises(EnvError, match="An episode of SometimesEndless did not end in 500"):
        evaluate.evaluate(run.policy, EnvMaker(SometimesEndless), episodes=8, stop=stop)


def test_a_long_evaluation_says_how_far_it_is(tmp_path, monkeypatch):
    from headrace.evaluation import evaluate

    monkeypatch.setattr(evaluate, "_SAY_EVERY_S", -1.0)
    env, said = EnvMaker(Counting, {"terminate_at": 100}), []
    run = headrace.train(
        env.env, env_kwargs=env.kwargs, run_dir=tmp_path / "r", total_env_steps=64, **TINY
    )
    evaluate.evaluate(run.policy, env, episodes=2, say=said.append)
    assert said == [
        "0 of 2 episodes, step 64 of each env",
        "2 of 2 episodes, step 128 of each env",
    ]


def test_the_example_of_an_own_network_runs(tmp_path):
    code = "import own_network; own_network.main(total_env_steps=1024)"
    done = python.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT / "examples")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Action:" in done.stdout
