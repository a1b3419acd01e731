"""One rank of data-parallel training under a budget on two GPUs of one host: `ddp_program.py RANK`, over NCCL."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from support.ranks_program import filled

BUDGET = {"version": 1, "device": {"limit": "16GiB"}, "frameworks": {"torch": {"share": "100%", "nccl": 2}}}


def by_nvml(uuid: str) -> int:
    """This process's bytes on the GPU."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return sum(one.usedGpuMemory for one in running if one.pid == os.getpid())


def reading(label: str, uuid: str) -> dict[str, Any]:
    """The ledger's figures for this rank's GPU, and this process's bytes on it by NVML."""
    import memguard

    parts = memguard.ledger().devices
    mine = next(part for part in parts if part.device.uuid == uuid)
    sums = [sum(row.bytes for row in p.rows if row.bytes is not None) - p.device.total for p in parts]
    return {
        "label": label, "sums_minus_total": sums, "process": mine.process, "nvml": by_nvml(uuid),
        "held": mine.row("torch").bytes, "overhead": mine.row("overhead").bytes,
        "unaccounted": mine.row("unaccounted").bytes,
        "on_other_gpus": sum(part.process or 0 for part in parts if part is not mine), "limit": mine.limit,
    }  # fmt: skip


def worker(rank: int) -> dict[str, Any]:
    import memguard

    guard = memguard.init(BUDGET)
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.cuda.set_device(rank)
    uuid = f"GPU-{torch.cuda.get_device_properties(rank).uuid}"
    readings = [reading("init", uuid)]
    torch.zeros(1, device="cuda")
    readings.append(reading("first tensor", uuid))
    dist.init_process_group("nccl", rank=rank, world_size=2)
    readings.append(reading("init_process_group", uuid))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1)).cuda()
    ddp = DistributedDataParallel(net, device_ids=[rank])
    torch.cuda.synchronize()
    readings.append(reading("first collective", uuid))
    optimiser = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    generator = torch.Generator(device="cuda").manual_seed(rank)
    losses = []
    for _ in range(60):
        x = torch.randn(256, 1024, device="cuda", generator=generator)
        loss = ((ddp(x) - x[:, :1]) ** 2).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    readings.append(reading("trained", uuid))
    group = dist.new_group(list(range(2)))
    total = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(total, group=group)
    torch.cuda.synchronize()
    readings.append(reading("second communicator", uuid))
    cap = guard.plan.caps("torch")[uuid]
    live: list[Any] = []
    refused = filled(live)
    readings.append(reading("full", uuid))
    dist.all_reduce(total)  # continue to work while torch is at its cap
    torch.cuda.synchronize()
    weights = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    same = [torch.empty_like(weights[:1000]) for _ in range(2)]
    dist.all_gather(same, weights[:1000].contiguous())
    live.clear()
    memguard.trim()
    readings.append(reading("freed and trimmed", uuid))
    dist.destroy_process_group()
    readings.append(reading("communicators destroyed", uuid))
    return {
        "rank": rank, "cap": cap, "reserve": guard.plan.devices[0].reserve, "readings": readings,
        "losses": [losses[0], losses[-1]], "weights_equal": bool(torch.equal(same[0], same[1])), "refused": refused,
        "notes": list(memguard.ledger().notes),
    }  # fmt: skip


if __name__ == "__main__":
    print("RESULT " + json.dumps(worker(int(sys.argv[1]))), flush=True)
