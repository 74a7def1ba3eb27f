"""Ranks that torchrun starts: which one this is, where they meet, whether they are to go on.

torchrun's store outlives an attempt that failed, and still holds the addresses of its dead ranks;
and on several nodes, each node counts restarts for itself. So ranks first find out who is there in
this attempt, and then meet under a name that no other attempt has.

Left out: ranks that a process of ours starts (`local_ranks.py`), and what ranks tell each other.
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
    """One attempt of a job at its run.

    Attributes:
        place: which rank this is.
        store: of this attempt alone; None: MPI, which has no need of one.
        goes_on: an attempt before this one failed.
        may_restart: if this one fails, another is made.
    """

    place: RankInfo
    store: Store | None
    goes_on: bool
    may_restart: bool


def joined(environ: Mapping[str, str]) -> Attempt | None:
    """The attempt that this process is a rank of, by environment variables; None without them.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RESTART_COUNT and
    TORCHELASTIC_MAX_RESTARTS, as https://docs.pytorch.org/docs/stable/elastic/run.html has them.

    Raises:
        RankError: the other ranks did not come.
    """
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    end_with_parent()
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    place = RankInfo(rank, size, int(environ.get("LOCAL_RANK", 0)))
    restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    may_restart = int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
    if "MASTER_ADDR" not in environ:
        return Attempt(place, None, restarts > 0, may_restart)
    limit = datetime.timedelta(seconds=_JOIN_WITHIN_S)
    try:
        store, *_ = next(rendezvous("env://", timeout=limit))
        name, most = meet(store, place, restarts)
    except dist.DistError as error:
        why = str(error).partition("\n")[0]
        raise RankError(f"Rank {rank} of {size} could not meet the others: {why}") from None
    return Attempt(place, PrefixStore(name, store), most > 0, may_restart)


def meet(store: Store, place: RankInfo, restarts: int) -> tuple[str, int]:
    """The name of this attempt, and the most restarts that a rank of it knows of.

    What dead ranks left in the store cannot be told from what living ones wrote, except by an
    answer: every other rank says hello under a name of its own; rank 0 answers each such name with
    the attempt's, until each rank has signed that. Only then is it published.
    """
    if place.rank:
        own = f"rank/{secrets.token_hex(8)}"
        _say(store, hello=own)
        attempt = store.get(own).decode()
        _say(store, attempt=attempt, rank=place.rank, restarts=restarts)
        return attempt, int(store.get(attempt))
    attempt, signed = f"attempt/{secrets.token_hex(8)}", {0: restarts}
    while len(signed) < place.size:
        try:
            said = json.loads(store.queue_pop(_MAILBOX))
        except dist.DistStoreError:
            missing = sorted(set(range(place.size)) - set(signed))
            raise RankError(f"Of {place.size} ranks, these did not come: {missing}.") from None
        if "hello" in said:
            store.set(said["hello"], attempt)
        elif said["attempt"] == attempt:
            signed[said["rank"]] = said["restarts"]
    store.set(attempt, str(max(signed.values())))
    return attempt, max(signed.values())


def _say(store: Store, **what: str | int) -> None:
    """To rank 0."""
    store.queue_push(_MAILBOX, json.dumps(what))
