"""Draws learning curves of runs, and loads matplotlib."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, MissingExtraError, install_command
from headrace.storage import run_dir as rundir
from headrace.training.log import read_metrics, returns_by_policy


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


def curves(run_dir: Path) -> Iterator[tuple[str, list[int], list[float]]]:
    """Yield the label, env steps and mean returns of each policy of a run; RunDirError."""
    run = rundir.read_config(run_dir)["settings"]
    label = f"{run['env']} {run['algo']} seed {run['seed']}"
    rows = [row for row in read_metrics(run_dir) if row.get("mean_return") is not None]
    env_steps = [row["env_steps"] for row in rows]
    names = returns_by_policy(rows[-1]) if rows else {}
    columns = {f"{label}: {name}": f"{name}/mean_return" for name in names}
    for line, column in (columns or {label: "mean_return"}).items():
        yield line, env_steps, [row[column] for row in rows]


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
    figure = library().figure.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for run_dir in run_dirs:
        for label, env_steps, mean_returns in curves(run_dir):
            axes.plot(env_steps, mean_returns, label=label)
    axes.set(
        xlabel="env steps", ylabel="mean return of the last 100 training episodes", title="Training"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    output = output or run_dirs[0] / "curve.png"
    save(figure, output)
    return output
