"""One episode of a kernel environment, as arrays and as a film."""

import numpy as np
import pytest

import headrace
from headrace.cli import main
from headrace.envs.kernels.library import picture
from headrace.errors import UsageError
from tests.envs.kernels.support import Ring

SETTINGS = {"num_envs": 4, "num_steps": 16, "seed": 5, "quiet": True, "total_env_steps": 256}


class Drawn(Ring):
    """Draws its agents on a line."""

    def draw(self, world):
        at = world["at"]
        kinds = picture.agent_colors(np.array([True, True, False]), world["alive"])
        return picture.draw_agents(at, np.full(3, 4.0), kinds, 8.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return headrace.train(Drawn, run_dir=tmp_path_factory.mktemp("runs") / "r", **SETTINGS)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("seed", [0, 4])
def test_play_episode_equals_the_first_evaluated_one(run, stochastic, seed):
    from headrace.evaluation.evaluate import evaluate

    episode = run.episode(seed=seed, stochastic=stochastic)
    played = evaluate(
        run.policies, run._job.maker, shares=run._job.shares, episodes=1, seed=seed,
        stochastic=stochastic,
    )  # fmt: skip
    assert len(episode["step"]) == played.lengths[0] + 1
    assert episode["reward"][1:].sum() / 3 == pytest.approx(played.returns[0])
    steps = np.arange(len(episode["step"]))
    np.testing.assert_array_equal(episode["step"], steps)
    over = episode["terminated"] | (steps == Ring.max_episode_steps)
    assert over.tolist() == [False] * (len(steps) - 1) + [True]
    # Who moves, and where to: row t is after step t
    stride = episode["action"][1:, :, 0] * (1 + episode["action"][1:, :, 1])
    moved = (episode["at"][:-1] + stride) % 9
    stays = episode["alive"][:-1]
    np.testing.assert_array_equal(episode["at"][1:], np.where(stays, moved, episode["at"][:-1]))


def test_negative_seeds_are_refused(run, capsys):
    with pytest.raises(UsageError, match="seed=-1: expected 0 or more"):
        run.episode(seed=-1)
    env = "tests.evaluation.test_evaluate:Drawn"
    assert main._main(["eval", str(run.dir), "--env", env, "--seed", "-1"]) == 2
    assert "--seed -1: expected 0 or more" in capsys.readouterr().err


def test_film_has_a_frame_for_each_step(run, tmp_path):
    import imageio_ffmpeg

    run.evaluate(episodes=1, video=tmp_path / "new/r.mp4")
    frames, _ = imageio_ffmpeg.count_frames_and_secs(str(tmp_path / "new/r.mp4"))
    assert frames == len(run.episode()["step"])


def test_film_of_an_environment_without_draw_is_refused(tmp_path):
    run = headrace.train(Ring, run_dir=tmp_path / "r", **SETTINGS)
    with pytest.raises(UsageError, match="Ring does not draw itself"):
        run.evaluate(episodes=1, video=tmp_path / "r.mp4")


def test_play_episode_refuses_other_environments(tmp_path):
    run = headrace.train("CartPole-v1", run_dir=tmp_path / "r", **SETTINGS | {"num_steps": 64})
    with pytest.raises(UsageError, match="CartPole-v1 is no kernel environment"):
        run.episode()


def test_agents_are_drawn_in_their_colors():
    x, y = np.array([0.0, 10.0, 5.0]), np.array([0.0, 10.0, 5.0])
    kinds = picture.agent_colors(np.array([True, False, False]), np.array([True, True, False]))
    drawn = picture.draw_agents(x, y, kinds, 10.0)
    assert drawn.shape == (picture.SIDE, picture.SIDE, 3)
    low, high, middle = 16, picture.SIDE - 17, picture.SIDE // 2
    assert tuple(drawn[high, low]) == picture.TAGGER  # (0, 0) is below, left
    assert tuple(drawn[low, high]) == picture.RUNNER
    assert tuple(drawn[middle, middle]) == picture.TAGGED
