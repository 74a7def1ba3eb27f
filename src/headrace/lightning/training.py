"""Headrace's training loop, as it is, with gradient steps that the Trainer makes.

Left out: the thread in which it runs (`turns.py`), and what the Trainer does (`module.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headrace.algos.base import Metrics
from headrace.batch import Minibatch
from headrace.collectors.api import Collector
from headrace.distributed.process import math_threads
from headrace.distributed.ranks import Ranks
from headrace.learner.optimizer import GradientSteps, Outside
from headrace.lightning.turns import Turns
from headrace.meter import Meter
from headrace.models.policy import Policy
from headrace.spec import Array
from headrace.storage.checkpoint import (
    Checkpoint,
    Section,
    from_safetensors,
    restore,
    to_safetensors,
)
from headrace.training.counters import Counters
from headrace.training.evaluator import no_evaluation
from headrace.training.job import Job
from headrace.training.log import Display
from headrace.training.loop import Loop
from headrace.training.rank import (
    build_collector,
    build_learner,
    closing,
    sampling_plan,
    stderr_say,
    workers_section,
)
from headrace.training.reporter import Reporter
from headrace.training.saver import Saver


@dataclass(frozen=True)
class Step:
    """A gradient step that the Trainer is to make. The answer to it: the metrics of the loss."""

    minibatch: Minibatch
    lr: float


@dataclass(frozen=True)
class Update:
    """An update that was made, with the metrics that `headrace.train` gives `on_update`."""

    metrics: dict[str, Any]


class HandedSteps(GradientSteps):
    """The gradient steps of a loss, handed over to the Trainer."""

    def __init__(self, policy: Policy, hand_over: Callable[[Step], Metrics]) -> None:
        self._policy, self._hand_over = policy, hand_over
        self._nonfinite: Tensor | float = 0.0

    def start_update(self) -> None:
        """Prepare nothing."""

    def step(self, minibatch: Minibatch, lr: float | Tensor) -> Metrics:
        metrics = self._hand_over(Step(minibatch, float(lr)))
        self._nonfinite = self._nonfinite + ~torch.isfinite(metrics["grad_norm"])
        return metrics

    def num_nonfinite(self) -> Tensor:
        norm = nn.utils.get_total_norm(self._policy.parameters())
        return self._nonfinite + (~torch.isfinite(norm)).float()

    def state(self) -> dict[str, Tensor]:
        """Return nothing: the Trainer saves its optimizers."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore nothing."""

    def leave_ranks(self) -> None:
        """Do nothing: Lightning's ranks are not replaced."""

    def join_ranks(self) -> None:
        """Do nothing: Lightning's ranks are not replaced."""


class _CheckedOnly(Saver):
    """Checks updates, and describes the run for the Trainer's checkpoints, but writes none."""

    def is_due(self) -> bool:
        return False

    def save(self) -> None:
        return


class _Spoken(Display):
    """Shows no progress, which the Trainer does; what is to be said goes to standard error."""

    def __init__(self, rank: int) -> None:
        self._say = stderr_say(rank, quiet=rank > 0)

    def say(self, text: str) -> None:
        self._say(text)


class Training:
    """One rank of a run that takes turns with the Trainer.

    Args:
        policy: trained by the Trainer.

    Attributes:
        turns: hands over each `Step`, and after an update's last one the `Update`.
    """

    def __init__(
        self, job: Job, policy: Policy, device: torch.device, ranks: Ranks, counters: Counters
    ) -> None:
        self._job, self._device, self._ranks, self._counters = job, device, ranks, counters
        self._meter, self.turns = Meter(), Turns(self._train)
        outside = Outside(policy, HandedSteps(policy, self.turns.hand_over))
        self._learner = build_learner(job, device, self._meter, ranks, outside)
        self._collector: Collector | None = None
        self._episodes: dict[str, Array] = {}

    def _sections(self) -> list[Section]:
        """Return what is saved of this run. The Trainer saves the policy that it trains."""
        trained = {f"policy_{name}" for name in self._learner.learners}
        of_learner = [each for each in self._learner.sections() if each.name not in trained]
        return [*of_learner, self._counters.section(), self._workers_section()]

    def _workers_section(self) -> Section:
        def collector() -> Collector:
            assert self._collector is not None
            return self._collector

        return workers_section(self._ranks, collector, self._episodes)

    def contents(self, *, whole: bool) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Return copies of what a checkpoint has: files of named tensors, and the manifest.

        Args:
            whole: after an update; else only how the policies are described.
        """
        states = {each.name: each.state() for each in self._sections()} if whole else {}
        saver = _CheckedOnly(self._job, [], self._counters, self._learner, self._ranks)
        files, manifest = saver.contents(states)
        return {name: from_safetensors(to_safetensors(of)) for name, of in files.items()}, manifest

    def restore(self, saved: Checkpoint) -> None:
        """Go on from what `contents` has returned. Called before the first turn."""
        self._job = replace(self._job, saved=saved)
        restore(self._sections(), saved)

    def _train(self) -> None:
        """Run the loop, until it is done or the turns are closed."""
        job, ranks, learner, meter = self._job, self._ranks, self._learner, self._meter
        run, display = job.settings.run, _Spoken(ranks.rank)
        plan = sampling_plan(job, learner, self._device, ranks, self._counters.env_changes)
        self._collector = collector = build_collector(
            job, plan, ranks, meter, self.turns.is_closed, display.say, self._episodes
        )
        # A thread's number of math threads is its own, and the Trainer's thread has it set, too.
        with closing(collector), math_threads(run.learner_threads):
            reporter = Reporter(
                job, self._counters, learner, meter, collector, None, display, self._report
            )
            saver = _CheckedOnly(job, [], self._counters, learner, ranks)
            Loop(
                run, collector, learner, self._counters, meter, ranks, saver, no_evaluation,
                reporter, display.say,
            ).train()  # fmt: skip

    def _report(self, _: int, metrics: dict[str, Any]) -> None:
        self.turns.hand_over(Update(metrics))
