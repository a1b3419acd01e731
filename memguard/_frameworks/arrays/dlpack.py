"""Reads and creates, with ctypes, the DLPack capsules from which PyTorch, TensorFlow, JAX and CuPy import memory.

memguard creates unversioned capsules (`dltensor`), which all four frameworks accept. TensorFlow and JAX accept no
versioned ones (measured). A capsule's deleter may run on any thread, and acquires the GIL there.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any

from memguard._frameworks.arrays.lifetimes import Lifetime
from memguard._frameworks.arrays.view import DTYPES, View, compact, dtype_of_code, new_view, row_major

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType
_KINDS = (CPU, CUDA, CUDA_HOST, CUDA_MANAGED)
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
_TENSOR = struct.Struct("@QiiiBBHQQQ")
"""A `DLTensor`: address, device type and index, dimensions, dtype code, bits and lanes, shape, strides, offset."""
_VERSION = struct.Struct("@IIQQQ")
"""The fields before the `DLTensor` in a versioned capsule: major and minor version, context, deleter, flags."""
_Tensor, _Version = ctypes.c_char * _TENSOR.size, ctypes.c_char * _VERSION.size
_valid = ctypes.pythonapi.PyCapsule_IsValid
_valid.restype, _valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)

_HEAD = struct.Struct("@QiiiB")
"""The beginning of a `DLTensor`, up to the dtype code."""
_Head = ctypes.c_char * _HEAD.size
_WORDS = {1: "|u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}
"""A NumPy dtype of each element size. NumPy creates the capsule with this dtype, and `capsule` then writes the true
dtype code into it."""


class BadCapsule(ValueError):
    """A capsule with an array that `View` cannot represent."""


def read(capsule: Any) -> View:
    """Read the description of the array in a capsule. Does not consume the capsule, which still owns the memory.

    The view's `device` is the capsule's device index, in the producer's numbering. Raises BadCapsule for an unknown
    dtype, packed lanes, or a device that is neither the host nor a CUDA GPU.
    """
    readonly = False
    try:
        at = _pointer(capsule, b"dltensor")
    except ValueError:  # `capsule` is versioned, already consumed, or not a capsule
        at, readonly = _versioned(capsule)
    address, kind, number, ndim, code, bits, lanes, extents, steps, offset = _TENSOR.unpack_from(
        _Tensor.from_address(at)
    )
    if kind not in _KINDS:
        raise BadCapsule(f"it lies on a device of DLPack's kind {kind}, neither the host nor a CUDA GPU")
    dtype = dtype_of_code(code, bits, lanes)
    if dtype is None:
        raise BadCapsule(
            f"its dtype (DLPack code {code}, {bits} bits, {lanes} lanes) is not one that can be handed over"
        )
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    if ndim:
        numbers, unpack = _numbers(ndim)
        shape = unpack(numbers.from_address(extents))
        strides = unpack(numbers.from_address(steps)) if steps else row_major(shape)
    device = number if kind in (CUDA, CUDA_MANAGED) else None
    return new_view((address + offset, shape, strides, dtype, device, readonly))


def _versioned(capsule: Any) -> tuple[int, bool]:
    """The address of the `DLTensor` in a versioned capsule, and whether the array is read-only."""
    if _valid(capsule, b"dltensor_versioned"):
        at = _pointer(capsule, b"dltensor_versioned")
        major, _, _, _, flags = _VERSION.unpack_from(_Version.from_address(at))
        if major != 1:
            raise BadCapsule(f"its capsule uses DLPack {major}, which memguard cannot read")
        return at + _VERSION.size, bool(flags & _READ_ONLY)
    raise BadCapsule(
        "its DLPack capsule was used before"
        if type(capsule).__name__ == "PyCapsule"
        else f"its __dlpack__ returned a {type(capsule).__name__}, not a capsule"
    )


@functools.lru_cache(maxsize=128)
def _numbers(ndim: int) -> tuple[Any, Callable[[Any], tuple[int, ...]]]:
    """A ctypes buffer type for `ndim` int64 values, and the function that unpacks them.

    Cached, because creating a ctypes type takes 25 us, and a type without references is garbage-collected.
    """
    return ctypes.c_char * (8 * ndim), struct.Struct(f"@{ndim}q").unpack_from


def capsule(view: View, lifetime: Lifetime, *, device: int | None) -> Any:
    """Create an unversioned capsule over the memory of `view`. The lifetime ends when the consumer frees its last view.

    `device` is the GPU's index in the consumer's numbering, None for the host. NumPy creates the capsule from a
    temporary array, and this function overwrites the device and dtype fields, which NumPy cannot set. The capsule thus
    has NumPy's deleter, which is written in C: a view may be freed while an exception propagates, or after the
    interpreter has ended. A Python deleter would lose the exception, and would crash without an interpreter.
    """
    import numpy

    address, shape, strides, dtype, _, _ = view
    code, bits, _ = DTYPES[dtype]
    block = _Block()
    block.lifetime = lifetime
    block.__array_interface__ = {
        "shape": shape,
        "typestr": _WORDS[bits // 8],
        "data": (address or _NOWHERE, False),
        "strides": None if compact(shape, strides) else view.byte_strides,
        "version": 3,
    }
    made = numpy.asarray(block).__dlpack__()
    head, ndim = _Head.from_address(_pointer(made, b"dltensor")), len(shape)
    if device is None:
        _HEAD.pack_into(head, 0, address, CPU, 0, ndim, code)
    else:
        _HEAD.pack_into(head, 0, address, CUDA, device, ndim, code)
    return made


_NOWHERE = 64
"""Address for arrays without elements, because NumPy before 2.4 rejects address 0. Nothing reads this address."""


class _Block:
    """Passes the memory to `numpy.asarray`. The capsule references NumPy's array, the array references this object, and
    this object references the lifetime."""

    __slots__ = ("__array_interface__", "lifetime")
    __array_interface__: dict[str, Any]
    lifetime: Lifetime


class Exporter:
    """The producer argument of a framework's `from_dlpack`. `make_wait` makes a stream wait for the producer's work."""

    def __init__(self, view: View, lifetime: Lifetime, device: int | None, make_wait: Any) -> None:
        self._view, self._lifetime, self._device, self._make_wait = view, lifetime, device, make_wait

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0) if self._device is None else (CUDA, self._device)

    def __dlpack__(self, *, stream: int | None = None, **_: object) -> Any:
        """Create a capsule. As DLPack defines, `stream` is -1 for no synchronisation, None for the legacy default
        stream."""
        if stream != -1:
            self._make_wait(1 if stream is None else stream)
        return capsule(self._view, self._lifetime, device=self._device)
