"""A request for 8 GiB on a full card, of which a sibling framework's idle cache holds nearly all."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.child import main
from bench.measure import Failed, Run, measure
from bench.programs.patterned import GIB, MIB, Arrays, Card, serve, torch_first

FRAMEWORKS = ("torch", "cupy", "pycuda", "numba")  # TensorFlow and JAX wait 10 s for the driver, which is their own.
ASKED, LEFT = 8 * GIB, 2 * GIB  # What is asked for, and what is free of the card then.
BLOCKS = (GIB, 64 * MIB, 2 * MIB)  # What fills: large blocks as long as they fit.
FREE = LEFT + 700 * MIB  # At most so much may be free.
SEED = 31


@measure("rescue", unit="s", seconds=40, whole_card=True, needs=FRAMEWORKS)
def rescue(run: Run) -> dict[str, list[float]]:
    """Seconds of a request for 8 GiB with 2 GiB free, served from a sibling's idle cache.

    One request for each framework. PyTorch asks through `memguard.retry`.
    """
    children = {name: run.start("ask", name, timeout=120) for name in FRAMEWORKS}
    for name, child in children.items():
        child.name = f"rescue of {name}"
    with ThreadPoolExecutor(len(children)) as threads:
        list(threads.map(lambda one: one.ask("load"), children.values()))
    found = {}
    for name, child in children.items():  # one at a time has the card
        took = child.ask("go")
        child.close()
        if took["free"] > FREE:
            raise Failed(f"{name}: {took['free']} bytes of the card were free, {took['cache']} in the sibling's cache")
        found[name] = [took["seconds"]]
    return found


def program_ask(name: str) -> None:
    sibling, taker = Arrays("cupy" if name == "torch" else "torch"), Arrays(name)

    def load() -> None:
        for one in torch_first([sibling.name, name]):
            (sibling if one == sibling.name else taker).load()

    serve({"load": load, "go": lambda: asked(sibling, taker)})


def asked(sibling: Arrays, taker: Arrays) -> dict[str, Any]:
    """Fill the card with the sibling's cache, and ask."""
    import memguard

    card = Card()
    until = time.monotonic() + 30
    while card.free() < 0.97 * card.total() and time.monotonic() < until:  # what the last process held
        time.sleep(0.05)
    lent = {"min": "1%", "max": "99%"}
    device = {"limit": "100%", "reserve": "1GiB"}
    memguard.init({"version": 1, "device": device, "frameworks": {sibling.name: lent, taker.name: lent}})
    sibling.begin()
    taker.begin()
    live: list[Any] = []
    cache = 0
    for size in BLOCKS:
        while card.free() - size >= LEFT:
            live.append(sibling.take(size))
            cache += size
    live.clear()
    gc.collect()
    free, before = card.free(), card.own()

    @memguard.retry(times=1)
    def retried(size: int) -> Any:
        return taker.take(size)

    take = retried if taker.name == "torch" else taker.take
    begun = time.perf_counter()
    array = take(ASKED)
    seconds = time.perf_counter() - begun
    back = before + ASKED - card.own()
    assert back >= ASKED - free - 64 * MIB, f"{back} bytes came back, {ASKED - free} had been missing"
    taker.write(array, ASKED, SEED)
    assert taker.right(array, ASKED, SEED), "other values were read back"
    return {"seconds": seconds, "cache": cache, "free": free}


if __name__ == "__main__":
    main({"ask": program_ask})
