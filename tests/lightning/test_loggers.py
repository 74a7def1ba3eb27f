"""A run's metrics in Lightning's loggers."""

import csv

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger

from headrace.lightning import LoggerAdapter
from headrace.storage.metrics import read_metrics
from tests.lightning import support

pytestmark = support.pytestmark


class Told(Logger):
    """Notes the last metrics, and how it is told that the run has ended."""

    name, version, status, last = "told", 0, None, None

    def log_metrics(self, metrics, step=None):
        self.last = metrics, step

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
    logger = Told()
    try:
        with LoggerAdapter(logger):
            assert not fails
    except AssertionError:
        assert fails
    assert logger.status == status


def test_a_metric_that_is_not_known_yet_is_left_out():
    logger = Told()
    LoggerAdapter(logger)(0, {"env_steps": 64, "mean_return": None, "loss": float("nan")})
    assert logger.last == ({"env_steps": 64.0}, 64)
