"""Draws learning curves, and loads matplotlib."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, MissingExtraError, install_command
from headrace.storage import run_dir as rundir
from headrace.storage.metrics import read_metrics
from headrace.tools.runs.curves import Curve, curves_by_policy

MEAN_RETURN = "mean return of the last 100 training episodes"
_MAX_COLUMNS = 2


def library() -> Any:
    """Import matplotlib; MissingExtraError without the `plot` extra."""
    try:
        import matplotlib.figure
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"A picture needs a package that is not installed ({error}).\n"
            f"To install it: {install_command('plot')}"
        ) from None
    return matplotlib


def check_output(output: Path) -> None:
    """Check that a picture can be written.

    Raises:
        ConfigError: the name does not end in a known format, or the folder does not exist.
        MissingExtraError: the `plot` extra is missing.
    """
    formats = library().figure.Figure().canvas.get_supported_filetypes()
    if output.suffix.removeprefix(".") not in formats:
        raise ConfigError(
            f"The picture {output} cannot be drawn: expected a name that ends in one of "
            f"{', '.join(sorted(formats))}."
        )
    if not output.parent.is_dir():
        raise ConfigError(f"The picture {output} cannot be drawn: there is no {output.parent}.")


def save(figure: Any, output: Path) -> None:
    """Write a picture; raises as `check_output`."""
    check_output(output)
    figure.savefig(output, dpi=120)


def curves(run_dir: Path) -> Iterator[tuple[str, Curve]]:
    """Yield the label and the mean returns of each policy of a run; RunDirError."""
    run = rundir.read_config(run_dir)["settings"]
    label = f"{run['env']} {run['algo']} seed {run['seed']}"
    for policy, curve in curves_by_policy(read_metrics(run_dir)).items():
        yield f"{label}: {policy}" if policy else label, curve


def draw_curves(run_dirs: list[Path], output: Path | None = None) -> Path:
    """Draw mean return over env steps, one line for each run and policy; return the file.

    Args:
        output: file of the picture; default: `curve.png` in the first directory.

    Raises:
        ConfigError: no run was given.
        MissingExtraError: the `plot` extra is missing.
        RunDirError: a directory holds no run.
    """
    if not run_dirs:
        raise ConfigError("No run directory was given.\nExample: headrace plot runs/*")
    library()
    lines = [line for run_dir in run_dirs for line in curves(run_dir)]
    output = output or run_dirs[0] / "curve.png"
    draw_lines({"Training": lines}, output)
    return output


def draw_lines(panels: Mapping[str, Iterable[tuple[str, Curve]]], output: Path) -> None:
    """Draw labelled curves of mean return over env steps; raises as `check_output`.

    Args:
        panels: title of each picture within the picture -> its curves. The range of a curve is a
            band around it.
    """
    columns = min(len(panels), _MAX_COLUMNS)
    rows = -(-len(panels) // columns)
    figure = library().figure.Figure(figsize=(8 * columns, 4.5 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (title, lines) in zip(grid, panels.items(), strict=False):
        for label, curve in lines:
            (line,) = axes.plot(curve.env_steps, curve.mean, label=label)
            if (curve.high > curve.low).any():
                color = line.get_color()
                axes.fill_between(
                    curve.env_steps, curve.low, curve.high, color=color, alpha=0.2, linewidth=0
                )
        axes.set(xlabel="env steps", ylabel=MEAN_RETURN, title=title)
        axes.grid(alpha=0.3)
        axes.legend()
    for axes in grid:  # the places that are left
        axes.remove()
    save(figure, output)
