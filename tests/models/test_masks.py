"""Action masks: a masked action is never taken, and the distribution is the masked one."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import headrace
from headrace.envs.factory import EnvMaker, env_spec
from headrace.envs.spaces.specs import read
from headrace.errors import ConfigError, EnvError, UnsupportedSpaceError
from headrace.models.policy import Network
from headrace.spec import EnvSpec, Space
from tests.support import build_policy, inline, plan_for, policies_for, workers
from tests.training.test_api import TINY


class Refusing(gym.Env):
    """Raises on an action that its mask does not allow. The mask is random, and changes."""

    def __init__(self, where="info", nvec=(5,), empty_at=-1):
        self.nvec, self.where, self.empty_at = nvec, where, empty_at
        seen = gym.spaces.Box(0, 99, (1,), np.float32)
        bits = gym.spaces.MultiBinary(sum(nvec))
        self.observation_space = (
            seen if where == "info" else gym.spaces.Dict({"seen": seen, where: bits})
        )
        self.action_space = (
            gym.spaces.Discrete(nvec[0]) if len(nvec) == 1 else gym.spaces.MultiDiscrete(nvec)
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._out()

    def step(self, action):
        for component, choice in enumerate(np.atleast_1d(action)):
            assert self.mask[component][choice], f"{choice} is not allowed by {self.mask}"
        self.t += 1
        obs, info = self._out()
        return obs, 1.0, False, self.t == 9, info

    def _out(self):
        self.mask = [self.np_random.random(n) < 0.4 for n in self.nvec]
        for part in self.mask:
            part[self.np_random.integers(len(part))] = self.t != self.empty_at
            part[:] &= self.t != self.empty_at
        seen = np.array([self.t], np.float32)
        if self.where == "info":
            mask = self.mask[0].astype(np.int8) if len(self.nvec) == 1 else tuple(self.mask)
            return seen, {"action_mask": mask}
        return {"seen": seen, self.where: np.concatenate(self.mask).astype(np.int8)}, {}


KINDS = [
    {"where": "info"},
    {"where": "info", "nvec": (3, 4)},
    {"where": "action_mask"},
    {"where": "legal", "nvec": (3, 4)},
]


@pytest.mark.parametrize("kwargs", KINDS, ids=str)
def test_a_masked_action_is_never_taken_and_workers_make_the_same(kwargs):
    """The environment itself raises if one is."""
    mask = kwargs["where"] if kwargs["where"] == "legal" else "auto"
    plan = plan_for(Refusing, num_steps=64, num_envs=8, envs_per_vector=4, kwargs=kwargs,
                    action_mask=mask)  # fmt: skip
    actions = []
    for make in (inline, workers):
        collector = make(plan)
        collector.publish(policies_for(plan), 0)
        fragments = collector.collect().fragments
        actions.append(torch.cat([f.action.clone() for f in fragments], 1))
        key = plan.spec.mask_key
        stored = torch.cat([f.obs[key][:-1] for f in fragments], 1)
        collector.close()
    assert torch.equal(*actions)
    first = actions[0] if actions[0].dim() == 2 else actions[0][..., 0]
    assert stored.gather(-1, first.unsqueeze(-1)).all()
    assert len(first.unique()) == kwargs.get("nvec", (5,))[0]  # every action is taken sometimes


PARTS = {
    "aim": gym.spaces.Box(-1, 1, (2,)),
    "both": gym.spaces.Tuple([gym.spaces.MultiDiscrete([2, 3]), gym.spaces.Discrete(4, start=7)]),
    "whole": gym.spaces.Box(3, 5, (1,), np.int32),
}
NVEC = (2, 3, 4, 3)


class RefusingParts(Refusing):
    """The same with a Dict of actions; a mask is flat, or has their structure."""

    def __init__(self, where="info", flat=False):
        super().__init__("info", NVEC)
        bits = gym.spaces.MultiBinary
        self.where, self.flat = where, flat
        if where != "info":
            nested = {"both": gym.spaces.Tuple([bits(5), bits(4)]), "whole": bits(3)}
            mask = bits(12) if flat else gym.spaces.Dict(nested)
            self.observation_space = gym.spaces.Tuple(
                [self.observation_space, gym.spaces.Dict({where: mask})]
            )
        self.action_space = gym.spaces.Dict(PARTS)

    def step(self, action):
        assert self.action_space.contains(action), action
        pair, choice = action["both"]
        return super().step([*pair, choice - 7, action["whole"][0] - 3])

    def _out(self):
        where, self.where = self.where, "info"
        obs, info = super()._out()
        self.where = where
        one, two, three, four = self.mask
        nested = {"whole": four, "both": ((one, two), three), "aim": None}
        if where != "info":
            nested["both"] = (np.concatenate([one, two]).astype(np.int8), three.astype(np.int8))
            nested["whole"] = four.astype(np.int8)
        mask = np.concatenate(self.mask).astype(np.int8) if self.flat else nested
        return (obs, {"action_mask": mask}) if where == "info" else ((obs, {where: mask}), info)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("where", ["info", "legal"])
def test_a_masked_choice_of_a_dict_is_never_taken(tmp_path, where, flat):
    """The environment itself raises if one is."""
    mask = "auto" if where == "info" else "1.legal"
    plan = plan_for(RefusingParts, num_steps=64, kwargs={"where": where, "flat": flat},
                    action_mask=mask)  # fmt: skip
    assert plan.spec.mask_key == ("action_mask" if where == "info" else mask)
    collector = inline(plan)
    collector.publish(policies_for(plan), 0)
    fragments = collector.collect().fragments
    choices = torch.cat([f.action for f in fragments], 1)[..., 2:]
    assert [len(column.unique()) for column in choices.flatten(0, 1).T] == list(NVEC)
    collector.close()
    tiny = TINY | {"env_kwargs": {"where": where, "flat": flat}, "action_mask": mask}
    run = headrace.train(RefusingParts, run_dir=tmp_path / "r", total_env_steps=64, **tiny)
    env = RefusingParts(where, flat)
    obs, info = env.reset(seed=0)
    for _ in range(9):
        given = {"action_mask": info["action_mask"]} if where == "info" else {}
        obs, *_, info = env.step(run.policy(obs, **given))


def test_a_mask_that_does_not_fit_the_parts_is_no_mask():
    """Named, it is refused; found by its name alone, it is an observation like any other."""

    class Less(RefusingParts):
        def _out(self):
            obs, info = super()._out()
            return obs, {"action_mask": info["action_mask"][1:]}

    given = {"where": "info", "flat": True}
    assert env_spec(EnvMaker(Less, given)).mask_key == ""
    with pytest.raises(ConfigError, match=r"with 12 entries, one per choice of Dict.* 11 entries"):
        env_spec(EnvMaker(Less, given, action_mask="info"))


def masked_policy(nvec):
    mask = Space("multi_binary", (sum(nvec),), "int8")
    sees = Space("dict", parts=(("", Space("box", (3,), "float32")), ("action_mask", mask)))
    kind, shape = ("discrete", ()) if len(nvec) == 1 else ("multi_discrete", (len(nvec),))
    acts = Space(kind, shape, "int64", nvec=nvec, start=(0,) * len(nvec))
    spec = EnvSpec("x", sees, acts, "action_mask", True)
    policy = build_policy(spec, Network(), seed=0)
    with torch.no_grad():
        policy.model.actor.weight.mul_(100)  # far from uniform
    return policy


@pytest.mark.parametrize("nvec", [(6,), (3, 4)])
def test_log_prob_and_entropy_are_those_of_the_masked_distribution(nvec):
    policy = masked_policy(nvec)
    rng = torch.Generator().manual_seed(0)
    mask = torch.rand(200, sum(nvec), generator=rng) < 0.5
    mask[:, 0] = mask[:, -1] = True
    obs = {"": torch.randn(200, 3, generator=rng), "action_mask": mask.to(torch.int8)}
    action = policy.act(obs, torch.rand(200, len(nvec), generator=rng))["action"]
    log_prob, entropy, _ = policy.evaluate(obs, action)
    logits, _ = policy.model(obs[""])
    expected_log_prob, expected_entropy = 0, 0
    for i, (part, allowed) in enumerate(
        zip(logits.split(list(nvec), -1), mask.split(list(nvec), -1), strict=True)
    ):
        # Written out: probabilities over what is allowed, and nothing else
        p = part.double().exp() * allowed
        p = p / p.sum(-1, keepdim=True)
        choice = action if action.dim() == 1 else action[:, i]
        assert allowed.gather(-1, choice[:, None]).all()
        expected_log_prob += p.gather(-1, choice[:, None])[:, 0].log()
        expected_entropy += -torch.special.xlogy(p, p).sum(-1)
    torch.testing.assert_close(log_prob.double(), expected_log_prob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    (log_prob.sum() + entropy.sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in policy.parameters() if p.grad is not None)
    greedy = policy.act_greedily(obs)["action"]
    best = greedy if greedy.dim() == 1 else greedy[:, 0]
    assert mask.gather(-1, best[:, None]).all()


def test_a_mask_may_have_a_shape_of_its_own():
    grid = Space("multi_binary", (2, 3), "int8")
    sees = Space("dict", parts=(("action_mask", grid), ("x", Space("box", (3,), "float32"))))
    acts = Space("discrete", (), "int64", nvec=(6,), start=(0,))
    policy = build_policy(EnvSpec("x", sees, acts, "action_mask"), Network(), seed=0)
    mask = torch.tensor([[[0, 0, 0], [0, 1, 0]], [[1, 0, 0], [0, 0, 0]]], dtype=torch.int8)
    greedy = policy.act_greedily({"action_mask": mask, "x": torch.zeros(2, 3)})
    assert greedy["action"].tolist() == [4, 0]


def test_masks_are_found_and_can_be_switched_off():
    assert env_spec(EnvMaker(Refusing)).notes == ("actions are masked by info['action_mask']",)
    assert env_spec(EnvMaker(Refusing, action_mask="off")).mask_key == ""
    dicts = EnvMaker(Refusing, {"where": "action_mask"})
    assert env_spec(dicts).seen.describe() == "Dict(seen: Box(1,) float32)"
    # A key of another name is an observation like any other, unless it is named
    assert env_spec(EnvMaker(Refusing, {"where": "legal"})).mask_key == ""
    with pytest.raises(
        ConfigError, match=r"expected the observation 'no' with 5 .*'legal', 'seen'"
    ):
        env_spec(EnvMaker(Refusing, {"where": "legal"}, action_mask="no"))
    with pytest.raises(ConfigError, match="masks are for Discrete"):
        env_spec(EnvMaker("Pendulum-v1", action_mask="info"))
    with pytest.raises(ConfigError, match=r"expected info\['action_mask'\] with 2"):
        env_spec(EnvMaker("CartPole-v1", action_mask="info"))


@pytest.mark.parametrize("mask", [{"a": np.ones(2)}, np.ones(5), {"a": 1, "b": np.ones(3)}])
def test_a_mask_that_lacks_a_part_of_the_actions_is_none(mask):
    acts = spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(3))
    sees = spaces.Box(0, 1, (1,))
    spec = read("x", sees, acts, {"action_mask": mask})
    fits = np.shape(mask) == (5,)
    assert spec.mask_in_info == fits
    if not fits:
        with pytest.raises(ConfigError, match=r"expected info\['action_mask'\] with 5 entries"):
            read("x", sees, acts, {"action_mask": mask}, action_mask="info")


def test_an_observation_that_is_only_a_mask_is_refused():
    bits, actions = spaces.MultiBinary(2), spaces.Discrete(2)
    only = spaces.Dict({"action_mask": bits})
    with pytest.raises(
        UnsupportedSpaceError, match=r"(?s)E is nothing but its .*'action_mask'.*Add"
    ):
        read("E", only, actions, {})
    both = spaces.Dict({"action_mask": bits, "seen": bits})
    with pytest.raises(UnsupportedSpaceError, match="E is nothing but its action mask"):
        read("E", both, actions, {}, drop_obs_keys=("seen",))
    assert read("E", both, actions, {}).mask_key == "action_mask"
    assert not read("E", only, actions, {}, action_mask="off").mask_key


def test_masks_in_two_places_are_refused_where_the_one_in_info_is_asked_for():
    sees = spaces.Dict(action_mask=spaces.MultiBinary(2), x=spaces.Box(0, 1, (1,)))
    arguments = "x", sees, spaces.Discrete(2), {"action_mask": np.ones(2)}
    assert not read(*arguments).mask_in_info
    with pytest.raises(ConfigError, match=r"a key 'action_mask' too.*\n.*--drop-obs-keys"):
        read(*arguments, action_mask="info")
    assert read(*arguments, action_mask="info", drop_obs_keys=("action_mask",)).mask_in_info


def test_a_mask_that_allows_nothing_is_an_environment_s_error():
    plan = plan_for(Refusing, num_steps=8, kwargs={"empty_at": 3})
    collector = inline(plan)
    collector.publish(policies_for(plan), 0)
    with pytest.raises(EnvError, match=r"(allows no action at all|is not allowed by)"):
        collector.collect()
    collector.close()


@pytest.mark.parametrize(
    "algo",
    [
        headrace.PPO(num_minibatches=2),
        headrace.A2C(),
        headrace.DQN(learning_starts=16),
        headrace.SAC(learning_starts=16),
    ],
)
def test_a_masked_run_trains_evaluates_and_its_policy_asks_for_the_mask(tmp_path, algo):
    tiny = {k: v for k, v in TINY.items() if k != "num_minibatches"}
    run = headrace.train(Refusing, run_dir=tmp_path / "r", algo=algo, total_env_steps=64, **tiny)
    assert run.evaluate(episodes=3).lengths == (9, 9, 9)
    mask = np.array([0, 0, 1, 0, 0])
    assert run.policy(np.zeros(1, np.float32), action_mask=mask) == 2
    with pytest.raises(ValueError, match=r"Got action_mask of shape \(2,\); expected \(5,\)"):
        run.policy(np.zeros(1, np.float32), action_mask=np.ones(2, bool))
    with pytest.raises(ValueError, match=r'action_mask=info\["action_mask"\]'):
        run.policy(np.zeros(1, np.float32))
