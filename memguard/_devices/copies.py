"""Copies by the driver: within a GPU, between two GPUs, and from a GPU to the host through pinned memory.

The driver copies directly between two GPUs only if one can access the other's memory: its context has peer access, or
the memory is mapped for both. Otherwise the driver copies through the host (CUDA's programming guide, "Peer-to-Peer
Memory Copy").
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from ctypes import c_void_p

from memguard._base.units import MIB
from memguard._devices import contexts
from memguard._devices.libcuda import DriverAPI, check
from memguard.errors import DeviceError

STAGE = 16 * MIB
"""Bytes of each of the two pinned buffers for a copy from a GPU to the host."""
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_POINTER = 3  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER
_UNREACHABLE = 1  # CUDA_ERROR_INVALID_VALUE


def device(to: int, source: int, nbytes: int, ordinal: int) -> None:
    """Copy between two addresses on one GPU or two (`cuMemcpy`), and wait for the copy. `ordinal` is one of the GPUs.

    Measured: a copy between two GPUs creates a context of this process on the other GPU, 518 MiB on an H200.
    """
    cuda = contexts.driver()
    with contexts.entered(_context(ordinal)), contexts.capture_safe():
        check("cuMemcpy", cuda.cuMemcpy(to, source, nbytes))
        check("cuStreamSynchronize", cuda.cuStreamSynchronize(None))  # cuMemcpy returns before a GPU-to-GPU copy ends


def queue(to: int, source: int, nbytes: int, context: int | None, stream: int) -> None:
    """Queue a copy within a GPU on `stream` of `context`, without waiting (`cuMemcpyAsync`)."""
    cuda = contexts.driver()
    if context is None:
        raise DeviceError("there is no context to copy in", fix="make an array on the GPU first")
    with contexts.entered(context):
        check("cuMemcpyAsync", cuda.cuMemcpyAsync(to, source, nbytes, stream))


def reaches(ordinal: int, address: int) -> bool | None:
    """Whether kernels and copies of the GPU `ordinal` can access this memory of another GPU; None if CUDA fails."""
    cuda, context, found = contexts.loaded(), contexts.primary(ordinal), c_void_p()
    if cuda is None or context is None:
        return None
    with contexts.entered(context):
        code = cuda.cuPointerGetAttribute(found, _POINTER, address)
    return {0: True, _UNREACHABLE: False}.get(code)


def to_host(to: int, source: int, nbytes: int, ordinal: int) -> None:
    """Copy from the GPU `ordinal` to pageable memory through two pinned buffers: one fills while the other drains."""
    cuda = contexts.driver()
    with (
        contexts.entered(_context(ordinal)),
        contexts.capture_safe(),
        _pinned(cuda, min(nbytes, STAGE)) as first,
        _pinned(cuda, min(max(nbytes - STAGE, 1), STAGE)) as second,
    ):
        buffers, stream = (first, second), _stream(cuda)
        try:
            parts = [(start, min(STAGE, nbytes - start)) for start in range(0, nbytes, STAGE)]
            for number, (start, size) in enumerate([*parts, (nbytes, 0)]):
                if number:
                    check("cuStreamSynchronize", cuda.cuStreamSynchronize(stream))
                if size:
                    code = cuda.cuMemcpyDtoHAsync_v2(buffers[number % 2], source + start, size, stream)
                    check("cuMemcpyDtoHAsync", code)
                if number:
                    before, length = parts[number - 1]
                    ctypes.memmove(to + before, buffers[(number - 1) % 2], length)
        finally:
            cuda.cuStreamDestroy_v2(stream)


def _context(ordinal: int) -> int:
    """The GPU's primary context, or the thread's current one if there is no primary. The copy makes this context
    current, because a thread may have none even while its framework uses the GPU."""
    context = contexts.primary(ordinal) or contexts.current_handle()
    if context is None:
        raise DeviceError(f"cuda:{ordinal} has no context in this process", fix="make an array on it first")
    return context


@contextlib.contextmanager
def _pinned(cuda: DriverAPI, size: int) -> Iterator[int]:
    address = c_void_p()
    check("cuMemHostAlloc", cuda.cuMemHostAlloc(address, size, 0))
    try:
        yield address.value or 0
    finally:
        cuda.cuMemFreeHost(address.value)


def _stream(cuda: DriverAPI) -> int:
    stream = c_void_p()
    check("cuStreamCreate", cuda.cuStreamCreate(stream, _NON_BLOCKING))
    return stream.value or 0
