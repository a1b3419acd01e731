"""CUDA state of this process, read through the loaded libcuda: devices, primary contexts, the calling thread.

This module never initialises CUDA or creates a context. It never calls `cudaSetDevice`: since CUDA 12 that creates a
context on the named device, even to restore the previous device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, NamedTuple

from memguard._base import life
from memguard._devices import libcuda, suspension
from memguard._devices.libcuda import check
from memguard.errors import DeviceError

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_INTEGRATED = 18  # CU_DEVICE_ATTRIBUTE_INTEGRATED
_MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_IDS_FROM = 13000  # the driver's CUDA version, as cuDriverGetVersion encodes it
_initialised: libcuda.DriverAPI | None = None
"""libcuda, once CUDA is initialised. Cached, because the test for CUDA's initialisation takes longer than most CUDA
calls in this module."""
_primaries: dict[int, int] = {}
_handles: dict[int, int] = {}
"""The driver's handle of a GPU, by ordinal."""
unusable_after_fork = False
"""True in a child forked after its parent initialised CUDA: the child can never use CUDA."""


class VisibleDevice(NamedTuple):
    """A device as CUDA numbers it in this process; `uuid` in NVML's form (`GPU-…`).

    `total`: `cuDeviceTotalMem` in bytes, which needs no context; None if CUDA does not report it. `integrated`: the
    device shares the machine's memory.
    """

    ordinal: int
    uuid: str
    multiprocessors: int
    total: int | None = None
    integrated: bool = False


def loaded() -> libcuda.DriverAPI | None:
    """libcuda if this process has loaded and initialised it, else None."""
    global _initialised
    if _initialised is not None or unusable_after_fork:
        return _initialised
    cuda = libcuda.already_loaded()
    if cuda is not None and cuda.cuDeviceGetCount(c_int()) == 0:
        _watch_forks()
        _initialised = cuda
    return _initialised


def driver() -> libcuda.DriverAPI:
    """The initialised libcuda, for calls that use a GPU.

    Raises DeviceError if nothing has initialised CUDA in this process, and Suspended while the process is suspended: a
    synchronize would then crash the process, and an allocation would block.
    """
    if suspension.now is not None:
        raise suspension.refused("CUDA")
    cuda = _initialised if _initialised is not None else loaded()
    if cuda is None:
        raise DeviceError("nothing has initialised CUDA in this process", fix="make an array on the GPU first")
    return cuda


@functools.cache
def _watch_forks() -> None:
    """Register the fork hook once per process: a forked child drops its parent's CUDA state."""
    life.at_fork(life.HookOrder.CUDA, child=_forked)


def _forked() -> None:
    global _initialised, unusable_after_fork
    _initialised, unusable_after_fork = None, unusable_after_fork or _initialised is not None
    _primaries.clear()
    _handles.clear()


def initialised() -> bool:
    """Whether this process has run `cuInit`. Never runs `cuInit`, and loads nothing."""
    return loaded() is not None


def current() -> int | None:
    """The ordinal of the GPU whose context is current on this thread; None if there is none."""
    cuda = _initialised if _initialised is not None else loaded()
    ordinal = c_int()
    return ordinal.value if cuda is not None and cuda.cuCtxGetDevice(ordinal) == 0 else None


def current_handle() -> int | None:
    """The handle of this thread's current context, primary or not; None if there is none."""
    cuda, context = _initialised if _initialised is not None else loaded(), c_void_p()
    if cuda is None or cuda.cuCtxGetCurrent(context):
        return None
    found: int | None = context.value
    return found


def visible() -> tuple[VisibleDevice, ...] | None:
    """The GPUs that this process can use, by CUDA's ordinal; None if nothing has initialised CUDA.

    Raises DeviceError if CUDA cannot describe a GPU.
    """
    cuda = loaded()
    if cuda is None:
        return None
    count, device, number = c_int(), c_int(), c_int()
    check("cuDeviceGetCount", cuda.cuDeviceGetCount(count))
    found = []
    for ordinal in range(count.value):
        check("cuDeviceGet", cuda.cuDeviceGet(device, ordinal))
        uuid = libcuda.device_uuid(cuda, device.value)
        check("cuDeviceGetAttribute", cuda.cuDeviceGetAttribute(number, _MULTIPROCESSORS, device.value))
        multiprocessors, size = number.value, c_size_t()
        total = size.value if cuda.cuDeviceTotalMem_v2(size, device.value) == 0 else None
        integrated = cuda.cuDeviceGetAttribute(number, _INTEGRATED, device.value) == 0 and bool(number.value)
        found.append(VisibleDevice(ordinal, uuid, multiprocessors, total, integrated))
    return tuple(found)


def free_memory(ordinal: int) -> int | None:
    """Free bytes of the device by `cuMemGetInfo`; None if its primary context does not exist."""
    context, cuda = primary(ordinal), loaded()
    if context is None or cuda is None:
        return None
    free, total = c_size_t(), c_size_t()
    with entered(context):
        return free.value if cuda.cuMemGetInfo_v2(free, total) == 0 else None


def ordinals() -> dict[str, int]:
    """CUDA's ordinal of each visible GPU, by UUID; empty if nothing has initialised CUDA.

    CuPy's `getDeviceProperties` cannot supply the UUID: its `uuid` ends at the first zero byte (measured).
    """
    return {device.uuid: device.ordinal for device in visible() or ()}


def uuid_of(ordinal: int | None) -> str:
    """The UUID of the GPU `ordinal`; "" if unknown."""
    return next((uuid for uuid, number in ordinals().items() if number == ordinal), "")


def active(ordinal: int) -> bool | None:
    """Whether the device's primary context exists (`cuDevicePrimaryCtxGetState` never creates it); None if unknown."""
    cuda = _initialised if _initialised is not None else loaded()
    if cuda is None:
        return False
    found = c_int()
    device = _handles.get(ordinal)
    if device is None:
        handle = c_int()
        if cuda.cuDeviceGet(handle, ordinal):
            return None
        device = _handles[ordinal] = handle.value  # the handle never changes
    return None if cuda.cuDevicePrimaryCtxGetState(device, c_uint(), found) else found.value != 0


def _with_primary(cuda: libcuda.DriverAPI, ordinal: int) -> int | None:
    """The driver's handle of the device, if the device's primary context exists; else None."""
    device, flags, found = c_int(), c_uint(), c_int()
    if cuda.cuDeviceGet(device, ordinal) or cuda.cuDevicePrimaryCtxGetState(device.value, flags, found):
        return None
    return device.value if found.value else None


def primary(ordinal: int) -> int | None:
    """The handle of the device's primary context; None if it does not exist.

    Cached, because reading the handle takes four calls, and the context lives as long as the framework that uses it.
    """
    known = _primaries.get(ordinal)
    if known is not None:
        return known
    cuda = loaded()
    if cuda is None:
        return None
    device, context = _with_primary(cuda, ordinal), c_void_p()
    if device is None or cuda.cuDevicePrimaryCtxRetain(context, device):
        return None
    cuda.cuDevicePrimaryCtxRelease_v2(device)
    if context.value:
        _primaries[ordinal] = context.value
    return context.value


def primary_known(ordinal: int) -> int | None:
    """The handle that `primary` cached, without a CUDA call. The context may have been released since."""
    return _primaries.get(ordinal)


def ordinal_of(context: int | None) -> int | None:
    """The ordinal of the GPU with this primary context; None if `primary` has not cached it yet."""
    for ordinal, known in tuple(_primaries.items()):  # a copy, because another thread may add a context during the loop
        if known == context:
            return ordinal
    return None


def primary_now(ordinal: int) -> int | None:
    """Like `primary`, but not cached: after all users released a primary context, CUDA creates it with a new handle."""
    _primaries.pop(ordinal, None)
    return primary(ordinal)


class entered:  # noqa: N801 (a context manager written by hand for speed: each hand-over enters it several times)
    """Makes the context `context` current on this thread in a block. Raises DeviceError if a CUDA call fails."""

    __slots__ = ("_context", "_pushed")

    def __init__(self, context: int) -> None:
        self._context, self._pushed = context, False

    def __enter__(self) -> None:
        cuda, now = loaded(), c_void_p()
        if cuda is None or (cuda.cuCtxGetCurrent(now) == 0 and now.value == self._context):
            return
        check("cuCtxPushCurrent", cuda.cuCtxPushCurrent_v2(self._context))
        self._pushed = True

    def __exit__(self, *_: object) -> None:
        cuda = loaded()
        if self._pushed and cuda is not None:
            cuda.cuCtxPopCurrent_v2(c_void_p())


class pushed:  # noqa: N801 (a context manager written by hand for speed: each reading enters it several times)
    """Makes the device's primary context current on this thread for a block. Yields False if there is none."""

    __slots__ = ("_context", "_device", "_ordinal", "_pushed")

    def __init__(self, ordinal: int) -> None:
        self._ordinal, self._device, self._pushed = ordinal, 0, False
        self._context: c_void_p | None = None

    def __enter__(self) -> bool:
        cuda, number = loaded(), c_int()
        if cuda is None:
            return False
        if cuda.cuCtxGetDevice(number) == 0 and number.value == self._ordinal:
            return True
        device = _with_primary(cuda, self._ordinal)
        if device is None:
            return False
        self._device, self._context = device, (context := c_void_p())
        try:
            if cuda.cuDevicePrimaryCtxRetain(context, device) == 0:
                self._pushed = cuda.cuCtxPushCurrent_v2(context.value) == 0
        except BaseException:  # such as a Ctrl-C right after the push
            self._pushed = context.value is not None and current_handle() == context.value
            self.__exit__()
            raise
        if not self._pushed:
            self.__exit__()
        return self._pushed

    def __exit__(self, *_: object) -> None:
        context, self._context = self._context, None
        if context is None or context.value is None or (cuda := loaded()) is None:  # `__enter__` retained no context
            return
        try:
            if self._pushed:
                cuda.cuCtxPopCurrent_v2(c_void_p())
        finally:
            cuda.cuDevicePrimaryCtxRelease_v2(self._device)


def allocation(address: int) -> tuple[int, int] | None:
    """Start and bytes of the driver's allocation that contains `address`, in the current context; None if there is
    none."""
    cuda = loaded()
    start, size = c_uint64(), c_size_t()
    if cuda is None or cuda.cuMemGetAddressRange_v2(start, size, address):
        return None
    return start.value, size.value


def buffer(address: int) -> int | None:
    """The unique id of the driver's allocation at an address. CUDA never reuses an id. None if there is no
    allocation."""
    cuda, found = loaded(), c_uint64()
    if cuda is None or cuda.cuPointerGetAttribute(found, _BUFFER_ID, address):
        return None
    return found.value


def watch(address: int, known: int) -> Callable[[], bool]:
    """Create a fast test: does the allocation at `address` still have the id `known`, which `buffer` returned?"""
    ask = libcuda.quick("cuPointerGetAttribute") if loaded() is not None else None
    if ask is None:
        return lambda: buffer(address) == known
    found, which, where = c_uint64(), c_int(_BUFFER_ID), c_uint64(address)
    out = byref(found)  # shared by all threads, because a result that another thread wrote is newer and valid
    return lambda: ask(out, which, where) == 0 and found.value == known


class IdOfCurrent(NamedTuple):
    """A fast read of the id of this thread's current context.

    If `ask(None, out)` returns 0, `number.value` is the id. A later call on any thread overwrites `number`.
    """

    ask: Callable[..., int]
    out: Any
    number: c_uint64


def id_of_current() -> IdOfCurrent:
    """Create the id reader. Its reads fail on drivers that may reuse the id after a reset of the primary context.

    Documented for `cuCtxGetId`: ids are unique for the life of the program. Measured on an H100 with driver 580 (CUDA
    13.0): a reset gives the primary context another id and the same handle, and between the reset and the next context
    `cuCtxGetId` fails (709, 201). Older drivers were not measured, so memguard does not use their ids.
    """
    cuda, version, number = libcuda.already_loaded(), c_int(), c_uint64()
    known = cuda is not None and cuda.cuDriverGetVersion(version) == 0 and version.value >= _IDS_FROM
    ask = libcuda.quick("cuCtxGetId") if known else None
    return IdOfCurrent(ask or (lambda *_: 1), byref(number), number)


def current_id(context: int) -> int | None:
    """The id of this thread's current context if `context` is its handle, else None. See `id_of_current`."""
    found = id_of_current()
    return found.number.value if current_handle() == context and found.ask(None, found.out) == 0 else None


def relax() -> bool:
    """Set this thread's capture mode to relaxed, so that its calls break no other thread's CUDA graph capture.

    False if CUDA is not loaded.
    """
    cuda = loaded()
    return cuda is not None and cuda.cuThreadExchangeStreamCaptureMode(c_int(_RELAXED)) == 0


class capture_safe:  # noqa: N801 (a context manager)
    """In this block, this thread's calls that free memory do not break another thread's CUDA graph capture.

    Calls `cuThreadExchangeStreamCaptureMode`. Measured: freeing CuPy's blocks from another thread invalidates a torch
    capture without this block; within it the capture stays valid.
    """

    __slots__ = ("_changed", "_mode")

    def __enter__(self) -> None:
        cuda, self._mode = _initialised if _initialised is not None else loaded(), c_int(_RELAXED)
        self._changed = cuda is not None and cuda.cuThreadExchangeStreamCaptureMode(self._mode) == 0

    def __exit__(self, *_: object) -> None:
        cuda = _initialised if _initialised is not None else loaded()
        if self._changed and cuda is not None:
            cuda.cuThreadExchangeStreamCaptureMode(self._mode)
