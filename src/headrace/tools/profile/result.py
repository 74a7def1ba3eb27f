"""The result of a profile, as data and as text."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import headrace
from headrace.advice.changes import Change
from headrace.advice.limits import LIMITS
from headrace.config.settings import Settings
from headrace.cost_model.costs import Costs
from headrace.cost_model.model import lock_step_s
from headrace.machine.limits import cpu_cores
from headrace.meter import Laps
from headrace.tools.profile.timeline_plots import group_workers


@dataclass(frozen=True)
class Profile:
    """Measurements and predictions of a run.

    Attributes:
        env_steps_per_s: speed of the run; None if it had fewer than two updates.
        seconds: seconds by process and span; a worker's `wait` is in two parts (`FOR_WORKERS`).
        ceilings: env steps/s of environments only, inference only, learning only, and of the three
            together.
        predicted: env steps/s that the cost model predicts from `costs`.
        is_whole: True if the environments are one vector that steps many at a time.
        rates: input of `headrace plan`; None if the learner steps the environments.
    """

    settings: Settings
    costs: Costs
    env_steps_per_s: float | None
    seconds: dict[str, dict[str, float]]
    tracks: dict[str, Laps]
    ceilings: dict[str, float]
    predicted: float
    gains: dict[str, float]
    changes: list[Change]
    is_whole: bool
    rates: dict[str, Any] | None

    @property
    def of_limit(self) -> float | None:
        """Speed of the run, relative to the ceiling of all parts together."""
        rate = self.env_steps_per_s
        return None if rate is None else rate / self.ceilings["together"]

    @property
    def lock_step(self) -> float | None:
        """Env steps/s if each step waited for the slowest environment; None if `is_whole`."""
        if self.is_whole:
            return None
        num_envs = self.settings.run.num_envs
        return num_envs / lock_step_s(self.costs, num_envs)

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data, which `headrace plan` and `headrace simulate` read."""
        return {
            "headrace": headrace.__version__,
            "settings": self.settings.flat(),
            "cores": cpu_cores(),
            "env_steps_per_s": self.env_steps_per_s,
            "seconds": self.seconds,
            "times": {"step": self.costs.step.summary(), "reset": self.costs.reset.summary()},
            "lock_step_env_steps_per_s": self.lock_step,
            "ceilings": self.ceilings,
            "of_limit": self.of_limit,
            "predicted_env_steps_per_s": self.predicted,
            "gains": self.gains,
            "changes": [{"settings": c.settings, "gain": c.gain} for c in self.changes],
            "rates": self.rates,
            "costs": self.costs.to_json(),
        }


_MIN_SHARE = 0.005  # spans below are not listed
_MIN_GAIN = 1.1  # a part with a smaller gain is no bottleneck

_LIMITS = LIMITS | {
    "transport": "handing orders and fragments over between processes",
    "cores": "cores: more processes want to compute than there are cores",
    "waiting": "waiting: workers wait for the slowest, or for the learner",
}


def format_profile(profile: Profile) -> str:
    """Format a profile as text."""
    parts = (_head, _spans, _times, _ceilings, _advice)
    return "\n\n".join("\n".join(part(profile)) for part in parts)


def _head(profile: Profile) -> Iterable[str]:
    run = profile.settings.run
    rate = profile.env_steps_per_s
    measured = "too few updates for a rate" if rate is None else f"{rate:,.0f} env steps/s"
    yield (
        f"{run.algo} on {run.env}: {run.num_envs} envs x {run.num_steps} steps, "
        f"{run.num_workers or 'no'} workers, vectors of {run.envs_per_vector}, learners: "
        f"{run.num_learners}, lag {run.lag}: {measured}"
    )


def _spans(profile: Profile) -> Iterable[str]:
    columns = group_workers(profile.seconds)
    yield "Where the time goes" + " " * 7 + "".join(f"{name:>22}" for name in columns)
    totals = {name: sum(spans.values()) for name, spans in columns.items()}
    ordered = dict.fromkeys(span for spans in columns.values() for span in spans)
    for span in sorted(ordered, key=lambda s: -max(c.get(s, 0.0) for c in columns.values())):
        seconds = {name: spans.get(span, 0.0) for name, spans in columns.items()}
        if max(seconds[name] / totals[name] for name in columns) >= _MIN_SHARE:
            cells = (f"{s:>13.2f} s {s / totals[name]:>6.1%}" for name, s in seconds.items())
            yield f"  {span:<24}" + "".join(cells)


def _times(profile: Profile) -> Iterable[str]:
    costs = profile.costs
    heads = "".join(f"{name:>12}" for name in ("mean", "p50", "p99", "max", "slowest 1 %"))
    yield "Environments alone" + " " * 9 + heads
    for name, times in (("step", costs.step), ("reset", costs.reset)):
        if times.mean:
            *seconds, tail_weight = times.summary().values()
            cells = "".join(f"{_ms(s):>12}" for s in seconds)
            yield f"  {name:<25}{cells}{tail_weight:>7.0%} of all"
    computing = f"  {costs.cpu_share:.0%} of that is computing."
    if (rate := profile.lock_step) is None:
        yield computing
    else:
        num_envs = profile.settings.run.num_envs
        yield (
            f"{computing} In lock-step, each step of all {num_envs} would take "
            f"{_ms(costs.step.mean_of_slowest(num_envs))} (the slowest): {rate:,.0f} env steps/s "
            "at best."
        )


def _ceilings(profile: Profile) -> Iterable[str]:
    run, ceilings = profile.settings.run, profile.ceilings
    yield f"Ceilings (env steps/s on {cpu_cores()} cores)"
    words = {"env": "environments only", "inference": "inference only", "learning": "learning only"}
    for name, text in words.items():
        yield f"  {text:<25}{ceilings[name]:>14,.0f}"
    rule = "whichever is less" if run.lag else "one after the other"
    yield f"  {'together':<25}{ceilings['together']:>14,.0f}  ({rule})"
    if (share := profile.of_limit) is not None:
        yield f"  {'reached':<25}{profile.env_steps_per_s:>14,.0f}  (measured; {share:.0%} of that)"
    model = "by the cost model: what changes are compared with"
    yield f"  {'predicted':<25}{profile.predicted:>14,.0f}  ({model})"


def _advice(profile: Profile) -> Iterable[str]:
    if profile.settings.run.inference == "learner":
        yield (
            "The cost model has no --inference learner. The predictions are for workers that act "
            "themselves."
        )
    part, gain = max(profile.gains.items(), key=lambda item: item[1])
    if gain < _MIN_GAIN:
        yield "Bottleneck: none. No single part would gain more than 10 % if it cost nothing."
    else:
        others = sorted(profile.gains.items(), key=lambda item: -item[1])
        listed = ", ".join(f"{name} {times:.2f}" for name, times in others)
        yield f"Bottleneck: {_LIMITS[part]}. Times as fast without each part: {listed}."
    if not profile.changes:
        yield (
            "What to change: nothing. No other number of workers, vectors or learners and no other "
            "lag would gain 3 % or more on this machine."
        )
        return
    yield "What to change, with the predicted gain:"
    for change in profile.changes:
        yield f"  {change.flags:<50} {change.gain - 1:+.0%}"


def _ms(seconds: float) -> str:
    if seconds >= 1e-3:
        return f"{seconds * 1e3:,.3g} ms"
    return f"{seconds * 1e6:,.3g} us"
