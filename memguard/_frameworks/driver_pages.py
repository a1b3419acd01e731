"""What the driver makes of single allocations: the pages it takes for them, which no library counts.

Measured on an H200: an allocation above 1 MiB is rounded up to 2 MiB, smaller ones are packed into slabs of
2 MiB. 200 arrays of 1.1 MiB took 398 MiB where CuPy's pool counted 220. Slabs lie at multiples of 2 MiB, the first
piece at a slab's start, each at a multiple of 512 bytes and none in two: 60 pieces of 0.7 MiB take 60 MiB. A slab
serves whoever asks in its context, and goes back with its last piece.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from memguard._units import GRANULE, MIB, round_down, round_up

SMALL = MIB
"""Up to here the driver packs allocations into slabs."""
TINY = MIB // 8
"""Up to here so many fit a slab that what is lost at its end does not count."""
UNIT = 512


def whole_share(size: int, unit: int = UNIT) -> int:
    """`size` rounded up so that the driver wastes nothing on it: whole pages, or an even part of a slab."""
    if size <= TINY:
        return size
    if size > SMALL:
        return round_up(size)
    pieces = GRANULE // size
    part = round_down(GRANULE // pieces, unit)
    return part if part >= size else round_up(size, unit) if pieces == 1 else round_down(GRANULE // (pieces - 1), unit)


@dataclass
class _Shared:
    """A slab, everybody's pieces in it, and what the frameworks' rows count of it."""

    pieces: int = 0
    counted: int = 0
    known: bool = False


class Slabs:
    """The slabs of one GPU that this process's frameworks have pieces in.

    `gaps` is what the driver holds of them beyond what the frameworks' rows count: ends that nothing fits into,
    holes that freed pieces leave. Below zero where rows count more, as guests of a slab that another counts whole.
    A slab whose first piece nobody here has counted is somebody else's, and so are its gaps.
    """

    def __init__(self) -> None:
        self.gaps = 0
        self._lock = threading.Lock()
        self._slabs: dict[int, _Shared] = {}

    def enter(self, address: int) -> bool:
        """One more piece. Whether it opened its slab."""
        with self._lock:
            slab = self._slabs.setdefault(address // GRANULE, _Shared())
            slab.pieces += 1
            if address % GRANULE == 0 and not slab.known:
                slab.known = True
                self.gaps += GRANULE - slab.counted
                return slab.pieces == 1
            return False

    def count(self, address: int, change: int) -> None:
        """A row counts so much more of the slab."""
        with self._lock:
            slab = self._slabs[address // GRANULE]
            slab.counted += change
            if slab.known:
                self.gaps -= change

    def leave(self, address: int) -> None:
        """One piece less; nothing is counted of the slab any more where it was the last."""
        with self._lock:
            slab = self._slabs[address // GRANULE]
            slab.pieces -= 1
            if not slab.pieces:
                if slab.known:
                    self.gaps -= GRANULE - slab.counted
                del self._slabs[address // GRANULE]


slabs: defaultdict[str, Slabs] = defaultdict(Slabs)
"""By the GPU's UUID. Of the process, as the driver's are: a framework's count outlives the budget it began under."""


@dataclass
class _Own:
    """One framework's pieces in one slab: how many, their bytes, and the same of those that are going."""

    whole: bool
    pieces: int = 0
    bytes: int = 0
    going: int = 0
    going_bytes: int = 0

    @property
    def counted(self) -> int:
        return GRANULE if self.whole else self.bytes

    @property
    def reclaimable(self) -> int:
        """What is counted less once those that are going are gone: of a whole slab nothing before its last piece."""
        if not self.whole:
            return self.going_bytes
        return GRANULE if self.pieces and self.pieces == self.going else 0


class DriverPages:
    """One framework's allocations on one GPU, by address: the pages that the driver takes for them.

    A slab is counted whole by whoever opened it, if `whole`; of others' slabs the pieces are. Not for finalizers.
    """

    def __init__(self, shared: Slabs, whole: bool = True) -> None:
        self.in_use = 0
        self._shared, self._whole = shared, whole
        self._large = self._small = self._going = 0
        self._slabs: dict[int, _Own] = {}

    def growth(self, size: int) -> int:
        """Bytes by which `held` grows with one more allocation of `size`, at least: a slab's room may be in holes."""
        if size > SMALL:
            return round_up(size)
        return 0 if any(GRANULE - slab.bytes >= size for slab in self._slabs.values() if slab.whole) else GRANULE

    def fits(self, size: int, cap: int) -> bool:
        """Whether `held` may stay within the cap with one more. Looks into the slabs only where it is close."""
        return self.held() + round_up(size) <= cap or self.held() + self.growth(size) <= cap

    def add(self, address: int, size: int) -> None:
        self.in_use += size
        if size > SMALL:
            self._large += round_up(size)
            return
        opened = self._shared.enter(address)
        slab = self._slabs.setdefault(address // GRANULE, _Own(opened and self._whole))
        self._change(slab, address, 1, size, 0, 0)

    def going(self, address: int, size: int) -> None:
        """No longer in use, and still with the driver."""
        self.in_use -= size
        if size > SMALL:
            self._going += round_up(size)
        else:
            self._change(self._slabs[address // GRANULE], address, 0, 0, 1, size)

    def remove(self, address: int, size: int) -> None:
        """What was going is gone."""
        if size > SMALL:
            self._large -= round_up(size)
            self._going -= round_up(size)
            return
        slab = self._slabs[address // GRANULE]
        self._change(slab, address, -1, -size, -1, -size)
        if not slab.pieces:
            del self._slabs[address // GRANULE]
        self._shared.leave(address)

    def gone(self, address: int, size: int) -> None:
        """No longer in use, and not with the driver either."""
        self.going(address, size)
        self.remove(address, size)

    def held(self) -> int:
        return self._large + self._small

    def reclaimable(self) -> int:
        """What goes back with all that is going: a slab does with its last piece."""
        return self._going

    def returned_by(self, pieces: Iterable[tuple[int, int]]) -> int:
        """The bytes that go back to the driver with these allocations: a slab does with its last piece."""
        found, small = 0, Counter[int]()
        for address, size in pieces:
            if size > SMALL:
                found += round_up(size)
            elif self._slabs[address // GRANULE].whole:
                small[address // GRANULE] += 1
            else:
                found += round_up(size, UNIT)
        return found + GRANULE * sum(count == self._slabs[slab].pieces for slab, count in small.items())

    def _change(self, slab: _Own, address: int, pieces: int, size: int, going: int, going_size: int) -> None:
        """Every sum follows, so that asking costs nothing."""
        before = slab.counted if slab.pieces else 0
        self._going -= slab.reclaimable
        slab.pieces, slab.going = slab.pieces + pieces, slab.going + going
        slab.bytes += _units(size)
        slab.going_bytes += _units(going_size)
        after = slab.counted if slab.pieces else 0
        self._going += slab.reclaimable
        self._small += after - before
        self._shared.count(address, after - before)


def _units(size: int) -> int:
    """Rounded away from zero, as the driver rounds a piece."""
    return round_up(size, UNIT) if size >= 0 else -round_up(-size, UNIT)
