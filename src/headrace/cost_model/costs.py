"""Costs of each part of training, measured apart. Predictions start from them.

Left out: measuring (`tools/profile/probe.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from headrace.errors import ConfigError, quoted
from headrace.spec import Array

_MAX_POINTS = 512
_TAIL = 0.01
START_S = 1.5
"""CPU time in which a process starts, where it was not measured."""


@dataclass(frozen=True)
class TimeDistribution:
    """A distribution of durations.

    Attributes:
        values: `[k]` seconds, ascending.
        weights: `[k]` probabilities; they add up to 1.
    """

    values: Array
    weights: Array

    @classmethod
    def from_samples(cls, samples: Sequence[float] | Array) -> "TimeDistribution":
        """Build from at least one measurement.

        Many measurements are reduced to 512 points. The mean is kept. The slowest 256 stay single,
        because the tail lies in them.
        """
        ordered = np.sort(np.asarray(samples, np.float64))
        if not len(ordered):
            raise ValueError("no measurements")
        if len(ordered) <= _MAX_POINTS:
            return cls(ordered, np.full(len(ordered), 1 / len(ordered)))
        half = _MAX_POINTS // 2
        parts = [*np.array_split(ordered[:-half], half), *ordered[-half:, None]]
        # Means of equal numbers differ by rounding, and would not ascend.
        values = np.maximum.accumulate([part.mean() for part in parts])
        return cls(values, np.array([len(part) for part in parts]) / len(ordered))

    @property
    def mean(self) -> float:
        """Mean seconds."""
        return float(self.values @ self.weights)

    def percentile(self, share: float) -> float:
        """Return the seconds that `share` (0 to 1) of the durations do not exceed."""
        index = int(np.searchsorted(np.cumsum(self.weights), share - 1e-12))
        return float(self.values[min(index, len(self.values) - 1)])

    @property
    def tail_weight(self) -> float:
        """Share of the total time that the slowest 1 % take: 0.01 if all durations are equal."""
        before = np.concatenate([[0.0], np.cumsum(self.weights)[:-1]])
        in_tail = np.clip(before + self.weights - (1 - _TAIL), 0.0, self.weights)
        return float(in_tail @ self.values) / self.mean if self.mean else _TAIL

    def summary(self) -> dict[str, float]:
        """Return mean, median, 99th percentile and maximum in seconds, and the tail's weight."""
        return {
            "mean_s": self.mean,
            "p50_s": self.percentile(0.5),
            "p99_s": self.percentile(0.99),
            "max_s": float(self.values[-1]),
            "tail_weight": self.tail_weight,
        }

    def mean_of_slowest(self, count: float) -> float:
        """Return the expected maximum of `count` independent durations, in seconds."""
        at_most = np.minimum(np.cumsum(self.weights), 1.0) ** count
        return float(np.diff(at_most, prepend=0.0) @ self.values)

    def sample_sums(self, rng: np.random.Generator, count: int, size: int) -> Array:
        """Draw `[size]` random sums of `count` durations each."""
        if len(self.values) == 1 or count == 0:
            return np.full(size, count * self.values[0])
        if count > len(self.values):
            return rng.multinomial(count, self.weights, size) @ self.values
        drawn = np.searchsorted(np.cumsum(self.weights)[:-1], rng.random((size, count)), "right")
        return self.values[drawn].sum(1)  # type: ignore[no-any-return]

    def scaled(self, factor: float) -> "TimeDistribution":
        """Return the distribution with every duration multiplied by `factor`."""
        return TimeDistribution(self.values * factor, self.weights)

    def to_json(self) -> dict[str, list[float]]:
        """Convert to plain data."""
        return {"values": self.values.tolist(), "weights": self.weights.tolist()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "TimeDistribution":
        """Rebuild from `to_json`; ConfigError if the data are damaged."""
        try:
            values, weights = (np.asarray(data[name], np.float64) for name in ("values", "weights"))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"A distribution of times is damaged: {quoted(error)}.") from None
        if not (
            values.ndim == 1
            and len(values)
            and values.shape == weights.shape
            and np.isfinite(values).all()
            and (values >= 0).all()
            and (weights >= 0).all()
            and abs(weights.sum() - 1) < 1e-6
        ):
            raise ConfigError(
                "A distribution of times is damaged: expected values of 0 or more, and as many "
                "weights, which add up to 1."
            )
        order = np.argsort(values, kind="stable")
        return cls(values[order], weights[order])


def mixture(*parts: tuple[float, float]) -> TimeDistribution:
    """Build a distribution from pairs of seconds and probability.

    mixture((0.003, 98 / 99), (0.1, 1 / 99))
    """
    values, weights = (np.array(column, np.float64) for column in zip(*parts, strict=True))
    return TimeDistribution.from_json({"values": values, "weights": weights})


PARTS = ("env", "inference", "learning", "transport")
"""Parts that `Costs.without` can remove."""


class LinearCost(NamedTuple):
    """Seconds that grow linearly with a count: `base + slope * count`."""

    base: float
    slope: float

    def at(self, count: float) -> float:
        """Return the seconds for `count`."""
        return self.base + self.slope * count

    @classmethod
    def fit(cls, *points: tuple[float, float]) -> "LinearCost":
        """Fit the first and the last (count, seconds). Neither base nor slope is negative."""
        (n0, s0), (n1, s1) = points[0], points[-1]
        if n0 == n1:
            return cls(0.0, s0 / n0)
        slope = min(max(0.0, (s1 - s0) / (n1 - n0)), s1 / n1)
        return cls(s1 - slope * n1, slope)


@dataclass(frozen=True)
class Costs:
    """Seconds of one process on one core, unless the attribute says otherwise.

    Attributes:
        step: one step of one environment, waiting included.
        reset: one reset of one environment, waiting included.
        resets_per_step: episodes that end per env step.
        cpu_share: CPU time / time of steps and resets. It is below 1 for an environment that sleeps
            or waits for another program.
        vector: inference and fragment bookkeeping of one vector step, by number of environments.
        inference: share of `vector` that is inference.
        hand_over: the learner's time for one order to a worker and its answer.
        latency: idle time from an order to the first step, and from the last step to the answer.
        learn: one update, by rows of one learner: assembling, learning, publishing, logging.
        allreduce: additional time of one update, by number of learners.
        start: CPU time in which a worker or another learner starts: Python, and its imports.
    """

    step: TimeDistribution
    reset: TimeDistribution
    resets_per_step: float
    cpu_share: float
    vector: LinearCost
    inference: float
    hand_over: float
    latency: float
    learn: LinearCost
    allreduce: LinearCost
    device: str = "cpu"
    start: float = START_S

    @property
    def env_s(self) -> float:
        """Mean seconds of the environment per env step, resets included."""
        return self.step.mean + self.resets_per_step * self.reset.mean

    def without(self, part: str) -> "Costs":
        """Return the costs with one of `PARTS` set to zero."""
        nothing = LinearCost(0.0, 0.0)
        if part == "env":
            return replace(self, step=self.step.scaled(0.0), reset=self.reset.scaled(0.0))
        if part == "inference":
            rest = 1 - self.inference
            vector = LinearCost(rest * self.vector.base, rest * self.vector.slope)
            return replace(self, vector=vector)
        if part == "learning":
            return replace(self, learn=nothing, allreduce=nothing)
        assert part == "transport", part
        return replace(self, hand_over=0.0, latency=0.0)

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        return asdict(self) | {"step": self.step.to_json(), "reset": self.reset.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Costs":
        """Rebuild from `to_json`; ConfigError if the data are damaged."""
        try:
            values = dict(data)
            for f in fields(cls):
                if f.type is TimeDistribution:
                    values[f.name] = TimeDistribution.from_json(values[f.name])
                elif f.type is LinearCost:
                    values[f.name] = LinearCost(*map(float, values[f.name]))
            costs = cls(**values)
            numbers = [getattr(costs, f.name) for f in fields(cls) if f.type is float]
            for number in (*costs.vector, *costs.learn, *costs.allreduce, *numbers):
                if not 0 <= number < math.inf:
                    raise ValueError(f"{number} is not 0 or more")
            return costs
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"The costs of a profile are damaged: {quoted(error)}.") from None
