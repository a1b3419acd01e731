"""Assertions about a process whose frameworks were driven to their caps: see `support.driving`."""

from __future__ import annotations

from typing import Any

from support.driving import GIB, MIB, bfc_refusals
from support.independent import agrees, raw_is_unaccounted

AT_CAP = 16 * MIB
"""Allowed difference from the driver's figure for a framework at its cap with small arrays in the driver's slabs."""


def within_limit(found: dict[str, Any], limit: int) -> None:
    """Check every sample; samples are at most 2 s apart, as NVML waits while other processes create contexts. NVML must
    list the process for at least half of the time. `bench/measures/caps.py` bounds the gap on an idle GPU."""
    nvml = found["nvml"]
    assert nvml["samples"] >= 0.5 * nvml["wall_s"] * 1e3 / nvml["interval_ms"] and nvml["longest_gap_ms"] <= 2000, nvml
    assert 0 < nvml["max_bytes"] <= limit, nvml


def explained(readings: list[dict[str, Any]], reserve: int) -> None:
    """Check that `unaccounted` is small (with TensorFlow's hidden pool), the overhead within the reserve, the sum
    exact."""
    for one in readings:
        assert abs(one["unaccounted"]) <= 64 * MIB and one["overhead"] <= reserve, (one, reserve)
        assert one["sum_minus_total"] == 0, one
    assert max(one["overhead"] for one in readings) > 0


def at_the_caps(found: dict[str, Any], refusals: int) -> None:
    """Check every budget of several frameworks after each was driven to its cap."""
    for name, one in found["driven"].items():
        # a lower bound: an allocator that refuses early would hold little
        assert 0.95 * one["cap"] <= one["most_held"] <= one["cap"], (name, one["most_held"], one["cap"])
        foreign = [r["exception"] for r in one["refusals"] if not r["native"]]
        assert len(one["refusals"]) >= refusals and not foreign, (name, len(one["refusals"]), foreign[:3])
    log, cap = bfc_refusals(found["stderr"]), found["caps"]["tensorflow"]
    asked = [r["refused_bytes"] for r in found["driven"]["tensorflow"]["refusals"]]
    assert len(log) >= len(asked) == refusals
    for entry, size in zip(log, asked, strict=False):
        assert entry["available"] < -(-(size // 4 * 4) // 256) * 256, ("TensorFlow's own log has room", entry, size)
    assert all(entry["pool"] <= entry["memory_limit"] <= cap * 1.0005 for entry in log), (log, cap)
    for name, one in found["emptied"].items():
        good, figure = agrees(one, AT_CAP, found["caps"][name] * 9 // 10)
        assert good, (name, figure)
    good, figure = raw_is_unaccounted(found["raw"])
    assert good, figure
    explained(found["readings"], found["reserve"])
    within_limit(found, 40 * GIB)
