"""Which observations are stacks of frames, and that a game's take no more room than its frames."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import FrameStackObservation, RescaleObservation

import headrace
from headrace.envs.factory import EnvMaker, env_spec
from headrace.replay.memory import row_bytes
from headrace.storage import checkpoint
from tests.marks import repeats
from tests.support import saved_rows


class Picture(gym.Env):
    """An image whose first axis has four of something."""

    observation_space = gym.spaces.Box(0, 255, (4, 6, 6), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Picture, 0),
        (lambda: FrameStackObservation(Picture(), 3), 3),
        (lambda: RescaleObservation(FrameStackObservation(gym.make("Pendulum-v1"), 2), 0, 1), 2),
        (lambda: gym.wrappers.FlattenObservation(FrameStackObservation(Picture(), 3)), 0),
        (lambda: gym.make("CartPole-v1"), 0),
    ],
)
def test_stacks_are_known_by_their_wrapper(make, expected):
    assert env_spec(EnvMaker(make)).num_frames == expected


def test_a_million_steps_of_a_game_take_7_gb():
    """As docs/dqn.md says."""
    spec = env_spec(EnvMaker("ALE/Breakout-v5", native=True))
    assert row_bytes(spec) * 1e6 / 1e9 == pytest.approx(7.1, abs=0.05)


@repeats("vectorization", ["native", "python"])
def test_a_game_s_stacks_are_kept_as_single_frames(tmp_path, vectorization):
    algo = headrace.DQN(learning_starts=700, replay_ratio=0.01, batch_size=4, replay_size=2_000)
    run = headrace.train(
        "ALE/Breakout-v5", algo=algo, num_envs=2, num_steps=32, num_workers=0, seed=4, quiet=True,
        total_env_steps=960, run_dir=tmp_path / "run", vectorization=vectorization,
    )  # fmt: skip
    saved = checkpoint.newest(run.dir).tensors("learner_default")
    replay = {name.rpartition(".")[2]: t for name, t in saved.items() if ".replay." in name}
    replay |= saved_rows(run.dir)
    assert replay["obs0"].shape[1:] == (84, 84)
    # Each episode begins with three older frames, and every other stack goes on.
    begun = run.summary["episodes"] + 2
    assert run.summary["episodes"] > 0
    assert int(replay["only_frame"].sum()) == 3 * begun
    assert replay["end"].sum() == 960 + 3 * begun
