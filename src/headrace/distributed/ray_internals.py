"""What Headrace takes from Ray's private modules: there is no public way to it.

Each function says what would replace it. If a new Ray breaks one, it is mended here. Left out:
Ray's public functions, which are called where they are needed.
"""

import sys
from collections.abc import Mapping
from typing import Any

import ray

_private: Any = ray._private


def free_by_node() -> Mapping[str, Mapping[str, float]]:
    """Return the free amounts of resources by node id.

    `ray.available_resources()` has the sum over all nodes only.
    """
    return _private.state.available_resources_per_node()  # type: ignore[no-any-return]


def draining_nodes() -> dict[str, float]:
    """Return the nodes that are about to be taken away: id -> when (s since 1970).

    `ray.nodes()` does not tell them from others; `ray status` does, as text.
    """
    draining = _private.state.state.get_draining_nodes()
    return {node: until_ms / 1000 for node, until_ms in draining.items()}


def died_with_its_node(actor: Any) -> bool:
    """Return whether an actor has died because its node was lost.

    `ray.util.state.get_actor` has the cause, but asks Ray's dashboard, which may not be installed.
    """
    entry = _private.state.state.actor_table(actor._actor_id.hex())
    return bool(entry["DeathCause"].actor_died_error_context.HasField("node_death_info"))


def raylet_pid() -> int:
    """Return the process id of the raylet that this process has started; nothing public has it."""
    node = _private.worker.global_worker.node
    return int(node.all_processes["raylet"][0].process.pid)


def address_of(cluster: str) -> str:
    """Return HOST:PORT of a cluster that is named as for `ray.init`.

    `ray.init` finds it itself, but tries for minutes where nobody answers.

    Raises:
        ConnectionError, ValueError: there is none.
    """
    from ray._private import services

    return str(services.canonicalize_bootstrap_address_or_die(cluster))


def read_environment_again(*, reachable: bool) -> None:
    """Make Ray read its environment variables again, which it did when it was imported.

    Not needed where the variables are set before Python starts.

    Args:
        reachable: whether Ray may listen on other addresses than 127.0.0.1.
    """
    from ray._private import ray_constants

    compiled: Any = sys.modules["ray._raylet"]
    ray_constants.ENABLE_RAY_CLUSTER = reachable
    compiled.Config.initialize("")
    compiled.AuthenticationTokenLoader.instance().reset_cache()
