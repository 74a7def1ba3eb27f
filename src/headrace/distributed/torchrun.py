"""Ranks that torchrun starts: which rank this is, where they meet, and whether a job is restarted.

torchrun's store outlives a failed attempt and keeps the addresses of its dead ranks, and each node
counts restarts for itself. So ranks first find out which of them are there in this attempt, and
then meet under a name that no other attempt has.
"""

import datetime
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from headrace.distributed.child_process import end_with_parent
from headrace.distributed.ranks import RankInfo
from headrace.errors import RankError

_JOIN_WITHIN_S = 300.0  # imports from a slow disk
_MAILBOX = "to rank 0"


@dataclass(frozen=True)
class Attempt:
    """One attempt of a job at its run."""

    info: RankInfo
    store: Store | None  # of this attempt alone; None: MPI needs none
    is_restart: bool  # an earlier attempt failed
    may_restart: bool  # torchrun makes another attempt if this one fails


def joined(environ: Mapping[str, str]) -> Attempt | None:
    """Join the attempt that this process is a rank of; return None outside torchrun.

    It reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RESTART_COUNT and
    TORCHELASTIC_MAX_RESTARTS: https://docs.pytorch.org/docs/stable/elastic/run.html.

    Raises:
        RankError: another rank did not join.
    """
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    end_with_parent()
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    info = RankInfo(rank, size, int(environ.get("LOCAL_RANK", 0)))
    restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    may_restart = int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
    if "MASTER_ADDR" not in environ:
        return Attempt(info, None, restarts > 0, may_restart)
    limit = datetime.timedelta(seconds=_JOIN_WITHIN_S)
    try:
        store, *_ = next(rendezvous("env://", timeout=limit))
        name, most = meet(store, info, restarts)
    except dist.DistError as error:
        cause = str(error).partition("\n")[0]
        raise RankError(f"Rank {rank} of {size} could not meet the others: {cause}") from None
    return Attempt(info, PrefixStore(name, store), most > 0, may_restart)


def meet(store: Store, info: RankInfo, restarts: int) -> tuple[str, int]:
    """Agree on a name of this attempt; return it and the largest number of restarts of a rank.

    Messages of dead ranks in the store look like those of living ones, but dead ranks do not
    answer. So each other rank says hello under a random name, rank 0 answers with the attempt's
    name, and the rank signs that. When all have signed, rank 0 publishes it.
    """
    if info.rank:
        name = f"rank/{secrets.token_hex(8)}"
        _send(store, hello=name)
        attempt = store.get(name).decode()
        _send(store, attempt=attempt, rank=info.rank, restarts=restarts)
        return attempt, int(store.get(attempt))
    attempt, signed = f"attempt/{secrets.token_hex(8)}", {0: restarts}
    while len(signed) < info.size:
        try:
            message = json.loads(store.queue_pop(_MAILBOX))
        except dist.DistStoreError:
            missing = sorted(set(range(info.size)) - set(signed))
            raise RankError(f"Of {info.size} ranks, these did not join: {missing}.") from None
        if "hello" in message:
            store.set(message["hello"], attempt)
        elif message["attempt"] == attempt:
            signed[message["rank"]] = message["restarts"]
    store.set(attempt, str(max(signed.values())))
    return attempt, max(signed.values())


def _send(store: Store, **message: str | int) -> None:
    store.queue_push(_MAILBOX, json.dumps(message))
