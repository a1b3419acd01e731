"""GPU memory that another process can map: `cuMemCreate` with file descriptors, and `cuMemAlloc`'s IPC handles.

All calls go through the loaded libcuda.

Measured on an H200: the driver allocates multiples of 2 MiB, and mapping an allocation takes 250 us; a process that
maps a handle of either kind keeps the memory, even after the exporting process has ended. An IPC handle opens the
driver's whole block, including other arrays in it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from ctypes import c_int, c_size_t, c_uint64, c_void_p, sizeof

from memguard._base.logs import log as _log
from memguard._base.units import MIB, format_size
from memguard._devices import contexts, copies, libcuda
from memguard._devices.libcuda import (
    CUipcMemHandle,
    CUmemAccessDesc,
    CUmemAllocationProp,
    CUmemLocation,
    DriverAPI,
    check,
)
from memguard.errors import DeviceError

_PINNED, _ON_DEVICE, _FILE, _READ_WRITE = 1, 1, 1, 3  # CU_MEM_…
_LAZY_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag of cuda.h
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
HANDLE_BYTES = sizeof(CUipcMemHandle)
PAGE = 2 * MIB
"""Bytes. The driver's page size. Blocks of more than 1 MiB begin and end at a multiple of this size; smaller blocks
share a page."""
_retained: dict[int, int] = {}
"""The primary contexts retained here for mapped memory. memguard never releases them, as frameworks never release the
primary contexts that they retain."""


class NoRoom(DeviceError):
    """The GPU has too little free memory for a copy of `nbytes`. `free` is its free bytes, None if unknown."""

    def __init__(self, nbytes: int, free: int | None) -> None:
        self.nbytes, self.free = nbytes, free
        left = "unknown" if free is None else format_size(free)
        super().__init__(f"CUDA: no room for {format_size(nbytes)}: {left} free", fix="free memory on this GPU")


class Allocation:
    """A separate allocation of `size` bytes on the GPU `ordinal`. Only a process that receives `fd` can map it."""

    __slots__ = ("_free", "fd", "ordinal", "size")

    def __init__(self, ordinal: int, size: int, fd: int, free: Callable[[], object]) -> None:
        self.ordinal, self.size, self.fd, self._free = ordinal, size, fd, free

    def close(self) -> None:
        """Release the memory. A process that has mapped the memory keeps it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
            self._free()


class Mapping:
    """Another process's memory, mapped at `address` until `close`."""

    __slots__ = ("_context", "_undo", "address")

    def __init__(self, address: int, context: int, undo: contextlib.ExitStack) -> None:
        self.address, self._context, self._undo = address, context, undo

    def close(self) -> None:
        """Unmap the memory, on any thread. The caller ensures that all GPU work that uses the memory has completed."""
        with contexts.capture_safe(), contexts.entered(self._context):
            self._undo.close()


def uuid(ordinal: int) -> str | None:
    """The GPU's UUID in NVML's form; None if this process cannot use such a GPU."""
    return next((device.uuid for device in contexts.visible() or () if device.ordinal == ordinal), None)


def ordinal(uuid: str) -> int | None:
    """CUDA's ordinal of a GPU in this process; None if this process cannot use the GPU. Initialises CUDA on demand."""
    _initialise()
    return contexts.ordinals().get(uuid)


def duplicate(ordinal: int, address: int, nbytes: int, context: int | None = None) -> Allocation:
    """Copy memory into a separate allocation that other processes can map. Returns after the copy has completed.

    `context` is a context that can read the memory; None for the GPU's primary one. Raises NoRoom, DeviceError.
    """
    cuda, here = _driver(), contexts.entered(context or contexts.primary(ordinal) or 0)
    with contexts.capture_safe(), here, contextlib.ExitStack() as undo:
        size, handle = _create(cuda, ordinal, nbytes)
        undo.callback(_undone, "cuMemRelease", cuda.cuMemRelease, handle)
        with contextlib.ExitStack() as unmap:
            copied = _map(cuda, unmap, ordinal, handle, size)
            rest = size - nbytes
            if rest:  # zero the rest, which may contain another process's data
                check("cuMemsetD8", cuda.cuMemsetD8_v2(copied + nbytes, 0, rest))
            copies.device(copied, address, nbytes, ordinal)
        fd = c_int(-1)
        check("cuMemExportToShareableHandle", cuda.cuMemExportToShareableHandle(fd, handle, _FILE, 0))
        undo.callback(os.close, fd.value)
        os.set_inheritable(fd.value, False)
        undo.pop_all()
    return Allocation(ordinal, size, fd.value, lambda: _undone("cuMemRelease", cuda.cuMemRelease, handle))


def block_handle(address: int, context: int | None, ordinal: int) -> tuple[int, int, bytes | None]:
    """Start and bytes of the driver's block at an address, and its IPC handle; None if the driver has no handle.

    Blocks of a pool (`cuMemAllocAsync`) and memory of `cuMemCreate` have none (measured).
    """
    cuda, handle = _driver(), CUipcMemHandle()
    with contexts.entered(context or contexts.primary(ordinal) or 0):
        start, size = contexts.allocation(address) or (0, 0)
        code = cuda.cuIpcGetMemHandle(handle, start) if size else 1
    return start, size, None if code else bytes(handle.reserved)


def map_file(ordinal: int, fd: int, size: int) -> Mapping:
    """Map all `size` bytes of the memory to which `fd`, from another process, refers. The caller keeps and closes
    `fd`."""
    with _present(ordinal) as cuda, contextlib.ExitStack() as undo:
        handle = c_uint64()
        check("cuMemImportFromShareableHandle", cuda.cuMemImportFromShareableHandle(handle, fd, _FILE))
        undo.callback(_undone, "cuMemRelease", cuda.cuMemRelease, handle.value)
        address = _map(cuda, undo, ordinal, handle.value, size)
        return Mapping(address, _retained[ordinal], undo.pop_all())


def map_block(ordinal: int, handle: bytes, size: int) -> Mapping:
    """Map the block of another process's IPC handle. Raises DeviceError if the block has fewer than `size` bytes."""
    with _present(ordinal) as cuda, contextlib.ExitStack() as undo:
        address, given = c_uint64(), CUipcMemHandle.from_buffer_copy(handle)
        check("cuIpcOpenMemHandle", cuda.cuIpcOpenMemHandle_v2(address, given, _LAZY_PEERS))
        undo.callback(_undone, "cuIpcCloseMemHandle", cuda.cuIpcCloseMemHandle, address.value)
        found = contexts.allocation(address.value)
        if found is None or found[1] < size:
            raise DeviceError(
                f"CUDA: the block has {found[1] if found else 0} bytes, the handle says {size}",
                fix="export the array again",
            )
        return Mapping(address.value, _retained[ordinal], undo.pop_all())


def _undone(name: str, call: Callable[..., int], *given: object) -> None:
    """Release a resource. A failure is only logged."""
    if code := call(*given):
        _log.debug("CUDA: %s: error %d", name, code)


def _create(cuda: DriverAPI, ordinal: int, nbytes: int) -> tuple[int, int]:
    """Allocate at least `nbytes` of shareable memory. Returns its bytes, and its handle in this process."""
    kind = CUmemAllocationProp(_PINNED, _FILE, CUmemLocation(_ON_DEVICE, ordinal))
    piece, handle = c_size_t(), c_uint64()
    check("cuMemGetAllocationGranularity", cuda.cuMemGetAllocationGranularity(piece, kind, 0))
    size = -(-nbytes // piece.value) * piece.value
    code = cuda.cuMemCreate(handle, size, kind, 0)
    if code == _OUT_OF_MEMORY:
        free, total = c_size_t(), c_size_t()
        known = cuda.cuMemGetInfo_v2(free, total) == 0
        raise NoRoom(size, free.value if known else None)
    check("cuMemCreate", code)
    return size, handle.value


def _map(cuda: DriverAPI, undo: contextlib.ExitStack, ordinal: int, handle: int, size: int) -> int:
    """Map memory, readable and writable on its GPU, until `undo` is closed. Returns its address."""
    reserved, access = c_uint64(), CUmemAccessDesc(CUmemLocation(_ON_DEVICE, ordinal), _READ_WRITE)
    check("cuMemAddressReserve", cuda.cuMemAddressReserve(reserved, size, 0, 0, 0))
    address = reserved.value
    undo.callback(_undone, "cuMemAddressFree", cuda.cuMemAddressFree, address, size)
    check("cuMemMap", cuda.cuMemMap(address, size, 0, handle, 0))
    undo.callback(_undone, "cuMemUnmap", cuda.cuMemUnmap, address, size)
    check("cuMemSetAccess", cuda.cuMemSetAccess(address, size, access, 1))
    return address


@contextlib.contextmanager
def _present(ordinal: int) -> Iterator[DriverAPI]:
    """Retain the GPU's primary context on first use, and make it current. Yields libcuda. A context retained by this
    call is released if the block raises."""
    cuda = _driver()
    new = ordinal not in _retained
    device, context = c_int(), c_void_p()
    if new:
        check("cuDeviceGet", cuda.cuDeviceGet(device, ordinal))
        check("cuDevicePrimaryCtxRetain", cuda.cuDevicePrimaryCtxRetain(context, device.value))
        _retained[ordinal] = context.value or 0
    try:
        with contexts.capture_safe(), contexts.entered(_retained[ordinal]):
            yield cuda
    except BaseException:
        if new:
            _retained.pop(ordinal, None)
            cuda.cuDevicePrimaryCtxRelease_v2(device.value)
        raise


def _initialise() -> None:
    """Run `cuInit` if needed. In a user's process memguard runs `cuInit` only here, because attaching memory requires
    CUDA."""
    if contexts.loaded() is not None:
        return
    try:
        code = libcuda.load().cuInit(0)
    except OSError as error:
        raise DeviceError(f"no NVIDIA driver: {error}", fix="attach on the machine of the GPU") from error
    if contexts.loaded() is None:
        raise DeviceError(
            f"CUDA cannot be used in this process: cuInit returns {libcuda.error_name(code) or code}; a process "
            "forked after CUDA was initialised cannot use CUDA",
            fix='start it with multiprocessing.get_context("spawn"), or as a program of its own',
        )


def _driver() -> DriverAPI:
    cuda = contexts.driver()
    if not hasattr(cuda, "cuMemCreate"):
        raise DeviceError("the NVIDIA driver is too old to share memory", fix="a driver of 450 or newer")
    return cuda
