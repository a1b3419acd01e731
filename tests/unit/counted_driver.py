"""A driver for the models of allocators: it counts what is taken from it."""

from __future__ import annotations

from memguard._devices.simulated import SimulatedOutOfMemory


class Driver:
    """Counts what is taken; refuses above `room`."""

    def __init__(self, room: int = 1 << 60) -> None:
        self.room, self.taken = room, 0

    def take(self, nbytes: int) -> None:
        if self.taken + nbytes > self.room:
            raise SimulatedOutOfMemory("full", nbytes, self.room - self.taken)
        self.taken += nbytes

    def give(self, nbytes: int) -> None:
        assert 0 <= nbytes <= self.taken
        self.taken -= nbytes
