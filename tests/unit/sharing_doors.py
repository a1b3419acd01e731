"""The driver calls of `exchange.export` and `attach` on a machine without a GPU: a memfd stands for GPU memory.

`install` replaces them, in this process or in one that a test starts (`CHILD`). A fake `cupy` makes NumPy arrays of the
capsules that it gets. The sockets, the processes and the counts are real.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import mmap
import operator
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
from capsules import Consumed

from memguard._devices import contexts, copies, shared_memory, streams

UUID = "GPU-0a1b2c3d-0000-1111-2222-333344445555"
PIECE = 2 << 20
ROOT = Path(__file__).resolve().parents[2]
CHILD = "import sys, json, time\nimport sharing_doors\nsharing_doors.install()\nfrom memguard import exchange\n"
mapped: list[int] = []
"""Addresses that are mapped now."""
done: list[str] = []
"""What was waited for and copied, in order."""
free = 1 << 40


class Array:
    """An array on the GPU that belongs to no known framework. NumPy keeps its memory."""

    def __init__(self, values: Any, readonly: bool = False) -> None:
        self.values = values
        self.__cuda_array_interface__ = {
            "shape": values.shape, "typestr": values.dtype.str, "data": (values.ctypes.data, readonly),
            "strides": values.strides, "version": 3,
        }  # fmt: skip


class FakeArray:
    """What the fake CuPy makes of a capsule: `values` lie in its memory."""

    def __init__(self, capsule: Any) -> None:
        self.consumed = Consumed(capsule)
        values = (ctypes.c_char * self.nbytes).from_address(self.consumed.address) if self.nbytes else b""
        kind = {(2, 32): "f4", (0, 64): "i8"}[self.consumed.code, self.consumed.bits]
        self.values = numpy.frombuffer(values, kind).reshape(self.consumed.shape)

    @property
    def nbytes(self) -> int:
        return int(numpy.prod(self.consumed.shape)) * self.consumed.bits // 8

    def __del__(self) -> None:
        self.consumed.done()


def cupy() -> types.ModuleType:
    made: Any = types.ModuleType("cupy")
    made.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    here = types.SimpleNamespace(ptr=7)
    made.ndarray = made.from_dlpack = FakeArray
    made.cuda = types.SimpleNamespace(Device=Device, get_current_stream=lambda device: here)
    module: types.ModuleType = made
    return module


class Device:
    def __init__(self, number: int) -> None:
        assert number == 0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def duplicate(ordinal: int, address: int, nbytes: int, context: int | None = None) -> shared_memory.Allocation:
    done.append("copied")
    size = -(-nbytes // PIECE) * PIECE
    if size > free:
        raise shared_memory.NoRoom(size, free)
    fd = os.memfd_create("gpu")
    os.ftruncate(fd, size)
    os.pwrite(fd, ctypes.string_at(address, nbytes), 0)
    return shared_memory.Allocation(ordinal, size, fd, lambda: None)


class Mapping:
    def __init__(self, fd: int, size: int) -> None:
        self.block = mmap.mmap(fd, size)
        self.address = ctypes.addressof((ctypes.c_char * 1).from_buffer(self.block))
        mapped.append(self.address)

    def close(self) -> None:
        mapped.remove(self.address)


def map_file(ordinal: int, fd: int, size: int) -> Any:
    if os.fstat(fd).st_size < size:
        raise shared_memory.DeviceError("CUDA: cuMemMap: error 1")
    return Mapping(fd, size)


def block_handle(address: int, context: int | None, ordinal: int) -> tuple[int, int, bytes | None]:
    """A block's handle is the path of a file that the array is a mapping of; `blocks` says which."""
    for start, size, handle in blocks:
        if start <= address < start + size:
            return start, size, handle
    return 0, 0, None


blocks: list[tuple[int, int, bytes | None]] = []


def map_block(ordinal: int, handle: bytes, size: int) -> Any:
    fd = os.open(handle.rstrip(b"\0"), os.O_RDWR)
    try:
        return Mapping(fd, size)
    finally:
        os.close(fd)


def install(
    patch: Callable[[Any, str, Any], None] = setattr, put: Callable[[Any, str, Any], None] = operator.setitem
) -> None:
    for name in ("duplicate", "map_file", "block_handle", "map_block"):
        patch(shared_memory, name, globals()[name])
    patch(shared_memory, "uuid", lambda ordinal: UUID)
    patch(shared_memory, "ordinal", lambda uuid: {UUID: 0}.get(uuid))
    patch(streams, "place", lambda address: (0, None))
    patch(streams, "follow", lambda *given: done.append(f"waited {given}"))
    patch(streams, "capturing", lambda *_: False)
    patch(streams, "Mark", Passed)
    patch(contexts, "primary", lambda ordinal: 1)
    patch(copies, "to_host", ctypes.memmove)
    put(sys.modules, "cupy", cupy())


class Passed:
    """Work that is done."""

    def __init__(self, *_: object) -> None: ...

    def passed(self) -> bool:
        return True

    def close(self) -> None: ...
