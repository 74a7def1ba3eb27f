"""Evaluating while training, and keeping the best policy. Left out: playing (`evaluate.py`)."""

import copy

from headrace.collectors.api import ShouldStop
from headrace.evaluation.evaluate import evaluate
from headrace.evaluation.trained_policies import TrainedPolicy
from headrace.learner.learns import Learns
from headrace.training.job import Task
from headrace.training.loop import Counters
from headrace.training.saver import Saver


class Evaluations:
    """Called after each update: plays `eval_episodes` once `eval_every` env steps have passed.

    Always the same episodes, with the likeliest actions. The policy with the highest mean return
    so far is kept in `best/`.
    """

    def __init__(
        self,
        task: Task,
        counters: Counters,
        learner: Learns,
        saver: Saver,
        stop: ShouldStop,
    ) -> None:
        self._task, self._run = task, task.settings.run
        self._counters, self._learner, self._saver = counters, learner, saver
        self._stop = stop

    def __call__(self) -> dict[str, float]:
        """Metrics, if an evaluation was due and not interrupted."""
        counters, every = self._counters, self._run.eval_every
        if not every or counters.env_steps // every == counters.evaluated_at // every:
            return {}
        learner, spec, shares = self._learner, self._task.spec, self._task.shares
        policies = {
            name: TrainedPolicy(
                spec.of(shares[name]), copy.deepcopy(policy).cpu(), learner.networks[name]
            )
            for name, policy in learner.policies.items()
        }
        played = evaluate(
            policies,
            self._task.maker,
            spec=spec,
            shares=shares,
            episodes=self._run.eval_episodes,
            seed=self._run.seed,
            stop=self._stop,
        )
        if played is None:
            return {}
        counters.evaluated_at = counters.env_steps
        found = played.to_json()
        if counters.best_return is None or found["mean_return"] > counters.best_return:
            before, counters.best_return = counters.best_return, found["mean_return"]
            if not self._saver.best():  # the next that is better than what is kept will be kept
                counters.best_return = before
        return {"eval_return": found["mean_return"], "eval_length": found["mean_length"]}
