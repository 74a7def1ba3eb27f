"""Vector forms of environments' own: the same valid transitions in every autoreset mode."""

import os
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

import headrace
from headrace import batch
from headrace.algos.targets import advantages
from headrace.collectors.rollout import FixedActors, at_once, rollout
from headrace.config.algorithms import ALGORITHMS
from headrace.envs.api import VectorContext
from headrace.envs.check.plays import random_actions
from headrace.envs.factory import EnvMaker, env_spec
from headrace.envs.gym import atari
from headrace.envs.gym.native_vector import NativeVector
from headrace.envs.gym.python_vector import GymVector
from headrace.errors import ConfigError, EnvError
from headrace.meter import Meter
from headrace.models.policy import Network, PolicyActor
from tests import python
from tests.support import Nested, build_policy, inline, never, plan_for, policies_for, workers

T, N = 80, 3
STORED_OUTPUTS = ALGORITHMS["ppo"].stored_outputs


def cartpole():
    return gym.make("CartPole-v1", max_episode_steps=23)


class Remembering(gym.Wrapper):
    """A Dict observation, and a mask in info."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = gym.spaces.Dict(
            {"obs": env.observation_space, "t": gym.spaces.Discrete(1000)}
        )

    def reset(self, **kwargs):
        self.t = 0
        return self._out(self.env.reset(**kwargs)[0])

    def step(self, action):
        self.t += 1
        obs, *rest, _ = self.env.step(action)
        obs, info = self._out(obs)
        return obs, *rest, info

    def _out(self, obs):
        return {"obs": obs, "t": self.t}, {"action_mask": np.array([1, self.t % 5 != 0], np.int8)}


def remembering():
    return Remembering(cartpole())


def sampled(make, mode):
    """One long fragment, by a policy that looks at nothing but the observation."""
    maker = EnvMaker(make)
    spec = env_spec(maker)
    if mode is None:
        envs = [make() for _ in range(N)]
        vector = GymVector(envs, VectorContext(spec, np.arange(N), 5, reseed=False))
    else:
        theirs = gym.vector.SyncVectorEnv([make] * N, autoreset_mode=mode)
        vector = NativeVector(theirs, VectorContext(spec, np.arange(N), 5))
    policy = build_policy(spec, Network(), seed=1)
    fragment = batch.allocate(batch.columns(spec, STORED_OUTPUTS, T, N))

    def act(obs, noise):
        out = policy.act(obs, noise)
        return out | policy.act_greedily(obs)

    episodes = []
    with torch.no_grad():
        weights, noise = FixedActors([PolicyActor(act)], version=0), torch.full((T, N, 1), 0.5)
        at_once(rollout(vector, [fragment], weights, [noise], Meter(), never))
    episodes = vector.finish()
    vector.close()
    return policy, fragment, episodes


def transitions(fragment, i):
    """Env i's valid transitions: obs, action, reward, both ends, final (or next) obs."""
    flat = lambda obs, t: [part[t, i].float().ravel() for part in leaves(obs)]  # noqa: E731
    final_obs, step, row = fragment.finals()
    finals = {int(t): k for k, (t, r) in enumerate(zip(step, row, strict=True)) if r == i}
    out = []
    for t in range(T):
        if not fragment.valid[t, i]:
            continue
        ends = bool(fragment.terminated[t, i] or fragment.truncated[t, i])
        if t in finals:
            after = [part[finals[t]].float().ravel() for part in leaves(final_obs)]
        else:
            after = [] if ends else flat(fragment.obs, t + 1)
        out.append(
            torch.cat([
                *flat(fragment.obs, t),
                fragment.action[t, i].float().ravel(),
                fragment.reward[t, i].reshape(1),
                fragment.terminated[t, i].float().reshape(1),
                fragment.truncated[t, i].float().reshape(1),
                *after,
            ])
        )  # fmt: skip
    return out


def leaves(obs):
    return list(obs.values()) if isinstance(obs, dict) else [obs]


@pytest.mark.parametrize("make", [cartpole, remembering])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_autoreset_mode_gives_the_transitions_of_the_python_form(make, mode):
    _, reference, episodes = sampled(make, None)
    _, fragment, other_episodes = sampled(make, mode)
    assert bool(fragment.valid.all()) == (mode != AutoresetMode.NEXT_STEP)
    assert int(reference.num_final) >= 3, "time limits must play a part"
    for i in range(N):
        ours, theirs = transitions(reference, i), transitions(fragment, i)
        assert len(theirs) >= T - 8
        for one, other in zip(ours, theirs, strict=False):
            assert torch.equal(one, other)
    lengths = [
        [e.num_steps for e in found if e.env_id == 0] for found in (episodes, other_episodes)
    ]
    assert lengths[0][: len(lengths[1])] == lengths[1]
    assert len(lengths[1]) >= 3


class NestedPaidPlainly(Nested):
    """Gymnasium's own vectors take no rewards that are arrays."""

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, reward.item(), *rest


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_nested_observations_and_actions_are_those_of_the_python_form(mode):
    spec = env_spec(EnvMaker(Nested))
    actions = random_actions(spec, (T, N), 0)
    found = []
    for make in (
        lambda context: GymVector([Nested() for _ in range(N)], context),
        lambda context: NativeVector(
            gym.vector.SyncVectorEnv([NestedPaidPlainly] * N, autoreset_mode=mode), context
        ),
    ):
        vector = make(VectorContext(spec, np.arange(N), 5, reseed=False))
        fragment = batch.allocate(batch.columns(spec, {}, T, N))
        vector.bind(fragment)
        taken = np.zeros(N, int)
        for t in range(T):
            for i in range(N):  # a row that only resets takes no action
                fragment.action[t, i] = torch.from_numpy(actions[taken[i], i])
            vector.step(t)
            taken += fragment.valid[t].numpy()
        assert vector.finish()
        vector.close()
        found.append(fragment)
    for i in range(N):
        ours, theirs = (transitions(fragment, i) for fragment in found)
        assert len(theirs) >= T - 10
        for one, other in zip(ours, theirs, strict=False):
            assert torch.equal(one, other)


def test_next_step_s_advantages_are_those_of_the_python_form():
    """Nothing flows over a row that only resets."""
    found = []
    for mode in (None, AutoresetMode.NEXT_STEP):
        policy, fragment, _ = sampled(cartpole, mode)
        rows = advantages(policy, fragment, 0.9, 0.5)
        by_env = rows["advantage"].view(T, N)[:, 0][fragment.valid[:, 0]]
        found.append(by_env[: T - 20])  # away from the last row, which differs
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_registered_vector_form_trains_and_counts_valid_steps_only(tmp_path):
    seen = []
    run = headrace.train(
        "CartPole-v1", vectorization="native", num_envs=8, num_steps=32, num_minibatches=4,
        total_env_steps=1024, run_dir=tmp_path / "run", quiet=True,
        on_update=lambda _, metrics: seen.append(metrics["env_steps"]),
    )  # fmt: skip
    # Four rows of 256 would make 1,024: as many as are resets are missing, and a fifth comes
    assert seen[0] < 256
    assert 1024 <= run.summary["env_steps"] < 1024 + 256
    assert len(seen) == 5
    assert len(run.evaluate(episodes=3).returns) == 3
    resumed = headrace.resume(run.dir, total_env_steps=1500, quiet=True)
    assert resumed.summary["env_steps"] >= 1500


def test_a_missing_vector_form_is_refused_with_the_remedy():
    for env, kwargs, words in (
        ("Pendulum-v1", {}, "registers no vector_entry_point"),
        (cartpole, {}, "made by a callable"),
        ("CartPole-v1", {"wrappers": (Remembering,)}, "is wrapped"),
    ):
        with pytest.raises(ConfigError, match=f"{words}(.|\n)*--vectorization python"):
            env_spec(EnvMaker(env, native=True, **kwargs))


class Failing(gym.vector.VectorEnv):
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self):
        self.num_envs = 2
        self.single_observation_space = gym.spaces.Box(0, 1, (1,))
        self.single_action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros((2, 1), np.float32), {}

    def step(self, actions):
        raise RuntimeError("the vector's own message")


def test_a_native_vector_s_exception_keeps_its_traceback():
    spec = env_spec(EnvMaker(lambda: gym.make("CartPole-v1")))
    from dataclasses import replace

    from headrace.spec import Space

    spec = replace(spec, observation=Space("box", (1,), "float32"))
    vector = NativeVector(Failing(), VectorContext(spec, np.array([4, 5]), 0))
    fragment = batch.allocate(batch.columns(spec, {}, 4, 2))
    fragment.action[0] = torch.tensor([0, 1])
    vector.bind(fragment)
    with pytest.raises(EnvError) as caught:
        vector.step(0)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("Traceback")
    assert "test_native_vector.py" in lines[1]
    assert "the vector's own message" in str(caught.value)
    assert "actions [0, 1]" in lines[-1]
    assert "envs [4, 5]" in lines[-1]


class Maskless(gym.vector.SyncVectorEnv):
    """Leaves the mask out of info: of resets, of steps, or where an episode ends."""

    leaves_out = ""

    def reset(self, *, options=None, **more):
        when = "ended" if options else "reset"
        obs, info = super().reset(options=options, **more)
        return obs, {} if when == self.leaves_out else info

    def step(self, actions):
        *out, info = super().step(actions)
        return *out, {} if self.leaves_out == "step" else info


@pytest.mark.parametrize(
    ("leaves_out", "position"),
    [("reset", "in reset, step 1"), ("step", "in a step with the"), ("ended", "in reset, step ")],
)
def test_a_native_vector_without_its_mask_is_an_environment_s_error(leaves_out, position):
    spec = env_spec(EnvMaker(remembering))
    theirs = Maskless([remembering] * N, autoreset_mode=AutoresetMode.DISABLED)
    theirs.leaves_out = leaves_out
    vector = NativeVector(theirs, VectorContext(spec, np.arange(N), 5))
    fragment = batch.allocate(batch.columns(spec, STORED_OUTPUTS, T, N))
    fragment.action[:] = torch.arange(T).view(T, 1) % 2
    with pytest.raises(EnvError, match=r"KeyError: 'action_mask'\n\nThe .* failed") as caught:
        vector.bind(fragment)
        for t in range(T):
            vector.step(t)
    assert str(caught.value).count("The environment failed") == 1
    assert f"failed {position}" in str(caught.value)
    vector.close()


def test_ale_s_vector_and_python_forms_give_the_same_observations():
    """Without the random start and FIRE: the same frames, rewards and ends, action by action."""
    kwargs = {"noop_max": 0, "use_fire_reset": False, "repeat_action_probability": 0.0}
    maker = EnvMaker("ALE/Breakout-v5", kwargs, native=True)
    python = EnvMaker("ALE/Breakout-v5", kwargs)
    spec = env_spec(maker)
    assert spec == env_spec(python)
    assert spec.observation.describe() == "Box(4, 84, 84) uint8"
    native, env = maker.vector(1, num_threads=1), python()
    obs, _ = native.reset(seed=np.array([3]))
    other, _ = env.reset(seed=3)
    rng = np.random.default_rng(0)
    differing = 0
    for _ in range(150):
        differing += int((obs[0] != other).any())
        action = int(rng.integers(0, 4))
        obs, reward, terminated, _, _ = native.step(np.array([action]))
        other, other_reward, other_terminated, _, _ = env.step(action)
        assert (reward[0], terminated[0]) == (other_reward, other_terminated)
        if terminated[0]:
            break
    assert differing <= 4  # frames that two ways of scaling round apart
    native.close()
    env.close()


def test_ale_s_rewards_are_not_clipped_and_its_actions_stick_as_the_id_says(monkeypatch):
    import gymnasium

    asked = {}
    make_vec = gymnasium.make_vec
    monkeypatch.setattr(gymnasium, "make_vec", lambda *a, **k: asked.update(k) or make_vec(*a, **k))
    EnvMaker("ALE/Breakout-v5", native=True).vector(2, num_threads=1).close()
    assert asked["reward_clipping"] is False
    assert "repeat_action_probability" not in asked
    assert gymnasium.spec("ALE/Breakout-v5").kwargs["repeat_action_probability"] == 0.25


@pytest.mark.parametrize(
    ("cores", "threads", "pinned"),
    [("all", "all", True), ("all", "fewer", False), ("some", "some", False)],
)
def test_ale_s_threads_are_pinned_only_if_all_cores_are_free(cores, threads, pinned):
    """Of a machine that is not all ours, the cores may be somebody else's."""
    every = sorted(os.sched_getaffinity(0))
    if len(every) < 2 or len(every) != os.cpu_count():
        pytest.skip(f"needs all cores of a machine of several; there are {every}")
    allowed = every if cores == "all" else every[1:]
    num_threads = len(allowed) - (threads == "fewer")
    code = f"""
import os
os.sched_setaffinity(0, {allowed})
from headrace.envs.factory import EnvMaker
before = set(os.listdir("/proc/self/task"))
vector = EnvMaker("ALE/Breakout-v5", native=True).vector(2, num_threads={num_threads})
for tid in sorted(set(os.listdir("/proc/self/task")) - before, key=int):
    print(sorted(os.sched_getaffinity(int(tid))))
vector.close()
"""
    found = python.run([sys.executable, "-c", code], timeout=60, check=True).stdout.splitlines()
    expected = [[core] for core in every] if pinned else [allowed] * num_threads
    assert found == [str(of) for of in expected]


def test_ale_inline_equals_workers_and_resume_begins_anew():
    plan = plan_for("ALE/Breakout-v5", num_steps=12, num_envs=4, envs_per_vector=2, native=True)
    batches = []
    for make in (inline, workers):
        collector = make(plan)
        collector.publish(policies_for(plan), 0)
        fragments = collector.collect().fragments
        batches.append([(f.obs.clone(), f.action.clone(), f.reward.clone()) for f in fragments])
        state = collector.state()
        collector.close()
        again = make(plan, state=state)
        assert again.restored.new_episode == 4
        again.close()
    for one, other in zip(*batches, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("env", ["ALE/Breakout-v5", "CartPole-v1"])
def test_each_env_of_a_vector_has_another_random_start(env):
    maker = EnvMaker(env, native=True)
    spec = env_spec(maker)
    vector = NativeVector(maker.vector(4, num_threads=1), VectorContext(spec, np.arange(4), 1))
    fragment = batch.allocate(batch.columns(spec, {}, 30, 4))
    vector.bind(fragment)
    fragment.action.fill_(1)
    for t in range(30):
        vector.step(t)
    vector.close()
    for i in range(1, 4):
        assert not torch.equal(fragment.obs[:, 0], fragment.obs[:, i])


@pytest.mark.more
def test_atari_trains_from_its_preset_with_clipped_rewards(tmp_path, capsys):
    run = headrace.train(
        "ALE/Breakout-v5", total_env_steps=256, num_steps=32, run_dir=tmp_path / "run",
        checkpoint_every_s=1e9,
    )  # fmt: skip
    said = capsys.readouterr().out
    assert "preset atari" in said
    assert "clip_reward=1.0" in said
    assert "vectorization=native" in said
    kernels = [m.kernel_size for m in run.policy.module.modules() if isinstance(m, torch.nn.Conv2d)]
    assert kernels == [(8, 8), (4, 4), (3, 3)]
    rewards = torch.tensor([-7.0, 0.5, 4.0])
    assert run.policy.module.scaled(rewards).tolist() == [-1, 0.5, 1]


def test_ale_s_python_form_takes_the_vector_form_s_arguments():
    env = atari.make("ALE/Breakout-v5", img_width=64, img_height=48, stack_num=2, frameskip=2,
                     reward_clipping=False, disable_env_checker=True)  # fmt: skip
    assert env.observation_space.shape == (2, 48, 64)
    assert atari.make("ALE/Breakout-v5", obs_type="ram").observation_space.shape == (128,)
