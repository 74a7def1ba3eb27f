"""The code of docs/kernels.md runs, and the example in it learns."""

import re
from pathlib import Path

import numpy as np
import pytest

import headrace
from examples.catch import HEIGHT, WIDTH, Catch
from headrace.envs.kernels.gym_adapter import KernelGymEnv
from tests import python
from tests.envs.kernels.support import assert_equal, played

ROOT = Path(__file__).parents[3]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/kernels.md").read_text(), re.S)


def test_guide_contains_the_whole_example():
    assert BLOCKS[0] == (ROOT / "examples/catch.py").read_text()
    assert len(BLOCKS[0].splitlines()) < 60


def test_guide_s_registration_code_runs():
    exec(BLOCKS[1], {"Catch": Catch})
    import gymnasium

    assert gymnasium.spec("mine/Catch-v0").max_episode_steps is None


def test_catch_rewards_the_caught_ball():
    env = KernelGymEnv(Catch())
    for seed in range(20):
        obs, _ = env.reset(seed=seed)
        assert obs.tolist() == [obs[0], 1.0, 0.5]
        goal = round(obs[0] * (WIDTH - 1)) if seed % 2 else 0
        for t in range(1, HEIGHT):
            at = round(obs[2] * (WIDTH - 1))
            obs, reward, terminated, truncated, _ = env.step(1 + np.sign(goal - at))
            assert obs[1] == pytest.approx(1 - t / (HEIGHT - 1))
            assert (terminated, truncated) == (t == HEIGHT - 1, False)
            assert reward == (terminated and (1 if obs[0] == obs[2] else -1))
        assert (reward == 1) >= (seed % 2)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_catch_is_equal_compiled_and_interpreted(target):
    assert_equal(played(Catch(), 4, 12, target), played(Catch(), 4, 12, "python"))


@pytest.mark.slow
def test_ppo_learns_catch(tmp_path):
    run = headrace.train(
        Catch, num_envs=256, num_steps=32, total_env_steps=300_000, lr=1e-3, seed=1, quiet=True,
        run_dir=tmp_path / "r",
    )  # fmt: skip
    assert run.mean_return > 0.9  # at random: -0.6


def test_command_line_trains_the_example_in_its_folder(tmp_path):
    done = python.run(
        python.command("train", "catch:Catch", "--num-envs", "8",
         "--num-steps", "16", "--total-env-steps", "128", "--run-dir", str(tmp_path / "r")),
        cwd=ROOT / "examples",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
