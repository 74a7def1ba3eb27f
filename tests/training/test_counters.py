"""What the counters of a run tell at its end."""

import headrace
from tests.support import Counting, short_cartpole

SETTINGS = {"num_envs": 4, "num_steps": 16, "num_minibatches": 2, "num_workers": 0, "seed": 1}


def test_a_run_whose_episodes_all_had_one_return_says_so(tmp_path, capsys):
    def make():
        return Counting(terminate_at=4)

    run = headrace.train(make, run_dir=tmp_path / "run", total_env_steps=320, **SETTINGS)
    assert not any("same return" in line for line in run.summary["advice"])  # 80 episodes
    run = headrace.resume(run.dir, env=make, total_env_steps=640)
    said = "All 160 episodes had the same return, 4: no action seemed better than another."
    assert run.summary["advice"][0].startswith(said)
    assert said in capsys.readouterr().out
    other = headrace.train(
        short_cartpole, run_dir=tmp_path / "other", total_env_steps=6_400, quiet=True, **SETTINGS
    )
    assert other.summary["episodes"] >= 100
    assert not any("same return" in line for line in other.summary["advice"])
