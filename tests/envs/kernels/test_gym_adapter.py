"""Kernel environments in Gymnasium's forms, and naming them by id, class and callable."""

import json
import subprocess
import sys
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import headrace
from headrace.envs.api import VectorContext
from headrace.envs.factory import EnvMaker, env_spec
from headrace.envs.kernels import registry
from headrace.envs.kernels.env import KernelEnv, uniform
from headrace.envs.kernels.gym_adapter import KernelGymEnv, KernelGymVectorEnv
from headrace.envs.kernels.library import IDS
from headrace.envs.kernels.library.classic_control import CartPole
from headrace.envs.kernels.vector import KernelVector
from headrace.envs.vectors import make_vector
from headrace.errors import (
    ConfigError,
    EnvError,
    EnvNotFoundError,
    MissingExtraError,
    UnsupportedSpaceError,
    UsageError,
)
from headrace.spec import ActionCodec
from tests.envs.kernels.support import Ring, act_at_random, run, vector_of
from tests.marks import repeats

_TWO = np.float32(2.0)


class Drift(KernelEnv):
    """The action moves a point in two dimensions; the first coordinate ends the episode."""

    observation_space = gym.spaces.Box(-100, 100, (3,), np.float32)
    action_space = gym.spaces.Box(np.float32([-1, 0]), np.float32([3, 0.5]))
    max_episode_steps = 6
    state = {"x": (np.float32, (2,))}  # noqa: RUF012

    def __init__(self, width=4.0):
        self.constants = {"width": np.float32(width)}

    @staticmethod
    def reset_env(w, e):
        w.x[e, 0] = uniform(w, e, 0)
        w.x[e, 1] = uniform(w, e, 1)

    @staticmethod
    def step_env(w, e):
        for c in range(2):
            w.x[e, c] += w.action[e, c]
        w.reward[e] = _TWO * w.x[e, 1]
        w.terminated[e] = abs(w.x[e, 0]) > w.width

    @staticmethod
    def observe(w, e, out):
        out[0] = w.x[e, 0]
        out[1] = w.x[e, 1]
        out[2] = w.step[e]


class Choice(KernelEnv):
    """The reward is the first number of the action, whose choices start at 5."""

    observation_space = gym.spaces.Box(0, 100, (1,), np.float32)
    action_space = gym.spaces.Discrete(3, start=5)
    max_episode_steps = 4

    @staticmethod
    def reset_env(w, e):
        pass

    @staticmethod
    def step_env(w, e):
        w.reward[e] = w.action[e]

    @staticmethod
    def observe(w, e, out):
        out[0] = w.episode[e]


class Long(Drift):
    """The time limit is an argument, and part of the observation."""

    def __init__(self, max_episode_steps=6):
        super().__init__(width=1e9)
        self.max_episode_steps = max_episode_steps
        self.constants |= {"limit": np.float32(max_episode_steps)}

    @staticmethod
    def observe(w, e, out):
        out[0] = w.limit
        out[1] = w.step[e]
        out[2] = 0


class Failing(Drift):
    """Every call raises."""

    @staticmethod
    def reset_env(w, e):
        raise RuntimeError("reset")


class Mistyped(Drift):
    """A function uses a name that does not exist."""

    @staticmethod
    def step_env(w, e):
        w.reward[e] = w.nothing


def drift(width=4.0):
    return Drift(width)


@pytest.fixture
def ids():
    """Register ids for the environments of this file."""
    for kernel_env in (Drift, Choice, Long, Ring):
        registry.register(f"tests/{kernel_env.__name__}-v0", kernel_env)
    yield
    for kernel_env in (Drift, Choice, Long, Ring):
        del gym.registry[f"tests/{kernel_env.__name__}-v0"]


def is_of_several(kernel_env):
    return bool(kernel_env().agents)


@pytest.mark.filterwarnings("ignore:.*A Box observation space (minimum|maximum) value is")
@pytest.mark.filterwarnings("ignore:.*For Box action spaces, we recommend")
@repeats("compiled", [False, True])
@repeats(
    "env_id",
    ["tests/Drift-v0", "tests/Choice-v0", *(i for i, k in IDS.items() if not is_of_several(k))],
    keep=3,
)
def test_gymnasium_s_checker_passes(ids, env_id, compiled):
    check_env(gym.make(env_id, compiled=compiled).unwrapped)


def reference(env, n, num_steps):
    """Step a worker's vector at random; return its fragment, and its actions in the space."""
    vector, fragments = vector_of(env, n, num_steps, "python", seed=3)
    act_at_random(fragments, vector.spec, np.random.default_rng(5))
    run(vector, fragments)
    (fragment,) = fragments
    given = ActionCodec(vector.spec.action)
    actions = np.stack([given.to_env(row.numpy()) for row in fragment.action])
    obs, step, row = fragment.finals()
    finals = {(int(t), int(i)): o for o, t, i in zip(obs, step, row, strict=True) if t < num_steps}
    return fragment, actions, finals


@repeats("env", [Drift, Choice, CartPole], keep=2)
@pytest.mark.parametrize("form", ["interpreted", "compiled"])
def test_gym_env_plays_what_workers_play(env, form):
    """Reset with a seed, then without: the episodes of a vector with this seed, one by one."""
    fragment, actions, finals = reference(env(), 1, 60)
    one = KernelGymEnv(env, compiled=form == "compiled")
    obs, _ = one.reset(seed=3)
    ends = 0
    for t in range(60):
        np.testing.assert_array_equal(obs, fragment.obs[t, 0])
        obs, reward, terminated, truncated, _ = one.step(actions[t, 0])
        assert reward == fragment.reward[t, 0]
        assert (terminated, truncated) == (fragment.terminated[t, 0], fragment.truncated[t, 0])
        if truncated:
            np.testing.assert_array_equal(obs, finals[t, 0])
        if terminated or truncated:
            obs, _ = one.reset()
            ends += 1
    assert ends >= 2
    again, _ = one.reset(seed=3)
    np.testing.assert_array_equal(again, fragment.obs[0, 0])
    one.close()


@repeats("env", [Drift, Choice, CartPole], keep=2)
def test_gym_vector_plays_what_workers_play(env):
    fragment, actions, finals = reference(env(), 3, 60)
    vector = KernelGymVectorEnv(env, 3, num_threads=2)
    obs, _ = vector.reset(seed=3)
    ends, cuts = 0, 0
    for t in range(60):
        np.testing.assert_array_equal(obs, fragment.obs[t])
        obs, reward, terminated, truncated, info = vector.step(actions[t])
        np.testing.assert_array_equal(reward, fragment.reward[t])
        np.testing.assert_array_equal(terminated, fragment.terminated[t])
        np.testing.assert_array_equal(truncated, fragment.truncated[t])
        over = terminated | truncated
        np.testing.assert_array_equal(info.get("_final_obs", np.zeros(3, bool)), over)
        for i in np.flatnonzero(truncated):
            np.testing.assert_array_equal(info["final_obs"][i], finals[t, i])
            cuts += 1
        for i in np.flatnonzero(terminated):
            if env is CartPole:  # the angle or the place that ended it, and not a new beginning
                x, _, theta, _ = info["final_obs"][i]
                assert abs(x) > 2.4 or abs(theta) > 0.209
        ends += int(over.sum())
    assert ends >= 3
    assert cuts or env is CartPole
    first, _ = vector.reset(seed=3)
    np.testing.assert_array_equal(first, fragment.obs[0])
    second, _ = vector.reset()  # the next episode of each
    assert (second != first).any() or env is Drift
    vector.close()


def test_first_episode_without_a_seed_is_random():
    starts = [KernelGymEnv(CartPole).reset()[0] for _ in range(2)]
    vectors = [KernelGymVectorEnv(CartPole, 2).reset()[0] for _ in range(2)]
    assert (starts[0] != starts[1]).any()
    assert (vectors[0] != vectors[1]).any()
    assert (vectors[0][0] != vectors[0][1]).any()


def steps_until_truncated(env):
    env.reset(seed=1)
    for t in range(1, 30):
        _, _, terminated, truncated, _ = env.step(np.zeros(env.action_space.shape, np.float32))
        assert not np.any(terminated)
        if np.any(truncated):
            return t
    return None


def test_time_limit_is_applied_once(ids):
    make, make_vec = partial(gym.make, "tests/Drift-v0"), partial(gym.make_vec, "tests/Drift-v0", 1)
    assert gym.spec("tests/Drift-v0").max_episode_steps == 6
    for env in (make(), KernelGymEnv(Drift), make_vec(), KernelGymVectorEnv(Drift)):
        assert steps_until_truncated(env) == 6
        assert steps_until_truncated(env) == 6  # an episode that was cut off leaves nothing behind
    for limit in (3, 9):
        given = {"max_episode_steps": limit}
        forms = KernelGymEnv(Drift, **given), KernelGymVectorEnv(Drift, **given)
        for env in (make(**given), make_vec(**given), *forms):
            assert steps_until_truncated(env) == limit
        maker = EnvMaker("tests/Drift-v0", given, native=True)
        assert steps_until_truncated(EnvMaker("tests/Drift-v0", given)()) == limit
        assert maker.kernel().max_episode_steps == limit
    for env in (make(max_episode_steps=-1), make_vec(max_episode_steps=-1)):
        assert steps_until_truncated(env) is None
    sync = gym.make_vec("tests/Drift-v0", 2, vectorization_mode="sync")
    assert steps_until_truncated(sync) == 6


def test_time_limit_is_passed_to_constructors_that_take_it(ids):
    assert KernelGymEnv(Long, max_episode_steps=9).reset()[0][0] == 9
    assert gym.make_vec("tests/Long-v0", 1, max_episode_steps=9).reset()[0][0, 0] == 9
    assert EnvMaker("tests/Long-v0", {"max_episode_steps": 9}, native=True).kernel().constants[
        "limit"
    ] == 9  # fmt: skip


def test_box_actions_are_not_scaled():
    """Only a policy's actions are scaled and clipped."""
    one = KernelGymEnv(Drift)
    (x, *_), _ = one.reset(seed=1)
    (after, *_), *_ = one.step(np.array([-3.5, 0]))
    assert after == np.float32(x) + np.float32(-3.5)
    with pytest.raises(UsageError, match=r"shape \(1, 3\); expected \(1, 2\)"):
        one.step(np.zeros(3))


@pytest.mark.parametrize("action", [4, 8, 5.0, [5]])
def test_discrete_action_outside_of_the_space_is_refused(action):
    one, vector = KernelGymEnv(Choice), KernelGymVectorEnv(Choice, 2)
    one.reset(), vector.reset()
    with pytest.raises(UsageError, match="is not in the action space Discrete"):
        one.step(action)
    with pytest.raises(UsageError, match="is not in the action space MultiDiscrete"):
        vector.step(np.array([5, action] if action != [5] else action))


def test_wrong_calls_are_refused():
    for env in (KernelGymEnv(Choice), KernelGymVectorEnv(Choice, 1)):
        with pytest.raises(gym.error.ResetNeeded, match="before reset"):
            env.step(env.action_space.sample())
    vector = KernelGymVectorEnv(Choice, 2)
    with pytest.raises(UsageError, match="expected one number"):
        vector.reset(seed=[1, 2])
    with pytest.raises(UsageError, match="reset_mask"):
        vector.reset(options={"reset_mask": np.array([True, False])})


def test_games_of_several_agents_are_refused(ids):
    for make in (
        lambda: KernelGymEnv(Ring),
        lambda: KernelGymVectorEnv(Ring, 2),
        lambda: gym.make("tests/Ring-v0"),
        lambda: gym.make_vec("tests/Ring-v0", 2),
        EnvMaker(Ring),
        EnvMaker("tests/Ring-v0", wrappers=(gym.wrappers.ClipAction,)),
    ):
        with pytest.raises(
            UsageError, match=r"several agents \(first, second\)(.|\n)*KernelParall"
        ):
            make()


def test_importing_the_library_imports_neither_torch_nor_numba():
    code = (
        "import sys, gymnasium, headrace.envs.kernels.library;"
        "print([m for m in sys.modules if m in ('torch', 'numba')],"
        "gymnasium.spec('headrace/CartPole-v1').max_episode_steps);"
        "env = gymnasium.make('headrace.envs.kernels.library:headrace/CartPole-v1'); env.reset();"
        "print('numba' in sys.modules);"
        "del gymnasium.registry['headrace/CartPole-v1'];"
        "del sys.modules['headrace.envs.kernels.library'];"
        "from headrace.envs.factory import EnvMaker;"
        "print(EnvMaker('headrace/CartPole-v1')())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[] 500\nFalse\n<KernelGymEnv instance>\n"


@repeats("env_id", IDS, keep=3)
def test_library_id_has_its_class_and_time_limit(env_id):
    assert registry.registered_class(env_id) is IDS[env_id]
    # Gymnasium writes no limit as None, a kernel environment as 0.
    assert gym.spec(env_id).max_episode_steps == (IDS[env_id].max_episode_steps or None)
    assert type(EnvMaker(env_id, native=True).kernel()) is IDS[env_id]


@pytest.mark.parametrize(
    "env",
    ["headrace/CartPole-v1", "headrace.envs.kernels.library:headrace/CartPole-v1", "tests/Drift-v0",
     "tests.envs.kernels.test_gym_adapter:Drift", "tests.envs.kernels.test_gym_adapter:drift",
     Drift, Ring, partial(Drift, 2.0),
     lambda: Drift(2.0)],
)  # fmt: skip
def test_every_way_to_name_a_kernel_environment_is_recognized(ids, env):
    assert isinstance(EnvMaker(env, native=True).kernel(), KernelEnv)
    assert EnvMaker(env).kernel() is None  # interpreted
    for native in (False, True):
        spec = env_spec(EnvMaker(env, native=native))
        assert spec.interface == "kernel"
        assert spec.observation.kind == "box"


def test_other_environments_are_not_kernel_environments():
    made = []

    def cartpole():
        made.append(gym.make("CartPole-v1"))
        return made[-1]

    for env in ("CartPole-v1", cartpole):
        assert EnvMaker(env, native=True).kernel() is None
        assert env_spec(EnvMaker(env)).interface == "gym"
    assert EnvMaker(Drift, native=True, wrappers=(gym.Wrapper,)).kernel() is None
    with pytest.raises(
        ConfigError, match="is made by a callable: only a registered id, or a kernel"
    ):
        env_spec(EnvMaker(cartpole, native=True))


def test_spaces_are_read_without_a_reset():
    for native in (False, True):
        assert env_spec(EnvMaker(Failing, native=native)).action.low == (-1.0, 0.0)
    with pytest.raises(RuntimeError, match="reset"):
        KernelGymEnv(Failing).reset()


def test_observation_space_of_two_dimensions_is_refused():
    image = type("Image", (Drift,), {"observation_space": gym.spaces.Box(0, 1, (3, 3))})
    with pytest.raises(
        UnsupportedSpaceError, match=r"observation space .* Image .*\n.*one dimension"
    ):
        env_spec(EnvMaker(image))


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Dict(a=gym.spaces.Discrete(2)),
        gym.spaces.Box(0, 3, (2,), np.int32),
        gym.spaces.MultiDiscrete([[2, 3]]),
    ],
    ids=str,
)
def test_actions_of_other_forms_are_refused(space):
    env = type("Other", (Drift,), {"action_space": space})
    with pytest.raises(
        UnsupportedSpaceError, match=r"(?s)action space .* Other .*\n.*\(of floats\), Discrete or"
    ):
        env_spec(EnvMaker(env))


def test_wrong_names_and_arguments_are_refused():
    with pytest.raises(UsageError, match=r"Drift does not take the arguments .'colour': 3"):
        EnvMaker(Drift, {"colour": 3}, native=True).kernel()
    with pytest.raises(UsageError, match="CartPole does not take the arguments"):
        EnvMaker("headrace/CartPole-v1", {"colour": 3})()
    with pytest.raises(EnvNotFoundError, match="Did you mean headrace/CartPole-v1"):
        EnvMaker("headrace/CartPol-v1")()
    with pytest.raises(EnvNotFoundError, match="expected a subclass of headrace's KernelEnv"):
        KernelGymEnv("tests.envs.kernels.test_gym_adapter:drift")
    with pytest.raises(UsageError, match="is an object already, and takes no"):
        KernelGymEnv(Drift(), width=2.0)
    with pytest.raises(UsageError, match="does not draw itself"):
        gym.make_vec("headrace/CartPole-v1", 1, render_mode="rgb_array")


def test_missing_numba_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)  # as if it were not installed
    KernelGymEnv(CartPole).reset()
    for make in (
        lambda: KernelGymEnv(CartPole, compiled=True),
        lambda: headrace.train("headrace/CartPole-v1", **TINY),
    ):
        with pytest.raises(MissingExtraError, match=r"pip install .*\[kernels\]'"):
            make()


def test_native_vector_is_compiled():
    def made(**kwargs):
        maker = EnvMaker("headrace/CartPole-v1", **kwargs)
        return make_vector(maker, VectorContext(env_spec(maker), np.arange(2), 0))

    assert type(made(native=True)) is KernelVector
    assert type(made()).__name__ == "GymVector"
    game = EnvMaker(Ring, native=True)
    assert type(make_vector(game, VectorContext(env_spec(game), np.arange(2), 0))) is KernelVector


TINY = {"num_envs": 4, "num_steps": 16, "total_env_steps": 128, "quiet": True, "num_minibatches": 2}


@repeats(
    ("env", "settings", "form"),
    [
        ("headrace/CartPole-v1", {}, "native"),
        ("tests.envs.kernels.test_gym_adapter:Drift", {"env_kwargs": {"width": 3.0}}, "native"),
        (Drift, {"num_workers": 2, "envs_per_vector": 2}, "native"),
        (lambda: Drift(3.0), {}, "native"),
        ("headrace/CartPole-v1", {"vectorization": "python"}, "python"),
        (Drift, {"vectorization": "python", "on_env_error": "restart"}, "python"),
        (Drift, {"wrapper": gym.wrappers.ClipAction}, "python"),
        ("CartPole-v1", {}, "python"),
    ],
    keep=3,
)
def test_training_compiles_kernel_environments_by_default(tmp_path, env, settings, form):
    run = headrace.train(env, run_dir=tmp_path / "run", **TINY | settings)
    assert run.summary["env_steps"] == 128
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["settings"]["vectorization"] == form
    given = "vectorization" in settings
    assert (config["origin"]["vectorization"] == "given") == given
    if form == "native" and "envs_per_vector" not in settings:
        assert config["settings"]["envs_per_vector"] == 4  # threads share one vector out
    played = run.evaluate(episodes=3)
    assert len(played.returns) == 3


def test_python_vectors_of_several_agents_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"Ring is a compiled game of 3 agents: only its"):
        headrace.train(Ring, run_dir=tmp_path / "run", vectorization="python", **TINY)


@pytest.mark.parametrize(
    ("env", "form", "words"),
    [
        (Failing, "native", r"RuntimeError: reset(.|\n)*in a reset, envs 0 to 3 of Failing"),
        (Failing, "python", r"raise RuntimeError(.|\n)*in reset, env 0 of Failing"),
        (Mistyped, "native", r"TypingError(.|\n)*in step 1 of the fragment, envs 0 to 3 of Mist"),
        (Mistyped, "python", r"'nothing'(.|\n)*in step 1 with action (.|\n)*env 0 of Mistyped"),
    ],
)
def test_author_s_error_is_described(tmp_path, env, form, words):
    with pytest.raises(EnvError, match=words):
        headrace.train(env, vectorization=form, run_dir=tmp_path / "run", **TINY)
