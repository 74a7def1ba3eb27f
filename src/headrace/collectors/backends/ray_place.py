"""A Ray actor for samplers, as the learner holds it: asked for, looked after, and how it ended.

Left out: who sits in it, and when (`ray_actors.py`), and what runs there (`ray_worker.py`).
"""

import contextlib
import os
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from headrace.collectors.backends.ray_worker import Beat, RemoteSampler
from headrace.timeouts import Silence

_BESIDE = "beside"  # what need not wait for a fragment


@dataclass(frozen=True)
class Needs:
    """What an actor needs of a machine.

    Attributes:
        num_cpus: cores.
        resources: Ray's custom resources, and how much of each.
        labels: that its machine must have.
        at_once: for how many actors of this rank there is room now; the others are asked for one
            after the other, so that ranks share what comes.
    """

    num_cpus: float = 1.0
    resources: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    at_once: int = 1 << 30

    def options(self) -> dict[str, Any]:
        """As Ray has them."""
        labels = {"label_selector": self.labels} if self.labels else {}
        return {"num_cpus": self.num_cpus, "resources": self.resources, **labels}


class Place:
    """An actor, from when it is asked for."""

    def __init__(self, needs: Needs, plan: Any) -> None:
        how: Any = {"concurrency_groups": {_BESIDE: 1}, "num_gpus": 0, "max_restarts": 0}
        how["enable_task_events"] = False  # a tenth of what a call takes
        actor: Any = ray.remote(**how)(RemoteSampler)
        where = {"scheduling_strategy": "SPREAD"} | needs.options()
        self.actor = actor.options(**where).remote(plan, os.getcwd())
        self.hello = self.actor.hello.remote()
        self.node = ""  # its machine, once it is up
        self.guests: set[int] = set()  # seats of who sits here
        self.beats: dict[int, Beat] = {}
        self.has_weights = False  # was told to fill something, with weights
        self.silence = Silence()
        self._asked, self._num_answers = None, 0

    @property
    def is_up(self) -> bool:
        """Whether samplers can sit down here."""
        return bool(self.node)

    def beside(self, method: str, *arguments: Any) -> Any:
        """Call a method that need not wait for a fragment."""
        of = getattr(self.actor, method)
        return of.options(concurrency_group=_BESIDE).remote(*arguments)

    def ask(self) -> None:
        """Read how it does, if it has answered, and ask again."""
        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            with contextlib.suppress(RayError):  # it is lost, which other calls say as well
                self.beats = ray.get(self._asked)
            self._asked, self._num_answers = None, self._num_answers + 1
        if self._asked is None:
            self._asked = self.beside("beat")

    def lost_machine(self) -> bool:
        """Whether it is dead because its machine is gone, or was before it was up."""
        found = ray._private.state.state.actor_table(self.actor._actor_id.hex())
        return bool(found["DeathCause"].actor_died_error_context.HasField("node_death_info"))

    def silent_s(self, now: float) -> float:
        """How long it has not answered."""
        return self.silence.lasts(now, self._num_answers) if self._asked is not None else 0.0


_nodes: Any = ray.nodes  # it has no types


def cause(error: RayError, node: str) -> tuple[str, bool]:
    """How an actor has ended, in words; and whether it may have been its own fault."""
    alive = {each["NodeID"] for each in _nodes() if each["Alive"]}
    if node not in alive or getattr(error, "preempted", False):
        return "was on a machine that is gone", False
    if type(error).__name__ == "ActorUnavailableError":
        return f"cannot be reached\n{error}", False
    return f"died\n{error}", True
