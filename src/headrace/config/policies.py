"""The assignment of policies to the agents of an environment."""

import re
from collections.abc import Mapping
from typing import Any

from headrace.errors import ConfigError, did_you_mean
from headrace.spec import Agents, AgentSpaces, EnvSpec

DEFAULT = "default"
"""The policy of an environment that has one agent, or one role."""
RANDOM = "random"
"""In place of a run, in settings that name runs: act at random, whatever is seen."""
_SLICE = re.compile(r"(\d*):(\d*)")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def assign_agents(policies: Mapping[str, Any], spec: EnvSpec) -> dict[str, Agents]:
    """Return the agents of each policy, in the order of their ids.

    Args:
        policies: the setting: name -> `first:end` (without the end), or a table of settings, of
            which `agents` is one. A role's name needs no agents. {}: one policy for each role.

    Raises:
        ConfigError: an agent has no policy, or several.
    """
    roles: dict[str, Agents] = {}
    for role, size in spec.roles:
        roles[role] = Agents(sum(other.size for other in roles.values()), size)
    agents = {name: _table(value).get("agents") for name, value in policies.items()}
    shares = {} if any(agents.values()) else dict(roles)
    if not policies and len(roles) < 2:
        shares = {DEFAULT: Agents(0, spec.num_agents)}
    for name, text in agents.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(f"policies: {name!r}: expected a name of letters, digits, - and _.")
        if text is None and name not in roles:
            raise ConfigError(
                f"policies: {name!r} names no agents, and {spec.id} has no role of that name "
                f"({', '.join(roles) or 'it has none'}).{did_you_mean(name, list(roles))}\n"
                f"Say which: --policies {name}=0:{spec.num_agents}"
            )
        shares[name] = roles[name] if text is None else _slice(name, text, spec)
    _check(shares, spec)
    return dict(sorted(shares.items(), key=lambda item: item[1].first))


def sides_of(shares: Mapping[str, Agents], *, league: bool) -> dict[str, tuple[str, Agents]]:
    """Return who makes rows of its own in a game: name -> (policy, its agents).

    In a league these are the sides of the game: the policies or, with one policy, its agents.
    """
    if not league or len(shares) > 1:
        return {name: (name, agents) for name, agents in shares.items()}
    [(name, (first, size))] = shares.items()
    return {f"{name}.{i}": (name, Agents(first + i, 1)) for i in range(size)}


def merge_policies(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the parts of the setting in a file and in flags; `upper` has precedence."""
    both = lower.keys() & upper.keys()
    return {**lower, **upper} | {name: _table(lower[name]) | _table(upper[name]) for name in both}


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"agents": value}


def policy_settings(policies: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings that single policies change, by policy."""
    return {
        name: {key: setting for key, setting in value.items() if key != "agents"}
        for name, value in policies.items()
        if isinstance(value, dict)
    }


def scale_policies(policies: Mapping[str, Any], factors: Mapping[str, float]) -> dict[str, Any]:
    """Multiply numbers among the settings of single policies, such as `lr`, by factors."""

    def scaled(of: Mapping[str, Any]) -> dict[str, Any]:
        numbers = {key: of[key] for key in factors if isinstance(of.get(key), int | float)}
        return {**of} | {key: number * factors[key] for key, number in numbers.items()}

    return {n: scaled(of) if isinstance(of, dict) else of for n, of in policies.items()}


def _slice(name: str, text: Any, spec: EnvSpec) -> Agents:
    match = _SLICE.fullmatch(text) if isinstance(text, str) else None
    if match:
        first, end = int(match[1] or 0), int(match[2] or spec.num_agents)
        if 0 <= first < end <= spec.num_agents:
            return Agents(first, end - first)
    raise ConfigError(
        f"policies: {name}={text!r}: expected agents as first:end, within 0:{spec.num_agents} "
        f"(the end is not in it), such as {name}=0:{spec.num_agents}."
    )


def _check(shares: Mapping[str, Agents], spec: EnvSpec) -> None:
    for i in range(spec.num_agents):
        names = [name for name, (first, size) in shares.items() if first <= i < first + size]
        if len(names) != 1:
            whose = " and ".join(names) or "none"
            raise ConfigError(
                f"policies: agent {i} of {spec.id} is of {whose}: expected one policy for each of "
                f"its {spec.num_agents} agents ({format_assignment(shares)})."
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


def _spaces(of: AgentSpaces) -> str:
    return f"observation {of.observation.describe()}, action {of.action.describe()}"


def format_assignment(shares: Mapping[str, Agents]) -> str:
    """Return the agents of each policy as --policies takes them."""
    return ", ".join(f"{name}={first}:{first + size}" for name, (first, size) in shares.items())
