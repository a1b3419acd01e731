"""The array interfaces of CUDA and NumPy: PyCUDA's, Numba's and NumPy's arrays are read and made through them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memguard._devices import contexts, streams
from memguard.exchange.lifetimes import Lifetime
from memguard.exchange.view import DTYPES, View, dtype_of_typestr, row_major


class Malformed(ValueError):
    """An interface that describes no array that `View` can describe. `remedy` says what to do."""

    def __init__(self, reason: str, remedy: str = "check how its library makes it") -> None:
        super().__init__(reason)
        self.remedy = remedy


def read(interface: Mapping[str, Any]) -> tuple[View, int | None, int | None]:
    """The array, the stream that it names (or None), and the context of its memory if that is not the primary one.

    Raises Malformed.
    """
    try:
        (address, readonly), typestr = interface["data"], interface["typestr"]
        shape, given = tuple(map(int, interface["shape"])), interface.get("strides")
        given = None if given is None else tuple(map(int, given))
        dtype = dtype_of_typestr(typestr)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise Malformed(f"its array interface is not valid: {error!r}") from error
    if dtype is None:
        raise Malformed(f"its dtype {typestr!r} cannot be handed over", "cast it in its own framework")
    if interface.get("mask") is not None:
        raise Malformed("it is masked, and no other framework reads masks", "fill in the masked values first")
    itemsize = DTYPES[dtype][1] // 8
    if min(shape, default=0) < 0 or (given is not None and len(given) != len(shape)):
        raise Malformed(f"its array interface is not valid: shape {shape}, strides {given}")
    if given is not None and any(stride % itemsize for stride in given):
        raise Malformed("its strides are not multiples of its item size", "make it contiguous in its own framework")
    strides = row_major(shape) if given is None else tuple([stride // itemsize for stride in given])
    found = streams.place(int(address or 0)) if address and 0 not in shape else None
    view = View(int(address or 0), shape, strides, dtype, found[0] if found else 0, bool(readonly))
    if found is None and view.size:
        raise Malformed(
            f"CUDA knows no memory at its address {view.address:#x}: it was freed, or belongs to another process",
            "keep the object that owns its memory alive",
        )
    context = found[1] if found is not None and found[1] not in (None, contexts.primary(found[0])) else None
    return view, interface.get("stream"), context


class WithInterface:
    """Shared memory with an array interface. The arrays made of it keep this object, which keeps the lifetime.

    `stream` is the one that waits for the memory, if the user named it; without one it is ready for any.
    """

    def __init__(self, view: View, lifetime: Lifetime, stream: int | None = None) -> None:
        interface = {
            "shape": view.shape,
            "typestr": DTYPES[view.dtype][2],
            "data": (view.address, view.readonly),
            "strides": None if view.compact else view.byte_strides,
            "version": 3,
        }
        if view.device is None:
            self.__array_interface__ = interface
        else:
            named = None if stream is None else stream or streams.LEGACY  # the protocol has no stream 0
            self.__cuda_array_interface__ = {**interface, "stream": named}
        self._lifetime = lifetime
