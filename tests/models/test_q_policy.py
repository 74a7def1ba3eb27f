"""Policies of action values: exploration, masks, dueling, and inference in NumPy."""

import pytest
import torch

import headrace
from headrace.algos.action_values import dqn, pqn
from headrace.algos.action_values.q_learning import of_action
from headrace.errors import ConfigError
from headrace.models.action_values.numpy_q_inference import NumpyQActor
from headrace.models.action_values.q_policy import EpsilonGreedy, QPolicy
from headrace.models.action_values.value_distributions import C51, MeanOnly, Quantiles
from headrace.models.fast_paths import actor_for
from headrace.models.policy import Network, PolicyActor, torch_seed
from headrace.spec import PLAIN, EnvSpec, Space
from tests.models.test_numpy_inference import PARTS, acted, observations

SEEN = Space("box", (6,), "float32")
SPEC = EnvSpec("test", SEEN, Space("discrete", (), "int64", nvec=(5,), start=(0,)))
STORED = {"value": ((), torch.float32)}


def policy_with(network=None, epsilon=0.3, spec=SPEC, **options):
    with torch_seed(1):
        policy = QPolicy(spec, network or Network(), epsilon=epsilon, **options)
    if policy.normalize_obs is not None:
        rows = 3 + 2 * torch.randn(100, 6)
        policy.normalize_obs.update(rows.unsqueeze(0), torch.ones(1, 100, dtype=torch.bool))
    return policy


def test_epsilon_is_the_share_of_random_actions():
    head = EpsilonGreedy(4, 0.2)
    values = torch.tensor([0.1, 2.0, -1.0, 0.5]).expand(10_000, 4)
    noise = (torch.arange(10_000) + 0.5).unsqueeze(-1) / 10_000
    action, log_prob = head.sample(values, noise)
    assert torch.bincount(action).tolist() == [500, 8500, 500, 500]
    assert log_prob.exp().unique().tolist() == pytest.approx([0.05, 0.85])
    again, entropy = head.evaluate(values, action)
    assert torch.equal(again, log_prob)
    expected = -(0.85 * torch.tensor(0.85).log() + 3 * 0.05 * torch.tensor(0.05).log())
    assert float(entropy[0]) == pytest.approx(float(expected))
    assert head.mode(values)[0] == 1


def test_what_a_mask_forbids_is_neither_done_nor_counted():
    mask = Space("multi_binary", (5,), "int8")
    seen = Space("dict", parts=(("obs", SEEN), ("mask", mask)))
    spec = EnvSpec("masked", seen, SPEC.action, mask_key="mask")
    policy = policy_with(epsilon=1.0, spec=spec)
    allowed = torch.tensor([0, 1, 0, 1, 0], dtype=torch.int8).expand(200, 5)
    obs = {"obs": torch.randn(200, 6), "mask": allowed}
    noise = (torch.arange(200) + 0.5).unsqueeze(-1) / 200
    out = policy.act(obs, noise)
    assert torch.bincount(out["action"], minlength=5).tolist() == [0, 100, 0, 100, 0]
    values = policy.model(policy.normalized(obs))[0]
    assert torch.equal(out["value"], values[:, [1, 3]].amax(-1))
    assert set(policy.act_greedily(obs)["action"].tolist()) <= {1, 3}


def test_dueling_sums_a_value_and_advantages_of_mean_zero():
    policy = policy_with(dueling=True)
    obs = torch.randn(7, 6)
    values, best = policy(obs)
    model = policy.model
    assert torch.allclose(
        values.mean(-1), model.critic(model.critic_trunk(obs)).squeeze(-1), atol=1e-6
    )
    assert torch.equal(best, values.amax(-1))


@pytest.mark.parametrize("options", [{}, {"dueling": True}, {"layer_norm": True, "dueling": True}])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_numpy_acts_as_torch_does(options, activation):
    network = Network(normalize_obs=True, activation=activation)
    policy = policy_with(network, **options)
    fast = actor_for(policy, SPEC, network)
    assert isinstance(fast, NumpyQActor)
    obs, noise = 3 + 2 * torch.randn(600, 6), torch.rand(600, 1).clamp(1e-6, 1 - 1e-6)
    with torch.no_grad():
        plain = acted(PolicyActor(policy.act), SPEC, obs, noise, 3, STORED)
        values = policy(obs)[0].topk(2).values
    quick = acted(fast, SPEC, obs, noise, 3, STORED)
    torch.testing.assert_close(quick["value"], plain["value"], rtol=1e-6, atol=4e-6)
    clear = values[:, 0] - values[:, 1] > 1e-4  # rounding may decide between equals
    assert clear.sum() > 500
    assert torch.equal(quick["action"][clear], plain["action"][clear])
    assert len(quick["action"].unique()) == 5


@pytest.mark.parametrize("beside", [((PLAIN, SEEN),), PARTS.parts], ids=["plain", "parts"])
def test_numpy_acts_as_torch_does_with_a_mask(beside):
    parts = (*beside, ("mask", Space("multi_binary", (5,), "int8")))
    spec = EnvSpec("masked", Space("dict", parts=parts), SPEC.action, mask_key="mask")
    policy = policy_with(epsilon=0.5, spec=spec, dueling=True)
    fast = actor_for(policy, spec, Network())
    assert isinstance(fast, NumpyQActor)
    obs = {key: part[:600] for key, part in observations(spec.observation).items()}
    obs["mask"][0] = 0  # as in a row that only resets
    noise = torch.rand(600, 1, generator=torch.Generator().manual_seed(5)).clamp(1e-6, 1 - 1e-6)
    with torch.no_grad():
        plain = acted(PolicyActor(policy.act), spec, obs, noise, 3, STORED)
        values = policy(obs)[0].topk(2).values
    quick = acted(fast, spec, obs, noise, 3, STORED)
    torch.testing.assert_close(quick["value"], plain["value"], rtol=1e-6, atol=4e-6)
    clear = values[:, 0] - values[:, 1] > 1e-4
    assert clear.sum() > 500
    assert torch.equal(quick["action"][clear], plain["action"][clear])
    some = obs["mask"].any(1)
    assert obs["mask"].gather(1, quick["action"][:, None])[some].all()
    assert float(quick["value"][0]) == 0


@pytest.mark.parametrize("options", [{}, {"dueling": True}, {"noisy": True, "dueling": True}])
@pytest.mark.parametrize("returns", [MeanOnly(), C51(7, -1.0, 1.0), Quantiles(7)])
def test_the_best_action_has_the_largest_mean(returns, options):
    policy = policy_with(returns=returns, **options)
    obs = torch.randn(50, 6)
    outputs = policy.outputs(obs)
    assert outputs.shape == (50, 5, returns.num_atoms)
    values, largest = policy(obs)
    torch.testing.assert_close(values, returns.mean(outputs))
    assert torch.equal(policy.best(outputs, obs), values.argmax(-1))
    assert torch.equal(largest, values.amax(-1))
    action = torch.arange(50) % 5
    assert torch.equal(of_action(outputs, action), outputs[torch.arange(50), action])
    fast = actor_for(policy, SPEC, Network())
    plain = returns.num_atoms > 1 or "noisy" in options
    assert isinstance(fast, PolicyActor if plain else NumpyQActor)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"distribution": "qr"}, "one value for each action, and no distribution"),
        ({"noisy": True}, "no noise in its weights"),  # without epsilon it would not explore
        ({"dueling": True}, "its own sum of values and advantages"),
    ],
)
def test_a_network_of_ones_own_says_values_alone(tmp_path, setting, words):
    with pytest.raises(ConfigError, match=words):
        headrace.train(
            "CartPole-v1", algo=headrace.DQN(**setting), total_env_steps=1_000,
            model=lambda seen, num: torch.nn.Linear(4, 3), run_dir=tmp_path / "run",
        )  # fmt: skip


def test_a_row_that_allows_nothing_is_worth_nothing():
    """One that only resets; PQN's loss gives it no weight, and squares nothing infinite."""
    seen = Space("dict", parts=(("obs", SEEN), ("mask", Space("multi_binary", (5,), "int8"))))
    policy = policy_with(spec=EnvSpec("masked", seen, SPEC.action, mask_key="mask"))
    obs = {"obs": torch.randn(2, 6), "mask": torch.zeros(2, 5, dtype=torch.int8)}
    assert policy(obs)[1].tolist() == [0.0, 0.0]
    minibatch = {"obs": obs, "action": torch.tensor([0, 1]), "target": torch.zeros(2)}
    total, metrics = pqn.loss(policy, minibatch | {"weight": torch.zeros(2)}, pqn.PQN())
    assert float(total.detach()) == float(metrics["td_error"]) == 0.0


def test_dqn_s_target_is_the_reward_alone_where_nothing_is_allowed_next():
    seen = Space("dict", parts=(("obs", SEEN), ("mask", Space("multi_binary", (5,), "int8"))))
    policy = policy_with(spec=EnvSpec("masked", seen, SPEC.action, mask_key="mask"))
    mask = torch.zeros(2, 5, dtype=torch.int8)
    mask[1, 2] = 1
    rows = {"next_obs": {"obs": torch.randn(2, 6), "mask": mask}}
    rows |= {"reward": torch.tensor([3.0, 3.0]), "discount": torch.tensor([0.5, 0.5])}
    found = dqn.targets(rows, policy=policy, target=policy, cfg=dqn.DQN())["target"]
    value = policy.outputs(rows["next_obs"])[1, 2, 0].detach()
    assert found.tolist() == pytest.approx([3.0, 3.0 + 0.5 * float(value)])


def test_a_policy_of_its_own_kind_acts_by_itself():
    class Mine(QPolicy):
        """Sees something else."""

    policy = Mine(SPEC, Network(), epsilon=0.1)
    assert isinstance(actor_for(policy, SPEC, Network()), PolicyActor)


@pytest.mark.parametrize("net", ["small", "impala", "nature"])
def test_layers_of_images_are_normalized_too(net):
    seen = Space("box", (40, 40, 1), "uint8")
    spec = EnvSpec("images", seen, SPEC.action)
    network = Network(image_net=net, hidden_sizes=())
    policy = policy_with(network, spec=spec, layer_norm=True)
    image = torch.randint(0, 120, (2, 40, 40, 1), dtype=torch.uint8)
    plain = policy_with(network, spec=spec)
    with torch.no_grad():
        twice = [p.model.encoder(2 * image) / p.model.encoder(image) for p in (policy, plain)]
    with torch.no_grad():  # the first convolution and its norm, which the last norm would hide
        begin = policy.model.encoder.net[:2]
        pixels = torch.rand(2, 1, 40, 40)
        torch.testing.assert_close(begin(2 * pixels), begin(pixels), rtol=0.01, atol=0.01)
    active = twice[0].isfinite() & (twice[0] > 0)
    assert float(twice[0][active].median()) == pytest.approx(1, abs=0.1)  # whatever the contrast
    assert float(twice[1][twice[1].isfinite() & (twice[1] > 0)].median()) == pytest.approx(
        2, abs=0.2
    )


@pytest.mark.parametrize("algo", ["dqn", "pqn"])
def test_other_actions_than_one_choice_are_refused(algo, tmp_path):
    with pytest.raises(ConfigError, match=r"learns a value for each action: expected a Discrete"):
        headrace.train("Pendulum-v1", algo=algo, run_dir=tmp_path / "run", total_env_steps=100)
    assert not (tmp_path / "run").exists()
