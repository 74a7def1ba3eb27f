"""Sampling in worker processes, batch by batch: the hybrid of processes and vectors.

Each worker steps its own vectors for T steps with its own copy of the policy; nobody waits for
anybody inside a fragment, and a batch is a fragment of every vector, made with the same weights. At
lag 1 the next batch is made while this one is learned from.

Left out: processes (`worker_pool.py`), and sampling that never stops (`asynchronous.py`).
"""

import time
from collections.abc import Mapping

from headrace.collectors.api import Collected, Ledger, Plan, Say, ShouldStop
from headrace.collectors.backends.api import MakeSeats, Order
from headrace.collectors.backends.processes import Processes
from headrace.collectors.rollout import Filled
from headrace.collectors.snapshots import Journals
from headrace.collectors.worker_pool import Crew
from headrace.meter import Laps
from headrace.models.policy import Policy
from headrace.spec import Array


class WorkersCollector:
    """A `Collector` over worker processes; all batches are those of `InlineCollector`.

    Args:
        plan: what to sample.
        num_workers: W, at most the number of vectors.
        stop: asked while waiting whether to give up.
        state: what to go on from; {}: begin.
        say: told of workers that were lost, and of episodes that were dropped.
        make_seats: where the workers are: processes of this machine, or Ray actors.

    Raises:
        ConfigError, EnvError, SamplerError: see `Crew`.
    """

    def __init__(
        self,
        plan: Plan,
        num_workers: int,
        stop: ShouldStop,
        state: Mapping[str, Array] | None = None,
        say: Say = lambda text: None,
        make_seats: MakeSeats = Processes,
    ) -> None:
        self._plan, self._stop, self._say = plan, stop, say
        self._journals = Journals(plan, state or {})
        self._crew = Crew(
            plan, num_workers, self._journals, stop, say, remakes=True, make_seats=make_seats
        )
        self.restored, self._version = self._crew.restored, 0
        self._held: list[Filled] = []  # of the batch that was collected last

    @property
    def ledger(self) -> Ledger:
        """See `Collector`."""
        return self._crew.ledger

    def publish(self, policy: Policy, version: int) -> None:
        """See `Collector`."""
        self._crew.publish(policy, version)
        self._version = version

    def collect(self) -> Collected | None:
        """See `Collector`."""
        self._journals.enter()
        if self._stop():
            return None
        if not self._crew.owing:
            self._order()
        self._crew.serve(lambda: self._crew.owing)
        all_filled = self._take()
        if all_filled is None:
            return None
        fragments = {v: self._crew.fragment(v, 0) for v in self._plan.vectors}
        self._journals.hold(fragments, all_filled)
        self._held = all_filled
        episodes = [episode for filled in all_filled for episode in filled.episodes]
        metrics = self._crew.metrics(all_filled, depth=0)
        env_steps = sum(filled.kept for filled in all_filled)
        return Collected(list(fragments.values()), env_steps, episodes, metrics)

    def go_ahead(self, *, more: bool) -> None:
        """See `Collector`."""
        self._journals.enter()
        if self._plan.lag and more:
            self._order()
            self._crew.send(time.monotonic())

    def give_up(self) -> None:
        """See `Collector`."""
        self._journals.drop()
        self._lose(self._held)

    def halt(self) -> None:
        """See `Collector`."""
        self._crew.halt()
        self._lose(self._take() or [])

    def state(self) -> dict[str, Array]:
        """See `Collector`."""
        self._journals.enter()
        return self._journals.state()

    def meters(self) -> dict[str, dict[str, float]]:
        """See `Collector`."""
        return self._crew.meters()

    def laps(self) -> dict[str, Laps]:
        """See `Collector`."""
        return self._crew.laps()

    def close(self) -> None:
        """See `Collector`."""
        self._crew.close()

    def _order(self) -> None:
        """Have the next batch made, with the weights that were published last."""
        steps = self._journals.steps()
        for share in self._crew.shares:
            self._crew.order(Order(tuple((v, 0, steps) for v in share), self._version))

    def _lose(self, all_filled: list[Filled]) -> None:
        self.ledger.lost += sum(filled.kept for filled in all_filled)

    def _take(self) -> list[Filled] | None:
        """Count what was delivered: it is a batch, or (None) lost."""
        all_filled = [filled for _, filled in self._crew.delivered]
        self._crew.delivered.clear()
        whole = len(all_filled) == len(self._crew.shares) and all(f.whole for f in all_filled)
        for filled in all_filled:
            self.ledger.count(filled.taken, filled.lost, whole=whole)
            self.ledger.drop(filled.dropped, self._say)
        return all_filled if whole else None
