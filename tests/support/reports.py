"""Drive one framework to a refusal while another is idle, and compare memguard's report with independent readings.

    python -m support.reports "torch async" full     waits for a line on stdin after loading, then prints the result

Sizes are bytes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from support.driving import GIB, MIB, allocator, load
from support.independent import bytes_now

KINDS = ("tensorflow", "jax", "torch", "torch async", "cupy", "cupy async", "pycuda", "numba")
"""A framework, and its asynchronous allocator. The first two take ten seconds to refuse."""
STEP = 777 * MIB + 4096
"""The size of each request: no allocator rounds to it. From 1 GiB on, PyTorch and JAX print the size in hundredths of a
GiB, which is no more precise than 5 MiB."""
STRANGER = 40 * GIB  # Memory of the other process that fills the GPU.
WHERE = {"own cap": ("24GiB", "8GiB", "10GiB", 2 * GIB, GIB), "full": ("100%", "40GiB", "90GiB", 70 * GIB, 50 * GIB)}
"""The limit, the requester's and the sibling's caps, the sibling's memory, and its cached part."""
SERVED = ("cupy", "pycuda", "numba")
"""On a full GPU these reclaim a sibling's cache before they refuse."""
IDLE_OF_SERVED = 5 * GIB  # Less than their caps leave free: the GPU fills up before they reach a cap.


def allocating_call(kind: str, name: str) -> Callable[[int], Any]:
    load(name)
    if kind == "cupy async":
        import cupy

        cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    if name == "jax":  # device_put copies from a 300 MiB host array: this creates the bytes on the GPU
        import jax
        import jax.numpy as jnp

        make = jax.jit(lambda n: jnp.zeros((n,), jnp.uint8), static_argnums=0)
        return lambda n: make(n).block_until_ready()
    return allocator(name)[0]


def refused(kind: str, where: str, ready: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Allocate until refused, inside a workload; return the report's figures and the bytes that a trim of each frees.

    ready   called when both frameworks are loaded
    """
    import memguard

    if kind == "torch async":
        os.environ["PYTORCH_ALLOC_CONF"] = "backend:cudaMallocAsync"
    limit, cap, siblings_cap, held, idle = WHERE[where]
    name = kind.partition(" ")[0]
    sibling = "pycuda" if name == "torch" else "torch"
    if served := kind in SERVED and where == "full":
        idle = IDLE_OF_SERVED
    frameworks = {name: {"limit": cap}, sibling: {"limit": siblings_cap}}
    guard = memguard.init({"version": 1, "device": {"limit": limit}, "frameworks": frameworks})
    load(sibling)
    take, of_sibling = allocating_call(kind, name), allocator(sibling)[0]
    take(MIB)  # initialised, with its context and modules
    ready()
    beside = [of_sibling(GIB) for _ in range(held // GIB)]
    del beside[: idle // GIB]
    live: list[Any] = []
    found: dict[str, Any] = {"exception": None, "report": None}
    try:
        with memguard.workload("drive", framework=name):
            while len(live) < 200:
                live.append(take(STEP))
    except Exception as error:
        report = memguard.last_oom()
        found["exception"] = f"{type(error).__name__}: {error}"[:300]
        found["report"] = None if report is None else report.as_dict()
    rows = [row for row in memguard.ledger().devices[0].rows if row.kind == "framework"]
    found["rows"] = {row.name: row.bytes or 0 for row in rows}
    returned, by_driver = {}, {}
    for other in guard.frameworks:
        before = bytes_now()
        returned[other] = memguard.trim(other)
        by_driver[other] = before - bytes_now()
    return {
        **found, "requester": name, "sibling": sibling, "idle": idle, "served": served, "returned": returned,
        "by_driver": by_driver,
    }  # fmt: skip


def judge(one: Mapping[str, Any], stranger: int | None = None) -> None:
    """Compare every figure of the report with independent readings.

    stranger   the PID of the process that holds `STRANGER` on a full GPU; None at the requester's own cap
    """
    report = one["report"]
    assert report is not None, one["exception"]
    assert report["requester"] == one["requester"]
    assert report["requested"] is not None and abs(report["requested"] - STEP) <= MIB, report["requested"]
    rows = one["rows"]
    largest = max(rows, key=lambda row: rows[row])
    # At their own caps several tests share the GPU, and other processes may hold more of it.
    holders = [h for h in report["holders"] if h["kind"] == "framework" or stranger is not None]
    assert holders and holders[0]["name"] == largest, (holders[:2], rows)
    assert abs(holders[0]["bytes"] - rows[largest]) <= 2 * MIB, (holders[0], rows)
    said = {
        h["name"]: h["reclaimable"]
        for h in report["holders"] if h["kind"] == "framework" and h["reclaimable"] is not None
    }  # fmt: skip
    freed = one["by_driver"]
    assert said and all(_comes_back(size, freed.get(name, 0)) for name, size in said.items()), (said, freed)
    assert all(_comes_back(one["returned"][name], size) for name, size in freed.items()), (one["returned"], freed)
    left = (said.get(one["sibling"]) or 0, freed[one["sibling"]])
    if one.get("served"):
        assert max(left) < STEP, ("it would have served the request", said, freed)
    else:
        assert min(left) >= one["idle"], (said, freed)
    assert report["reason"] in (("cap", "fragmented") if stranger is None else ("card",)), report["why"]
    if stranger is not None:
        others = {h["name"]: h["bytes"] for h in report["holders"] if h["kind"] == "process"}
        assert STRANGER <= others[f"process {stranger}"] <= STRANGER + 2 * GIB, others


def _comes_back(said: int, freed: int) -> bool:
    """Whether a trim freed the reclaimable bytes in the report: within 1 %, or the one page that a pool may keep."""
    return abs(said - freed) <= max(2 * MIB, said // 100)


if __name__ == "__main__":

    def ready() -> None:
        print("READY", flush=True)
        if not sys.stdin.readline():
            sys.exit("nobody waits for it any more")

    print("RESULT " + json.dumps(refused(sys.argv[1], sys.argv[2], ready)), flush=True)
