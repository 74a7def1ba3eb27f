"""The page of a study (`study.html`): best trials, curves, parallel coordinates, importances.

Its layout is in `study_page.html`, a Jinja template that extends the report's.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from headrace.errors import MissingExtraError
from headrace.storage.metrics import FILE, read_metrics
from headrace.tools.report import figures
from headrace.tools.report.page import render, save_page
from headrace.tools.runs.curves import Curve, curve_of, mean_curve
from headrace.tuning import results
from headrace.tuning.plan import Plan, Trial, run_dir
from headrace.tuning.samplers import importances
from headrace.tuning.space import parse_space, places
from headrace.tuning.study import observed

PAGE = "study.html"
_NUM_COLORED = 5


def write_page(folder: Path, plan: Plan, trials: list[Trial]) -> Path:
    """Write a study's page, and return its file.

    Raises:
        ConfigError: the page cannot be written.
        MissingExtraError: the `plot` extra is missing.
    """
    order = results.best_first(plan, trials)
    colored, rest = order[:_NUM_COLORED], order[_NUM_COLORED:]
    page = render(
        "headrace.tuning",
        "study_page.html",
        plan=plan,
        folder=folder.resolve(),
        state=_state(plan, trials),
        verdict=[*results.verdict(plan, trials), *results.unfinished(plan, trials)],
        legend_entries=[(t.name, figures.line_fill(i)) for i, t in enumerate(colored)],
        curves=_curves(folder, plan, colored, rest),
        coordinates=_coordinates(plan, colored, rest),
        importances=_importances(plan, trials),
        heads=results.heads(plan),
        rows=[results.cells(plan, trial, results.fresh_seeds(plan, trials)) for trial in order],
        failed=[trial for trial in trials if trial.state == "failed"],
    )
    save_page(page, folder / PAGE)
    return folder / PAGE


def _state(plan: Plan, trials: Sequence[Trial]) -> str:
    count = {state: sum(t.state == state for t in trials) for state in ("whole", "failed")}
    of = f"{len(trials)} of {plan.trials} trials"
    if plan.population:
        of = f"a population of {plan.population}, {len(trials)} trials"
    return f"{of}, {count['whole']} trained to the end, {count['failed']} failed"


def _curves(
    folder: Path, plan: Plan, colored: Sequence[Trial], rest: Sequence[Trial]
) -> Markup | None:
    """Draw the mean return of trials over env steps; None if no episode has ended."""
    lines = {i: curve for i, t in enumerate(colored) if (curve := _curve(folder, plan, t))}
    faint = [curve for trial in rest if (curve := _curve(folder, plan, trial))]
    return figures.large("mean return", lines, faint) if lines else None


def _curve(folder: Path, plan: Plan, trial: Trial) -> Curve | None:
    runs = [run_dir(folder, plan, trial.number, seed) for seed in plan.seeds]
    curves = [curve_of(read_metrics(run), "mean_return") for run in runs if (run / FILE).exists()]
    found = mean_curve(curves)
    return found if len(found.mean) else None


def _coordinates(plan: Plan, colored: Sequence[Trial], rest: Sequence[Trial]) -> Markup | None:
    """Draw settings and value of trials as parallel coordinates; None if all lie outside."""
    space = parse_space(plan.space, "the study")
    trials = [*colored, *rest]
    scores = [trial.scores(plan.metric, len(plan.seeds))[-1] for trial in trials]
    finite = [score for score in scores if math.isfinite(score)]
    if not finite:
        return None
    least = min(finite)
    span = (max(finite) - least) or 1.0
    known = {
        i: [*at, (max(score, least) - least) / span]
        for i, (trial, score) in enumerate(zip(trials, scores, strict=True))
        if (at := places(space, trial.values)) is not None
    }
    lines = {i: at for i, at in known.items() if i < len(colored)}
    faint = [at for i, at in known.items() if i >= len(colored)]
    names = [*space, plan.metric.title]
    return figures.parallel("Settings of the trials", names, lines, faint) if lines else None


def _importances(plan: Plan, trials: list[Trial]) -> list[tuple[str, float]] | str:
    """Return what each parameter decides, or why that is not known."""
    if plan.population:
        return "Settings change while a population trains: no share is any one value's."
    try:
        found = importances(parse_space(plan.space, "the study"), observed(plan, trials))
    except MissingExtraError as error:
        return str(error)
    return list(found.items()) or "Too few trials were trained to the end."
