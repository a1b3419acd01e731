"""Models of the frameworks' own allocators: rounding, caching, splitting, coalescing and refusing.

The models follow the sources of PyTorch's CUDACachingAllocator, the BFCAllocator of TensorFlow and XLA, and PyCUDA's
memory pool, and were checked against figures measured on an H200. `driver_allocators.py` has the models of CuPy and
Numba. The models count bytes and use no memory. They omit streams, garbage-collection thresholds, expandable segments,
private pools, and the 10 s of retries of TensorFlow and JAX. They are not thread-safe, so callers hold a lock.

`Start` has the parameters with which a framework creates its allocator on a GPU. The functions `*_footprint` compute
the driver bytes of one request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from itertools import count
from typing import NamedTuple

from memguard._base.types import Device
from memguard._base.units import GIB, KIB, MIB, format_size, round_down, round_up
from memguard._devices.simulated import SimulatedOutOfMemory
from memguard._frameworks.driver_pages import SMALL
from memguard._frameworks.simulated.arena import Arena, Chunk


class AllocationRefused(Exception):
    """The allocator cannot serve a request. Sizes are bytes. `driver` is the driver's error if the GPU was full."""

    def __init__(self, requested: int, held: int, cap: int | None, driver: SimulatedOutOfMemory | None) -> None:
        self.requested, self.held, self.cap, self.driver = requested, held, cap, driver
        limit = "no cap" if cap is None else f"cap {format_size(cap)}"
        why = f"; {driver}" if driver else ""
        super().__init__(f"{format_size(requested)} refused: held {format_size(held)}, {limit}{why}")


class Allocator(ABC):
    """One framework's allocator on one device. `take` and `give` allocate and free driver memory, in bytes.

    `held` is the bytes taken from the driver, `in_use` the bytes of live blocks by the framework's own count. `cap` may
    change at any time. A lower cap frees nothing.
    """

    def __init__(self, take: Callable[[int], None], give: Callable[[int], None], cap: int | None = None) -> None:
        self._take, self._give, self.cap = take, give, cap
        self.held = self.in_use = self.peak_held = self.peak_in_use = 0
        self._ids = count(1)
        self._driver: SimulatedOutOfMemory | None = None

    def allocate(self, nbytes: int, *, exact: bool = False) -> int:
        """Allocate; returns the block's id. Raises AllocationRefused if the cap or the driver forbids the request.

        `exact`: `nbytes` was recorded from a real allocator and includes the slack of its block. So this allocator
        splits larger blocks at exactly this size.
        """
        if nbytes < 1:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        self._driver = None
        block = next(self._ids)
        self.in_use += self._allocate(block, nbytes, exact)
        self.peak_in_use = max(self.peak_in_use, self.in_use)
        return block

    def free(self, block: int) -> None:
        """Free a block. Raises ValueError if the id is not live (freed twice, or never allocated)."""
        try:
            self.in_use -= self._free(block)
        except KeyError:
            raise ValueError(f"block {block} is not allocated (freed twice?)") from None

    @property
    @abstractmethod
    def reclaimable(self) -> int:
        """Bytes that `trim` would release."""

    @abstractmethod
    def trim(self) -> int:
        """Release cached memory to the driver. Returns the released bytes."""

    def trim_partly(self, needed: int) -> None:
        """Release about `needed` bytes if the allocator can trim partially; otherwise call `trim`."""
        self.trim()

    @abstractmethod
    def _allocate(self, block: int, nbytes: int, exact: bool) -> int:
        """Serve the request; returns the bytes to add to `in_use`."""

    @abstractmethod
    def _free(self, block: int) -> int:
        """Free the block; returns the bytes to subtract from `in_use`. Raises KeyError if the block is not live."""

    def _grow(self, nbytes: int) -> bool:
        """Take `nbytes` from the driver and add them to `held`. False if `held` would exceed the cap or the driver
        refuses."""
        if not self._below_cap(nbytes) or not self._draw(nbytes):
            return False
        self._count(nbytes)
        return True

    def _below_cap(self, nbytes: int) -> bool:
        return self.cap is None or self.held + nbytes <= self.cap

    def _draw(self, nbytes: int) -> bool:
        """Take bytes from the driver. False if the driver refuses."""
        try:
            self._take(nbytes)
        except SimulatedOutOfMemory as error:
            self._driver = error.with_traceback(None)  # a stored traceback would keep its frames alive
            return False
        return True

    def _count(self, nbytes: int) -> None:
        self.held += nbytes
        self.peak_held = max(self.peak_held, self.held)

    def _shrink(self, nbytes: int) -> None:
        self._give(nbytes)
        self.held -= nbytes

    def _refused(self, nbytes: int) -> AllocationRefused:
        return AllocationRefused(nbytes, self.held, self.cap, self._driver)


class TorchCachingAllocator(Allocator):
    """PyTorch's native caching allocator, one stream, default settings. The cap counts reserved (held) bytes."""

    SMALL, SEGMENT_BELOW = 1 * MIB, 10 * MIB
    SMALL_SEGMENT, LARGE_SEGMENT, ROUND_LARGE = 2 * MIB, 20 * MIB, 2 * MIB

    def __init__(self, take: Callable[[int], None], give: Callable[[int], None], cap: int | None = None) -> None:
        super().__init__(take, give, cap)
        self._small, self._large = Arena(), Arena()
        self._blocks: dict[int, tuple[Arena, Chunk]] = {}

    @classmethod
    def segment_size(cls, size: int) -> int:
        """The bytes of the driver allocation for a request of this rounded size."""
        if size <= cls.SMALL:
            return cls.SMALL_SEGMENT
        return cls.LARGE_SEGMENT if size < cls.SEGMENT_BELOW else round_up(size, cls.ROUND_LARGE)

    @property
    def reclaimable(self) -> int:
        return self._small.whole() + self._large.whole()

    def trim(self) -> int:
        """`torch.cuda.empty_cache()`."""
        freed = sum(chunk.size for arena in (self._small, self._large) for chunk in arena.drop_whole())
        if freed:
            self._shrink(freed)
        return freed

    def _allocate(self, block: int, nbytes: int, exact: bool) -> int:
        size = round_up(nbytes, 512)
        arena = self._small if size <= self.SMALL else self._large
        chunk = arena.fit(size)
        if chunk is None:
            segment = self.segment_size(size)
            if not self._grow(segment):
                self.trim()
                if not self._grow(segment):
                    raise self._refused(nbytes)
            arena.add(segment)
            chunk = arena.fit(size)
        assert chunk is not None
        rest = chunk.size - size
        split = exact or rest >= 512 if arena is self._small else exact or rest > self.SMALL
        self._blocks[block] = arena, arena.occupy(chunk, size if split else None)
        return chunk.size

    def _free(self, block: int) -> int:
        arena, chunk = self._blocks.pop(block)
        size = chunk.size
        arena.release(chunk)
        return size


class BFCAllocator(Allocator):
    """The BFC allocator of TensorFlow and of XLA. `cap` is its memory limit, set once and never changed.

    This allocator cannot be trimmed. TensorFlow's allocator releases wholly free regions by itself, only before it
    refuses a request (`collects`: TF_ENABLE_GPU_GARBAGE_COLLECTION, on by default). XLA's allocator never releases a
    region.
    """

    ALIGN, FIRST_REGION, MOST_SLACK = 256, 2 * MIB, 128 * MIB

    def __init__(
        self, take: Callable[[int], None], give: Callable[[int], None], cap: int, growth: bool, collects: bool = True
    ) -> None:
        super().__init__(take, give, cap)
        self.limit = cap
        self.growth, self.collects = growth, collects
        self._next_region = round_up(min(cap, self.FIRST_REGION) if growth else cap, self.ALIGN)
        self._backed_off = False
        self._arena = Arena()
        self._blocks: dict[int, Chunk] = {}

    @property
    def reclaimable(self) -> int:
        return 0

    def trim(self) -> int:
        return 0

    def _allocate(self, block: int, nbytes: int, exact: bool) -> int:
        size = round_up(nbytes, self.ALIGN)
        chunk = self._arena.fit(size)
        if chunk is None and (self._extend(size) or (self.collects and self._collect(size) and self._extend(size))):
            chunk = self._arena.fit(size)
        if chunk is None:
            raise self._refused(nbytes)
        split = exact or chunk.size >= 2 * size or chunk.size - size >= self.MOST_SLACK
        self._blocks[block] = self._arena.occupy(chunk, size if split else None)
        return chunk.size

    def _free(self, block: int) -> int:
        chunk = self._blocks.pop(block)
        size = chunk.size
        self._arena.release(chunk)
        return size

    def _extend(self, size: int) -> bool:
        available = round_down(self.limit - self.held, self.ALIGN)
        if size > available:
            return False
        doubled = False
        while self._next_region < size:
            self._next_region *= 2
            doubled = True
        region = min(self._next_region, available)
        took = self._grow(region)
        if not took and not self._backed_off:
            # The allocator tries smaller regions only once, at its first failure.
            self._backed_off = True
            while not took:
                smaller = round_up(region * 9 // 10, self.ALIGN)
                if smaller < size or smaller == region:
                    break
                region = smaller
                took = self._grow(region)
        if took:
            if not doubled:
                self._next_region *= 2
            self._arena.add(region)
        return took

    def _collect(self, size: int) -> bool:
        free = self._arena.whole()
        if not free or size > self.limit - self.held + free:
            return False
        self._shrink(sum(chunk.size for chunk in self._arena.drop_whole()))
        return True


def serving(sizes: Iterable[int], short: int) -> int:
    """The size of the cached block to free: the smallest block above `SMALL` that covers `short` bytes; else the
    largest block."""
    kept = sorted(sizes)
    return next((size for size in kept if size > SMALL and round_up(size) >= short), kept[-1])


def bin_number(nbytes: int) -> int:
    """PyCUDA's bin for a request: the exponent of two, and the four bits below the highest set bit."""
    exponent = max(nbytes.bit_length() - 1, 0)
    shifted = nbytes >> exponent - 4 if exponent >= 4 else nbytes << 4 - exponent
    return exponent << 4 | shifted & 15


def alloc_size(number: int) -> int:
    """The bytes that PyCUDA takes from the driver for a bin: the largest request of that bin.

    Measured: a request of 3 MiB + 1 bytes takes 3,276,799 bytes.
    """
    exponent, mantissa = number >> 4, 16 | number & 15
    if exponent < 4:
        return mantissa >> 4 - exponent
    return mantissa << exponent - 4 | (1 << exponent - 4) - 1


class PyCUDAPool(Allocator):
    """`pycuda.tools.DeviceMemoryPool` with memguard's check of the cap before each driver allocation.

    `held` counts the driver's pages for the pool's blocks. Measured: the driver rounds a block above 1 MiB up to 2 MiB,
    and packs smaller blocks into 2 MiB slabs (modelled without gaps).
    """

    SLAB_UP_TO = 1 * MIB

    def __init__(self, take: Callable[[int], None], give: Callable[[int], None], cap: int | None = None) -> None:
        super().__init__(take, give, cap)
        self._bins: dict[int, int] = {}  # the number of cached blocks, by bin
        self._blocks: dict[int, int] = {}
        self._slabs = 0  # bytes of all small blocks

    @property
    def reclaimable(self) -> int:
        kept = [(alloc_size(number), blocks) for number, blocks in self._bins.items()]
        small = sum(size * blocks for size, blocks in kept if size <= self.SLAB_UP_TO)
        large = sum(round_up(size) * blocks for size, blocks in kept if size > self.SLAB_UP_TO)
        return large + round_up(self._slabs) - round_up(self._slabs - small)

    def trim(self) -> int:
        """`free_held()`."""
        before = self.held
        while self._bins:
            self._free_kept(max(self._bins))
        return before - self.held

    def trim_partly(self, needed: int) -> None:
        """Free the fewest cached blocks that return `needed` bytes. Blocks in slabs come last, because the driver
        returns a slab only with its last block."""
        before = self.held
        while self._bins and (short := needed - before + self.held) > 0:
            self._free_kept(bin_number(serving(map(alloc_size, self._bins), short)))

    def _allocate(self, block: int, nbytes: int, exact: bool) -> int:
        number = bin_number(nbytes)
        if number in self._bins:
            self._drop(number)
        elif not self._miss(alloc_size(number)):
            raise self._refused(nbytes)
        self._blocks[block] = nbytes
        return nbytes

    def _free(self, block: int) -> int:
        nbytes = self._blocks.pop(block)
        number = bin_number(nbytes)
        self._bins[number] = self._bins.get(number, 0) + 1
        return nbytes

    def _miss(self, size: int) -> bool:
        if self.cap is not None and self.held + self._driver_bytes(size) > self.cap:
            self.trim()
        while not self._grow(self._driver_bytes(size)):
            if not self._bins:
                return False
            self._free_kept(max(self._bins))  # while the driver refuses, PyCUDA frees its largest cached block
        if size <= self.SLAB_UP_TO:
            self._slabs += size
        return True

    def _free_kept(self, number: int) -> None:
        self._drop(number)
        size = alloc_size(number)
        if size <= self.SLAB_UP_TO:
            self._slabs -= size
        self._shrink(self._driver_bytes(size))

    def _driver_bytes(self, size: int) -> int:
        """The bytes that the pool would take from the driver for one more block of `size` bytes."""
        if size > self.SLAB_UP_TO:
            return round_up(size)
        return round_up(self._slabs + size) - round_up(self._slabs)

    def _drop(self, number: int) -> None:
        self._bins[number] -= 1
        if not self._bins[number]:
            del self._bins[number]


def tensorflow_default_limit(free: int, architecture: str) -> int:
    """TensorFlow's default memory_limit: the free memory minus a reserve for the system.

    From TensorFlow's source; checked against a measurement: 141,350 MiB of an H200 for the whole process.
    """
    if free < 2 * GIB:
        system = 225 * MIB
    else:
        old = {"maxwell": 500, "pascal": 500, "volta": 1050, "turing": 1050, "ampere": 1536, "ada": 1536}
        system = old.get(architecture.lower(), 1800) * MIB
    return max(round_down(free - system, KIB), KIB)


def jax_default_limit(usable: int) -> int:
    """XLA's default limit for JAX: three quarters of CUDA's total.

    From XLA's source (CreateBFCAllocator) and JAX's documentation; not measured by this project.
    """
    return usable * 3 // 4


class Start(NamedTuple):
    """The parameters with which a framework creates its allocator on a GPU. `cap` is in bytes; None: no cap."""

    take: Callable[[int], None]
    give: Callable[[int], None]
    cap: int | None
    gpu: Device
    free: int
    growth: bool


def bfc(start: Start) -> Allocator:
    limit = start.cap
    if limit is None:
        limit = tensorflow_default_limit(start.free, start.gpu.architecture)
    return BFCAllocator(start.take, start.give, limit, start.growth)


def xla(start: Start) -> Allocator:  # under a cap memguard disables preallocation
    limit = jax_default_limit(start.gpu.usable) if start.cap is None else start.cap
    return BFCAllocator(start.take, start.give, limit, growth=start.cap is not None, collects=False)


def torch_footprint(size: int) -> int:
    return 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else round_up(size)


def bfc_footprint(size: int) -> int:
    return round_up(size, 256)


def pool_footprint(size: int) -> int:
    return round_up(alloc_size(bin_number(max(size, 1))))
