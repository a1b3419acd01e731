"""A result of benchmarks/ranks.py in which all is well, made up."""

from __future__ import annotations

from typing import Any

MIB, GIB = 1 << 20, 1 << 30
UUIDS = "GPU-a", "GPU-b"


def whole() -> dict[str, Any]:
    return {"two": of(2, 16 * GIB, 2200 * MIB), "four": of(4, 8 * GIB, 1300 * MIB)}


def of(count: int, limit: int, reserve: int) -> dict[str, Any]:
    cap, overhead = limit - reserve, reserve - 300 * MIB
    nvml: dict[str, dict[str, int]] = {uuid: {"1": 3 * GIB} for uuid in UUIDS}  # of somebody else
    for rank in range(count):
        nvml[UUIDS[rank % 2]][str(100 + rank)] = cap + overhead

    def row(rank: int) -> dict[str, Any]:
        return {"devices": [{"uuid": one, "process": nvml[one].get(str(100 + rank), 0)} for one in UUIDS]}

    ranks = [
        {
            "rank": rank, "pid": 100 + rank, "uuid": UUIDS[rank % 2], "limit": limit, "reserve": reserve, "cap": cap,
            "held": cap, "overhead": overhead, "refused": "OutOfMemoryError",
            "control": {"refused": None, "bytes": 9 * GIB},
            "table": {str(other): row(other) for other in range(count)}, "notes": [],
        }
        for rank in range(count)
    ]  # fmt: skip
    return {"returncode": 0, "ranks": ranks, "nvml": nvml}
