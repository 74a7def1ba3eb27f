"""Training from Python, and evaluating what came out."""

import json

import gymnasium as gym
import numpy as np
import pytest

import headrace
from headrace.envs.factory import EnvMaker
from headrace.errors import CheckpointError, ConfigError, EnvError, NonFiniteError, RunDirError
from headrace.evaluation.evaluate import evaluate
from headrace.storage import checkpoint
from headrace.storage.metrics import read_metrics
from tests.envs.test_factory import Broken
from tests.marks import repeats
from tests.support import Counting, short_cartpole

TINY = {"num_envs": 4, "num_steps": 16, "envs_per_vector": 2, "quiet": True}


def test_a_run_from_python(tmp_path):
    seen = []
    run = headrace.train(
        "CartPole-v1",
        algo=headrace.PPO(lr=3e-4),
        run_dir=tmp_path / "run",
        total_env_steps=500,
        seed=1,
        on_update=lambda iteration, metrics: seen.append((iteration, metrics["env_steps"])),
        **TINY,
    )
    # 500 is not a multiple of 64: it ends with the first update at or past it, 8 x 64 = 512
    assert seen == [(i, 64 * i) for i in range(1, 9)]
    assert run.summary["env_steps"] == 512
    assert run.dir == tmp_path / "run"
    assert run.mean_return > 8
    assert run.evaluate(episodes=3).returns == run.evaluate(episodes=3).returns
    config = json.loads((run.dir / "config.json").read_text())
    assert config["settings"]["lr"] == 3e-4
    assert config["origin"]["lr"] == "given"
    assert config["origin"]["gamma"] == "preset classic_control"  # what PPO(...) left open
    rows = read_metrics(run.dir)
    assert [row["env_steps"] for row in rows] == [64 * i for i in range(1, 9)]
    assert list((run.dir / "tensorboard").iterdir())


def test_the_last_episodes_are_the_last_whoever_stepped_them(tmp_path):
    """512 episodes end in a batch, in several workers: the window of 100 holds its last steps'."""

    class OneStep(Counting):
        def __init__(self):
            super().__init__(terminate_at=1)
            self.resets = 0

        def reset(self, **kwargs):
            self.resets += 1
            return super().reset(**kwargs)

        def step(self, action):
            obs, _, *rest = super().step(action)
            return obs, float(self.resets), *rest

    for num_workers in (0, 3):
        run = headrace.train(
            OneStep, num_envs=16, envs_per_vector=2, num_steps=32, total_env_steps=512, seed=1,
            num_workers=num_workers, run_dir=tmp_path / str(num_workers), quiet=True,
        )  # fmt: skip
        assert run.summary["episodes"] == 512
        # The n-th episode of an env pays n. The last 100: 4 of step 26, 16 each of 27 to 32:
        # (4 * 26 + 16 * (27 + ... + 32)) / 100 = (104 + 16 * 177) / 100
        assert run.mean_return == (104 + 16 * 177) / 100


def test_it_stops_at_the_wanted_return(tmp_path):
    run = headrace.train(
        lambda: Counting(terminate_at=8), run_dir=tmp_path / "run", stop_at_return=8.0,
        total_env_steps=100_000, **TINY,
    )  # fmt: skip
    # 100 episodes of 8 steps make a full window: 800 steps, 12.5 batches of 64
    assert run.summary["env_steps"] == 13 * 64
    assert run.summary["mean_return"] == 8.0


@repeats("given", [{"num_learners": 2}, {"num_workers": 2, "lag": 1}])
def test_it_stops_after_a_time_saves_and_can_be_resumed(tmp_path, capsys, given):
    given = TINY | given | {"quiet": False}
    run = headrace.train(
        short_cartpole, run_dir=tmp_path / "run", total_env_steps=10**9, stop_after_s=0.5, **given
    )
    assert "Stopped after 0.5 s: " in (said := capsys.readouterr().out)
    assert "headrace resume" in said
    ended_at = run.summary["env_steps"]
    assert 0 < ended_at < 10**9
    assert run.summary["lost_env_steps"] == 0  # nothing was under way that nobody would learn from
    assert run.summary["wall_s"] >= 0.5
    resumed = headrace.resume(
        run.dir, env=short_cartpole, stop_after_s=0.0, total_env_steps=ended_at + 64, quiet=True
    )
    assert resumed.summary["env_steps"] == ended_at + 64


def test_mean_return_is_null_without_a_finished_episode(tmp_path):
    run = headrace.train(Counting, run_dir=tmp_path / "run", total_env_steps=64, **TINY)
    assert run.mean_return is None
    assert json.loads(json.dumps(run.summary))["mean_return"] is None


def test_every_second_of_every_process_is_on_a_meter(tmp_path):
    run = headrace.train(
        short_cartpole, run_dir=tmp_path / "run", total_env_steps=6400, num_workers=2, **TINY
    )
    summary = run.summary
    assert sum(summary["meter"].values()) == pytest.approx(summary["wall_s"], rel=0.02)
    assert summary["meter"]["other"] < 0.1 * summary["wall_s"]
    assert set(summary["worker_meters"]) == {"worker 0", "worker 1"}
    # Most of an iteration the learner waits or learns; joining fragments takes a moment.
    assert summary["meter"]["wait"] > summary["meter"]["transport"] > 0
    assert summary["meter"]["learn"] > summary["meter"]["transport"]
    for seconds in summary["worker_meters"].values():
        assert seconds["env_step"] > 0
        assert seconds["wait"] > 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_environment_that_raises_ends_the_run_with_its_own_error(tmp_path, num_workers):
    with pytest.raises(EnvError, match="TwoArgumentsError: the user's own message: step 7"):
        headrace.train(
            lambda: Broken("step", at=20), run_dir=tmp_path / "run", total_env_steps=640,
            num_workers=num_workers, **TINY,
        )  # fmt: skip


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_environment_that_fails_in_closing_is_named_after_the_run_was_saved(
    tmp_path, num_workers
):
    class Clingy(Counting):
        closings = 0

        def close(self):
            Clingy.closings += 1
            if Clingy.closings > 1:  # the first one is made to read the spaces
                raise OSError("the simulator does not let go")

    with pytest.raises(EnvError, match="OSError: the simulator does not let go") as caught:
        headrace.train(
            Clingy, run_dir=tmp_path / "run", total_env_steps=64, num_workers=num_workers, **TINY
        )
    assert "while closing, env " in str(caught.value)
    assert checkpoint.newest(tmp_path / "run").manifest["counters"]["env_steps"] == 64


class Exploding(Counting):
    """Rewards that are finite, but whose squares are not."""

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, 1e30 if self.t > 20 else reward, *rest


def test_a_loss_that_is_not_finite_stops_and_is_not_saved(tmp_path):
    with pytest.raises(
        NonFiniteError, match="Update 2: a gradient or parameter was NaN or infinite"
    ):
        headrace.train(
            Exploding, run_dir=tmp_path / "run", total_env_steps=640, checkpoint_every_s=0.0,
            normalize_reward=False, **TINY,
        )  # fmt: skip
    saved = checkpoint.newest(tmp_path / "run")
    assert saved.manifest["counters"]["env_steps"] == 64
    for tensor in saved.tensors("policy_default").values():
        assert np.isfinite(tensor.numpy()).all()


def test_the_rows_of_metrics_are_in_their_file_before_a_checkpoint_is(tmp_path):
    """So whoever goes on after a kill has the rows of all that the checkpoint knows."""

    def seen(version, _):
        if version > 1:
            saved = checkpoint.newest(tmp_path / "run")
            assert read_metrics(tmp_path / "run")[-1]["env_steps"] >= 64 * (version - 1)
            assert saved.path.name == f"step_{64 * (version - 1):012d}"

    headrace.train(
        short_cartpole, run_dir=tmp_path / "run", total_env_steps=320, num_envs=4, num_steps=16,
        num_workers=0, checkpoint_every_s=0.0, on_update=seen, quiet=True,
    )  # fmt: skip


def test_wrong_names_are_refused():
    with pytest.raises(ConfigError, match="Did you mean num_envs"):
        headrace.train("CartPole-v1", num_env=3)
    with pytest.raises(ConfigError, match=r"expected settings such as headrace\.PPO"):
        headrace.train("CartPole-v1", algo=3)
    with pytest.raises(ConfigError, match=r"Did you mean PPO\(\)\?"):
        headrace.train("CartPole-v1", algo=headrace.PPO)
    with pytest.raises(ConfigError, match=r"PPO has no setting 'lrr'. Did you mean lr"):
        headrace.PPO(lrr=3)
    with pytest.raises(ConfigError, match=r"expected headrace\.Network"):
        headrace.train("CartPole-v1", network={"hidden_sizes": (8,)})
    with pytest.raises(CheckpointError, match="There is no directory nowhere"):
        headrace.load_policy("nowhere")


def test_resume_goes_on_learning_with_a_new_schedule(tmp_path):
    algo = headrace.PPO(lr=1e-3, lr_schedule="linear")
    run = headrace.train(
        "CartPole-v1", algo=algo, run_dir=tmp_path / "r", total_env_steps=64, **TINY
    )

    def rates(**goals):
        seen = []
        headrace.resume(run.dir, on_update=lambda _, metrics: seen.append(metrics["lr"]), **goals)
        return seen

    assert rates(total_env_steps=192, quiet=True) == [0, 0]
    on = rates(total_env_steps=320, schedule_env_steps=384, quiet=True)
    assert on == pytest.approx([1e-3 * (1 - 192 / 384), 1e-3 * (1 - 256 / 384)])
    config = json.loads((run.dir / "config.json").read_text())
    assert config["settings"]["schedule_env_steps"] == 384
    assert config["origin"]["schedule_env_steps"] == "given to resume"


def test_resume_takes_a_lower_goal_but_none_that_has_been_passed(tmp_path):
    path = tmp_path / "run"
    headrace.train("CartPole-v1", run_dir=path, total_env_steps=6_400, stop_after_s=1e-6, **TINY)
    made = int(checkpoint.newest(path).env_steps)
    assert 0 < made < 6_400
    with pytest.raises(ConfigError, match=f"={made - 1}, but the run has made {made:,} env steps"):
        headrace.resume(path, total_env_steps=made - 1, quiet=True)
    run = headrace.resume(path, total_env_steps=made + 64, stop_after_s=0.0, quiet=True)
    assert run.summary["env_steps"] == made + 64


def test_only_a_schedule_that_has_ended_is_warned_of(tmp_path, capsys):
    for schedule, words in (("constant", False), ("linear", True)):
        run = headrace.train(
            "CartPole-v1", algo=headrace.PPO(lr_schedule=schedule, clip_schedule="constant"),
            run_dir=tmp_path / schedule, total_env_steps=64, **TINY,
        )  # fmt: skip
        headrace.resume(run.dir, total_env_steps=128)
        said = "lr_schedule: linear, and 0 from 64 env steps on" in capsys.readouterr().out
        assert said == words


def test_a_directory_without_a_checkpoint_says_so(tmp_path):
    with pytest.raises(EnvError):
        headrace.train(
            lambda: Broken("step", at=20), run_dir=tmp_path / "r", total_env_steps=640, **TINY
        )
    with pytest.raises(RunDirError, match="ended before its first checkpoint: remove it"):
        headrace.train("CartPole-v1", run_dir=tmp_path / "r", **TINY)


class Tuneless(Counting):
    """Episodes of different lengths: env k's first lasts 3 steps, later ones 9."""

    def __init__(self):
        super().__init__()
        self.episode = 0

    def reset(self, **kwargs):
        self.episode += 1
        self.terminate_at = 3 if self.episode == 1 else 9
        return super().reset(**kwargs)


def test_evaluation_gives_each_env_the_same_number_of_episodes(tmp_path):
    run = headrace.train(Tuneless, run_dir=tmp_path / "run", total_env_steps=64, **TINY)
    # 40 episodes on 32 envs: 8 envs play two (3 and 9), 24 play one (3). Counting whatever ends
    # first would take short ones only.
    result = run.evaluate(episodes=40)
    assert sorted(result.lengths) == [3] * 32 + [9] * 8
    assert result.to_json()["mean_return"] == (32 * 3 + 8 * 9) / 40


def test_evaluation_is_greedy_unless_told(tmp_path):
    run = headrace.train("CartPole-v1", run_dir=tmp_path / "run", total_env_steps=64, **TINY)
    greedy, sampled = run.evaluate(episodes=5), run.evaluate(episodes=5, stochastic=True)
    assert greedy.returns != sampled.returns
    # by hand: the first evaluation env, stepped with the policy's own likeliest actions
    from headrace.seeding import derive

    env = gym.make("CartPole-v1")
    obs, _ = env.reset(seed=derive(0, "eval", 0, 0))
    total, over = 0.0, False
    while not over:
        obs, reward, terminated, truncated, _ = env.step(run.policy(obs))
        total, over = total + float(reward), terminated or truncated
    assert total == greedy.returns[0]
    with pytest.raises(ConfigError, match="episodes=0"):
        evaluate(run.policy, EnvMaker("CartPole-v1"), episodes=0)


@repeats(
    "space",
    [
        gym.spaces.MultiDiscrete([3, 2]),
        gym.spaces.Box(-1, 1, (2, 2)),
        gym.spaces.Box(-0.1, 0.3, (2,), np.float64),
        gym.spaces.Box(np.array([0.7, -np.inf], np.float32), np.inf, (2,), np.float32),
        gym.spaces.Box(-np.finfo(np.float32).max, np.finfo(np.float32).max, (2,), np.float32),
        gym.spaces.Discrete(4, start=2),
    ],
    keep=4,
)
def test_every_action_space_trains_and_gets_actions_of_its_own(tmp_path, space):
    class Picky(Counting):
        def __init__(self):
            super().__init__(truncate_at=10)
            self.action_space = space

        def step(self, action):
            assert self.action_space.contains(action), action
            return super().step(action)

    run = headrace.train(Picky, run_dir=tmp_path / "run", total_env_steps=128, **TINY)
    assert space.contains(
        np.asarray(run.policy(np.zeros(2))) if space.shape else run.policy([0, 0])
    )
    assert run.evaluate(episodes=2).returns == (10.0, 10.0)


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.MultiDiscrete([3, 2], start=[0, 5]),
        gym.spaces.Box(0, 255, (2, 3), np.uint8),
        gym.spaces.Box(-1, 1, (), np.float64),
        gym.spaces.Box(-5, 5, (4,), np.int64),
    ],
)
def test_every_observation_space_trains(tmp_path, space):
    class Seen(Counting):
        def __init__(self):
            super().__init__(truncate_at=10)
            self.observation_space = space

        def _obs(self):
            return self.observation_space.sample()

    run = headrace.train(Seen, run_dir=tmp_path / "run", total_env_steps=128, **TINY)
    assert run.policy(space.sample()) in (0, 1)


def test_discrete_observations_train(tmp_path):
    run = headrace.train("FrozenLake-v1", run_dir=tmp_path / "run", total_env_steps=128, **TINY)
    assert run.policy(3) in range(4)


def test_a_run_is_resumed_with_the_code_that_it_was_trained_with(tmp_path):
    settings = {"num_envs": 2, "num_steps": 16, "num_minibatches": 1, "quiet": True}
    run = headrace.train(
        lambda: Counting(truncate_at=20), wrapper=lambda env: gym.wrappers.TimeLimit(env, 10),
        run_dir=tmp_path / "run", total_env_steps=64, **settings,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="has code of its own"):
        headrace.resume(run.dir, total_env_steps=128, quiet=True)
    again = run.resume(total_env_steps=128, quiet=True)
    assert (again.summary["env_steps"], again.mean_return) == (128, 10.0)
