"""The ranks of a job: which one this process is, and how ranks exchange data.

A rank is one learner with workers of its own. Everything that is gathered is the same on every
rank, in the order of ranks: decisions on it are the same everywhere. Left out: starting ranks
(`local_ranks.py`, `torchrun.py`), memory between ranks of one host (`shm_collectives.py`).
"""

import contextlib
import datetime
import gc
import inspect
import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

# Its default arguments capture the group at import, so import it before a group exists.
import torch.distributed.nn
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from headrace.distributed.shm_collectives import Exchange
from headrace.errors import ConfigError, RankError, RankLostError, RanksChangedError
from headrace.meter import Meter

Backend = Literal["auto", "nccl", "gloo", "mpi"]
MEET_WITHIN_S = 20.0
"""For ranks to find each other, once all have come."""
NextGroup = Callable[[], tuple[Store, str]]


class Ranks:
    """The ranks of a job, as one of them sees them. The base class is a single rank.

    Attributes:
        rank, size: which of how many.
        local_rank: which of those on this host: its GPU.
        transport: how the ranks exchange data.
        is_successor: whether this process took the place of a lost one: it has nothing learned yet.
    """

    rank, size, local_rank = 0, 1, 0
    transport = "nothing"
    is_successor = False

    def wrap(self, module: nn.Module, meter: Meter, *, may_skip: bool = False) -> nn.Module:
        """Return a loss whose `backward` gives the mean gradients of all ranks.

        Args:
            may_skip: whether it may leave out some of the parameters.
        """
        return module

    def mean(self, gradient: Tensor, meter: Meter) -> None:
        """Replace a gradient (contiguous, same shape and dtype on all ranks) by its mean."""

    def meeting(self) -> contextlib.AbstractContextManager[None]:
        """Raise RankError within the `with` if another rank is lost: torch raises its own."""
        return contextlib.nullcontext()

    def gather(self, tensor: Tensor) -> Tensor:
        """Return `[size, ...]`: the `tensor` (same shape and dtype) of every rank."""
        return tensor.unsqueeze(0)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the data, of any length, of every rank."""
        return [data]

    def rejoin(self, error: RanksChangedError) -> str:
        """Join the ranks that are left, and one in the place of each that was lost.

        Nothing may hold a module that `wrap` has returned: with it, connections stay open, and
        others wait for this rank. Then modules are wrapped again, by all in the same order.

        Returns:
            The losses, in words.

        Raises:
            RankError: no successor came.
            RanksChangedError: `error`, if ranks are not replaced.
        """
        raise error

    def go_alone(self) -> None:
        """Gather without the others from now on: zeros, and the bytes of this rank, for theirs."""

    def close(self) -> None:
        """Leave the job."""


SINGLE_RANK = Ranks()


def gather_json(ranks: Ranks, data: Any) -> list[Any]:
    """Return the plain data of every rank."""
    if ranks.size == 1:
        return [data]
    return [json.loads(each) for each in ranks.gather_bytes(json.dumps(data).encode())]


def check_same(ranks: Ranks, digest: bytes, what: str) -> None:
    """Raise RankError, about `what` in plural, unless all ranks have the same digest of it."""
    digests = [each.hex() for each in ranks.gather_bytes(digest)]
    if len(set(digests)) > 1:
        listed = "\n".join(f"  rank {rank}: {each[:16]}" for rank, each in enumerate(digests))
        raise RankError(
            f"{what} of the ranks are not the same:\n{listed}\n"
            "The likely cause is something that differs between their machines or versions."
        )


def share_of(number: int, rank: int, size: int) -> int:
    """Return the part of a number of workers that a rank has; the first ones may have one more."""
    return number // size + (rank < number % size)


@dataclass(frozen=True)
class RankInfo:
    """Position of a process among the ranks of a job; see `Ranks`."""

    rank: int
    size: int
    local_rank: int


class GroupRanks(Ranks):
    """A rank among others whose group of torch's exists already, on CPUs."""

    def __init__(self, info: RankInfo) -> None:
        self.rank, self.size, self.local_rank = info.rank, info.size, info.local_rank
        self.transport = dist.get_backend()
        self._cpu: dist.ProcessGroup | None = dist.group.WORLD

    def gather(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        out = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        with self.meeting():
            dist.all_gather(list(out.unbind()), tensor)
        return out

    def gather_bytes(self, data: bytes) -> list[bytes]:
        size = torch.tensor([len(data)])
        sizes = [torch.zeros_like(size) for _ in range(self.size)]
        with self.meeting():
            dist.all_gather(sizes, size, group=self._cpu)
            longest = max(int(s) for s in sizes)
            mine = torch.zeros(longest, dtype=torch.uint8)
            if data:
                mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            parts = [torch.empty_like(mine) for _ in range(self.size)]
            dist.all_gather(parts, mine, group=self._cpu)
        return [part[: int(s)].numpy().tobytes() for part, s in zip(parts, sizes, strict=True)]

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and not _GLOO.search(str(error)):
                raise
            # Its frames hold the group, whose connections then stay open after `close`.
            traceback.clear_frames(error.__traceback__)
            raise RankLostError(
                f"Rank {self.rank} of {self.size} lost the others: {error}\n"
                "If one of them failed, its own message says why."
            ) from error


# gloo's errors have no class of their own. If a wait of a rank times out, its other waits end with
# the second text alone.
_GLOO = re.compile("gloo|Application timeout caused pair closure")


class JoinedRanks(GroupRanks):
    """A rank among others, over `torch.distributed`.

    With the backend `auto`, ranks on the CPUs of one host use shared memory instead.

    Args:
        store: where the ranks find each other; None: MPI needs none.
        limit_s: how long a rank may let the others wait.
        meet_within_s: how long the ranks may take to find each other.
        next_group: waits until lost ranks have successors; returns where all find each other then,
            and the loss in words, or raises RankError. None: the loss of a rank ends the job.

    Raises:
        ConfigError: torch was built without the backend, or it does not fit the device.
        RankError: another rank did not join.
    """

    def __init__(
        self,
        info: RankInfo,
        store: Store | None,
        backend: Backend,
        device: torch.device,
        limit_s: float,
        next_group: NextGroup | None = None,
        meet_within_s: float | None = None,
    ) -> None:
        self.rank, self.size, self.local_rank = info.rank, info.size, info.local_rank
        self._backend, self._device, self._limit_s = backend, device, limit_s
        self._next_group, self._has_rejoined = next_group, False
        self._exchange: Exchange | None = None
        self._cpu: dist.ProcessGroup | None = None
        self._is_alone = False
        chosen = backend_for(backend, device)
        if store is None and chosen != "mpi":
            raise ConfigError(
                "RANK and WORLD_SIZE are set in the environment, as torchrun does, but MASTER_ADDR "
                "and MASTER_PORT are not.\nStart with torchrun, or unset RANK and WORLD_SIZE."
            )
        if dist.is_initialized():
            raise ConfigError(
                "This process is a rank of another torch.distributed job already.\n"
                "Train with several learners in one process at a time, after the other has ended."
            )
        self._excepthook = sys.excepthook  # torch puts the rank before every later traceback
        self._join(store, limit_s if meet_within_s is None else meet_within_s)

    def _join(self, store: Store | None, within_s: float) -> None:
        self.transport = chosen = backend_for(self._backend, self._device)
        with contextlib.ExitStack() as stack, self.meeting():
            stack.callback(self.close)
            dist.init_process_group(
                chosen,
                store=store,
                rank=-1 if store is None else self.rank,
                world_size=-1 if store is None else self.size,
                timeout=datetime.timedelta(seconds=within_s),
                device_id=self._device if chosen == "nccl" else None,
            )
            if within_s != self._limit_s:
                limit = datetime.timedelta(seconds=self._limit_s)
                dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)
            # Decisions are made on data of the CPU.
            self._cpu = dist.new_group(backend="gloo") if chosen == "nccl" else dist.group.WORLD
            hosts = set(self.gather_bytes(host_id().encode()))
            is_auto = self._backend == "auto" and chosen == "gloo"
            if is_auto and len(hosts) == 1 and self.size > 1:
                self.transport = "shared memory"
                shared = dist.distributed_c10d._get_default_store()

                self._exchange = Exchange(
                    self.rank, self.size, shared, _CAPACITY, self._limit_s, within_s
                )
            stack.pop_all()

    def rejoin(self, error: RanksChangedError) -> str:
        if self._next_group is None:
            raise error
        losses = []
        while True:
            self.close()  # before waiting: others may wait for this rank, and not see the loss
            try:
                store, loss = self._next_group()
            except RankError as none:
                raise RankError(f"{error}\n{none}") from error
            losses.append(loss)
            try:
                self._join(store, MEET_WITHIN_S)
            except RankLostError:  # another one, meanwhile
                continue
            self._has_rejoined = True
            return "\n".join(losses)

    def wrap(self, module: nn.Module, meter: Meter, *, may_skip: bool = False) -> nn.Module:
        with self.meeting():
            wrapped = DistributedDataParallel(
                module,
                gradient_as_bucket_view=True,
                find_unused_parameters=may_skip,
                # After a loss, rank 0 may be behind others.
                init_sync=not (self.is_successor or self._has_rejoined),
                **_NO_BUFFERS,
            )
        if self._exchange is not None:
            wrapped.register_comm_hook((self, meter), _mean_over_ranks)
        return wrapped

    def mean(self, gradient: Tensor, meter: Meter) -> None:
        if self._exchange is None:
            with self.meeting():
                dist.all_reduce(gradient)
        else:
            meter.lap("learn")
            self._exchange.sum(gradient)
            meter.lap("allreduce")
        gradient /= self.size

    def go_alone(self) -> None:
        self._is_alone = True

    def gather(self, tensor: Tensor) -> Tensor:
        if self._is_alone:
            whole = torch.zeros(self.size, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
            whole[self.rank] = tensor
            return whole
        if self._exchange is None:
            return super().gather(tensor)
        whole = tensor.contiguous()
        parts = self._exchange.gather(whole.view(-1).view(torch.uint8).numpy().tobytes())
        each = [torch.frombuffer(bytearray(part), dtype=whole.dtype) for part in parts]
        return torch.stack(each).view(self.size, *whole.shape)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        if self._is_alone:
            return [data] * self.size
        return super().gather_bytes(data) if self._exchange is None else self._exchange.gather(data)

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
        self._cpu = self._exchange = None
        if dist.is_initialized():
            dist.destroy_process_group()
        # gloo's threads end with the last reference to their group, and some lie in cycles, as a
        # wrapped module's. A thread that outlives the interpreter may abort the process.
        gc.collect()
        sys.excepthook = self._excepthook


# Normalizers are the same on all ranks already. torch 2.13 gave the argument another name.
_DDP_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in _DDP_ARGUMENTS
    else "broadcast_buffers": False
}
_CAPACITY = 1 << 24  # bytes; untouched pages cost no memory


def _mean_over_ranks(
    state: tuple[JoinedRanks, Meter],
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP checks the annotation
) -> torch.futures.Future[Tensor]:
    """Average the gradients that `DistributedDataParallel` has ready."""
    ranks, meter = state
    ranks.mean(bucket.buffer(), meter)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def may_start_ranks() -> bool:
    """Return whether this process can be rank 0 of a job that nobody asked for."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    return in_main_thread and not (dist.is_available() and dist.is_initialized())


def visible_gpus(name: str) -> int:
    """Return how many learners of this machine can have a GPU each, with the setting `device`."""
    return 0 if name == "cpu" or not torch.cuda.is_available() else torch.cuda.device_count()


def device_of(name: str, local_rank: int) -> torch.device:
    """Return the device of a rank, with the setting `device`; ConfigError if there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device='cuda', but torch finds no CUDA device (see `headrace doctor`).\n"
            "Use --device cpu (or auto)."
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if local_rank >= (gpus := torch.cuda.device_count()):
        raise ConfigError(
            f"Learner {local_rank + 1} of this machine has no GPU: there are {gpus}, and each "
            f"learner takes one.\nUse --num-learners {gpus}, or --device cpu."
        )
    return torch.device("cuda", local_rank)


def backend_for(backend: Backend, device: torch.device) -> str:
    """Return torch.distributed's name of a backend; ConfigError if it does not fit the device."""
    if backend == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError("backend='nccl' is for GPUs, and the learner is on the CPU: use gloo.")
    if not dist.is_backend_available(backend):
        raise ConfigError(
            f"backend={backend!r}: this torch was built without it (see `headrace doctor`).\n"
            "Use --backend auto."
        )
    return backend


def host_id() -> str:
    """Return an id of this host: ranks with the same id can share memory and sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return f"{os.uname().nodename}-{os.getpid()}"
    return f"{boot.read_text().strip()}-{os.stat('/proc/self/ns/net').st_ino}"
