"""The extras of this package: which of their requirements are not installed."""

import importlib.metadata

from packaging.requirements import Requirement


def requirements(package: str, extra: str) -> list[Requirement]:
    """Return what `package` requires here: always (extra ""), or additionally for one extra."""

    def applies(requirement: Requirement, extra: str) -> bool:
        return requirement.marker is None or requirement.marker.evaluate({"extra": extra})

    found = map(Requirement, importlib.metadata.requires(package) or [])
    return [r for r in found if applies(r, extra) and not (extra and applies(r, ""))]


def missing(package: str, extra: str) -> set[str]:
    """Return the required packages of an extra that are not installed."""
    lacking: set[str] = set()
    for requirement in requirements(package, extra):
        if not version(requirement.name):
            lacking.add(requirement.name)
            continue
        for inner in requirement.extras:
            lacking |= missing(requirement.name, inner)
    return lacking


def version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
