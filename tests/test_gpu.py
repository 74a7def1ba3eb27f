"""What only a CUDA device shows. `make gpu` runs these; elsewhere they are left out by name."""

import pytest
import torch

import headrace
from headrace.meter import Meter
from headrace.run.config import resolve
from headrace.run.learner import Learner
from tests.support import inline, plan_for, policy_for, short_cartpole

pytestmark = pytest.mark.gpu


def test_one_update_on_cuda_is_the_cpu_s(tmp_path):
    plan = plan_for(short_cartpole, num_steps=32, num_envs=4, envs_per_vector=4)
    collector = inline(plan)
    collector.publish(policy_for(plan), 0)
    fragments = collector.collect().fragments
    given = {"env": "short", "num_envs": 4, "num_steps": 32, "envs_per_vector": 4}
    given |= {"normalize_obs": True, "normalize_reward": True, "target_kl": 1.0}
    learned = []
    for device in ("cpu", "cuda"):
        learner = Learner(resolve(given), plan.spec, None, torch.device(device), Meter())
        learner.update(fragments, progress=0.0)
        learned.append(learner.policy.cpu().state_dict())
    for name, value in learned[0].items():
        torch.testing.assert_close(value, learned[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_on_cuda_learns_saves_and_resumes(tmp_path, num_workers):
    run = headrace.train(
        "CartPole-v1", device="cuda", num_workers=num_workers, total_env_steps=40_000,
        schedule_env_steps=99_840, run_dir=tmp_path / "run", quiet=True,
    )  # fmt: skip
    assert run.mean_return > 150
    resumed = headrace.resume(tmp_path / "run", total_env_steps=41_000, quiet=True)
    assert resumed.summary["env_steps"] >= 41_000
