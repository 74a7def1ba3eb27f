"""Rung 5: the same environments, shared out to more ranks, learn the same."""

import functools
import hashlib
import itertools

import pytest
import torch

from headrace.config.resolve import resolve
from tests.distributed.ranks_support import on_ranks
from tests.marks import repeats
from tests.support import inline, learner_for, plan_for

N, T, ENVS_PER_VECTOR = 64, 16, 16
ARITHMETIC = {"float64": (torch.float64, 10, 1e-9), "float32": (None, 1, 1e-5)}
"""Name -> dtype, updates, largest difference."""
CASES = list(
    itertools.product(("ppo", "a2c"), ("CartPole-v1", "Pendulum-v1"), ARITHMETIC, (1, 2, 4))
) + [(algo, "CartPole-v1", "float64", 1) for algo in ("appo", "impala")]
# With a recurrent core: fewer envs, in minibatches of 2, of which most ranks have none
CORE_N, CORE_UPDATES = 16, 3
CORES = [
    ("ppo", "CartPole-v1", "float64", "lstm"),
    ("ppo", "CartPole-v1", "float32", "lstm"),
    ("ppo", "Pendulum-v1", "float64", "gru"),
    ("a2c", "CartPole-v1", "float64", "gru"),
    ("appo", "CartPole-v1", "float64", "lstm"),
    ("impala", "CartPole-v1", "float64", "gru"),
]


def learn_with_core(ranks, algo, env, arithmetic, core):
    """The same with a recurrent core."""
    given = {"num_envs": CORE_N, "envs_per_vector": 4, "core": core, "core_size": 16}
    given |= {"num_minibatches": 8} if algo in ("ppo", "appo") else {}
    return learn(ranks, algo, env, arithmetic, 1, given)


def learn(ranks, algo, env, arithmetic, num_parts, more=None):
    """The parameters after some updates, their hash, and the metrics of the last."""
    dtype, updates, _ = ARITHMETIC[arithmetic]
    updates = min(updates, CORE_UPDATES) if more else updates
    given = {"env": env, "algo": algo, "num_envs": N, "num_steps": T, "seed": 5}
    given |= {"envs_per_vector": ENVS_PER_VECTOR, "num_accumulation_steps": num_parts}
    if algo in ("ppo", "appo"):
        given |= {"num_epochs": 2, "num_minibatches": 4, "lr": 1e-3, "ent_coef": 0.01}
    if env == "Pendulum-v1":
        given |= {"normalize_obs": True, "normalize_reward": True}
    settings = resolve(given | (more or {}))
    share = settings.run.num_envs // ranks.size
    plan = plan_for(
        env, num_steps=T, num_envs=share, first_env=share * ranks.rank,
        envs_per_vector=settings.run.envs_per_vector, seed=5, network=settings.network,
    )  # fmt: skip
    collector = inline(plan)
    learner = learner_for(settings, plan.spec, ranks, dtype=dtype)
    for _ in range(updates):
        collector.publish(learner.policies, learner.version)
        metrics = learner.update(learner.assemble(collector.collect().fragments), 0)
    collector.close()
    learner.check_equal()
    policy = learner.policies["default"]
    if policy.normalize_obs is not None:
        assert policy.normalize_obs.moments[0].var.dtype == torch.float64
    state = {name: tensor.numpy() for name, tensor in policy.state_dict().items()}
    digest = hashlib.sha256(b"".join(array.tobytes() for array in state.values())).hexdigest()
    return state, digest, metrics


def learn_nested(ranks, arithmetic):
    """The same with a Tuple observation and a Dict of actions."""
    given = {"num_envs": CORE_N, "envs_per_vector": 4, "normalize_obs": True}
    return learn(ranks, "ppo", "tests.support:Nested", arithmetic, 1, given)


def learn_all(ranks, learn_one, cases):
    return {case: learn_one(ranks, *case) for case in cases}


@functools.cache
def learned(size, learn_one, cases):
    """What each rank learned in each case; all cases by the same processes."""
    return on_ranks(size, functools.partial(learn_all, learn_one=learn_one, cases=cases))


FEW = (("ppo", "CartPole-v1", "float64", 1), ("a2c", "Pendulum-v1", "float64", 2))
"""The cases of `make test`: learned without the others."""


def learned_with(case, size, few, cases):
    return few if case in few and size == 2 else tuple(cases)


@repeats(
    "case",
    sorted(CASES, key=lambda case: case not in FEW),
    keep=len(FEW),
    ids=lambda case: "-".join(map(str, case)),
)
@repeats("size", [2, 4])
def test_more_ranks_learn_the_same(size, case):
    cases = learned_with(case, size, FEW, CASES)
    *words, _ = case
    alone = tuple(dict.fromkeys((*of[:3], 1) for of in cases))
    one = learned(1, learn, alone)[0][(*words, 1)]
    assert_same(one, [rank[case] for rank in learned(size, learn, cases)], ARITHMETIC[case[2]][2])


@pytest.mark.more
@repeats("case", CORES, ids="-".join)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_more_ranks_learn_the_same_with_a_recurrent_core(size, case):
    cases = learned_with(case, size, (CORES[0],), CORES)
    ranks = [rank[case] for rank in learned(size, learn_with_core, cases)]
    assert_same(learned(1, learn_with_core, cases)[0][case], ranks, ARITHMETIC[case[2]][2])


@pytest.mark.more
@repeats("arithmetic", ["float64", "float32"])
def test_two_ranks_learn_the_same_from_nested_observations_and_actions(arithmetic):
    one, two = (learned(size, learn_nested, ((arithmetic,),)) for size in (1, 2))
    ranks = [rank[arithmetic,] for rank in two]
    assert_same(one[0][arithmetic,], ranks, ARITHMETIC[arithmetic][2])


def assert_same(one, ranks, largest_difference):
    alone, _, metrics_alone = one
    assert len({digest for _, digest, _ in ranks}) == 1
    together, _, metrics = ranks[0]
    for name, array in alone.items():
        assert abs(together[name] - array).max() <= largest_difference, name
    for name, value in metrics_alone.items():
        assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    assert metrics["grad_norm"] > 1e-3
