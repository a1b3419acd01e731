"""Allocate blocks of a driver memory pool for frameworks that do not use streams.

A block is usable on every stream as soon as it is allocated, as after `cuMemAlloc`. Its free follows all work of its
context, as with `cuMemFree`. memguard allocates and frees on a stream of its own, on which no other stream waits. The
pool may reuse a block that another framework freed on its own stream; the driver then makes memguard's stream wait for
that stream's work. So an allocation synchronises the host with memguard's stream, which has no other work. A free is
queued behind an event of the whole context (`cuCtxRecordEvent`).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from ctypes import c_uint64, c_void_p

from memguard._base.logs import log as _log
from memguard._devices import contexts, streams, suspension
from memguard._devices.libcuda import DriverAPI, check
from memguard._devices.pool_cap import PoolCap
from memguard._devices.pools import CappedPool, DefaultPool
from memguard.errors import DeviceError, Suspended

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_streams: dict[int, int] = {}
"""memguard's stream in each context, by the context's handle. Created on first use, alive as long as the context."""


class Held:
    """Owns a block of a pool: frees it once, by `give` or when this object dies.

    So an interruption at any point leaks no block. `address` is 0 before the allocation. `answers` contains the
    driver's result of the free.
    """

    address = 0
    size = 0

    def __init__(self, blocks: PoolBlocks) -> None:
        self._blocks = blocks
        self.answers: list[int] = []

    @property
    def there(self) -> bool:
        """Whether the block is allocated and not freed yet."""
        return self.address != 0 and not self.answers

    def give(self) -> None:
        if self.there:
            self._blocks.give(self)

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.there and not ends():
            self._blocks.give(self)


class PoolBlocks:
    """The blocks that one framework allocated from a GPU's pool. Any thread, also within finalizers: takes no lock."""

    def __init__(self, pool: CappedPool | DefaultPool, ordinal: int, context: int, cap: PoolCap | None = None) -> None:
        """`context` is the handle of the GPU's primary context, `cap` the cap of a pool that the driver cannot cap."""
        self._pool, self._ordinal, self.context, self._cap = pool, ordinal, context, cap
        self._live: dict[int, int] = {}
        self._waiting: deque[Held] = deque()

    def in_use(self) -> int:
        """Bytes of the blocks not given back. One C call, hence atomic."""
        return sum(self._live.values())

    def take(self, size: int) -> Held | None:
        """A block of `size` bytes; None if neither the pool nor the GPU has it. DeviceError if CUDA fails."""
        cuda, found, held = contexts.driver(), c_uint64(), Held(self)
        if self._waiting:
            self._settle()
        claim = None
        if self._cap is not None and (claim := self._cap.take(size)) is None:
            return None
        try:
            with contexts.entered(self.context), contexts.beside_captures():
                stream = self._stream()
                code = cuda.cuMemAllocFromPoolAsync(found, size, self._pool.handle, stream)
                if code == _OUT_OF_MEMORY:
                    return None
                check("cuMemAllocFromPoolAsync", code)
                held.size, held.address = size, found.value
                self._live[found.value] = size
                if claim is not None:
                    claim.end()
                check("cuStreamSynchronize", cuda.cuStreamSynchronize(stream))
        except BaseException:
            if found.value and not held.address:
                held.size, held.address = size, found.value
                self._live[found.value] = size
            raise
        finally:
            if claim is not None:
                claim.end()
        return held

    def give(self, held: Held) -> None:
        """Free a block. A block that cannot be freed during a CUDA graph capture is freed with the next one."""
        self._waiting.append(held)
        self._settle()

    def wait(self) -> None:
        """Wait until the freed blocks are idle in the pool, so that a trim can release them."""
        self._settle()
        if self.context in _streams:
            with contexts.entered(self.context), contexts.beside_captures():
                contexts.driver().cuStreamSynchronize(_streams[self.context])

    def _settle(self) -> None:
        # While the process is off its GPUs, frees are deferred: the next allocation or free carries them out.
        cuda = contexts.loaded() if suspension.now is None else None
        while self._waiting and cuda is not None:  # None in a forked child, which cannot use CUDA
            try:
                held = self._waiting.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                if held.there:
                    self._free(cuda, held)
            except (DeviceError, Suspended) as error:
                _log.debug("a block of the shared pool is freed later: %s", error)
                self._waiting.appendleft(held)
                return
            except BaseException:
                self._waiting.appendleft(held)  # freed with the next block, unless it is freed already
                raise

    def _free(self, cuda: DriverAPI, held: Held) -> None:
        with contexts.entered(self.context), contexts.beside_captures():
            stream = self._stream()
            with streams.Mark(self._ordinal, None) as mark:
                mark.before(stream)
            self._live.pop(held.address, None)  # before the free: afterwards another block may get the address
            # One C call records the driver's result atomically. An error means that the context was reset.
            held.answers.extend(map(cuda.cuMemFreeAsync, (held.address,), (stream,)))

    def _stream(self) -> int:
        """memguard's stream in this context, which callers have made current."""
        known = _streams.get(self.context)
        if known is None:
            made = c_void_p()
            check("cuStreamCreate", contexts.driver().cuStreamCreate(made, _NON_BLOCKING))
            known = _streams.setdefault(self.context, made.value or 0)
        return known


def forget(context: int) -> None:
    """Drop the stream of a context that ends: the next context may have its handle."""
    _streams.pop(context, None)
