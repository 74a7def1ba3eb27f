"""What a profile says: where a run's time goes, what limits it, and what to change.

Left out: making one (`profiler.py`), and telling it (`result.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import headrace
from headrace.config.resolve import Settings, cpu_cores
from headrace.cost_model.costs import Costs
from headrace.cost_model.model import lock_step_s
from headrace.meter import Laps
from headrace.tools.profile.advice import Change
from headrace.tools.profile.timeline_plots import is_learner


@dataclass(frozen=True)
class Profile:
    """What came out.

    Attributes:
        settings: of the run.
        costs: of its parts, measured apart.
        env_steps_per_s: of the run; None: it had fewer than two updates.
        seconds: by process and span; `wait` of samplers in two parts (`timeline_plots.py`).
        tracks: what each process did when.
        ceilings: env steps/s of environments alone, inference alone, one learner alone (of all
            learners), and of the three together.
        predicted: env steps/s, from `costs`.
        gains: see `limits.gains`.
        changes: what would help most.
        is_whole: environments have a vector of their own, which steps many at a time.
        rates: what `headrace plan` needs; None: environments are stepped where the learner is.
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
        """Share of the ceilings' limit that the run reached."""
        rate = self.env_steps_per_s
        return None if rate is None else rate / self.ceilings["together"]

    @property
    def lock_step(self) -> float | None:
        """Env steps/s if each step waited for the slowest of all environments; None: `is_whole`."""
        if self.is_whole:
            return None
        num_envs = self.settings.run.num_envs
        return num_envs / lock_step_s(self.costs, num_envs)

    def to_json(self) -> dict[str, Any]:
        """Plain data, from which `headrace plan` and others go on."""
        step, reset = self.costs.step, self.costs.reset
        return {
            "headrace": headrace.__version__,
            "settings": self.settings.flat(),
            "cores": cpu_cores(),
            "env_steps_per_s": self.env_steps_per_s,
            "seconds": self.seconds,
            "times": {
                name: {
                    "mean_s": of.mean,
                    "p50_s": of.percentile(0.5),
                    "p99_s": of.percentile(0.99),
                    "max_s": of.max,
                    "tail_weight": of.tail_weight,
                }
                for name, of in (("step", step), ("reset", reset))
            },
            "lock_step_env_steps_per_s": self.lock_step,
            "ceilings": self.ceilings,
            "of_limit": self.of_limit,
            "predicted_env_steps_per_s": self.predicted,
            "gains": self.gains,
            "changes": [{"settings": c.settings, "gain": c.gain} for c in self.changes],
            "rates": self.rates,
            "costs": self.costs.to_json(),
        }


# A profile in words.


_LEAST_SHARE = 0.005  # of a span that is listed
_NEAR = 1.1  # gains below which something is no bottleneck

_LIMITS = {
    "env": "the environments' steps and resets",
    "inference": "inference: the policy acting",
    "learning": "learning",
    "transport": "handing orders and experience over between processes",
    "cores": "cores: more processes want to compute than there are cores",
    "waiting": "waiting: samplers wait for the slowest, or for the learner",
}


def told(profile: Profile) -> str:
    """All of it, for people."""
    return "\n".join(
        [
            *_head(profile),
            "",
            *_where(profile),
            "",
            *_times(profile),
            "",
            *_ceilings(profile),
            "",
            *_what_next(profile),
        ]
    )


def _head(profile: Profile) -> Iterable[str]:
    run = profile.settings.run
    rate = profile.env_steps_per_s
    measured = "too few updates for a rate" if rate is None else f"{rate:,.0f} env steps/s"
    yield (
        f"{run.algo} on {run.env}: {run.num_envs} envs x {run.num_steps} steps, "
        f"{run.num_workers or 'no'} workers, vectors of {run.envs_per_vector}, learners: "
        f"{run.num_learners}, lag {run.lag}: {measured}"
    )


def _where(profile: Profile) -> Iterable[str]:
    """Shares by span: each learner, and the mean of its samplers."""
    learners = {n: s for n, s in profile.seconds.items() if is_learner(n)}
    samplers = [s for n, s in profile.seconds.items() if not is_learner(n)]
    columns = dict(learners)
    if samplers:
        their = {span for of_one in samplers for span in of_one}
        mean = {sp: sum(s.get(sp, 0.0) for s in samplers) / len(samplers) for sp in their}
        columns[f"{len(samplers)} samplers, mean"] = mean
    yield "Where the time goes" + " " * 7 + "".join(f"{name:>22}" for name in columns)
    totals = {name: sum(of.values()) for name, of in columns.items()}
    spans = dict.fromkeys(span for of in columns.values() for span in of)
    by_size = sorted(spans, key=lambda span: -max(of.get(span, 0.0) for of in columns.values()))
    for span in by_size:
        shares = {n: of.get(span, 0.0) / totals[n] for n, of in columns.items()}
        if max(shares.values()) >= _LEAST_SHARE:
            cells = (f"{columns[n].get(span, 0.0):>13.2f} s {of:>6.1%}" for n, of in shares.items())
            yield f"  {span:<24}" + "".join(cells)


def _times(profile: Profile) -> Iterable[str]:
    costs = profile.costs
    yield (
        "Environments alone"
        + " " * 9
        + "".join(f"{name:>12}" for name in ("mean", "p50", "p99", "max", "slowest 1 %"))
    )
    for name, of in (("step", costs.step), ("reset", costs.reset)):
        if of.mean:
            times = (of.mean, of.percentile(0.5), of.percentile(0.99), of.max)
            cells = "".join(f"{_ms(s):>12}" for s in times)
            yield f"  {name:<25}{cells}{of.tail_weight:>7.0%} of all"
    yield f"  {costs.cpu_share:.0%} of that is computing." + _lock_step(profile)


def _lock_step(profile: Profile) -> str:
    if profile.lock_step is None:
        return ""
    num_envs = profile.settings.run.num_envs
    slowest = profile.costs.step.mean_of_slowest(num_envs)
    return (
        f" In lock-step, each step of all {num_envs} would take {_ms(slowest)} (the slowest): "
        f"{profile.lock_step:,.0f} env steps/s at best."
    )


def _ceilings(profile: Profile) -> Iterable[str]:
    run, found = profile.settings.run, profile.ceilings
    yield f"Ceilings (env steps/s on {cpu_cores()} cores)"
    words = {"env": "environments only", "inference": "inference only", "learning": "learning only"}
    for name, text in words.items():
        yield f"  {text:<25}{found[name]:>14,.0f}"
    how = "whichever is less" if run.lag else "one after the other"
    yield f"  {'together':<25}{found['together']:>14,.0f}  ({how})"
    if (share := profile.of_limit) is not None:
        yield f"  {'reached':<25}{profile.env_steps_per_s:>14,.0f}  ({share:.0%} of that)"
    yield f"  {'predicted':<25}{profile.predicted:>14,.0f}  (from these parts, put together)"


def _what_next(profile: Profile) -> Iterable[str]:
    if profile.settings.run.inference == "learner":
        yield (
            "The model has samplers that act themselves, and no --inference learner: what follows, "
            "and what is predicted, is of them."
        )
    part, gain = max(profile.gains.items(), key=lambda item: item[1])
    if gain < _NEAR:
        yield "Bottleneck: none; no single part would help by more than 10 % if it cost nothing."
    else:
        others = sorted(profile.gains.items(), key=lambda item: -item[1])
        listed = ", ".join(f"{name} {of:.2f}" for name, of in others)
        yield f"Bottleneck: {_LIMITS[part]}. Times as fast, if it cost nothing: {listed}."
    if not profile.changes:
        yield (
            "What to change: nothing that was tried (workers, vectors, learners, lag) would gain "
            "3 % or more on this machine."
        )
        return
    yield "What to change, with the predicted gain:"
    for change in profile.changes:
        yield f"  {change.flags:<50} {change.gain - 1:+.0%}"


def _ms(seconds: float) -> str:
    if seconds >= 1e-3:
        return f"{seconds * 1e3:,.3g} ms"
    return f"{seconds * 1e6:,.3g} us"
