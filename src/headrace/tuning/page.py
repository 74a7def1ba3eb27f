"""The page of a study."""

from pathlib import Path

from headrace.tuning.plan import Plan, Trial


def write_page(folder: Path, plan: Plan, trials: list[Trial]) -> Path:
    """Write a study's page; return its file."""
    return folder / "study.html"
