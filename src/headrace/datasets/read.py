"""Reads recorded steps by the name that a user gives, and checks that they fit.

Left out: the formats (`minari.py`, `of_run.py`).
"""

from pathlib import Path

from headrace.datasets.minari import read_minari
from headrace.datasets.of_run import read_run
from headrace.errors import ConfigError
from headrace.replay.steps import Steps
from headrace.spec import EnvSpec


def read_steps(source: str, spec: EnvSpec) -> Steps:
    """Return the recorded steps of a run's directory, or of a Minari data set.

    Args:
        source: a directory of a run, or of a data set, or the id of an installed data set.
        spec: of the environment that they must fit.

    Raises:
        ConfigError: there is no such thing, or it has other spaces.
    """
    path = Path(source)
    if (path / "config.json").is_file():
        return read_run(path, spec)
    if path.is_dir() or not path.exists():
        return read_minari(source, spec)
    raise ConfigError(
        f"data={source!r} is a file: expected the directory of a run that learned from replay, or "
        "a Minari data set (its directory or its id)."
    )
