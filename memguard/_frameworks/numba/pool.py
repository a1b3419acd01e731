"""A pool of the driver allocations ("blocks") of freed Numba arrays, which reuses a block once no work uses it.

Numba does not record which streams use an array; its `cuMemFree` is safe because it synchronises the GPU. This pool
records CUDA events (`Mark`) instead: Numba carries out pending frees in batches (`_PendingDeallocs.clear`), and after
each batch the pool records one set of events for all blocks of the batch. A block can be reused once these events have
completed. If the GPU has no unfinished work, the pool records no events. `watch.py` keeps a block out of the pool if
work on it may run on a stream that these events do not cover.

A finalizer, a signal handler, another thread's free or a Ctrl-C may interrupt any call. So only a block's `state` is
authoritative. Code compares and changes a state with no call in between, because CPython with a GIL runs other code
only at calls. The queues are hints. A block from a queue is used only if the block's state permits, and `idle` also
contains blocks that an interruption removed from a queue.

The pools of RMM and CuPy do not fit, because their callers must name the stream that uses a block: RMM's pool orders
the reuse of blocks by stream, and CuPy's pool has an arena for each stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from memguard.errors import DeviceError

# The states of a block. A pooled block's state is FREED, then its `Batch`, then READY.
NEW, USED, PENDING, FREED, READY, BACK = "new", "used", "pending", "freed", "ready", "back"
"""NEW: being allocated. USED: an array owns the block. PENDING: Numba has not yet carried out the free. FREED: in the
pool, without recorded events. READY: in the pool, and no work uses the block. BACK: freed by the driver, or being
freed."""


class Mark(Protocol):
    """A recorded CUDA event, which completes once the GPU has done all work queued before the event. The
    implementation is `memguard._devices.streams.Mark`."""

    def passed(self) -> bool: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class Block:
    """One driver allocation of `size` bytes. `requested`: the bytes of the array that uses the block; 0 without one.

    The `size` of a block that may enter the pool (`pooled`) is rounded up to the driver's units (`driver_pages.whole`).
    Such a block serves only requests that round up to the same size, so that reuse wastes no memory. `pointer` is
    Numba's pointer object, None before the allocation; `buffer` is the driver's id of the allocation, if known.
    `exported`: code outside Numba has the address, and may use the memory on any stream.
    """

    __slots__ = ("address", "buffer", "exported", "pointer", "pooled", "requested", "size", "state")

    def __init__(self, size: int, pooled: bool) -> None:
        self.size, self.pooled = size, pooled
        self.address = self.requested = 0
        self.exported = False
        self.pointer: Any = None
        self.buffer: int | None = None
        self.state: object = NEW


class BlockOwner(Protocol):
    """An array's memory object. Once the block is assigned to `_block`, this object owns the block and frees it."""

    _block: Block | None
    _freed: bool


class Batch:
    """Blocks that can be reused once the same events (`marks`) have completed."""

    __slots__ = ("blocks", "marks")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.marks: Sequence[Mark] = ()

    def close(self) -> None:
        for mark in self.marks:
            mark.close()


class Pool:
    """The pool of one context. Finalizers may call `put` and `mark`, on any thread at any time. Callers of all other
    methods hold the lock of the GPU's `ManagerGroup`.

    The callback `record` records CUDA events after all work queued so far and returns them; empty if that work is
    complete, None if CUDA cannot record events at present.
    """

    def __init__(self, record: Callable[[], Sequence[Mark] | None]) -> None:
        self.idle: dict[Block, None] = {}
        """All blocks of the pool, in any state, as keys."""
        self.unmarked: deque[Block] = deque()
        self._record = record
        self._marked: deque[Batch] = deque()
        self._ready: dict[int, list[Block]] = {}

    def put(self, block: Block) -> None:
        """Add a freed block. The block can be reused once the events of the next `mark` call have completed."""
        block.state = FREED
        self.idle[block] = None
        self.unmarked.append(block)

    def mark(self) -> None:
        """Record CUDA events for the blocks added since the last call. If CUDA cannot record events, the next call
        includes these blocks."""
        batch = Batch()
        try:
            try:  # noqa: SIM105 (`suppress` costs more)
                batch.blocks.extend(iter(self.unmarked.popleft, None))  # one C call: no interruption loses a block
            except IndexError:
                pass
            if not batch.blocks:
                return
            for block in batch.blocks:
                if block.state is FREED:  # else another thread already records events for the block
                    block.state = batch
            marks = self._record()
            if marks is not None:
                batch.marks = marks
                self._marked.append(batch)
                return
        except BaseException:
            self._put_again(batch)
            raise
        self._put_again(batch)

    def _put_again(self, batch: Batch) -> None:
        for block in batch.blocks:
            if block.state is batch:
                block.state = FREED
            if block.state is FREED:
                self.unmarked.append(block)

    def take(self, size: int, owner: BlockOwner) -> Block | None:
        """Assign to `owner` a block of this size that no work uses. Returns the block, or None if there is none."""
        queue = self._ready.get(size)
        collected = False
        while True:
            try:
                while queue:
                    block = queue[-1]
                    if block.state is READY:
                        block.state = USED
                        owner._block = block
                        del self.idle[block]
                        queue.pop()
                        return block
                    queue.pop()
            except IndexError:  # a signal handler removed the queue's last block
                pass
            if collected or not self._marked:
                return None
            self._collect()
            queue, collected = self._ready.get(size), True

    def wait(self, size: int, owner: BlockOwner) -> Block | None:
        """Like `take`, but if unfinished work uses every block of this size, wait until a block can be reused."""
        if self.unmarked:
            self.mark()
        block = self.take(size, owner)
        while block is None and any(
            one.size == size and one.state is batch for batch in self._marked.copy() for one in batch.blocks
        ):
            self._collect(wait=True)
            block = self.take(size, owner)
        return block

    def drain(self) -> Iterator[tuple[Block, object]]:
        """Yield all blocks with their states. The caller frees them; `cuMemFree` waits for unfinished work.

        The caller frees a block only if the block still has the yielded state, which an interruption may have changed.
        """
        for block in list(self.idle):
            state = block.state
            if block in self.idle:
                yield block, state
        if self.idle:  # an interruption added blocks: keep the queues
            return
        self._ready.clear()
        try:
            while True:
                self._marked.popleft().close()
        except IndexError:
            pass

    def tidy(self) -> None:
        """Remove from the queues the blocks that the driver has freed. `take` would remove them later."""
        for queue in list(self._ready.values()):
            queue[:] = [block for block in queue if block.state is READY]

    def _collect(self, wait: bool = False) -> None:
        """Set the state READY for blocks whose events have completed. With `wait`, first wait for the oldest batch."""
        while True:
            try:
                batch = self._marked[0]
            except IndexError:
                return
            try:
                if wait:
                    for mark in batch.marks:
                        mark.wait()
                    wait = False
                elif batch.marks and not all(mark.passed() for mark in batch.marks):
                    return
            except DeviceError:  # do not reuse the blocks; Numba's next call raises the error
                pass
            else:
                for block in batch.blocks:
                    queue = self._ready.get(block.size)
                    if queue is None:
                        queue = self._ready.setdefault(block.size, [])
                    if block.state is batch:
                        block.state = READY
                        queue.append(block)
            try:
                if self._marked[0] is batch:  # a signal handler may have removed the batch
                    self._marked.popleft()
                    batch.close()
            except IndexError:
                return
