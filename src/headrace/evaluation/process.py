"""Evaluations in a process of their own, which plays while the learner trains on.

Left out: when they are due, and what is kept (`training/evaluator.py`).
"""

import contextlib
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import cloudpickle
import torch

from headrace.collectors.backends.api import Failed
from headrace.collectors.backends.worker_main import learner_channel, reports_errors
from headrace.distributed import child_process
from headrace.distributed.channel import pickled
from headrace.distributed.child_process import ChildProcess, read_file
from headrace.envs.api import Guards
from headrace.envs.factory import EnvMaker
from headrace.errors import WorkerError
from headrace.evaluation.evaluate import Evaluation, evaluate
from headrace.evaluation.trained_policies import TrainedPolicy
from headrace.spec import Agents, EnvSpec

_NAME = "the evaluation process"
_CLOSE_WITHIN_S = 3.0
_MAX_SUCCESSORS = 1  # of a process that died, for one evaluation


@dataclass(frozen=True)
class EvaluationPlan:
    """What all evaluations of a run have in common: arguments of `evaluate`.

    Attributes:
        num_threads: CPU threads of torch, by which products are rounded: those of the learner.
        guards: of the environment.
    """

    maker: EnvMaker
    spec: EnvSpec
    shares: Mapping[str, Agents]
    episodes: int
    seed: int
    num_threads: int
    guards: Guards


class EvaluationProcess:
    """The learner's end of the process. One evaluation is under way at a time.

    It needs no device: policies and environments are on the CPU. It is started with the first
    evaluation. The kernel kills it when the learner's process ends, however that ends. If it dies
    in an evaluation, or ends because the environment hangs, a successor plays the same episodes
    from the beginning.

    Raises:
        UsageError: the environment cannot be sent to another process.
    """

    def __init__(self, plan: EvaluationPlan) -> None:
        self._plan = pickled(plan, _NAME, "leave --eval-every out")
        self._child: ChildProcess | None = None
        self._policies: dict[str, TrainedPolicy] = {}
        self._successors = 0  # in the evaluation under way
        child_process.warm_up()  # or the first evaluation would wait for imports

    def send(self, policies: Mapping[str, TrainedPolicy]) -> None:
        """Have policies evaluated, as they are now. They must be on the CPU."""
        self._policies, self._successors = dict(policies), 0
        self._send()

    def _send(self) -> None:
        if self._child is None:
            self._child = ChildProcess(main, self._plan, ())
        with contextlib.suppress(OSError):  # it is gone, which `poll` says
            self._child.channel.send(self._policies)

    def poll(self, wait_s: float = 0.0) -> Evaluation | None:
        """Return the result if it comes within `wait_s`.

        Raises:
            EnvError: the environment failed, or its episodes do not end.
            WorkerError: the process died twice in one evaluation, or the policies failed.
        """
        assert self._child is not None
        self._child.wait(wait_s)
        has_ended = self._child.has_ended  # before reading: what it sent last is read
        messages = []
        try:
            messages = self._child.channel.take()
        except EOFError:
            has_ended = True
        for message in messages:
            if isinstance(message, Failed):
                raise message.error
            assert isinstance(message, Evaluation), message
            return message
        if has_ended:
            self._replace(f"{_NAME.capitalize()} {self._child.cause()}")
        return None

    def _replace(self, cause: str) -> None:
        """Have a successor do what the dead process did not; WorkerError after too many."""
        if self._successors == _MAX_SUCCESSORS:
            raise WorkerError(cause)
        self._successors += 1
        self.close()
        warnings.warn(f"{cause}\nAnother process evaluates the same weights.", stacklevel=2)
        self._send()

    def close(self) -> None:
        """Give up what is under way, and end the process, by force after 3 s.

        Raises:
            EnvError: an environment failed meanwhile, or in closing.
        """
        if self._child is None:
            return
        child, self._child = self._child, None
        with contextlib.suppress(OSError):  # it is gone
            child.channel.send(None)
        for message in child.end(time.monotonic() + _CLOSE_WITHIN_S):
            if isinstance(message, Failed):
                raise message.error


def main(channel: int, stack: int, plan: int) -> None:
    """Run the process. Arguments are file descriptors, as those of `worker_main.main`."""
    with learner_channel(channel, stack) as learner, reports_errors(learner, _NAME):
        evaluations: EvaluationPlan = cloudpickle.loads(read_file(plan))
        torch.set_num_threads(evaluations.num_threads)
        while (policies := learner.receive()) is not None:
            evaluation = evaluate(
                policies,
                evaluations.maker,
                spec=evaluations.spec,
                shares=evaluations.shares,
                episodes=evaluations.episodes,
                seed=evaluations.seed,
                guards=evaluations.guards,
                stop=lambda: bool(learner.take()),  # while it plays, there comes only the end
            )
            if evaluation is None:
                break
            learner.send(evaluation)
