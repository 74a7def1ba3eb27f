"""The metrics of a Headrace run in Lightning's loggers, without a Trainer.

Left out: a Trainer's own logging (`module.py`), and settings: loggers get the metrics alone.
"""

from types import TracebackType
from typing import Any

from lightning.pytorch.loggers import Logger

from headrace.storage.metrics import numbers_in


class LoggerAdapter:
    """Gives the metrics of each update to loggers: `headrace.train(..., on_update=adapter)`.

    Use it in a `with`, after which the loggers are told that the run has ended or failed. The step
    of an update is its `env_steps`. A metric that is not known yet is left out.

    Args:
        *loggers: Lightning's, such as `CSVLogger("logs")`.
    """

    def __init__(self, *loggers: Logger) -> None:
        self._loggers = loggers

    def __call__(self, _: int, metrics: dict[str, Any]) -> None:
        known = numbers_in(metrics)
        for logger in self._loggers:
            logger.log_metrics(known, step=metrics["env_steps"])

    def __enter__(self) -> "LoggerAdapter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for logger in self._loggers:
            logger.finalize("success" if error is None else "failed")
