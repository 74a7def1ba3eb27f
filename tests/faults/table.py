"""What the fault tests measure, and the table of it in docs/faults.md.

Left out: the faults themselves (`test_faults_*.py`).
"""

import os
import platform
from collections import defaultdict
from dataclasses import dataclass

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
GRACE = 5  # a test fails at so many times what is promised: machines are busy


@dataclass(frozen=True)
class Fault:
    """One fault, as a test saw it; seconds.

    Attributes:
        detect_s: from the fault to the first sign that it was seen.
        recover_s: from there to going on (or to the end, where that is what is promised).
        lost_env_steps: taken, and not learned from.
    """

    what: str
    detect_s: float | None = None
    recover_s: float | None = None
    lost_env_steps: int | None = None


class FaultTable:
    """Collects faults by their id, and writes the page's table."""

    def __init__(self):
        self._seen = defaultdict(list)

    def add(
        self,
        fault,
        what,
        *,
        detect_s=None,
        within_s=None,
        recover_s=None,
        recover_within_s=None,
        lost_env_steps=None,
    ):
        """Record a fault; fails if it took more than `GRACE` times what is promised."""
        for took, promised in ((detect_s, within_s), (recover_s, recover_within_s)):
            if took is not None and promised is not None:
                assert took <= GRACE * promised, f"{fault}: {what}: {took} s, promised {promised} s"
        self._seen[fault].append(Fault(what, detect_s, recover_s, lost_env_steps))

    def write(self, page):
        """Put the table between the page's two marks."""
        before, rest = page.read_text().split(BEGIN)
        _, after = rest.split(END)
        page.write_text(f"{before}{BEGIN}\n{self.table()}\n{END}{after}")

    def table(self):
        """The table, one row for each fault and kind; of several of a kind, the worst."""
        lines = [
            f"Python {platform.python_version()}, {os.cpu_count()} cores, Linux "
            f"{platform.release().split('-')[0]}. Seconds and lost env steps; of several tries, "
            "the worst.",
            "",
            "| fault | what was done | tries | seen after | going on (or ended) after | lost |",
            "|---|---|---|---|---|---|",
        ]
        for fault in sorted(self._seen):
            kinds = defaultdict(list)
            for one in self._seen[fault]:
                kinds[one.what].append(one)
            for what, of_kind in kinds.items():
                cells = [
                    _worst((f.detect_s for f in of_kind), "{:.2f}"),
                    _worst((f.recover_s for f in of_kind), "{:.2f}"),
                    _worst((f.lost_env_steps for f in of_kind), "{:,}"),
                ]
                lines.append(f"| {fault} | {what} | {len(of_kind)} | {' | '.join(cells)} |")
        return "\n".join(lines)


def _worst(values, form):
    known = [value for value in values if value is not None]
    return form.format(max(known)) if known else "-"
