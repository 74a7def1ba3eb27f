"""Which policy acts for which agents of an environment.

Left out: what they learn (`multi_policy.py`).
"""

import re
from collections.abc import Mapping
from typing import Any

from headrace.errors import ConfigError, did_you_mean
from headrace.spec import Agents, EnvSpec, Space

DEFAULT = "default"
"""The policy of an environment that has one agent, or one role."""
_SLICE = re.compile(r"(\d*):(\d*)")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def assign_agents(policies: Mapping[str, Any], spec: EnvSpec) -> dict[str, Agents]:
    """The agents of each policy, in the order of their ids.

    Args:
        policies: the setting: name -> `first:end` (the end is not in it), or a table of settings,
            of which `agents` is one; of a role's name, its agents are known. {}: one policy for
            each role.
        spec: of the environment.

    Raises:
        ConfigError: an agent has no policy, or several.
    """
    roles: dict[str, Agents] = {}
    for role, size in spec.roles:
        roles[role] = Agents(sum(other.size for other in roles.values()), size)
    given = {
        name: of.get("agents") if isinstance(of, dict) else of for name, of in policies.items()
    }
    if not policies and len(roles) < 2:
        alone = {DEFAULT: Agents(0, spec.num_agents)}
        _check(alone, spec)
        return alone
    shares = {} if any(given.values()) else dict(roles)
    for name, text in given.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(f"policies: {name!r} is no name: expected letters, digits, - and _.")
        if text is None and name not in roles:
            raise ConfigError(
                f"policies: {name!r} says nothing of its agents, and is no role of {spec.id} "
                f"({', '.join(roles) or 'it has none'}).{did_you_mean(name, list(roles))}\n"
                f"Say which: --policies {name}=0:{spec.num_agents}"
            )
        shares[name] = roles[name] if text is None else _slice(name, text, spec)
    _check(shares, spec)
    return dict(sorted(shares.items(), key=lambda item: item[1].first))


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The setting, where a file says some of it and flags more: agents, and own settings."""
    both = {name: _table(below[name]) | _table(above[name]) for name in below.keys() & above.keys()}
    return {**below, **above, **both}


def _table(of: Any) -> dict[str, Any]:
    return of if isinstance(of, dict) else {"agents": of}


def own_settings(policies: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings that each policy has of its own."""
    return {
        name: {key: value for key, value in of.items() if key != "agents"}
        for name, of in policies.items()
        if isinstance(of, dict)
    }


def _slice(name: str, text: Any, spec: EnvSpec) -> Agents:
    found = _SLICE.fullmatch(text) if isinstance(text, str) else None
    if found:
        first, end = int(found[1] or 0), int(found[2] or spec.num_agents)
        if 0 <= first < end <= spec.num_agents:
            return Agents(first, end - first)
    raise ConfigError(
        f"policies: {name}={text!r}: expected agents as first:end, within 0:{spec.num_agents} "
        f"(the end is not in it), such as {name}=0:{spec.num_agents}."
    )


def _check(shares: Mapping[str, Agents], spec: EnvSpec) -> None:
    """Each agent has one policy, and those of one policy have the same spaces."""
    owners: dict[int, list[str]] = {i: [] for i in range(spec.num_agents)}
    for name, (first, size) in shares.items():
        for i in range(first, first + size):
            owners[i].append(name)
    for i, names in owners.items():
        if len(names) != 1:
            whose = f"of {' and '.join(names)}" if names else "of none"
            raise ConfigError(
                f"policies: agent {i} of {spec.id} is {whose}: expected one policy for each of its "
                f"{spec.num_agents} agents ({format_assignment(shares)})."
            )

    for name, share in shares.items():
        spaces = spec.agent_spaces[share.first : share.first + share.size]
        for i, of in enumerate(spaces):
            if of != spaces[0]:
                raise ConfigError(
                    f"policies: agents {share.first} and {share.first + i} of policy {name!r} have "
                    f"different spaces in {spec.id}: {_spaces(spaces[0])}; {_spaces(of)}.\n"
                    "Use one policy for each kind of agent: --policies NAME=FIRST:END ..."
                )


def _spaces(of: tuple[Space, Space]) -> str:
    return f"observation {of[0].describe()}, action {of[1].describe()}"


def format_assignment(shares: Mapping[str, Agents]) -> str:
    """In words, as they are given."""
    return ", ".join(f"{name}={first}:{first + size}" for name, (first, size) in shares.items())
