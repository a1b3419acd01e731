"""Reads and writes the array interfaces of CUDA and NumPy, through which PyCUDA, Numba and NumPy share arrays."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from memguard._devices import contexts, streams
from memguard._frameworks.arrays.lifetimes import Lifetime
from memguard._frameworks.arrays.view import (
    DTYPES,
    ITEM_SIZES,
    View,
    compact,
    dtype_of_typestr,
    in_elements,
    new_view,
    row_major,
)


class Malformed(ValueError):
    """Raised for an array interface that `View` cannot represent. `remedy` is the fix for the user."""

    def __init__(self, reason: str, remedy: str = "check how its library makes it") -> None:
        super().__init__(reason)
        self.remedy = remedy


def read(interface: Mapping[str, Any]) -> tuple[View, int | None, int | None]:
    """Parse an array interface. Returns the view, the stream, and the CUDA context that owns the memory.

    The stream is None if the interface names none, the context None for the GPU's primary one. Raises Malformed.
    """
    try:
        (address, readonly), layout = interface["data"], (interface["typestr"], interface["shape"])
        try:
            dtype, shape, strides = _layout(*layout, interface.get("strides"))
        except TypeError:  # `lru_cache` cannot hash a list: call the uncached function
            dtype, shape, strides = _layout.__wrapped__(*layout, interface.get("strides"))
        address = int(address or 0)
    except Malformed:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise Malformed(f"its array interface is not valid: {error!r}") from error
    if interface.get("mask") is not None:
        raise Malformed("it is masked, and no other framework reads masks", "fill in the masked values first")
    device, context = 0, None
    if 0 not in shape:
        found = streams.place(address) if address else None
        if found is None:
            raise Malformed(
                f"CUDA knows no memory at its address {address:#x}: it was freed, or belongs to another process",
                "keep the object that owns its memory alive",
            )
        device, context = found
        if context is not None and context == contexts.primary(device):
            context = None
    view = new_view((address, shape, strides, dtype, device, bool(readonly)))
    return view, interface.get("stream"), context


@functools.lru_cache(maxsize=1024)
def _layout(typestr: Any, shape: Any, given: Any) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Validate and return dtype, shape, and strides in elements. Cached, because many arrays have the same layout."""
    shape = tuple(map(int, shape))
    given = None if given is None else tuple(map(int, given))
    dtype = dtype_of_typestr(typestr)
    if dtype is None:
        raise Malformed(f"its dtype {typestr!r} cannot be handed over", "cast it in its own framework")
    if min(shape, default=0) < 0 or (given is not None and len(given) != len(shape)):
        raise Malformed(f"its array interface is not valid: shape {shape}, strides {given}")
    strides = row_major(shape) if given is None else in_elements(given, ITEM_SIZES[dtype])
    if strides is None:
        raise Malformed("its strides are not multiples of its item size", "make it contiguous in its own framework")
    return dtype, shape, strides


class WithInterface:
    """Shared memory with an array interface. Arrays created from this object reference the object, and the object
    references the lifetime.

    `stream` is the user's stream, which already waits for the producer's work. If `stream` is None, any stream may use
    the memory without a wait.
    """

    def __init__(self, view: View, lifetime: Lifetime, stream: int | None = None) -> None:
        address, shape, strides, dtype, device, readonly = view
        interface = {
            "shape": shape,
            "typestr": DTYPES[dtype][2],
            "data": (address, readonly),
            "strides": None if compact(shape, strides) else view.byte_strides,
            "version": 3,
        }
        if device is None:
            self.__array_interface__ = interface
        else:
            # the CUDA array interface forbids handle 0, so use handle 1 (LEGACY) for the legacy default stream
            interface["stream"] = None if stream is None else stream or streams.LEGACY
            self.__cuda_array_interface__ = interface
        self._lifetime = lifetime
