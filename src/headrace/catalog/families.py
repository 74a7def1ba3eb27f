"""The families of environments: their ids, the package that registers them, and their extra."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class Family:
    """A family of environments; `families.toml` says what the fields are."""

    name: str
    description: str
    extra: str
    prefixes: tuple[str, ...]
    ids: tuple[str, ...]
    package: str = "gymnasium"
    more: str = ""


@cache
def families() -> dict[str, Family]:
    """Return the families by name, in the order in which they are listed."""
    text = resources.files("headrace.catalog").joinpath("families.toml").read_text(encoding="utf-8")
    return {
        name: Family(
            name,
            **table | {"prefixes": tuple(table["prefixes"]), "ids": tuple(table["ids"])},
        )
        for name, table in tomllib.loads(text).items()
    }


def family_of(env_id: str) -> Family | None:
    """Return the family of an id, by how it begins; None for others and for `module:name`."""
    if ":" in env_id:
        return None
    return next((f for f in families().values() if env_id.startswith(f.prefixes)), None)


def describe_families() -> Iterator[str]:
    """Yield a line for each family: its name, what it is, and an id."""
    for family in families().values():
        yield f"  {family.name:<16} {family.description:<48} {family.ids[0]}"


def advice_without_env() -> str:
    """Return what to say to someone who names no environment: families and three commands."""
    return "\n".join(
        [
            "No environment was given. It comes first: headrace train ENV --flag value ...",
            "Families of environments:",
            *describe_families(),
            "To try:",
            "  headrace train CartPole-v1        # learns in seconds; needs no more than Headrace",
            "  headrace list mujoco              # the ids of a family, and what they reach",
            "  headrace train my_module:MyEnv    # your own: a class, or a function that makes one",
        ]
    )
