"""PyTorch alternates between live and idle memory, while CuPy requests its min and its max."""

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
PATIENCE = 5.0  # Seconds of repeated requests for the max: several monitor ticks.


def budget(elastic: bool) -> dict[str, Any]:
    """Elastic caps, where CuPy's max is the room minus PyTorch's min; or fixed caps with the same minima."""
    part: dict[str, Any] = {"min": MIN, "max": MAX}
    frameworks = {"torch": part, "cupy": part} if elastic else {"torch": {"limit": MAX}, "cupy": {"limit": MIN}}
    device = {"limit": LIMIT, "reserve": LIMIT - ROOM}
    return {"version": 1, "device": device, "frameworks": frameworks, "monitor": {"interval": "100ms"}}


def burst(elastic: bool, times: int) -> dict[str, Any]:
    """PyTorch fills its cap with live arrays while CuPy requests its min; PyTorch frees them and CuPy requests its
    max."""
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
            for place in range(len(live)):  # only the list references a block
                torch.write(live[place], BLOCK, SEED + place)
            found["live"].append(len(live) * BLOCK)
            _ask(found, "min", cupy, MIN, number, 0.0)
            found["wrong"] += sum(not torch.right(one, BLOCK, SEED + place) for place, one in enumerate(live))
            live.clear()
            _ask(found, "max", cupy, MAX, number, PATIENCE if elastic else 0.0)
            memguard.trim("cupy")
    return {**found, "most": most.bytes, "limit": LIMIT, "all": MAX}


def _ask(found: dict[str, Any], kind: str, cupy: Arrays, size: int, seed: int, patience: float) -> None:
    """Retry until the request is served or time is up. Return the number of refusals before it, None if never
    served."""
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
