"""The verb `track`, apart from the others: its process runs beside a training, and stays small."""

import contextlib
import signal
from dataclasses import dataclass
from typing import Annotated

import tyro

from headrace.cli.verbs import JsonVerb, RunDir, Verb
from headrace.tools.trackers.follow import track


@dataclass(frozen=True, kw_only=True)
class _Track(JsonVerb):
    run_dir: RunDir
    """Directory of the run, which may still be running."""
    to: Annotated[str, tyro.conf.arg(metavar="{trackio,mlflow,wandb}")]
    """The tracker."""
    project: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = ""
    """Project of the run at the tracker (an experiment, in MLflow). Default: headrace."""
    follow: bool = False
    """Go on until the run ends."""

    def execute(self, argv: list[str]) -> None:
        """Send the rows that the tracker does not have."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _interrupt)
        with contextlib.redirect_stdout(self.out):  # trackers print, too
            count, last = track(self.run_dir, self.to, self.project, follow=self.follow)
        self.answer(
            {"tracker": self.to, "rows": count, "env_steps": last},
            f"Sent {count:,} rows to {self.to}, which has {self.run_dir} up to env step {last:,}.",
        )


def _interrupt(number: int, _frame: object) -> None:
    """End what was begun: the tracker is closed on the way."""
    raise KeyboardInterrupt(number)


FLAGS: dict[str, type[Verb]] = {"track": _Track}
