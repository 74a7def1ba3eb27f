"""Goals of a plan, and how they are written on the command line."""

import re
from dataclasses import dataclass

from headrace.errors import ConfigError

_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_NUMBER = r"((?:\d+(?:\.\d*)?|\.\d+)(?:e\d+)?)"
_TARGET = re.compile(
    rf"{_NUMBER}([kmb]?)(?:envsteps?|steps?)in{_NUMBER}?"
    r"(s|secs?|seconds?|mins?|minutes?|h|hours?|d|days?)"
)
_BUDGET = re.compile(rf"{_NUMBER}([a-z]*?)(?:/|per)(?:h|hour)")
_NEED = re.compile(r"(\d+)(gpu|cpu)s?")


@dataclass(frozen=True)
class Target:
    """A number of env steps within a time."""

    env_steps: float
    seconds: float

    @property
    def env_steps_per_s(self) -> float:
        """Speed that training must reach."""
        return self.env_steps / self.seconds


@dataclass(frozen=True)
class Budget:
    """A maximum price per hour; the currency is "" if none was named."""

    per_h: float
    currency: str


@dataclass(frozen=True)
class Need:
    """A number of GPUs with one learner each, and of further CPU cores for workers."""

    gpus: int
    cpus: int


Goal = Target | Budget | Need


def parse_target(text: str) -> Target:
    """Parse text such as `20M env_steps in 1h`; ConfigError."""
    if match := _TARGET.fullmatch(_normalize(text)):
        number, suffix, time, unit = match.groups()
        seconds = float(time or 1) * _UNITS["min" if unit.startswith("min") else unit[0]]
        target = Target(float(number) * _SUFFIXES[suffix], seconds)
        if target.env_steps and target.seconds:
            return target
    raise ConfigError(
        f"--target {text!r} cannot be read: expected env steps (with k, M or B) and a time (in s, "
        'min, h or d), both more than 0.\nExample: --target "20M env_steps in 1h"'
    )


def parse_budget(text: str) -> Budget:
    """Parse text such as `5 USD/h`; ConfigError."""
    match = _BUDGET.fullmatch(_normalize(text))
    if not match or not float(match[1]):
        raise ConfigError(
            f"--budget {text!r} cannot be read: expected a price per hour.\n"
            'Example: --budget "5 USD/h"'
        )
    return Budget(float(match[1]), match[2].upper())


def parse_need(text: str) -> Need:
    """Parse text such as `8 gpus 64 cpus`, or one of both; ConfigError."""
    plain = _normalize(text).replace(",", "").replace("and", "")
    pairs = _NEED.findall(plain)
    counts = {kind: int(number) for number, kind in pairs}
    if _NEED.sub("", plain) or len(pairs) != len(counts) or not any(counts.values()):
        raise ConfigError(
            f"--need {text!r} cannot be read: expected GPUs, CPUs, or both, more than 0 in all.\n"
            'Example: --need "8 gpus 64 cpus"'
        )
    return Need(counts.get("gpu", 0), counts.get("cpu", 0))


def _normalize(text: str) -> str:
    """Remove spaces, underscores and thousands separators; convert to lower case."""
    return re.sub(r"[\s_]|(?<=\d),(?=\d{3})", "", text).lower()
