"""Describes memory as an array independently of frameworks: address, shape, strides, dtype, device. Pure.

Strides count elements, as in DLPack. Dtypes have the names of NumPy and ml_dtypes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

DTYPES: dict[str, tuple[int, int, str | None]] = {
    "bool": (6, 8, "|b1"),
    "int8": (0, 8, "|i1"),
    "int16": (0, 16, "<i2"),
    "int32": (0, 32, "<i4"),
    "int64": (0, 64, "<i8"),
    "uint8": (1, 8, "|u1"),
    "uint16": (1, 16, "<u2"),
    "uint32": (1, 32, "<u4"),
    "uint64": (1, 64, "<u8"),
    "float16": (2, 16, "<f2"),
    "float32": (2, 32, "<f4"),
    "float64": (2, 64, "<f8"),
    "bfloat16": (4, 16, None),
    "complex64": (5, 64, "<c8"),
    "complex128": (5, 128, "<c16"),
    "float8_e4m3fn": (10, 8, None),
    "float8_e4m3fnuz": (11, 8, None),
    "float8_e5m2": (12, 8, None),
    "float8_e5m2fnuz": (13, 8, None),
    "float8_e8m0fnu": (14, 8, None),
}
"""DLPack code (`DLDataTypeCode`), bits, and NumPy `typestr` of each dtype; None if NumPy lacks the dtype."""
ITEM_SIZES = {name: bits // 8 for name, (_, bits, _) in DTYPES.items()}
"""Bytes of an element of each dtype."""
NUMPY_DTYPES = frozenset(name for name, (_, _, typestr) in DTYPES.items() if typestr is not None)
"""The dtypes that NumPy and the array interfaces support."""
NO_FLOAT8 = frozenset(name for name in DTYPES if not name.startswith("float8"))
_BY_CODE = {(code, bits): name for name, (code, bits, _) in DTYPES.items()}
_BY_TYPESTR = {typestr: name for name, (_, _, typestr) in DTYPES.items() if typestr is not None}


def dtype_of_code(code: int, bits: int, lanes: int = 1) -> str | None:
    """The dtype of these DLPack fields; None if it is not in DTYPES."""
    return _BY_CODE.get((code, bits)) if lanes == 1 else None


def dtype_of_typestr(typestr: str) -> str | None:
    """The dtype of an array interface's `typestr`; None for structures, text and foreign byte order."""
    if typestr[1:] in ("b1", "i1", "u1"):  # byte order is meaningless for a single byte
        typestr = "|" + typestr[1:]
    return _BY_TYPESTR.get(typestr)


@functools.lru_cache(maxsize=1024)
def dtype_name(dtype: Any) -> str:
    """The name of a NumPy dtype. A dtype of foreign byte order gets a name outside DTYPES."""
    return str(dtype)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a compact array of this shape, last dimension fastest."""
    if len(shape) == 1:
        return (1,)
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


class View(NamedTuple):
    """An array in memory. `address` is the byte address of the element with index 0. `device` is CUDA's ordinal, None
    for host memory."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int | None
    readonly: bool = False

    @property
    def itemsize(self) -> int:
        return ITEM_SIZES[self.dtype]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, without gaps: the size of a compact copy."""
        return self.size * self.itemsize

    @property
    def extent(self) -> tuple[int, int]:
        """The byte range of the elements: the address of the first byte, and one past the last."""
        if not self.size:
            return self.address, self.address
        steps = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        low, high = sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps)
        return self.address + low * self.itemsize, self.address + (high + 1) * self.itemsize

    @property
    def compact(self) -> bool:
        """True if the array is row-major without gaps."""
        return compact(self.shape, self.strides)

    @property
    def dense(self) -> bool:
        """True if the array has no gaps in some order of its dimensions, such as a transposed compact array."""
        if not self.size:
            return True
        step = 1
        for stride, extent in sorted(_relevant(self.shape, self.strides)):
            if stride != step:
                return False
            step *= extent
        return True

    @property
    def backwards(self) -> bool:
        """True if a dimension has a negative stride."""
        return min(self.strides, default=0) < 0 and any(stride < 0 for stride, _ in _relevant(self.shape, self.strides))

    @property
    def repeats(self) -> bool:
        """True if a dimension has a stride of 0, as a broadcast dimension does."""
        return 0 in self.strides and any(not stride for stride, _ in _relevant(self.shape, self.strides))

    def forwards(self) -> tuple[View, tuple[int, ...]]:
        """Reverse each axis that has a negative stride. Returns a view of the same elements, and the reversed axes."""
        axes = tuple(axis for axis, stride in enumerate(self.strides) if stride < 0)
        if not axes:
            return self, ()
        back = sum((self.shape[axis] - 1) * self.strides[axis] for axis in axes)
        address = self.address + back * self.itemsize
        return self._replace(address=address, strides=tuple(abs(stride) for stride in self.strides)), axes

    @property
    def byte_strides(self) -> tuple[int, ...]:
        return in_bytes(self.strides, ITEM_SIZES[self.dtype])


new_view: Callable[[tuple[Any, ...]], View] = functools.partial(tuple.__new__, View)
"""Create a view from all its fields, in a quarter of the constructor's time. Every hand-over creates a view."""


@functools.lru_cache(maxsize=1024)
def in_bytes(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Convert strides from elements to bytes. Cached like the two functions below, because arrays often have the same
    shape."""
    return tuple([stride * itemsize for stride in strides])


@functools.lru_cache(maxsize=1024)
def in_elements(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...] | None:
    """Convert strides from bytes to elements; None if a stride is no multiple of the item size."""
    if any(stride % itemsize for stride in strides):
        return None
    return tuple([stride // itemsize for stride in strides])


@functools.lru_cache(maxsize=1024)
def compact(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether an array is row-major, without gaps."""
    usual = row_major(shape)
    return strides == usual or 0 in shape or _relevant(shape, strides) == _relevant(shape, usual)


def _relevant(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Stride and extent of each dimension, except dimensions of one element, whose stride has no effect."""
    return [(stride, extent) for stride, extent in zip(strides, shape, strict=True) if extent != 1]
