"""Collectives among the ranks of one host, through anonymous shared memory.

Each rank writes to memory of its own, which the others read, and has a socket to each other rank.
A round: write your part, send each other rank a byte, wait for a byte from each, read their parts.
The bytes order the accesses and wake sleeping ranks; a socket that ends is a rank that died. Rounds
alternate between two halves of the memory: a rank that sent the byte of round k + 1 has read all of
round k. Left out: several hosts and GPUs (`ranks.py`).
"""

import contextlib
import mmap
import os
import secrets
import select
import socket
import struct
import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from headrace.errors import RankError, RankLostError

SPIN_S = 50e-6
"""How long to poll before sleeping: a rank that is a little late costs no wake-up then."""


class Exchange:
    """One rank's end.

    Args:
        rank, size: which of how many.
        store: where the ranks find each other.
        capacity: bytes of a rank in a round; longer data takes several rounds.
        limit_s: how long to wait for a rank that is alive but late.
        meet_within_s: how long the ranks may take to find each other.

    Raises:
        RankLostError: a rank did not join.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        capacity: int,
        limit_s: float,
        meet_within_s: float,
    ) -> None:
        self._rank, self._size = rank, size
        self._limit_s, self._capacity = limit_s, capacity
        self._round = 0
        fd = os.memfd_create(f"headrace rank {rank}")
        os.ftruncate(fd, 2 * capacity)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, fd)
            self._sockets, fds = _connect(rank, size, fd, store, meet_within_s)
            for other in fds.values():
                stack.callback(os.close, other)
            maps = [mmap.mmap(fds.get(r, fd), 2 * capacity) for r in range(size)]
        memories = [np.frombuffer(memory, np.uint8) for memory in maps]
        # [round % 2][rank]
        self._halves = [m[:capacity] for m in memories], [m[capacity:] for m in memories]

    def sum(self, data: Tensor) -> None:
        """Replace the numbers in `data` (contiguous, on the CPU) by their sums over all ranks.

        They are added in the order of ranks: the bits are the same on each of them.
        """
        flat = data.view(-1)
        count = self._capacity // data.element_size()
        for first in range(0, len(flat), count):
            part = flat[first : first + count]
            size = part.numel() * part.element_size()
            parts = [torch.from_numpy(m[:size]).view(data.dtype) for m in self._next()]
            parts[self._rank].copy_(part)
            self._meet()
            torch.add(parts[0], parts[1], out=part)
            for other in parts[2:]:
                part += other

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of each rank, by rank."""
        mine = np.frombuffer(data, np.uint8)
        sizes = self._gather_once(np.array([len(mine)], np.int64).view(np.uint8), [8] * self._size)
        lengths = [int(size.view(np.int64)[0]) for size in sizes]
        gathered = [bytearray() for _ in lengths]
        for first in range(0, max(lengths), self._capacity):
            here = [min(max(0, n - first), self._capacity) for n in lengths]
            parts = self._gather_once(mine[first : first + self._capacity], here)
            for whole, part in zip(gathered, parts, strict=True):
                whole += part.tobytes()
        return [bytes(whole) for whole in gathered]

    def close(self) -> None:
        """Leave the job: the others see this rank end."""
        for peer in self._sockets.values():
            peer.close()

    def _gather_once(self, mine: NDArray[np.uint8], sizes: list[int]) -> list[NDArray[np.uint8]]:
        memory = self._next()
        memory[self._rank][: len(mine)] = mine
        self._meet()
        return [m[:size].copy() for m, size in zip(memory, sizes, strict=True)]

    def _next(self) -> list[NDArray[np.uint8]]:
        self._round += 1
        return self._halves[self._round % 2]

    def _meet(self) -> None:
        """Announce this rank's part, and wait for the others'."""
        for rank, peer in self._sockets.items():
            try:
                peer.send(b"\0")
            except OSError:
                raise _gone(rank) from None
        sleep_at = time.perf_counter() + SPIN_S
        waiting = dict(self._sockets)
        while waiting and time.perf_counter() < sleep_at:
            for rank, peer in list(waiting.items()):
                if _take(rank, peer):
                    del waiting[rank]
        for rank, peer in waiting.items():
            poll = select.poll()
            poll.register(peer, select.POLLIN)
            if not poll.poll(self._limit_s * 1000):
                raise RankError(
                    f"Rank {rank} has not answered for {self._limit_s:g} s; it is alive, but stuck "
                    "or slower than that (--rank-timeout-s)."
                )
            _take(rank, peer)


def _take(rank: int, peer: socket.socket) -> bool:
    """Return whether the rank's byte of this round was there."""
    try:
        if peer.recv(1):
            return True
    except BlockingIOError:
        return False
    except OSError:
        pass
    raise _gone(rank)


def _gone(rank: int) -> RankLostError:
    return RankLostError(f"Rank {rank} is gone; its own message says why, if it had time for one.")


def _connect(
    rank: int, size: int, fd: int, store: Store, within_s: float
) -> tuple[dict[int, socket.socket], dict[int, int]]:
    """Return a socket to each other rank, and its memory's file descriptor."""
    sockets: dict[int, socket.socket] = {}
    fds: dict[int, int] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name = f"headrace-{secrets.token_hex(16)}"  # no file: gone with the process
        listener.bind(f"\0{name}")
        listener.listen(size)
        listener.settimeout(within_s)
        store.set(f"exchange/{rank}", name)
        try:
            for other in range(rank):
                peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                peer.settimeout(within_s)
                peer.connect(b"\0" + store.get(f"exchange/{other}"))
                socket.send_fds(peer, [rank.to_bytes(4)], [fd])
                _, (fds[other],), _, _ = socket.recv_fds(peer, 4, 1)
                sockets[other] = peer
            while len(sockets) < size - 1:
                peer, _ = listener.accept()
                credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                _pid, user, _group = struct.unpack("3i", credentials)
                if user != os.getuid():  # other users can see the name
                    peer.close()
                    continue
                peer.settimeout(within_s)
                number, (memory,), _, _ = socket.recv_fds(peer, 4, 1)
                other = int.from_bytes(number)
                socket.send_fds(peer, [rank.to_bytes(4)], [fd])
                sockets[other], fds[other] = peer, memory
        except (OSError, ValueError) as error:  # ValueError: it ended before it had sent its memory
            raise RankLostError(
                f"Rank {rank} of {size} could not meet the others within {within_s:g} s: {error}."
            ) from None
    for peer in sockets.values():
        peer.setblocking(False)
    return dict(sorted(sockets.items())), fds
