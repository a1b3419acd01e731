"""Processes that allocate from the driver directly: `python -m support.suspend_others WHAT`. They are never suspended.

filler    holds the whole GPU except for some bytes, until told to change
grabber   allocates and frees random sizes at random moments
robber    allocates in a tight loop, once a file exists
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from typing import Any

from bench.programs.six import MIB
from support.suspend_arrays import PIECES, Raw
from support.suspend_children import Card


class Filler:
    def begin(self) -> dict[str, Any]:
        self.card, self.raw, self.held = Card(), Raw(), list[tuple[int, int]]()
        return {}

    def fill(self, leave: int) -> dict[str, Any]:
        """Allocate all but `leave` bytes, in blocks of at least 2 MiB."""
        for size in PIECES:
            while self.card.free() - size >= leave and (address := self.raw.take(size)) is not None:
                self.held.append((address, size))
        return {"held": sum(size for _, size in self.held), "free": self.card.free()}

    def empty(self) -> dict[str, Any]:
        while self.held:
            self.raw.give(self.held.pop()[0])
        return {"free": self.card.free()}


class Grabber:
    def begin(self, seed: int) -> dict[str, Any]:
        self.card, self.raw, self.draw = Card(), Raw(), random.Random(seed)
        self.stop, self.times, self.bytes = threading.Event(), 0, 0
        self.thread: threading.Thread | None = None
        return {}

    def go(self, keep: int) -> dict[str, Any]:
        """On a thread, until `halt`: hold a part of the free memory beyond `keep` for up to 300 ms, then nothing for as
        long."""
        self.stop.clear()
        self.thread = threading.Thread(target=self._grab, args=(keep,), daemon=True)
        self.thread.start()
        return {}

    def _grab(self, keep: int) -> None:
        self.raw.cuda.cuCtxPushCurrent_v2(self.raw.context)
        while not self.stop.is_set():
            size = int((self.card.free() - keep) * self.draw.random()) // (2 * MIB) * 2 * MIB
            address = self.raw.take(size) if size > 0 else None
            if address is not None:
                self.times += 1
                self.bytes = max(self.bytes, size)
            self.stop.wait(self.draw.uniform(0, 0.3))
            if address is not None:
                self.raw.give(address)
            self.stop.wait(self.draw.uniform(0, 0.3))

    def halt(self) -> dict[str, Any]:
        self.stop.set()
        if self.thread is not None:
            self.thread.join(10)
        return {"times": self.times, "most": self.bytes}


class Robber:
    def begin(self) -> dict[str, Any]:
        self.raw, self.held = Raw(), None
        return {}

    def rob(self, path: str, size: int, seconds: float) -> dict[str, Any]:
        """Wait for the file, then retry without a pause for this long. `at`: seconds from the file to the success."""
        until = time.monotonic() + 30
        while not os.path.exists(path):
            if time.monotonic() > until:
                return {"tries": 0, "got": False, "at": None}
        begun, tries = time.monotonic(), 0
        while time.monotonic() < begun + seconds:
            tries += 1
            address = self.raw.take(size)
            if address is not None:
                self.held = address
                return {"tries": tries, "got": True, "at": round(time.monotonic() - begun, 4)}
        return {"tries": tries, "got": False, "at": None}

    def empty(self) -> dict[str, Any]:
        if self.held is not None:
            self.raw.give(self.held)
        self.held = None
        return {}


def main() -> None:
    one: Any = {"filler": Filler, "grabber": Grabber, "robber": Robber}[sys.argv[1]]()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = getattr(one, asked.pop("do"))(**asked)
        except Exception as error:
            answer = {"error": {"exception": type(error).__name__, "text": str(error)[:300]}}
        print("ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
