"""The monitor and the diagnosis beside real frameworks: what it sees is what is there, and it disturbs nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Run = Callable[..., dict[str, Any]]
BUDGET = """
import time
from memguard import api
def fresh(monitor, count=1):
    # So many samples that were taken from now on: the first ones import, and are followed by a pause for that.
    begun, end = time.time(), time.monotonic() + 60
    while time.monotonic() < end:
        seen = [sample for sample in monitor.last(600) if sample.time > begun]
        if len(seen) >= count: return seen
        time.sleep(0.05)
    return []
budget = {"version": 1, "device": {"limit": "16GiB"}, "monitor": {"interval": "200ms"},
          "frameworks": {"torch": {"limit": "2GiB"}, "cupy": {"limit": "2GiB"}}}
"""


def test_the_monitor_initialises_nothing_and_then_sees_what_the_ledger_sees(run: Run) -> None:
    found = run(
        BUDGET
        + """
from memguard._devices import contexts
guard = memguard.init(budget)
import cupy, torch
result["early"] = fresh(api.current_session().monitor)[-1].devices[0].process
result["initialised"] = contexts.initialised() or torch.cuda.is_initialized()
a = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
b = cupy.zeros(128 * MIB, cupy.uint8)
fresh(api.current_session().monitor, 2)
part, sample = memguard.ledger().devices[0], fresh(api.current_session().monitor)[-1].devices[0]
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
guard = memguard.init(budget)
import cupy, torch
small = [cupy.zeros(300_000, cupy.uint8) for _ in range(200)]
x = torch.ones(1000, device="cuda")
torch.cuda.synchronize()
fresh(api.current_session().monitor, 3)
begun = time.time()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x * 2
    end = time.monotonic() + 2
    while time.monotonic() < end:
        y = y + 1
        time.sleep(0.001)
result["ticks"] = len([s for s in api.current_session().monitor.last(600) if s.time > begun])
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
