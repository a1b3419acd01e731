"""Copies by the driver: on a GPU, between two, and between a GPU and the host through pinned memory."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from memguard.devices import contexts
from memguard.errors import DeviceError
from memguard.units import MIB

STAGE = 16 * MIB
"""Bytes of each of the two pinned buffers that a copy from a GPU to the host goes through."""


def device(to: int, source: int, nbytes: int) -> None:
    """Copy between two addresses on GPUs, the same one or two (`cuMemcpy`), and wait for it.

    Measured: between two GPUs it makes this process a context on the other one, 518 MiB on an H200.
    """
    cuda = _cuda()
    with contexts.beside_captures():
        _check("cuMemcpy", cuda.cuMemcpy(ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(nbytes)))
        _check("cuStreamSynchronize", cuda.cuStreamSynchronize(None))  # from GPU to GPU the host does not wait


def to_host(to: int, source: int, nbytes: int) -> None:
    """Copy from a GPU to pageable memory, through two pinned buffers: one is filled while the other is emptied."""
    cuda = _cuda()
    with contexts.beside_captures(), _pinned(cuda, min(nbytes, STAGE)) as first, _pinned(cuda, STAGE) as second:
        buffers, stream = (first, second), _stream(cuda)
        try:
            parts = [(start, min(STAGE, nbytes - start)) for start in range(0, nbytes, STAGE)]
            for number, (start, size) in enumerate([*parts, (nbytes, 0)]):
                if number:
                    _check("cuStreamSynchronize", cuda.cuStreamSynchronize(stream))
                if size:
                    fetched = cuda.cuMemcpyDtoHAsync_v2(
                        ctypes.c_void_p(buffers[number % 2]),
                        ctypes.c_uint64(source + start),
                        ctypes.c_size_t(size),
                        stream,
                    )
                    _check("cuMemcpyDtoHAsync", fetched)
                if number:
                    before, length = parts[number - 1]
                    ctypes.memmove(to + before, buffers[(number - 1) % 2], length)
        finally:
            cuda.cuStreamDestroy_v2(stream)


@contextlib.contextmanager
def _pinned(cuda: ctypes.CDLL, size: int) -> Iterator[int]:
    address = ctypes.c_void_p()
    _check("cuMemHostAlloc", cuda.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(size), 0))
    try:
        yield address.value or 0
    finally:
        cuda.cuMemFreeHost(address)


def _stream(cuda: ctypes.CDLL) -> ctypes.c_void_p:
    stream = ctypes.c_void_p()
    _check("cuStreamCreate", cuda.cuStreamCreate(ctypes.byref(stream), 1))  # CU_STREAM_NON_BLOCKING
    return stream


def _cuda() -> ctypes.CDLL:
    cuda = contexts.loaded()
    if cuda is None:
        raise DeviceError("nothing has initialised CUDA in this process\n    fix: make an array on the GPU first")
    return cuda


def _check(call: str, code: int) -> None:
    if code:
        raise DeviceError(f"CUDA: {call}: error {code}\n    fix: run `nvidia-smi` and check the driver")
