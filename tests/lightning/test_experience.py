"""What an Experience refuses, and that its workers end with the Trainer."""

import os
import signal
import threading

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

import headrace
from headrace.catalog import extras
from headrace.errors import ConfigError, EnvError, MissingExtraError, UsageError
from headrace.lightning import Experience, PolicyModule, write_run
from tests.lightning import support
from tests.lightning.support import (
    SMALL,
    differing,
    experience,
    fit,
    no_process_left,
    trainer,
    weights,
)
from tests.marks import repeats
from tests.support import Counting, short_cartpole

pytestmark = support.pytestmark

REFUSED = [
    ({"algo": "dqn"}, "algo='dqn' learns from a replay.*LoggerAdapter"),
    ({"batch_size": 64}, "batch_size: the algorithm cuts.*minibatch_size"),
    ({"shuffle": True}, "shuffle: the algorithm has an order of its own"),
    ({"eval_every": 100}, "eval_every=100: .*write_run"),
    ({"eval_episodes": 5}, "eval_episodes=5: .*write_run"),
    ({"eval_env": "CartPole-v1"}, "eval_env='CartPole-v1': .*write_run"),
    ({"eval_env_kwargs": {"a": 1}}, "eval_env_kwargs={'a': 1}: .*write_run"),
    ({"checkpoint_every_s": 5.0}, "checkpoint_every_s=5.0: .*ModelCheckpoint"),
    ({"device": "cpu"}, "device='cpu': .*accelerator"),
    ({"stop_after_s": 9.0}, "stop_after_s=9.0: .*max_time"),
    ({"num_accumulation_steps": 2}, "num_accumulation_steps=2: "),
]


@pytest.mark.parametrize("given, words", REFUSED, ids=lambda case: str(case)[:24])
def test_settings_that_the_trainer_takes_the_place_of_are_refused(given, words):
    replay = given.get("algo") == "dqn"
    settings = {} if replay else {k: v for k, v in SMALL.items() if k not in given}
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        Experience(short_cartpole, **settings | given)


def test_several_policies_are_refused_unless_all_but_one_are_frozen():
    pytest.importorskip("numba")
    with pytest.raises(ConfigError, match=r'(?s)tagger, runner.*frozen={"runner": "random"}'):
        Experience("headrace/TagGridWorld-v0", num_envs=2, num_steps=4)


TRAINERS = [
    ({"precision": "64-true"}, {}, "precision='64-true'"),
    ({"precision": "bf16-mixed"}, {}, "(?s)acts in float32.*precision='bf16'"),
    ({"gradient_clip_val": 1.0}, {}, r"(?s)clips already \(max_grad_norm=0.5\)"),
    ({"accumulate_grad_batches": 2}, {}, "accumulate_grad_batches=2"),
    ({"limit_train_batches": 2}, {}, "an epoch is one update"),
    ({}, {"num_learners": 2}, r"(?s)1 processes.*num_learners=2.*num_learners=1"),
    ({"accelerator": "cpu", "strategy": "ddp_fork"}, {}, "(?s)strategy='ddp'"),
]


@pytest.mark.parametrize("given, settings, words", TRAINERS, ids=lambda case: str(case)[:24])
def test_trainers_that_do_not_fit_are_refused(given, settings, words):
    module = PolicyModule(experience(**settings))
    it = trainer(**given)
    if given.get("strategy"):  # nothing is forked here: the strategy is looked at
        module.experience.trainer = it
        with pytest.raises(ConfigError, match=words):
            module.experience.setup("fit")
        return
    with pytest.raises(ConfigError, match=words):
        it.fit(module, datamodule=module.experience)


def test_a_gpu_that_is_not_the_first_is_refused():
    module, it = PolicyModule(experience()), trainer()
    it.strategy._root_device = torch.device("cuda", 1)  # none is needed to be refused
    module.experience.trainer = it
    with pytest.raises(ConfigError, match=r"device is cuda:1: .*first CUDA device"):
        module.experience.setup("fit")


class Threads(Callback):
    """Notes how many threads torch has in the Trainer's gradient steps."""

    seen = None

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen = torch.get_num_threads()


def test_the_trainer_learns_with_the_learner_s_threads():
    threads = Threads()
    torch.set_num_threads(2)
    fit(PolicyModule(experience(learner_threads=1)), callbacks=[threads])
    assert (threads.seen, torch.get_num_threads()) == (1, 2)


def test_minibatches_come_without_a_dataloader():
    module = PolicyModule(experience())
    minibatches = module.experience.train_dataloader()
    with pytest.raises(ConfigError, match=r"(?s)num_workers=1.*Headrace has workers of its own"):
        next(iter(DataLoader(minibatches, batch_size=None, num_workers=1)))
    with pytest.raises(ConfigError, match=r"(?s)datamodule=experience"):
        trainer().fit(module, train_dataloaders=minibatches)

    class Loading(Experience):
        def train_dataloader(self):
            return DataLoader(super().train_dataloader(), batch_size=4)

    module = PolicyModule(Loading(short_cartpole, **SMALL))
    with (
        pytest.warns(UserWarning, match="num_workers|__len__"),
        pytest.raises(ConfigError, match="without a DataLoader around it"),
    ):
        fit(module)


class FailsAt(Counting):
    """An environment that raises in its 40th step."""

    def step(self, action):
        if self.t == 39:
            raise RuntimeError("no step 40")
        return super().step(action)


@repeats("num_workers", [0, 2])
def test_an_environment_s_error_ends_the_trainer_and_the_workers(num_workers):
    module = PolicyModule(experience(FailsAt, num_workers=num_workers))
    with no_process_left(), pytest.raises(EnvError, match="no step 40"):
        fit(module)


class Interrupts(Callback):
    """Presses Ctrl-C while an epoch's batch is collected: soon after the first epoch."""

    def __init__(self, slow):
        self.slow = slow

    def on_train_epoch_end(self, trainer, module):
        self.slow.set()


class Slow(Counting):
    """Interrupts its process in the first step after `slow` was set."""

    slow = threading.Event()

    def step(self, action):
        if self.slow.is_set():
            self.slow.clear()
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)


def test_ctrl_c_while_environments_step_ends_the_trainer():
    module = PolicyModule(experience(Slow, total_env_steps=10**6))
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):  # what the Trainer makes of KeyboardInterrupt
            fit(module, callbacks=[Interrupts(Slow.slow)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert not [each for each in threading.enumerate() if each.name == "headrace"]


class RaisesIn(Callback):
    """A callback of the user's that fails within an epoch."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == 1:
            raise RuntimeError("of the user's")


@pytest.mark.more
def test_an_exception_of_the_user_s_ends_the_workers():
    module = PolicyModule(experience(num_workers=2))
    with no_process_left(), pytest.raises(RuntimeError, match="of the user's"):
        fit(module, callbacks=[RaisesIn()])


def test_a_second_fit_goes_on_with_the_environments():
    module = PolicyModule(experience(total_env_steps=10 * 64))
    fit(module, max_epochs=2)
    assert module.experience.metrics["env_steps"] == 128
    fit(module, max_epochs=2)
    assert module.experience.metrics["env_steps"] == 256
    assert module.experience.metrics["iteration"] == 4


def test_what_headrace_train_refuses_is_refused_alike():
    with pytest.raises(UsageError, match="num_env"):
        Experience("CartPole-v1", num_env=4)
    with pytest.raises(UsageError, match="NoSuchEnv"):
        Experience("NoSuchEnv-v0")


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(extras, "version", lambda package: None)
    with pytest.raises(MissingExtraError, match=r"(?s)import lightning.*\[lightning\]"):
        headrace.lightning.PolicyModule  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        headrace.lightning.nothing  # noqa: B018


def test_initial_weights_do_not_depend_on_the_threads_that_the_process_has():
    built = []
    for threads in (1, 2):  # torch orthogonalizes a matrix of 64 x 64 differently with two
        torch.set_num_threads(threads)
        built.append(experience(hidden_sizes=(64, 64)).policy.state_dict())
    assert all(torch.equal(built[0][name], built[1][name]) for name in built[0])


def test_a_game_s_team_learns_against_a_frozen_one(tmp_path):
    pytest.importorskip("numba")
    given = {
        "num_envs": 4, "num_steps": 16, "num_minibatches": 4, "total_env_steps": 128, "seed": 1,
        "frozen": {"runner": "random"}, "arithmetic": "plain",
        "hidden_sizes": (8, 8), "env_kwargs": {"num_taggers": 2, "max_episode_steps": 9},
    }  # fmt: skip
    module = PolicyModule(Experience("headrace/TagGridWorld-v0", **given))
    last = ModelCheckpoint(tmp_path, filename="last")
    fit(module, enable_checkpointing=True, callbacks=[last])
    run = headrace.train(
        "headrace/TagGridWorld-v0", run_dir=tmp_path / "run", num_learners=1, quiet=True, **given
    )
    write_run(tmp_path / "last.ckpt", tmp_path / "written")
    for name in ("tagger", "runner"):
        policies = (
            headrace.load_policy(tmp_path / folder, policy=name) for folder in ("written", "run")
        )
        assert differing(*(weights(policy.module) for policy in policies)) == []
    ours, theirs = module.policy.state_dict(), run.policies["tagger"].module.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert module.experience.metrics["tagger/mean_return"] is not None
