"""A run's metrics in Lightning's loggers."""

import csv

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger

from headrace.lightning import LoggerAdapter
from headrace.storage.metrics import read_metrics
from tests.lightning import support

pytestmark = support.pytestmark


class Ends(Logger):
    """Notes how it is told that the run has ended."""

    name, version, status = "ends", 0, None

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, *args, **kwargs):
        pass

    def finalize(self, status):
        self.status = status


def test_each_update_is_a_row_of_csv_at_its_env_steps(tmp_path):
    with LoggerAdapter(CSVLogger(tmp_path, name="logs", version="")) as log:
        run = support.train(tmp_path / "run", on_update=log)
    with (tmp_path / "logs/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    written = read_metrics(run.dir)
    assert [int(row["step"]) for row in rows] == [row["env_steps"] for row in written]
    assert [float(row["loss"]) for row in rows] == [row["loss"] for row in written]


@pytest.mark.parametrize("fails, status", [(False, "success"), (True, "failed")])
def test_loggers_are_told_how_the_run_ended(fails, status):
    logger = Ends()
    try:
        with LoggerAdapter(logger):
            assert not fails
    except AssertionError:
        assert fails
    assert logger.status == status
