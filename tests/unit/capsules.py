"""DLPack by its specification, byte by byte: capsules of other libraries, and how others consume ours."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_api = ctypes.pythonapi
_new, _name, _rename, _pointer = (
    getattr(_api, f"PyCapsule_{call}") for call in ("New", "GetName", "SetName", "GetPointer")
)
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, DELETER)
_name.restype, _name.argtypes = ctypes.c_char_p, (ctypes.py_object,)
_rename.argtypes = (ctypes.py_object, ctypes.c_char_p)
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_NAMES = {name: ctypes.c_char_p(name) for name in (b"dltensor", b"dltensor_versioned", b"used_dltensor")}
"""A capsule keeps the address of its name only."""
_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
"""By its address: for a capsule that is being freed."""
_kept: list[Any] = []


def produced(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    *,
    device: tuple[int, int] = (1, 0),
    dtype: tuple[int, int, int] = (2, 32, 1),
    offset: int = 0,
    version: tuple[int, int] | None = None,
    flags: int = 0,
    deleted: Callable[[], None] = lambda: None,
) -> Any:
    """A capsule as another library makes it; with a version a versioned one.

    `deleted` runs with its deleter, or when a capsule that nobody consumed is freed.
    """
    dims = [(ctypes.c_int64 * max(len(shape), 1))(*numbers) for numbers in (shape, strides or ())]
    deleter = DELETER(lambda _: deleted())
    tensor = struct.pack(
        "=QiiiBBHQQQ", address, *device, len(shape), *dtype,
        ctypes.addressof(dims[0]), 0 if strides is None else ctypes.addressof(dims[1]), offset,
    )  # fmt: skip
    end = ctypes.cast(deleter, ctypes.c_void_p).value or 0
    if version is None:
        text, called = tensor + struct.pack("=QQ", 0, end), b"dltensor"
    else:
        text, called = struct.pack("=IIQQQ", *version, 0, end, flags) + tensor, b"dltensor_versioned"
    block = ctypes.create_string_buffer(text, len(text))
    destructor = DELETER(lambda capsule: deleted() if _valid(capsule, called) else None)
    _kept.append((block, dims, deleter, destructor))
    return _new(ctypes.addressof(block), _NAMES[called], destructor)


class Consumed:
    """An unversioned capsule as a library consumes it: `done` calls the deleter."""

    def __init__(self, capsule: Any) -> None:
        self.managed = _pointer(capsule, b"dltensor")
        _rename(capsule, _NAMES[b"used_dltensor"])
        (
            self.address, self.kind, self.device, ndim, self.code, self.bits, self.lanes, shape, strides, offset,
            _, self._deleter,
        ) = struct.unpack("=QiiiBBHQQQQQ", ctypes.string_at(self.managed, 64))  # fmt: skip
        self.address += offset
        self.shape = struct.unpack(f"={ndim}q", ctypes.string_at(shape, 8 * ndim))
        self.strides = struct.unpack(f"={ndim}q", ctypes.string_at(strides, 8 * ndim)) if strides else None

    def done(self, call: Callable[[Any], Any] = DELETER) -> None:
        call(self._deleter)(self.managed)


def name(capsule: Any) -> bytes:
    found: bytes = _name(capsule)
    return found
