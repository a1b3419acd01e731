"""A pool of blocks that Numba has freed. A block is reused after all work that may use it is done.

Numba does not record which streams use an array; `cuMemFree` is safe because it synchronises the GPU. This pool records
CUDA events instead (`Mark`): right after each flush of Numba's pending frees it records one set of events for all
blocks of the flush. A block is reused once these events have completed. If all work is done right after the flush, no
event is recorded. `watch.py` excludes a block from the pool if work on it may run on a stream that these events do not
cover.

A finalizer, a signal handler, another thread's free or a Ctrl-C may interrupt any call. So only a block's `state` is
authoritative. Code compares and changes a state with no call in between, because CPython with a GIL runs other code
only at calls. The queues are hints: a block from a queue is used only if its state allows it, and `idle` also contains
blocks that a queue has lost.

The pools of RMM and CuPy do not fit: RMM's orders reuse by the streams that its callers name, and CuPy's has an arena
for each stream. Both need callers that know the streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from memguard.errors import DeviceError

# The states of a block. A pooled block is FREED, then has its `Batch` as state, then is READY.
NEW, USED, PENDING, FREED, READY, BACK = "new", "used", "pending", "freed", "ready", "back"
"""NEW: being allocated. USED: owned by an array. PENDING: Numba has not carried out its free. FREED: no event is
recorded for it yet. READY: no work uses it. BACK: freed by the driver, or being freed."""


class Mark(Protocol):
    """A recorded CUDA event. It completes once the GPU has done all work queued before it:
    `memguard._devices.streams.Mark`."""

    def passed(self) -> bool: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class Block:
    """One driver allocation of `size` bytes. Its array requested `requested` bytes (0: no array).

    In the pool `size` is in whole driver units (`driver_pages.whole`), and a block serves only requests that round up
    to its size: so a reused block wastes nothing of the cap. `pointer` is Numba's own object, None before the
    allocation; `buffer` is the driver's id of this allocation, if known. `pooled`: the block may enter the pool.
    `exported`: code outside Numba knows its address, and may use it on any stream.
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
    """The object that will own a block. From the assignment of `_block` on, it owns and frees the block."""

    _block: Block | None
    _freed: bool


class Batch:
    """Blocks that wait for the same events."""

    __slots__ = ("blocks", "marks")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.marks: Sequence[Mark] = ()

    def close(self) -> None:
        for mark in self.marks:
            mark.close()


class Pool:
    """The pool of one context. Finalizers may call `put` and `mark`, on any thread at any time. Callers of all other
    methods hold the GPU's lock.

    `record` records CUDA events that cover all work queued so far, and returns them. It returns an empty sequence if
    that work is done, and None if CUDA cannot record events now.
    """

    def __init__(self, record: Callable[[], Sequence[Mark] | None]) -> None:
        self.idle: dict[Block, None] = {}
        """All blocks of the pool, in any state."""
        self.unmarked: deque[Block] = deque()
        self._record = record
        self._marked: deque[Batch] = deque()
        self._ready: dict[int, list[Block]] = {}

    def put(self, block: Block) -> None:
        """Add a freed block. It is reusable once the events that `mark` records for it have completed."""
        block.state = FREED
        self.idle[block] = None
        self.unmarked.append(block)

    def mark(self) -> None:
        """Record CUDA events for the blocks added since the last call. If CUDA cannot record events now, the next call
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
                if block.state is FREED:  # another thread may already record events for it
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
        """Assign to `owner` a block of this size whose work is done; return None if there is none."""
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
            except IndexError:  # a signal handler removed the last block
                pass
            if collected or not self._marked:
                return None
            self._collect()
            queue, collected = self._ready.get(size), True

    def wait(self, size: int, owner: BlockOwner) -> Block | None:
        """Like `take`, but waits for unfinished work on a block of this size."""
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
        """Yield all blocks with their states, to be freed. The driver waits for their unfinished work.

        The caller frees a block only if its state is unchanged, as an interruption may have changed it.
        """
        for block in list(self.idle):
            state = block.state
            if block in self.idle:
                yield block, state
        if self.idle:  # an interruption added blocks
            return
        self._ready.clear()
        try:
            while True:
                self._marked.popleft().close()
        except IndexError:
            pass

    def tidy(self) -> None:
        """Remove freed blocks from the queues. Otherwise the next request of their size removes them."""
        for queue in list(self._ready.values()):
            queue[:] = [block for block in queue if block.state is READY]

    def _collect(self, wait: bool = False) -> None:
        """Make blocks READY whose work is done. With `wait`, first wait for the events of the oldest batch."""
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
            except DeviceError:  # the blocks are never reused; Numba's next call raises the error
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
                if self._marked[0] is batch:  # false if a signal handler allocated and closed it
                    self._marked.popleft()
                    batch.close()
            except IndexError:
                return
