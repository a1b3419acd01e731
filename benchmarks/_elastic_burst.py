"""Part c of `elastic.py`: PyTorch's bytes are live and idle in turn, and CuPy asks for its min and for its max."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

from _elastic_arrays import Arrays, Card, text_of
from _run import GIB, MIB

TIMES, FIXED_TIMES = 200, 10
"""Alternations with elastic shares, and in the control with fixed ones."""
TICK = 0.1
"""Seconds of the monitor."""
BLOCK = 256 * MIB
LIMIT = 19 * GIB
ROOM = 16 * GIB
MIN, MAX = ROOM // 4, ROOM // 4 * 3
SEED = 41


def budget(elastic: bool) -> dict[str, Any]:
    """Elastic shares of which CuPy's max is what PyTorch's min leaves; or the same minima, fixed."""
    part: dict[str, Any] = {"min": MIN, "max": MAX}
    frameworks = {"torch": part, "cupy": part} if elastic else {"torch": {"limit": MAX}, "cupy": {"limit": MIN}}
    device = {"limit": LIMIT, "reserve": LIMIT - ROOM}
    return {"version": 1, "device": device, "frameworks": frameworks, "monitor": {"interval": f"{TICK * 1e3:.0f}ms"}}


def burst(elastic: bool) -> dict[str, Any]:
    import memguard

    guard = memguard.init(budget(elastic))
    torch, cupy = Arrays("torch"), Arrays("cupy")
    for one in (torch, cupy):
        one.load()
    for one in (torch, cupy):
        one.begin()
    gc.collect()
    gc.freeze()

    def room() -> None:
        if elastic:
            guard.make_room("torch", MAX)

    found = alternations(TIMES if elastic else FIXED_TIMES, torch, cupy, room, memguard.trim, Card().own)
    return {"min": MIN, "max": MAX, "tick_ms": TICK * 1e3, "limit": LIMIT, **found}


def alternations(
    times: int,
    torch: Any,
    cupy: Any,
    room: Callable[[], None],
    trim: Callable[[str], Any],
    own: Callable[[], int],
    least: int = MIN,
    most: int = MAX,
    block: int = BLOCK,
    patience: float = 3 * TICK,
) -> dict[str, Any]:
    """PyTorch takes all that it gets, live; CuPy asks for its min. PyTorch frees it; CuPy asks for its max.

    room   makes room for all that PyTorch may have, as a program that knows its needs does
    """
    found: dict[str, Any] = {"alternations": times, "live": [], "min": [], "max": [], "own": []}
    for number in range(times):
        live: list[Any] = []
        refused = None
        room()
        while refused is None and len(live) * block < most:
            try:
                live.append(torch.take(block))
            except Exception as error:
                refused = text_of(error)["text"]
        for place in range(len(live)):  # no name but the list's keeps a block
            torch.write(live[place], block, SEED + place)
        found["live"].append(len(live) * block)
        found["min"].append(wanted(cupy, least, number, 0.0))
        wrong = sum(not torch.right(one, block, SEED + place) for place, one in enumerate(live))
        found["min"][-1]["sibling_wrong"] = wrong
        live.clear()
        found["max"].append(wanted(cupy, most, number, patience))
        found["own"].append(own())
        trim("cupy")
    return {
        "alternations": times,
        "live": found["live"],
        "most_own": max(found["own"]),
        "asked_min": summary(found["min"]),
        "asked_max": summary(found["max"]),
    }


def wanted(cupy: Any, size: int, seed: int, patience: float) -> dict[str, Any]:
    """Ask until it is there, or the time is over: seconds until then, how often it was refused, and the values."""
    begun, refused, array, said = time.perf_counter(), 0, None, None
    while array is None:
        try:
            array = cupy.take(size)
        except Exception as error:
            refused, said = refused + 1, text_of(error)["text"]
            if time.perf_counter() - begun >= patience:
                break
            time.sleep(0.005)
    seconds = time.perf_counter() - begun
    if array is None:
        return {"ms": None, "refused": refused, "text": said, "wrong": 0}
    cupy.write(array, size, seed)
    return {"ms": seconds * 1e3, "refused": refused, "text": said, "wrong": int(not cupy.right(array, size, seed))}


def summary(asked: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all requests of a kind: how many were served, how many at the first try, how long they took, wrong values."""
    from _elastic_moves import percentile

    ms = [one["ms"] for one in asked if one["ms"] is not None]
    return {
        "n": len(asked),
        "served": len(ms),
        "at_once": sum(one["ms"] is not None and not one["refused"] for one in asked),
        "p50_ms": percentile(ms, 0.5),
        "p99_ms": percentile(ms, 0.99),
        "max_ms": max(ms, default=None),
        "wrong": sum(one["wrong"] + one.get("sibling_wrong", 0) for one in asked),
        "text": next((one["text"] for one in asked if one["text"]), None),
    }
