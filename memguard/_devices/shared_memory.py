"""GPU memory that another process can map, through the driver that is loaded: `cuMemCreate` with file descriptors, and
the IPC handles of `cuMemAlloc`'s blocks.

Measured on an H200: a piece is 2 MiB, mapping one takes 250 us; a handle of either kind keeps the memory in whoever
mapped it after its maker is gone. An IPC handle opens the driver's whole block, whatever else lies in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

from memguard._devices import contexts, copies, streams
from memguard._units import MIB, format_size
from memguard.errors import DeviceError

_log = logging.getLogger("memguard")
_PINNED, _ON_DEVICE, _FILE, _READ_WRITE = 1, 1, 1, 3  # CU_MEM_…
_LAZY_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is
_OUT_OF_MEMORY = 2
HANDLE_BYTES = 64
"""CU_IPC_HANDLE_SIZE."""
PAGE = 2 * MIB
"""What the driver takes for a block of more than 1 MiB begins and ends at a multiple of it; smaller ones share one."""
_retained: dict[int, int] = {}
"""The primary contexts that were retained here for mapped memory; they stay, as a framework's would."""


class NoRoom(DeviceError):
    """The GPU has no room for a copy of `nbytes`; `free` is what it has, None where it does not say."""

    def __init__(self, nbytes: int, free: int | None) -> None:
        self.nbytes, self.free = nbytes, free
        left = "unknown" if free is None else format_size(free)
        super().__init__(f"CUDA: no room for {format_size(nbytes)}: {left} free\n    fix: free memory on this GPU")


class _Place(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("id", ctypes.c_int))


class _Kind(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("place", _Place),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("place", _Place), ("flags", ctypes.c_int))


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


class Allocation:
    """Memory of its own of `size` bytes on the GPU `ordinal`. Whoever gets `fd` can map it; nobody else can."""

    __slots__ = ("_free", "fd", "ordinal", "size")

    def __init__(self, ordinal: int, size: int, fd: int, free: Callable[[], object]) -> None:
        self.ordinal, self.size, self.fd, self._free = ordinal, size, fd, free

    def close(self) -> None:
        """Let go of it. Who has mapped it keeps it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
            self._free()


class Mapping:
    """Another process's memory at `address`, until `close`."""

    __slots__ = ("_context", "_undo", "address")

    def __init__(self, address: int, context: int, undo: contextlib.ExitStack) -> None:
        self.address, self._context, self._undo = address, context, undo

    def close(self) -> None:
        """Take it out of this process. All work on it has to be done. On any thread."""
        with contexts.beside_captures(), contexts.entered(self._context):
            self._undo.close()


def uuid(ordinal: int) -> str | None:
    """The GPU's UUID in NVML's form; None where CUDA shows no such GPU."""
    return next((device.uuid for device in contexts.visible() or () if device.ordinal == ordinal), None)


def ordinal(uuid: str) -> int | None:
    """CUDA's ordinal of a GPU in this process; None where CUDA does not show it. Initialises CUDA if nothing has."""
    _initialise()
    return contexts.ordinals().get(uuid)


def duplicate(ordinal: int, address: int, nbytes: int, context: int | None = None) -> Allocation:
    """A copy in memory of its own, for others to map; the copy is done when this returns.

    `context` is one that the memory can be read in; None for the GPU's primary one. Raises NoRoom, DeviceError.
    """
    cuda, here = _driver(), contexts.entered(context or contexts.primary(ordinal) or 0)
    with contexts.beside_captures(), here, contextlib.ExitStack() as undo:
        size, handle = _create(cuda, ordinal, nbytes)
        undo.callback(_undone, "cuMemRelease", cuda.cuMemRelease, handle)
        with contextlib.ExitStack() as unmap:
            copied = _map(cuda, unmap, ordinal, handle, size)
            rest = size - nbytes
            if rest:  # what others had in it is nobody's business
                behind = ctypes.c_uint64(copied + nbytes)
                contexts.check("cuMemsetD8", cuda.cuMemsetD8_v2(behind, ctypes.c_ubyte(0), ctypes.c_size_t(rest)))
            copies.device(copied, address, nbytes, ordinal)
        fd = ctypes.c_int(-1)
        given = cuda.cuMemExportToShareableHandle(ctypes.byref(fd), handle, _FILE, ctypes.c_ulonglong(0))
        contexts.check("cuMemExportToShareableHandle", given)
        undo.callback(os.close, fd.value)
        os.set_inheritable(fd.value, False)
        undo.pop_all()
    return Allocation(ordinal, size, fd.value, lambda: _undone("cuMemRelease", cuda.cuMemRelease, handle))


def block_handle(address: int, context: int | None, ordinal: int) -> tuple[int, int, bytes | None]:
    """Start and bytes of the driver's block at an address, and its IPC handle; None where the driver gives none.

    It gives none for blocks of a pool (`cuMemAllocAsync`) and for pieces of `cuMemCreate` (measured).
    """
    cuda, handle = _driver(), _Handle()
    with contexts.entered(context or contexts.primary(ordinal) or 0):
        start, size = contexts.allocation(address) or (0, 0)
        code = cuda.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(start)) if size else 1
    return start, size, None if code else bytes(handle.bytes)


def map_file(ordinal: int, fd: int, size: int) -> Mapping:
    """Map the memory behind another process's `fd`, all `size` bytes of it. The caller keeps and closes `fd`."""
    with _present(ordinal) as cuda, contextlib.ExitStack() as undo:
        handle = ctypes.c_uint64()
        taken = cuda.cuMemImportFromShareableHandle(ctypes.byref(handle), ctypes.c_void_p(fd), _FILE)
        contexts.check("cuMemImportFromShareableHandle", taken)
        undo.callback(_undone, "cuMemRelease", cuda.cuMemRelease, handle)
        address = _map(cuda, undo, ordinal, handle, size)
        return Mapping(address, _retained[ordinal], undo.pop_all())


def map_block(ordinal: int, handle: bytes, size: int) -> Mapping:
    """Open the block behind another process's IPC handle, which has to have `size` bytes."""
    with _present(ordinal) as cuda, contextlib.ExitStack() as undo:
        address = ctypes.c_uint64()
        opened = cuda.cuIpcOpenMemHandle_v2(ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEERS)
        contexts.check("cuIpcOpenMemHandle", opened)
        undo.callback(_undone, "cuIpcCloseMemHandle", cuda.cuIpcCloseMemHandle, address)
        found = contexts.allocation(address.value)
        if found is None or found[1] < size:
            raise DeviceError(
                f"CUDA: the block has {found[1] if found else 0} bytes, not the {size} that were promised\n"
                "    fix: export the array again"
            )
        return Mapping(address.value, _retained[ordinal], undo.pop_all())


def _undone(name: str, call: Callable[..., int], *given: object) -> None:
    """Nobody can do anything about it, so it is only said."""
    if code := call(*given):
        _log.debug("CUDA: %s: error %d", name, code)


def _create(cuda: Any, ordinal: int, nbytes: int) -> tuple[int, ctypes.c_uint64]:
    """Memory of at least `nbytes` that can be given to others: its bytes, and its handle here."""
    kind = _Kind(_PINNED, _FILE, _Place(_ON_DEVICE, ordinal))
    piece, handle = ctypes.c_size_t(), ctypes.c_uint64()
    asked = cuda.cuMemGetAllocationGranularity(ctypes.byref(piece), ctypes.byref(kind), 0)
    contexts.check("cuMemGetAllocationGranularity", asked)
    size = -(-nbytes // piece.value) * piece.value
    made = cuda.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(kind), ctypes.c_ulonglong(0))
    if made == _OUT_OF_MEMORY:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        told = cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
        raise NoRoom(size, free.value if told else None)
    contexts.check("cuMemCreate", made)
    return size, handle


def _map(cuda: Any, undo: contextlib.ExitStack, ordinal: int, handle: ctypes.c_uint64, size: int) -> int:
    """An address of this process for the memory, readable and writable on its GPU, until `undo` is closed."""
    length, address = ctypes.c_size_t(size), ctypes.c_uint64()
    none, zero = ctypes.c_uint64(0), ctypes.c_ulonglong(0)
    access = _Access(_Place(_ON_DEVICE, ordinal), _READ_WRITE)
    got = cuda.cuMemAddressReserve(ctypes.byref(address), length, ctypes.c_size_t(0), none, zero)
    contexts.check("cuMemAddressReserve", got)
    undo.callback(_undone, "cuMemAddressFree", cuda.cuMemAddressFree, address, length)
    contexts.check("cuMemMap", cuda.cuMemMap(address, length, ctypes.c_size_t(0), handle, zero))
    undo.callback(_undone, "cuMemUnmap", cuda.cuMemUnmap, address, length)
    allowed = cuda.cuMemSetAccess(address, length, ctypes.byref(access), ctypes.c_size_t(1))
    contexts.check("cuMemSetAccess", allowed)
    return address.value


@contextlib.contextmanager
def _present(ordinal: int) -> Iterator[Any]:
    """The driver, with the GPU's primary context current: made where there is none, and gone again if that fails."""
    cuda = _driver()
    new = ordinal not in _retained
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if new:
        contexts.check("cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(device), ordinal))
        retained = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        contexts.check("cuDevicePrimaryCtxRetain", retained)
        _retained[ordinal] = context.value or 0
    try:
        with contexts.beside_captures(), contexts.entered(_retained[ordinal]):
            yield cuda
    except BaseException:
        if new:
            _retained.pop(ordinal, None)
            cuda.cuDevicePrimaryCtxRelease_v2(device)
        raise


def _initialise() -> None:
    """`cuInit`, where nothing has: whoever attaches GPU memory has asked for it."""
    if contexts.loaded() is not None:
        return
    try:
        code = ctypes.CDLL("libcuda.so.1").cuInit(0)
    except OSError as error:
        raise DeviceError(f"no NVIDIA driver: {error}\n    fix: attach on the machine of the GPU") from error
    if contexts.loaded() is None:
        raise DeviceError(
            f"CUDA cannot be used in this process: cuInit says {code}; one that was forked from a process that uses "
            'CUDA never can\n    fix: start it with multiprocessing.get_context("spawn"), or as a program of its own'
        )


def _driver() -> Any:
    cuda = streams.loaded()
    if not hasattr(cuda, "cuMemCreate"):
        raise DeviceError("the NVIDIA driver is too old to share memory\n    fix: a driver of 450 or newer")
    return cuda
