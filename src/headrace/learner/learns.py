"""The interface of a learner: of one policy (`learner.py`) or several (`multi_policy.py`)."""

from typing import Any, Protocol

from torch import Tensor

from headrace.batch import Fragment
from headrace.models.policy import Network, Policy


class Learns(Protocol):
    """Turns batches into better weights; see `Learner` for what each of these is."""

    @property
    def version(self) -> int:
        """Updates made so far."""

    @property
    def learner_steps(self) -> int:
        """Optimizer steps made so far."""

    @property
    def policy(self) -> Any:
        """What collectors are to act with."""

    @property
    def policies(self) -> dict[str, Policy]:
        """All that act, by name."""

    @property
    def networks(self) -> dict[str, Network]:
        """The shape of each policy's network."""

    def take(self, fragments: list[Fragment]) -> Any:
        """A batch on the learner's device."""

    def update(self, experience: Any, progress: float) -> dict[str, float]:
        """Learn from one batch."""

    def check_equal(self) -> None:
        """Compare all ranks' parameters."""

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything that is learned."""

    def load_state(self, state: dict[str, dict[str, Tensor]], counters: dict[str, Any]) -> None:
        """Restore what `state` gave."""
