"""The report of `check_env`: a line for each check, with its findings below."""

import textwrap
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warning", "wrong", "not checked"]


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        done: what was checked, in numbers.
        missing: why it was not checked, or only in part.
    """

    name: str
    done: str = ""
    wrong: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    missing: str = ""

    @property
    def status(self) -> Status:
        """The worst of the findings."""
        if self.wrong:
            return "wrong"
        if self.warnings:
            return "warning"
        return "ok" if self.done else "not checked"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"name": self.name, "status": self.status} | asdict(self)

    def __str__(self) -> str:
        summary = "; ".join(filter(None, (self.done, self.missing)))
        lines = [f"{self.status:<12}{self.name:<12}{summary}"]
        for kind, texts in (
            ("wrong", self.wrong),
            ("warning", self.warnings),
            ("to do", self.remedies),
            ("note", self.notes),
        ):
            lines += [textwrap.indent(f"{kind}: {text}", " " * 6) for text in texts]
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """All checks of an environment, in order."""

    env: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return not any(check.wrong for check in self.checks)

    @property
    def summary(self) -> str:
        """Last line of the report."""
        wrong = [check.name for check in self.checks if check.wrong]
        num_warnings = sum(len(check.warnings) for check in self.checks)
        more = f"{num_warnings} warning{'s' * (num_warnings != 1)}"
        if wrong:
            return f"{self.env}: something is wrong: {', '.join(wrong)} ({more})."
        return f"{self.env}: nothing is wrong ({more})."

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        checks = [check.to_json() for check in self.checks]
        return {"env": self.env, "ok": self.ok, "checks": checks}

    def __str__(self) -> str:
        return "\n".join([*map(str, self.checks), self.summary])
