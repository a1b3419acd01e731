"""No room, strangers that take it, and how long it is nobody's between the placeholder and the restore."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from _run import GIB, MIB
from _suspend_arrays import REHEARSAL
from _suspend_children import Broke, Child, end, other, target
from _suspend_rounds import UNIT, small

WAITS = 3.0
"""Seconds after which the first resume gives up."""
ROUNDS = 3 if REHEARSAL else 20
WINDOWS, ROBBED, SPOILT = (1, 2, 1) if REHEARSAL else (5, 5, 3)
"""Rounds in which the window is sampled, in which somebody tries to get in, and in which he may have got in before."""
AT_MOST = 150.0
"""Seconds after which no other round begins."""
PATIENCE = 20.0
"""Seconds for which a process waits for room."""
AFTER = 0.15
"""Seconds between the file that others wait for and the end of the placeholder."""
WATCHED = 0.4 if REHEARSAL else 1.0
SIZE = small(256 * MIB)
"""Of random bytes, and of a block."""
SPARE = small(2 * GIB)
KEPT = small(8 * MIB)
LEFT = small(24 * MIB)
"""What is free beside the room that a restore needs, when somebody tries to get in: less than he wants."""
WANTED = small(64 * MIB)
CONTEXT = small(1 * GIB)
"""More than a context of the helper's takes."""


def no_room() -> dict[str, Any]:
    """It waits, says who holds the card, and comes back when there is room."""
    found: dict[str, Any] = {}
    with target("torch", size=small(256 * MIB), large=2 * UNIT) as child, other("filler") as filler:
        size = found["size"] = int(child.must("off", 60)["bytes"])
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


class Lost(Exception):
    """The target died, does not answer, or did not come back; the text says how."""


class Fresh:
    """A target, and another one when it is lost: that has imported what it needs by then."""

    def __init__(self) -> None:
        self.child: Child | None = None
        self._next: Child | None = None

    def _loaded(self) -> Child:
        child = Child("_suspend_target.py", "cupy")
        child.send("load", names=["cupy"])
        return child

    def prepare(self) -> None:
        """Let one import, while others begin."""
        self._next = self._next or self._loaded()

    def get(self) -> Child:
        """Raises Broke if there is no room for it."""
        if self.child is None:
            self.prepare()
            self.child, self._next = self._next, None
            assert self.child is not None
            self.child.answer(120, "load")
            self.child.must("begin", 60, names=["cupy"], size=SIZE, large=SIZE)
            self.prepare()
        return self.child

    def off(self) -> int:
        """The bytes that left the card. Raises Lost."""
        return int(self.told("off", 60)["bytes"])

    def on(self, timeout: float) -> dict[str, Any]:
        """Its answer, also where there was no room. Raises Lost."""
        on = self._answer("on", timeout + 40, timeout=timeout)
        if on.get("lost"):
            assert self.child is not None
            self.child.lost = True
            raise Lost(on["error"]["text"])
        return on

    def wrong(self) -> int:
        return int(self.told("check", 30)["wrong"])

    def told(self, do: str, limit: float, **fields: Any) -> dict[str, Any]:
        found = self._answer(do, limit, **fields)
        if found.get("error"):
            raise Lost(f"{do}: {found['error']['exception']}: {found['error']['text']}")
        return found

    def _answer(self, do: str, limit: float, **fields: Any) -> dict[str, Any]:
        child = self.get()
        try:
            return child.ask(do, limit, **fields)
        except Broke as error:
            raise Lost(str(error)[:400]) from None

    def drop(self) -> None:
        if self.child is not None:
            end(self.child)
        self.child = None

    def close(self) -> None:
        self.drop()
        if self._next is not None:
            end(self._next)
        self._next = None


def stranger() -> dict[str, Any]:
    """A process that takes and gives back memory at random, on a card with little to spare."""
    found: dict[str, Any] = {
        "rounds": 0, "lost": 0, "late": 0, "wrong": 0, "losses": [], "lates": [], "on_s": [],
        "grabbed": {"times": 0, "most": 0},
    }  # fmt: skip
    fresh, until = Fresh(), time.monotonic() + AT_MOST
    fresh.prepare()
    with other("filler") as filler, other("grabber", seed=17) as grabber:
        try:
            fresh.get()
            filler.must("fill", 60, leave=SPARE)
            grabber.must("go", keep=KEPT)
            while found["rounds"] < ROUNDS and time.monotonic() < until:
                found["rounds"] += 1
                try:
                    _beside(found, fresh, grabber)
                except Lost as error:
                    found["lost"] += 1
                    found["losses"].append({"round": found["rounds"], "why": str(error)[:400]})
                    found["grabbed"] = grabber.must("halt")  # the next process needs room to begin
                    fresh.drop()
                    fresh.get()
                    grabber.must("go", keep=KEPT)
            found["grabbed"] = grabber.must("halt")
        except Broke as error:
            found["broke"] = str(error)[-600:]
        finally:
            fresh.close()
    return found


def _beside(found: dict[str, Any], fresh: Fresh, grabber: Child) -> None:
    fresh.off()
    on = fresh.on(PATIENCE)
    if "error" in on:  # whole, as it says: without the stranger it must come back
        found["late"] += 1
        found["lates"].append(on["error"]["text"][:300])
        found["grabbed"] = grabber.must("halt")
        on = fresh.on(PATIENCE)
        if "error" in on:
            raise Lost(f"not back without the stranger either: {on['error']['text']}")
        found["wrong"] += fresh.wrong()
        grabber.must("go", keep=KEPT)
        return
    found["on_s"].append(round(on["seconds"], 2))
    found["wrong"] += fresh.wrong()


def window(stays: bool) -> dict[str, Any]:
    """Between the placeholder's end and the restore's taking: how long by NVML, and whether a tight loop gets in.

    `stays`: the card has room for the placeholder's context beside the process. A round in which somebody got in before
    the placeholder's end, or in which no restore was begun, is `invalid`.
    """
    found: dict[str, Any] = {
        "sampled": [], "robbed": 0, "got_in": 0, "invalid": 0, "lost": 0, "late": 0, "wrong": 0, "at": [], "tries": 0,
        "sizes": [], "texts": [],
    }  # fmt: skip
    fresh, until = Fresh(), time.monotonic() + AT_MOST
    fresh.prepare()
    with (
        tempfile.TemporaryDirectory() as folder,
        other("filler") as filler,
        other("sampler") as sampler,
        other("robber") as robber,
    ):
        try:
            for number in range(WINDOWS + ROBBED + SPOILT):
                if found["robbed"] >= ROBBED or time.monotonic() > until:
                    break
                watched = sampler if number < WINDOWS else robber
                _window_once(found, fresh, filler, watched, Path(folder) / str(number), stays)
        except Broke as error:
            found["broke"] = str(error)[-600:]
        finally:
            fresh.close()
    return found


def _window_once(found: dict[str, Any], fresh: Fresh, filler: Child, watched: Child, path: Path, stays: bool) -> None:
    """One round. Raises Broke if it is not the target that breaks."""
    sampled = "sampler" in watched.words
    more = {} if sampled else {"size": WANTED + (CONTEXT if stays else 0)}
    began, lost = False, ""
    try:
        fresh.told("at_restore", 30, path=str(path), wait=AFTER)
        size = fresh.off()
        found["sizes"].append(size)
        # What the process had is free now. It gets that and a little; with the context, room for one.
        filler.must("fill", 60, leave=size + LEFT + (CONTEXT if stays else 0))
        watched.send("watch" if sampled else "rob", path=str(path), seconds=WATCHED, **more)
        began = True
        on = fresh.on(PATIENCE)
        if "error" in on:  # there was no room: the file did not come
            found["late"] += 1
            lost = f"no room: {on['error']['text']}"
        else:
            found["wrong"] += fresh.wrong()
    except Lost as error:
        found["lost"] += 1
        lost = str(error)
    if lost:
        found["texts"].append({"round": int(path.name) + 1, "why": lost[:300]})
    if began:
        came = path.exists()
        path.touch()  # whoever waits for it goes on
        _seen(found, watched.answer(60), sampled, came)
        if not sampled:
            watched.must("empty")
    if lost:
        fresh.drop()
        filler.must("empty")  # the next process needs room to begin


def _seen(found: dict[str, Any], seen: dict[str, Any], sampled: bool, came: bool) -> None:
    """`came`: a restore was begun."""
    if sampled:
        found["sampled"].append(_gap(seen))
        return
    found["tries"] += seen["tries"]
    if seen["got"]:
        found["at"].append(seen["at"])
    early = bool(seen["got"]) and seen["at"] < AFTER
    counts = came and not early
    found["robbed" if counts else "invalid"] += 1
    found["got_in"] += bool(seen["got"]) and counts


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
