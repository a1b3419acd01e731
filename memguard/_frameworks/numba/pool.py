"""Blocks that Numba has freed, kept to be handed out again once all work that may use them is done.

Numba does not record which streams use an array; `cuMemFree` makes that safe by waiting for the GPU. Here an event
does: all blocks that one flush of Numba's pending frees brings share the marks that are recorded right after it, and
none is handed out before these are passed. `watch.py` keeps away what the marks do not cover.

Models that were read: RMM's pool orders reuse by the streams that its callers name, and so ignores Numba's; CuPy's has
an arena for each stream. Neither serves a caller who does not know the streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from memguard.errors import DeviceError


class Mark(Protocol):
    """The work that was given to the GPU before a moment: `memguard._devices.streams.Mark`."""

    def passed(self) -> bool: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class Block:
    """One allocation from the driver: `size` bytes, of which the array in it asked for `asked`.

    In the pool `size` is whole (`driver_pages.whole`), and a block serves for requests of its own whole size alone: so
    one that is handed out again wastes nothing of the cap.
    `pointer` is Numba's own object. `pooled`: it may come into the pool. `exported`: code outside Numba knows its
    address, and may use it on any stream.
    """

    __slots__ = ("address", "asked", "exported", "pointer", "pooled", "size")

    def __init__(self, address: int, pointer: Any, size: int) -> None:
        self.address, self.pointer, self.size = address, pointer, size
        self.asked, self.exported, self.pooled = 0, False, False


class Pool:
    """`put` and `mark` may be called by finalizers, on any thread at any time; the rest under the GPU's lock.

    `record` returns marks that cover all work given so far; None if they cannot be recorded now. What `idle` lacks is
    no longer in the pool: so a call that is interrupted can lose a block's place in a queue, and `drain` still has it.
    """

    def __init__(self, record: Callable[[], Sequence[Mark] | None]) -> None:
        self.idle: dict[Block, None] = {}
        self.unmarked: deque[Block] = deque()
        self._record = record
        self._marked: deque[tuple[Sequence[Mark], list[Block]]] = deque()
        self._ready: dict[int, list[Block]] = {}

    def put(self, block: Block) -> None:
        """Its free was carried out. It can be handed out after `mark`, once the work before that is done."""
        self.idle[block] = None
        self.unmarked.append(block)

    def mark(self) -> None:
        """Record marks for what was put since the last time. While that cannot be done, these blocks wait."""
        batch: list[Block] = []
        try:
            while True:
                batch.append(self.unmarked.popleft())
        except IndexError:
            pass
        if not batch:
            return
        marks = self._record()
        if marks is None:
            self.unmarked.extend(batch)
        else:
            self._marked.append((marks, batch))

    def take(self, size: int) -> Block | None:
        """A block of this whole size whose work is done; None if there is none."""
        blocks = self._ready.get(size)
        if not blocks and self._marked:
            self._collect()
            blocks = self._ready.get(size)
        while blocks:
            block = blocks.pop()
            if self.idle.pop(block, self) is None:
                return block
        return None

    def wait(self, size: int) -> Block | None:
        """`take`, which waits for the work that such a block was used by."""
        if self.unmarked:
            self.mark()
        block = self.take(size)
        while block is None and any(
            one.size == size and one in self.idle for _, batch in self._marked for one in batch
        ):
            self._collect(wait=True)
            block = self.take(size)
        return block

    def drain(self) -> Iterator[Block]:
        """Take the blocks out one by one, to be given back to the driver: done or not, since that waits."""
        while self.idle:
            try:
                block, _ = self.idle.popitem()
            except KeyError:
                return
            yield block
        self.unmarked.clear()
        self._ready.clear()
        while self._marked:
            _close(self._marked.popleft()[0])

    def _collect(self, wait: bool = False) -> None:
        """Make ready what is done. With `wait`, wait for the oldest marks."""
        while self._marked:
            entry = marks, batch = self._marked[0]
            try:
                if wait:
                    for mark in marks:
                        mark.wait()
                    wait = False
                elif not all(mark.passed() for mark in marks):
                    return
            except DeviceError:  # never to be handed out again; what Numba calls next says why
                batch = []
            if self._marked and self._marked[0] is entry:  # else a signal handler allocated meanwhile
                self._marked.popleft()
            _close(marks)
            for block in batch:
                if block in self.idle:
                    self._ready.setdefault(block.size, []).append(block)


def _close(marks: Sequence[Mark]) -> None:
    for mark in marks:
        mark.close()
