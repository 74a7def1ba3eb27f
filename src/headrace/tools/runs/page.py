"""The page of `headrace compare --html`. Its layout is in `compare.html`, a Jinja template."""

from pathlib import Path

from headrace.tools.plotting import MEAN_RETURN
from headrace.tools.report import figures
from headrace.tools.report.page import render, save_page
from headrace.tools.runs.comparison import Comparison


def write_page(comparison: Comparison, output: Path) -> None:
    """Write a comparison to one HTML page, which needs no network to open.

    Raises:
        ConfigError: the page cannot be written.
        MissingExtraError: the `plot` extra is missing.
    """
    pictures = []
    for env, lines in comparison.panels():
        backgrounds = [(label, figures.line_fill(i)) for i, (label, _) in enumerate(lines)]
        curves = dict(enumerate(curve for _, curve in lines))
        pictures.append((env, backgrounds, figures.large(f"{MEAN_RETURN}, {env}", curves)))
    count = len(comparison.groups)
    page = render(
        "headrace.tools.runs",
        "compare.html",
        comparison=comparison,
        title=f"{count} group{'s' if count > 1 else ''} of runs",
        curve_note=f"{MEAN_RETURN}, over env steps; bands: 95 % intervals of the mean over runs",
        pictures=pictures,
    )
    save_page(page, output)
