"""Recurrent cores: what is learned from is what acted, step by step, whatever ends where.

Rungs 2, 5 and 6 with a core are in the ladder's files.
"""

import gymnasium as gym
import numpy as np
import pytest
import torch

import headrace
from headrace import batch
from headrace.algos import a2c, ppo
from headrace.algos.a2c import A2C
from headrace.algos.ppo import PPO
from headrace.algos.targets import advantages, cuts, minibatches, values, vtrace_targets
from headrace.config.algorithms import load_algorithm, name_of_config
from headrace.config.resolve import resolve
from headrace.distributed.ranks import SINGLE_RANK
from headrace.envs.factory import EnvMaker
from headrace.errors import ConfigError
from headrace.evaluation.evaluate import evaluate
from headrace.evaluation.trained_policies import TrainedPolicy
from headrace.models.policy import Network, PolicyActor
from headrace.seeding import derive
from headrace.spec import EnvSpec, Space
from tests.support import (
    Counting,
    build_policy,
    inline,
    learn_once,
    plan_for,
    policies_for,
    policy_for,
    short_cartpole,
)

T = N = 12
SPEC = EnvSpec("x", Space("box", (3,), "float32"), Space("discrete", nvec=(4,), start=(0,)))
CORES = pytest.mark.parametrize("core", ["lstm", "gru"])


def acted(network, ends, turns=1):
    """A fragment that was acted row by row, where `ends[t]` writes what env step t would.

    Args:
        network: of the policy.
        ends: (terminated, truncated, valid), `[T, N]` each.
        turns: how many actors go on from each other.
    """
    policy = build_policy(SPEC, network, seed=1)
    torch.manual_seed(2)
    fragment = batch.allocate(
        batch.columns(SPEC, ppo.PPOAlgorithm.stored_outputs, T, N, network.state_size)
    )
    fragment.obs.normal_()
    fragment.reward.normal_()
    fragment.recurrent_state[0].uniform_(-0.5, 0.5)
    noise = torch.rand(T, N, 1).clamp(1e-3, 1 - 1e-3)
    columns = fragment.terminated, fragment.truncated, fragment.valid
    with torch.no_grad():
        for turn in torch.arange(T).chunk(turns):
            actor = PolicyActor(policy.act)
            act = actor.begin(fragment, noise)
            for t in turn.tolist():
                act(t)
                for column, rows in zip(columns, ends, strict=True):
                    column[t] = rows[t]
            actor.finish(slice(int(turn[0]), int(turn[-1]) + 1))
    cut = (fragment.truncated & ~fragment.terminated).nonzero()
    fragment.num_final[0] = len(cut)
    fragment.final_step[: len(cut)], fragment.final_row[: len(cut)] = cut.T
    fragment.final_obs.normal_()
    return policy, fragment


@torch.no_grad()
def by_a_plain_loop(policy, fragment):
    """Log-probs, values, values of the true next observations, and the states in the end."""
    log_prob, value, next_value = torch.empty(T, N), torch.empty(T, N), torch.empty(T, N)
    final_obs, step, row = fragment.finals()
    state = fragment.recurrent_state[0]
    for t in range(T):
        params, value[t], after = policy.one_row(fragment.obs[t], state)
        log_prob[t] = policy.head.evaluate(params, fragment.action[t])[0]
        state = after["state"].clone()
        of_finals = {}
        for k in (step == t).nonzero().flatten().tolist():
            i = int(row[k])
            of_finals[i] = policy.one_row(final_obs[k : k + 1], state[i : i + 1])[1]
        for i in range(N):
            if fragment.terminated[t, i] or fragment.truncated[t, i] or not fragment.valid[t, i]:
                state[i] = 0
        next_value[t] = policy.one_row(fragment.obs[t + 1], state)[1]
        for i, final_value in of_finals.items():
            next_value[t, i] = final_value
    return log_prob, value, next_value, state


def ends_at(where):
    """Flags `[T, N]`: random ones, or one kind of end: at step i of env i."""
    if where == "random":
        kind = torch.randint(12, (T, N), generator=torch.manual_seed(3))
        return kind == 0, kind == 1, kind != 2
    at, nowhere = torch.eye(T).bool(), torch.zeros(T, N).bool()
    return {
        "terminated": (at, nowhere, ~nowhere),
        "truncated": (nowhere, at, ~nowhere),
        "invalid": (nowhere, nowhere, ~at),
        "nothing": (nowhere, nowhere, ~nowhere),
    }[where]


@CORES
@pytest.mark.parametrize("turns", [1, 5])
@pytest.mark.parametrize("where", ["random", "terminated", "truncated", "invalid", "nothing"])
def test_a_sequence_is_what_was_acted_step_by_step(core, where, turns):
    policy, fragment = acted(Network(core=core, core_size=8), ends_at(where), turns)
    log_prob, value, next_value, last = by_a_plain_loop(policy, fragment)
    state, reset = fragment.recurrent_state[0], fragment.resets()[:-1]
    rows = fragment.obs[:-1]
    theirs, _, of_sequence = policy.evaluate(rows, fragment.action, state, reset)
    flat = policy.evaluate(rows.flatten(0, 1), fragment.action.flatten(), state, reset.flatten())
    for found, expected in (
        (fragment.stored_outputs["log_prob"], log_prob),
        (fragment.stored_outputs["value"], value),
        (fragment.recurrent_state[1], last),
        (theirs, log_prob),
        (flat[0].view(T, N), log_prob),
        (of_sequence, value),
        *zip(values(policy, fragment), (value, next_value), strict=True),
        *zip(values(policy, fragment, value), (value, next_value), strict=True),
    ):
        torch.testing.assert_close(found.detach(), expected, rtol=0, atol=1e-6)
    ratio = (theirs.detach() - fragment.stored_outputs["log_prob"]).exp()
    torch.testing.assert_close(ratio, torch.ones(T, N), rtol=0, atol=1e-6)
    assert value.std() > 0.01


@CORES
def test_v_trace_sees_ratios_of_1_and_the_values_of_the_sequence(core):
    """What APPO and IMPALA learn from at lag 0."""
    policy, fragment = acted(Network(core=core, core_size=8), ends_at("random"))
    rows, clipped = vtrace_targets(policy, fragment, 0.99, 0.95, 1.5, 1.5, SINGLE_RANK)
    torch.testing.assert_close(rows["log_prob_now"], rows["log_prob"], rtol=0, atol=1e-6)
    _, value, _, _ = by_a_plain_loop(policy, fragment)
    torch.testing.assert_close(rows["value"].view(T, N), value, rtol=0, atol=1e-6)
    assert torch.equal(rows["state"], fragment.recurrent_state[0])
    assert float(clipped["rho_clip_fraction"]) == 0


@CORES
@pytest.mark.parametrize(
    ("env", "native"), [(short_cartpole, False), ("CartPole-v1", True)], ids=["python", "native"]
)
def test_fragments_of_real_environments_in_a_row(core, env, native):
    """The second begins with what the first ended with; native: Gymnasium's NEXT_STEP."""
    plan = plan_for(env, num_steps=50, network=Network(core=core), native=native)
    collector, policy = inline(plan), policy_for(plan)
    collector.publish({"default": policy}, 0)
    before, invalid = torch.zeros(4, policy.state_size), 0
    for _ in range(3):
        joined = batch.join(collector.collect().fragments, torch.device("cpu"))
        assert torch.equal(joined.recurrent_state[0], before)
        before = joined.recurrent_state[1]
        found = policy.evaluate(
            joined.obs[:-1], joined.action, joined.recurrent_state[0], joined.resets()[:-1]
        )
        for name, of in (("log_prob", found[0]), ("value", found[2])):
            torch.testing.assert_close(of, joined.stored_outputs[name], rtol=0, atol=1e-6)
        assert bool((joined.terminated | joined.truncated).any())
        invalid += int((~joined.valid).sum())
    collector.close()
    assert (invalid > 0) == native


def test_no_core_costs_no_memory():
    without = batch.columns(SPEC, ppo.PPOAlgorithm.stored_outputs, T, N)
    assert without["recurrent_state"][0] == (2, N, 0)
    assert batch.allocate(without).recurrent_state.numel() == 0
    no_column = {name: column for name, column in without.items() if name != "recurrent_state"}
    assert batch.num_bytes(without) == batch.num_bytes(no_column)


@pytest.mark.parametrize("network", [{"precision": "bf16"}, {"normalize_obs": True}, {}], ids=str)
def test_cores_work_with_what_else_there_is(network):
    """Dict observations, masks, bf16, normalizers; the gradient reaches every parameter."""
    parts = (("action_mask", Space("box", (4,), "int8")), ("x", Space("box", (3,), "float32")))
    sees = Space("dict", parts=parts)
    spec = EnvSpec("x", sees, SPEC.action, "action_mask")
    policy = build_policy(spec, Network(core="lstm", **network), seed=0)
    mask = torch.ones(T, N, 4, dtype=torch.int8)
    mask[..., 2] = 0
    obs, reset = {"action_mask": mask, "x": torch.randn(T, N, 3)}, torch.rand(T, N) < 0.2
    action, state = torch.ones(T, N, dtype=torch.int64), torch.zeros(N, policy.state_size)
    log_prob, entropy, value = policy.evaluate(obs, action, state, reset)
    (log_prob.sum() + value.sum()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.parameters())
    assert float(entropy.detach().max()) < np.log(3) + 1e-3, "one of four choices is not allowed"
    one = {key: part[0] for key, part in obs.items()}
    atol = 0.02 if network.get("precision") == "bf16" else 1e-6
    found = policy.act(one, torch.full((N, 1), 0.5), state)
    torch.testing.assert_close(found["value"], value[0], rtol=0, atol=atol)


@CORES
def test_minibatches_are_whole_runs_of_envs_with_their_states(core):
    policy, fragment = acted(Network(core=core, core_size=8), ends_at("random"))
    order = torch.randperm(N, generator=torch.manual_seed(0)).unsqueeze(0)
    picked = whole(policy, fragment, order, N)
    for m in range(N):
        i = int((order[0] == m).nonzero())
        assert torch.equal(picked[m]["obs"], fragment.obs[:-1, i])
        assert torch.equal(picked[m]["state"], fragment.recurrent_state[0, i : i + 1])
        assert torch.equal(picked[m]["reset"], fragment.resets()[:-1, i])
        log_prob, _, _ = policy.evaluate(
            *(picked[m][k] for k in ("obs", "action", "state", "reset"))
        )
        torch.testing.assert_close(log_prob, picked[m]["log_prob"], rtol=0, atol=1e-6)
        assert float(picked[m]["weight"].sum()) == pytest.approx(1.0)


def whole(policy, fragment, orders, num_minibatches, ranks=SINGLE_RANK):
    """The minibatches of a fragment."""
    rows = advantages(policy, fragment, 0.99, 0.95)
    rows["log_prob"] = fragment.stored_outputs["log_prob"].flatten()
    cut = cuts(rows, orders, num_minibatches, ranks)
    return minibatches(rows, cut, ranks, normalize_advantage=True)


@CORES
def test_advantages_of_runs_are_normalized_over_the_batch(core):
    """A minibatch of one environment keeps what sets it apart from the others."""
    policy, fragment = acted(Network(core=core, core_size=8), ends_at("random"))
    rows = advantages(policy, fragment, 0.99, 0.95)
    advantage, valid = rows["advantage"].clone(), rows["valid"]
    order = torch.arange(N).repeat(3, 1)  # epochs
    picked = whole(policy, fragment, order, N)
    wanted = (advantage - advantage[valid].mean()) / advantage[valid].std(correction=0)
    for m in range(3 * N):
        of_env = wanted.view(-1, N)[:, m % N]
        torch.testing.assert_close(picked[m]["advantage"], of_env, rtol=1e-4, atol=1e-5)


@CORES
def test_one_minibatch_without_clip_is_the_actor_critic_gradient(core):
    """Rung 7 with a core: PPO's page and A2C's, and the loss written out over single envs."""
    network = Network(core=core)
    plan = plan_for(short_cartpole, num_steps=32, network=network)
    collector, policy = inline(plan), policy_for(plan)
    collector.publish({"default": policy}, 0)
    experience = batch.join(collector.collect().fragments, torch.device("cpu"))
    collector.close()
    gradients = []

    def catch(page, cfg):
        def step(minibatch, lr):
            policy.zero_grad()
            total, metrics = page.loss(policy, minibatch, cfg)
            total.backward()
            gradients.append({n: p.grad.clone() for n, p in policy.named_parameters()})
            return metrics

        learn_once(
            load_algorithm(name_of_config(cfg)), policy, experience, cfg,
            lambda epochs: torch.arange(4).repeat(epochs, 1), step=step,
        )  # fmt: skip

    catch(ppo, PPO(num_epochs=1, num_minibatches=1, clip_coef=1e9, gae_lambda=0.9))
    catch(a2c, A2C(gae_lambda=0.9, normalize_advantage=True))
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-6)
        assert gradient.abs().sum() > 0, name


def test_a_core_that_does_not_fit_is_refused():
    given = {"env": "CartPole-v1", "core": "lstm", "num_envs": 8, "num_steps": 10}
    for wanted, fitting in ((4, 4), (5, 4)):  # divides the envs, not the steps
        assert resolve(given | {"num_minibatches": wanted}).algo.num_minibatches == fitting
    for more, match in (
        ({"num_accumulation_steps": 2}, "num_accumulation_steps=2, but with a recurrent core"),
        ({"model": "my:Model"}, "core='lstm', but the network is one of your own"),
        ({"core_size": 0}, r"core_size=0 .*expected at least 1"),
        ({"core": "rnn"}, "core='rnn'"),
    ):
        with pytest.raises(ConfigError, match=match):
            resolve(given | more)


class Flipping(gym.Env):
    """Random numbers to see; pays the action; cut off after 50 steps."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._seen(), {}

    def step(self, action):
        self.t += 1
        return self._seen(), float(action), False, self.t == 50, {}

    def _seen(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)


@CORES
def test_a_trained_policy_remembers_until_it_is_reset(core):
    """`evaluate` plays what calling the policy by hand does, over several of its fragments."""
    plan = plan_for(Flipping, network=Network(core=core))
    policy = TrainedPolicy(plan.spec, policy_for(plan), next(iter(plan.policies.values())).network)
    found = evaluate(policy, EnvMaker(Flipping), episodes=70, seed=4)
    env, returns = Flipping(), []
    quota = 3  # env 0 plays the first three
    for episode in range(quota):
        policy.reset()
        obs, _ = env.reset(seed=derive(4, "eval", 0, episode))
        total, over = 0.0, False
        while not over:
            obs, reward, _, over, _ = env.step(policy(obs))
            total += reward
        returns.append(total)
    assert list(found.returns[:quota]) == returns
    assert len(set(found.returns)) > 5, "what is seen and remembered must play a part"


def test_a_trained_policy_s_memory_is_one_row_for_each_of_a_batch():
    plan = plan_for(Flipping, network=Network(core="gru"))
    policy = TrainedPolicy(plan.spec, policy_for(plan), next(iter(plan.policies.values())).network)
    module = policy.module
    obs = torch.randn(4, 3, 2)
    state = torch.zeros(3, 64)
    with torch.no_grad():
        for t in range(4):
            if t == 2:
                policy.reset([False, True, False])
                state[1] = 0
            params, _, after = module.one_row(obs[t], state)
            state = after["state"]
            assert policy(obs[t].numpy()).tolist() == params.argmax(-1).tolist()
            assert torch.equal(policy._memory, state)
    with pytest.raises(ValueError, match=r"(?s)Got 2 observations.*remembers 3.*reset"):
        policy(np.zeros((2, 2), np.float32))
    with pytest.raises(ValueError, match="3 rows"):
        policy.reset([True])
    policy.reset()
    assert isinstance(policy(np.zeros(2, np.float32)), int)
    assert len(policy._memory) == 1


def test_an_episode_begun_anew_forgets(tmp_path):
    """A resumed run whose episodes cannot be brought back begins them with an empty memory."""
    settings = {
        "num_envs": 4, "num_steps": 32, "envs_per_vector": 2, "quiet": True, "replay_limit_s": 0.0,
        "network": Network(core="gru"), "algo": PPO(num_minibatches=2), "env": Counting,
        "run_dir": tmp_path / "run",
    }  # fmt: skip
    headrace.train(**settings, total_env_steps=128)
    plan = plan_for(Counting, network=Network(core="gru"), num_steps=32)
    state = headrace.storage.checkpoint.newest(tmp_path / "run").arrays("workers")
    assert abs(state["vector0.core_state.0"]).min() > 0, "all are in the middle of an episode"
    collector = inline(plan, state=state)
    collector.publish(policies_for(plan), 0)
    for fragment in collector.collect().fragments:
        assert not fragment.recurrent_state[0].any()
        assert fragment.recurrent_state[1].any()
    collector.close()


def test_ppo_steps_with_a_core_change_every_parameter():
    plan = plan_for(short_cartpole, num_steps=32, network=Network(core="lstm"))
    collector, policy = inline(plan), policy_for(plan)
    collector.publish({"default": policy}, 0)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    experience = batch.join(collector.collect().fragments, torch.device("cpu"))
    collector.close()
    cfg = PPO(num_minibatches=2)
    learn_once(
        ppo.PPOAlgorithm(),
        policy,
        experience,
        cfg,
        lambda epochs: torch.arange(4).repeat(epochs, 1),
    )
    assert all(not torch.equal(p, before[name]) for name, p in policy.named_parameters())
