"""Outputs of a run: metrics.jsonl and TensorBoard in its directory, and the terminal."""

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from headrace.storage.files import AppendFile, RetriedWrite, write_whole
from headrace.storage.metrics import (
    FILE,
    format_means,
    is_number,
    read_metrics,
    returns_by_policy,
)
from headrace.storage.run_dir import writable

_PLAIN_EVERY_S = 5.0
_LIVE_PER_S = 4


class MetricsLog:
    """`metrics.jsonl` (one object per update) and TensorBoard events, in the run directory.

    This thread writes them, not TensorBoard's writer, whose thread dies when a disk is full.
    """

    def __init__(self, run_dir: Path, version: int, env_steps: int) -> None:
        """Continue after update `version`. Rows of later updates are dropped."""
        path, events = run_dir / FILE, run_dir / "tensorboard"
        kept = read_metrics(run_dir) if path.exists() else []
        lines = [_line(row) for row in kept if row["iteration"] <= version]
        with writable(run_dir), contextlib.ExitStack() as opened:
            write_whole(path, b"".join(lines))
            self._rows = opened.enter_context(contextlib.closing(AppendFile(path)))
            events.mkdir(mode=0o700, exist_ok=True)
            # TensorBoard finds files by the first word, and sorts them by the number.
            name = f"events.out.tfevents.{time.time_ns():020d}.{platform.node()}.{os.getpid()}"
            self._events = opened.enter_context(contextlib.closing(AppendFile(events / name)))
            opened.pop_all()
        self._started_at = env_steps
        self._records: Any = None
        self._writing = RetriedWrite("Metrics", run_dir)

    def _write_event(self, env_steps: int, means: dict[str, float | None]) -> None:
        """Write a row as a TensorBoard event."""
        # Imported at the first row: the import takes 0.2 s, which would delay the first env step
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        def add(**fields: Any) -> None:
            self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())

        if self._records is None:
            self._records = RecordWriter(self._events)
            add(file_version="brain.Event:2")
            begin = SessionLog(status=SessionLog.START)  # TensorBoard drops later steps
            add(step=self._started_at, session_log=begin)
        values = [Summary.Value(tag=k, simple_value=v) for k, v in means.items() if v is not None]
        add(step=env_steps, summary=Summary(value=values))

    def write(self, metrics: dict[str, Any]) -> None:
        """Append the row of an update. None and NaN become null."""
        finite = {k: v if is_number(v) else None for k, v in metrics.items()}
        self._rows.write(_line(finite))
        self._write_event(metrics["env_steps"], finite)

    def flush(self) -> None:
        """Write all rows to the files. While the disk is full, they wait in memory."""
        with self._writing.attempt():
            self._rows.flush()
            self._events.flush()

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        self._rows.close()
        self._events.close()


def _line(row: dict[str, Any]) -> bytes:
    return f"{json.dumps(row)}\n".encode()


def _league(metrics: dict[str, Any]) -> str:
    return f"score {metrics['league_score']:.2f}, rating {metrics['league_rating']:.0f}"


class Display:
    """Shows the progress of a run. This one shows nothing.

    Attributes:
        on_start: called when the run has its config.json, and is about to train; again if a cluster
            begins again.
    """

    on_start: Callable[[], None] | None = None

    def say(self, text: str) -> None:
        """Show lines that stay."""

    def start(self) -> None:
        """Begin to show progress."""
        if self.on_start is not None:
            self.on_start()

    def update(self, metrics: dict[str, Any], shares: dict[str, float]) -> None:
        """Show an update, unless another was shown a moment ago. `shares`: of time, by span."""

    def stop(self) -> None:
        """Stop showing progress. The last update stays visible."""


class TerminalDisplay(Display):
    """A progress bar on a terminal. Elsewhere, a plain line every few seconds."""

    def __init__(self, out: TextIO, total_env_steps: int) -> None:
        self._total = total_env_steps
        self._console = Console(file=out, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._shown_at = 0.0
        self._last: tuple[dict[str, Any], dict[str, float]] | None = None
        self._bar = Progress(
            TextColumn("{task.fields[steps]}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._bar_id = self._bar.add_task("", total=total_env_steps, steps="starting")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def start(self) -> None:
        super().start()
        if self._console.is_terminal:
            # Drawn again with each update that is shown: no thread runs beside the learner.
            self._live = Live(self._bar, console=self._console, auto_refresh=False)
            self._live.start()

    def update(self, metrics: dict[str, Any], shares: dict[str, float]) -> None:
        self._last = (metrics, shares)
        if "eval_return" in metrics:
            self.say(
                f"{metrics['eval_env_steps']:>12,} env steps  evaluated: "
                f"{metrics['eval_return']:.1f}"
            )
        now = time.monotonic()
        if now - self._shown_at >= (1 / _LIVE_PER_S if self._live else _PLAIN_EVERY_S):
            self._shown_at = now
            self._show(metrics, shares)

    def _show(self, metrics: dict[str, Any], shares: dict[str, float]) -> None:
        steps, rate = metrics["env_steps"], metrics["env_steps_per_s"]
        speed = f"{rate:,.0f}" if rate else "-"
        means = format_means(metrics["mean_return"], returns_by_policy(metrics), "-")
        top = sorted(shares.items(), key=lambda item: -item[1])[:5]
        spent = "  ".join(f"{span} {share:.0%}" for span, share in top)
        if self._live:
            self._bar.update(self._bar_id, completed=steps, steps=f"{steps:,} env steps")
            table = Table.grid(padding=(0, 2))
            table.add_row("mean return", f"{means} (last of {metrics['episodes']:,} episodes)")
            if "league_score" in metrics:
                table.add_row("league", _league(metrics))
            table.add_row("env steps/s", f"{speed} (update {metrics['iteration']:,})")
            table.add_row("time", spent)
            self._live.update(Group(table, self._bar), refresh=True)
        else:
            league = f"  league {_league(metrics)}" if "league_score" in metrics else ""
            left = f"{max(0, self._total - steps) / rate:,.0f} s" if rate else "-"
            self.say(
                f"{steps:>12,} env steps  {speed:>9}/s  return {means:>8}{league}  ETA {left:>6}  "
                f"{spent}"
            )

    def stop(self) -> None:
        if self._live:
            if self._last:
                self._show(*self._last)
            self._live.stop()
            self._live = None
