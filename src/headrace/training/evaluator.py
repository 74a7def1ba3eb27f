"""Evaluations beside training: when one is due, its metrics, and which policy is the best."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

from headrace.collectors.api import ShouldStop
from headrace.evaluation.evaluate import Evaluation
from headrace.evaluation.process import EvaluationPlan, EvaluationProcess
from headrace.evaluation.trained_policies import TrainedPolicy
from headrace.learner.frozen import random_names
from headrace.learner.learner import Learner
from headrace.storage.checkpoint import SectionState
from headrace.training.counters import Counters
from headrace.training.job import Job, guards_of
from headrace.training.saver import Saver

_POLL_EVERY_S = 0.1  # for a signal, while the result is waited for

Evaluate = Callable[[bool], dict[str, float]]
"""Takes whether the update was the last; returns the metrics of an evaluation, or {}."""


def no_evaluation(is_last: bool) -> dict[str, float]:
    """Evaluate nothing: another rank does."""
    return {}


@dataclass(frozen=True)
class _Weights:
    """The weights that an evaluation has, as they are saved if they are the best."""

    env_steps: int
    states: dict[str, SectionState]


class Evaluator:
    """Plays `eval_episodes`, always the same, every `eval_every` env steps, in another process.

    The process gets the weights and normalizers of the update at which the evaluation is due. Its
    result is in the metrics of a later update. Training waits for the result one update before the
    next evaluation may be due, and at the end of the run. So at most one is under way, none is
    skipped, and no timing decides which weights are evaluated and kept. If each update has an
    evaluation, each waits for its own.

    An evaluation that is under way when the run is stopped, or fails, is given up: a resumed run
    evaluates after its first update.
    """

    def __init__(
        self, job: Job, counters: Counters, learner: Learner, saver: Saver, stop: ShouldStop
    ) -> None:
        self._job, self._run, self._stop = job, job.settings.run, stop
        self._counters, self._learner, self._saver = counters, learner, saver
        self._under_way: _Weights | None = None
        plan = EvaluationPlan(
            job.eval_maker, job.eval_spec, job.shares, self._run.eval_episodes, self._run.seed,
            self._run.learner_threads, guards_of(self._run),
        )  # fmt: skip
        self._process = EvaluationProcess(plan)

    def __call__(self, is_last: bool) -> dict[str, float]:
        """Begin an evaluation if one is due, and return the metrics of one that has ended.

        Raises:
            EnvError, WorkerError: as `EvaluationProcess.poll`.
        """
        if self._under_way is None and self._is_due():
            self._begin()
        if (weights := self._under_way) is None:
            return {}
        every, batch = self._run.eval_every, self._run.num_envs * self._run.num_steps
        # A batch has at most so many env steps: rows that only reset are none.
        next_may_be_due = (self._counters.env_steps + batch) // every > weights.env_steps // every
        evaluation = self._result(wait=is_last or next_may_be_due)
        if evaluation is None:
            return {}
        self._under_way = None
        return self._count(weights, evaluation)

    def close(self) -> None:
        """Give up the evaluation under way; EnvError if its environment failed."""
        self._process.close()

    def _is_due(self) -> bool:
        every, counters = self._run.eval_every, self._counters
        return counters.env_steps // every != counters.evaluated_at // every

    def _begin(self) -> None:
        job, learner, counters = self._job, self._learner, self._counters
        random = random_names(self._run.frozen)
        self._under_way = _Weights(counters.env_steps, copy.deepcopy(self._saver.policy_states()))
        self._process.send(
            {
                name: TrainedPolicy(
                    job.spec.for_agents(job.shares[name]),
                    copy.deepcopy(policy).cpu().eval(),
                    learner.networks[name],
                    is_random=name in random,
                )
                for name, policy in learner.policies.items()
            }
        )

    def _result(self, *, wait: bool) -> Evaluation | None:
        """Return the result if it is there; with `wait`, None only if the run is to stop."""
        result = self._process.poll()
        while wait and result is None and not self._stop():
            result = self._process.poll(_POLL_EVERY_S)
        return result

    def _count(self, weights: _Weights, evaluation: Evaluation) -> dict[str, float]:
        """Keep the weights if they are the best, and return the metrics."""
        counters, means = self._counters, evaluation.to_json()
        counters.evaluated_at = weights.env_steps
        if counters.best_return is None or means["mean_return"] > counters.best_return:
            before, counters.best_return = counters.best_return, means["mean_return"]
            _, data = weights.states["counters"]
            now = {"best_return": counters.best_return, "evaluated_at": weights.env_steps}
            states = weights.states | {"counters": ({}, {**data, **now})}
            if not self._saver.save_best(states, weights.env_steps):
                counters.best_return = before  # the next that is better than the kept one is kept
        return {
            "eval_return": means["mean_return"],
            "eval_length": means["mean_length"],
            "eval_env_steps": weights.env_steps,
        }
