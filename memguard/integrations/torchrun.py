"""The ledgers of all ranks of torch.distributed in one table.

    print(memguard.integrations.torchrun.ledgers())      # in every rank

What the ranks say goes through the key-value store by which torch.distributed found them together, and not through a
collective: with NCCL one would go through tensors on the GPUs that are measured and make a communicator, and a group of
gloo beside it cannot be made by some ranks alone (`use_local_synchronization` waits for ever where the ranks are in
other groups as well). A store also knows how long to wait. Importing this imports no framework.
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
"""How often each group was asked. It is the same in all of its ranks, and goes on if the groups are made anew."""


def ledgers(group: Any = None, *, timeout: float = 60.0) -> Ledgers:
    """The ledgers of the ranks of a process group, by default of all: every rank of it calls this, and gets the table.

    A rank without a budget, one whose GPUs cannot be read, and one that does not call this within `timeout` seconds are
    rows that say so. Nothing touches a GPU. Raises MemguardError if there is no process group, or one without a store
    (the backend mpi: use `memguard.integrations.mpi`).
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
    except (AttributeError, ValueError):  # another version
        return None


def _exchanged(
    store: Any, name: str, ranks: Sequence[int], mine: Mapping[str, Any], timeout: float, rounds: dict[str, int]
) -> list[Mapping[str, Any]]:
    """What each of these ranks says."""

    def key(number: int, rank: int, what: str = "ledger") -> str:
        return f"{_KEYS}/{name}/{number}/{rank}/{what}"

    own_rank = mine["rank"]
    number = rounds.get(name, 0) + 1
    while store.check([key(number, own_rank, "given up")]):  # it did not come to that round, and the others went on
        number += 1
    rounds[name] = number
    store.set(key(number, own_rank), json.dumps(mine))
    with contextlib.suppress(Exception):  # whoever has come to this round has read the one before the last
        store.delete_key(key(number - 2, own_rank))
    found: list[Mapping[str, Any]] = []
    end = time.monotonic() + timeout
    for rank in ranks:
        try:
            store.wait([key(number, rank)], timedelta(seconds=max(end - time.monotonic(), 0.01)))
            found.append(json.loads(store.get(key(number, rank))))
        except RuntimeError:  # DistStoreError: it has not come, or the store has ended
            with contextlib.suppress(RuntimeError):
                store.set(key(number, rank, "given up"), "")
            found.append(without_ledger(rank, f"no answer within {timeout:g} s"))
    return found
