"""What each rank of `test_torchrun.py` runs: `rank_program.py FOLDER MODE`. It writes FOLDER/RANK.json.

A tiny model is trained on the CPU; simulated frameworks hold the GPU memory.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import memguard

GIB, MIB = 2**30, 2**20
LIMIT = 40 * GIB
BUDGET = {
    "version": 1,
    "device": {"limit": "40GiB", "reserve": "1GiB"},
    "frameworks": {"torch": {"share": "50%"}, "cupy": {"limit": "4GiB"}},
}


def fill(gpu: int, most: int) -> tuple[int, str | None]:
    """What this rank gets of its GPU before its framework refuses, and the name of that error."""
    framework: Any = memguard.api.current().frameworks["torch"]
    blocks: list[int] = []
    try:
        while len(blocks) * GIB < most:
            blocks.append(framework.allocate(GIB, gpu))
        return len(blocks) * GIB, None
    except Exception as error:
        return len(blocks) * GIB, type(error).__name__
    finally:
        for block in blocks:
            framework.free(block)
        framework.trim(memguard.api.current().plan.devices[gpu].device)


def train() -> list[float]:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    losses = []
    for _ in range(5):
        x = torch.randn(16, 8, generator=generator)
        loss = ((model(x) - x.sum(dim=1, keepdim=True)) ** 2).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return [*model.module.weight.detach().flatten().tolist(), *losses[:1], *losses[-1:]]


def described(guard: Any, gpu: int) -> dict[str, Any]:
    part = guard.plan.devices[gpu]
    return {"limit": part.limit, "reserve": part.reserve, "caps": dict(part.caps), "notes": list(guard.notes)}


def main(folder: str, mode: str) -> None:
    local = int(os.environ.get("LOCAL_RANK") or os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])
    guard = memguard.init(BUDGET)  # the control: each takes it whole
    gpu = local % len(guard.plan.devices)
    asked = 15 * GIB
    found: dict[str, Any] = {"local": local, "whole": described(guard, gpu), "whole_got": fill(gpu, asked)}
    guard = memguard.init({**BUDGET, "ranks": "auto"}, replace=True)
    found |= {"part": described(guard, gpu), "part_got": fill(gpu, asked)}
    framework: Any = guard.frameworks["torch"]
    framework.allocate((local + 1) * GIB, gpu)
    if mode == "mpi":
        from memguard.integrations import mpi

        table = mpi.ledgers()
        rank = next(rank for rank, one in table.ranks.items() if one["pid"] == os.getpid())
    else:
        import torch.distributed as dist

        from memguard.integrations import torchrun

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        found["trained"] = train()
        table = torchrun.ledgers()
        if mode == "more":
            found |= more(rank)
        dist.destroy_process_group()
    found |= {"pid": os.getpid(), "table": table.as_dict(), "text": str(table)}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def more(rank: int) -> dict[str, Any]:
    """A group of some ranks, and ranks that have no ledger to give, or never come."""
    import torch.distributed as dist

    from memguard.integrations import torchrun

    found: dict[str, Any] = {}
    two = dist.new_group([1, 2])
    if rank in (1, 2):
        found["two"] = torchrun.ledgers(two).as_dict()
    else:
        try:
            torchrun.ledgers(two)
        except memguard.MemguardError as error:
            found["refused"] = str(error)
    if rank == 3:
        memguard.shutdown()
    elif rank == 2:
        current: Any = memguard.api.current()
        current.sample = lambda: 1 / 0
    found["broken"], found["broken_text"] = (made := torchrun.ledgers()).as_dict(), str(made)
    if rank != 3:
        found["late"], found["late_text"] = (made := torchrun.ledgers(timeout=0.5)).as_dict(), str(made)
    dist.barrier()
    found["again"] = torchrun.ledgers().as_dict()
    dist.barrier()  # the store ends with rank 0
    return found


if __name__ == "__main__":
    faulthandler.dump_traceback_later(90, exit=True)  # rather than to wait for ever
    main(sys.argv[1], sys.argv[2])
