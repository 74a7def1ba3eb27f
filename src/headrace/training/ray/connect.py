"""The connection to a Ray cluster, which is started here for `--cluster local`.

A Ray that is started here listens on the loopback only, requires a random token, has no dashboard,
and ends with this process, however that ends.
"""

import contextlib
import math
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from headrace.config.run_config import RunConfig, demands
from headrace.distributed.local_ranks import environment
from headrace.errors import ConfigError, MissingExtraError, install_command
from headrace.machine.limits import cpu_cores

_CONNECT_WITHIN_S = 10.0


@contextlib.contextmanager
def connected(run: RunConfig) -> Iterator[int]:
    """Connect to the run's cluster, or raise ConfigError; yield how many workers it can have."""
    workers = max(cpu_cores(), run.num_workers) * run.cpus_per_worker
    learners = max(1, run.num_learners) * max(1, run.learner_threads)
    with to_cluster(run.cluster, math.ceil(workers + learners)):
        yield cpu_cores() if run.cluster == "local" else room_for(run)


@contextlib.contextmanager
def to_cluster(cluster: str, cores: int) -> Iterator[None]:
    """Connect to a cluster; a local one is started, and has so many cores.

    Raises:
        ConfigError: it cannot be reached.
        MissingExtraError: Ray is missing.
    """
    with contextlib.ExitStack() as stack:
        if not ("ray" in sys.modules and _ray().is_initialized()):  # else the caller has connected
            if cluster == "local":
                stack.enter_context(_closed_to_others())
            ray = _ray()
            options: dict[str, Any] = {"address": cluster}
            if cluster == "local":
                options |= {"num_cpus": cores, "include_dashboard": False}
            stack.callback(ray.shutdown)
            try:
                if cluster != "local":
                    _check_reachable(cluster)
                ray.init(**options, log_to_driver=False, logging_level="ERROR")
            except (ConnectionError, RuntimeError, ValueError, OSError) as error:
                raise ConfigError(_refusal(cluster, error)) from error
            if cluster == "local":
                stack.enter_context(_ends_with_this_process())
        yield


def room_for(run: RunConfig) -> int:
    """Return the number of workers that fit, if there are no learners."""
    return len(machines_for(run, taken={}))


def machines_for(run: RunConfig, taken: Mapping[str, float]) -> list[str]:
    """Return the id of a machine for each worker that fits, spread over machines.

    `taken` is the learners' cores by machine.
    """
    amounts, labels = demands(run.worker_resources)
    rows: list[list[str]] = []
    for node in _ray().nodes():
        if not node["Alive"] or any(node["Labels"].get(k) != v for k, v in labels.items()):
            continue
        has = dict(node["Resources"])
        has["CPU"] = has.get("CPU", 0.0) - taken.get(node["NodeID"], 0.0)
        needs = {name: amount for name, amount in amounts.items() if amount}
        needs |= {"CPU": run.cpus_per_worker} if run.cpus_per_worker else {}
        fits = [math.floor(has.get(name, 0.0) / amount + 1e-6) for name, amount in needs.items()]
        rows.append([node["NodeID"]] * max(0, min(fits, default=run.num_workers)))
    return [each for column in zip_longest(*rows) for each in column if each is not None]


def describe_machines() -> str:
    """Return what the machines of the cluster have, as text."""
    machines = (
        ", ".join(
            f"{name} {amount:g}"
            for name, amount in sorted(node["Resources"].items())
            if not (name.startswith("node:") or "memory" in name)
        )
        for node in _ray().nodes()
        if node["Alive"]
    )
    return "; ".join(filter(None, machines)) or "nothing"


def _check_reachable(cluster: str) -> None:
    """Raise ConnectionError, ValueError or OSError at once where Ray would try for minutes."""
    from headrace.distributed import ray_internals

    host, _, port = ray_internals.address_of(cluster).rpartition(":")
    socket.create_connection((host, int(port)), timeout=_CONNECT_WITHIN_S).close()


def _ray() -> Any:
    """Import Ray when it is needed: it reads environment variables then."""
    try:
        import ray
    except ImportError:
        raise MissingExtraError(
            "A cluster is reached through Ray, which is not installed.\n"
            f"Install it with: {install_command('ray')}"
        ) from None
    return ray


@contextlib.contextmanager
def _closed_to_others() -> Iterator[None]:
    """Make a Ray that starts within the `with` listen on 127.0.0.1 only and require a token."""
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # Despite its name, this makes Ray keep to one machine on every system.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Otherwise Ray's processes get little of a core that another process uses.
        "RAY_worker_niceness": "0",
    }
    try:
        with environment(variables):
            _read_again(reachable=False)
            yield
    finally:
        _read_again(reachable=True)


@contextlib.contextmanager
def _ends_with_this_process() -> Iterator[None]:
    """Have Ray's agents killed if this process is killed: they would stay for a minute."""
    from headrace.distributed import ray_internals

    raylet = ray_internals.raylet_pid()
    agents = [
        child
        for listed in Path(f"/proc/{raylet}/task").glob("*/children")
        for child in listed.read_text().split()
        if b"agent" in Path(f"/proc/{child}/cmdline").read_bytes().lower()
    ]
    # The pipe ends without a line if this process is killed.
    script = 'read done || kill -KILL "$@" 2>/dev/null'
    with subprocess.Popen(
        ["sh", "-c", script, "sh", *agents], stdin=subprocess.PIPE, start_new_session=True
    ) as watcher:
        try:
            yield
        finally:
            watcher.communicate(b"done\n")


def _read_again(*, reachable: bool) -> None:
    """Make Ray read its environment variables again, if it was imported before they were set."""
    if "ray" in sys.modules:
        from headrace.distributed import ray_internals

        ray_internals.read_environment_again(reachable=reachable)


def _refusal(cluster: str, error: Exception) -> str:
    advice = {
        "local": "Ray could not be started on this machine.",
        "auto": "This machine belongs to no Ray cluster that lets this process in. On the first "
        "machine: ray start --head; on the others: ray start --address=FIRST:6379. A token closes "
        "a cluster: docs/cluster.md says how to start one. Or use --cluster local.",
    }.get(
        cluster,
        "There is no Ray cluster at this address that lets this process in (expected HOST:PORT, "
        "as `ray start --head` says it).",
    )
    return (
        f"cluster={cluster!r}: {type(error).__name__}: {error}\n{advice}\nMachines of a cluster "
        "need the same token (docs/cluster.md), and the same versions of Python and Ray."
    )
