"""Schedules: settings of an algorithm that change over a run.

A schedule is `constant`; or `linear`, to 0 over schedule_env_steps; or points `[[env_steps, value],
...]`, between which the value changes linearly. Two points of the same env steps are a step. Each
update has one value. Left out: epsilon and beta, which have settings of their own
(`action_values/q_learning.py`, `off_policy.py`).
"""

import itertools
import math
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, TypeVar

from headrace.configclass import Bounds, Expected

ConfigT = TypeVar("ConfigT")
Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class _InOrder(Bounds, Expected):
    """The bounds of a schedule: one of some words, or points in their order."""

    words: str
    taken: tuple[str, ...]

    def __str__(self) -> str:
        return self.words

    def contain(self, value: Any) -> bool:
        if isinstance(value, str):
            return value in self.taken
        steps = [0.0, *(env_steps for env_steps, _ in value)]
        is_finite = all(map(math.isfinite, itertools.chain(*value)))
        return bool(value) and is_finite and steps == sorted(steps)


_POINTS = "or points [[env_steps, value], ...] with env_steps from 0 on that do not decrease"
_Either = Literal["constant", "linear"] | Points
Schedule = Annotated[_Either, _InOrder(f"'constant', 'linear', {_POINTS}", ("constant", "linear"))]
ScheduleByPoints = Annotated[_Either, _InOrder(f"'constant', {_POINTS}", ("constant",))]
"""Of a setting that is not to fall to 0."""


SCHEDULES = {
    "lr": "lr_schedule",
    "gamma": "gamma_schedule",
    "gae_lambda": "gae_lambda_schedule",
    "ent_coef": "ent_schedule",
    "clip_coef": "clip_schedule",
}
"""Settings that may change during a run, and their schedules. An algorithm has some of them."""


def schedules_of(config: Any) -> dict[str, str]:
    """Return setting -> its schedule, of a class of settings or an instance."""
    names = {f.name for f in fields(config)}
    return {name: schedule for name, schedule in SCHEDULES.items() if schedule in names}


def points_of(config: Any, name: str, schedule_env_steps: int) -> Points:
    """Return the schedule of a setting as points."""
    schedule, value = getattr(config, SCHEDULES[name]), getattr(config, name)
    if not isinstance(schedule, str):
        points: Points = schedule
        return points
    end = ((float(schedule_env_steps), 0.0),) if schedule == "linear" else ()
    return ((0.0, value), *end)


def value_at(points: Points, env_steps: float) -> float:
    """Return the value after `env_steps`; of several points there, the last one's."""
    before = [point for point in points if point[0] <= env_steps]
    if not before:
        return points[0][1]
    after = points[len(before) :]
    (start, first), (end, last) = before[-1], after[0] if after else before[-1]
    if first == last:
        return first  # to the bit
    share = (env_steps - start) / (end - start)
    return first * (1 - share) + last * share


def in_force(config: ConfigT, env_steps: int, schedule_env_steps: int) -> ConfigT:
    """Return the settings with the values that their schedules have after `env_steps`."""
    now = {
        name: value_at(points_of(config, name, schedule_env_steps), env_steps)
        for name, field in schedules_of(config).items()
        if getattr(config, field) != "constant"
    }
    return replace(config, **now) if now else config  # type: ignore[type-var]
