"""Replaced goals against the episodes that they were taken from, and learning by them."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import headrace
from headrace.batch import allocate, columns
from headrace.device_seeding import goal_draws
from headrace.errors import ConfigError, EnvError
from headrace.replay.buffer import ReplayBuffer
from headrace.spec import EnvSpec, Space

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from reach_goal import ReachGoal

N, T = 3, 7
NUMBER = Space("box", (2,), "float32")
SPEC = EnvSpec(
    "goals",
    Space("dict", parts=(("achieved_goal", NUMBER), ("desired_goal", NUMBER))),
    Space("discrete", (), "int64", nvec=(4,)),
)


def is_reached(achieved, desired):
    return (achieved == desired).all(-1).astype(np.float32)


class Stream:
    """Random episodes: what is achieved is (env, episode * 100 + step), which nothing else is."""

    def __init__(self, seed, p_end):
        self.rng, self.p_end = np.random.default_rng(seed), p_end
        self.episode, self.step = [0] * N, [0] * N
        self.last = {}  # (env, episode): its last step, and whether it terminated there

    def fragment(self):
        out = allocate(columns(SPEC, {}, T, N))
        out.env_id[:] = torch.arange(N)
        out.policy_version.zero_()
        out.action.zero_()
        out.reward.fill_(-1.0)
        out.valid.fill_(True)
        out.final_step.fill_(T)
        num_final = 0
        for env in range(N):
            for t in range(T):
                self._observe(out.obs, (t, env), env)
                self.step[env] += 1
                terminated, truncated = self.rng.random(2) < self.p_end
                truncated &= ~terminated
                out.terminated[t, env], out.truncated[t, env] = bool(terminated), bool(truncated)
                if truncated:
                    self._observe(out.final_obs, num_final, env)
                    out.final_step[num_final], out.final_row[num_final] = t, env
                    num_final += 1
                if terminated or truncated:
                    self.last[env, self.episode[env]] = self.step[env], bool(terminated)
                    self.episode[env] += 1
                    self.step[env] = 0
            self._observe(out.obs, (T, env), env)
        out.num_final.fill_(num_final)
        return out

    def _observe(self, obs, at, env):
        number = self.episode[env] * 100 + self.step[env]
        obs["achieved_goal"][at] = torch.tensor([float(env), float(number)])
        obs["desired_goal"][at] = -1.0


@pytest.mark.parametrize(("size", "p_end"), [(10_000, 0.1), (60, 0.2), (60, 0.0)])
def test_goals_are_places_that_the_same_episode_reached_later(size, p_end):
    stream, buffer = Stream(1, p_end), ReplayBuffer(SPEC, size, N, hindsight=0.7)
    buffer.goal_reward = is_reached
    chosen = seen = rewarded = 0
    spans = set()
    for update in range(40):
        buffer.insert(stream.fragment())
        rows, _ = buffer.draw(3, update, 1, 64)
        found = buffer.transitions(rows, 1, 0.9, lambda reward: reward)
        before = dict(found["obs"]), found["reward"]
        buffer.relabel(found, rows, goal_draws(3, update, rows.slot), lambda reward: reward)
        assert torch.equal(found["obs"]["achieved_goal"], before[0]["achieved_goal"])
        assert torch.equal(found["obs"]["desired_goal"], found["next_obs"]["desired_goal"])
        for i, goal in enumerate(found["obs"]["desired_goal"].tolist()):
            seen += 1
            if goal == [-1.0, -1.0]:
                assert found["reward"][i] == before[1][i]
                continue
            env, number = found["obs"]["achieved_goal"][i].tolist()
            episode, step = divmod(int(number), 100)
            assert goal[0] == env
            assert goal[1] // 100 == episode
            last, terminated = stream.last.get((env, episode), (stream.step[int(env)], False))
            # Of a terminated episode the last observation is not stored.
            assert step < goal[1] % 100 <= last - terminated
            spans.add(goal[1] % 100 - step)
            at_goal = found["next_obs"]["achieved_goal"][i].tolist() == goal
            assert found["reward"][i] == float(at_goal)
            chosen, rewarded = chosen + 1, rewarded + at_goal
    if p_end or size > 1000:
        assert 0.45 * seen < chosen < 0.75 * seen
        assert rewarded > 20
        assert len(spans) > 5


def test_the_share_of_goals_is_the_one_asked_for():
    stream = Stream(1, 0.0)
    for share in (0.2, 0.8):
        buffer = ReplayBuffer(SPEC, 10_000, N, hindsight=share)
        buffer.goal_reward = is_reached
        buffer.insert(stream.fragment())
        rows, _ = buffer.draw(3, 0, 1, 4096)
        found = buffer.transitions(rows, 1, 0.9, lambda reward: reward)
        buffer.relabel(found, rows, goal_draws(3, 0, rows.slot), lambda reward: reward)
        chosen = (found["obs"]["desired_goal"][:, 0] >= 0).float().mean()
        assert float(chosen) == pytest.approx(share, abs=0.03)


def test_replaced_rewards_are_scaled_as_others_are():
    stream, buffer = Stream(1, 0.1), ReplayBuffer(SPEC, 1_000, N, hindsight=1.0)
    buffer.goal_reward = lambda achieved, desired: np.full(len(achieved), 5.0)
    buffer.insert(stream.fragment())
    rows, _ = buffer.draw(3, 0, 1, 64)
    found = buffer.transitions(rows, 1, 0.9, lambda reward: reward / 2)
    buffer.relabel(found, rows, goal_draws(3, 0, rows.slot), lambda reward: reward / 2)
    assert set(found["reward"].tolist()) == {2.5, -0.5}


SETTINGS = {
    "num_envs": 4, "num_steps": 16, "envs_per_vector": 2, "seed": 5, "quiet": True,
    "schedule_env_steps": 640,
}  # fmt: skip
SAC = headrace.SAC(
    lr=1e-3, learning_starts=100, batch_size=32, replay_ratio=0.2, replay_size=400, hindsight=0.8
)


def train(path, updates=10, algo=SAC, env=ReachGoal, **more):
    steps = updates * 64
    return headrace.train(env, algo=algo, run_dir=path, total_env_steps=steps, **SETTINGS | more)


def weights(run):
    return headrace.load_policy(run.dir).module.state_dict()


def assert_equal(one, other):
    for name, tensor in weights(one).items():
        assert torch.equal(tensor, weights(other)[name]), name


def test_workers_and_resumed_runs_replace_the_same_goals(tmp_path):
    whole = train(tmp_path / "whole", num_workers=0)
    assert_equal(whole, train(tmp_path / "workers", num_workers=2, lag=0))
    train(tmp_path / "part", updates=6, num_workers=0)
    resumed = headrace.resume(tmp_path / "part", env=ReachGoal, total_env_steps=640, quiet=True)
    assert_equal(whole, resumed)


@pytest.mark.more
def test_goal_environments_have_hindsight_by_default(tmp_path):
    import json

    for algo, expected in (("sac", 0.8), ("td3", 0.8)):
        run = train(tmp_path / algo, updates=3, algo=algo)
        settings = json.loads((run.dir / "config.json").read_text())["settings"]
        assert settings["hindsight"] == expected


class NoReward(ReachGoal):
    compute_reward = None

    def step(self, action):
        self._steps += 1
        return self._observe(), 0.0, False, self._steps == 50, {}


class OneReward(ReachGoal):
    def compute_reward(self, achieved_goal, desired_goal, info):
        return np.float32(0)


def test_what_cannot_be_done_is_refused_in_words(tmp_path):
    from tests.algos.reach import Reach

    with pytest.raises(ConfigError, match=r"(?s)Dict observations with desired_goal.*Box\(2,\)"):
        train(tmp_path / "1", env=Reach)
    n_step = headrace.SAC(hindsight=0.8, n_step=3, learning_starts=100)
    with pytest.raises(ConfigError, match=r"(?s)hindsight=0.8 and n_step=3.*--n-step 1"):
        train(tmp_path / "2", algo=n_step)
    with pytest.raises(ConfigError, match=r"(?s)no method compute_reward.*--hindsight 0"):
        train(tmp_path / "3", env=NoReward)
    with pytest.raises(EnvError, match=r"shape \(\) for .* goals"):
        train(tmp_path / "4", env=OneReward)
