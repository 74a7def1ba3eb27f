"""The learning curve of runs as a picture. Left out: everything but return over env steps."""

from pathlib import Path

from headrace.errors import ConfigError, MissingExtraError
from headrace.run import rundir
from headrace.run.log import read_metrics


def draw_curves(run_dirs: list[Path], output: Path | None = None) -> Path:
    """Draw mean return over env steps, one line per run.

    Args:
        run_dirs: at least one.
        output: the picture; default: `curve.png` in the first directory.

    Returns:
        Where it is.

    Raises:
        ConfigError: no run was given.
        MissingExtraError: without the `plot` extra.
        RunDirError: a directory holds no run.
    """
    if not run_dirs:
        raise ConfigError("No run directory was given.\nExample: headrace plot runs/*")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"A picture needs a package that is not installed ({error}).\n"
            "To install it: pip install 'headrace[plot]'"
        ) from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for run_dir in run_dirs:
        run = rundir.read_config(run_dir)["settings"]
        rows = [row for row in read_metrics(run_dir) if row.get("mean_return") is not None]
        axes.plot(
            [row["env_steps"] for row in rows],
            [row["mean_return"] for row in rows],
            label=f"{run['env']} {run['algo']} seed {run['seed']}",
        )
    axes.set(
        xlabel="env steps", ylabel="mean return of the last 100 training episodes", title="Training"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    output = output or run_dirs[0] / "curve.png"
    formats = figure.canvas.get_supported_filetypes()
    if output.suffix.removeprefix(".") not in formats:
        raise ConfigError(
            f"The picture {output} cannot be drawn: expected a name that ends in one of "
            f"{', '.join(sorted(formats))}."
        )
    figure.savefig(output, dpi=120)
    return output
