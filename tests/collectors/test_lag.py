"""Sampling beside learning: a fixed lag of 1, and workers that never stop."""

import itertools
import os
import signal
import time

import pytest
import torch

import headrace
from headrace.collectors.asynchronous import AsynchronousCollector
from headrace.config.resolve import resolve
from headrace.errors import ConfigError
from headrace.models.policy import Network
from headrace.seeding import derive
from headrace.storage import checkpoint
from headrace.storage.metrics import read_metrics
from tests.collectors.test_worker_pool import Sleepy
from tests.faults.test_env import assert_balanced, assert_same_run
from tests.ladder.test_collect import equal
from tests.marks import repeats
from tests.support import (
    Counting,
    inline,
    learner_for,
    never,
    plan_for,
    policies_for,
    policy_for,
    short_cartpole,
    workers,
)

SMALL = {
    "num_envs": 4, "envs_per_vector": 2, "num_steps": 16, "total_env_steps": 4 * 16 * 12,
    "quiet": True, "check_ranks": 1,
}  # fmt: skip


def train(path, algo="ppo", num_workers=2, **more):
    return headrace.train(
        "CartPole-v1", algo=algo, run_dir=path, num_workers=num_workers, **SMALL | more
    )


def at_lag_1(collector, plan, batches):
    """What the loop does: the next batch is begun before the weights are new."""
    collector.publish(policies_for(plan, seed=0), 0)
    for k in range(batches):
        collected = collector.collect()
        yield [torch.utils._pytree.tree_map(torch.clone, vars(f)) for f in collected.fragments]
        collector.release_batch(more=k + 1 < batches)
        collector.publish(policies_for(plan, seed=k + 1), k + 1)
    collector.halt()
    ledger = collector.ledger
    collector.close()
    assert (ledger.lost, ledger.collected) == (0, batches * plan.num_steps * plan.num_envs)


@pytest.mark.more
def test_lag_1_batch_is_made_with_the_weights_of_two_updates_before():
    plan = plan_for(short_cartpole, num_steps=20, num_envs=6, lag=1)
    # At lag 0, with the weights that each batch of lag 1 has: the same to the bit.
    reference = inline(plan_for(short_cartpole, num_steps=20, num_envs=6))
    made = [at_lag_1(make(plan), plan, 5) for make in (inline, lambda p: workers(p, 3))]
    for k, both in enumerate(zip(*made, strict=True)):
        version = max(0, k - 1)
        reference.publish(policies_for(plan, seed=version), version)
        expected = reference.collect().fragments
        for fragments in both:
            for ours, theirs in zip(fragments, expected, strict=True):
                assert ours["policy_version"].unique().tolist() == [version]
                equal(type(theirs)(**ours), theirs)
    reference.close()


@repeats("algo", ["ppo", "a2c"])
def test_lag_1_training_is_repeated_to_the_bit_with_any_workers(tmp_path, algo):
    runs = [
        train(tmp_path / str(i), algo, num_workers=w, lag=1) for i, w in enumerate((2, 2, 1, 0))
    ]
    at_0 = train(tmp_path / "at 0", algo)
    for other in runs[1:]:
        assert_same_run(runs[0], other)
        assert_balanced(other.summary)
        assert other.summary["lost_env_steps"] == 0
    with pytest.raises(AssertionError):
        assert_same_run(runs[0], at_0)  # it is not what lag 0 gives
    for run in runs:
        rows = read_metrics(run.dir)
        assert [row["lag_learning_max"] for row in rows] == [0] + [1] * 11
        assert all(row["lag_acting_max"] <= 1 for row in rows)


@repeats(("algo", "lag"), [("ppo", 1), ("appo", 2)])
def test_signal_gives_up_the_batch_under_way_and_resume_goes_on(tmp_path, algo, lag):
    def interrupt(iteration, metrics):
        if iteration == 5:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", algo, lag=lag, on_update=interrupt)
    saved = checkpoint.newest(tmp_path / "run").manifest["counters"]
    ledger = saved["ledger"]
    assert saved["env_steps"] == 5 * 64 == ledger["collected"] - ledger["lost"]
    assert (ledger["lost"] > 0) or algo == "ppo"  # it may not have begun yet
    resumed = headrace.resume(tmp_path / "run", quiet=True)
    assert_balanced(resumed.summary)
    assert resumed.summary["env_steps"] == SMALL["total_env_steps"]


def nonstop(plan, num_workers=2, stop=never, say=print):
    return AsynchronousCollector(plan, num_workers, stop, say=say)


def nonstop_plan(env, lag=2, **more):
    return plan_for(env, lag=lag, asynchronous=True, **more)


def test_asynchronous_fragments_equal_those_of_batches_in_turn():
    """With weights that stay, each vector's n-th is the n-th, whoever is ahead, or was killed."""
    plan = nonstop_plan(short_cartpole, num_envs=6)
    reference, collector = inline(plan_for(short_cartpole, num_envs=6)), nonstop(plan, 3)
    policy, expected, seen = policy_for(plan), {v: [] for v in range(3)}, dict.fromkeys(range(3), 0)
    reference.publish({"default": policy}, 0)
    collector.publish({"default": policy}, 0)
    for _ in range(6):
        for v, fragment in enumerate(reference.collect().fragments):
            copied = torch.utils._pytree.tree_map(torch.clone, vars(fragment))
            expected[v].append(type(fragment)(**copied))
    reference.close()
    batches, until = 0, time.monotonic() + 60
    while min(seen.values()) < 6 and time.monotonic() < until:
        fragments, batches = collector.collect().fragments, batches + 1
        assert len(fragments) == 3
        if batches in (1, 2):
            os.kill(collector.workers[batches].child.process.pid, signal.SIGKILL)
        for fragment in fragments:
            v = int(fragment.env_id[0]) // 2
            if seen[v] < 6:
                equal(fragment, expected[v][seen[v]])
            seen[v] += 1
        collector.release_batch(more=True)
    collector.halt()
    assert collector.ledger.collected == batches * 6 * 16 + collector.ledger.lost
    assert collector.ledger.restarts == 2
    collector.close()
    assert min(seen.values()) >= 6


def slow():
    """Steps that are long enough for weights to change between them."""
    return Sleepy(0.002)


@repeats("arithmetic", ["plain", "auto"])
def test_each_step_has_the_version_of_its_weights(arithmetic):
    network = Network(arithmetic=arithmetic)
    plan = nonstop_plan(slow, num_steps=64, network=network)
    collector, policies = nonstop(plan), {}
    mixed, last = 0, dict.fromkeys(range(4), 0)
    for version in itertools.count():
        policies[version] = policy_for(plan, seed=version)
        collector.publish({"default": policies[version]}, version)
        if version % 5:
            looks = [True, False]  # one: 0.1 s, or until a fragment is there
            collector.run_until(looks.pop)
            continue
        for fragment in collector.collect().fragments:
            stamps = fragment.policy_version
            assert torch.equal(stamps, stamps.sort(0).values)  # it never goes back
            assert (stamps == stamps[:, :1]).all()
            env = int(fragment.env_id[0])
            assert last[env] <= int(stamps[0, 0])
            last[env] = int(stamps[-1, 0])
            versions = stamps[:, 0].unique().tolist()
            mixed += len(versions) > 1
            for of in versions:
                rows = stamps[:, 0] == of
                log_prob, _, value = policies[of].evaluate(
                    fragment.obs[:-1][rows], fragment.action[rows]
                )
                out = fragment.stored_outputs
                torch.testing.assert_close(log_prob, out["log_prob"][rows], rtol=0, atol=4e-6)
                torch.testing.assert_close(value, out["value"][rows], rtol=0, atol=4e-6)
        if mixed >= 3:
            break
    collector.close()


class OneStops(Counting):
    """The env of one seed never answers in a worker: it reads what nobody writes."""

    def __init__(self, pipe, learner, stuck):
        super().__init__()
        self.pipe, self.learner, self.stuck, self.first = pipe, learner, stuck, None

    def reset(self, *, seed=None, options=None):
        self.first = seed if self.first is None else self.first
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if os.getpid() != self.learner and self.first == self.stuck:
            self.pipe.read_text()
        return super().step(action)


@pytest.mark.more
def test_asynchronous_learner_does_not_wait_for_a_hanging_worker(tmp_path):
    """One of three workers hangs in its first step: batches are made of what the others bring."""
    os.mkfifo(tmp_path / "pipe")
    stuck = {"pipe": tmp_path / "pipe", "learner": os.getpid(), "stuck": derive(3, "env", 0, 0)}
    plan = nonstop_plan(OneStops, lag=1, num_envs=6, kwargs=stuck)
    collector = nonstop(plan, 3)
    collector.publish(policies_for(plan), 0)
    for _ in range(5):
        collected = collector.collect()
        envs = {int(fragment.env_id[0]) for fragment in collected.fragments}
        assert len(collected.fragments) == 3
        assert envs <= {2, 4}
        assert collected.metrics["queue_depth"] <= 1
        collector.release_batch(more=True)
    collector.close()


def test_workers_too_far_ahead_wait_and_drop_nothing():
    plan = nonstop_plan(Counting, lag=2)
    collector = nonstop(plan)
    collector.publish(policies_for(plan), 0)
    collector.release_batch(more=True)
    collector.run_until(lambda: not collector.pending)  # until all memory is full
    assert len(collector._done) == 2 * 3
    depths, starts = [], {0: [], 2: []}
    for _ in range(3):
        collected = collector.collect()
        depths.append(collected.metrics["queue_depth"])
        for fragment in collected.fragments:
            starts[int(fragment.env_id[0])].append(int(fragment.obs[0, 0, 0]))
    assert depths[0] == 2  # batches
    for of_vector in starts.values():
        assert of_vector == [16 * i for i in range(len(of_vector))]
    collector.close()


def learned(algo, plan, **more):
    """Parameters after one update of a batch that this very policy has made."""
    given = {"env": "CartPole-v1", "algo": algo, "num_envs": 4, "num_steps": 32, "seed": 3}
    settings = resolve(given | {"lag": 0, "envs_per_vector": 2} | more)
    learner = learner_for(settings, plan.spec)
    collector = inline(plan)
    collector.publish(learner.policies, 0)
    metrics = learner.update(learner.assemble(collector.collect().fragments), 0)
    collector.close()
    return dict(learner.policies["default"].state_dict()), metrics


@pytest.mark.parametrize(
    ("corrects", "plain", "clip"),
    [("appo", "ppo", 0.0), ("appo", "ppo", 1.0), ("impala", "a2c", 1.0)],
)
def test_rung_7_at_lag_0_vtrace_learns_what_gae_1_does(corrects, plain, clip):
    plan = plan_for(short_cartpole, num_steps=32)
    more = {"gae_lambda": 1.0, "lr": 1e-3, "gamma": 0.98, "normalize_advantage": True}
    if plain == "ppo":
        more |= {"num_epochs": 2, "num_minibatches": 4}
    ours, metrics = learned(corrects, plan, **more, adam_eps=1e-5, rho_clip=clip, c_clip=clip)
    theirs, _ = learned(plain, plan, **more)
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=0, atol=2e-5)
    # Ratios are 1 but for rounding, above or below; a clip of 0 cuts none.
    assert metrics["rho_clip_fraction"] < (0.9 if clip else 1e-9)
    assert metrics["grad_norm"] > 1e-3


@repeats("algo", ["appo", "impala"])
def test_asynchronous_training_ends_and_measures_lag(tmp_path, algo):
    run = train(tmp_path / "run", algo, lag=2, normalize_reward=True)
    assert_balanced(run.summary)
    assert run.summary["env_steps"] == SMALL["total_env_steps"]
    rows = read_metrics(run.dir)
    for row in rows:
        assert 0 <= row["queue_depth"] <= 2
        assert 0 <= row["lag_learning"] <= row["lag_learning_max"]
        assert row["lag_acting"] <= row["lag_acting_max"]
        assert row["workers_wait_s"] >= 0
        assert 0 <= row["rho_clip_fraction"] <= 1 and 0 <= row["c_clip_fraction"] <= 1
    assert any(row["lag_learning"] > 0 for row in rows)
    resumed = headrace.resume(tmp_path / "run", total_env_steps=2000, quiet=True)
    assert_balanced(resumed.summary)
    assert resumed.summary["env_steps"] == 2048 - 2048 % 64


@pytest.mark.more
def test_each_of_many_ranks_has_asynchronous_workers(tmp_path):
    run = train(tmp_path / "run", "appo", lag=1, num_learners=2)
    assert_balanced(run.summary)
    assert run.summary["env_steps"] == SMALL["total_env_steps"]


def two_batches(plan, policy):
    """Each a list of one fragment of every vector, copied."""
    collector, batches = inline(plan), []
    collector.publish({"default": policy}, 0)
    for _ in range(2):
        fragments = collector.collect().fragments
        copies = (torch.utils._pytree.tree_map(torch.clone, vars(f)) for f in fragments)
        batches.append([type(fragments[0])(**copy) for copy in copies])
    collector.close()
    return batches


def learner_of_mixed(**more):
    """A learner, and its plan, at a lag at which batches may have a vector twice."""
    given = {"env": "CartPole-v1", "algo": "appo", "num_envs": 4, "num_steps": 16, "num_workers": 2}
    settings = resolve(given | {"envs_per_vector": 2, "lag": 2} | more)
    plan = plan_for(short_cartpole, network=settings.network)
    return learner_for(settings, plan.spec).learners["default"], plan


def test_appo_learns_from_ratios_to_the_policy_between_acting_and_target():
    learner, plan = learner_of_mixed(num_epochs=1, num_minibatches=1)
    fragments, _ = two_batches(plan, learner.policy)
    batch = learner.assemble(fragments)
    with torch.no_grad():
        learner.policy.model.actor.bias[0] += 0.5  # the target policy: newer than the data
        now, _, _ = learner.policy.evaluate(batch.obs[:-1], batch.action)
    log_ratio = (now - batch.stored_outputs["log_prob"]) / 2
    expected = (log_ratio.exp() - 1 - log_ratio)[batch.valid].mean()
    metrics = learner.update(batch, 0)
    assert metrics["approx_kl"] == pytest.approx(expected.item(), rel=1e-4)
    assert expected > 1e-3


def test_reward_normalization_follows_each_env_through_a_batch_of_mixed_fragments():
    (in_turn, plan), (mixed, _) = (learner_of_mixed(normalize_reward=True) for _ in range(2))
    batches = two_batches(plan, in_turn.policy)
    for fragments in batches:
        in_turn._update_normalizers(in_turn.assemble(fragments), 0.99)
    # A batch of one vector's two fragments, then one of the other's.
    for fragments in zip(*batches, strict=True):
        mixed._update_normalizers(mixed.assemble(list(fragments)), 0.99)
    assert torch.equal(in_turn.return_so_far, mixed.return_so_far)
    for name, tensor in in_turn.policy.normalize_reward.state_dict().items():
        torch.testing.assert_close(tensor, mixed.policy.normalize_reward.state_dict()[name])


def test_recurrent_minibatches_are_even_when_a_vector_comes_twice():
    more = {"core": "gru", "num_minibatches": 4, "num_epochs": 3, "total_env_steps": 64}
    learner, plan = learner_of_mixed(**more)
    sizes, step = [], learner.optimizers["policy"].step

    def noted(minibatch, lr):
        sizes.append(int((minibatch["weight"] > 0).sum()))
        return step(minibatch, lr)

    learner.optimizers["policy"].step = noted
    first_of_both, _ = zip(*two_batches(plan, learner.policy), strict=True)
    learner.update(learner.assemble(list(first_of_both)), 0)
    assert sizes == [16] * 12


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"lag": -2}, r"lag=-2 .*expected at least 0 and at most 100 \(or -1: what is usual"),
        ({"algo": "appo", "lag": 101}, r"lag=101 .*expected at least 0 and at most 100"),
        ({"algo": "ppo", "lag": 2}, r"lag=2, but ppo does not correct .* --algo appo or impala"),
        ({"algo": "appo", "lag": 2, "num_workers": 0}, "there are none: num_workers=0"),
        ({"algo": "appo", "rho_clip": -1.0}, "rho_clip=-1.0 .given.: expected at least 0"),
    ],
)
def test_impossible_lags_are_refused(given, says):
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        resolve({"env": "CartPole-v1"} | given)


@pytest.mark.parametrize(
    ("given", "lag"),
    [
        ({"algo": "appo", "num_workers": 2}, 1),
        ({"algo": "impala", "num_workers": 0}, 0),
        ({"num_workers": 2}, 0),
    ],
)
def test_default_lag_follows_algorithm_and_workers(given, lag):
    settings = resolve({"env": "Taxi-v3", "num_envs": 4} | given)
    assert settings.run.lag == lag
    assert settings.source["lag"] == "follows algo and num_workers"
