"""DLPack capsules, read and made with ctypes: the form in which PyTorch, TensorFlow, JAX and CuPy take memory.

Unversioned ones (`dltensor`), which all four take; TensorFlow and JAX take no other (measured). The deleter of one
may run on any thread, and takes the GIL there.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any

from memguard.exchange.lifetimes import Loan
from memguard.exchange.view import DTYPES, View, dtype_of_code, row_major

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY


_TENSOR = struct.Struct("@QiiiBBHQQQ")
"""A `DLTensor`: address, device's kind and number, dimensions, dtype's code, bits and lanes, shape, strides, offset."""
_VERSION = struct.Struct("@IIQQQ")
"""What comes before it in a versioned capsule: major and minor version, context, deleter, flags."""
_Tensor, _Version = ctypes.c_char * _TENSOR.size, ctypes.c_char * _VERSION.size
_valid = ctypes.pythonapi.PyCapsule_IsValid
_valid.restype, _valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)

_HEAD = struct.Struct("@QiiiB")
"""How a `DLTensor` begins, up to the dtype's code."""
_Head = ctypes.c_char * _HEAD.size
_WORDS = {1: "|u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}
"""NumPy's dtypes by size: what the elements mean is written into the capsule afterwards."""


class Unreadable(ValueError):
    """A capsule that holds something other than an array as `View` can say it."""


def read(capsule: Any) -> View:
    """What a capsule that nobody has consumed yet holds. It keeps the memory; `device` is the capsule's own number.

    Raises Unreadable: a dtype that arrays here have not, packed lanes, another kind of device.
    """
    readonly = False
    if _valid(capsule, b"dltensor"):
        at = _pointer(capsule, b"dltensor")
    elif _valid(capsule, b"dltensor_versioned"):
        at = _pointer(capsule, b"dltensor_versioned")
        major, _, _, _, flags = _VERSION.unpack_from(_Version.from_address(at))
        if major != 1:
            raise Unreadable(f"its capsule is of DLPack {major}")
        at, readonly = at + _VERSION.size, bool(flags & _READ_ONLY)
    else:
        raise Unreadable(
            "its DLPack capsule was used before"
            if type(capsule).__name__ == "PyCapsule"
            else f"its library gives a {type(capsule).__name__} for a DLPack capsule"
        )
    address, kind, number, ndim, code, bits, lanes, extents, steps, offset = _TENSOR.unpack_from(
        _Tensor.from_address(at)
    )
    if kind not in (CPU, CUDA, CUDA_HOST, CUDA_MANAGED):
        raise Unreadable(f"it lies on a device of DLPack's kind {kind}, neither the host nor a CUDA GPU")
    dtype = dtype_of_code(code, bits, lanes)
    if dtype is None:
        raise Unreadable(
            f"its dtype (DLPack code {code}, {bits} bits, {lanes} lanes) is not one that can be handed over"
        )
    numbers = _numbers(ndim)
    shape = tuple(numbers.from_address(extents)) if ndim else ()
    strides = tuple(numbers.from_address(steps)) if steps and ndim else row_major(shape)
    device = number if kind in (CUDA, CUDA_MANAGED) else None
    return View(address + offset, shape, strides, dtype, device, readonly)


@functools.lru_cache(maxsize=128)
def _numbers(ndim: int) -> Any:
    """ctypes keeps such a type only until the next garbage collection, and it takes 25 us to make."""
    return ctypes.c_int64 * ndim


def capsule(view: View, loan: Loan, *, device: int | None) -> Any:
    """An unversioned capsule over the loan's memory; its consumer's last view ends the loan.

    `device` is the number that the consumer knows the GPU by; None for the host. NumPy makes it, of an array that
    nobody reads, and what NumPy cannot say is written over: a view may be freed while an exception is on its way, or
    after the interpreter's end. A deleter in Python would lose the one and crash at the other; NumPy's does neither.
    """
    import numpy

    made = numpy.asarray(_Block(view, loan)).__dlpack__()
    head = _Head.from_address(_pointer(made, b"dltensor"))
    place = (CPU, 0) if device is None else (CUDA, device)
    _HEAD.pack_into(head, 0, view.address, *place, len(view.shape), DTYPES[view.dtype][0])
    return made


class _Block:
    """A loan's memory as NumPy takes it. It belongs to the array, and the array to the capsule."""

    __slots__ = ("__array_interface__", "_loan")

    def __init__(self, view: View, loan: Loan) -> None:
        self._loan = loan
        self.__array_interface__ = {
            "shape": view.shape,
            "typestr": _WORDS[view.itemsize],
            "data": (view.address, False),
            "strides": None if view.compact else view.byte_strides,
            "version": 3,
        }


class Exporter:
    """What `from_dlpack` functions take. `before` makes a stream wait until the memory is ready."""

    def __init__(self, view: View, loan: Loan, device: int | None, before: Any) -> None:
        self._view, self._loan, self._device, self._before = view, loan, device, before

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0) if self._device is None else (CUDA, self._device)

    def __dlpack__(self, *, stream: int | None = None, **_: object) -> Any:
        """`stream` as the protocol has it: -1 for no waiting, None for the legacy default stream."""
        if stream != -1:
            self._before(1 if stream is None else stream)
        return capsule(self._view, self._loan, device=self._device)
