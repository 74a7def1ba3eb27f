"""Critics that see the state of a game, and agents that see their index."""

import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import headrace
from headrace.algos import ppo
from headrace.config.algorithms import GRADIENTS
from headrace.envs.factory import EnvMaker, env_spec
from headrace.errors import CheckpointError, ConfigError
from headrace.models.custom import num_params
from headrace.models.fast_paths import ACTING, choose
from headrace.models.policy import Network, Policy
from headrace.spec import Agents
from headrace.storage import checkpoint
from tests import python
from tests.envs.games.support import Camp
from tests.envs.games.test_game_state import Relay
from tests.envs.kernels.support import Ring
from tests.marks import repeats
from tests.support import build_policy

BOTH = {"critic": "shared", "agent_ids": True}
GAMES = {"parallel": Camp, "turns": Relay, "kernel": Ring}
SETTINGS = {
    "quiet": True, "num_envs": 4, "num_steps": 16, "seed": 5, "num_minibatches": 4,
    "hidden_sizes": (16,),
}  # fmt: skip
UPDATE = 64


def train(path, game, updates=3, **more):
    vectors = {"envs_per_vector": 4 if game == "kernel" else 2}
    return headrace.train(
        GAMES[game], run_dir=path, total_env_steps=updates * UPDATE,
        **SETTINGS | vectors | BOTH | more,
    )  # fmt: skip


def random_obs(spec, *batch):
    rng = torch.Generator().manual_seed(3)
    return {
        key: torch.randint(0, space.nvec[0], batch, generator=rng) + space.start[0]
        if space.nvec
        else torch.randn(*batch, *space.shape, generator=rng)
        for key, space in spec.observation.leaves
    }


@pytest.fixture(scope="module")
def spec():
    made = env_spec(EnvMaker(Camp, shared_critic=True, agent_ids=True))
    return made.for_agents(Agents(0, 3))


@pytest.mark.parametrize(
    "network",
    [
        Network(),
        Network(hidden_sizes=(), normalize_obs=True),
        Network(core="lstm", core_size=8),
        Network(precision="bf16"),
    ],
    ids=["mlp", "linear, normalized", "lstm", "bf16"],
)
def test_the_value_depends_on_the_state_and_the_action_does_not(spec, network):
    policy, obs = build_policy(spec, network, 3), random_obs(spec, 6, 2)
    if policy.normalize_obs is not None:
        policy.normalize_obs.update(
            policy.seen_by_critic(random_obs(spec, 50, 2)), torch.ones(50, 2, dtype=torch.bool)
        )
    memory = ()
    if network.core != "none":
        memory = torch.zeros(2, network.state_size), torch.zeros(6, 2, dtype=torch.bool)
    params, value = policy(obs, *memory)
    params_again, value_again = policy(obs | {"state": obs["state"] + 1}, *memory)
    assert torch.equal(params, params_again)
    assert (value != value_again).all()
    for key in ("", "agent_id"):
        other = obs | {key: (obs[key] + 1) % 4 if key else obs[key] + 1}
        params_again, value_again = policy(other, *memory)
        assert (params != params_again).any()
        assert (value != value_again).any()
    of_row = policy.one_row({key: part[0] for key, part in obs.items()}, *memory[:1])
    torch.testing.assert_close(of_row[0], params[0])
    torch.testing.assert_close(of_row[1], value[0])


def test_the_state_is_normalized_with_the_rest(spec):
    policy = build_policy(spec, Network(normalize_obs=True), 3)
    obs = random_obs(spec, 500, 2)
    far = obs | {"state": 1000 + 50 * obs["state"]}
    policy.normalize_obs.update(policy.seen_by_critic(far), torch.ones(500, 2, dtype=torch.bool))
    (state,) = policy.game_state(far)
    assert state.mean().abs() < 1e-3
    assert (state.std() - 1).abs() < 1e-2
    assert policy.normalize_obs.of("state").mean.shape == (29,)
    assert set(policy.normalized(far)) == {"", "agent_id"}


def test_the_network_is_the_old_one_where_no_critic_sees_the_game():
    """Only what the critic's first layer gets is another."""
    plain = env_spec(EnvMaker(Camp)).for_agents(Agents(0, 3))
    policy = build_policy(plain, Network(), 3)
    told = env_spec(EnvMaker(Camp, shared_critic=True)).for_agents(Agents(0, 3))
    seeing = build_policy(told, Network(), 3)
    mine, theirs = policy.state_dict(), seeing.state_dict()
    assert mine.keys() == theirs.keys()
    differing = {name for name, tensor in mine.items() if tensor.shape != theirs[name].shape}
    assert differing == {"model.critic_trunk.layers.0.weight"}
    for name in ("model.actor_trunk.layers.0.weight", "model.actor.weight"):
        assert torch.equal(mine[name], theirs[name])


def test_workers_act_by_numpy_and_the_gradient_is_written_out(spec):
    made = env_spec(EnvMaker(Camp, shared_critic=True)).for_agents(Agents(0, 3))
    policy = build_policy(made, Network(), 3)
    path, why = choose(ACTING, Policy.act, policy, made, Network())
    assert (path.name, why) == ("numpy", "")
    path, why = choose(GRADIENTS, ppo.loss, policy, Network(), headrace.PPO())
    assert (path.name, why) == ("manual", "")


def assert_same(one, other):
    for section in ("policy", "learner"):
        for name in one.policies:
            mine = checkpoint.newest(one.dir).tensors(f"{section}_{name}")
            theirs = checkpoint.newest(other.dir).tensors(f"{section}_{name}")
            assert mine.keys() == theirs.keys()
            for key, tensor in mine.items():
                assert torch.equal(tensor, theirs[key]), key


@repeats(
    ("game", "num_workers"),
    [("parallel", 2), ("turns", 0), ("kernel", 1), ("turns", 2), ("parallel", 0), ("kernel", 0)],
    keep=3,
)
def test_runs_are_the_same_with_workers_and_when_resumed(tmp_path, game, num_workers):
    one = train(tmp_path / "one", game, normalize_obs=True, num_workers=0)
    part = train(
        tmp_path / "part", game, updates=2, schedule_env_steps=3 * UPDATE, normalize_obs=True,
        num_workers=num_workers,
    )  # fmt: skip
    again = part.resume(quiet=True, total_env_steps=3 * UPDATE)
    assert again.summary["env_steps"] == 3 * UPDATE
    assert_same(one, again)
    assert one.summary["mean_return"] == again.summary["mean_return"]
    for policy in one.policies.values():
        assert policy.module.normalize_obs.of("state").count > 50


class Secrets:
    """Two agents see one bit each, and are paid by the bit of the other one, whatever they do."""

    possible_agents = ["a_0", "a_1"]  # noqa: RUF012

    def observation_space(self, agent):
        return gym.spaces.Box(-1, 1, (1,), np.float32)

    def action_space(self, agent):
        return gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.agents, self.t = list(self.possible_agents), 0
        return self._obs(), {}

    def step(self, actions):
        one, other = self.bits
        self.t += 1
        cut = dict.fromkeys(self.agents, self.t == 8)
        ends, reward = dict.fromkeys(self.agents, False), self.paid(actions, one, other)
        obs = self._obs()
        if self.t == 8:
            self.agents = []
        return obs, reward, ends, cut, {}

    def paid(self, actions, one, other):
        return {"a_0": float(other), "a_1": float(one)}

    def close(self):
        pass

    def _obs(self):
        self.bits = self.random.choice([-1, 1], 2)
        return {a: np.float32([bit]) for a, bit in zip(self.agents, self.bits, strict=True)}


def losses(path, env, **more):
    seen = []
    headrace.train(
        env, run_dir=path, num_envs=8, num_steps=32, total_env_steps=3_000, lr=2e-2, gamma=0.0,
        hidden_sizes=(16,), seed=2, num_workers=0, quiet=True,
        on_update=lambda _, metrics: seen.append(metrics["value_loss"]), **more,
    )  # fmt: skip
    return float(np.mean(seen[-3:]))


def test_a_shared_critic_knows_what_the_others_see(tmp_path):
    own = losses(tmp_path / "own", Secrets)
    shared = losses(tmp_path / "shared", Secrets, critic="shared")
    assert own > 0.4  # half of a variance of 1
    assert shared < own / 20


class Roles(Secrets):
    """Both see the same; one is paid for the action 0, the other one for 1."""

    def paid(self, actions, one, other):
        return {"a_0": float(actions["a_0"] == 0), "a_1": float(actions["a_1"] == 1)}

    def _obs(self):
        self.bits = 0, 0
        return {agent: np.ones(1, np.float32) for agent in self.agents}


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_agents_that_share_a_policy_do_different_things_by_their_ids(tmp_path, algo):
    more = {"learning_starts": 100, "replay_ratio": 0.25} if algo == "dqn" else {"num_steps": 32}
    settings = {
        "num_envs": 8, "total_env_steps": 2_000, "hidden_sizes": (16,), "lr": 1e-2, "seed": 2,
        "algo": algo, "num_workers": 0, "quiet": True,
    } | more  # fmt: skip
    told = headrace.train(Roles, run_dir=tmp_path / "ids", agent_ids=True, **settings)
    assert told.evaluate(episodes=2).returns == (8.0, 8.0)
    policy, obs = headrace.load_policy(told.dir), np.ones(1, np.float32)
    assert [policy(obs, agent=i) for i in (0, 1)] == [0, 1]
    assert policy(np.ones((3, 1)), agent=[0, 1, 0]).tolist() == [0, 1, 0]
    assert policy(np.ones((3, 1)), agent=1).tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match=r"call it as policy\(obs, agent=0\)"):
        policy(obs)
    for agent in (2, -1, [0, 1], 0.5):
        with pytest.raises(ValueError, match=r"expected one of 0 to 1, or \[1\] of these"):
            policy(obs, agent=agent)
    if algo == "ppo":
        blind = headrace.train(Roles, run_dir=tmp_path / "blind", **settings)
        assert blind.evaluate(episodes=2).returns == (4.0, 4.0)  # one of them is right


@pytest.mark.parametrize("game", GAMES)
def test_policies_are_evaluated_loaded_and_frozen(tmp_path, game):
    run = train(tmp_path / "r", game, eval_every=UPDATE, eval_episodes=2, num_workers=0)
    assert len(run.evaluate(episodes=3).returns) == 3
    name = next(iter(run.policies))
    policy = headrace.load_policy(run.dir, policy=name)
    own = np.zeros(policy.spec.given.shape, np.float32)
    spec = policy.spec
    state = torch.randn(1, *dict(spec.observation.parts)["state"].shape)
    obs = {"": torch.from_numpy(own[None]), "agent_id": torch.tensor([1]), "state": state}
    acted = policy.module.act_greedily(obs)["action"].detach().numpy()
    wanted = policy._codec.to_env(acted)
    np.testing.assert_array_equal(np.ravel(policy(own, agent=1)), wanted.ravel())
    if len(run.policies) > 1:
        frozen = train(tmp_path / "f", game, frozen={name: str(run.dir)}, num_workers=0)
        assert frozen.summary["env_steps"] == 3 * UPDATE
        with pytest.raises(CheckpointError, match="observation: checkpoint Dict"):
            train(tmp_path / "g", game, frozen={name: str(run.dir)}, critic="own", num_workers=0)


def test_the_command_line_trains_evaluates_and_resumes(tmp_path):
    game, here = "mpe2.simple_spread_v3:parallel_env", str(tmp_path / "r")
    for words in (
        ["train", game, "--env-kwargs", "N=2", "max_cycles=5", "--num-envs", "2", "--num-steps",
         "8", "--total-env-steps", "32", "--run-dir", here, "--critic", "shared", "--agent-ids"],
        ["eval", here, "--env", game, "--episodes", "3"],
        ["resume", here, "--env", game, "--total-env-steps", "64"],
    ):  # fmt: skip
        done = python.run(python.command(*words, "--json"))
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["env_steps"] == 64
    config = json.loads((tmp_path / "r/config.json").read_text())["settings"]
    assert (config["critic"], config["agent_ids"]) == ("shared", True)


def test_what_acts_and_learns_is_said(tmp_path, capsys):
    train(tmp_path / "r", "parallel", updates=1, quiet=False, num_workers=0)
    said = capsys.readouterr().out
    assert "act = numpy, gradient = manual " in said
    assert "the critic also sees all agents' observations: Box(29,) float32" in said


class OwnNet(nn.Module):
    """Gets what the actor gets."""

    def __init__(self, spec):
        super().__init__()
        self.layer = nn.Linear(spec.given.size, num_params(spec) + 1)

    def forward(self, obs):
        hidden = self.layer(obs[""]) + obs["agent_id"].unsqueeze(-1)
        return hidden[..., :-1], hidden[..., -1]


def test_a_network_of_one_s_own_gets_ids(tmp_path):
    run = headrace.train(
        Ring, run_dir=tmp_path / "r", model=OwnNet, total_env_steps=UPDATE, agent_ids=True,
        policies={"all": ":"}, **{k: SETTINGS[k] for k in ("quiet", "num_envs", "num_steps")},
    )  # fmt: skip
    assert run.summary["env_steps"] == UPDATE


class Alone(gym.Env):
    observation_space = action_space = gym.spaces.Box(-1, 1, (2,))


@pytest.mark.parametrize(
    ("env", "more", "message"),
    [
        (Alone, {"critic": "shared"}, r"critic='shared' is for games of several .* Alone has one "),
        ("CartPole-v1", {"agent_ids": True}, r"agent_ids=True is for games of .*CartPole-v1 has"),
        ("headrace/CartPole-v1", {"critic": "shared"}, r"is for games of several agents"),
        (Ring, {"critic": "shared", "shared_trunk": True}, r"shared_trunk=True: the actor would"),
        (
            Ring,
            {"critic": "shared", "policies": {"first": {"shared_trunk": True}}},
            r"shared_trunk",
        ),
        (Ring, {"critic": "shared", "model": OwnNet}, r"the network is one of your own"),
        (Secrets, {"critic": "shared", "algo": "dqn"}, r"dqn does not learn a value of the policy"),
        (Secrets, {"critic": "shared", "algo": "pqn"}, r"pqn does not learn a value of the policy"),
        (
            Secrets,
            {"critic": "shared", "algo": "bc", "data": "recorded"},
            r"bc does not learn a value of the policy",
        ),
        (Secrets, {"critic": "all"}, r"critic='all'"),
    ],
)
def test_what_has_no_such_critic_is_refused(tmp_path, env, more, message):
    with pytest.raises(ConfigError, match=message):
        headrace.train(env, run_dir=tmp_path / "r", quiet=True, total_env_steps=64, **more)
    assert not (tmp_path / "r/config.json").exists()


def test_a_policy_without_such_a_network_is_refused():
    spec = env_spec(EnvMaker(Ring, native=True, shared_critic=True, agent_ids=True))
    with pytest.raises(ConfigError, match="a OwnNet has no critic that sees the state of the game"):
        Policy(spec, Network(), OwnNet)
