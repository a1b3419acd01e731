"""Copies by the driver: on a GPU, between two, and between a GPU and the host through pinned memory."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

from memguard._devices import contexts, streams
from memguard._units import MIB
from memguard.errors import DeviceError

STAGE = 16 * MIB
"""Bytes of each of the two pinned buffers that a copy from a GPU to the host goes through."""


def device(to: int, source: int, nbytes: int, ordinal: int) -> None:
    """Copy between two addresses on GPUs (`cuMemcpy`), the same one or two, and wait for it. `ordinal` is one of them.

    Measured: between two GPUs it makes this process a context on the other one, 518 MiB on an H200.
    """
    cuda = streams.loaded()
    with contexts.entered(_context(ordinal)), contexts.beside_captures():
        contexts.check("cuMemcpy", cuda.cuMemcpy(ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(nbytes)))
        contexts.check("cuStreamSynchronize", cuda.cuStreamSynchronize(None))  # from GPU to GPU the host does not wait


def to_host(to: int, source: int, nbytes: int, ordinal: int) -> None:
    """Copy from the GPU `ordinal` to pageable memory, through two pinned buffers: one is filled, the other emptied."""
    cuda = streams.loaded()
    with (
        contexts.entered(_context(ordinal)),
        contexts.beside_captures(),
        _pinned(cuda, min(nbytes, STAGE)) as first,
        _pinned(cuda, min(max(nbytes - STAGE, 1), STAGE)) as second,
    ):
        buffers, stream = (first, second), _stream(cuda)
        try:
            parts = [(start, min(STAGE, nbytes - start)) for start in range(0, nbytes, STAGE)]
            for number, (start, size) in enumerate([*parts, (nbytes, 0)]):
                if number:
                    contexts.check("cuStreamSynchronize", cuda.cuStreamSynchronize(stream))
                if size:
                    fetched = cuda.cuMemcpyDtoHAsync_v2(
                        ctypes.c_void_p(buffers[number % 2]),
                        ctypes.c_uint64(source + start),
                        ctypes.c_size_t(size),
                        stream,
                    )
                    contexts.check("cuMemcpyDtoHAsync", fetched)
                if number:
                    before, length = parts[number - 1]
                    ctypes.memmove(to + before, buffers[(number - 1) % 2], length)
        finally:
            cuda.cuStreamDestroy_v2(stream)


def _context(ordinal: int) -> int:
    """The context to copy in: this thread may have none, also where its framework has just been used."""
    context = contexts.primary(ordinal) or contexts.current_handle()
    if context is None:
        raise DeviceError(f"cuda:{ordinal} has no context in this process\n    fix: make an array on it first")
    return context


@contextlib.contextmanager
def _pinned(cuda: Any, size: int) -> Iterator[int]:
    address = ctypes.c_void_p()
    contexts.check("cuMemHostAlloc", cuda.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(size), 0))
    try:
        yield address.value or 0
    finally:
        cuda.cuMemFreeHost(address)


def _stream(cuda: Any) -> ctypes.c_void_p:
    stream = ctypes.c_void_p()
    contexts.check("cuStreamCreate", cuda.cuStreamCreate(ctypes.byref(stream), 1))  # CU_STREAM_NON_BLOCKING
    return stream
