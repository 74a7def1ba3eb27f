"""What each thing that training does costs, measured apart: what predictions are made from.

Left out: measuring (`probe.py`), predicting (`model.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from headrace.errors import ConfigError
from headrace.spec import Array

# How long something takes that does not always take equally long: a distribution of seconds.


_MOST_POINTS = 512
_SLOWEST = 0.01


@dataclass(frozen=True)
class Times:
    """Seconds that it may take, and how likely each is.

    Attributes:
        values: `[k]`, ascending.
        weights: `[k]`, which add up to 1.
    """

    values: Array
    weights: Array

    @classmethod
    def of(cls, samples: Sequence[float] | Array) -> "Times":
        """From measurements (at least one).

        Many are brought together to a few hundred points; the mean stays as it is, and the slowest
        ones, in which the tail lies, stay single.
        """
        ordered = np.sort(np.asarray(samples, np.float64))
        if not len(ordered):
            raise ValueError("no measurements")
        if len(ordered) <= _MOST_POINTS:
            return cls(ordered, np.full(len(ordered), 1 / len(ordered)))
        half = _MOST_POINTS // 2
        parts = [*np.array_split(ordered[:-half], half), *ordered[-half:, None]]
        values = np.array([part.mean() for part in parts])
        return cls(values, np.array([len(part) for part in parts]) / len(ordered))

    @property
    def mean(self) -> float:
        """Seconds."""
        return float(self.values @ self.weights)

    @property
    def max(self) -> float:
        """The longest that was measured, in seconds."""
        return float(self.values[-1])

    def percentile(self, share: float) -> float:
        """Seconds that `share` (0 to 1) of them do not exceed."""
        at = int(np.searchsorted(np.cumsum(self.weights), share - 1e-12))
        return float(self.values[min(at, len(self.values) - 1)])

    @property
    def tail_weight(self) -> float:
        """Share of all the time that goes into the slowest 1 %: 0.01 where all are equal."""
        before = np.concatenate([[0.0], np.cumsum(self.weights)[:-1]])
        in_tail = np.clip(before + self.weights - (1 - _SLOWEST), 0.0, self.weights)
        return float(in_tail @ self.values) / self.mean

    def mean_of_slowest(self, count: float) -> float:
        """Seconds until the slowest of `count` that begin together ends, on average."""
        at_most = np.minimum(np.cumsum(self.weights), 1.0) ** count
        return float(np.diff(at_most, prepend=0.0) @ self.values)

    def sums(self, rng: np.random.Generator, count: int, size: int) -> Array:
        """`[size]` sums of `count` each, drawn at random."""
        if len(self.values) == 1 or count == 0:
            return np.full(size, count * self.values[0])
        if count > len(self.values):
            return rng.multinomial(count, self.weights, size) @ self.values
        drawn = np.searchsorted(np.cumsum(self.weights)[:-1], rng.random((size, count)), "right")
        return self.values[drawn].sum(1)  # type: ignore[no-any-return]

    def scaled(self, by: float) -> "Times":
        """All of them longer by this factor."""
        return Times(self.values * by, self.weights)

    def to_json(self) -> dict[str, list[float]]:
        """Plain data."""
        return {"values": self.values.tolist(), "weights": self.weights.tolist()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Times":
        """Rebuild from `to_json`; ConfigError if it cannot be."""
        try:
            values, weights = (np.asarray(data[name], np.float64) for name in ("values", "weights"))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"A distribution of times is damaged: {error!r}.") from None
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


def mixture(*parts: tuple[float, float]) -> Times:
    """Of (seconds, how likely): a model, not a measurement.

    mixture((0.003, 98 / 99), (0.1, 1 / 99))
    """
    values, weights = (np.array(column, np.float64) for column in zip(*parts, strict=True))
    return Times.from_json({"values": values, "weights": weights})


PARTS = ("env", "inference", "learning", "transport")
"""That could cost nothing: see `Costs.without`."""


class Line(NamedTuple):
    """Seconds that grow with a count: `base + each * count`."""

    base: float
    each: float

    def at(self, count: float) -> float:
        """Seconds for so many."""
        return self.base + self.each * count

    @classmethod
    def through(cls, *points: tuple[float, float]) -> "Line":
        """Of (count, seconds), through the first and the last; neither part is negative."""
        (n0, s0), (n1, s1) = points[0], points[-1]
        if n0 == n1:
            return cls(0.0, s0 / n0)
        each = min(max(0.0, (s1 - s0) / (n1 - n0)), s1 / n1)
        return cls(s1 - each * n1, each)


@dataclass(frozen=True)
class Costs:
    """Seconds of one process on one core, unless said otherwise.

    Attributes:
        step: of one environment's step, waiting included.
        reset: of one environment's reset, likewise.
        resets_per_step: how often an env step ends an episode.
        cpu_share: of steps and resets: CPU time / time. An environment that sleeps, or waits for
            another program, has less than 1.
        vector: of each vector step besides, by envs: inference, and bookkeeping of fragments.
        inference: of `vector`, the share that is inference.
        hand_over: at the learner, for each order to a worker and its answer.
        latency: from an order to its worker's first step, and from its last step to the answer.
        learn: of one update, by rows of one learner: joining, learning, publishing, logging.
        allreduce: of one update, by learners: what each more of them adds.
        device: that the learner computes on.
    """

    step: Times
    reset: Times
    resets_per_step: float
    cpu_share: float
    vector: Line
    inference: float
    hand_over: float
    latency: float
    learn: Line
    allreduce: Line
    device: str = "cpu"

    @property
    def env_s(self) -> float:
        """Mean seconds of env step and reset together, for each env step."""
        return self.step.mean + self.resets_per_step * self.reset.mean

    def without(self, part: str) -> "Costs":
        """If one of `PARTS` cost nothing."""
        nothing = Line(0.0, 0.0)
        if part == "env":
            return replace(self, step=self.step.scaled(0.0), reset=self.reset.scaled(0.0))
        if part == "inference":
            rest = 1 - self.inference
            return replace(self, vector=Line(rest * self.vector.base, rest * self.vector.each))
        if part == "learning":
            return replace(self, learn=nothing, allreduce=nothing)
        assert part == "transport", part
        return replace(self, hand_over=0.0, latency=0.0)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        plain = asdict(self)
        return plain | {"step": self.step.to_json(), "reset": self.reset.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Costs":
        """Rebuild from `to_json`; ConfigError if it cannot be."""
        try:
            values = dict(data)
            for f in fields(cls):
                if f.type is Times:
                    values[f.name] = Times.from_json(values[f.name])
                elif f.type is Line:
                    values[f.name] = Line(*map(float, values[f.name]))
            costs = cls(**values)
            numbers = [getattr(costs, f.name) for f in fields(cls) if f.type is float]
            for number in (*costs.vector, *costs.learn, *costs.allreduce, *numbers):
                if not 0 <= number < math.inf:
                    raise ValueError(f"{number} is not 0 or more")
            return costs
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"The costs of a profile are damaged: {error!r}.") from None
