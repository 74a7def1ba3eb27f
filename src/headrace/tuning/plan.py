"""What a study is to do, and what it has done: the files of its directory.

    study.json           the plan; trials, budget and cluster may change when it goes on
    trials/0007.json     a trial: its settings, its state, what was measured at its rungs
    trials/0007          its run, an ordinary run directory; with several seeds 0007-s1, ...
    fresh/0007-s1000     its run with a fresh seed, once the search has ended
    best.toml            what came out, for `headrace train ENV --config`
    study.html           all of it on one page

Each file is written whole, so that a study goes on after any end. Left out: running (`study.py`).
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from headrace.errors import RunDirError, flags_of, quoted
from headrace.storage.files import read_capped, write_whole
from headrace.storage.run_dir import STUDY, writable
from headrace.tuning.metric import Metric

_MAX_BYTES = 1 << 24


@dataclass(frozen=True)
class Plan:
    """What a study is to do.

    Attributes:
        verb: `tune` or `sweep`.
        fixed: settings of all trials, of flags and file.
        sizes: of processes, decided once for all runs of the study.
        code: which of the settings are code, and must be named again to go on.
        space: the parameters (`space.to_json`).
        parallel: runs at a time; 0: as many as there is room for.
        seeds: of each trial's runs.
        rungs: env steps at which trials are measured; the last is the whole run.
        final_trials: the best so many, and the preset, are measured on `final_seeds` at the end.
        budget_s: seconds for all; 0: no limit.
        cluster: on which the runs are; "": on this machine.
        population: members of population-based training; 0: a search.
    """

    verb: Literal["tune", "sweep"]
    env: str
    algo: str
    fixed: dict[str, Any]
    sizes: dict[str, Any]
    code: list[str]
    space: dict[str, Any]
    sampler: str
    pruner: str
    metric: Metric
    trials: int
    parallel: int
    seed: int
    seeds: list[int]
    rungs: list[int]
    eval_episodes: int
    final_trials: int
    final_seeds: list[int]
    budget_s: float
    version: str
    cluster: str = ""
    population: int = 0

    @property
    def total_env_steps(self) -> int:
        """Env steps of a whole run."""
        return self.rungs[-1]

    @property
    def method(self) -> str:
        """How settings are searched for, as text."""
        if self.population:
            return f"a population of {self.population}"
        return f"sampler {self.sampler}, pruning {self.pruner}"

    @property
    def cores(self) -> int:
        """CPU cores that a run takes on a cluster."""
        sizes = self.sizes
        return int(sizes["num_learners"] * sizes["learner_threads"] + sizes["num_workers"])

    def command(self, folder: Path) -> str:
        """Return the command that goes on; it names code again, as far as that has a name."""
        known = self.fixed | {"algo": self.algo}
        flags = {name: known[name] for name in self.code if known.get(name)}
        env = f"{self.env} " if "env" in self.code and ":" in self.env else ""
        return f"headrace {self.verb} {env}{flags_of(flags | {'resume': folder})}"

    def train_command(self, config: Path) -> str:
        """Return the command, or in Python the call, that trains with the settings of a file."""
        if "env" in self.code and ":" not in self.env:  # code without a name
            return f"headrace.train({self.env}, config={str(config)!r}) in Python"
        return f"headrace train {self.env} --config {config}"

    def write(self, folder: Path) -> None:
        """Write the plan; RunDirError if there is no room."""
        _write(folder / STUDY, asdict(self))


@dataclass
class Trial:
    """What is known of a trial.

    Attributes:
        changes: settings besides the plan's; none for the preset.
        values: of the space's parameters, as its runs have them.
        state: `running`: to its next rung; `waiting` at one; `whole`: trained to its
            end, or to its goal; `failed`, for a `reason`; `replaced` by another member of the
            population.
        measured: of each rung that it reached, what was measured, by seed.
        fresh: what was measured with fresh seeds, by seed.
        failures: why runs with fresh seeds failed, by seed.
        seconds: of all its processes.
        parent, born, replaces: in a population, the trial that it is a copy of, at which rung, and
            the trial that it took the place of; -1: none.
    """

    number: int
    changes: dict[str, Any]
    values: dict[str, Any]
    state: Literal["running", "waiting", "whole", "failed", "replaced"] = "running"
    reason: str = ""
    measured: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    fresh: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    spent_s: float = 0.0
    """Seconds of the study when this was written."""
    parent: int = -1
    born: int = -1
    replaces: int = -1

    @property
    def is_preset(self) -> bool:
        """Whether nothing is changed."""
        return not self.changes

    @property
    def name(self) -> str:
        """What it is called."""
        of = f", copy of {self.parent}" if self.parent >= 0 else ""
        return "preset" if self.is_preset else f"trial {self.number}{of}"

    def has_fresh(self, seed: int) -> bool:
        """Return whether its run with a fresh seed has ended."""
        return str(seed) in self.fresh or str(seed) in self.failures

    def rung(self, num_seeds: int) -> int:
        """Return the last rung that all seeds have reached; -1: none."""
        return sum(len(each) == num_seeds for each in self.measured) - 1

    def scores(self, metric: Metric, num_seeds: int) -> tuple[float, ...]:
        """Return the scores at the rungs that all seeds have reached."""
        whole = [each for each in self.measured if len(each) == num_seeds]
        return tuple(metric.score(list(each.values())) for each in whole)


def run_dir(folder: Path, plan: Plan, number: int, seed: int, *, fresh: bool = False) -> Path:
    """Return the directory of a run of a trial."""
    if fresh:
        return folder / "fresh" / f"{number:04d}-s{seed}"
    suffix = f"-s{seed}" if len(plan.seeds) > 1 else ""
    return folder / "trials" / f"{number:04d}{suffix}"


def write_trial(folder: Path, trial: Trial) -> None:
    """Write what is known of a trial; RunDirError if there is no room."""
    _write(folder / "trials" / f"{trial.number:04d}.json", asdict(trial))


def read_plan(folder: Path) -> Plan:
    """Read a study's plan; RunDirError if there is none, or it is damaged."""
    try:
        data = _read(folder / STUDY)
        data["metric"] = Metric(**data["metric"])
        missing = {f.name for f in fields(Plan) if f.default is MISSING} - data.keys()
        if missing:
            raise ValueError(f"no {', '.join(sorted(missing))}")
        return Plan(**data)
    except FileNotFoundError:
        raise RunDirError(
            f"{folder} is no study: it has no {STUDY}.\n"
            "Expected a directory that `headrace tune` or `headrace sweep` has written to."
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise RunDirError(f"{folder / STUDY} is damaged: {quoted(error)}.") from None


def read_trials(folder: Path) -> list[Trial]:
    """Read all trials, by their numbers; RunDirError if one is damaged."""
    trials = []
    for path in sorted((folder / "trials").glob("[0-9]*.json")):
        try:
            trials.append(Trial(**_read(path)))
        except (ValueError, TypeError) as error:
            raise RunDirError(f"{path} is damaged: {quoted(error)}.") from None
    return trials


def _write(path: Path, data: Mapping[str, Any]) -> None:
    with writable(path.parent):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_whole(path, (json.dumps(data, indent=1) + "\n").encode())


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(read_capped(path, _MAX_BYTES, RunDirError)))
