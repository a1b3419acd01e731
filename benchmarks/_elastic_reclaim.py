"""Part a of `elastic.py`: a sibling's idle cache holds all but 2 GiB of the card, and a framework asks for 8 GiB."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from typing import Any

from _elastic_arrays import XLA, Arrays, Card, another_process, text_of, whole_card
from _run import GIB, MIB

ASKED = 8 * GIB
LEFT = 2 * GIB
"""What is free of the card when the framework asks."""
FIXED = 12 * GIB
"""The limit of TensorFlow and JAX, whose caps never move: their pools take more than what is asked for."""
ANOTHER = 700 * MIB
"""What another process takes at least: its context alone takes some 520 MiB."""
BLOCKS = (GIB, 64 * MIB, 2 * MIB)
"""What fills: large blocks as long as they fit."""
RETRIED = ("torch", "tensorflow", "jax")
"""Their allocators are not memguard's: they ask through `memguard.retry`."""
SEED = 31


def sibling_of(name: str) -> str:
    return "cupy" if name == "torch" else "torch"


def budget(name: str) -> dict[str, Any]:
    """All that CUDA gives of the card, lent to whoever asks."""
    lent = {"min": "1%", "max": "99%"}
    own: dict[str, Any] = {"limit": FIXED} if name in XLA else lent
    return {
        "version": 1,
        "device": {"limit": "100%", "reserve": "1GiB"},
        "frameworks": {sibling_of(name): lent, name: own},
    }


def reclaimed(name: str, guarded: bool) -> dict[str, Any]:
    """What became of the request, with memguard or of the plain frameworks."""
    sibling, taker, card = Arrays(sibling_of(name)), Arrays(name), Card()
    for one in sorted((sibling, taker), key=lambda one: one.name != "torch"):  # TensorFlow after PyTorch
        one.load()
    whole_card(card)
    if guarded:
        import memguard

        memguard.init(budget(name))
    sibling.begin()
    taker.begin()
    return asked(sibling, taker, card, retried(taker) if guarded else taker.take)


def retried(taker: Arrays) -> Callable[[int, int], Any]:
    """How a program under memguard asks."""
    if taker.name not in RETRIED:
        return taker.take
    import memguard

    @memguard.retry(times=1)
    def ask(size: int, seed: int) -> Any:
        return taker.take(size, seed)

    return ask


def filled(sibling: Any, card: Any, left: int) -> tuple[int, str | None]:
    """The sibling takes all but `left` bytes of the card and frees it: all of it lies idle in its cache then.

    Returns the bytes, and what refused it if something did before.
    """
    live, total, refused = [], 0, None
    for size in BLOCKS:
        while card.free() - size >= left:
            try:
                live.append(sibling.take(size))
            except Exception as error:
                refused = text_of(error)["text"]
                break
            total += size
    live.clear()
    gc.collect()
    return total, refused


def asked(sibling: Any, taker: Any, card: Any, ask: Callable[[int, int], Any]) -> dict[str, Any]:
    """Fill the card with the sibling's cache, and ask. `another`: what another process holds, where a limit that never
    moves keeps the sibling from taking all but 2 GiB.
    """
    cache, refused = filled(sibling, card, LEFT)
    with contextlib.ExitStack() as stack:
        rest, another = card.free() - LEFT, 0
        if rest >= ANOTHER:
            another = stack.enter_context(another_process(LEFT))
        found: dict[str, Any] = {
            "sibling": sibling.name,
            "cache": cache,
            "sibling_refused": refused,
            "another": another,
            "free": card.free(),
            "asked": ASKED,
        }
        before, error = card.own(), None
        begun = time.perf_counter()
        try:
            array = ask(ASKED, SEED)
        except Exception as failure:
            error = text_of(failure)
        found["seconds"] = round(time.perf_counter() - begun, 3)
        found["error"] = error
        if error is None:
            found["given_back"] = before + ASKED - card.own()
            taker.write(array, ASKED, SEED)
            found["right"] = taker.right(array, ASKED, SEED)
            found["free_after"] = card.free()
    return found
