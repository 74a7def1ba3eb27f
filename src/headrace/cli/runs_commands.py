"""The commands about many runs, and their flags. This file imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from headrace.cli.verbs import JsonVerb, OptionalPath, Verb
from headrace.errors import ConfigError
from headrace.tools.runs import listing
from headrace.tools.runs.records import STATES, load_runs

_PATTERN = tyro.conf.arg(metavar="PATTERN", help_behavior_hint="")
_SHOWN_STATE = tyro.conf.arg(metavar="|".join(STATES), help_behavior_hint="")


@dataclass(frozen=True, kw_only=True)
class _Runs(JsonVerb):
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")] = Path("runs")
    """Folder with runs, at any depth."""
    sort: Annotated[str, tyro.conf.arg(metavar="|".join(listing.COLUMNS))] = "dir"
    """Column to sort by. Runs without a value there come last."""
    reverse: bool = False
    """The largest first. Of age: the oldest."""
    env: Annotated[str, _PATTERN] = ""
    """Show only runs in environments of this name, which may have * and ?, as in 'ALE/*'."""
    algo: Annotated[str, _PATTERN] = ""
    """Show only runs of algorithms of this name, likewise."""
    state: Annotated[str, _SHOWN_STATE] = ""
    """Show only runs in this state. running: a process trains it. vanished: that process is gone
    and wrote no end. done: it reached its env steps or its return. failed: an error ended it.
    stopped: it can be resumed. ended: before its first checkpoint. imported: from another
    library, and not trained on. pulled: policies that somebody shared. damaged: a file cannot be
    read."""

    def execute(self, argv: list[str]) -> None:
        """Print the runs; ConfigError, RunDirError."""
        records = listing.chosen(
            listing.ordered(load_runs(self.folder), self.sort, reverse=self.reverse),
            env=self.env,
            algo=self.algo,
            state=self.state,
        )
        self.answer(listing.to_json(records, self.folder), listing.describe(records, self.folder))


_RunDirs = Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="[RUN_DIR ...]")]


@dataclass(frozen=True, kw_only=True)
class _Compare(JsonVerb):
    run_dirs: _RunDirs
    """Directories of runs, or folders with runs. Runs that differ in seed and speed alone are one
    group."""
    output: OptionalPath = None
    """Draw the learning curves of the groups into this file (PNG, SVG, PDF)."""
    html: OptionalPath = None
    """Write curves and tables to this file, as one page (HTML)."""

    def execute(self, argv: list[str]) -> None:
        """Print the comparison, and draw it; ConfigError, RunDirError, MissingExtraError."""
        from headrace.tools.plotting import check_output
        from headrace.tools.runs.comparison import compare  # loads NumPy

        if self.output is not None:
            check_output(self.output)
        if self.html is not None and (self.html.is_dir() or not self.html.parent.is_dir()):
            raise ConfigError(f"--html {self.html}: expected a file in a folder that exists.")
        comparison = compare(self.run_dirs)
        if not self.json:
            self.say(comparison.describe())
        if self.output is not None:
            comparison.draw(self.output)
            self.say(f"\nLearning curves: {self.output}")
        if self.html is not None:
            from headrace.tools.runs.page import write_page  # loads torch

            write_page(comparison, self.html)
            self.say(f"\nPage: {self.html}")
        if self.json:
            self.answer(comparison.to_json(), "")


@dataclass(frozen=True, kw_only=True)
class _Plot(Verb):
    run_dirs: _RunDirs
    """Directories of runs."""
    output: OptionalPath = None
    """The picture (PNG); default: curve.png in the first directory."""

    def execute(self, argv: list[str]) -> None:
        """Draw one curve for each run; ConfigError, RunDirError, MissingExtraError."""
        from headrace.tools.plotting import draw_curves  # loads NumPy

        print(f"Learning curve: {draw_curves(list(self.run_dirs), self.output)}")


FLAGS: dict[str, type[Verb]] = {"runs": _Runs, "compare": _Compare, "plot": _Plot}
