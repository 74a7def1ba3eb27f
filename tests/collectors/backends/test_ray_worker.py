"""A worker on a cluster, as the learner holds it: what is known of a process that is lost."""

from types import SimpleNamespace

import pytest

from headrace.collectors.backends.api import LostWork, WorkOrder
from headrace.collectors.backends.worker_host import Beat
from tests.support import plan_for, short_cartpole

pytest.importorskip("ray")
from headrace.collectors.backends.ray_worker import RayWorkerHandle


@pytest.mark.parametrize(("generation", "taken"), [(2, 7), (1, 0)])
def test_a_beat_of_the_process_before_is_not_counted(generation, taken):
    """It may come after the next process has begun to make the same fragment again."""
    plan, order = plan_for(short_cartpole), WorkOrder(((0, 0, 0),), 0, ())
    handle = RayWorkerHandle(0, [0], plan, lambda host, index: "")
    beat = Beat(generation, 5, order.fragments, 7)
    handle.generation = 2
    handle.host = SimpleNamespace(beats={0: beat}, workers={0}, send=lambda message: None)
    assert handle.lose([order]) == LostWork(taken, plan.env_steps_per_fragment - taken)
