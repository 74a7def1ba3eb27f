"""Learning from recorded steps: they are read as they were recorded, and every algorithm learns."""

import dataclasses

import numpy as np
import pytest
import torch

import headrace
from headrace.batch import allocate, columns
from headrace.config.algorithms import ALGORITHMS
from headrace.datasets.read import read_steps
from headrace.errors import ConfigError
from headrace.replay.steps import Reader, Steps
from headrace.spec import EnvSpec, Space
from headrace.storage import checkpoint
from headrace.storage.metrics import read_metrics
from tests.algos.reach import Reach
from tests.marks import repeats
from tests.support import short_cartpole

SETTINGS = {"num_envs": 4, "num_steps": 16, "num_workers": 0, "seed": 1, "quiet": True}
SPEC = EnvSpec("toy", Space("box", (1,), "float32"), Space("discrete", (), "int64", nvec=(9,)))


def train(path, algo, env=Reach, **more):
    return headrace.train(
        env, algo=algo, run_dir=path, **SETTINGS | {"total_env_steps": 640} | more
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of SAC, whose replay has all of its steps."""
    algo = headrace.SAC(learning_starts=500, replay_ratio=0.1, replay_size=900)
    return train(tmp_path_factory.mktemp("recorded") / "run", algo).dir


def some_steps(lengths, *, terminates):
    """Steps whose observations count up; the true last ones of episodes have a half."""
    obs = torch.arange(float(sum(lengths))).unsqueeze(1)
    ends = torch.zeros(len(obs), dtype=torch.bool)
    ends[np.cumsum(lengths) - 1] = True
    by_time = ends.clone()
    by_time[np.cumsum(lengths)[list(terminates)] - 1] = False
    final = obs[by_time] + 0.5
    return Steps(obs, torch.arange(len(obs)) % 9, obs[:, 0] * 2, ends & ~by_time, by_time, final)


def test_streams_are_whole_episodes_and_as_equal_as_these_allow():
    steps = some_steps([5, 3, 4, 6, 2], terminates=[1])
    assert steps.streams(1) == [range(20)]
    assert steps.streams(2) == [range(12), range(12, 20)]
    found = steps.streams(5)
    assert [stream.start for stream in found] == [0, 5, 8, 12, 18]
    assert steps.num_episodes == 5
    assert len(some_steps([50, 1], terminates=[]).streams(4)) < 4


def test_a_reader_gives_every_step_and_true_last_observations():
    steps = some_steps([5, 3, 4], terminates=[1])
    reader = Reader(steps, steps.streams(2))  # steps 0 to 7, and 8 to 11
    fragment = allocate(columns(SPEC, {}, 6, 2))
    seen = []
    for first in (0, 6):
        reader.fill(fragment)
        for t in range(6):
            for column, stream in enumerate(steps.streams(2)):
                row = stream.start + (first + t) % len(stream)
                assert fragment.obs[t, column] == row
                assert fragment.action[t, column] == row % 9
                assert fragment.reward[t, column] == 2 * row
                assert bool(fragment.terminated[t, column]) == (row == 7)
                assert bool(fragment.truncated[t, column]) == (row in (4, 11))
                seen.append(row)
        final_obs, at, column = fragment.finals()
        expected = [fragment.obs[t, c] + 0.5 for t, c in zip(at, column, strict=True)]
        assert torch.equal(final_obs, torch.stack(expected))
        assert len(at) == int(fragment.truncated.sum())
        assert fragment.valid.all()
    assert set(seen) == set(range(12))


def test_steps_of_a_run_are_those_that_it_recorded(recorded):
    """The same actions lead through a real environment to the same observations and rewards."""
    spec = headrace.load_policy(recorded).spec
    steps = read_steps(str(recorded), spec)
    assert len(steps) == 640
    env, final, begins = Reach(), 0, True
    for row in range(len(steps)):
        if begins:
            env.reset(seed=0)
            env._at, env._steps = steps.obs[row].numpy().copy(), 0
        low, high = env.action_space.low, env.action_space.high
        action = low + (steps.action[row].numpy() + 1) / 2 * (high - low)
        obs, reward, terminated, _, _ = env.step(action)
        assert float(steps.reward[row]) == pytest.approx(reward, abs=1e-5)
        assert bool(steps.terminated[row]) == terminated
        begins = bool(steps.terminated[row] | steps.truncated[row])
        if bool(steps.truncated[row]):
            assert steps.final_obs[final].numpy() == pytest.approx(obs, abs=1e-5)
            final += 1
        elif not begins:
            assert steps.obs[row + 1].numpy() == pytest.approx(obs, abs=1e-5)
    assert final == len(steps.final_obs) > 20


SOME = {"learning_starts": 64, "replay_ratio": 0.2, "batch_size": 32, "lr": 1e-3}
SOME |= {"replay_size": 900}


@repeats("algo", ["iql", "td3bc", "cql", "bc", "sac"], keep=1)
def test_each_algorithm_learns_from_recorded_steps(tmp_path, recorded, algo):
    config = ALGORITHMS[algo].Config(**SOME)
    run = train(tmp_path / "run", config, data=str(recorded))
    assert run.summary["learner_steps"] == int(0.2 * (640 - 64))
    part = train(tmp_path / "part", config, data=str(recorded), total_env_steps=320)
    resumed = headrace.resume(part.dir, env=Reach, total_env_steps=640, quiet=True)
    weights = (headrace.load_policy(each.dir).module.state_dict() for each in (run, resumed))
    assert all(torch.equal(*pair) for pair in zip(*(w.values() for w in weights), strict=True))


@pytest.mark.more
def test_two_learners_read_on_where_one_stopped(tmp_path, recorded):
    part = train(tmp_path / "run", headrace.SAC(**SOME), data=str(recorded), total_env_steps=320)
    run = headrace.resume(part.dir, env=Reach, total_env_steps=640, num_learners=2, quiet=True)
    assert run.summary["learner_steps"] == int(0.2 * (640 - 64))
    state = checkpoint.newest(run.dir).arrays("workers")
    assert [state[f"data_{first}"].tolist() for first in (0, 2)] == [[160, 160]] * 2


def test_a_run_goes_on_in_the_environment(tmp_path, recorded):
    run = train(tmp_path / "run", headrace.SAC(**SOME), data=str(recorded))
    went_on = headrace.resume(run.dir, env=Reach, total_env_steps=960, data="", quiet=True)
    assert went_on.summary["episodes"] > 5
    assert went_on.summary["learner_steps"] == int(0.2 * (960 - 64))


@pytest.mark.more
def test_a_run_goes_on_in_a_kernel_environment(tmp_path):
    of_run = {"env": "headrace/Reacher-v0", "num_envs": 4, "num_steps": 16, "quiet": True}
    algo = headrace.SAC(**SOME)
    recorded = headrace.train(
        algo=algo, total_env_steps=640, run_dir=tmp_path / "recorded", **of_run
    )
    run = headrace.train(
        algo=algo, total_env_steps=640, run_dir=tmp_path / "run", data=str(recorded.dir), **of_run
    )
    went_on = headrace.resume(run.dir, total_env_steps=1280, data="", quiet=True)
    assert went_on.summary["env_steps"] == 1280
    assert went_on.summary["learner_steps"] == int(0.2 * (1280 - 64))


def test_cloning_takes_the_recorded_actions(tmp_path):
    """Those of a network that is hardly trained, and acts greedily."""
    greedy = {"exploration_initial_eps": 0.0, "exploration_final_eps": 0.0}
    algo = headrace.DQN(learning_starts=639, replay_size=900, **greedy)
    shown = train(tmp_path / "shown", algo, short_cartpole)
    some = SOME | {"replay_ratio": 1.0}
    run = train(tmp_path / "run", headrace.BC(**some), short_cartpole, data=str(shown.dir))
    assert read_metrics(run.dir)[-1]["loss"] < 0.3
    one, other = (headrace.load_policy(each.dir) for each in (shown, run))
    obs = read_steps(str(shown.dir), one.spec).obs.numpy()
    assert np.mean(one(obs) == other(obs)) > 0.9


@pytest.mark.filterwarnings("ignore:.*(is set to|is) None:UserWarning")
def test_a_minari_data_set_is_read(tmp_path, monkeypatch):
    import minari
    from minari.data_collector import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env, episodes = Reach(), []
    env.action_space.seed(0)
    for episode in range(6):
        steps = [(env.reset(seed=episode)[0], None, None, False, False)]
        while not any(steps[-1][3:]):
            action = env.action_space.sample()
            obs, reward, terminated, truncated, _ = env.step(action)
            steps.append((obs, action, reward, terminated, truncated))
        obs, *rest = zip(*steps, strict=True)
        names = ("actions", "rewards", "terminations", "truncations")
        columns = {name: np.array(column[1:]) for name, column in zip(names, rest, strict=True)}
        episodes.append(EpisodeBuffer(id=episode, observations=np.array(obs), **columns))
    data = minari.create_dataset_from_buffers(
        "reach/test-v0", episodes,
        action_space=env.action_space, observation_space=env.observation_space,
        algorithm_name="random", author="", author_email="", code_permalink="", description="",
    )  # fmt: skip
    spec = headrace.load_policy(train(tmp_path / "run", headrace.SAC(**SOME)).dir).spec
    for source in ("reach/test-v0", str(tmp_path / "reach" / "test-v0")):
        steps = read_steps(source, spec)
        assert len(steps) == data.total_steps
        assert steps.num_episodes == 6
        assert float(steps.action.abs().max()) <= 1.0
    with pytest.raises(ConfigError, match=r"(?s)shape.*Name the environment"):
        read_steps("reach/test-v0", SPEC)
    for action in (
        Space("box", (2,), "float32", low=(-1.0,) * 2, high=(1.0,) * 2),  # of another shape
        Space("box", (1,), "float32", low=(-0.1,), high=(0.1,)),  # narrower
        Space("discrete", (), "int64", nvec=(3,), start=(0,)),
    ):
        other = dataclasses.replace(spec, action=action)
        with pytest.raises(ConfigError, match=r"(?s)actions that are not in.*Name the environment"):
            read_steps("reach/test-v0", other)


def test_what_cannot_be_read_is_refused_in_words(tmp_path, recorded):
    config = headrace.SAC(**SOME)
    with pytest.raises(ConfigError, match="no directory of a run"):
        train(tmp_path / "1", config, data=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"(?s)ppo learns from its own.*--algo iql"):
        train(tmp_path / "2", "ppo", data=str(recorded))
    ppo = train(tmp_path / "ppo", "ppo", total_env_steps=256)
    with pytest.raises(ConfigError, match="this run keeps no steps"):
        train(tmp_path / "3", config, data=str(ppo.dir))
    with pytest.raises(ConfigError, match=r"(?s)another environment.*Name the environment"):
        train(tmp_path / "4", config, "Pendulum-v1", data=str(recorded))
    with pytest.raises(ConfigError, match="Leave --num-workers out"):
        train(tmp_path / "5", config, data=str(recorded), num_workers=2)
    with pytest.raises(ConfigError, match=r"(?s)algo='bc'.*expected --data"):
        train(tmp_path / "6", "bc")
    with pytest.raises(ConfigError, match=r"(?s)n_step=3 has no effect with algo='bc'.*td3bc"):
        train(tmp_path / "6", "bc", data=str(recorded), n_step=3)
    core = train(tmp_path / "core", headrace.SAC(**SOME, burn_in=2, sequence_length=4), core="gru")
    with pytest.raises(ConfigError, match="keeps sequences, for its recurrent core"):
        train(tmp_path / "7", config, data=str(core.dir))
