"""Two devices of the Trainer: two ranks of Headrace's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from headrace.lightning import load_policy
from headrace.storage.metrics import read_metrics
from tests.lightning import support
from tests.lightning.support import TIMES, differing, weights
from tests.lightning.two_devices import SETTINGS

pytestmark = [*support.pytestmark, pytest.mark.more]
SCRIPT = Path(__file__).parent / "two_devices.py"


def train(folder, max_epochs, *checkpoint):
    """Train in processes that nothing here is forked into; the policy, and each rank's metrics."""
    words = [str(word) for word in (sys.executable, SCRIPT, folder, max_epochs, *checkpoint)]
    env = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    return load_policy(folder / "last.ckpt"), ranks


@pytest.mark.timeout(300)
def test_two_devices_equal_two_learners_to_the_bit_although_they_are_resumed(tmp_path):
    run = headrace.train("CartPole-v1", run_dir=tmp_path / "run", quiet=True, **SETTINGS)
    rows = read_metrics(run.dir)
    of_rank = {name for name in rows[0] if name.startswith("rank")}  # seconds
    for epochs, path in ((2, []), (3, [tmp_path / "last.ckpt"])):
        policy, metrics = train(tmp_path, epochs, *path)
        for ours in metrics:
            assert {k for k in ours if ours[k] != rows[epochs - 1][k]} - of_rank <= TIMES
    assert differing(weights(policy.module), weights(run.policy.module)) == []
