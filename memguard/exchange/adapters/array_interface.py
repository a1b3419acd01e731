"""The array interfaces, CUDA's and NumPy's, in which PyCUDA's, Numba's and NumPy's arrays are shown and read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memguard._devices import contexts, streams
from memguard.exchange.lifetimes import Loan
from memguard.exchange.view import DTYPES, View, dtype_of_typestr, row_major


class Malformed(ValueError):
    """An interface that describes no array as `View` can say it. `remedy` is what to do."""

    def __init__(self, reason: str, remedy: str = "look at how its library makes it") -> None:
        super().__init__(reason)
        self.remedy = remedy


def read(interface: Mapping[str, Any]) -> tuple[View, int | None, int | None]:
    """The array, the stream it names (None: none), and the context it belongs to where that is not the primary one.

    Raises Malformed.
    """
    try:
        (address, readonly), typestr = interface["data"], interface["typestr"]
        shape, given = tuple(map(int, interface["shape"])), interface.get("strides")
        given = None if given is None else tuple(map(int, given))
        dtype = dtype_of_typestr(typestr)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise Malformed(f"its array interface is not one: {error!r}") from error
    if dtype is None:
        raise Malformed(f"its dtype {typestr!r} is not one that can be handed over", "cast it where it comes from")
    if interface.get("mask") is not None:
        raise Malformed("it is masked, which no framework here reads", "fill in what is masked where it comes from")
    itemsize = DTYPES[dtype][1] // 8
    if min(shape, default=0) < 0 or (given is not None and len(given) != len(shape)):
        raise Malformed(f"its array interface is not one: shape {shape}, strides {given}")
    if given is not None and any(stride % itemsize for stride in given):
        raise Malformed("its strides are no multiples of its elements' size", "make it contiguous where it comes from")
    strides = row_major(shape) if given is None else tuple([stride // itemsize for stride in given])
    found = streams.place(int(address or 0)) if address and 0 not in shape else None
    view = View(int(address or 0), shape, strides, dtype, found[0] if found else 0, bool(readonly))
    if found is None and view.size:
        raise Malformed(
            f"CUDA knows no memory at its address {view.address:#x}: it was freed, or is another process's",
            "keep what it is of alive",
        )
    context = found[1] if found is not None and found[1] not in (None, contexts.primary(found[0])) else None
    return view, interface.get("stream"), context


class Shown:
    """Memory of a loan, as the interface shows it. The loan ends with this object, which its arrays keep."""

    def __init__(self, view: View, loan: Loan) -> None:
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
            self.__cuda_array_interface__ = {**interface, "stream": None}  # whoever asks has waited already
        self._loan = loan
