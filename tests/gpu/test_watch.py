"""The monitor and the diagnosis beside real frameworks: what it sees is what is there, and it disturbs nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Run = Callable[..., dict[str, Any]]
BUDGET = """
budget = {"version": 1, "device": {"limit": "16GiB"}, "monitor": {"interval": "50ms"},
          "frameworks": {"torch": {"limit": "2GiB"}, "cupy": {"limit": "2GiB"}}}
"""


def test_the_monitor_initialises_nothing_and_then_sees_what_the_ledger_sees(run: Run) -> None:
    found = run(
        BUDGET
        + """
import time
from memguard.devices import contexts
guard = memguard.init(budget)
import cupy, torch
time.sleep(0.5)
result["initialised"] = contexts.initialised() or torch.cuda.is_initialized()
result["early"] = guard.observer.monitor.last(60)[-1].devices[0].process
a = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
b = cupy.zeros(128 * MIB, cupy.uint8)
time.sleep(0.5)
sample, part = guard.observer.monitor.last(60)[-1].devices[0], memguard.ledger().devices[0]
rows = {row.name: row.bytes for row in part.rows}
held = [sample.frameworks[name].held for name in ("torch", "cupy")]
result["sample"] = [sample.process, sample.overhead, sample.unaccounted, *held]
result["ledger"] = [part.process, rows["overhead"], rows["unaccounted"], rows["torch"], rows["cupy"]]
result["stays"] = memguard.shutdown()
import threading
result["threads"] = [t.name for t in threading.enumerate() if "memguard" in t.name]
"""
    )
    assert not found["initialised"] and found["early"] == 0
    assert found["sample"] == found["ledger"]
    assert found["threads"] == []


def test_a_graph_is_captured_while_the_monitor_looks(run: Run) -> None:
    found = run(
        BUDGET
        + """
import time
budget["monitor"]["interval"] = "50ms"
guard = memguard.init(budget)
import cupy, torch
small = [cupy.zeros(300_000, cupy.uint8) for _ in range(200)]
x = torch.ones(1000, device="cuda")
torch.cuda.synchronize()
before = len(guard.observer.monitor.last(600))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x * 2
    end = time.monotonic() + 0.6
    while time.monotonic() < end: y = y + 1
result["ticks"] = len(guard.observer.monitor.last(600)) - before
graph.replay()
torch.cuda.synchronize()
result["works"] = bool(y.sum().item() > 0)
"""
    )
    assert found["ticks"] >= 3 and found["works"]


def test_an_error_that_nobody_catches_is_explained_beside_the_frameworks_own(run: Run) -> None:
    found = run(
        BUDGET
        + """
import io, sys
guard = memguard.init(budget)
import torch
sys.stderr, kept = io.StringIO(), sys.stderr
try:
    try:
        torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    text = sys.stderr.getvalue()
finally:
    sys.stderr = kept
report = memguard.last_oom()
result["text"] = text
result["verdict"] = [report.verdict.requester, report.verdict.requested, report.reason]
"""
    )
    assert "OutOfMemoryError" in found["text"] and "memguard: torch ran out of GPU memory" in found["text"]
    assert found["verdict"] == ["torch", 3 << 30, "cap"]
