"""Shared by the tests of Lightning: small runs, with the Trainer and without."""

import contextlib
from multiprocessing import forkserver, resource_tracker

import pytest
import torch
from lightning.pytorch import Trainer

import headrace
from headrace.lightning import Experience, PolicyModule
from tests.support import children, short_cartpole

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),  # Lightning's own, with the newest torch
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

SMALL = {
    "num_envs": 4, "num_steps": 16, "envs_per_vector": 2, "num_workers": 0, "num_minibatches": 4,
    "total_env_steps": 3 * 64, "seed": 3, "hidden_sizes": (8, 8), "arithmetic": "plain",
    "normalize_obs": True, "normalize_reward": True,
}  # fmt: skip
"""Three updates of 64 env steps. Arithmetic as it is: the Trainer has autograd's gradient."""


TIMES = {"wall_s", "env_steps_per_s"}
"""Metrics that no two runs share."""


def experience(env=short_cartpole, **settings):
    return Experience(env, **SMALL | settings)


def trainer(**given):
    """A Trainer that writes nothing and shows nothing; it trains until the run is done."""
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    return Trainer(**{"max_epochs": -1, "accelerator": "cpu"} | quiet | given)


def fit(module, ckpt_path=None, **given):
    """Train a module with its Experience; the Trainer, afterwards."""
    it = trainer(**given)
    it.fit(module, datamodule=module.experience, ckpt_path=ckpt_path)
    return it


def fitted(**settings):
    module = PolicyModule(experience(**settings))
    fit(module)
    return module


def train(run_dir, env=short_cartpole, **settings):
    """The same run without a Trainer."""
    one = {"num_learners": 1, "run_dir": run_dir, "quiet": True}
    return headrace.train(env, **SMALL | one | settings)


def weights(policy):
    """All weights and normalizers."""
    return {name: tensor.clone() for name, tensor in policy.state_dict().items()}


def differing(one, other):
    """Names of the tensors of which not every bit is equal."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@contextlib.contextmanager
def no_process_left():
    """Fail if, at the end, workers are there that were not at the beginning."""
    before = children()
    yield
    # Python's own processes, that only start others, stay.
    server, tracker = forkserver._forkserver, resource_tracker._resource_tracker
    assert children() - before - {server._forkserver_pid, tracker._pid} == set()
