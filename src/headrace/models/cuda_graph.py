"""A function as one CUDA graph: the host starts it once, and not each of its operations.

Left out: what is recorded (`collectors/device.py`, `learner/recorded.py`).
"""

from collections.abc import Callable

import torch


class CudaGraph:
    """A function as one CUDA graph. It may only use memory of one device, always the same.

    The first call is an ordinary one, in which compilers and libraries start. The second records
    the graph. Later calls replay it.
    """

    def __init__(self, function: Callable[[], None], device: torch.device) -> None:
        self._function, self._device = function, device
        self._is_ready = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if not self._is_ready:
            self._function()
            self._is_ready = True
            return
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(self._device):
                stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                # Threads that act, or copy, may allocate memory meanwhile.
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    self._function()
            self._graph = graph
        self._graph.replay()
