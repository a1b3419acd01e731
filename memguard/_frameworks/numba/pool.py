"""Blocks that Numba has freed, kept to be handed out again once all work that may use them is done.

Numba does not record which streams use an array; `cuMemFree` makes that safe by waiting for the GPU. Here an event
does: all blocks that one flush of Numba's pending frees brings share the marks that are recorded right after it, and
none is handed out before these are passed. No mark is needed if all work is found done right after the flush.
`watch.py` keeps away what the marks do not cover.

Any call may be interrupted: by a finalizer or a signal handler that allocates and frees, by another thread that frees,
by a Ctrl-C. So what is true of a block stands on the block, in `state`, and nowhere else. Code looks at a state and
changes it with no call in between: there nothing can come in, in any CPython with a GIL. The queues only say where to
look: a block that is found in one is used if its state says so, and `idle` has also those that a queue has lost.

Models that were read: RMM's pool orders reuse by the streams that its callers name, and so ignores Numba's; CuPy's has
an arena for each stream. Neither serves a caller who does not know the streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from memguard.errors import DeviceError

# The states of a block. In the pool it is FREED, then a `Batch`, which is what it waits for, then READY.
NEW, USED, PENDING, FREED, READY, BACK = "new", "used", "pending", "freed", "ready", "back"
"""NEW: the driver is asked for it. USED: an array has it, or will have. PENDING: Numba has yet to carry out its free.
FREED: not marked yet. READY: no work uses it. BACK: the driver has it back, or is being given it."""


class Mark(Protocol):
    """The work that was given to the GPU before a moment: `memguard._devices.streams.Mark`."""

    def passed(self) -> bool: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class Block:
    """One allocation from the driver: `size` bytes, of which the array in it asked for `asked` (0: it has no array).

    In the pool `size` is whole (`driver_pages.whole`), and a block serves for requests of its own whole size alone: so
    one that is handed out again wastes nothing of the cap.
    `pointer` is Numba's own object, None before the driver has given it; `buffer` is the driver's number of this
    allocation, if known. `pooled`: it may come into the pool. `exported`: code outside Numba knows its address, and may
    use it on any stream.
    """

    __slots__ = ("address", "asked", "buffer", "exported", "pointer", "pooled", "size", "state")

    def __init__(self, size: int, pooled: bool) -> None:
        self.size, self.pooled = size, pooled
        self.address = self.asked = 0
        self.exported = False
        self.pointer: Any = None
        self.buffer: int | None = None
        self.state: object = NEW


class Taker(Protocol):
    """Who gets a block: it has it, and will free it, from the moment in which nobody else has."""

    _block: Block | None
    _freed: bool


class Batch:
    """Blocks that wait for the same marks."""

    __slots__ = ("blocks", "marks")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.marks: Sequence[Mark] = ()

    def close(self) -> None:
        for mark in self.marks:
            mark.close()


class Pool:
    """`put` and `mark` may be called by finalizers, on any thread at any time; the rest under the GPU's lock.

    `record` returns marks that cover all work given so far: none if it is done. None if they cannot be recorded now.
    """

    def __init__(self, record: Callable[[], Sequence[Mark] | None]) -> None:
        self.idle: dict[Block, None] = {}
        """All blocks of the pool."""
        self.unmarked: deque[Block] = deque()
        self._record = record
        self._marked: deque[Batch] = deque()
        self._ready: dict[int, list[Block]] = {}

    def put(self, block: Block) -> None:
        """Its free was carried out. It can be handed out after `mark`, once the work before that is done."""
        block.state = FREED
        self.idle[block] = None
        self.unmarked.append(block)

    def mark(self) -> None:
        """Record marks for what was put since the last time. While that cannot be done, these blocks wait."""
        batch = Batch()
        try:
            try:  # noqa: SIM105 (`suppress` costs more)
                batch.blocks.extend(iter(self.unmarked.popleft, None))  # one call: what it takes out is in the batch
            except IndexError:
                pass
            if not batch.blocks:
                return
            for block in batch.blocks:
                if block.state is FREED:  # from here on no other thread's marks, which may be older, count for it
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

    def take(self, size: int, taker: Taker) -> Block | None:
        """Give the taker a block of this whole size whose work is done; None if there is none."""
        queue = self._ready.get(size)
        collected = False
        while True:
            try:
                while queue:
                    block = queue[-1]
                    if block.state is READY:
                        block.state = USED
                        taker._block = block
                        del self.idle[block]
                        queue.pop()
                        return block
                    queue.pop()
            except IndexError:  # a signal handler took the last one
                pass
            if collected or not self._marked:
                return None
            self._collect()
            queue, collected = self._ready.get(size), True

    def wait(self, size: int, taker: Taker) -> Block | None:
        """`take`, which waits for the work that such a block was used by."""
        if self.unmarked:
            self.mark()
        block = self.take(size, taker)
        while block is None and any(
            one.size == size and one.state is batch for batch in self._marked.copy() for one in batch.blocks
        ):
            self._collect(wait=True)
            block = self.take(size, taker)
        return block

    def drain(self) -> Iterator[tuple[Block, object]]:
        """All blocks and their states, done or not, to be given back to the driver, which waits for the work.

        Who takes them out is the caller, if the state is still the same: it may be another one meanwhile.
        """
        for block in list(self.idle):
            state = block.state
            if block in self.idle:
                yield block, state
        if self.idle:  # what was freed meanwhile
            return
        self._ready.clear()
        try:
            while True:
                self._marked.popleft().close()
        except IndexError:
            pass

    def tidy(self) -> None:
        """After some blocks were taken out: the queues let go of them, which otherwise a request of their size does."""
        for queue in list(self._ready.values()):
            queue[:] = [block for block in queue if block.state is READY]

    def _collect(self, wait: bool = False) -> None:
        """Make ready what is done. With `wait`, wait for the oldest marks."""
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
            except DeviceError:  # never to be handed out again; what Numba calls next says why
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
                if self._marked[0] is batch:  # else a signal handler allocated meanwhile, and has closed it
                    self._marked.popleft()
                    batch.close()
            except IndexError:
                return
