"""Training by the Trainer: the same weights as without it, and what users change of it."""

import csv
import threading

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn

import headrace
from headrace.errors import NonFiniteError
from headrace.lightning import Experience, PolicyModule
from headrace.storage.metrics import read_metrics
from tests.lightning import support
from tests.lightning.support import (
    SMALL,
    TIMES,
    differing,
    experience,
    fit,
    fitted,
    no_process_left,
    train,
    weights,
)
from tests.marks import repeats
from tests.support import short_cartpole

pytestmark = support.pytestmark


@repeats("num_workers", [0, 2])
def test_weights_and_metrics_equal_those_of_headrace_train_to_the_bit(tmp_path, num_workers):
    given = {"num_workers": num_workers, "lr_schedule": "linear", "ent_schedule": "linear"}
    module = fitted(**given)
    run = train(tmp_path / "run", **given)
    assert differing(weights(module.policy), weights(run.policy.module)) == []
    last = read_metrics(run.dir)[-1]
    ours = module.experience.metrics
    assert {k for k in ours if ours[k] != last[k]} <= TIMES
    assert ours["env_steps"] == 192


ONE_STEP = {k: v for k, v in SMALL.items() if k != "num_minibatches"}
OTHERS = {
    "a2c": ONE_STEP | {"algo": "a2c"},
    "target_kl": SMALL | {"target_kl": 1e-4, "num_epochs": 8, "lr": 3e-3},
    "recurrent": SMALL | {"core": "lstm", "core_size": 8, "num_minibatches": 2},
    "appo": SMALL | {"algo": "appo", "lag": 0},
    "impala": ONE_STEP | {"algo": "impala", "lag": 0},
    "pqn": SMALL | {"algo": "pqn"},
    "lag": SMALL | {"lag": 1},
    "own": ONE_STEP | {"algo": "examples.own_algorithm:Reinforce"},
    "bf16": SMALL | {"precision": "bf16"},
}


@repeats("name", OTHERS, keep=2)
def test_other_algorithms_and_settings_are_equal_to_the_bit_as_well(tmp_path, name):
    given = OTHERS[name]
    module = PolicyModule(Experience(short_cartpole, **given))
    fit(module, precision="bf16-mixed" if name == "bf16" else "32-true")
    one = {"num_learners": 1, "run_dir": tmp_path / "run", "quiet": True}
    run = headrace.train(short_cartpole, **one | given)
    policy = headrace.load_policy(run.dir, algo=given["algo"] if name == "own" else None)
    assert differing(weights(module.policy), weights(policy.module)) == []
    if name == "target_kl":  # epochs of the Trainer ended early
        assert min(row["num_epochs"] for row in read_metrics(run.dir)) < 8


class Linear(nn.Module):
    """A network of one's own."""

    def __init__(self, spec):
        super().__init__()
        self.params, self.value = nn.Linear(4, headrace.num_params(spec)), nn.Linear(4, 1)

    def forward(self, obs):
        return self.params(obs), self.value(obs).squeeze(-1)


def test_a_network_of_one_s_own_is_trained_alike(tmp_path):
    module = fitted(model=Linear)
    run = train(tmp_path / "run", model=Linear)
    assert differing(weights(module.policy), weights(run.policy.module)) == []
    assert isinstance(module.policy.model, Linear)


class Predicting(PolicyModule):
    """Adds a loss, and a module of its own."""

    def __init__(self, experience):
        super().__init__(experience)
        self.guess = nn.Linear(4, 1)

    def training_step(self, minibatch, batch_idx):
        error = self.guess(minibatch["obs"]).squeeze(-1) - minibatch["target"]
        total = super().training_step(minibatch, batch_idx)
        return total + (error.square() * minibatch["weight"]).sum()


def test_a_subclass_adds_to_the_loss_and_its_modules_are_trained():
    module = Predicting(experience())
    before = weights(module)
    fit(module)
    changed = differing(before, weights(module))
    assert {"guess.weight", "guess.bias", "policy.model.actor.weight"} <= set(changed)
    # It is one gradient, whose length is limited as a whole.
    assert differing(weights(module.policy), weights(fitted().policy)) != []


class Broken(PolicyModule):
    """Its loss is NaN in the second step of the second update."""

    def training_step(self, minibatch, batch_idx):
        is_bad = self.current_epoch == 1 and batch_idx == 1
        return super().training_step(minibatch, batch_idx) * (float("nan") if is_bad else 1.0)


def test_a_loss_that_is_not_finite_ends_training_and_leaves_the_weights(tmp_path):
    module = Broken(experience())
    with (
        no_process_left(),
        pytest.raises(NonFiniteError, match="Update 2: a gradient or parameter was NaN"),
    ):
        fit(module, default_root_dir=tmp_path)
    assert all(tensor.isfinite().all() for tensor in weights(module).values())
    assert [path.name for path in tmp_path.iterdir()] == ["bad_batch_step_000000000128.safetensors"]


def test_lightning_s_loggers_get_the_metrics_and_the_rate_of_the_schedule(tmp_path):
    module = PolicyModule(experience(lr=1e-3, lr_schedule="linear"))
    monitor = LearningRateMonitor(logging_interval="epoch")
    fit(module, logger=CSVLogger(tmp_path), callbacks=[monitor], log_every_n_steps=1)
    with (tmp_path / "lightning_logs/version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    rates = [float(row["lr-Adam"]) for row in rows if row.get("lr-Adam")]
    # Linear to 0 over 192 env steps, in updates of 64
    assert rates == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])
    logged = [row for row in rows if row.get("env_steps")]
    assert [float(row["env_steps"]) for row in logged] == [64, 128, 192]
    assert {"loss", "approx_kl", "grad_norm", "explained_variance", "mean_return"} <= {
        name for name, value in logged[-1].items() if value
    }


def test_early_stopping_watches_the_metrics_of_updates():
    stopping = EarlyStopping("env_steps", mode="min", patience=2)  # which only grow
    module = PolicyModule(experience(total_env_steps=100 * 64))
    assert fit(module, callbacks=[stopping]).current_epoch == 3


@pytest.mark.parametrize(
    "limit, steps",
    [({"max_epochs": 2}, 32), ({"max_steps": 21}, 21), ({"fast_dev_run": True}, 1)],
    ids=["max_epochs", "max_steps", "fast_dev_run"],
)
def test_the_trainer_s_limits_end_it_after_an_epoch_or_within_one(limit, steps):
    module = PolicyModule(experience(num_epochs=4))
    assert fit(module, **limit).global_step == steps
    assert not [each for each in threading.enumerate() if each.name == "headrace"]


def test_an_optimizer_with_a_schedule_of_its_own_keeps_it():
    class Own(PolicyModule):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "epoch"}]

    class Rates(Callback):
        seen = ()

        def on_train_epoch_start(self, trainer, module):
            self.seen += (trainer.optimizers[0].param_groups[0]["lr"],)

    rates = Rates()
    fit(Own(experience()), callbacks=[rates])
    assert rates.seen == (0.5, 0.25, 0.125)
