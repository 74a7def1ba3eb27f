"""The machines of a cluster's learners: where they are placed, and which are lost or leaving.

Left out: what is done about it (`driver.py`).
"""

import socket
import time
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from headrace.config.run_config import RunConfig, demands
from headrace.distributed import ray_internals
from headrace.distributed.process import StopSignals
from headrace.errors import ConfigError
from headrace.training.log import Display
from headrace.training.ray.connect import describe_machines

_ray: Any = ray  # not all of it has types
_TRY_FOR_S = 5
_GIVE_UP_AFTER_S = 600.0  # for a cloud to start machines
_ANSWER_WITHIN_S = 3.0  # a lost packet is sent again after 1 s
_TRUST_RAY_AFTER_S = 60.0  # its health checks have found a machine that is lost by then


def wait_for_placement(run: RunConfig, stop: StopSignals, display: Display) -> Any:
    """Return a placement group with its machines.

    Raises:
        ConfigError: no machines have room for the learners.
        SystemExit: the run was stopped before.
    """
    began, is_shown = time.monotonic(), False
    while not stop():
        placement = _request_placement(run)
        for _ in range(_TRY_FOR_S):
            if _is_placed(placement):
                return placement
            if stop():
                break
        remove_placement_group(placement)  # Ray may have forgotten it: ask again
        waited = time.monotonic() - began
        needs = (
            f"{run.num_learners} learners need machines that have "
            f"{_bundle(run) | run.learner_resources} for each; the cluster's have "
            f"{describe_machines()}"
        )
        if waited > _GIVE_UP_AFTER_S:
            raise ConfigError(f"{needs}.\nWaited {waited:,.0f} s for them.")
        if not is_shown:
            display.say(f"Waiting: {needs}.")
            is_shown = True
    raise SystemExit(128 + stop.received)


def num_gpus(run: RunConfig) -> int:
    """Return the GPUs of each learner."""
    if run.gpus_per_learner >= 0 or run.device == "cpu":
        return max(0, run.gpus_per_learner)
    gpus = _ray.cluster_resources().get("GPU", 0.0)
    return int(run.device == "cuda" or gpus >= run.num_learners)


def _request_placement(run: RunConfig) -> Any:
    """Request a placement group for the learners, the first on this machine if it has room."""
    amounts, labels = demands(run.learner_resources)
    bundles = [_bundle(run) | amounts for _ in range(run.num_learners)]
    here = _ray.get_runtime_context().get_node_id()
    free = ray_internals.free_by_node().get(here, {})
    node = next((name for name in free if name.startswith("node:") and "__" not in name), None)
    if node and all(free.get(name, 0.0) >= amount for name, amount in bundles[0].items()):
        bundles[0] = bundles[0] | {node: 0.001}
    selector = {"bundle_label_selector": [labels] * len(bundles)} if labels else {}
    return placement_group(bundles, strategy="PACK", **selector)


def _bundle(run: RunConfig) -> dict[str, float]:
    return {"CPU": float(run.learner_threads)} | ({"GPU": g} if (g := num_gpus(run)) else {})


def _is_placed(placement: Any) -> bool:
    try:
        return bool(placement.wait(timeout_seconds=1))  # it takes whole seconds
    except Exception as error:  # Ray's class of it has no public name
        if "does not exist" not in str(error):
            raise
        return False  # Ray forgets one if a machine was just about to have room, or has gone


class Places:
    """The machines of the learners, by their ids.

    Attributes:
        guests: the machines of ranks that share another learner's machine, since none had room.
        leaving: machines that Ray drains: they are about to be taken away.
    """

    def __init__(self, placement: Any) -> None:
        self._placement = placement
        self._homes: dict[int, str] = {}  # in the placement group, as far as Ray has a machine
        self.guests: dict[int, str] = {}
        self.leaving: set[str] = set()
        self._suspected: set[str] = set()
        self._gone: dict[str, float] = {}  # lost, though Ray may not know it yet, and since when
        self.refresh()

    def refresh(self) -> None:
        """Ask Ray where ranks are placed now."""
        self._homes = dict(placement_group_table(self._placement)["bundles_to_node_id"])

    def of(self, rank: int) -> str:
        """Return the machine of a rank."""
        return self.guests.get(rank) or self._homes.get(rank, "")

    def all(self) -> list[str]:
        """Return the machine of each rank that has one, as Ray has placed it."""
        return list(self._homes.values())

    def find_leaving(self) -> None:
        """Ask Ray which machines it drains."""
        self.leaving = set(ray_internals.draining_nodes())

    def suspect(self, rank: int) -> None:
        """Suspect a rank's machine, since its process is lost."""
        self._suspected.add(self.of(rank))

    def trust(self) -> None:
        """Suspect no machine any more: all ranks are there."""
        self._suspected.clear()

    def find_gone(self) -> list[str]:
        """Find which of the suspected machines are lost; return their addresses.

        Ray's health checks take a while, so a machine is asked that Ray takes for alive.
        """
        nodes = [node for node in _ray.nodes() if node["NodeID"] in self._suspected]
        gone = [node for node in nodes if not (node["Alive"] and _answers(node))]
        self._gone |= {node["NodeID"]: time.monotonic() for node in gone}
        self._suspected -= self._gone.keys()
        return [node["NodeManagerAddress"] for node in gone]

    def is_home_lost(self, rank: int) -> bool:
        """Return whether Ray has no lasting machine for a rank, as far as anybody knows."""
        return self._homes.get(rank) not in self._living() - self.leaving

    def does_ray_know(self, rank: int) -> bool:
        """Return whether Ray knows that a rank's machine is lost, and looks for another one."""
        return self._homes.get(rank) not in _living_nodes()

    def host(self, rank: int, size: int) -> tuple[str, int] | None:
        """Return another rank's machine for a rank to share, and that rank; None: all are lost.

        It is one with the fewest learners.
        """
        stays = self._living() - self.leaving
        others = {self.of(each): each for each in range(size) if each != rank}
        count = [self.of(each) for each in range(size) if each != rank].count
        hosts = [node for node in others if node in stays]
        return (best := min(hosts, key=count), others[best]) if hosts else None

    def can_go_home(self, rank: int) -> bool:
        """Return whether a machine has room for a guest."""
        return rank in self.guests and self._homes.get(rank) in self._living() - self.leaving

    def _living(self) -> set[str]:
        """Return the machines that are not lost, as far as anybody knows."""
        recent = time.monotonic() - _TRUST_RAY_AFTER_S
        return _living_nodes() - {node for node, since in self._gone.items() if since > recent}


def _living_nodes() -> set[str]:
    return {node["NodeID"] for node in _ray.nodes() if node["Alive"]}


def _answers(node: dict[str, Any]) -> bool:
    """Return whether Ray's process on a machine takes connections."""
    address = node["NodeManagerAddress"], node["NodeManagerPort"]
    try:
        socket.create_connection(address, _ANSWER_WITHIN_S).close()
    except OSError:
        return False
    return True
