"""Rung 5 for replay: ranks have the rows of their own environments, and learn what one learns."""

import functools

import pytest
import torch

import headrace
from headrace.config.resolve import resolve
from headrace.storage import checkpoint
from tests.algos.reach import Reach
from tests.distributed.ranks_support import on_ranks
from tests.ladder.test_ranks import learn_all
from tests.marks import repeats
from tests.support import inline, learner_for, plan_for, short_cartpole

N, T, UPDATES = 8, 16, 8
CASES = {
    "even": {"n_step": 3},
    "prioritized": {"priority_alpha": 0.6},
    "rainbow": {
        "priority_alpha": 0.6, "n_step": 3, "dueling": True, "noisy": True, "distribution": "c51",
        "v_min": 0.0, "v_max": 100.0,
    },
    "manual": {"arithmetic": "auto"},
    "parts": {"num_accumulation_steps": 3},
    "sac": {"algo": "sac", "n_step": 3},
    "tqc": {"algo": "tqc"},
    "redq": {"algo": "redq", "num_critics": 3, "policy_delay": 2},
    "droq": {"algo": "droq", "policy_delay": 2, "dropout": 0.1},
    "td3": {"algo": "td3", "priority_alpha": 0.6},
    "sac, manual": {"algo": "sac", "arithmetic": "auto"},
    "td3, manual": {"algo": "td3", "arithmetic": "auto", "num_accumulation_steps": 2},
}  # fmt: skip


def learn(ranks, case):
    """Parameters and saved state after some updates, and the metrics of each."""
    given = {"env": "short", "algo": "dqn", "num_envs": N, "num_steps": T, "seed": 5}
    given |= {"envs_per_vector": 2, "batch_size": 6, "learning_starts": 100, "replay_size": 400}
    given |= {"replay_ratio": 0.1, "lr": 1e-3, "arithmetic": "plain"}
    given |= {"hidden_sizes": [32, 32], "activation": "relu", "num_workers": 0}
    given |= {"total_env_steps": N * T * UPDATES} | CASES[case]
    is_dqn = given["algo"] == "dqn"
    settings = resolve(given | ({"target_update_interval": 7} if is_dqn else {}))
    share = N // ranks.size
    plan = plan_for(
        short_cartpole if is_dqn else Reach,
        num_steps=T, num_envs=share, first_env=share * ranks.rank,
        envs_per_vector=2, seed=5, settings=settings,
    )  # fmt: skip
    collector = inline(plan)
    learner = learner_for(settings, plan.spec, ranks, dtype=torch.float64)
    metrics = []
    for update in range(UPDATES):
        collector.publish(learner.policies, learner.version)
        batch = learner.assemble(collector.collect().fragments)
        metrics.append(learner.update(batch, update * N * T, N * T))
    collector.close()
    learner.check_equal()
    saved, _ = next(s for s in learner.sections() if s.name == "learner_default").state()
    policy = learner.policies["default"].state_dict()
    return [{name: t.numpy() for name, t in state.items()} for state in (policy, saved)], metrics


FEW = ("manual", "prioritized")
"""The cases of `make test`: learned without the others."""


@functools.cache
def learned(size, few):
    cases = [(case,) for case in CASES if (case in FEW) == few]
    return on_ranks(size, functools.partial(learn_all, learn_one=learn, cases=cases))


@repeats("case", sorted(CASES, key=lambda case: case not in FEW), keep=len(FEW))
@repeats("size", [2, 4])
def test_more_ranks_learn_the_same_from_replay(size, case):
    (expected, expected_metrics), *_ = (of[case,] for of in learned(1, case in FEW))
    for of in learned(size, case in FEW):
        found, metrics = of[case,]
        for states in zip(found, expected, strict=True):
            assert states[0].keys() == states[1].keys()
            for name, tensor in states[1].items():
                torch.testing.assert_close(states[0][name], tensor, rtol=1e-9, atol=1e-9, msg=name)
        for got, wanted in zip(metrics, expected_metrics, strict=True):
            assert got == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    assert len(expected_metrics[-1]) > 5


@pytest.mark.more
def test_a_run_goes_on_with_another_number_of_learners(tmp_path):
    settings = {
        "num_envs": 4, "num_steps": 16, "envs_per_vector": 2, "seed": 5, "quiet": True,
        "schedule_env_steps": 640,
        "algo": headrace.DQN(lr=1e-3, learning_starts=100, replay_size=400, replay_ratio=0.1,
                             priority_alpha=0.6),
    }  # fmt: skip
    ends, seen = [], []
    for name, first, then in (("one", 1, 1), ("grows", 1, 2), ("shrinks", 2, 1)):
        path = tmp_path / name
        headrace.train(
            "CartPole-v1", run_dir=path, total_env_steps=384, num_learners=first,
            on_update=lambda _, metrics: seen.append(metrics), **settings,
        )  # fmt: skip
        headrace.resume(path, total_env_steps=640, num_learners=then, quiet=True)
        ends.append(checkpoint.newest(path).tensors("learner_default"))
    for other in ends[1:]:
        for name, tensor in ends[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-3, msg=name)
    assert seen[0].keys().isdisjoint({"rank0/replay_s", "rank1/replay_s"})  # of one learner
    assert min(seen[-1][f"rank{rank}/replay_s"] for rank in (0, 1)) > 0
