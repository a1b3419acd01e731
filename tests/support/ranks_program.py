"""One rank under `ranks: auto`, started by torchrun: `ranks_program.py FOLDER BACKEND`. It fills its cap and holds it.

First, as the control, it runs under the same budget without the key: there it gets more than its share."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MIB, GIB = 1 << 20, 1 << 30
BUDGET = {"version": 1, "device": {"limit": "16GiB"}, "frameworks": {"torch": {"share": "100%"}}}


def filled(live: list[Any], most: int = 10_000) -> str | None:
    """Fill torch with at most this many tensors of 64 MiB, and return the name of the error that ended it."""
    import torch

    try:
        while len(live) < most:
            live.append(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError as error:
        return type(error).__name__
    return None


def worker(folder: Path, backend: str) -> None:
    """Run one rank: write its figures to a file, and stay full until the file `read` exists."""
    import memguard

    memguard.init(BUDGET)  # the control: each rank has the whole budget
    import torch
    import torch.distributed as dist

    from memguard.integrations import torchrun

    gpu = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(gpu)
    live: list[Any] = []
    control = {"refused": filled(live, 9 * GIB // (64 * MIB)), "bytes": len(live) * 64 * MIB}
    live.clear()
    torch.cuda.empty_cache()
    guard = memguard.init({**BUDGET, "ranks": "auto"}, replace=True)
    dist.init_process_group(backend)
    told = torch.ones(1 << 20, device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(told)
    refused = filled(live)
    dist.all_reduce(told)  # continue to work while torch is at its cap
    torch.cuda.synchronize()
    uuid = f"GPU-{torch.cuda.get_device_properties(gpu).uuid}"
    part = next(one for one in guard.plan.devices if one.device.uuid == uuid)
    mine = next(one for one in memguard.ledger().devices if one.device.uuid == uuid)
    table = torchrun.ledgers()
    rank = dist.get_rank()
    leave(folder, rank, {
        "rank": rank, "pid": os.getpid(), "uuid": uuid, "limit": part.limit, "reserve": part.reserve,
        "cap": part.caps["torch"], "held": mine.row("torch").bytes, "overhead": mine.row("overhead").bytes,
        "refused": refused, "control": control, "table": table.as_dict(), "notes": list(guard.notes),
    })  # fmt: skip
    end = time.monotonic() + 150
    while not (folder / "read").exists() and time.monotonic() < end:
        time.sleep(0.05)
    dist.barrier()
    dist.destroy_process_group()


def leave(folder: Path, rank: int, found: Mapping[str, Any]) -> None:
    """Write a rank's figures atomically."""
    part = folder / f"{rank}.part"
    part.write_text(json.dumps(found))
    part.rename(folder / f"{rank}.json")


if __name__ == "__main__":
    worker(Path(sys.argv[1]), sys.argv[2])
