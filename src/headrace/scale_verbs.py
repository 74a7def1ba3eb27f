"""The flags of the verbs that measure, scale and plan. Left out: all other verbs (`verbs.py`)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from headrace.scale.html_report import write_report
from headrace.verbs import parse

_Path = Annotated[Path | None, tyro.conf.arg(metavar="PATH")]


@dataclass(frozen=True)
class _ReportFlags:
    run_dir: tyro.conf.Positional[Path]
    """Directory of the run, which may be going on."""
    output: _Path = None
    """The page (HTML); default: report.html in that directory."""
    usd_per_hour: float | None = None
    """What the run's machines cost (USD/h), for its cost so far."""


def report(argv: list[str], description: str) -> int:
    """`headrace report`."""
    flags = parse("report", description, _ReportFlags, argv)
    print(f"Report: {write_report(flags.run_dir, flags.output, flags.usd_per_hour)}")
    return 0
