"""Caps that are taken away after `memguard.init`: ledger, print, resize, timeline and reports agree about it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]
BEGIN = """
import pathlib, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
guard = memguard.init({"version": 1, "device": {"limit": "10GiB"},
    "frameworks": {"torch": {"limit": "3GiB"}, "cupy": {"limit": "2GiB"}},
    "monitor": {"interval": "1h", "timeline": str(folder / "run.jsonl")}})
import cupy, torch
x, y = torch.zeros(1, device="cuda"), cupy.zeros(1)

def printed():
    rows = (line.split() for line in str(guard).splitlines() if line.startswith("  "))
    return {row[0]: row[-1] for row in rows}
def listed():
    return {row.name: row.enforcement for row in memguard.ledger().devices[0].rows if row.name in ("torch", "cupy")}
def resized(name, size):
    try:
        memguard.resize(name, size)
        return None
    except memguard.CapNotApplied as error:
        return str(error)
"""
TORCH = """
before, name = torch._C._cuda_getMemoryFraction(0), "torch"
def past(fraction): torch._C._cuda_setMemoryFraction.__wrapped__(fraction, 0)  # no public call: those meet the cap
def drift(): past(1.0)
def restore(): past(before)
def fill():
    kept = []
    while True: kept.append(torch.empty(8 * GIB, dtype=torch.uint8, device="cuda"))
"""
CUPY = """
before, name = cupy.cuda.get_allocator(), "cupy"
own = cupy.cuda.MemoryPool()
def drift(): cupy.cuda.set_allocator(lambda size: own.malloc(size))  # no pool's malloc: those share the cap
def restore(): cupy.cuda.set_allocator(before)
def fill():
    kept = []
    while True: kept.append(cupy.empty(8 * GIB, cupy.uint8))
"""
CUPY_RAW = CUPY.replace("lambda size: own.malloc(size)", "None")


@pytest.mark.parametrize("first", ["print", "ledger", "resize"])
@pytest.mark.parametrize("change", [TORCH, CUPY, CUPY_RAW], ids=["torch", "cupy function", "cupy raw"])
def test_every_view_agrees_after_drift_and_after_it_is_undone(run: Run, change: str, first: str) -> None:
    found = run(
        BEGIN
        + change
        + f"""
views = {{"print": printed, "ledger": listed, "resize": lambda: resized(name, "1GiB")}}
result["name"], result["begin"] = name, [printed(), listed()]
drift()
views["{first}"]()
result["drifted"] = [printed(), listed()]
result["resize"], result["cap"] = resized(name, "1GiB"), guard.plan.devices[0].caps[name]
result["notes"] = list(memguard.ledger().notes)
restore()
result["restored"] = [printed(), listed()]
result["again"] = resized(name, "1GiB")
memguard.shutdown()
(path,) = folder.iterdir()
events = memguard.load_timeline(path).events()
result["events"] = [[event.framework, event.text] for event in events if event.kind == "note"]
"""
    )
    name, both = found["name"], {"torch": "enforced", "cupy": "enforced"}
    assert found["begin"] == [both, both] == found["restored"]
    assert found["drifted"] == [{**both, name: "watched"}] * 2
    reason = next(note for note in found["notes"] if "after memguard.init" in note).removeprefix(f"{name}: ")
    said = re.sub(": (the|its) cap (no longer holds|does not hold)$", "", reason)  # the event says it once
    assert found["resize"].startswith(f"{name}: cap not applied: {reason}") and "fix: undo" in found["resize"]
    assert found["cap"] == (3 if name == "torch" else 2) << 30 and found["again"] is None
    assert found["events"] == [
        [name, f"{name}: its cap no longer holds: {said}"],
        [name, f"{name}: its cap holds again"],
    ]


@pytest.mark.whole_card
@pytest.mark.parametrize("change", [TORCH, CUPY], ids=["torch", "cupy"])
def test_an_out_of_memory_report_does_not_blame_a_cap_that_no_longer_holds(run: Run, change: str) -> None:
    found = run(
        BEGIN
        + change
        + """
drift()
try:
    with memguard.workload("fill", framework=name):
        fill()
except Exception as error:
    result["error"] = type(error).__name__
report = memguard.last_oom()
result["reason"], result["why"] = report.reason, report.why
result["enforcement"] = report.ledger.devices[0].row(name).enforcement
"""
    )
    assert found["enforcement"] == "watched" and found["error"] == "OutOfMemoryError"
    assert found["reason"] == "card" and found["why"].endswith("is watched, not enforced")
