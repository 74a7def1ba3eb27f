"""Runs a function in several processes that are the ranks of one job."""

import datetime
import os
import traceback

import torch
import torch.distributed as dist

from headrace.distributed import child_process
from headrace.distributed.ranks import SINGLE_RANK, JoinedRanks, RankInfo


def _main(function, rank, size, port, backend, limit_s, pipe, arguments):
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=limit_s)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        job = JoinedRanks(RankInfo(rank, size, rank), store, backend, torch.device("cpu"), limit_s)
        pipe.send(("ok", function(job, *arguments)))
        job.close()
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        pipe.close()
        os._exit(1)


def on_ranks(size, function, *arguments, backend="auto", limit_s=30.0):
    """What `function(ranks, *arguments)` gives on each rank; AssertionError if one fails."""
    if size == 1:
        return [function(SINGLE_RANK, *arguments)]
    limit = datetime.timedelta(seconds=limit_s)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    started = []
    with child_process.context() as context:  # whose processes have torch imported
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            of = (function, rank, size, store.port, backend, limit_s, theirs, arguments)
            process = context.Process(target=_main, args=of)
            process.start()
            theirs.close()
            started.append((process, ours))
    results, failed = [], []
    for process, ours in started:
        try:
            status, value = ours.recv()
        except EOFError:
            status, value = "error", "died"
        process.join(limit_s)
        (results if status == "ok" else failed).append(value)
    assert not failed, "\n".join(failed)
    return results
