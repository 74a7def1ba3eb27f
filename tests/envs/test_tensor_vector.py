"""Environments that step tensors, and what they are held against: the same one stepping arrays."""

import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

import headrace
from headrace.algos import targets
from headrace.batch import allocate, columns
from headrace.collectors.device import DeviceCollector
from headrace.envs.api import VectorContext
from headrace.envs.factory import EnvMaker, env_spec
from headrace.envs.tensor_vector import TensorVector
from headrace.errors import ConfigError, EnvError, HeadraceError, UnsupportedSpaceError, UsageError
from headrace.meter import Meter
from headrace.models.policy import Network
from headrace.seeding import derive
from tests.envs.kernels.support import act_at_random, contents, run
from tests.support import inline, never, plan_for, policies_for, policy_for

CPU = torch.device("cpu")
SPACES = {
    "discrete": gym.spaces.Discrete(3, start=-1),
    "multi_discrete": gym.spaces.MultiDiscrete([3, 2]),
    "box": gym.spaces.Box(np.float32([-1, 0]), np.float32([2, 0.5])),
}


class Buses(gym.vector.VectorEnv):
    """Rows count their steps, and what was done in the last one; they end one after the other."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, num_envs, action="discrete"):
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(-100, 100, (4,), np.float32)
        self.single_action_space = SPACES[action]

    def reset(self, *, seed=None, options=None):
        self.start = (seed + 3 * np.arange(self.num_envs)) % 7
        self.t, self.last = np.zeros(self.num_envs), np.zeros(self.num_envs)
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        self.last = np.asarray(action, np.float32).reshape(self.num_envs, -1).sum(-1)
        terminated = (self.t + self.start) % 5 == 4
        truncated = (self.t >= 4) | (self.start == 6)
        reward, final = self.last + self.t / 8, self._obs()
        ended = terminated | truncated
        self.start = np.where(ended, (self.start + 2) % 7, self.start)
        self.t, self.last = (np.where(ended, 0, of) for of in (self.t, self.last))
        info = {"final_obs": final} if ended.any() else {}
        return self._obs(), reward.astype(np.float32), terminated, truncated, info

    def _obs(self):
        number = np.arange(self.num_envs)
        return np.stack([self.t, self.start, self.last, number], -1).astype(np.float32)


class Tensors(Buses):
    """The same, of tensors."""

    seeds = []  # noqa: RUF012

    def __init__(self, num_envs, device, action="discrete"):
        super().__init__(num_envs, action)
        assert device == "cpu"

    def reset(self, **kwargs):
        self.seeds += [kwargs["seed"]] if kwargs["seed"] else []  # 0: to see what is offered
        obs, info = super().reset(**kwargs)
        return torch.from_numpy(obs), info

    def step(self, action):
        assert isinstance(action, torch.Tensor)
        *arrays, info = super().step(action.numpy())
        return *map(torch.from_numpy, arrays), {k: torch.from_numpy(o) for k, o in info.items()}


@pytest.fixture
def arrays_id():
    gym.register("tests/Buses-v0", lambda: None, vector_entry_point=Buses)
    yield "tests/Buses-v0"
    del gym.registry["tests/Buses-v0"]


def on_device(plan, state=None):
    return DeviceCollector(plan, CPU, Meter(), never, state)


@pytest.mark.parametrize("action", SPACES)
@pytest.mark.parametrize("core", ["none", "gru"])
def test_tensor_environments_make_the_batches_of_their_numpy_twins(arrays_id, action, core):
    more = {
        "network": Network(core=core, hidden_sizes=(8,), core_size=8), "num_envs": 6,
        "envs_per_vector": 6, "num_steps": 20, "native": True, "kwargs": {"action": action},
    }  # fmt: skip
    plan, twin = plan_for(Tensors, **more), plan_for(arrays_id, **more)
    assert plan.spec.interface == "tensor"
    collectors, kept, both = [on_device(plan), inline(twin)], 0, 0
    for version in range(3):
        policy, batches = policy_for(plan, seed=version), []
        for collector in collectors:
            collector.publish({"default": policy}, version)
            batches.append(collector.collect())
            collector.release_batch(more=True)
        (one,), (other,) = (batch.fragments for batch in batches)
        for name, column in contents(one).items():
            assert torch.equal(column, contents(other)[name]), name
        for name, column in one.stored_outputs.items():
            torch.testing.assert_close(column, other.stored_outputs[name], atol=4e-6, rtol=0)
        found, expected = (targets.advantages(policy, of, 0.9, 0.8) for of in (one, other))
        torch.testing.assert_close(found["advantage"], expected["advantage"])
        assert batches[0].episodes == sorted(batches[1].episodes)
        assert batches[0].env_steps == batches[0].agent_steps == 120
        kept += int(one.num_final)
        both += int((one.terminated & one.truncated).sum())
    assert kept > 20
    assert both > 5
    for collector in collectors:
        collector.close()


def vector_of(env, n=4, num_steps=6, env_id=None, spec=None, **kwargs):
    spec = spec or env_spec(EnvMaker(Tensors))
    env_id = np.arange(n) if env_id is None else env_id
    fragment = allocate(columns(spec, {}, num_steps, n))
    vector = TensorVector(env, VectorContext(spec, env_id, 3, **kwargs), CPU)
    act_at_random([fragment], spec, np.random.default_rng(1))
    return vector, fragment


def test_tensor_seeds_differ_by_env_role_and_resume():
    Tensors.seeds.clear()
    for env_id, role in ((np.arange(4), "env"), (np.arange(4, 8), "env"), (np.arange(4), "eval")):
        vector, fragment = vector_of(Tensors(4, "cpu"), env_id=env_id, role=role)
        run(vector, [fragment])
    paths = [("env", 0, 0), ("env", 4, 0), ("eval", 0, 0)]
    assert Tensors.seeds == [derive(3, *path) for path in paths]
    for begun in (1, 2):
        before = vector.state()
        vector, fragment = vector_of(Tensors(4, "cpu"), role="eval")
        assert vector.restore(before).new_episode == 4
        run(vector, [fragment])
        paths.append(("eval", 0, begun))
    assert Tensors.seeds == [derive(3, *path) for path in paths]


@pytest.mark.parametrize("core", ["none", "gru"])
def test_resume_of_tensor_environments_begins_new_episodes(tmp_path, capsys, core):
    Tensors.seeds.clear()
    settings = {"num_envs": 4, "num_steps": 7, "seed": 5, "network": Network(core=core)}
    headrace.train(
        Tensors, run_dir=tmp_path / "r", total_env_steps=56, **settings, num_minibatches=1
    )
    capsys.readouterr()
    again = headrace.resume(tmp_path / "r", env=Tensors, total_env_steps=112)
    assert again.summary["env_steps"] == 112
    assert "0 restored, 0 replayed, 4 begun anew" in capsys.readouterr().out
    assert Tensors.seeds == [derive(5, "env", 0, 0), derive(5, "env", 0, 1)]
    assert again.evaluate(episodes=6).lengths


def test_new_episodes_begin_with_no_memory_and_nothing_counted():
    plan = plan_for(Tensors, num_envs=4, network=Network(core="gru", core_size=8), num_steps=3)
    first = on_device(plan)
    first.publish(policies_for(plan), 0)
    first.collect()
    assert first._memory[0].any()
    state = first.state()
    assert state["vector0.core_state.0"].shape == (4, 8)
    second = on_device(plan, state=state)
    assert not second._memory[0].any()
    second.publish(policies_for(plan), 1)
    lengths = [episode.num_steps for episode in second.collect().episodes]
    assert lengths
    assert max(lengths) <= 3


def changed(of, **how):
    """`Tensors` whose step gives something else."""

    class Changed(of):
        def step(self, action):
            names = ("obs", "reward", "terminated", "truncated", "info")
            given = dict(zip(names, super().step(action), strict=True))
            self.count = getattr(self, "count", 0) + 1
            if self.count == 3:
                given |= {name: change(given[name]) for name, change in how.items()}
            return tuple(given.values())

    return Changed(4, "cpu")


def with_nan(tensor):
    tensor[1] = float("nan")
    return tensor


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"obs": lambda o: 1 / 0}, r"ZeroDivisionError.*\n*.*in step 3 of the fragment, envs 0 to"),
        ({"obs": lambda o: o[:, :3]}, r"an observation as a tensor of \(4, 3\) torch.float32 on"),
        ({"obs": lambda o: o[:1]}, r"expected a tensor of \(4, 4\) torch.float32 on cpu \(in step"),
        ({"obs": lambda o: o.numpy()}, "an observation as a ndarray; expected a tensor"),
        ({"obs": lambda o: o.to("meta")}, r"on meta; expected .* on cpu \(in step 3"),
        ({"obs": with_nan}, r"not finite\n\(step 3 of the fragment, env 1 of Tensors, inline"),
        ({"reward": with_nan}, r"a reward \(nan\).*\n\(step 3 of the fragment, env 1"),
        ({"reward": lambda r: r[:1]}, r"a reward as a tensor of \(1,\)"),
        ({"reward": lambda r: r.unsqueeze(-1)}, r"a reward as a tensor of \(4, 1\)"),
        ({"terminated": lambda d: d.float()}, r"terminated as a tensor of \(4,\) torch.float32"),
        ({"truncated": lambda d: None}, "truncated as a NoneType"),
        ({"info": lambda info: None}, "NoneType"),
        ({"truncated": torch.ones_like, "terminated": torch.zeros_like, "info": lambda i: {}},
         r'truncated an episode without an info\["final_obs"\].*\(in step 3'),
        ({"truncated": torch.ones_like, "terminated": torch.zeros_like,
          "info": lambda i: {"final_obs": with_nan(torch.zeros(4, 4))}},
         r"observation \(\[nan.*not finite\n\(step 3 of the fragment, env 1"),
        ({"info": lambda i: {"final_obs": torch.zeros(4)}}, r"a final observation as a tensor"),
    ],
)  # fmt: skip
def test_bad_values_of_tensor_environments_are_refused_with_position(how, message):
    vector, fragment = vector_of(changed(Tensors, **how))
    with pytest.raises(EnvError, match=message):
        run(vector, [fragment])


def test_unused_final_observations_may_be_anything():
    how = {
        "truncated": torch.zeros_like,
        "info": lambda i: {"final_obs": torch.full((4, 4), 1e999)},
    }
    vector, fragment = vector_of(changed(Tensors, **how))
    run(vector, [fragment])
    assert fragment.final_obs[: int(fragment.num_final)].isfinite().all()


def test_errors_of_reset_and_close_are_reported():
    class Failing(Tensors):
        def reset(self, **kwargs):
            raise RuntimeError("no road")

        def close(self):
            raise RuntimeError("no depot")

    vector, fragment = vector_of(Failing(4, "cpu"))
    with pytest.raises(EnvError, match="no road\n\nThe environment failed in reset, envs 0 to 3"):
        vector.bind(fragment)
    with pytest.raises(
        EnvError, match="no depot\n\nThe environment failed while closing, envs 0 to 3 of "
    ):
        vector.close()


class Choices(Tensors):
    """Observes a choice."""

    space = gym.spaces.Discrete(9, start=-1)

    def __init__(self, num_envs, device):
        super().__init__(num_envs, device)
        self.single_observation_space = self.space

    def _obs(self):
        return self.start.astype(np.int64)


class WrongChoices(Choices):
    def step(self, action):
        obs, *rest = super().step(action)
        return obs + 20, *rest


def test_observed_choices_outside_of_the_space_are_refused():
    maker = EnvMaker(Choices)
    spec = env_spec(maker)
    vector, fragment = vector_of(Choices(4, "cpu"), spec=spec)
    run(vector, [fragment])
    assert fragment.obs.shape == (7, 4)
    wrong = changed(Choices, obs=lambda o: o + 20)
    vector, fragment = vector_of(wrong, spec=spec)
    with pytest.raises(EnvError, match=r"an observation that is not in .*\(9\) \(in step 3"):
        run(vector, [fragment])
    final = torch.full((4,), -2)
    how = {"truncated": torch.ones_like, "terminated": torch.zeros_like}
    wrong = changed(Choices, **how, info=lambda i: {"final_obs": final})
    vector, fragment = vector_of(wrong, spec=spec)
    with pytest.raises(EnvError, match=r"a final observation that is not in .*\(in step 3"):
        run(vector, [fragment])


def test_a_policy_never_acts_on_what_is_no_choice():
    """It could not: it would end the run on a GPU, before the check at the fragment's end."""
    plan = plan_for(WrongChoices, num_envs=4)
    collector = on_device(plan)
    collector.publish(policies_for(plan), 0)
    with pytest.raises(EnvError, match=r"an observation that is not in its space"):
        collector.collect()


class UnusedFinals(Choices):
    """Fills the rows of final observations in which no episode was truncated."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        used = truncated & ~terminated
        final = info.get("final_obs", obs)
        return obs, reward, terminated, truncated, {"final_obs": torch.where(used, final, -5)}


def test_unused_final_choices_may_be_anything():
    spec = env_spec(EnvMaker(UnusedFinals))
    vector, fragment = vector_of(UnusedFinals(4, "cpu"), spec=spec)
    run(vector, [fragment])
    count = int(fragment.num_final)
    assert count
    assert (fragment.final_obs[:count] >= -1).all()


class Dicts(Tensors):
    def __init__(self, num_envs, device):
        super().__init__(num_envs, device)
        self.single_observation_space = gym.spaces.Dict(a=self.single_observation_space)


class DictActions(Tensors):
    def __init__(self, num_envs, device):
        super().__init__(num_envs, device)
        self.single_action_space = gym.spaces.Dict(a=self.single_action_space)


class Masked(Tensors):
    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], {"action_mask": np.ones((self.num_envs, 3), np.int8)}


class NextStep(Tensors):
    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012


def single(num_envs, device):
    return gym.make("CartPole-v1")


@pytest.mark.parametrize(
    ("env", "more", "error", "message"),
    [
        (Tensors, {"num_workers": 2}, ConfigError, "num_workers=2, but Tensors steps tensors"),
        (Tensors, {"wrapper": gym.wrappers.ClipAction}, UsageError, "Leave --wrapper out"),
        (Tensors, {"vectorization": "python"}, ConfigError, "Leave --vectorization out"),
        (Tensors, {"on_env_error": "restart"}, ConfigError, "on_env_error='restart'"),
        (Tensors, {"env_kwargs": {"device": "cpu"}}, UsageError, "gets device from"),
        (Tensors, {"env_kwargs": {"colour": 1}}, UsageError, "does not take the arguments"),
        (Dicts, {}, UnsupportedSpaceError, r"is Dict\(a: Box.*expected one array"),
        (DictActions, {}, UnsupportedSpaceError, r"action .* is Dict\(a: .*expected one array"),
        (Masked, {}, UnsupportedSpaceError, "has an action mask"),
        (NextStep, {}, UsageError, "expected AutoresetMode.SAME_STEP"),
        (single, {}, UsageError, "made an object of class TimeLimit"),
    ],
)
def test_unsupported_settings_are_refused_before_a_run(tmp_path, env, more, error, message):
    with pytest.raises(error, match=message):
        headrace.train(env, run_dir=tmp_path / "r", quiet=True, num_envs=4, num_steps=8, **more)
    assert not (tmp_path / "r/config.json").exists()


def test_masks_can_be_switched_off(tmp_path):
    headrace.train(
        Masked, run_dir=tmp_path / "r", quiet=True, num_envs=4, num_steps=8, total_env_steps=32,
        action_mask="off",
    )  # fmt: skip


def test_tensor_environments_have_no_python_form_and_no_film(tmp_path):
    with pytest.raises(UsageError, match="no single one"):
        EnvMaker(Tensors)()
    run = headrace.train(
        Tensors, run_dir=tmp_path / "r", quiet=True, num_envs=4, num_steps=8, total_env_steps=32
    )
    with pytest.raises(HeadraceError, match="There is no film of Tensors"):
        run.evaluate(episodes=2, video=tmp_path / "film.mp4")


@pytest.fixture
def boats(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    yield "tensor_env:Boats"
    sys.modules.pop("tensor_env", None)


@pytest.mark.more
def test_the_example_learns(tmp_path, boats):
    """At random, boats get -4.1 on average, and never find most buoys."""
    run = headrace.train(
        boats, run_dir=tmp_path / "r", quiet=True, num_envs=256, num_steps=32, seed=1,
        total_env_steps=150_000, lr=1e-3,
    )  # fmt: skip
    played = run.evaluate(episodes=64)
    assert np.mean(played.returns) > -0.5
    assert np.mean(played.lengths) < 35
