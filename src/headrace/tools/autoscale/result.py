"""What a search has found, as data and in words. Left out: the search (`search.py`)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.tools.autoscale.sizes import FREE
from headrace.tools.autoscale.trial import gib

_HEADS = ("learners", "workers", "envs", "steps", "envs/vector", "env steps/s", "memory", "")


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        settings: the sizes, by name, that were not fixed: `headrace.train(env, **found.settings)`.
        env_steps_per_s: of training with them.
        trials: plain data of each, in order: sizes, outcome, rate, memory.
        largest: sizes of the largest batch that fits the GPU, where environments are on one.
        finished: nothing that was left promised more; else the budget of time ended the search.
        budget_s: that it had.
        path: where this is kept; None: it is not, because the environment is code without a name.
        reused: it was kept, and nothing was measured now.
    """

    settings: dict[str, int]
    env_steps_per_s: float
    trials: list[dict[str, Any]]
    largest: dict[str, int] | None = None
    finished: bool = True
    budget_s: float = 0.0
    path: Path | None = None
    reused: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return vars(self) | {"path": None if self.path is None else str(self.path)}

    def describe(self) -> str:
        """The table, and what was found, for people."""
        sizes = " ".join(f"{name}={value}" for name, value in self.settings.items())
        lines = [self.table(), f"Found: {sizes or 'nothing was open'}"]
        lines[-1] += f" ({self.env_steps_per_s:,.0f} env steps/s)"
        if not self.finished:
            lines.append(
                f"Time ended the search ({self.budget_s:g} s): there may be better sizes. With "
                f"more time: --budget-s {2 * self.budget_s:g}"
            )
        if self.largest is not None:
            most = " ".join(f"{name}={value}" for name, value in self.largest.items())
            lines.append(f"The largest batch that fits the GPU: {most}")
        return "\n".join(lines)

    def table(self) -> str:
        """All trials, the fastest first, for people."""
        lines: list[tuple[str, ...]] = [_HEADS]
        for of in sorted(self.trials, key=lambda of: -(of["rate"] or 0.0)):
            rate = "-" if of["rate"] is None else f"{of['rate']:,.0f}"
            below = "< " if of["outcome"] == "slow" and of["rate"] is not None else ""
            took = gib(of["gpu_bytes"] or of["memory_bytes"])
            said = "" if of["outcome"] == "measured" else f"{of['outcome']}: {of['why']}"
            lines.append((*(str(of[name]) for name in FREE), below + rate, took, said))
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
        return "\n".join(
            "  ".join(
                [*(cell.rjust(w) for cell, w in zip(line, widths, strict=False)), line[-1]]
            ).rstrip()
            for line in lines
        )
