"""CUDA's devices, its primary contexts and the calling thread, through the driver that the process has loaded already.

Never `cudaSetDevice`: since CUDA 12 it creates a context on the device it names, also when a former device is
put back. Nothing here initialises CUDA or makes a context.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass

from memguard._units import gpu_uuid
from memguard.errors import DeviceError

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_initialised: ctypes.CDLL | None = None
"""libcuda once it was seen initialised: it stays so, and asking again would cost more than the calls themselves."""
_primaries: dict[int, int] = {}
_lost = False
"""In a child forked after that: CUDA cannot be used there, and never will be."""


@dataclass(frozen=True)
class CudaDevice:
    """A device as CUDA numbers it in this process; `uuid` in NVML's form (`GPU-…`)."""

    ordinal: int
    uuid: str
    multiprocessors: int


def loaded() -> ctypes.CDLL | None:
    """libcuda where this process has loaded and initialised it; None elsewhere."""
    global _initialised
    if _initialised is not None or _lost:
        return _initialised
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=getattr(os, "RTLD_NOLOAD", 4))
    except OSError:
        return None
    if driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0:
        _watch_forks()
        _initialised = driver
    return _initialised


@functools.cache
def _watch_forks() -> None:
    """Once per process: a child does not go on with what was seen in its parent."""
    os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    global _initialised, _lost
    _initialised, _lost = None, _lost or _initialised is not None
    _primaries.clear()


def initialised() -> bool:
    """Whether something has run `cuInit` in this process. Never runs it, and loads nothing."""
    return loaded() is not None


def current() -> int | None:
    """The ordinal of the GPU whose context is current on this thread; None where none is."""
    driver = loaded()
    ordinal = ctypes.c_int()
    return ordinal.value if driver is not None and driver.cuCtxGetDevice(ctypes.byref(ordinal)) == 0 else None


def current_handle() -> int | None:
    """The handle of the context that is current on this thread, whichever it is; None where none is."""
    driver, context = loaded(), ctypes.c_void_p()
    if driver is None or driver.cuCtxGetCurrent(ctypes.byref(context)):
        return None
    return context.value


def visible() -> tuple[CudaDevice, ...] | None:
    """The GPUs that CUDA shows this process, by ordinal; None where nothing has initialised it.

    Raises DeviceError where CUDA does not say what one of them is.
    """
    driver = loaded()
    if driver is None:
        return None
    count, device, number, raw = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    uuid = "cuDeviceGetUuid_v2" if hasattr(driver, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"  # of drivers before 470
    check("cuDeviceGetCount", driver.cuDeviceGetCount(ctypes.byref(count)))
    found = []
    for ordinal in range(count.value):
        check("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), ordinal))
        check(uuid, getattr(driver, uuid)(ctypes.byref(raw), device))
        check("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(ctypes.byref(number), _MULTIPROCESSORS, device))
        found.append(CudaDevice(ordinal, gpu_uuid(bytes(raw)), number.value))
    return tuple(found)


def check(call: str, code: int) -> None:
    """Raises DeviceError where a call of the driver did not succeed."""
    if code:
        raise DeviceError(f"CUDA: {call}: error {code}\n    fix: run `nvidia-smi` and check the driver")


def ordinals() -> dict[str, int]:
    """CUDA's ordinal of each GPU that it shows this process, by UUID; empty where nothing has initialised CUDA.

    Not from CuPy's `getDeviceProperties`: its `uuid` ends at the first byte that is zero (measured).
    """
    return {device.uuid: device.ordinal for device in visible() or ()}


def active(ordinal: int) -> bool | None:
    """Whether the device's primary context exists (`cuDevicePrimaryCtxGetState`, which makes none); None if unknown."""
    driver = loaded()
    device, flags, found = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    if driver is None:
        return False
    if driver.cuDeviceGet(ctypes.byref(device), ordinal) or driver.cuDevicePrimaryCtxGetState(
        device, ctypes.byref(flags), ctypes.byref(found)
    ):
        return None
    return bool(found.value)


def primary(ordinal: int) -> int | None:
    """The handle of the device's primary context; None where it does not exist.

    Remembered once seen: it lives as long as the framework that uses it, and asking takes four calls.
    """
    driver = loaded()
    if driver is None:
        return None
    known = _primaries.get(ordinal)
    if known is not None:
        return known
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if (
        not active(ordinal)
        or driver.cuDeviceGet(ctypes.byref(device), ordinal)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    ):
        return None
    driver.cuDevicePrimaryCtxRelease_v2(device)
    if context.value:
        _primaries[ordinal] = context.value
    return context.value


def primary_now(ordinal: int) -> int | None:
    """`primary`, asked for again: one that everybody let go of was made anew, with another handle or none."""
    _primaries.pop(ordinal, None)
    return primary(ordinal)


class entered:  # noqa: N801 (a context manager, by hand: it is entered several times in each hand-over)
    """A context current on this thread for a block, by its handle. DeviceError where CUDA refuses."""

    __slots__ = ("_context", "_pushed")

    def __init__(self, context: int) -> None:
        self._context, self._pushed = context, False

    def __enter__(self) -> None:
        driver, now = loaded(), ctypes.c_void_p()
        if driver is None or (driver.cuCtxGetCurrent(ctypes.byref(now)) == 0 and now.value == self._context):
            return
        check("cuCtxPushCurrent", driver.cuCtxPushCurrent_v2(ctypes.c_void_p(self._context)))
        self._pushed = True

    def __exit__(self, *_: object) -> None:
        driver = loaded()
        if self._pushed and driver is not None:
            driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@contextlib.contextmanager
def pushed(ordinal: int) -> Iterator[bool]:
    """The device's primary context current on this thread for a block: False where it does not exist."""
    driver = loaded()
    if current() == ordinal:
        yield True
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if (
        driver is None
        or not active(ordinal)
        or driver.cuDeviceGet(ctypes.byref(device), ordinal)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    ):
        yield False
        return
    try:
        if driver.cuCtxPushCurrent_v2(context):
            yield False
            return
        try:
            yield True
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)


def allocation(address: int) -> tuple[int, int] | None:
    """Start and size in bytes of the driver's allocation that an address of the current context lies in."""
    driver = loaded()
    start, size = ctypes.c_uint64(), ctypes.c_size_t()
    if driver is None or driver.cuMemGetAddressRange_v2(
        ctypes.byref(start), ctypes.byref(size), ctypes.c_uint64(address)
    ):
        return None
    return start.value, size.value


def buffer(address: int) -> int | None:
    """The id of the driver's allocation at an address, which no other ever gets; None where there is none."""
    driver, found = loaded(), ctypes.c_uint64()
    if driver is None or driver.cuPointerGetAttribute(ctypes.byref(found), _BUFFER_ID, ctypes.c_uint64(address)):
        return None
    return found.value


def relax() -> bool:
    """No call of this thread spoils a CUDA graph that another captures, from now on. False where CUDA is not there."""
    driver = loaded()
    return driver is not None and driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED))) == 0


class beside_captures:  # noqa: N801 (a context manager)
    """Calls of this thread that free memory do not spoil a CUDA graph that another thread captures meanwhile.

    `cuThreadExchangeStreamCaptureMode`. Measured: freeing CuPy's blocks from another thread invalidates a capture
    of torch's without this, and does not with it.
    """

    __slots__ = ("_changed", "_mode")

    def __enter__(self) -> None:
        driver, self._mode = loaded(), ctypes.c_int(_RELAXED)
        self._changed = driver is not None and driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(self._mode)) == 0

    def __exit__(self, *_: object) -> None:
        driver = loaded()
        if self._changed and driver is not None:
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(self._mode))
