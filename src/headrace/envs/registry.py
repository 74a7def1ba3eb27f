"""Registered ids: importing the package that registers one, and near misses."""

import difflib
import importlib
import re
from collections.abc import Callable
from typing import Any

import cloudpickle
import gymnasium
from gymnasium.envs.registration import find_highest_version, parse_env_id

from headrace import importing
from headrace.catalog.families import families, family_of
from headrace.envs.api import env_error
from headrace.envs.games import names
from headrace.envs.gym import mujoco
from headrace.errors import EnvNotFoundError, MissingExtraError, UsageError, install_command


def resolve(env: str | Callable[..., Any]) -> str | Callable[..., Any]:
    """Resolve `module:name` to the callable, or to the id that the module registered."""
    if not isinstance(env, str) or ":" not in env:
        return env
    module, name, target = importing.load(env, EnvNotFoundError)
    if target is not None:
        return target
    if name in gymnasium.registry:
        return name
    raise EnvNotFoundError(
        f"The module {module.__name__!r} has no callable {name!r} and registers no such id."
        + importing.near(module, name)
    )


def load(env_id: str) -> str:
    """Import the package that has or registers the id; return the extra that brings it, or "".

    An id that is registered already may be of another package, whatever it begins with.
    """
    family = family_of(env_id)
    if family is None:
        return ""
    if env_id not in gymnasium.registry:
        try:
            importlib.import_module(family.package)
        except ModuleNotFoundError as error:
            raise _missing(env_id, family.extra, error) from None
    return family.extra


def pickled_registrations(env: Any) -> list[bytes]:
    """Return all registrations of this process, pickled, for one that makes `env`.

    What cannot be pickled, for another id, is left out.
    """
    found = []
    for spec in gymnasium.registry.values():
        try:
            found.append(cloudpickle.dumps(spec))
        except Exception:  # a user's object may raise anything
            if spec.id == env:
                raise
    return found


def add_registrations(pickled: list[bytes]) -> None:
    """Register what another process had registered, where this one has not."""
    for spec in map(cloudpickle.loads, pickled):
        gymnasium.registry.setdefault(spec.id, spec)


def make_registered(env_id: str, kwargs: dict[str, Any], make: Callable[[], Any]) -> Any:
    """Call `make`, which makes a registered id with `kwargs`, and explain its errors."""
    try:
        parse_env_id(env_id)
    except gymnasium.error.Error:
        raise EnvNotFoundError(_not_found(env_id)) from None
    extra = load(env_id)
    try:
        if extra == "mujoco":
            mujoco.print_warnings_once()
        return make()
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv):
        raise EnvNotFoundError(_not_found(env_id)) from None
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise _missing(env_id, extra, error) from None
    except Exception as error:
        if kwargs and isinstance(error, TypeError):
            raise UsageError(f"{env_id} does not take the arguments {kwargs}: {error}") from error
        given = f" with {kwargs}" if kwargs else ""
        raise env_error(error, f"while making {env_id}{given}") from error


def _missing(env_id: str, extra: str, error: Exception) -> MissingExtraError:
    remedy = install_command(extra) if extra else "install the package that it names"
    if names.is_game(env_id) and (theirs := names.missing_extra(env_id, error)):
        remedy = f"pip install 'pettingzoo[{theirs}]'"
    return MissingExtraError(
        f"{env_id} needs a package that is not installed ({error}).\nTo install it: {remedy}"
    )


def newest_version(env_id: str) -> str:
    """Return `name-vN` with the largest N for an id without a version; other ids as they are.

    Raises:
        MissingExtraError: the package that registers it is not installed.
    """
    if ":" in env_id or env_id in gymnasium.registry:
        return env_id
    load(env_id)
    if names.is_game(env_id):
        return names.newest_version(env_id)
    *space, name = env_id.rsplit("/", 1)
    newest = find_highest_version("".join(space) or None, name)
    return env_id if newest is None or env_id in gymnasium.registry else f"{env_id}-v{newest}"


def _not_found(env_id: str) -> str:
    listed = [listed for family in families().values() for listed in family.ids]
    known = [*sorted(gymnasium.registry), *listed]
    if names.is_game(env_id):
        known = [*names.installed(env_id.partition("/")[0]), *known]
    # As they stand, and without what is before the name and the version: `Pong` of `ALE/Pong-v5`
    lowered = {_bare(name): name for name in known} | {name.lower(): name for name in known}
    near = [name for name in (env_id.lower(), _bare(env_id)) if name in lowered]
    near += difflib.get_close_matches(env_id.lower(), lowered, n=3, cutoff=0.7)
    lines = [f"There is no environment {env_id!r}."]
    if near:
        meant = dict.fromkeys(lowered[name] for name in near)
        lines.append(f"Did you mean {' or '.join(meant)}?")
    else:
        lines.append("Those that are known: headrace list")
    if env_id.endswith(".py"):
        offered = importing.offered(env_id, "Env")
        lines.append(f"For an environment of that file: {' or '.join(offered)}.")
    if importing.is_module(env_id):
        offered = importing.offered(f"{env_id}.py", "Env")
        lines.append(f"For an environment of the module of that name: {' or '.join(offered)}.")
    lines.append("One of your own, or one that a module registers: module:callable, module:EnvId.")
    return "\n".join(lines)


def _bare(env_id: str) -> str:
    """Return the name of an id alone, in small letters; Atari's had more before Gymnasium's."""
    return re.sub(r"(NoFrameskip|Deterministic)?(-v\d+)?$", "", env_id.rsplit("/", 1)[-1]).lower()
