"""No room, strangers that take it, and how long it is nobody's between the placeholder and the restore."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from _run import GIB, MIB
from _suspend_children import Broke, Card, Child, end, other, target
from _suspend_rounds import UNIT, small

WAITS = 3.0
"""Seconds after which the first resume gives up."""
ROUNDS = 20
WINDOWS, ROBBED = 5, 10
"""Rounds in which the window is sampled, and in which somebody tries to get in."""
SPARE = small(4 * GIB)
LEFT = small(24 * MIB)
"""What is free beside the room that a restore needs, when somebody tries to get in: less than he wants."""
WANTED = small(64 * MIB)
CONTEXT = small(1 * GIB)
"""More than a context of the helper's takes."""


def no_room() -> dict[str, Any]:
    """It waits, says who holds the card, and comes back when there is room."""
    card, found = Card(), {}
    with target("torch", size=small(256 * MIB), large=2 * UNIT) as child, other("filler") as filler:
        size = card.of(child.pid) or 0
        child.must("off", 60)
        found["size"] = size
        found["free"] = filler.must("fill", 60, leave=size // 2)["free"]
        first = child.ask("on", 60, timeout=WAITS)
        found["refused"] = first.get("error")
        found["lost"] = first.get("lost")
        found["waits"] = len(first.get("waits", ()))
        found["names"] = any(str(filler.pid) in line for wait in first.get("waits", ()) for line in wait["holders"])
        found["away"] = child.must("away")["away"]
        child.send("on", timeout=60)
        time.sleep(2)
        begun = time.monotonic()
        filler.must("empty")
        on = child.answer(90)
        found["after_s"] = round(time.monotonic() - begun, 2)
        found["on"] = on.get("error")
        found["wrong"] = child.must("check")["wrong"]
    return found


class Fresh:
    """A target, and another one when it is lost."""

    def __init__(self) -> None:
        self.child: Child | None = None
        self.made = self.size = 0
        """`size`: what one takes of the card."""

    def get(self) -> Child:
        if self.child is None:
            self.child = Child("_suspend_target.py", "cupy")
            self.child.must("begin", 120, names=["cupy"], size=small(256 * MIB), large=small(GIB))
            self.made += 1
        return self.child

    def measured(self, card: Card) -> Child:
        """Once: what is free while it is off, less what is free while it is on."""
        child = self.get()
        if not self.size:
            child.must("off", 60)
            off = card.free()
            child.must("on", 60, timeout=30)
            self.size = off - card.free()
        return child

    def drop(self) -> None:
        if self.child is not None:
            end(self.child)
        self.child = None


def stranger() -> dict[str, Any]:
    """A process that takes and gives back memory at random, on a card with little to spare."""
    found: dict[str, Any] = {"rounds": 0, "lost": 0, "late": 0, "wrong": 0, "texts": [], "on_s": []}
    fresh = Fresh()
    with other("filler") as filler, other("grabber", seed=17) as grabber:
        try:
            fresh.get()
            filler.must("fill", 60, leave=SPARE)
            grabber.must("go", keep=small(8 * MIB))
            while found["rounds"] < ROUNDS:
                child = fresh.get()
                child.must("off", 60)
                on = child.ask("on", 120, timeout=60)
                found["rounds"] += 1
                if "error" in on:
                    found["lost" if on["lost"] else "late"] += 1
                    found["texts"].append(on["error"]["text"][:300])
                    grabber.must("halt")  # the next process needs room to begin
                    fresh.drop()
                    fresh.get()
                    grabber.must("go", keep=small(8 * MIB))
                else:
                    found["on_s"].append(round(on["seconds"], 2))
                    found["wrong"] += child.must("check")["wrong"]
            found["grabbed"] = grabber.must("halt")
        finally:
            fresh.drop()
    return found


def window(stays: bool) -> dict[str, Any]:
    """Between the placeholder's end and the restore's taking: how long by NVML, and whether a tight loop gets in.

    `stays`: the card has room for the placeholder's context beside the process.
    """
    found: dict[str, Any] = {
        "sampled": [], "robbed": 0, "got_in": 0, "lost": 0, "late": 0, "wrong": 0, "at": [], "tries": 0, "size": 0,
    }  # fmt: skip
    fresh, card = Fresh(), Card()
    with (
        tempfile.TemporaryDirectory() as folder,
        other("filler") as filler,
        other("sampler") as sampler,
        other("robber") as robber,
    ):
        try:
            for number in range(WINDOWS + ROBBED):
                filler.must("empty")
                child = fresh.measured(card)
                path = str(Path(folder) / str(number))
                child.must("at_restore", path=path)
                child.must("off", 60)
                # What the process had is free now. It gets that and a little; with the context, room for one.
                filler.must("fill", 60, leave=fresh.size + LEFT + (CONTEXT if stays else 0))
                watched = sampler if number < WINDOWS else robber
                more = {} if number < WINDOWS else {"size": WANTED + (CONTEXT if stays else 0)}
                watched.send("watch" if number < WINDOWS else "rob", path=path, seconds=1.2, **more)
                on = child.ask("on", 90, timeout=30)
                seen = watched.answer(60)
                _told(found, seen, on, sampled=number < WINDOWS)
                if "error" in on:
                    fresh.drop()
                else:
                    found["wrong"] += child.must("check")["wrong"]
                if seen.get("got"):
                    robber.must("empty")
        except Broke as error:
            found["broke"] = str(error)[-600:]
        finally:
            fresh.drop()
    found["size"] = fresh.size
    return found


def _told(found: dict[str, Any], seen: dict[str, Any], on: dict[str, Any], sampled: bool) -> None:
    if sampled:
        found["sampled"].append(_gap(seen))
    else:
        found["robbed"] += 1
        found["tries"] += seen["tries"]
        found["got_in"] += bool(seen["got"])
        if seen["got"]:
            found["at"].append(seen["at"])
    if "error" in on:
        found["lost" if on["lost"] else "late"] += 1
        found["text"] = on["error"]["text"][:300]


def _gap(seen: dict[str, Any]) -> dict[str, Any]:
    """How long more was free than before and after: from the first rise to the fall below what is free at last."""
    changes = seen["changes"]
    start, most = changes[0][1], max(free for _, free in changes)
    level = start + max(small(32 * MIB), (most - start) // 2)
    rise = next((at for at, free in changes if free >= level), None)
    fall = next((at for at, free in changes if rise is not None and at > rise and free < level), None)
    return {
        "rise_ms": rise, "fall_ms": fall, "ms": None if rise is None or fall is None else round(fall - rise, 3),
        "looks": seen["looks"], "longest_ms": seen["longest_ms"], "free": [start, most, changes[-1][1]],
    }  # fmt: skip
