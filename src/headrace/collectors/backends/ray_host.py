"""A Ray actor that hosts the worker processes of one machine.

Imports nothing heavy, so that the server that workers are forked from imports beside it. Left out:
what the host does (`worker_host.py`), and the learner's end (`ray_backend.py`).
"""

import contextlib
import os

from headrace.distributed import child_process
from headrace.distributed.channel import Door, connect


class HostActor:
    """A host of workers.

    Args:
        folder: working directory of the learner.
        door, number: where to connect to the learner, and how it knows this host.
    """

    def __init__(self, folder: str, door: Door, number: int) -> None:
        work_in(folder)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray lets an actor without a GPU see them all
        child_process.warm_up()
        self._door, self._number = door, number

    def connect(self) -> str:
        """Connect to the learner. Return the id of the machine."""
        import ray  # only here: the rest runs in any process

        self._learner = connect(self._door, self._number)
        return str(ray.get_runtime_context().get_node_id())

    def serve(self, plan: bytes) -> None:
        """Host workers until the learner closes the host, or is gone. `plan` is pickled."""
        import cloudpickle

        from headrace.collectors.backends.worker_host import WorkerHost

        WorkerHost(cloudpickle.loads(plan), self._learner).run()


def work_in(folder: str) -> None:
    """Change to the learner's working directory, if this machine has it, for relative paths."""
    with contextlib.suppress(OSError):
        os.chdir(folder)


def own_address() -> str:
    """Return the address of this machine, as the cluster knows it."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())  # type: ignore[no-untyped-call]
