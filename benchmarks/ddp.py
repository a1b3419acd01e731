"""Data-parallel training on two GPUs of one host (NCCL) under a budget: caps, reserve and ledger on both ranks.

python benchmarks/ddp.py -o benchmarks/results/h200-x2-ddp.json
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _arrays import nvml_bytes_by_uuid
from _run import MIB, ROOT, conclude, emit, header
from checks import ddp_checks

WORLD = 2
BUDGET = {
    "version": 1,
    "device": {"limit": "16GiB"},
    "frameworks": {"torch": {"share": "100%", "nccl": 2}},
}


def reading(label: str, uuid: str) -> dict[str, Any]:
    """This rank's GPU as the ledger sees it, and this process's bytes of it by NVML."""
    import memguard

    parts = memguard.ledger().devices
    mine = next(part for part in parts if part.device.uuid == uuid)
    sums = [sum(row.bytes for row in p.rows if row.bytes is not None) - p.device.total for p in parts]
    return {
        "label": label,
        "sums_minus_total": sums,
        "process": mine.process,
        "nvml": nvml_bytes_by_uuid(uuid),
        "held": mine.row("torch").bytes,
        "overhead": mine.row("overhead").bytes,
        "unaccounted": mine.row("unaccounted").bytes,
        "on_other_gpus": sum(part.process or 0 for part in parts if part is not mine),
        "limit": mine.limit,
    }


def filled(live: list[Any], most: int = 10_000) -> str | None:
    """Fill torch with at most so many tensors of 64 MiB, and tell the name of the error that ended it."""
    import torch

    try:
        while len(live) < most:
            live.append(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError as error:
        return type(error).__name__
    return None


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
    dist.init_process_group("nccl", rank=rank, world_size=WORLD)
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
    group = dist.new_group(list(range(WORLD)))
    total = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(total, group=group)
    torch.cuda.synchronize()
    readings.append(reading("second communicator", uuid))
    cap = guard.plan.caps("torch")[uuid]
    live: list[Any] = []
    refused = filled(live)
    readings.append(reading("full", uuid))
    dist.all_reduce(total)  # works on while torch is at its cap
    torch.cuda.synchronize()
    weights = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    same = [torch.empty_like(weights[:1000]) for _ in range(WORLD)]
    dist.all_gather(same, weights[:1000].contiguous())
    live.clear()
    memguard.trim()
    readings.append(reading("freed and trimmed", uuid))
    dist.destroy_process_group()
    readings.append(reading("communicators destroyed", uuid))
    return {
        "rank": rank,
        "cap": cap,
        "reserve": guard.plan.devices[0].reserve,
        "readings": readings,
        "losses": [losses[0], losses[-1]],
        "weights_equal": bool(torch.equal(same[0], same[1])),
        "refused": refused,
        "notes": list(memguard.ledger().notes),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        emit(worker(arguments.rank))
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD)}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**environment, "RANK": str(rank)},
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    ranks = []
    for rank, child in enumerate(children):
        try:
            out, err = child.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            for other in children:
                other.kill()
            out, err = child.communicate()
        lines = [line[7:] for line in out.splitlines() if line.startswith("RESULT ")]
        one = json.loads(lines[-1]) if lines else {"rank": rank}
        ended = {"returncode": child.returncode}
        if child.returncode or not lines:
            ended |= {"stderr": err[-3000:], "stderr_tail": err[-1500:]}
        ranks.append({**one, **ended})
    result: dict[str, Any] = {"about": header("python benchmarks/ddp.py"), "ranks": ranks, "checks": ddp_checks(ranks)}
    conclude(result, arguments.output)
    if not all(passed for passed, _ in result["checks"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
