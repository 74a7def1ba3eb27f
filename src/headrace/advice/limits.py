"""What limited a run, by its own meters, and the one change of settings that would help most.

Gains are bounds: what more processes share is taken to be shared evenly, at no cost. Left out:
measuring the parts apart, and predictions (`headrace profile`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from headrace.advice.changes import Change, candidates
from headrace.config.derive import derive
from headrace.config.run_config import RunConfig
from headrace.config.settings import Settings
from headrace.errors import ConfigError
from headrace.spec import Interface

LIMITS = {
    "env": "the environments' steps and resets",
    "inference": "inference: the policy acting",
    "learning": "learning",
}
"""Parts that may limit a run, in words."""

Seconds = Mapping[str, float]
"""Seconds by span (`meter.SPANS`)."""

_SAMPLING = {"env": ("env_step", "env_reset"), "inference": ("infer",), "bookkeeping": ("rollout",)}
_OTHERS = {
    "learning": ("learn", "transport"),
    "replay": ("replay",),
    "ranks": ("ranks", "allreduce"),
    "evaluation": ("eval",),
    "saving": ("checkpoint", "log"),
}
_WORDS = LIMITS | {
    "bookkeeping": "what workers do between two steps of the environments",
    "replay": "the replay buffer: storing and drawing transitions",
    "ranks": "learners that wait for each other",
    "evaluation": "evaluation",
    "saving": "checkpoints and logs",
}
_MIN_S = 10.0
_MIN_GAIN = 1.25  # of a bound: passing data between processes takes a part of it
_MIN_ROWS = 256  # of a minibatch's share: the time of a smaller one hardly falls with its rows


@dataclass(frozen=True)
class Place:
    """Where the processes of a run are.

    Attributes:
        cores: CPU cores that they may use, on this machine.
        device: type of the learner's device.
        has_gpu: True if this machine has a GPU, used or not.
        is_small: True if all networks are small enough for a gradient that is written out.
        on_device: True if all environments are one vector on the learner's device.
        may_have_workers: True if processes other than the learner's can step the environments.
    """

    cores: int
    device: str
    has_gpu: bool
    is_small: bool
    on_device: bool
    may_have_workers: bool
    interface: Interface


class _Time(NamedTuple):
    """Shares of the time of the first learner, without its start.

    Attributes:
        parts: by part that is not sampling.
        sampling: of making batches; with workers, of waiting for them.
        sampled_by: the part that takes most of sampling, and its own share.
        busy: with workers, the share of their time in which they do not wait; else `sampling`.
        waits: of waiting for other learners, by rank.
    """

    parts: dict[str, float]
    sampling: float
    sampled_by: tuple[str, float]
    busy: float
    waits: dict[str, float]

    @property
    def limit(self) -> str:
        part = max(self.parts, key=self.parts.__getitem__)
        return part if self.parts[part] > self.sampling else self.sampled_by[0]


def advise(
    settings: Settings, learner: Seconds, others: Mapping[str, Seconds], place: Place
) -> list[str]:
    """Return what limited a run and what would help most, a sentence each.

    Args:
        learner: seconds of rank 0's process.
        others: those of the other processes, by name, as in `summary["worker_meters"]`.

    Returns:
        [] if the run took less than 10 s, or less than its start.
    """
    start_s = learner.get("start", 0.0)
    if sum(learner.values()) - start_s < max(_MIN_S, start_s):
        return []
    time = _measure(learner, others)
    return [
        f"What limited this run: {_limit(time, settings, place)}.",
        f"What would help most: {_remedy(time, settings, place)}.",
    ]


def _measure(learner: Seconds, others: Mapping[str, Seconds]) -> _Time:
    workers = [s for name, s in others.items() if name.split(", ")[-1].startswith("worker ")]
    total = {span: sum(s.get(span, 0.0) for s in workers) for s in workers for span in s}
    by_part = _shares(total or learner, _SAMPLING)
    part = max(by_part, key=by_part.__getitem__)
    sampling = busy = sum(by_part.values())
    if workers:
        sampling = _shares(learner, {"wait": ("wait",)})["wait"]
        busy = 1.0 - _shares(total, {"wait": ("wait",)})["wait"]
    ranks = {"rank 0": learner} | {n: s for n, s in others.items() if n.split()[0] == "rank"}
    waits = {n: _shares(s, _OTHERS)["ranks"] for n, s in ranks.items() if "," not in n}
    return _Time(_shares(learner, _OTHERS), sampling, (part, by_part[part]), busy, waits)


def _shares(seconds: Seconds, parts: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    total = max(1e-9, sum(seconds.values()) - seconds.get("start", 0.0))
    return {p: sum(seconds.get(s, 0.0) for s in spans) / total for p, spans in parts.items()}


def _limit(time: _Time, settings: Settings, place: Place) -> str:
    run, limit = settings.run, time.limit
    words = _WORDS[limit]
    if limit in time.parts:
        words += f", {time.parts[limit]:.0%} of the time"
        if limit == "ranks" and min(time.waits.values()) < max(time.waits.values()) / 2:
            words += f" (they wait for {min(time.waits, key=time.waits.__getitem__)})"
        if _is_replay(limit, settings) and 1 / (1 - time.sampling) <= _MIN_GAIN:
            words += ": more workers change nothing"
        return words
    if run.num_workers:
        return (
            f"{words}. The learner waited for {run.num_workers} workers {time.sampling:.0%} of the "
            "time"
        )
    where = "one process" if run.num_learners == 1 else f"{run.num_learners} learners"
    cores = "" if run.cluster else f" on {place.cores} core{'s' if place.cores > 1 else ''}"
    return f"{words}, {time.sampled_by[1]:.0%} of the time, in {where}{cores}"


def _remedy(time: _Time, settings: Settings, place: Place) -> str:
    run, limit = settings.run, time.limit
    if limit == "evaluation":
        return "a larger --eval-every, or fewer --eval-episodes"
    if limit == "saving":
        return "a larger --checkpoint-every-s, or a faster disk"
    fewer_steps = ""
    if _is_replay(limit, settings):
        fewer_steps = (
            "a smaller --replay-ratio: fewer gradient steps for each env step, which changes what "
            "is learned"
        )
    if run.cluster:
        return fewer_steps or _remedy_on_cluster(limit)
    if flags := _gpu_flags(limit, settings, place):
        return f"the GPU of this machine: {flags}"
    if change := _best_change(time, settings, place):
        return f"{change.flags} ({_effect(change, run)}): at best {change.gain:.1f} times as fast"
    threads = (place.cores - (run.num_workers if run.lag else 0)) // run.num_learners
    is_free = place.device == "cpu" and not place.is_small and threads > run.learner_threads
    if limit == "learning" and is_free:
        return f"--learner-threads {threads}, for cores that idle (results differ by rounding)"
    if fewer_steps:
        return fewer_steps
    if limit not in time.parts:
        faster = "faster environments" if limit == "env" else "a faster CPU"
        if not place.may_have_workers:
            return f"{faster} (only the learner's process can step environments of this kind)"
        if max(run.num_workers, run.num_learners) >= place.cores:
            return f"{faster}, or more machines (--cluster): all cores of this one are taken"
    return "nothing that leaves what is learned as it is (headrace profile tries more)"


def _is_replay(limit: str, settings: Settings) -> bool:
    """Return whether the gradient steps of a replay are the limit."""
    return limit in ("learning", "replay") and settings.algorithm.data == "replay"


def _remedy_on_cluster(limit: str) -> str:
    if limit == "learning":
        return "a GPU for each learner, or more learners (--num-learners) of large minibatches"
    if limit == "ranks":
        return "fewer learners (--num-learners)"
    return "more machines in the cluster, for more workers"


def _gpu_flags(limit: str, settings: Settings, place: Place) -> str:
    """Return the flags with which a GPU takes over what limits the run; "" if it would not help."""
    run, too_small = settings.run, settings.source["device"].startswith("auto,")
    if not place.has_gpu or too_small or (place.is_small and not place.on_device):
        return ""
    device = "--device cuda" if place.device == "cpu" else ""
    if limit == "learning" or (place.on_device and place.interface == "kernel"):
        return device
    asks = run.inference == "worker" and place.may_have_workers and not place.on_device
    if limit != "inference" or not asks:
        return ""
    workers = "" if run.num_workers else "--num-workers -1"
    return " ".join(filter(None, (device, workers, "--inference learner")))


def _best_change(time: _Time, settings: Settings, place: Place) -> Change | None:
    changes = []
    for values in candidates(settings, place.cores, on_device=place.on_device):
        if not _may_be_named(values, settings, place):
            continue
        try:
            changed = _changed(settings, values, place)
        except ConfigError:  # these sizes do not fit together
            continue
        changes.append(Change(values, _gain(time, settings.run, changed.run, place.cores)))
    # Of equal ones, that with the fewest flags and processes.
    best = max(
        changes,
        key=lambda c: (round(c.gain, 2), -len(c.settings), -c.settings.get("num_workers", 0)),
        default=None,
    )
    return best if best and best.gain >= _MIN_GAIN else None


def _may_be_named(values: Mapping[str, Any], settings: Settings, place: Place) -> bool:
    """Return whether a change can be judged by a meter, and leaves the algorithm as it is."""
    run, algorithm = settings.run, settings.algorithm
    if values.keys() & {"num_envs", "algo"} or values.keys() == {"envs_per_vector"}:
        return False
    if "lag" in values and algorithm.accepts_any_lag:
        return False
    # Environments' own vectors, and those on the device, may use all cores already.
    has_threads = run.vectorization == "native" or not place.may_have_workers
    workers = values.get("num_workers", 0)
    if workers > place.cores or (workers and has_threads):
        return False
    learners = values.get("num_learners", 1)
    scaled = run.lr_scale != "none" or run.num_envs_per_learner
    rows = algorithm.minibatch_rows(run, settings.algo) // learners
    return learners == 1 or not (scaled or place.on_device or rows < _MIN_ROWS)


def _changed(settings: Settings, values: Mapping[str, Any], place: Place) -> Settings:
    """Return the settings of the same run with other flags, or raise ConfigError."""
    follows = settings.source["envs_per_vector"].startswith(("follows", "auto,"))
    free = {"envs_per_vector": 0} if follows else {}
    run = replace(settings.run, **free | dict(values))
    return derive(replace(settings, run=run), place.interface, place.cores)


def _gain(time: _Time, now: RunConfig, then: RunConfig, cores: int) -> float:
    """Return how many times as fast a run would be at best."""
    work = (time.busy if now.lag else time.sampling) * _at_once(now, cores)
    learning = time.parts["learning"] * min(now.num_learners, cores)
    rest = max(0.0, 1.0 - time.sampling - time.parts["learning"])
    rest -= time.parts["ranks"] if then.num_learners == 1 else 0.0
    sample_s, learn_s = work / _at_once(then, cores), learning / min(then.num_learners, cores)
    if then.lag and then.num_workers:
        return 1.0 / max(sample_s, learn_s + rest, (work + learning + rest) / cores, 1e-9)
    return 1.0 / max(sample_s + learn_s + rest, 1e-9)


def _at_once(run: RunConfig, cores: int) -> float:
    """Return how many vectors are stepped at once, on average."""
    processes = run.num_workers or run.num_learners
    rounds = -(-run.num_vectors // processes)
    return max(1.0, min(run.num_vectors / rounds, cores))


def _effect(change: Change, run: RunConfig) -> str:
    if "lag" in change.settings:
        return (
            "workers sample while the learner learns; their weights are one update older, and so "
            "what is learned changes"
        )
    learners = change.settings.get("num_learners", 0)
    if learners > run.num_learners:
        return "each learner takes its share of the environments and of each minibatch"
    if learners:
        return "one learner waits for no other"
    act = "" if run.inference == "learner" else "act and "
    return f"{change.settings['num_workers']} processes {act}step environments at once"
