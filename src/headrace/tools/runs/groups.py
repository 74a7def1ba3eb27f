"""Groups of runs whose settings differ in seed and speed alone, and their labels.

Left out: their results (`comparison.py`).
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.tools.runs.records import RunRecord

NO_MATTER = frozenset(
    {
        "seed",
        # Where and how fast: what is learned is the same, but for rounding.
        *("num_workers", "num_learners", "envs_per_vector", "learner_threads", "device"),
        *("compile", "num_accumulation_steps", "deterministic", "arithmetic", "inference"),
        *("backend", "rank_timeout_s", "check_ranks", "replay_limit_s", "replay_dir"),
        *("cluster", "gpus_per_learner", "cpus_per_worker"),
        *("worker_resources", "learner_resources"),
        # What is done about faults, and what is evaluated and saved.
        *("on_env_error", "on_worker_loss", "max_worker_restarts", "env_timeout_s", "guards"),
        *("eval_every", "eval_episodes", "checkpoint_every_s", "keep", "save_replay", "timeline"),
        "stop_after_s",
    }
)
"""Settings in which the runs of a group may differ."""
_MAX_IN_LABEL = 4


@dataclass(frozen=True)
class Group:
    """Runs with the same settings, and what sets them apart from other groups.

    Attributes:
        label: environment and algorithm, if groups differ in them, and the settings in which those
            of the same environment and algorithm differ; a directory, if these are many.
        settings: those that matter.
        records: the runs, ordered by seed.
    """

    label: str
    settings: Mapping[str, Any]
    records: tuple[RunRecord, ...]

    @property
    def env(self) -> str:
        """Name of the environment."""
        return str(self.settings["env"])

    @property
    def seeds(self) -> list[int]:
        """Seeds of the runs."""
        return [record.settings["seed"] for record in self.records]


def group(records: Iterable[RunRecord]) -> list[Group]:
    """Return the groups of runs that are not damaged, in the order of their first runs."""
    found: dict[str, list[RunRecord]] = {}
    for record in records:
        found.setdefault(_text(_that_matter(record.settings)), []).append(record)
    members = [tuple(sorted(each, key=_seed)) for each in found.values()]
    settings = [_that_matter(each[0].settings) for each in members]
    return [
        Group(label, of, records)
        for label, of, records in zip(_labels(settings, members), settings, members, strict=True)
    ]


def differences(settings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of settings that are not the same in all.

    One that another algorithm does not have is no difference. One that the same algorithm does not
    have is: another version of Headrace wrote it.
    """
    settings = list(settings)
    names = dict.fromkeys(["env", "algo", *(name for each in settings for name in each)])
    return [name for name in names if _differs(name, settings)]


def _differs(name: str, settings: list[Mapping[str, Any]]) -> bool:
    owners = [each for each in settings if name in each]
    algorithms = {each["algo"] for each in owners}
    others = [each for each in settings if name not in each and each["algo"] in algorithms]
    return len({_text(each[name]) for each in owners}) > 1 or bool(others)


def format_setting(value: Any) -> str:
    """Return a setting as text."""
    return value if isinstance(value, str) and value else _text(value)


def _that_matter(settings: Mapping[str, Any]) -> dict[str, Any]:
    left_out = NO_MATTER
    if settings.get("lr_scale", "none") != "none":  # the learning rate follows from the learners
        left_out -= {"num_learners"}
    return {name: value for name, value in settings.items() if name not in left_out}


def _seed(record: RunRecord) -> int:
    return int(record.settings["seed"])


def _labels(settings: list[dict[str, Any]], members: list[tuple[RunRecord, ...]]) -> list[str]:
    """Return a label for each group, all of them different.

    If groups differ in many settings, as trials of a study do, it is the directory of a run.
    """
    apart = [name for name in ("env", "algo") if name in differences(settings)]
    labels = []
    above = os.path.commonpath([record.dir.parent for records in members for record in records])
    for own, records in zip(settings, members, strict=True):
        alike = [each for each in settings if _place(each) == _place(own)]
        names = differences(alike)
        words = [str(own[name]) for name in apart]
        if len(names) > _MAX_IN_LABEL:
            more = f" and {len(records) - 1} more" if len(records) > 1 else ""
            words.append(f"{os.path.relpath(records[0].dir, above)}{more}")
        else:
            words += [f"{name}={format_setting(own.get(name))}" for name in names]
        labels.append(" ".join(words) or f"{own['env']} {own['algo']}")
    numbers = {text: iter(range(1, len(labels) + 1)) for text in labels}
    return [
        f"{label} ({next(numbers[label])})" if labels.count(label) > 1 else label
        for label in labels
    ]


def _place(settings: Mapping[str, Any]) -> tuple[str, str]:
    return settings["env"], settings["algo"]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
