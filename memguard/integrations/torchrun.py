"""Collect the ledgers of all torch.distributed ranks in one table.

    print(memguard.integrations.torchrun.ledgers())      # in every rank

The ranks exchange their ledgers through the key-value store with which torch.distributed connected them, and not with a
collective. An NCCL collective would create a communicator and allocate tensors on the measured GPUs. An additional
gloo group cannot be created by some of the ranks only: `use_local_synchronization` waits for ever if the ranks are also
members of other groups. A store also supports timeouts. Importing this module imports no framework.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from memguard.errors import MemguardError
from memguard.integrations.ranks import Ledgers, own, without_ledger

__all__ = ["Ledgers", "ledgers"]

_KEYS = "memguard/ledgers"
_rounds: dict[str, int] = {}
"""The number of exchanges by group name: equal in all ranks of the group, and kept when a group is created again."""


def ledgers(group: Any = None, *, timeout: float = 60.0) -> Ledgers:
    """The ledgers of the ranks of a process group, by default of all ranks. Every rank of the group must call it.

    Each rank gets the whole table. A rank without a budget, one whose GPUs cannot be read, and one that does not call
    it within `timeout` seconds get a row with the reason. Uses no GPU. Raises MemguardError without a process group, or
    if the group has no store (the backend mpi: use `memguard.integrations.mpi`).
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        raise MemguardError(
            "torch.distributed has no process group in this process",
            fix="call torch.distributed.init_process_group first",
        )
    if distributed.get_rank(group) < 0:
        raise MemguardError("this process is no rank of the group", fix="call ledgers(group) in its ranks alone")
    store = _store(distributed)
    if store is None:
        raise MemguardError(
            "torch.distributed has no store in this process, as with the backend mpi",
            fix="memguard.integrations.mpi.ledgers()",
        )
    which = distributed.group.WORLD if group is None else group
    ranks = [int(rank) for rank in distributed.get_process_group_ranks(which)]
    return Ledgers.of(_exchanged(store, str(which.group_name), ranks, own(distributed.get_rank()), timeout, _rounds))


def _store(distributed: Any) -> Any:
    try:
        return distributed.distributed_c10d._get_default_store()
    except (AttributeError, ValueError):  # another version of torch
        return None


def _exchanged(
    store: Any, name: str, ranks: Sequence[int], mine: Mapping[str, Any], timeout: float, rounds: dict[str, int]
) -> list[Mapping[str, Any]]:
    """The ledgers of these ranks, in their order. `mine` is this rank's."""

    def key(number: int, rank: int, what: str = "ledger") -> str:
        return f"{_KEYS}/{name}/{number}/{rank}/{what}"

    own_rank = mine["rank"]
    number = rounds.get(name, 0) + 1
    while store.check([key(number, own_rank, "given up")]):  # this rank missed that exchange: the others timed out
        number += 1
    rounds[name] = number
    store.set(key(number, own_rank), json.dumps(mine))
    with contextlib.suppress(Exception):  # every rank in this exchange has read the one before the last
        store.delete_key(key(number - 2, own_rank))
    found: list[Mapping[str, Any]] = []
    end = time.monotonic() + timeout
    for rank in ranks:
        try:
            store.wait([key(number, rank)], timedelta(seconds=max(end - time.monotonic(), 0.01)))
            found.append(json.loads(store.get(key(number, rank))))
        except RuntimeError:  # DistStoreError: the rank timed out, or the store has closed
            with contextlib.suppress(RuntimeError):
                store.set(key(number, rank, "given up"), "")
            found.append(without_ledger(rank, f"no answer within {timeout:g} s"))
    return found
