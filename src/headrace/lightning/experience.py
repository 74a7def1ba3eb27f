"""A data module whose epochs are iterations: collect a batch, and make the minibatches of it.

Left out: the loss and the gradient steps (`module.py`), and the loop that collects (`training.py`).
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import IterableDataset, get_worker_info

from headrace.algos.base import EpochsConfig, Metrics
from headrace.algos.schedules import in_force
from headrace.batch import Minibatch
from headrace.distributed.process import freed_memory_kept, math_threads
from headrace.distributed.ranks import SINGLE_RANK, GroupRanks, RankInfo, Ranks
from headrace.envs.factory import EnvLike, WrapperLike
from headrace.errors import ConfigError
from headrace.learner.frozen import untrained_policy
from headrace.lightning.checkpoints import Loaded
from headrace.lightning.checks import (
    check_arguments,
    check_loss,
    check_settings,
    check_trainer,
    trained_policy,
)
from headrace.lightning.training import Step, Training, Update
from headrace.models.custom import ModelFactory
from headrace.models.policy import Network
from headrace.training.api import request_for
from headrace.training.calibration import calibrated
from headrace.training.counters import Counters
from headrace.training.job import inspect_request
from headrace.training.rank import describe_job


class Experience(LightningDataModule):
    """The environments of a run, their workers, and the batches that the Trainer learns from.

    An epoch is one iteration of `headrace.train`: the environments are stepped with the newest
    weights, the algorithm computes its targets, and its minibatches are yielded in its own order.
    The weights are published after the last one. The arguments are those of `headrace.train`.

    Args:
        env: a Gymnasium id, a game of PettingZoo's, `module:callable`, or a callable.
        algo: settings such as `headrace.PPO(lr=3e-4)`, a name, or an algorithm of your own.
        network: settings such as `headrace.Network(hidden_sizes=(256, 256))`.
        model: makes your own network from the spec.
        wrapper: wraps each environment.
        config: a TOML file with settings.
        num_learners: as many as the Trainer has devices. They share out the environments.
        **settings: those of `headrace train --help`, but for what the Trainer decides.

    Attributes:
        policy: the policy that is trained, with its normalizers; on the Trainer's device.
        settings: all settings, those of this policy in force.
        loss: the loss of the algorithm.
        metrics: of the last update, as `headrace.train` gives them to `on_update`; {} before it.

    Raises:
        ConfigError: a setting is invalid, or does not go with the Trainer.
        EnvNotFoundError, MissingExtraError: there is no such environment.
    """

    def __init__(
        self,
        env: EnvLike,
        *,
        algo: Any = None,
        network: Network | None = None,
        model: str | ModelFactory | None = None,
        wrapper: WrapperLike | Sequence[WrapperLike] = (),
        config: str | Path | None = None,
        num_learners: int = 1,
        **settings: Any,
    ) -> None:
        super().__init__()
        check_arguments(settings)
        settings["num_learners"] = num_learners
        request = inspect_request(
            request_for(env, algo, network, model, wrapper, config=config, **settings)
        )
        check_settings(request.settings)
        # Each of several processes would measure for itself, and choose other sizes.
        request = calibrated(request) if num_learners == 1 else request
        self._job = job = request.job(Path())
        name = trained_policy(job)
        self.settings, spec = job.settings.of(name), job.spec.for_agents(job.shares[name])
        with math_threads(job.settings.run.learner_threads):  # initial weights depend on it
            self.policy = untrained_policy(self.settings, spec, job.model, name)
        algorithm, algo = self.settings.algorithm, self.settings.algo
        rows = job.settings.run.num_envs // num_learners * job.shares[name].size
        modules = algorithm.build(self.policy, spec, self.settings.network, algo, rows, SINGLE_RANK)
        self.loss = check_loss(algorithm.losses(modules, algo), self.policy, job.settings.run.algo)
        self.metrics: dict[str, Any] = {}
        self._counters = Counters()
        self._training: Training | None = None
        self._given: Step | Update | None = None  # handed over last; None: nothing yet
        self._kept: Loaded | None = None  # what the last `fit` ended with
        self._open = contextlib.ExitStack()

    @property
    def lr(self) -> float:
        """The learning rate of the next gradient step, by the algorithm's schedule."""
        if isinstance(self._given, Step):
            return self._given.lr
        run = self.settings.run
        now = in_force(self.settings.algo, self._counters.env_steps, run.schedule_env_steps)
        return float(now.lr)

    @property
    def is_done(self) -> bool:
        """Whether the run has reached its `total_env_steps`, or `stop_at_return`, by an update."""
        return isinstance(self._given, Update) and self._counters.is_done(self.settings.run)

    def setup(self, stage: str) -> None:
        """Build this rank's part of the run; ConfigError if the Trainer does not go with it."""
        if stage != "fit":
            return
        trainer = self.trainer
        assert trainer is not None
        check_trainer(trainer, self.settings, self.loss)
        device, root = trainer.strategy.root_device, Path(trainer.default_root_dir)
        on_device = self._job.settings.follow("the Trainer's", device=device.type)
        job = replace(self._job, settings=on_device, run_dir=root)
        ranks: Ranks = SINGLE_RANK
        if trainer.world_size > 1:
            ranks = GroupRanks(
                RankInfo(trainer.global_rank, trainer.world_size, trainer.local_rank)
            )
        self.close()
        self._open.enter_context(math_threads(self.settings.run.learner_threads))
        self._open.enter_context(freed_memory_kept())
        self._training = Training(job, self.policy, device, ranks, self._counters)
        self._open.callback(self._training.turns.close)
        if self._kept is not None:
            self._training.restore(self._kept)

    def train_dataloader(self) -> "Minibatches":
        """Return the minibatches, without a DataLoader around them: there is nothing to load."""
        return Minibatches(self)

    def epoch(self) -> Iterator[Minibatch]:
        """Yield the minibatches of an update. Each gradient step is answered before the next."""
        training = self._training
        assert training is not None
        if isinstance(self._given, Step):
            raise ConfigError(
                "The epoch before ended within an update: the algorithm asks for more gradient "
                f"steps than the {len(Minibatches(self))} of an epoch, or the epoch was cut short."
            )
        given = self._given = training.turns.go_on()
        while isinstance(given, Step):
            yield given.minibatch
            if self._given is given:
                raise ConfigError(
                    "A minibatch was fetched without a gradient step on the one before.\nTrain "
                    "with a PolicyModule, by automatic optimization, and give the Trainer the "
                    "Experience itself, without a DataLoader around it."
                )
            given = self._given

    def answer(self, metrics: Metrics) -> None:
        """Go on after a gradient step, to the next minibatch or the end of the update.

        Args:
            metrics: of the loss, and `grad_norm`.
        """
        assert self._training is not None
        self._given = self._training.turns.go_on(metrics)
        if isinstance(self._given, Update):
            self.metrics = self._given.metrics

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint of the Trainer has of this run, as tensors and text.

        Called on all ranks at once. After an update it is all that an exact resume needs.
        """
        assert self._training is not None
        files, manifest = self._training.contents(whole=isinstance(self._given, Update))
        config = describe_job(self._job)
        return {"files": files, "manifest": json.dumps(manifest), "config": json.dumps(config)}

    def restore(self, saved: Loaded) -> None:
        """Go on from what `state` has returned, with the next epoch.

        Raises:
            CheckpointError: it was saved within an update, or is of another run.
        """
        assert self._training is not None
        saved.check_whole()
        self._training.restore(saved)

    def teardown(self, stage: str) -> None:
        """End the workers, and keep where the environments are for the next `fit`."""
        if stage == "fit" and isinstance(self._given, Update):
            self._kept = Loaded.of(self.state())
        self.close()

    def on_exception(self, exception: BaseException) -> None:
        """End the workers."""
        self.close()

    def close(self) -> None:
        """End the thread of the loop, and its workers."""
        self._open.close()
        self._training = self._given = None


class Minibatches(IterableDataset[Minibatch]):
    """The minibatches of an epoch: dicts of tensors, as the algorithm's loss takes them."""

    def __init__(self, experience: Experience) -> None:
        self._experience = experience

    def __len__(self) -> int:
        algo = self._experience.settings.algo
        return algo.num_epochs * algo.num_minibatches if isinstance(algo, EpochsConfig) else 1

    def __iter__(self) -> Iterator[Minibatch]:
        if (worker := get_worker_info()) is not None:
            raise ConfigError(
                f"DataLoader(num_workers={worker.num_workers}): a worker of a DataLoader cannot "
                "have the environments.\nUse none; Headrace has workers of its own: "
                f"Experience(..., num_workers={worker.num_workers})."
            )
        yield from self._experience.epoch()
