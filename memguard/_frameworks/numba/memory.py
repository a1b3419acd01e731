"""The memory objects of Numba's arrays: they free the array's block, and record exports of the block's address."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from memguard._frameworks.numba.contexts import ARRAYS
from memguard._frameworks.numba.pool import Block
from memguard._frameworks.numba.watch import Addresses, covered


def memories(driver: Any) -> type:
    """Create the class of an array's memory object, derived from the installed Numba's `MemoryPointer`."""
    exported = Addresses(driver, sys.modules.get(ARRAYS)).exported
    ctypes_of = driver.MemoryPointer.device_ctypes_pointer.fget
    value_of = driver.MemoryPointer.device_pointer_value.fget

    class Memory(driver.MemoryPointer):  # type: ignore[misc]
        """The memory of one array. When this object is garbage-collected, the block's free becomes pending, as with
        Numba's own pointers. If code other than Numba's kernels and copies reads the address, the block counts as
        exported: the pool then never reuses the block.
        """

        refct = 1
        is_managed = True
        _owner = None
        _freed = False
        _block: Block | None = None

        def __init__(self, manager: Any, size: int) -> None:
            # Does not call Numba's constructor: creating its finalizer takes longer than all other steps.
            self.context = manager.proxy
            self.size = self._cuda_memsize_ = size
            self._manager = manager

        def _note_reader(self, frame: Any) -> Any:
            block: Any = self._block
            if not block.exported and exported(frame):
                block.exported = True
            return block.pointer

        @property
        def device_pointer(self) -> Any:
            return self._note_reader(sys._getframe(1))

        @property
        def handle(self) -> Any:
            return self._note_reader(sys._getframe(1))

        @property
        def device_ctypes_pointer(self) -> Any:
            self._note_reader(sys._getframe(1))
            return ctypes_of(self)

        @property
        def device_pointer_value(self) -> Any:
            self._note_reader(sys._getframe(1))
            return value_of(self)

        def memset(self, byte: int, count: int | None = None, stream: Any = 0) -> None:
            if not covered(stream):
                self._note_reader(None)
            super().memset(byte, count, stream)

        def view(self, start: int, stop: int | None = None) -> Any:
            return _cut(super().view(start, stop))

        def free(self) -> None:
            if self._freed:
                raise RuntimeError("Freeing dead memory")
            try:
                self._manager.drop(self)
            except BaseException:
                if not self._freed:  # a Ctrl-C came before `drop`'s first statement
                    self._manager.drop(self)
                raise
            self._freed = True

        def __copy__(self) -> Any:
            return self

        def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:  # at exit `sys` may be None
            if self._block is not None and not self._freed:
                try:
                    if not ends():
                        self._manager.drop(self)
                except BaseException:
                    if not self._freed:  # a Ctrl-C came before `drop`'s first statement
                        self._manager.drop(self)
                    raise

    class View(driver.OwnedPointer):  # type: ignore[misc]
        """A view of a part of an array's memory, which keeps the `Memory` object alive."""

        def view(self, start: int, stop: int | None = None) -> Any:
            return _cut(self._view.view(start, stop))

        @property
        def device_ctypes_pointer(self) -> Any:
            self._view.owner._note_reader(sys._getframe(1))
            return vars(self)["device_ctypes_pointer"]

        def __getattr__(self, name: str) -> Any:
            if name in ("device_pointer", "handle", "device_pointer_value"):
                self._view.owner._note_reader(sys._getframe(1))
            elif name == "memset":
                self._view.owner._note_reader(None)
            return super().__getattr__(name)

    def _cut(part: Any) -> Any:
        part.__class__ = View
        return part

    return Memory
