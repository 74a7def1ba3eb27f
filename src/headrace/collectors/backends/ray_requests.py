"""Hosts of workers, as the learner has requested them from Ray, and their connections.

Left out: the host itself (`ray_host.py`, `worker_host.py`), and which are requested
(`ray_backend.py`).
"""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from headrace.collectors.backends.api import Exited
from headrace.collectors.backends.ray_host import HostActor
from headrace.collectors.backends.worker_host import Beat
from headrace.distributed.channel import Door, NetworkChannel
from headrace.timeouts import StallTimer


@dataclass(frozen=True)
class Needs:
    """Requirements of a worker on its machine.

    Attributes:
        resources: amounts of Ray's custom resources.
        machines: ids of the machines that have room now, one for each of the first workers. Places
            for the others are requested a few at a time, so that ranks share new machines.
    """

    num_cpus: float = 1.0
    resources: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    machines: Sequence[str] = ()


class RequestedHost:
    """A host, from when it is requested.

    Args:
        places: number of workers that it has room for.
        machine: where it is to be; "": wherever there is room.
    """

    def __init__(self, needs: Needs, places: int, machine: str, door: Door, number: int) -> None:
        actor_class: Any = ray.remote(num_gpus=0, max_restarts=0)(HostActor)
        strategy: Any = NodeAffinitySchedulingStrategy(machine, soft=False) if machine else "SPREAD"
        has_labels = needs.labels and not machine
        self.handle = actor_class.options(
            scheduling_strategy=strategy,
            num_cpus=needs.num_cpus * places,
            resources={name: amount * places for name, amount in needs.resources.items()},
            **({"label_selector": needs.labels} if has_labels else {}),
        ).remote(os.getcwd(), door, number)
        self.places, self.number, self.since = places, number, time.monotonic()
        self.machine = machine
        self.connected = self.handle.connect.remote()
        self.served: Any = None  # the call in which it hosts workers
        self.channel: NetworkChannel | None = None
        self.node = ""  # its machine, once it is up
        self.workers: set[int] = set()  # indices of those that run here
        self.beats: dict[int, Beat] = {}  # by worker
        self._stall, self._num_read = StallTimer(), 0

    def send(self, message: Any) -> None:
        """Send a message. An error is left to `take`."""
        if self.channel is not None:
            with contextlib.suppress(OSError):
                self.channel.send(message)

    def take(self) -> list[Any]:
        """Return the messages that have come. Raise EOFError if the host is gone."""
        assert self.channel is not None
        self._num_read += 1
        return self.channel.take()

    @property
    def is_behind(self) -> bool:
        """Return whether earlier messages have not been sent whole."""
        return self.channel is not None and self.channel.has_unsent

    def end(self) -> None:
        """Kill the host and its workers."""
        ray.kill(self.handle)
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def silent_s(self, now: float) -> float:
        """Return for how long nothing has come from it."""
        return self._stall.lasts(now, self._num_read)


def machines_alive() -> set[str]:
    """Return the ids of the machines that Ray takes for alive."""
    nodes: Any = ray.nodes  # it has no types
    return {each["NodeID"] for each in nodes() if each["Alive"]}


def described_end(error: RayError, node: str) -> Exited:
    """Describe how a host has ended, and whether its work may be the cause."""
    if node not in machines_alive() or getattr(error, "preempted", False):
        return Exited("was on a machine that is gone", counts=False)
    if type(error).__name__ == "ActorUnavailableError":
        return Exited(f"cannot be reached\n{error}", counts=False)
    return Exited(f"ran in a host that died\n{error}")
