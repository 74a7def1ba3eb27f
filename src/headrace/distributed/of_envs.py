"""Modules that each rank has of its own environments, such as a replay buffer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor, nn


class OfEnvs(nn.Module, ABC):
    """A module that each rank has of its own environments. All others are equal on all ranks.

    Its largest buffers are columns of rows, which are saved by the numbers of the rows: each
    checkpoint writes only the new ones.

    Attributes:
        columns: the names of these buffers.
        unsaved: the names of the buffers that checkpoints leave out.
        capacity: rows of each environment that it keeps.
    """

    columns: frozenset[str]
    unsaved: frozenset[str]
    capacity: int

    @abstractmethod
    def begin_again(self) -> None:
        """Prepare to go on from a checkpoint that has no rows."""

    @abstractmethod
    def shared(self) -> dict[str, Tensor]:
        """Return what is the same on all ranks, and in no checkpoint.

        A rank in the place of a lost one has that, and no rows. Their numbers begin anew: the lost
        one's may be in files, and later files count.
        """

    @abstractmethod
    def taken_over(self) -> None:
        """Note that what is the same on all ranks was replaced by that of another rank."""

    @abstractmethod
    def env_axis(self, name: str) -> int | None:
        """Return the axis of a buffer that has the environments; None if all ranks are equal."""

    @abstractmethod
    def new_rows(self) -> tuple[dict[str, Tensor], int]:
        """Return this rank's rows since the last `mark_saved`, and their least number in an env."""

    @abstractmethod
    def mark_saved(self) -> None:
        """Note that the rows of the last `new_rows` are on disk, or that all rows were read."""

    @abstractmethod
    def put_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Take back rows of `new_rows`, of any rank."""
