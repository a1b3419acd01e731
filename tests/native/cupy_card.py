"""The real CuPy over the stub of libcuda, with one GPU. CuPy brings CUDA's runtime in itself, which accepts no stub.

So the few calls of the runtime that its pools make are answered here: before CuPy's modules look them up, which they do
when they are imported. `pool` is a real `MemoryPool` that takes from the stub by CuPy's own `PythonFunctionAllocator`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import PYFUNCTYPE, c_char_p, c_int, c_size_t, c_uint64, c_void_p, py_object
from typing import Any

from cupy_backends.cuda.api import runtime

_new, _name = ctypes.pythonapi.PyCapsule_New, ctypes.pythonapi.PyCapsule_GetName
_new.restype, _new.argtypes = py_object, [c_void_p, c_char_p, c_void_p]
_name.restype, _name.argtypes = c_char_p, [py_object]
_kept: list[Any] = []
capturing = [0]


def _answer(name: str, answer: Callable[..., int], *takes: Any) -> None:
    """A call of the runtime, for CuPy's compiled modules and for Python. The last argument is Cython's."""
    call, label = PYFUNCTYPE(c_int, *takes, c_int)(answer), _name(runtime.__pyx_capi__[name])
    _kept.extend((call, label))
    runtime.__pyx_capi__[name] = _new(ctypes.cast(call, c_void_p), label, None)
    setattr(runtime, name, lambda *given: answer(*given, 0))


_answer("getDevice", lambda _: 0)
_answer("getDeviceCount", lambda _: 1)
_answer("streamIsCapturing", lambda _, __: capturing[0], c_void_p)

import cupy  # noqa: E402

stub = ctypes.CDLL("libcuda.so.1")
stub.stub_taken.restype = c_size_t
PRIMARY = c_void_p(0x7F0000001000)


def take(size: int, ordinal: int) -> int:
    found = c_uint64()
    if stub.cuCtxGetDevice(ctypes.byref(c_int())):
        stub.cuCtxPushCurrent_v2(PRIMARY)  # as the runtime does with a thread's first call
    if code := stub.cuMemAlloc_v2(ctypes.byref(found), c_size_t(size)):
        raise cupy.cuda.runtime.CUDARuntimeError(code)
    return found.value


def give(address: int, ordinal: int) -> None:
    assert stub.cuMemFree_v2(c_uint64(address)) == 0


pool = cupy.cuda.MemoryPool(cupy.cuda.PythonFunctionAllocator(take, give).malloc)
cupy.cuda.set_allocator(pool.malloc)


def taken() -> int:
    """What the driver has handed out."""
    return int(stub.stub_taken())


def full(mib: int | None) -> None:
    """Let the GPU have so much memory; None: 1 GiB."""
    ctypes.CDLL(None).setenv(b"CUDA_STUB_MIB", str(mib or 1024).encode(), 1)
