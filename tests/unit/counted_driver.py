"""A driver under the simulated allocators: it counts the bytes that they take."""

from __future__ import annotations

from memguard._devices.simulated import SimulatedOutOfMemory


class Driver:
    """Counts the bytes taken; refuses more than `room`."""

    def __init__(self, room: int = 1 << 60) -> None:
        self.room, self.taken = room, 0

    def take(self, nbytes: int) -> None:
        if self.taken + nbytes > self.room:
            raise SimulatedOutOfMemory("full", nbytes, self.room - self.taken)
        self.taken += nbytes

    def give(self, nbytes: int) -> None:
        assert 0 <= nbytes <= self.taken
        self.taken -= nbytes
