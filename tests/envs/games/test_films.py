"""Films of games: a frame for each step of the first episode, in both of PettingZoo's forms."""

import json
import subprocess

import gymnasium as gym
import imageio_ffmpeg
import numpy as np
import pytest
from pettingzoo.classic.tictactoe import tictactoe

import headrace
from headrace.cli.main import _main
from headrace.envs.factory import EnvMaker
from headrace.envs.video import record_first_episode
from headrace.errors import UsageError
from tests.envs.games.support import Camp

SHORT = {"total_env_steps": 32, "num_envs": 2, "num_steps": 16, "num_workers": 0, "quiet": True}


def trained(tmp_path, env, **more):
    return headrace.train(env, run_dir=tmp_path / "r", **SHORT | more)


def frames_of(film, size):
    """The mean brightness of each frame, of so many pixels."""
    ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
    words = [ffmpeg, "-i", film, "-f", "rawvideo", "-pix_fmt", "gray", "-"]
    pixels = subprocess.run(words, check=True, capture_output=True).stdout
    return np.frombuffer(pixels, np.uint8).reshape(-1, size).mean(1)


class Lit(Camp):
    """A frame is as bright as steps have been taken."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012

    def __init__(self, render_mode=None):
        super().__init__()
        self.render_mode = render_mode

    def render(self):
        return np.full((32, 48, 3), 16 + 24 * self.t, np.uint8)


class LitTurns:
    """Two players count in turns: the same in the AEC form. Moves are 0; it ends after `length`."""

    possible_agents = ["player_0", "player_1"]  # noqa: RUF012
    metadata = Lit.metadata
    render = Lit.render

    def __init__(self, length=5, render_mode=None):
        self.length, self.render_mode = length, render_mode

    def observation_space(self, agent):
        return gym.spaces.Discrete(4)

    action_space = observation_space

    def reset(self, seed=None, options=None):
        self.t, self.agents, self.infos = 0, [*self.possible_agents], {}
        self.agent_selection = self.agents[0]

    def last(self):
        return np.int64(self.t % 4), 0.0, self.t >= self.length, False, {}

    def agent_iter(self):
        while self.agents:
            yield self.agent_selection

    def step(self, action):
        if action is None:
            self.agents.remove(self.agent_selection)
        else:
            self.t += 1
        self.agent_selection = self.possible_agents[self.agent_selection == "player_0"]

    def close(self):
        pass


def with_render_mode(render_mode=None):
    return tictactoe.env(render_mode=render_mode)


@pytest.mark.parametrize(
    ("env", "kwargs"),
    [
        ("classic/tictactoe-v3", {}),
        ("classic/rps-v2", {"max_cycles": 4}),
        ("mpe2/simple_spread-v3", {"max_cycles": 6}),
        (with_render_mode, {}),
        (tictactoe.env, {}),  # takes any argument, by **kwargs
    ],
)
def test_a_film_has_a_frame_for_each_step_of_the_first_episode(tmp_path, env, kwargs):
    run = trained(tmp_path, env, env_kwargs=kwargs)
    film = tmp_path / "film.mp4"
    played = run.evaluate(episodes=3, video=film)
    frames, _ = imageio_ffmpeg.count_frames_and_secs(str(film))
    assert frames == played.lengths[0] + 1
    assert played == run.evaluate(episodes=3)  # the same episodes as without a film


@pytest.mark.parametrize("env", [Lit, LitTurns])
def test_frames_are_those_after_each_step_and_of_no_later_episode(tmp_path, env):
    run = trained(tmp_path, env)
    played = run.evaluate(episodes=40, video=tmp_path / "film.mp4")  # some play a second one
    seen = frames_of(tmp_path / "film.mp4", 32 * 48)
    assert np.abs(np.diff(seen) - 24).max() < 3
    assert len(seen) == played.lengths[0] + 1


def test_the_command_films_a_game_by_its_name(tmp_path, capsys):
    run = trained(tmp_path, "classic/connect_four-v3")
    film = tmp_path / "new" / "film.mp4"
    capsys.readouterr()
    assert _main(["eval", str(run.dir), "--episodes", "1", "--video", str(film), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    frames, _ = imageio_ffmpeg.count_frames_and_secs(str(film))
    assert (frames, found["video"]) == (found["mean_length"] + 1, str(film))


def test_a_game_that_is_recorded_is_played_as_any_other(tmp_path):
    env = record_first_episode(EnvMaker("classic/tictactoe-v3"), tmp_path / "film.mp4")
    assert env.reset(seed=0) is None
    assert env.possible_agents == env.agents == ["player_1", "player_2"]
    moves = iter((0, 3, 1, 4, 2))
    for agent in env.agent_iter():
        obs, _, terminated, truncated, _ = env.last()
        assert env.observation_space(agent).contains(obs)
        env.step(None if terminated or truncated else next(moves))
    env.close()
    assert imageio_ffmpeg.count_frames_and_secs(str(tmp_path / "film.mp4"))[0] == 6


def test_a_game_in_turns_that_cannot_draw_is_refused(tmp_path):
    run = trained(tmp_path, lambda: LitTurns())
    with pytest.raises(UsageError, match=r"env offers no render_mode 'rgb_array'.*\['rgb_array'\]"):
        run.evaluate(episodes=1, video=tmp_path / "film.mp4")
