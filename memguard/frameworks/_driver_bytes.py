"""What the driver makes of single allocations: the pages it takes for them, which no library counts.

Measured on an H200: an allocation above 1 MiB is rounded up to 2 MiB, smaller ones are packed into slabs of
2 MiB. 200 arrays of 1.1 MiB took 398 MiB where CuPy's pool counted 220. Slabs lie at multiples of 2 MiB, the pieces in
them at multiples of 512 bytes, and a piece never lies in two: 60 pieces of 0.7 MiB take 60 MiB.
"""

from __future__ import annotations

from memguard.units import GRANULE, MIB, round_down, round_up

SMALL = MIB
"""Up to here the driver packs allocations into slabs."""
TINY = MIB // 8
"""Up to here so many fit a slab that what is lost at its end does not count."""


def whole_share(size: int, unit: int = 512) -> int:
    """`size` rounded up so that the driver wastes nothing on it: whole pages, or an even part of a slab."""
    if size <= TINY:
        return size
    if size > SMALL:
        return round_up(size)
    pieces = GRANULE // size
    part = round_down(GRANULE // pieces, unit)
    return part if part >= size else round_up(size, unit) if pieces == 1 else round_down(GRANULE // (pieces - 1), unit)


class DriverBytes:
    """Allocations on one GPU that go to the driver one by one: bytes asked for, and the pages it takes for them.

    `remove` is for finalizers, which run inside any call, `add` too: no call stands between reading a sum and writing
    it.
    """

    def __init__(self) -> None:
        self.large = self.small = self._slabs = 0

    def growth(self, size: int) -> int:
        """Bytes by which `held` grows with one more allocation of `size`."""
        return whole_share(size) if size > SMALL else max(round_up(self.small + whole_share(size)) - self._slabs, 0)

    def add(self, size: int) -> None:
        share = whole_share(size)
        if size > SMALL:
            self.large += share
        else:
            self.small += share
            slabs = round_up(self.small)
            if slabs > self._slabs:
                self._slabs = slabs

    def remove(self, size: int) -> None:
        share = whole_share(size)
        if size > SMALL:
            self.large -= share
        else:
            self.small -= share
            self._slabs = self._slabs if self.small else 0  # a slab goes back when its last piece does

    def held(self) -> int:
        return self.large + self._slabs

    def in_use(self) -> int:
        return self.large + self.small


class DriverPages:
    """The same by address, and so to the byte: it says which slab a small one lies in. Not for finalizers."""

    def __init__(self) -> None:
        self.in_use = self._large = self._going = 0
        self._slabs: dict[int, list[int]] = {}  # by slab: pieces in it, their bytes, and how many of them are going

    def growth(self, size: int) -> int:
        """Bytes by which `held` grows with one more allocation of `size`, at least: a slab may have gaps."""
        if size > SMALL:
            return round_up(size)
        return 0 if any(GRANULE - filled >= size for _, filled, _ in self._slabs.values()) else GRANULE

    def add(self, address: int, size: int) -> None:
        self.in_use += size
        if size > SMALL:
            self._large += round_up(size)
        else:
            slab = self._slabs.setdefault(address // GRANULE, [0, 0, 0])
            slab[:] = slab[0] + 1, slab[1] + round_up(size, 512), slab[2]

    def going(self, address: int, size: int) -> None:
        """No longer in use, and still with the driver."""
        self.in_use -= size
        if size > SMALL:
            self._going += round_up(size)
        else:
            self._slabs[address // GRANULE][2] += 1

    def remove(self, address: int, size: int) -> None:
        """What was going is gone."""
        if size > SMALL:
            self._large -= round_up(size)
            self._going -= round_up(size)
            return
        slab = self._slabs[address // GRANULE]
        slab[:] = slab[0] - 1, slab[1] - round_up(size, 512), slab[2] - 1
        if not slab[0]:
            del self._slabs[address // GRANULE]

    def held(self) -> int:
        return self._large + GRANULE * len(self._slabs)

    def reclaimable(self) -> int:
        """What goes back with all that is going: a slab does with its last piece."""
        return self._going + GRANULE * sum(pieces == going for pieces, _, going in self._slabs.values())
