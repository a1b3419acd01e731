"""Converts PyTorch's own allocation history into events of a trace."""

from __future__ import annotations

from typing import Any

from memguard._base.types import TraceEvent

ENTRIES = 200_000
"""Maximum number of entries in a recording; PyTorch's default has no maximum."""


def events(traces: list[list[dict[str, Any]]]) -> list[TraceEvent]:
    """Convert `torch.cuda.memory._snapshot()["device_traces"]`, which has one list for each device."""
    ops = {"alloc": "alloc", "free_requested": "free"}
    found = []
    live: dict[tuple[int, int], int] = {}
    number = 0
    for device, entries in enumerate(traces):
        for entry in entries:
            op = ops.get(entry["action"])
            where = (device, entry.get("addr", 0))
            if op == "alloc":
                number += 1
                live[where] = number
                found.append(TraceEvent(entry["time_us"] / 1e6, "torch", op, number, entry["size"], device=device))
            elif op == "free" and where in live:  # skips frees of memory that was allocated before the recording
                found.append(TraceEvent(entry["time_us"] / 1e6, "torch", op, live.pop(where), device=device))
    return found
