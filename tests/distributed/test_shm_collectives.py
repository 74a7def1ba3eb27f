"""Shared memory between ranks: threads stand for them, on real sockets and memory."""

import contextlib
import gc
import os
import select
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from headrace.distributed.shm_collectives import Exchange
from headrace.errors import RankError


def together(size, function, capacity=1 << 12, limit_s=10.0):
    """What `function(exchange, rank)` gives, by rank."""
    store = HashStore()

    def rank_of(rank):
        exchange = Exchange(rank, size, store, capacity, limit_s, limit_s)
        try:
            return function(exchange, rank)
        finally:
            exchange.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_of, range(size)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_sums_are_equal_on_all_ranks_in_every_round(size, dtype):
    lengths = [1, 7, 1024, 5000, 1, 4096, 0, 333] * 10  # some take several rounds
    parts = [
        [torch.randn(n, generator=torch.Generator().manual_seed(rank * 1000 + i)).to(dtype)
         for i, n in enumerate(lengths)]
        for rank in range(size)
    ]  # fmt: skip

    def sums(exchange, rank):
        for data in (own := [part.clone() for part in parts[rank]]):
            exchange.sum(data)
        return own

    for of_rank in together(size, sums):
        for i, found in enumerate(of_rank):
            expected = parts[0][i]
            for rank in range(1, size):
                expected = expected + parts[rank][i]
            assert found.equal(expected)


def test_sums_have_any_shape_and_need_contiguous_memory():
    def own(exchange, rank):
        data = torch.full((3, 4), rank + 1.0)
        exchange.sum(data)
        return data

    assert all(found.equal(torch.full((3, 4), 3.0)) for found in together(2, own))


def test_gather_returns_the_data_of_all_ranks():
    brought = [[b"", b"x" * 5, bytes(range(256)) * 50, b""], [b"yes", b"", b"a", b""]]

    def gather(exchange, rank):
        return [exchange.gather(data) for data in brought[rank]]

    expected = [list(pair) for pair in zip(*brought, strict=True)]
    assert together(2, gather) == [expected, expected]


def test_error_names_the_rank_that_left():
    def leave(exchange, rank):
        if rank == 1:
            (peer,) = exchange._sockets.values()
            assert select.select([peer], [], [], 10)[0]  # the other has begun a round
            return peer.recv(1) == b"\0"
        with pytest.raises(RankError, match="Rank 1 is gone"):
            exchange.gather(b"")
        with pytest.raises(RankError, match="Rank 1 is gone"):
            exchange.gather(b"")
        return True

    assert together(2, leave) == [True, True]


def test_error_names_the_late_rank_and_the_limit():
    waited = threading.Event()

    def be_late(exchange, rank):
        if rank == 0:
            return waited.wait(10)
        with pytest.raises(RankError, match=r"Rank 0 has not answered for 0.2 s(.|\n)*--rank-tim"):
            exchange.gather(b"")
        waited.set()
        return True

    assert together(2, be_late, limit_s=0.2) == [True, True]


def test_missing_rank_raises_after_the_limit():
    with pytest.raises(RankError, match=r"Rank 0 of 2 could not meet the others within 0.2 s"):
        Exchange(0, 2, HashStore(), 1 << 12, 0.2, 0.2)


def test_close_leaves_no_open_files():
    def descriptors():
        gc.collect()
        links = []
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the one that lists them
                links.append(os.readlink(fd))
        return sorted(link for link in links if not link.endswith("/fd"))

    before = descriptors()
    together(3, lambda exchange, rank: exchange.gather(b"x"))
    assert descriptors() == before


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be somebody else for a moment")
def test_connection_of_another_user_is_refused():
    store = HashStore()
    stranger = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
    s.connect("\\0" + sys.argv[1])
    try:
        s.send((1).to_bytes(4))
        print(socket.recv_fds(s, 4, 1)[:2])
    except ConnectionError:
        print("turned away")
"""
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(Exchange, 0, 2, store, 1 << 12, 20.0, 20.0)
        said = subprocess.run(
            [sys.executable, "-I", "-c", stranger, store.get("exchange/0").decode()],
            capture_output=True, text=True, timeout=20,
        )  # fmt: skip
        assert said.stdout.strip() == "turned away", said
        second = Exchange(1, 2, store, 1 << 12, 20.0, 20.0)
        second.close()
        first.result().close()
