"""One process of the turns of `leases.py`: `python _leases_turn_job.py NAME`. It answers each line with lines.

A job claims its lease, fills most of it with values that it knows, works on the GPU, does something else for a while,
and needs the GPU again. The placeholder has a lease of all that a smaller card would not have, and fills it.

With MEMGUARD_LEASES_REHEARSAL=FOLDER the GPUs are simulated, and so are the values.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from _leases_job import left_over
from _run import GIB, MIB

REHEARSAL = os.environ.get("MEMGUARD_LEASES_REHEARSAL")
PIECE = 512 * MIB
CONTEXT = 700 * MIB
"""What a context and the first tensor take of the placeholder's lease."""
STAND_IN = 60 * GIB
"""The placeholder's lease in a rehearsal."""
Answer = dict[str, Any]


class Values:
    """Pieces of int32. Each element of each piece has a value of its own, and all rise by one in each round of work."""

    def __init__(self, size: int, seed: int) -> None:
        import torch

        self._torch, self._seed, self.rounds = torch, seed, 0
        self.pieces = [self._right(number) for number in range(size // PIECE)]
        torch.cuda.synchronize()

    def _right(self, number: int) -> Any:
        found = self._torch.arange(PIECE // 4, dtype=self._torch.int32, device="cuda")
        return found.mul_(2 * number + 1).add_(self._seed + self.rounds)

    def wait(self) -> None:
        """The first call that needs the GPU: it waits at the gate while the process is off."""
        self._torch.cuda.synchronize()

    def work(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for piece in self.pieces:
                piece.add_(1)
            self.rounds += 1
            self._torch.cuda.synchronize()

    def wrong(self) -> int:
        """How many pieces differ in a bit."""
        equal = self._torch.equal
        return sum(not equal(piece, self._right(number)) for number, piece in enumerate(self.pieces))

    def drop(self) -> None:
        self.pieces.clear()
        self._torch.cuda.empty_cache()


class StandIn:
    """The same without a GPU: it waits at the gate as a call of a framework would."""

    def __init__(self, size: int, seed: int) -> None:
        self.rounds, self.pieces = 0, [0] * (size // PIECE)

    def wait(self) -> None:
        from memguard._suspend import own

        now = own._now
        gate: Any = now.gate if now is not None else None
        if gate is not None:
            gate.enter("a call of the rehearsal")

    def work(self, seconds: float) -> None:
        time.sleep(seconds)
        self.pieces = [value + 1 for value in self.pieces]
        self.rounds += 1

    def wrong(self) -> int:
        return sum(value != self.rounds for value in self.pieces)

    def drop(self) -> None:
        self.pieces.clear()


class Moves:
    """When this process went off its GPUs and came back, as it knows itself (CLOCK_MONOTONIC)."""

    def __init__(self) -> None:
        self.out: list[list[float]] = []
        self.back: list[list[float]] = []
        """From when to when each took. Of a way back: from when it had its lease, so with the wait for free memory."""
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        from memguard._devices import suspension

        before, came_from, since = "on", "on", 0.0
        while True:
            off = suspension.now
            state = "on" if off is None else "moves" if off.moving else "off"
            now = time.monotonic()
            if state == "moves" and before != "moves":
                since, came_from = now, before
            if state != before and before != "moves" != state:  # between two looks, as simulated GPUs do
                since, came_from = now, before
            if state == "off" and came_from == "on" and before != state:
                self.out.append([since, now])
            if state == "on" and came_from == "off" and before != state:
                self.back.append([since, now])
            before = state
            time.sleep(0.01)


class Job:
    def __init__(self, name: str) -> None:
        self.name, self.seed = name, 1 + sum(map(ord, name))
        self.values: Any = None
        self.moves: Moves | None = None
        self.guard: Any = None
        self.kept: list[Any] = []
        """Of the placeholder."""

    def load(self) -> Answer:
        import memguard  # noqa: F401

        if REHEARSAL is None:
            import torch  # noqa: F401 (makes no context)
        return {}

    def room(self, leave: int) -> Answer:
        """As the placeholder: have all of the card but so many bytes, with a lease for it. Nothing on a small card."""
        import memguard

        size = STAND_IN if REHEARSAL else _total() - leave
        if size < GIB:
            return {"lease": 0}
        device = {"limit": size, "reserve": CONTEXT, "lease": True}
        budget = {"version": 1, "device": device, "frameworks": {"torch": {"share": "100%"}}}
        self.guard = memguard.init(budget, simulate="h200" if REHEARSAL else None)
        if REHEARSAL is None:
            import torch

            for piece in (256 * MIB, 16 * MIB):
                try:
                    while True:
                        self.kept.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    torch.cuda.synchronize()
        return {"lease": size}

    def begin(self, budget: Answer) -> Answer:
        """Claim the lease, and fill the cap."""
        import memguard

        asked = time.monotonic()
        try:
            self.guard = memguard.init(budget, simulate="h200" if REHEARSAL else None)
        except memguard.LeaseRefused as error:
            return {"refused": str(error)[:600], "waited": time.monotonic() - asked}
        served = time.monotonic()
        self.moves = Moves()
        cap = self.guard.plan.devices[0].caps["torch"]
        make = StandIn if REHEARSAL else Values
        self.values = make(cap - left_over(cap), self.seed)
        return {"asked": asked, "served": served, "bytes": PIECE * len(self.values.pieces), "cap": cap}

    def turns(self, count: int, work: float, pause: float) -> Answer:
        """So many turns, each told as it ends. In the first one the process is there already."""
        for number in range(count):
            asked = time.monotonic()
            self.values.wait()
            served = time.monotonic()
            wrong = self.values.wrong()
            self.values.work(work)
            after = self.values.wrong()
            told = {"turn": number, "asked": asked, "served": served, "wrong": wrong + after}
            tell({**told, "rounds": self.values.rounds, **self._moved()})
            time.sleep(pause)  # the CPU's part of it
        return {"turns": count}

    def check(self) -> Answer:
        """Needs the GPU once more."""
        asked = time.monotonic()
        self.values.wait()
        return {"asked": asked, "served": time.monotonic(), "wrong": self.values.wrong(), **self._moved()}

    def _moved(self) -> Answer:
        assert self.moves is not None
        time.sleep(0.05)  # it looks a hundred times a second
        return {"out": list(self.moves.out), "back": list(self.moves.back)}

    def leave(self) -> Answer:
        """End off the card: a process that was restored is not to be ended as it is."""
        import memguard

        if self.values is not None:
            self.values.wait()
            self.values.drop()
            memguard.suspend()
        tell({"left": True})
        os._exit(0)


def _total() -> int:
    """What CUDA can give of the card, without a context."""
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)


def tell(answer: Answer) -> None:
    print("ANSWER " + json.dumps({"at": time.monotonic(), **answer}), flush=True)


def main() -> None:
    job = Job(sys.argv[1])
    for line in sys.stdin:
        words = json.loads(line)
        do: Callable[..., Answer] = getattr(job, words.pop("do"))
        try:
            tell(do(**words))
        except Exception as error:
            tell({"error": {"exception": type(error).__name__, "text": str(error)[:1500]}})


if __name__ == "__main__":
    main()
