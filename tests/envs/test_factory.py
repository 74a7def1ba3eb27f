"""Environments: found by name, read, stepped into given memory, ended both ways."""

import sys
import threading
from importlib.metadata import version

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch

import headrace
from headrace import batch
from headrace.envs import registry
from headrace.envs.api import Episode, VectorContext
from headrace.envs.episode_replay import NO_LIMIT, unwrap
from headrace.envs.factory import EnvMaker, env_spec
from headrace.envs.gym.python_vector import GymVector
from headrace.errors import (
    EnvError,
    EnvNotFoundError,
    MissingExtraError,
    UsageError,
    install_command,
)
from headrace.seeding import derive
from tests import python
from tests.marks import repeats
from tests.support import Counting


def vector_of(make, n=2, num_steps=10, **kwargs):
    spec = env_spec(EnvMaker(make))
    vector = GymVector([make() for _ in range(n)], VectorContext(spec, np.arange(n), 0, **kwargs))
    fragment = batch.allocate(batch.columns(spec, {}, num_steps, n))
    vector.bind(fragment)
    return vector, fragment


def run(vector, fragment, action=None):
    for t in range(fragment.num_steps):
        fragment.action[t] = 0 if action is None else torch.as_tensor(action)
        vector.step(t)
    return vector.finish()


def test_a_truncated_step_keeps_the_final_observation_and_the_next_episode_begins():
    vector, fragment = vector_of(lambda: Counting(truncate_at=4))
    episodes = run(vector, fragment)
    # Steps count 1 2 3 4|1 2 3 4|1 2; row t + 1 of obs is after step t, or the next reset (0).
    assert fragment.obs[:, 0, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2]
    assert torch.nonzero(fragment.truncated[:, 0]).flatten().tolist() == [3, 7]
    assert not fragment.terminated.any()
    assert fragment.valid.all()
    obs, step, row = fragment.finals()
    assert obs[:, 0].tolist() == [4, 4, 4, 4]
    assert sorted(zip(step.tolist(), row.tolist(), strict=True)) == [(3, 0), (3, 1), (7, 0), (7, 1)]
    assert episodes == [Episode(t, i, 4.0, 4) for t in (3, 7) for i in (0, 1)]


def test_a_terminated_step_has_no_final_observation_even_at_the_time_limit():
    vector, fragment = vector_of(lambda: Counting(terminate_at=4, truncate_at=4))
    run(vector, fragment)
    assert torch.nonzero(fragment.terminated[:, 0]).flatten().tolist() == [3, 7]
    assert len(fragment.finals()[0]) == 0


def test_seeds_differ_by_env_and_episode_only():
    def salts(env_id):
        make = lambda: Counting(truncate_at=2)  # noqa: E731
        spec = env_spec(EnvMaker(make))
        vector = GymVector([make() for _ in env_id], VectorContext(spec, np.array(env_id), 9))
        fragment = batch.allocate(batch.columns(spec, {}, 8, len(env_id)))
        vector.bind(fragment)
        run(vector, fragment)
        return fragment.obs[::2, :, 1].clone()

    both = salts([4, 5])
    assert torch.equal(both[:, 1:], salts([5]))
    assert len(both.unique()) == both.numel()


def test_gym_vector_equals_gymnasium_s_sync_vector():
    """The same seeds and actions through Gymnasium's SyncVectorEnv in its SAME_STEP mode."""
    n, T = 3, 60
    vector, fragment = vector_of(lambda: gym.make("CartPole-v1"), n, T, reseed=False)
    theirs = gym.vector.SyncVectorEnv(
        [lambda: gym.make("CartPole-v1")] * n, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
    )

    obs, _ = theirs.reset(seed=[derive(0, "env", i, 0) for i in range(n)])
    rng = np.random.default_rng(0)
    ends = 0
    for t in range(T):
        np.testing.assert_array_equal(fragment.obs[t].numpy(), obs)
        action = rng.integers(0, 2, n)
        fragment.action[t] = torch.from_numpy(action)
        vector.step(t)
        obs, reward, terminated, truncated, _ = theirs.step(action)
        np.testing.assert_array_equal(fragment.reward[t].numpy(), reward)
        np.testing.assert_array_equal(fragment.terminated[t].numpy(), terminated)
        np.testing.assert_array_equal(fragment.truncated[t].numpy(), truncated)
        ends += int(terminated.sum())
    assert ends >= 3


def test_spaces_are_read():
    spec = env_spec(EnvMaker("Pendulum-v1"))
    assert spec.action.describe() == "Box(1,) float32"
    assert (spec.action.low, spec.action.high) == ((-2.0,), (2.0,))
    assert env_spec(EnvMaker("FrozenLake-v1")).observation.describe() == "Discrete(16)"
    cards = "Tuple(0: Discrete(32), 1: Discrete(11), 2: Discrete(2))"
    assert env_spec(EnvMaker("Blackjack-v1")).observation.describe() == cards


def test_an_unknown_id_is_refused_with_near_misses():
    with pytest.raises(EnvNotFoundError, match="Did you mean CartPole-v1"):
        EnvMaker("Cartpole-v1")()
    with pytest.raises(EnvNotFoundError, match="Did you mean HalfCheetah-v5"):
        EnvMaker("cheetah")()
    with pytest.raises(EnvNotFoundError, match="Did you mean ALE/Breakout-v5"):
        EnvMaker("Breakout-v5")()
    assert "ALE/Breakout-v5" in registry._not_found("BreakoutNoFrameskip-v4")
    with pytest.raises(EnvNotFoundError, match="CartPole-v"):
        EnvMaker("CartPole-v9")()
    with pytest.raises(EnvNotFoundError, match="no module 'no_such_module'"):
        EnvMaker("no_such_module:make")()
    with pytest.raises(EnvNotFoundError, match=r"support:short_cartpole\b"):
        EnvMaker("tests.support:short_cartpol")()


def test_a_script_that_trains_when_it_is_imported_is_refused_as_an_environment(
    tmp_path, monkeypatch
):
    """Its import would start another run, in every process that makes the environment."""
    monkeypatch.chdir(tmp_path)
    call = "headrace.train(make, total_env_steps=64, run_dir='inner')\n"
    head = "import gymnasium, headrace\ndef make():\n    return gymnasium.make('CartPole-v1')\n"
    (tmp_path / "trains_when_imported.py").write_text(head + call)
    (tmp_path / "has_a_guard.py").write_text(head + f'if __name__ == "__main__":\n    {call}')
    refusal = r"(?s)'trains_when_imported'.*`if __name__ == \"__main__\":`"
    with pytest.raises(headrace.HeadraceError, match=refusal):
        EnvMaker("trains_when_imported:make")()
    assert not (tmp_path / "inner").exists()
    assert EnvMaker("has_a_guard:make")().spec.id == "CartPole-v1"
    assert headrace.train("CartPole-v1", total_env_steps=64, quiet=True).dir.exists()


@pytest.mark.parametrize("native", [False, True])
def test_what_cannot_be_an_id_is_refused_as_an_unknown_one(native):
    gives_names = "There is no environment 'Cart Pole'.*module:callable, module:EnvId"
    for env, message in (
        ("Cart Pole", f"(?s){gives_names}"),
        ("./my_envs/maze.py", "For an environment of that file: my_envs.maze:NAME"),
    ):
        with pytest.raises(EnvNotFoundError, match=message):
            env_spec(EnvMaker(env, native=native))


def test_an_id_that_is_registered_needs_no_package_of_a_family(monkeypatch):
    monkeypatch.setitem(sys.modules, "highway_env", None)  # as if it were not installed
    gym.register("parking-lot-v0", Counting)
    try:
        assert env_spec(EnvMaker("parking-lot-v0")).action.nvec == (2,)
    finally:
        del gym.registry["parking-lot-v0"]


def test_a_module_of_the_current_folder_is_offered_where_its_name_is_no_id(tmp_path, monkeypatch):
    (tmp_path / "my_maze.py").write_text(
        "class Maze(gym.Env): ...\nclass Wide(gymnasium.Env): ...\nclass Other: ...\n1 / 0"
    )
    (tmp_path / "my_tools.py").touch()
    (tmp_path / "broken.py").write_text("class Maze(:")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for env in ("my_maze", "my_maze.py", "./my_maze.py"):
        with pytest.raises(EnvNotFoundError, match=r": my_maze:Maze or my_maze:Wide\."):
            EnvMaker(env)()
    with pytest.raises(EnvNotFoundError, match="of the module of that name: my_tools:NAME"):
        EnvMaker("my_tools")()
    with pytest.raises(EnvNotFoundError, match="of that file: broken:NAME"):
        EnvMaker("broken.py")()


@pytest.mark.parametrize(
    ("env", "package", "extra"),
    [
        ("LunarLander-v3", "Box2D", "box2d"),
        ("HalfCheetah-v5", "mujoco", "mujoco"),
        ("ALE/Breakout-v5", "ale_py", "atari"),
        ("MiniGrid-Empty-8x8-v0", "minigrid", "minigrid"),
        ("highway-v0", "highway_env", "highway"),
    ],
)
def test_a_missing_package_is_refused_with_its_extra(monkeypatch, env, package, extra):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    for module in [
        m for m in sys.modules if m.startswith(("gymnasium.envs.box2d", "gymnasium.envs.mujoco"))
    ]:
        monkeypatch.delitem(sys.modules, module)
    if package not in ("Box2D", "mujoco"):  # whose ids Gymnasium registers itself
        monkeypatch.delitem(gym.registry, env, raising=False)
    with pytest.raises(MissingExtraError) as caught:
        EnvMaker(env)()
    assert install_command(extra) in str(caught.value)


def test_environments_can_be_named_in_every_way():
    for env in (
        "CartPole-v1",
        "gymnasium:CartPole-v1",
        "tests.support:short_cartpole",
        lambda: gym.make("CartPole-v1"),
    ):
        made = EnvMaker(env)()
        assert made.observation_space.shape == (4,)
    assert EnvMaker("tests.support:Counting", {"truncate_at": 3})().truncate_at == 3


def test_wrong_arguments_and_other_objects_are_refused():
    with pytest.raises(UsageError, match="does not take the arguments"):
        EnvMaker("CartPole-v1", {"colour": 3})()
    with pytest.raises(UsageError, match="dict made an object of class dict, which has no `reset`"):
        EnvMaker(dict)()
    with pytest.raises(UsageError, match="forgets made an object of class NoneType"):
        EnvMaker("CartPole-v1", wrappers=(forgets,))()
    with pytest.raises(UsageError, match="env is an instance of Counting: expected what makes one"):
        EnvMaker(Counting())()


def forgets(env):
    """A wrapper without its `return`."""


class Broken(Counting):
    def __init__(self, how="", at=3, **kwargs):
        super().__init__(**kwargs)
        self.how, self.at = how, at

    def reset(self, **kwargs):
        result = super().reset(**kwargs)
        if self.how == "reset":
            raise TwoArgumentsError("reset", 7)
        if self.how == "shape":
            return np.zeros((5,), np.float32), {}
        if self.how == "dtype":
            return np.zeros((2,), np.complex64), {}
        return result[0] if self.how == "old reset" else result

    def step(self, action):
        obs, *rest = super().step(action)
        if self.how == "step shape":
            obs = obs[:1]  # storing would broadcast it
        if self.t == self.at:
            if self.how == "step":
                raise TwoArgumentsError("step", 7)
            if self.how == "nan":
                obs[1] = np.nan
            if self.how == "nan at the end":
                obs[1] = np.nan
                rest[2] = True
            if self.how == "late shape":
                obs = np.zeros(3, np.float32)
            if self.how == "two rewards":
                rest[0] = np.ones(2)
            if self.how == "no reward":
                rest[0] = []
            if self.how == "inf":
                rest[0] = float("inf")
        if self.how == "old step":
            return obs, rest[0], rest[1] or rest[2], rest[3]
        return obs, *rest


class TwoArgumentsError(Exception):
    """Pickling an exception calls its class with one argument: this one cannot be."""

    def __init__(self, word, number):
        super().__init__(f"the user's own message: {word} {number}")
        self.number = number


@pytest.mark.parametrize("how", ["reset", "step"])
def test_an_environment_s_exception_keeps_its_traceback(how):
    with pytest.raises(EnvError) as caught:
        run(*vector_of(lambda: Broken(how)))
    message = str(caught.value)
    assert message.startswith("Traceback")
    assert "test_factory.py" in message.splitlines()[1]  # the user's frame first, not ours
    assert f"TwoArgumentsError: the user's own message: {how} 7" in message
    assert "env 0" in message.splitlines()[-1]
    assert "episode 0" in message
    if how == "step":
        assert "step 3 with action 0" in message


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "nan",
            r"an observation that is not finite: \[ 3. nan\]\n\(env 0 of .*inline, episode 0 "
            r"\(reset seed \d+, 3 steps so far\)",
        ),
        (
            "nan at the end",
            r"a final observation that is not finite: \[ 3. nan\]\n.* 3 steps so far",
        ),
        ("inf", r"a reward that is not finite: inf\n.* 3 steps so far"),
        ("step shape", r"step returned an observation of shape \(1,\)"),
        ("shape", r"shape \(5,\)"),
        ("dtype", "dtype complex64"),
        ("late shape", r"step returned an observation of shape \(3,\) .*step"),
        ("two rewards", r"step returned the reward array\(\[1., 1.\]\); expected one number"),
        ("no reward", r"step returned the reward \[\]; expected one number"),
        ("old reset", r"reset returned an object of class ndarray; expected \(observation, info\)"),
        ("old step", r"step returned a tuple of 4; expected \(observation, reward, terminated"),
    ],
)
def test_bad_results_of_an_environment_are_refused(how, words):
    with pytest.raises(EnvError, match=words):
        run(*vector_of(lambda: Broken(how)))


@pytest.mark.parametrize("wrap", [list, tuple, np.array, lambda r: np.array([r]), torch.tensor])
def test_a_reward_may_be_an_array_of_one_number(wrap):
    def make():
        return gym.wrappers.TransformReward(
            Counting(truncate_at=4), lambda r: wrap([r + 1] if wrap in (list, tuple) else r + 1)
        )

    vector, fragment = vector_of(make)
    episodes = run(vector, fragment)
    assert (fragment.reward == 2).all()
    assert {(e.total_reward, e.num_steps) for e in episodes} == {(8.0, 4)}


class Late(Counting):
    """Episodes of 4 steps; one value, after so many steps of all of them, is NaN."""

    def __init__(self, what, at):
        super().__init__(truncate_at=4)
        self.what, self.at, self.taken = what, at, 0

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return obs * (np.nan if self.what == "reset" and self.taken == self.at else 1), info

    def step(self, action):
        obs, reward, *rest = super().step(action)
        self.taken += 1
        bad = np.nan if self.taken == self.at else 1
        return (obs, reward * bad, *rest) if self.what == "reward" else (obs * bad, reward, *rest)


@pytest.mark.parametrize(
    ("what", "at"),
    [(what, at) for what in ("obs", "reward") for at in range(1, 15)]
    + [("reset", at) for at in (4, 8, 12)],
)
def test_a_bad_value_comes_with_the_episode_and_its_seed(what, at):
    """In two fragments of 7 steps, whose episodes end after 4 and 8, and 12."""
    episode, steps = divmod(at, 4) if what == "reset" else ((at - 1) // 4, (at - 1) % 4 + 1)
    vector, fragment = vector_of(lambda: Late(what, at), n=1, num_steps=7)
    with pytest.raises(EnvError) as caught:
        run(vector, fragment)
        vector.bind(fragment)
        run(vector, fragment)
    seed = derive(0, "env", 0, episode)
    assert f"episode {episode} (reset seed {seed}, {steps} steps so far)" in str(caught.value)


@repeats("num_workers", [0, 2])
def test_mujoco_warnings_are_printed_once(tmp_path, num_workers):
    """MuJoCo 4 warns of every model that it compiles; an older version may have nothing to say."""
    code = (
        "import headrace; headrace.train('HalfCheetah-v5', num_envs=4, num_steps=16,"
        f"num_minibatches=4, envs_per_vector=2, total_env_steps=64, num_workers={num_workers},"
        "eval_every=32, eval_episodes=1, quiet=True)"
    )
    done = python.run([sys.executable, "-c", code], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert all(line.startswith("headrace: warning of MuJoCo") for line in lines)
    assert len(lines) == len(set(lines)), done.stderr
    assert lines or version("mujoco").startswith("3.")


def test_highway_trains_from_its_id(tmp_path):
    run = headrace.train(
        "highway-fast-v0", num_envs=2, num_steps=8, envs_per_vector=1, num_minibatches=2,
        total_env_steps=16, run_dir=tmp_path / "run", quiet=True,
    )  # fmt: skip
    assert run.summary["env_steps"] == 16


def test_unwrap_stops_at_other_wrappers():
    """Only wrappers that do no more than count are passed by; what they limit is still cut."""
    limited = gym.make("CartPole-v1", max_episode_steps=7)
    assert unwrap(limited) == (limited.unwrapped, 7)
    both = gym.wrappers.TimeLimit(limited, max_episode_steps=9)
    assert unwrap(both) == (limited.unwrapped, 7)
    scaled = gym.wrappers.TransformReward(limited, lambda reward: 2 * reward)
    assert unwrap(scaled) == (scaled, NO_LIMIT)

    class Stricter(gym.wrappers.TimeLimit):
        pass

    stricter = Stricter(limited, max_episode_steps=3)
    assert unwrap(stricter) == (stricter, NO_LIMIT)
    for make in (lambda: limited, lambda: scaled):
        vector, fragment = vector_of(make, n=1, num_steps=30)
        episodes = run(vector, fragment)
        ends = fragment.truncated[:, 0] | fragment.terminated[:, 0]
        assert max(e.num_steps for e in episodes) == 7
        assert ends.sum() == len(episodes)


@pytest.mark.parametrize(
    ("name", "env"),
    [
        ("Mine-v7", "Mine-v7"),
        ("Mine-v7", "Mine"),
        ("Mine-v7", lambda: gym.make("Mine-v7")),
        ("highway-mine-v0", "highway-mine-v0"),  # which begins as those of a package
    ],
)
@pytest.mark.filterwarnings("ignore:.*the latest versioned environment")
def test_ids_that_only_this_process_registers_are_made_by_workers_and_for_evaluations(
    tmp_path, name, env
):
    gym.register(name, entry_point=lambda: Counting(terminate_at=5))
    lock = threading.Lock()
    gym.register("Other-v0", entry_point=lambda: lock)  # it cannot be sent, and need not be
    try:
        run = headrace.train(
            env, num_workers=1, num_envs=2, num_steps=8, total_env_steps=32, eval_every=16,
            eval_episodes=1, run_dir=tmp_path / "run", quiet=True,
        )  # fmt: skip
    finally:
        del gym.registry[name], gym.registry["Other-v0"]
    assert run.summary["env_steps"] == 32 and run.summary["best_return"] is not None


def test_an_id_of_one_s_own_for_a_class_of_a_package_travels_too():
    gym.register("LongCartPole-v0", "gymnasium.envs.classic_control:CartPoleEnv")
    try:
        sent = cloudpickle.dumps(EnvMaker("LongCartPole-v0"))
    finally:
        del gym.registry["LongCartPole-v0"]
    try:
        assert cloudpickle.loads(sent)().observation_space.shape == (4,)
    finally:
        del gym.registry["LongCartPole-v0"]
