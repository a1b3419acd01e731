"""Computes the driver memory that allocations occupy (pages, slabs) and that a free returns; no library reports it.

Measured on an H200: the driver rounds an allocation above 1 MiB up to a multiple of 2 MiB, and packs smaller ones into
slabs of 2 MiB. 200 arrays of 1.1 MiB took 398 MiB while CuPy's pool counted 220. Slabs lie at multiples of 2 MiB. In
this module, a piece is an allocation in a slab. A slab's first piece starts at the slab's address, each piece at a
multiple of 512 bytes, and no piece spans two slabs: 60 pieces of 0.7 MiB take 60 MiB. All frameworks that
allocate in a CUDA context share the context's slabs. The driver frees a slab when the last piece in the slab is freed.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from memguard._base.units import GRANULE, MIB, round_down, round_up

SMALL = MIB
"""The driver packs allocations of up to this many bytes into slabs."""
TINY = MIB // 8
"""For pieces of up to this many bytes, the unused end of a slab is negligible."""
UNIT = 512
PIECE = 32 * MIB
"""Bytes by which the driver's memory pools (`cudaMallocAsync`) grow. Unrelated to the pieces of a slab."""


def whole(size: int) -> int:
    """The driver bytes that an allocation of `size` bytes occupies. Above 1 MiB these are whole pages of 2 MiB, else a
    multiple of `UNIT` in a slab."""
    return -(-size // GRANULE) * GRANULE if size > SMALL else -(-size // UNIT) * UNIT


def whole_share(size: int, unit: int = UNIT) -> int:
    """`size` rounded up to whole pages or to an equal share of a slab, so that the driver wastes no bytes. A size up to
    `TINY` is returned unchanged."""
    if size <= TINY:
        return size
    if size > SMALL:
        return round_up(size)
    pieces = GRANULE // size
    part = round_down(GRANULE // pieces, unit)
    return part if part >= size else round_up(size, unit) if pieces == 1 else round_down(GRANULE // (pieces - 1), unit)


@dataclass
class _Slab:
    """Counts for one slab: the number of all frameworks' pieces in the slab, and how many bytes of the slab the
    frameworks' ledger rows count. `known` is True if the slab's first piece was recorded."""

    pieces: int = 0
    counted: int = 0
    known: bool = False


class Slabs:
    """The slabs of one GPU that contain pieces of this process's frameworks. Thread-safe.

    `gaps` is the number of slab bytes that no framework's ledger row counts, such as unusable ends of slabs and holes
    that freed pieces left. `gaps` is negative if ledger rows overlap, because one framework counts a whole slab and
    another counts its own pieces in the same slab. `gaps` excludes slabs whose first piece was not recorded, because
    other code opened these slabs.
    """

    def __init__(self) -> None:
        self.gaps = 0
        # A signal handler or finalizer may run at any function call, so the methods update related figures with no call
        # in between.
        self._lock = threading.RLock()
        self._slabs: dict[int, _Slab] = {}

    def add_piece(self, address: int) -> bool:
        """Record a piece. Returns True if the piece opened the slab, as its first piece."""
        with self._lock:
            slab = self._slabs.setdefault(address // GRANULE, _Slab())
            slab.pieces += 1
            if address % GRANULE == 0 and not slab.known:
                slab.known = True
                self.gaps += GRANULE - slab.counted
                return slab.pieces == 1
            return False

    def count(self, address: int, change: int) -> None:
        """Add `change` to the number of the slab's bytes that the frameworks' ledger rows count."""
        with self._lock:
            slab = self._slabs[address // GRANULE]
            slab.counted += change
            if slab.known:
                self.gaps -= change

    def pieces(self, address: int) -> int:
        """The number of recorded pieces in this address's slab."""
        slab = self._slabs.get(address // GRANULE)
        return slab.pieces if slab is not None else 0

    def remove_piece(self, address: int) -> None:
        """Remove a piece; if it was the last piece of the slab, also remove the slab."""
        with self._lock:
            slab = self._slabs[address // GRANULE]
            slab.pieces -= 1
            if not slab.pieces:
                if slab.known:
                    self.gaps -= GRANULE - slab.counted
                del self._slabs[address // GRANULE]


slabs: defaultdict[str, Slabs] = defaultdict(Slabs)
"""The slabs of each GPU by UUID. Process-wide, like the driver's slabs, so that recorded pieces outlive a budget."""


@dataclass
class _OwnPieces:
    """Number and bytes of one framework's pieces in one slab. With `whole`, the framework counts the whole slab."""

    whole: bool
    pieces: int = 0
    bytes: int = 0

    @property
    def counted(self) -> int:
        return GRANULE if self.whole else self.bytes


class DriverPages:
    """Counts one framework's allocations on one GPU, by address, in driver pages.

    With `whole`, the framework counts all 2 MiB of a slab that it opened; in other slabs it counts only its own pieces.
    Finalizers must not call these methods. A change that a signal handler makes during another change is queued and
    applied after the interrupted change.
    """

    def __init__(self, shared: Slabs, whole: bool = True) -> None:
        self._shared, self._whole = shared, whole
        self._large = self._small = self._expected = 0
        self.queued = 0
        """The bytes of the `apply_add` entries in `changes`, in whole pages. `held` includes these bytes before the
        entries are applied, so that a signal handler's request cannot use the same part of the cap."""
        self._slabs: dict[int, _OwnPieces] = {}
        self.changes: deque[tuple[Callable[[int, int], None], int, int]] = deque()
        """Queued changes for `apply_changes`: `apply_add` or `apply_remove`, with address and size. A caller that must
        know after a Ctrl-C whether its change is queued appends the change to this deque itself, and sets its own flag
        with no function call in between."""
        self._changing = False

    def growth(self, size: int) -> int:
        """The least growth of `held` for one more allocation of `size` bytes.

        The real growth may be larger, because the piece opens a new slab if a slab's free bytes are scattered holes.
        """
        if size > SMALL:
            return round_up(size)
        if any(GRANULE - slab.bytes >= size for slab in list(self._slabs.values()) if slab.whole):
            return 0
        return round_up(size, UNIT)

    def gap(self, size: int) -> bool:
        """True if a recorded slab may have `size` free bytes for one more piece. These bytes may be scattered holes, or
        other frameworks' pieces may occupy them."""
        return any(GRANULE - slab.bytes >= size for slab in self._slabs.values())

    def known(self, address: int) -> bool:
        """True if this framework has recorded pieces in the slab at this address."""
        return address // GRANULE in self._slabs

    def fits(self, size: int, cap: int) -> bool:
        """False if one more allocation of `size` bytes certainly exceeds the cap. Searches the slabs only if `held` is
        near the cap."""
        if self.held() + round_up(size) <= cap:
            return True
        return size <= SMALL and self.held() + self.growth(size) <= cap  # above SMALL the first check is exact

    def add(self, address: int, size: int) -> None:
        self._queue(self.apply_add, address, size)

    def remove(self, address: int, size: int) -> None:
        """Record that the driver has freed an allocation."""
        self._queue(self.apply_remove, address, size)

    def _queue(self, change: Callable[[int, int], None], address: int, size: int) -> None:
        queued = round_up(size) if change == self.apply_add else 0
        self.queued += queued
        self.changes.append((change, address, size))
        self.apply_changes()

    def apply_changes(self) -> None:
        """Apply the queued changes. A Ctrl-C neither loses nor repeats a change; only `Slabs.gaps` may miss a piece."""
        if self._changing:
            return
        self._changing = True
        try:
            while self.changes:
                change, address, size = self.changes[0]
                # `change` removes its own entry right after it has updated all sums, with no call in between.
                change(address, size)
        finally:
            self._changing = False

    def apply_add(self, address: int, size: int) -> None:
        if size > SMALL:
            pages = round_up(size)
            self._large += pages
            self.queued -= pages
            self.changes.popleft()
            return
        opened = self._shared.add_piece(address)
        slab = self._slabs.get(address // GRANULE)
        self._change(slab or _OwnPieces(opened and self._whole), address, 1, size, round_up(size))

    def apply_remove(self, address: int, size: int) -> None:
        if size > SMALL:
            pages = round_up(size)
            self._large -= pages
            self.changes.popleft()
            return
        slab = self._slabs.get(address // GRANULE)
        if slab is None:
            self.changes.popleft()  # otherwise every later call would retry this change and fail
            raise KeyError(address)
        self._change(slab, address, -1, -size)
        self._shared.remove_piece(address)

    def in_slab_of_others(self, address: int, size: int) -> bool:
        """True if this allocation lies in a slab that other code opened, so that only the allocation's bytes count."""
        slab = self._slabs.get(address // GRANULE)
        return size <= SMALL and slab is not None and not slab.whole

    @contextlib.contextmanager
    def expecting(self, size: int) -> Iterator[None]:
        """Add `size` to `held` during the `with` block, to reserve a request's bytes until `add` counts the allocation.

        A signal handler or a finalizer that allocates meanwhile then cannot use this part of the cap.
        """
        before = self._expected
        try:
            self._expected = before + round_up(size)
            yield
        finally:
            self._expected = before  # changes nothing if an interruption came before `size` was added

    def held(self) -> int:
        return self._large + self._small + self.queued + self._expected

    def counted(self) -> int:
        """`held` without the bytes that `expecting` adds."""
        return self._large + self._small + self.queued

    def returned_by(self, pieces: Iterable[tuple[int, int]]) -> int:
        """The bytes that the driver gets back if these allocations are freed. The driver gets a slab back only with the
        slab's last piece."""
        found = 0
        small: dict[int, int] = {}
        for address, size in pieces:
            slab = self._slabs.get(address // GRANULE)
            if size > SMALL:
                found += round_up(size)
            elif slab is None:
                continue  # a signal handler has freed this allocation meanwhile
            elif slab.whole:
                small[address // GRANULE] = small.get(address // GRANULE, 0) + 1
            else:
                found += round_up(size, UNIT)
        for place, count in small.items():
            if (slab := self._slabs.get(place)) is not None and count == slab.pieces:
                found += GRANULE
        return found

    def groups(self, blocks: Iterable[tuple[int, int]]) -> list[tuple[int, list[int]]]:
        """Group allocations by the page range or slab that they occupy. Returns each group's bytes and addresses.

        Omits the pieces of a slab that other code opened or that has pieces outside `blocks`, because freeing the
        omitted pieces returns no memory to the driver.
        """
        found: list[tuple[int, list[int]]] = []
        small: dict[int, list[int]] = {}
        for address, size in blocks:
            if size > SMALL:
                found.append((round_up(size), [address]))
            else:
                small.setdefault(address // GRANULE, []).append(address)
        for place, inside in small.items():
            slab = self._slabs.get(place)
            if slab is not None and slab.whole and slab.pieces == len(inside):
                found.append((GRANULE, inside))
        return found

    def _change(self, slab: _OwnPieces, address: int, pieces: int, size: int, queued: int = 0) -> None:
        """Replace the slab's figures, and update the running sums that `held` returns. Removes the first entry of
        `changes`."""
        number, slabs, changes = address // GRANULE, self._slabs, self.changes
        after = _OwnPieces(slab.whole, slab.pieces + pieces, slab.bytes + _units(size))
        counted = (after.counted if after.pieces else 0) - (slab.counted if slab.pieces else 0)
        slabs[number] = after
        self.queued -= queued
        self._small += counted
        changes.popleft()
        if not after.pieces:
            del slabs[number]
        self._shared.count(address, counted)


def _units(size: int) -> int:
    """`size` rounded away from zero to whole units, as the driver rounds a piece."""
    return round_up(size, UNIT) if size >= 0 else -round_up(-size, UNIT)


def fewest_blocks(sizes: Sequence[int], needed: int) -> list[int] | None:
    """Indices of blocks that together have at least `needed` bytes, with no superfluous block; None if all together
    have fewer.

    Minimises the number of blocks rather than the bytes, because each free costs time. Selects the largest blocks, then
    the smallest block that completes the sum. The excess over `needed` is less than the smallest selected block.
    """
    if sum(sizes) < needed:
        return None
    rising = sorted(range(len(sizes)), key=sizes.__getitem__)
    chosen: list[int] = []
    missing = needed
    while missing > 0:
        enough = bisect_left(rising, missing, key=sizes.__getitem__)
        chosen.append(rising.pop(min(enough, len(rising) - 1)))
        missing -= sizes[chosen[-1]]
    return chosen


def addresses_to_free(pages: DriverPages, blocks: Sequence[tuple[int, int]], needed: int) -> frozenset[int] | None:
    """The addresses of `blocks` (address and size, all idle) to free so that the driver gets `needed` bytes back.

    None if freeing all blocks would return fewer bytes. The pieces of a slab are freed together or not at all.
    """
    groups = pages.groups(blocks)
    chosen = fewest_blocks([size for size, _ in groups], needed)
    return None if chosen is None else frozenset(address for one in chosen for address in groups[one][1])


def returned_by_trim(reserved: int, used: int) -> int | None:
    """The bytes that a trim returns from a driver pool with `reserved` bytes, `used` of them in live blocks.

    The driver returns only whole chunks of 32 MiB (`PIECE`) without a live block, and does not report which chunks
    those are. So the result is known only if no block is live, or if the idle bytes are less than a chunk; else None.
    """
    idle = reserved - used
    if used == 0:
        return reserved
    return 0 if idle < PIECE else None
