"""What each thing that training does costs, measured apart: what predictions are made from.

Left out: measuring (`probe.py`), predicting (`model.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from headrace.cost_model.times import Times
from headrace.errors import ConfigError

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
