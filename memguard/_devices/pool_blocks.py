"""Blocks of a memory pool, for frameworks that know no streams.

A block may be used on every stream as soon as it is had, as after `cuMemAlloc`, and its free comes after all work of
its context, as `cuMemFree`'s does. They are allocated and freed on a stream of memguard's own, which nothing else waits
for. The pool may give a block that another framework has freed on its own stream, and then makes this stream wait for
that work: so the host waits for this stream, which has nothing else to do. A free is queued behind an event of the
whole context (`cuCtxRecordEvent`).
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
"""memguard's stream in each context that needed one, by the context's handle. It lives as long as that."""


class Held:
    """A block of a pool. Who has this has the block: it gives it back when it dies, or with `give`, once.

    So an interruption at any point loses none. `address` is 0 while there is none, and `answers` has the driver's
    answer to its free.
    """

    address = 0
    size = 0

    def __init__(self, blocks: PoolBlocks) -> None:
        self._blocks = blocks
        self.answers: list[int] = []

    @property
    def there(self) -> bool:
        """Whether it was not freed yet."""
        return self.address != 0 and not self.answers

    def give(self) -> None:
        if self.there:
            self._blocks.give(self)

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.there and not ends():
            self._blocks.give(self)


class PoolBlocks:
    """What one framework has of a GPU's pool. Any thread, also within finalizers: there is no lock."""

    def __init__(self, pool: CappedPool | DefaultPool, ordinal: int, context: int, cap: PoolCap | None = None) -> None:
        """`context` is the handle of the GPU's primary one, `cap` that of a pool which the driver cannot cap."""
        self._pool, self._ordinal, self.context, self._cap = pool, ordinal, context, cap
        self._live: dict[int, int] = {}
        self._waiting: deque[Held] = deque()

    def in_use(self) -> int:
        """Bytes of the blocks that were not given back, in one call of C."""
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
        """Give a block back. One that cannot be freed now, as a CUDA graph is being captured, goes with the next."""
        self._waiting.append(held)
        self._settle()

    def wait(self) -> None:
        """Wait until what was given back is idle in the pool, so that a trim finds it."""
        self._settle()
        if self.context in _streams:
            with contexts.entered(self.context), contexts.beside_captures():
                contexts.driver().cuStreamSynchronize(_streams[self.context])

    def _settle(self) -> None:
        # While the process is off its GPUs, all frees wait: the next block that is taken or given back settles them.
        cuda = contexts.loaded() if suspension.now is None else None
        while self._waiting and cuda is not None:  # None in a forked child, where CUDA cannot be used
            try:
                held = self._waiting.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                if held.there:
                    self._free(cuda, held)
            except (DeviceError, Suspended) as error:
                _log.debug("a block of the shared pool is freed later: %s", error)
                self._waiting.appendleft(held)
                return
            except BaseException:
                self._waiting.appendleft(held)  # what it has still is freed with the next
                raise

    def _free(self, cuda: DriverAPI, held: Held) -> None:
        with contexts.entered(self.context), contexts.beside_captures():
            stream = self._stream()
            with streams.Mark(self._ordinal, None) as mark:
                mark.before(stream)
            self._live.pop(held.address, None)  # before: after it the address may be another block's
            # One call, so that what the driver answers is noted at once. An error means that its context was reset.
            held.answers.extend(map(cuda.cuMemFreeAsync, (held.address,), (stream,)))

    def _stream(self) -> int:
        """In its context, which is current."""
        known = _streams.get(self.context)
        if known is None:
            made = c_void_p()
            check("cuStreamCreate", contexts.driver().cuStreamCreate(made, _NON_BLOCKING))
            known = _streams.setdefault(self.context, made.value or 0)
        return known


def forget(context: int) -> None:
    """The context ends, and its stream with it: the next one may have its handle."""
    _streams.pop(context, None)
