"""What trials are compared by. A score is always to be as large as possible."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.collectors.api import WINDOW
from headrace.errors import ConfigError, did_you_mean

KINDS = ("eval_return", "mean_return", "steps_to", "seconds_to")
_WITH_GOAL = ("steps_to", "seconds_to")


@dataclass(frozen=True)
class Metric:
    """What is measured of a run, to compare it with others.

    Attributes:
        kind: `eval_return`: of the likeliest actions, over episodes that are the same for all
            trials. `mean_return`: of the last 100 training episodes. `steps_to`, `seconds_to`: env
            steps, and seconds of training, until that is `goal`; the run ends there.
    """

    kind: str = "eval_return"
    goal: float | None = None

    @property
    def is_evaluated(self) -> bool:
        """Whether episodes are played besides training."""
        return self.kind == "eval_return"

    def value(self, measured: Mapping[str, Any]) -> float | None:
        """Return the value of one seed; None if it has none, such as a goal not reached."""
        if self.kind not in _WITH_GOAL:
            found: float | None = measured[self.kind]
            return found
        if not self.ends(measured):
            return None
        return float(measured["env_steps" if self.kind == "steps_to" else "seconds"])

    def ends(self, measured: Mapping[str, Any]) -> bool:
        """Return whether a run has reached the goal, so that it ends before its last env step."""
        mean = measured["mean_return"]
        is_full = measured["episodes"] >= WINDOW  # a run ends at a goal only then
        return is_full and self.goal is not None and mean is not None and mean >= self.goal

    def score(self, measured: Sequence[Mapping[str, Any]]) -> float:
        """Return the score of a trial, from all of its seeds: their mean value.

        With a goal it is 0 to -1 if all seeds reached it, else -1 to -2: the lower, the farther
        their mean returns fall short. -inf if a seed has ended no episode.
        """
        values = [self.value(each) for each in measured]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            mean = sum(known) / len(known)
            return mean if self.goal is None else -mean / (1.0 + mean)
        means = [each["mean_return"] for each in measured]
        if self.goal is None or None in means:
            return -math.inf
        missing: float = sum(max(0.0, self.goal - mean) for mean in means) / len(means)
        return -1.0 - missing / (1.0 + missing)

    def describe(self, value: float | None) -> str:
        """Format a value."""
        if value is None:
            return "not reached" if self.kind in _WITH_GOAL else "no episode ended"
        if self.kind == "steps_to":
            return f"{value:,.0f} env steps"
        return f"{value:.1f} s" if self.kind == "seconds_to" else f"{value:.1f}"

    @property
    def title(self) -> str:
        """The metric as it is typed."""
        goal = f" {self.goal:g}" if self.goal is not None else ""
        return f"{self.kind}{goal}"

    @property
    def lower_is_better(self) -> bool:
        """Whether small values are good."""
        return self.kind in _WITH_GOAL


def parse_metric(words: Sequence[str]) -> Metric:
    """Return the metric that words name, such as `steps_to 475`; ConfigError."""
    kind, goal = (words[0] if words else "nothing"), words[1:]
    if kind not in KINDS:
        raise ConfigError(
            f"metric={' '.join(words)}: there is no metric {kind!r}.{did_you_mean(kind, KINDS)} "
            "Expected eval_return, mean_return, steps_to RETURN or seconds_to RETURN."
        )
    if len(goal) != (kind in _WITH_GOAL):
        expected = f"a return after it, as in {kind} 475" if kind in _WITH_GOAL else "no more words"
        raise ConfigError(f"metric={' '.join(words)}: expected {expected}.")
    try:
        number = float(goal[0]) if goal else None
    except ValueError:
        raise ConfigError(f"metric={' '.join(words)}: {goal[0]!r} is no number.") from None
    if number is not None and not math.isfinite(number):
        raise ConfigError(f"metric={' '.join(words)}: expected a finite return.")
    return Metric(kind, number)
