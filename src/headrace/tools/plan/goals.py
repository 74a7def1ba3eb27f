"""What a plan is to reach, as it is written on the command line. Left out: reaching it."""

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
    """So many env steps in so many seconds."""

    env_steps: float
    seconds: float

    @property
    def env_steps_per_s(self) -> float:
        """What training must reach."""
        return self.env_steps / self.seconds


@dataclass(frozen=True)
class Budget:
    """At most this price per hour; the currency is "" where none was named."""

    per_h: float
    currency: str


@dataclass(frozen=True)
class Need:
    """GPUs for learners, one each, and CPU cores for samplers besides."""

    gpus: int
    cpus: int


Goal = Target | Budget | Need


def parse_target(text: str) -> Target:
    """`20M env_steps in 1h`; ConfigError."""
    found = _TARGET.fullmatch(_plain(text))
    if not found:
        raise ConfigError(
            f"--target {text!r} cannot be read: expected env steps (with k, M or B) and a time (in "
            's, min, h or d).\nExample: --target "20M env_steps in 1h"'
        )
    number, suffix, time, unit = found.groups()
    seconds = float(time or 1) * _UNITS["min" if unit.startswith("min") else unit[0]]
    target = Target(float(number) * _SUFFIXES[suffix], seconds)
    if not (target.env_steps and target.seconds):
        raise ConfigError(
            f'--target {text!r}: expected more than 0.\nExample: --target "20M env_steps in 1h"'
        )
    return target


def parse_budget(text: str) -> Budget:
    """`5 USD/h`; ConfigError."""
    found = _BUDGET.fullmatch(_plain(text))
    if not found or not float(found[1]):
        raise ConfigError(
            f"--budget {text!r} cannot be read: expected a price per hour.\n"
            'Example: --budget "5 USD/h"'
        )
    return Budget(float(found[1]), found[2].upper())


def parse_need(text: str) -> Need:
    """`8 gpus 64 cpus`, or one of them; ConfigError."""
    plain = _plain(text).replace(",", "").replace("and", "")
    found = {what: int(number) for number, what in _NEED.findall(plain)}
    if not found or _NEED.sub("", plain) or len(_NEED.findall(plain)) != len(found):
        raise ConfigError(
            f"--need {text!r} cannot be read: expected GPUs, CPUs, or both.\n"
            'Example: --need "8 gpus 64 cpus"'
        )
    if not any(found.values()):
        raise ConfigError(f"--need {text!r}: expected more than 0 of one of them.")
    return Need(found.get("gpu", 0), found.get("cpu", 0))


def _plain(text: str) -> str:
    """Without spaces, underscores and commas between thousands, in small letters."""
    return re.sub(r"[\s_]|(?<=\d),(?=\d{3})", "", text).lower()
