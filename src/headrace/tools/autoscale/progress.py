"""How fast a training is, by when its updates end; and when enough of them were seen.

Left out: where the times come from (`trial.py`).
"""

from dataclasses import dataclass, field
from typing import Literal

_WARM_UP_S = 3.0
"""What comes only once (first calls, lazy imports) is taken to be over so soon after the start."""
_UPDATES = 3  # that a rate is made of, unless they take long
_HOPELESS = 0.8  # of the rate that is to be beaten


@dataclass
class Progress:
    """Of one training; times are readings of one clock (s).

    Attributes:
        batch: env steps of each update.
        compiles: whether the first update may take long because something is compiled.
        measure_s: the rate is to be one of at least so long.
        up: when samplers were there; None: not yet.
        updates: when one ended, and the env steps until then.
    """

    batch: int
    compiles: bool
    measure_s: float
    up: float | None = None
    updates: list[tuple[float, int]] = field(default_factory=list)

    def verdict(
        self, now: float, *, late: bool, to_beat: float = 0.0
    ) -> tuple[Literal["measured", "slow"], float | None] | None:
        """What is known of the rate, once nothing more need be known; None: not yet.

        Args:
            now: the time.
            late: it must be decided now.
            to_beat: it is of no use to go on if the rate will not be near this one.

        Returns:
            `measured` and the rate (env steps/s); or `slow`, because there was no update in the
            time, and what the rate is below, or None where nothing is known.
        """
        if (since := self._since()) is None:
            return ("slow", None) if late else None
        begun, before = since
        later = [update for update in self.updates if update[0] > begun]
        if later:
            span, steps = later[-1][0] - begun, later[-1][1] - before
            if span >= self.measure_s * (1.0 if len(later) >= _UPDATES else 1.5):
                return "measured", steps / span
        taken = later[-1][1] - before if later else 0
        at_most = (taken + self.batch) / max(now - begun, 1e-9)
        hopeless = now - begun >= self.measure_s and at_most < _HOPELESS * to_beat
        if not (late or hopeless):
            return None
        if later:
            return "measured", steps / span
        return "slow", at_most if now > begun else None

    def _since(self) -> tuple[float, int] | None:
        """When the time that counts began, and the env steps until then.

        That is the end of the first update; or the samplers' start, if that update took so long
        that what comes once is little beside it.
        """
        up = None if self.compiles else self.up
        if not self.updates:
            return None if up is None else (up + _WARM_UP_S, 0)
        first = self.updates[0]
        took_long = up is not None and first[0] - up >= 2 * _WARM_UP_S
        return (up, 0) if up is not None and took_long else first
