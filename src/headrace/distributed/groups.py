"""The groups that the ranks of a job form: all of them, and after a loss those left and successors.

Ranks find each other by a store. Whoever started them announces each further group there, and each
rank says that it has come. Left out: who is started and when (`local_ranks.py`,
`training/ray/driver.py`), and what ranks exchange (`ranks.py`).
"""

import datetime
import json
import socket
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from headrace.distributed.ranks import MEET_WITHIN_S, Backend, JoinedRanks, RankInfo
from headrace.errors import RankError, RankLostError

JOIN_WITHIN_S = 60.0  # a fresh Python and its imports
_CHECK_EVERY_S = 0.02


def join(
    store: Store,
    info: RankInfo,
    backend: Backend,
    device: torch.device,
    limit_s: float,
    *,
    group: int = 0,
    replaces: bool = False,
) -> JoinedRanks:
    """Join the ranks of a job.

    Args:
        store: of the job.
        limit_s: how long a rank may let the others wait.
        group: to join; if another rank is lost meanwhile, the rank joins the next one. A rank that
            joins a group above 0 takes the place of a lost one.
        replaces: whether ranks that are lost later are replaced.

    Raises:
        RankError: another rank did not come.
    """
    next_group = _NextGroup(store, info, group, limit_s)
    if group and not next_group.come():
        next_group()
    while True:
        try:
            ranks = JoinedRanks(
                info,
                next_group.store,
                backend,
                device,
                limit_s,
                next_group if replaces else None,
                MEET_WITHIN_S if group else limit_s,
            )
        except RankLostError:
            if not group:  # nobody has learned anything yet
                raise
            next_group()
        else:
            ranks.is_successor = group > 0
            return ranks


def announce(store: Store, group: int, loss: str | None, lost: Sequence[int] = ()) -> None:
    """Tell all ranks to form this group after a loss, which is put in words; None: to end.

    Args:
        lost: the ranks that others take the place of. One of them may be there still, behind a
            network that was cut: it does not come.
    """
    store.set(_announced(group), json.dumps([loss, *lost]))


def has_come(store: Store, group: int, rank: int) -> bool:
    """Return whether a rank is in this group, or waits there for the others."""
    return bool(store.check([_is_here(group, rank)]))


class _NextGroup:
    """A rank's way into the group after a loss; see `JoinedRanks`.

    A rank may be lost before it has come to its group: then the others go on to the next one.

    Attributes:
        store: where the ranks of the present group find each other.
    """

    def __init__(self, store: Store, info: RankInfo, group: int, limit_s: float) -> None:
        self._all, self._info, self._group = store, info, group
        self._limit_s = limit_s
        self.store = self._store()

    def __call__(self) -> tuple[Store, str]:
        losses = []
        while True:
            self._group += 1
            announced = _announced(self._group)
            self._wait_for([announced], 2 * JOIN_WITHIN_S)
            loss, *lost = json.loads(self._all.get(announced))
            if loss is None:
                raise RankError("Another rank was lost; its own message says why, if it had time.")
            if self._info.rank in lost:
                raise RankError(
                    f"Rank {self._info.rank} was given up, and another process has its place."
                )
            losses.append(loss)
            if self.come():
                return self.store, "\n".join(losses)

    def come(self) -> bool:
        """Come to this group, and wait for all ranks; False: another group is formed first."""
        self.store = self._store()
        self._all.set(_is_here(self._group, self._info.rank), "")
        all_here = [_is_here(self._group, rank) for rank in range(self._info.size)]
        limit_s = self._limit_s + JOIN_WITHIN_S  # a rank that collects has not seen the loss yet
        return self._wait_for(all_here, limit_s, unless=[_announced(self._group + 1)])

    def _store(self) -> Store:
        return PrefixStore(f"of group {self._group}", self._all)

    def _wait_for(self, names: list[str], limit_s: float, unless: list[str] | None = None) -> bool:
        """Wait until the store has all `names`; return False if it has those of `unless` first."""
        give_up_at = time.monotonic() + limit_s
        while not self._all.check(names):
            if unless and self._all.check(unless):
                return False
            if time.monotonic() > give_up_at:
                raise RankError(f"The ranks have not formed another group in {limit_s:g} s.")
            time.sleep(_CHECK_EVERY_S)  # in the store's own `wait`, no signal is handled
        return True


def _announced(group: int) -> str:
    return f"group {group}"


def _is_here(group: int, rank: int) -> str:
    return f"{rank} is in group {group}"


def host_store(host: str) -> TCPStore:
    """Open a job's store on a port of this address; TCPStore alone listens on all addresses."""
    listening = socket.create_server((host, 0), backlog=128)
    port, fd = listening.getsockname()[1], listening.detach()
    return connect_store(host, port, is_master=True, master_listen_fd=fd)


def connect_store(host: str, port: int, **options: Any) -> TCPStore:
    """Connect to the store of another process."""
    limit = datetime.timedelta(seconds=JOIN_WITHIN_S)
    return TCPStore(host, port, wait_for_workers=False, timeout=limit, **options)
