"""Opens `libcuda.so.1` and declares the types of each function that memguard calls: the only access to libcuda.

Functions and structures have the names of `cuda.h` (CUDA 13.0), with the suffix (`_v2`) of the exported symbol.
An old driver lacks some functions: test with `hasattr(cuda, "cuCtxRecordEvent")`.
"""

from __future__ import annotations

import ctypes
import operator
import os
from collections.abc import Callable, Mapping
from ctypes import POINTER, Structure, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ulonglong, c_void_p
from typing import Any

from memguard._base.units import gpu_uuid
from memguard.errors import DeviceError

NAME = "libcuda.so.1"


class CUmemLocation(Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class CUmemAllocationProp(Structure):
    """`allocFlags` are always 0 here: no compression, no RDMA."""

    _fields_ = (
        ("type", c_int),
        ("requestedHandleTypes", c_int),
        ("location", CUmemLocation),
        ("win32HandleMetaData", c_void_p),
        ("allocFlags", c_ubyte * 8),
    )


class CUmemAccessDesc(Structure):
    _fields_ = (("location", CUmemLocation), ("flags", c_int))


class CUipcMemHandle(Structure):
    _fields_ = (("reserved", c_ubyte * 64),)


class CUmemPoolProps(Structure):
    """`maxSize` came with CUDA 12.2, `usage` with 12.6. Before those versions, these bytes were reserved and had to be
    0."""

    _fields_ = (
        ("allocType", c_int),
        ("handleTypes", c_int),
        ("location", CUmemLocation),
        ("win32SecurityAttributes", c_void_p),
        ("maxSize", c_size_t),
        ("usage", ctypes.c_ushort),
        ("reserved", c_ubyte * 54),
    )


# The arguments of a checkpoint: 64 bytes each. Reserved fields must be 0.
class CUcheckpointLockArgs(Structure):
    """`timeoutMs`: 0 waits without a limit."""

    _fields_ = (("timeoutMs", c_uint), ("reserved0", c_uint), ("reserved1", c_uint64 * 7))


class CUcheckpointCheckpointArgs(Structure):
    _fields_ = (("reserved", c_uint64 * 8),)


class CUcheckpointRestoreArgs(Structure):
    """`gpuPairs` would restore to other GPUs; memguard passes none."""

    _fields_ = (
        ("gpuPairs", c_void_p),
        ("gpuPairsCount", c_uint),
        ("reserved", c_ubyte * (52 - ctypes.sizeof(c_void_p))),
        ("reserved1", c_uint64),
    )


class CUcheckpointUnlockArgs(Structure):
    _fields_ = (("reserved", c_uint64 * 8),)


class _OutAny:
    """A `void *` parameter that accepts a ctypes object of any type."""

    from_param = staticmethod(ctypes.byref)


class _Int:
    """A C int: ordinals, enumerators, flags. Measured: c_int converts an argument in 80 ns, this class in 10 ns."""

    from_param = staticmethod(operator.index)


# Handles and addresses have the size of a pointer. c_void_p converts in a third of c_uint64's time.
_Device = _Enum = _Flags = _Int
_Context = _Event = _Stream = _Pool = _Address = _Handle = c_void_p
_OutInt, _OutSize, _Out64, _OutPointer = POINTER(c_int), POINTER(c_size_t), POINTER(c_uint64), POINTER(c_void_p)

SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "cuInit": (_Flags,),
    "cuDriverGetVersion": (_OutInt,),
    "cuGetErrorName": (_Enum, POINTER(c_char_p)),
    # devices
    "cuDeviceGetCount": (_OutInt,),
    "cuDeviceGet": (_OutInt, _Int),
    "cuDeviceGetUuid": (_OutAny, _Device),
    "cuDeviceGetUuid_v2": (_OutAny, _Device),
    "cuDeviceGetName": (c_char_p, _Int, _Device),
    "cuDeviceGetAttribute": (_OutInt, _Enum, _Device),
    "cuDeviceTotalMem_v2": (_OutSize, _Device),
    "cuDeviceCanAccessPeer": (_OutInt, _Device, _Device),
    # contexts
    "cuDevicePrimaryCtxGetState": (_Device, POINTER(c_uint), _OutInt),
    "cuDevicePrimaryCtxRetain": (_OutPointer, _Device),
    "cuDevicePrimaryCtxRelease_v2": (_Device,),
    "cuCtxGetDevice": (_OutInt,),
    "cuCtxGetId": (_Context, _Out64),
    "cuCtxGetCurrent": (_OutPointer,),
    "cuCtxPushCurrent_v2": (_Context,),
    "cuCtxPopCurrent_v2": (_OutPointer,),
    "cuCtxSynchronize": (),
    "cuCtxRecordEvent": (_Context, _Event),
    "cuThreadExchangeStreamCaptureMode": (_OutInt,),
    # streams and events
    "cuStreamCreate": (_OutPointer, _Flags),
    "cuStreamDestroy_v2": (_Stream,),
    "cuStreamSynchronize": (_Stream,),
    "cuStreamWaitEvent": (_Stream, _Event, _Flags),
    "cuStreamGetFlags": (_Stream, POINTER(c_uint)),
    "cuStreamIsCapturing": (_Stream, _OutInt),
    "cuStreamQuery": (_Stream,),
    "cuEventCreate": (_OutPointer, _Flags),
    "cuEventDestroy_v2": (_Event,),
    "cuEventRecord": (_Event, _Stream),
    "cuEventQuery": (_Event,),
    "cuEventSynchronize": (_Event,),
    # memory
    "cuPointerGetAttribute": (_OutAny, _Enum, _Address),
    "cuMemGetAddressRange_v2": (_Out64, _OutSize, _Address),
    "cuMemGetInfo_v2": (_OutSize, _OutSize),
    "cuMemAlloc_v2": (_Out64, c_size_t),
    "cuMemFree_v2": (_Address,),
    "cuMemcpy": (_Address, _Address, c_size_t),
    "cuMemcpyAsync": (_Address, _Address, c_size_t, _Stream),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _Address, c_size_t, _Stream),
    "cuMemsetD8_v2": (_Address, c_ubyte, c_size_t),
    "cuMemHostAlloc": (_OutPointer, c_size_t, _Flags),
    "cuMemFreeHost": (c_void_p,),
    # memory that other processes can map
    "cuMemGetAllocationGranularity": (_OutSize, POINTER(CUmemAllocationProp), _Enum),
    "cuMemCreate": (_Out64, c_size_t, POINTER(CUmemAllocationProp), c_ulonglong),
    "cuMemRelease": (_Handle,),
    "cuMemExportToShareableHandle": (_OutAny, _Handle, _Enum, c_ulonglong),
    "cuMemImportFromShareableHandle": (_Out64, c_void_p, _Enum),
    "cuMemAddressReserve": (_Out64, c_size_t, c_size_t, _Address, c_ulonglong),
    "cuMemAddressFree": (_Address, c_size_t),
    "cuMemMap": (_Address, c_size_t, c_size_t, _Handle, c_ulonglong),
    "cuMemUnmap": (_Address, c_size_t),
    "cuMemSetAccess": (_Address, c_size_t, POINTER(CUmemAccessDesc), c_size_t),
    "cuIpcGetMemHandle": (POINTER(CUipcMemHandle), _Address),
    "cuIpcOpenMemHandle_v2": (_Out64, CUipcMemHandle, _Flags),
    "cuIpcCloseMemHandle": (_Address,),
    # memory pools
    "cuDeviceGetMemPool": (_OutPointer, _Device),
    "cuDeviceGetDefaultMemPool": (_OutPointer, _Device),
    "cuDeviceSetMemPool": (_Device, _Pool),
    "cuMemPoolCreate": (_OutPointer, POINTER(CUmemPoolProps)),
    "cuMemPoolDestroy": (_Pool,),
    "cuMemPoolSetAttribute": (_Pool, _Enum, _OutAny),
    "cuMemPoolGetAttribute": (_Pool, _Enum, _OutAny),
    "cuMemPoolTrimTo": (_Pool, c_size_t),
    "cuMemAllocFromPoolAsync": (_Out64, c_size_t, _Pool, _Stream),
    "cuMemFreeAsync": (_Address, _Stream),
    # checkpoints of a process (driver 570 and later)
    "cuCheckpointProcessGetState": (_Int, _OutInt),
    "cuCheckpointProcessLock": (_Int, POINTER(CUcheckpointLockArgs)),
    "cuCheckpointProcessCheckpoint": (_Int, POINTER(CUcheckpointCheckpointArgs)),
    "cuCheckpointProcessRestore": (_Int, POINTER(CUcheckpointRestoreArgs)),
    "cuCheckpointProcessUnlock": (_Int, POINTER(CUcheckpointUnlockArgs)),
}
"""The parameter types of each function. All functions return a CUresult."""
CHECKPOINT = tuple(f"cuCheckpointProcess{name}" for name in ("GetState", "Lock", "Checkpoint", "Restore", "Unlock"))
"""The functions that suspend and resume a process, since driver 570."""


class DriverAPI:
    """libcuda. Its functions are attributes, bound at first use; each returns a CUresult, 0 for success.

    Input parameters are plain integers (handles and addresses too). Output parameters are ctypes objects, passed
    without `byref`: `cuda.cuDeviceGet(device, 0)` passes `&device`. Raises AttributeError if the driver lacks the
    function.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name not in SIGNATURES:
            raise AttributeError(f"{name} is not in memguard._devices.libcuda.SIGNATURES")
        function = getattr(self._library, name)
        function.argtypes, function.restype = SIGNATURES[name], c_int
        setattr(self, name, function)  # an ordinary attribute from now on: Python no longer calls __getattr__
        return function  # type: ignore[no-any-return]


_library: DriverAPI | None = None


def already_loaded() -> DriverAPI | None:
    """libcuda if this process has loaded it. Loads nothing and initialises nothing."""
    global _library
    if _library is None:
        # A separate CDLL: types set on it do not affect other users of libcuda through ctypes.
        try:
            _library = DriverAPI(ctypes.CDLL(NAME, mode=getattr(os, "RTLD_NOLOAD", 4)))
        except OSError:
            return None
    return _library


def quick(name: str) -> Callable[..., int] | None:
    """A function of libcuda with little call overhead, for use at each allocation; None if the driver lacks the
    function.

    The function takes prepared ctypes objects, and None for a null pointer. Its calls keep the GIL, so the function
    must be one that returns immediately.
    """
    if name not in SIGNATURES:
        raise AttributeError(f"{name} is not in memguard._devices.libcuda.SIGNATURES")
    try:
        function = getattr(ctypes.PyDLL(NAME, mode=getattr(os, "RTLD_NOLOAD", 4)), name)
    except (OSError, AttributeError):
        return None
    return function  # type: ignore[no-any-return]


def opened(path: str) -> ctypes.CDLL | None:
    """A handle of the library at `path`, which keeps the library loaded; None if this process has not loaded it."""
    try:
        return ctypes.CDLL(path, mode=getattr(os, "RTLD_NOLOAD", 4) | os.RTLD_LAZY)
    except OSError:
        return None


def exports(*functions: str) -> bool | None:
    """True if the libcuda that this process has loaded has these functions; None if no libcuda is loaded."""
    try:
        library = ctypes.CDLL(NAME, mode=getattr(os, "RTLD_NOLOAD", 4))
    except OSError:
        return None
    return all(address(library, function) is not None for function in functions)


def address(library: ctypes.CDLL, function: str) -> int | None:
    """The address of a function; None if the library lacks it."""
    try:
        return ctypes.cast(getattr(library, function), c_void_p).value
    except AttributeError:
        return None


def of_c(function: str) -> int | None:
    """The address of a function of the C library, or of another library linked into this process."""
    return address(ctypes.CDLL(None), function)


def touch(address: int) -> None:
    """Read one byte of a loaded library, so that the kernel maps its page."""
    ctypes.string_at(address, 1)


def advise(page: int, size: int, advice: int) -> bool:
    """Advise the kernel how this process uses memory (`madvise`). True if the kernel accepts the advice."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (c_void_p, c_size_t, c_int)
    return bool(madvise(page, size, advice) == 0)


def load() -> DriverAPI:
    """libcuda, loaded on demand. Raises OSError if loading fails.

    Only for memguard's own processes (the doctor's survey, the child that reads CUDA's order), and for a process that
    attaches another process's memory, which requires CUDA.
    """
    global _library
    if _library is None:
        _library = DriverAPI(ctypes.CDLL(NAME))
    return _library


def error_name(code: int) -> str | None:
    """`CUDA_ERROR_NO_DEVICE` for 100 (`cuGetErrorName`); None if the driver does not know the code."""
    name = c_char_p()
    if _library is not None and hasattr(_library, "cuGetErrorName"):
        _library.cuGetErrorName(code, name)
    return name.value.decode(errors="replace") if name.value else None


def check(call: str, code: int) -> None:
    """Raise DeviceError if `code`, the result of the function `call`, is not 0 (CUDA_SUCCESS)."""
    if code:
        name = error_name(code)
        error = f"{name} (error {code})" if name else f"error {code}"
        raise DeviceError(f"CUDA: {call}: {error}", fix="run `nvidia-smi` and check the driver")


def device_uuid(cuda: DriverAPI, device: int) -> str:
    """The device's UUID in NVML's form (`GPU-…`). Raises DeviceError if CUDA does not report it."""
    raw = (c_ubyte * 16)()
    call = "cuDeviceGetUuid_v2" if hasattr(cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"  # drivers before 470
    check(call, getattr(cuda, call)(raw, device))
    return gpu_uuid(bytes(raw))
