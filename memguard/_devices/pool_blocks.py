"""Allocate blocks of a driver memory pool for frameworks without streams, under a cap if the pool itself has none.

A block is usable on every stream as soon as it is allocated, as after `cuMemAlloc`. The free takes effect after all
work of the context, as with `cuMemFree`. memguard allocates and frees on its own non-blocking stream, with which the
default stream does not synchronise. The pool may reuse a block that another framework freed on its own stream; the
driver then makes memguard's stream wait for that stream's work. So an allocation synchronises the host with
memguard's stream, which has no other work. A free is queued behind an event of the whole context
(`cuCtxRecordEvent`).

The driver cannot cap the device's default pool, so allocators that use this pool check `PoolCap` before each request.
Another thread may allocate between the check and the allocation. So each request is registered as a claim before the
check, and counts for the other threads until it is allocated or refused. Requests take a lock, and so run one after the
other, only if concurrent requests fit below the cap singly but not together.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from ctypes import c_uint64, c_void_p

from memguard._base.locks import LockedRunner
from memguard._base.logs import log as _log
from memguard._devices import contexts, streams, suspension
from memguard._devices.libcuda import DriverAPI, check
from memguard._devices.pools import CappedPool, DefaultPool
from memguard.errors import DeviceError, Suspended

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_streams: dict[int, int] = {}
"""memguard's stream in each context, by the context's handle. Created on first use, alive as long as the context."""
_PATIENCE = 2.0
"""Seconds to wait for the allocations of other threads, which take microseconds, before a request is refused."""
_PAUSE = 0.0005


class PoolBlock:
    """Owns a block of a pool: frees it once, by `give` or when this object dies.

    So an interruption at any point leaks no block. `address` is 0 before the allocation. `answers` is empty before the
    free, and then contains the driver's result.
    """

    address = 0
    size = 0

    def __init__(self, blocks: PoolBlocks) -> None:
        self._blocks = blocks
        self.answers: list[int] = []

    @property
    def there(self) -> bool:
        """True if the block is allocated and not freed yet."""
        return self.address != 0 and not self.answers

    def give(self) -> None:
        if self.there:
            self._blocks.give(self)

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.there and not ends():
            self._blocks.give(self)


class PoolBlocks:
    """The blocks that one framework allocated from a GPU's pool. Callable on any thread and in finalizers: takes no
    lock."""

    def __init__(self, pool: CappedPool | DefaultPool, ordinal: int, context: int, cap: PoolCap | None = None) -> None:
        """`context` is the handle of the GPU's primary context, `cap` the cap of a pool that the driver cannot cap."""
        self._pool, self._ordinal, self.context, self._cap = pool, ordinal, context, cap
        self._live: dict[int, int] = {}
        self._waiting: deque[PoolBlock] = deque()

    def in_use(self) -> int:
        """Bytes of the blocks that are not freed. One C call, so it is atomic."""
        return sum(self._live.values())

    def take(self, size: int) -> PoolBlock | None:
        """A block of `size` bytes; None if the pool and the GPU have too little memory. Raises DeviceError if CUDA
        fails."""
        cuda, found, held = contexts.driver(), c_uint64(), PoolBlock(self)
        if self._waiting:
            self._settle()
        claim = None
        if self._cap is not None and (claim := self._cap.take(size)) is None:
            return None
        try:
            with contexts.entered(self.context), contexts.capture_safe():
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

    def give(self, held: PoolBlock) -> None:
        """Free a block. A block that cannot be freed during a CUDA graph capture is freed with the next block."""
        self._waiting.append(held)
        self._settle()

    def wait(self) -> None:
        """Wait until the freed blocks are idle in the pool, so that a trim can release them."""
        self._settle()
        if self.context in _streams:
            with contexts.entered(self.context), contexts.capture_safe():
                contexts.driver().cuStreamSynchronize(_streams[self.context])

    def _settle(self) -> None:
        # While the process is suspended, frees are deferred: the next allocation or free after the resume runs them.
        cuda = contexts.loaded() if suspension.now is None else None
        while self._waiting and cuda is not None:  # `cuda` is None in a forked child, which cannot use CUDA
            try:
                held = self._waiting.popleft()
            except IndexError:  # another thread took the last block
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

    def _free(self, cuda: DriverAPI, held: PoolBlock) -> None:
        with contexts.entered(self.context), contexts.capture_safe():
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
    """Drop the stream of a context that ends, because a later context may reuse the handle."""
    _streams.pop(context, None)


class Claim:
    """Bytes that a thread is about to allocate. `PoolCap` counts them as used until `end`, or until this object dies.

    So an interruption leaks no claim.
    """

    _claims: dict[tuple[int, int], int] | None = None

    def __init__(self, claims: dict[tuple[int, int], int], size: int) -> None:
        self._key, self._claims = (threading.get_ident(), id(self)), claims
        claims[self._key] = size

    def end(self) -> None:
        """Remove the claim after the bytes are allocated or refused."""
        if self._claims is not None:
            self._claims.pop(self._key, None)

    def __del__(self) -> None:
        if self._claims is not None:
            self._claims.pop(self._key, None)


class PoolCap:
    """Limits a pool to `most` bytes in use, for allocators that call `take`. Callable on any thread and in finalizers.

    `used` reads the pool's bytes in use, including those of other allocators.
    """

    def __init__(self, used: Callable[[], int], most: int) -> None:
        self._used, self._most = used, most
        self._claims: dict[tuple[int, int], int] = {}
        self._locked = LockedRunner()

    def take(self, size: int) -> Claim | None:
        """Claim `size` bytes for an allocation; None if the cap forbids the request. The caller ends the claim after
        the allocation."""
        claim = Claim(self._claims, size)
        # Claims are read before `used`, so that another thread's allocation in between counts in at least one of them.
        claimed = sum(self._claims.values())
        used = self._used()
        if used + claimed <= self._most:
            return claim
        claim.end()
        if used + size > self._most or self._locked.held_here:
            return None
        found = self._locked.run(self._after_others, _PATIENCE, size)
        return None if found is None else found[0]

    def _after_others(self, size: int) -> Claim | None:
        """Retry the claim while it exceeds the cap only because of other threads' claims. None if the request alone
        exceeds the cap, or after `_PATIENCE`."""
        here, until = threading.get_ident(), time.monotonic() + _PATIENCE
        while True:
            claim = Claim(self._claims, size)
            claimed = sum(self._claims.values())
            used = self._used()
            if used + claimed <= self._most:
                return claim
            claim.end()
            # `mine`: this finalizer interrupted a request of the same thread, whose claim cannot end meanwhile
            mine = any(thread == here for thread, _ in list(self._claims))
            if used + size > self._most or mine or time.monotonic() >= until:
                return None
            time.sleep(_PAUSE)

    def forked(self) -> None:
        """In a forked child, drop the claims: the parent's threads do not exist there."""
        self._claims.clear()
        self._locked = LockedRunner()
