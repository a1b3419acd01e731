"""PyTorch's bytes are live and idle in turn, and CuPy asks for its min and for its max."""

from __future__ import annotations

import gc
import time
from typing import Any

from bench.programs.patterned import GIB, MIB, Arrays, Card
from support.elastic_play import Most, text_of

BLOCK = 256 * MIB
LIMIT, ROOM = 19 * GIB, 16 * GIB
MIN, MAX = ROOM // 4, ROOM // 4 * 3
SEED = 41
PATIENCE = 5.0  # Seconds for which the max is asked for again and again: some ticks of the monitor.


def budget(elastic: bool) -> dict[str, Any]:
    """Elastic caps of which CuPy's max is what PyTorch's min leaves; or the same minima, fixed."""
    part: dict[str, Any] = {"min": MIN, "max": MAX}
    frameworks = {"torch": part, "cupy": part} if elastic else {"torch": {"limit": MAX}, "cupy": {"limit": MIN}}
    device = {"limit": LIMIT, "reserve": LIMIT - ROOM}
    return {"version": 1, "device": device, "frameworks": frameworks, "monitor": {"interval": "100ms"}}


def burst(elastic: bool, times: int) -> dict[str, Any]:
    """PyTorch takes all that it gets, live; CuPy asks for its min. PyTorch frees it; CuPy asks for its max."""
    import memguard

    guard: Any = memguard.init(budget(elastic))
    torch, cupy, card = Arrays("torch"), Arrays("cupy"), Card()
    for one in (torch, cupy):
        one.load()
    for one in (torch, cupy):
        one.begin()
    gc.collect()
    gc.freeze()
    found: dict[str, Any] = {"live": [], "min": [], "max": [], "wrong": 0, "text": ""}
    with Most(card) as most:
        for number in range(times):
            live: list[Any] = []
            if elastic:
                guard.make_room("torch", MAX)
            try:
                while len(live) * BLOCK < MAX:
                    live.append(torch.take(BLOCK))
            except Exception as error:
                found["text"] = text_of(error)
            for place in range(len(live)):  # no name but the list's keeps a block
                torch.write(live[place], BLOCK, SEED + place)
            found["live"].append(len(live) * BLOCK)
            _ask(found, "min", cupy, MIN, number, 0.0)
            found["wrong"] += sum(not torch.right(one, BLOCK, SEED + place) for place, one in enumerate(live))
            live.clear()
            _ask(found, "max", cupy, MAX, number, PATIENCE if elastic else 0.0)
            memguard.trim("cupy")
    return {**found, "most": most.bytes, "limit": LIMIT, "all": MAX}


def _ask(found: dict[str, Any], kind: str, cupy: Arrays, size: int, seed: int, patience: float) -> None:
    """Ask until it is there or the time is over: how often it was refused before, None if it was not served."""
    begun, refused = time.monotonic(), 0
    while True:
        try:
            array = cupy.take(size)
            break
        except Exception as error:
            refused, found["text"] = refused + 1, text_of(error)
        if time.monotonic() - begun >= patience:
            found[kind].append(None)
            return
        time.sleep(0.005)
    cupy.write(array, size, seed)
    found["wrong"] += not cupy.right(array, size, seed)
    found[kind].append(refused)
