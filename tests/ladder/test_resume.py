"""Rung 6: stopped and resumed is bit for bit what was never stopped. F16: test_faults_repeat.py."""

import json
import os
import signal

import gymnasium as gym
import numpy as np
import pytest
import torch

import headrace
from headrace.storage import checkpoint
from tests.marks import repeats
from tests.support import Counting, Nested, short_cartpole


class Stateful(Counting):
    """Offers its own state; its episodes cannot be replayed from their seed alone."""

    def get_state(self):
        return {"t": np.array(self.t), "salt": np.array(self.salt), "raw": b"abc"}

    def set_state(self, state):
        assert state["raw"] == b"abc"
        self.t, self.salt = int(state["t"]), float(state["salt"])


class Unrepeatable(Counting):
    """Draws from a generator that no seed reaches: neither state nor replay brings it back."""

    def reset(self, *, seed=None, options=None):
        _, info = super().reset(seed=seed)
        self.salt = float(np.random.default_rng().random())
        return self._obs(), info


SETTINGS = {
    "num_envs": 4, "num_steps": 32, "envs_per_vector": 2, "seed": 5, "quiet": True,
    "schedule_env_steps": 4 * 32 * 12,
    "algo": headrace.PPO(lr=3e-3, lr_schedule="linear", clip_schedule="linear", num_minibatches=2),
    "network": headrace.Network(normalize_obs=True, normalize_reward=True),
}  # fmt: skip
UPDATE = 4 * 32


def weights(run):
    return checkpoint.newest(run.dir).tensors("policy_default") | {
        f"learner.{k}": v for k, v in checkpoint.newest(run.dir).tensors("learner_default").items()
    }


def assert_same(a, b):
    for name, value in weights(a).items():
        assert torch.equal(value, weights(b)[name]), name
    left, right = (checkpoint.newest(run.dir).tensors("workers") for run in (a, b))
    for name in left:
        assert torch.equal(left[name], right[name]), name
    for name in ("env_steps", "mean_return", "episodes", "learner_steps"):
        assert a.summary[name] == b.summary[name], name


def test_a_run_may_change_its_number_of_workers_on_resume(tmp_path):
    whole = headrace.train(
        short_cartpole, run_dir=tmp_path / "whole", total_env_steps=4 * UPDATE, **SETTINGS
    )
    headrace.train(
        short_cartpole, run_dir=tmp_path / "part", total_env_steps=2 * UPDATE, num_workers=2,
        **SETTINGS,
    )  # fmt: skip
    config = json.loads((tmp_path / "part/config.json").read_text())
    config["settings"]["num_workers"] = 0
    (tmp_path / "part/config.json").write_text(json.dumps(config))
    resumed = headrace.resume(
        tmp_path / "part", env=short_cartpole, total_env_steps=4 * UPDATE, quiet=True
    )
    assert_same(whole, resumed)


def test_resume_takes_more_workers_than_the_run_has_vectors(tmp_path, capsys):
    """A run that found its sizes itself has one vector; smaller ones round differently."""
    sizes = {"total_env_steps": 128, "run_dir": tmp_path / "run", "num_envs": 4, "num_steps": 16}
    headrace.train(short_cartpole, quiet=True, **sizes)
    resumed = headrace.resume(
        tmp_path / "run", env=short_cartpole, num_workers=2, total_env_steps=256
    )
    assert resumed.summary["env_steps"] == 256
    said = capsys.readouterr().out
    assert "2 workers, 2 vectors of 2 envs" in said
    assert "follows 2 workers, results differ by rounding: envs_per_vector=2" in said
    assert "as the run began: schedule_env_steps=128" in said


@pytest.mark.more
def test_nested_observations_and_actions_go_on_with_workers_and_by_replay(tmp_path, capsys):
    """Inline and never stopped; with two workers, stopped, and resumed."""
    whole = headrace.train(
        Nested, run_dir=tmp_path / "whole", total_env_steps=4 * UPDATE, **SETTINGS
    )
    headrace.train(
        Nested, run_dir=tmp_path / "part", total_env_steps=2 * UPDATE, num_workers=2, **SETTINGS
    )
    saved = checkpoint.newest(tmp_path / "part").arrays("workers")
    assert saved["vector0.episode_step"].any(), "an episode under way"
    again = headrace.resume(tmp_path / "part", env=Nested, total_env_steps=4 * UPDATE)
    assert "4 replayed, 0 begun anew" in capsys.readouterr().out
    assert_same(whole, again)
    obs, _ = Nested().reset(seed=0)
    loaded = headrace.load_policy(tmp_path / "part")
    one, other = whole.policy(obs), loaded(obs)
    assert Nested().action_space.contains(one)
    assert str(one) == str(other)


@repeats("num_workers", [0, 2])
@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_a_run_with_a_recurrent_core_goes_on_with_what_it_remembers(tmp_path, core, num_workers):
    settings = SETTINGS | {"network": headrace.Network(core=core, normalize_obs=True)}
    settings |= {"num_workers": num_workers}
    runs = [tmp_path / "whole", tmp_path / "part"]
    ended = [
        headrace.train(short_cartpole, run_dir=run, total_env_steps=updates * UPDATE, **settings)
        for run, updates in zip(runs, (4, 2), strict=True)
    ]
    assert checkpoint.newest(runs[1]).arrays("workers")["vector0.core_state.0"].any()
    assert_same(
        ended[0],
        headrace.resume(runs[1], env=short_cartpole, total_env_steps=4 * UPDATE, quiet=True),
    )


@pytest.mark.parametrize(
    ("env", "how"),
    [
        (lambda: Stateful(truncate_at=50), "4 restored, 0 replayed, 0 begun anew"),
        (lambda: Counting(truncate_at=50), "0 restored, 4 replayed, 0 begun anew"),
        (lambda: Unrepeatable(truncate_at=50), "0 restored, 0 replayed, 4 begun anew"),
    ],
)
def test_an_episode_under_way_comes_back_in_the_best_way_there_is(tmp_path, capsys, env, how):
    settings = SETTINGS | {"quiet": False}
    headrace.train(env, run_dir=tmp_path / "run", total_env_steps=3 * UPDATE, **settings)
    saved = checkpoint.newest(tmp_path / "run").arrays("workers")
    # 3 x 32 = 96 steps: the second episode is at its step 46
    assert saved["vector0.episode_step"].tolist() == [46, 46]
    seen = []
    capsys.readouterr()
    run = headrace.resume(
        tmp_path / "run", env=env, total_env_steps=4 * UPDATE, on_update=lambda i, m: seen.append(m)
    )
    out = capsys.readouterr().out
    assert how in out
    assert ("differs from one that was not interrupted" in out) == ("4 begun anew" in out)
    # Brought back, the episode ends 4 steps later with 50 steps in all; begun anew, not yet.
    assert run.summary["episodes"] == (4 if "4 begun anew" in how else 8)
    if "4 begun anew" not in how:
        assert seen[-1]["mean_length"] == 50


@pytest.mark.parametrize("when", ["train", "resume"])
def test_an_episode_that_would_take_too_long_to_replay_is_not(tmp_path, capsys, when):
    """Counting's step takes a microsecond or two; the limit is for a fraction of one step."""
    env = lambda: Counting(truncate_at=50)  # noqa: E731
    settings = SETTINGS | {"replay_limit_s": 1e-9 if when == "train" else 30.0}
    headrace.train(env, run_dir=tmp_path / "run", total_env_steps=3 * UPDATE, **settings)
    saved = checkpoint.newest(tmp_path / "run").arrays("workers")
    assert ("vector0.env0.actions" in saved) == (when == "resume")
    config = json.loads((tmp_path / "run/config.json").read_text())
    config["settings"]["replay_limit_s"] = 1e-9
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    headrace.resume(tmp_path / "run", env=env, total_env_steps=4 * UPDATE)
    assert "0 replayed, 4 begun anew" in capsys.readouterr().out


def test_where_episodes_are_not_seeded_only_the_first_can_be_replayed(tmp_path, capsys):
    env = lambda: Counting(truncate_at=50)  # noqa: E731
    settings = SETTINGS | {"quiet": False, "reseed_episodes": False}
    headrace.train(env, run_dir=tmp_path / "a", total_env_steps=1 * UPDATE, **settings)
    headrace.resume(tmp_path / "a", env=env, total_env_steps=2 * UPDATE)
    assert "4 replayed, 0 begun anew" in capsys.readouterr().out
    headrace.train(env, run_dir=tmp_path / "b", total_env_steps=2 * UPDATE, **settings)
    headrace.resume(tmp_path / "b", env=env, total_env_steps=3 * UPDATE)
    assert "0 replayed, 4 begun anew" in capsys.readouterr().out


class InPlace(Counting):
    """Changes the action that it is given, and remembers it."""

    def __init__(self):
        super().__init__(truncate_at=50)
        self.action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def step(self, action):
        action *= 2
        self.salt += float(action[0])
        return super().step(action)


@pytest.mark.parametrize("env", [lambda: Stateful(truncate_at=50), InPlace])
def test_interrupted_twice_in_the_middle_of_a_batch(tmp_path, env):
    whole = headrace.train(env, run_dir=tmp_path / "a", total_env_steps=6 * UPDATE, **SETTINGS)

    class Interrupting(gym.Wrapper):
        """Sends a signal in the middle of the second batch of each process's life."""

        steps = 0

        def step(self, action):
            Interrupting.steps += 1
            if Interrupting.steps == UPDATE + 40:
                os.kill(os.getpid(), signal.SIGINT)
            return self.env.step(action)

        def get_state(self):
            return self.env.get_state()

        def set_state(self, state):
            self.env.set_state(state)

    wrapper = Interrupting
    if not hasattr(env(), "get_state"):
        wrapper = type("Plain", (gym.Wrapper,), {"step": Interrupting.step})
    make = lambda: wrapper(env())  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        headrace.train(make, run_dir=tmp_path / "b", total_env_steps=6 * UPDATE, **SETTINGS)
    for _ in range(2):
        Interrupting.steps = 0
        with pytest.raises(KeyboardInterrupt):
            headrace.resume(tmp_path / "b", env=make, quiet=True)
    resumed = headrace.resume(tmp_path / "b", env=env, quiet=True)
    ledger = resumed.summary["ledger"]
    assert resumed.summary["lost_env_steps"] > 0
    assert ledger["collected"] == ledger["learned"] + resumed.summary["lost_env_steps"]
    assert_same(whole, resumed)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on_as_if_nothing_had_been(tmp_path, num_workers, number):
    whole = headrace.train(
        short_cartpole, run_dir=tmp_path / "whole", total_env_steps=6 * UPDATE,
        num_workers=num_workers, **SETTINGS,
    )  # fmt: skip

    def interrupt(iteration, _):
        if iteration == 3:
            os.kill(os.getpid(), number)

    with pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
        headrace.train(
            short_cartpole, run_dir=tmp_path / "part", total_env_steps=6 * UPDATE,
            num_workers=num_workers, on_update=interrupt, **SETTINGS,
        )  # fmt: skip
    if number == signal.SIGTERM:
        assert caught.value.code == 143
    assert checkpoint.newest(tmp_path / "part").manifest["counters"]["env_steps"] == 3 * UPDATE
    assert_same(whole, headrace.resume(tmp_path / "part", env=short_cartpole, quiet=True))


@pytest.mark.parametrize("num_workers", [0, 2])
@repeats("vectorization", ["native", "python"])
def test_a_kernel_environment_goes_on_where_it_was(tmp_path, capsys, num_workers, vectorization):
    settings = SETTINGS | {
        "num_workers": num_workers,
        "vectorization": vectorization,
        "envs_per_vector": 2 if num_workers else 4,
        "env_kwargs": {"max_episode_steps": 25},
    }
    runs = [tmp_path / "whole", tmp_path / "part"]
    ended = [
        headrace.train(
            "headrace/CartPole-v1", run_dir=run, total_env_steps=updates * UPDATE, **settings
        )
        for run, updates in zip(runs, (4, 2), strict=True)
    ]
    saved = checkpoint.newest(runs[1]).arrays("workers")
    assert saved["vector0.episode_step"].any(), "episodes must be under way"
    capsys.readouterr()
    resumed = headrace.resume(runs[1], total_env_steps=4 * UPDATE)
    how = "4 restored, 0 replayed" if vectorization == "native" else "0 restored, 4 replayed"
    assert f"{how}, 0 begun anew" in capsys.readouterr().out
    assert_same(ended[0], resumed)
