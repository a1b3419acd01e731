"""`to`: one framework's array as another's, shared where that is right, copied only where it was asked for."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any, NamedTuple

from memguard._devices import copies, streams
from memguard._units import format_size
from memguard.errors import CannotShare
from memguard.exchange import arguments, compatibility, lifetimes
from memguard.exchange.adapters import registry
from memguard.exchange.adapters.base import Arrays
from memguard.exchange.compatibility import Layout
from memguard.exchange.lifetimes import Offer

_log = logging.getLogger("memguard")
_CARRIERS = ("torch", "cupy")
"""They take any strides, and copy into one piece what others cannot."""
_last = threading.local()


class Route(NamedTuple):
    """How an array was handed over. `way` is `shared`, `copied`, `copied from cuda:0 to cuda:1`, and so on.

    `reason` is why it was not shared, where a copy was asked for and sharing could not be.
    """

    source: str
    target: str
    way: str
    nbytes: int
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.source} to {self.target}: {format_size(self.nbytes)} {self.way}"


def to(x: Any, framework: str, *, copy: bool | None = None, stream: Any = None, device: int | None = None) -> Any:
    """`x` as an array of `framework`: torch, tensorflow, cupy, jax, pycuda or numba; numpy for host memory.

    copy=None shares the memory, and raises CannotShare with reason and remedy where that is not right. copy=True
    copies on the GPU, to another one with `device` (CUDA's ordinal), and through the host only to or from host memory;
    `last_route()` says which way. copy=False shares or raises, read-only memory too: then writing is on you.
    `stream` is the one that will use the result (a handle, or any object with `__cuda_stream__`); without it the
    framework's current one, or the host where it has none to tell. The memory lives as long as any view of it.
    """
    taker = registry.by_name(framework)
    arguments.check(copy, device, taker)
    giver, then = registry.of(x), arguments.handle(stream, taker)
    own = giver is taker and not copy
    if own and device is None and then is None:
        return x
    offer = giver.offer(x)
    if giver.immutable and copy is None and taker.keeps_readonly:
        offer = offer._replace(view=offer.view._replace(readonly=True))
    view = offer.view
    where = view.device if own and device is None else taker.place(view, device)
    own = own and view.device == where
    asked = view._replace(readonly=False) if copy is False else view  # who says so may have read-only memory
    hindrance = None if own else giver.reservation(x) or compatibility.obstacle(asked, taker.taker, where)
    if hindrance is not None and not (copy and hindrance.copied):
        raise CannotShare(offer.lender, taker.name, hindrance.reason, hindrance.remedy, copied=bool(copy))
    try:
        if own:
            if then is not None:
                giver.ready(offer, then)
            return x
        if copy:
            made, way = _copied(x, giver, taker, offer, where)
            if then is not None and where is not None:  # the copy was made on the framework's own stream
                streams.follow(where, taker.stream(where), then)
        else:
            made, way = _shared(giver, taker, offer, then), "shared"
    except streams.Captured as error:
        raise CannotShare(
            offer.lender, taker.name, str(error), "hand arrays over before the capture begins", copied=bool(copy)
        ) from error
    _last.route = Route(offer.lender, taker.name, way, view.nbytes, hindrance.reason if hindrance else "")
    _log.debug("exchange: %s", _last.route)
    return made


def last_route() -> Route | None:
    """How this thread's last hand-over was done; None before the first."""
    return getattr(_last, "route", None)


def _shared(giver: Arrays, taker: Arrays, offer: Offer, then: int | None) -> Any:
    device = offer.view.device
    uses = then if then is not None or device is None else taker.stream(device)
    loan = lifetimes.begin(offer, taker.name, uses, taker.taker.settles, taker.context(device))
    try:
        return taker.take(offer.view, loan, lambda stream: giver.ready(offer, stream), uses)
    except BaseException:
        loan.cancel()
        raise


def _copied(x: Any, giver: Arrays, taker: Arrays, offer: Offer, where: int | None) -> tuple[Any, str]:
    """A copy in the target's own memory. What it cannot be shown is compacted first, by the framework it is of."""
    view = offer.view
    if view.device is not None and where is None:
        giver.ready(offer, None)
        return _downloaded(x, giver, offer), f"copied from cuda:{view.device} through pinned host memory"
    if view.device is None and where is not None:
        return _uploaded(x, giver, taker, offer, where), f"copied from the host to cuda:{where}"
    if giver is taker:
        if where != view.device or giver.waits == "host":
            giver.ready(offer, None)
        made = giver.copy(x, where)
    else:
        writable = offer._replace(view=view._replace(readonly=False))
        if compatibility.obstacle(writable.view, taker.taker, view.device) or not (view.compact or taker.taker.strided):
            giver, x, writable = compacted(x, giver, writable)
            left = compatibility.obstacle(writable.view, taker.taker, view.device)
            if left is not None:
                raise CannotShare(writable.lender, taker.name, left.reason, left.remedy, copied=True)
        if where != view.device:  # the copy may run on a stream of the other GPU
            giver.ready(writable, None)
        made = taker.copy(_shared(giver, taker, writable, None), where)  # on the target's own stream, as its views
    if where is not None and where != view.device:  # on streams of both, which a loan knows nothing of
        streams.follow(where, None, None)
    return made, _way(view.device, where)


def _uploaded(x: Any, giver: Arrays, taker: Arrays, offer: Offer, where: int) -> Any:
    """By the target, from a NumPy array: in that form all of them take host memory."""
    numpy = registry.by_name("numpy")
    if offer.view.dtype not in numpy.taker.dtypes:
        raise CannotShare(
            offer.lender,
            taker.name,
            f"NumPy, by which it would go, has no dtype {offer.view.dtype}",
            "bring it to a GPU in its own framework first",
            copied=True,
        )
    if not offer.view.compact:
        giver, x, offer = compacted(x, giver, offer)
    return taker.upload(_shared(giver, numpy, offer, None), where)


def compacted(x: Any, giver: Arrays, offer: Offer) -> tuple[Arrays, Any, Offer]:
    """The array without gaps, whose it is and its offer: by its own framework, or by an imported one that can."""
    carrier, x = _gathered(x, giver, offer._replace(view=offer.view._replace(readonly=False)))  # it is only read
    return carrier, x, carrier.offer(x)


def _gathered(x: Any, giver: Arrays, offer: Offer) -> tuple[Arrays, Any]:
    view = offer.view
    if giver.gathers is Layout.FORWARD or (giver.gathers is Layout.COMPACT and view.compact):
        if giver.waits == "host":
            giver.ready(offer, None)
        return giver, giver.compact(x)
    forwards, axes = view.forwards()
    for carrier in (registry.by_name(name) for name in _CARRIERS if name in sys.modules):
        if compatibility.obstacle(forwards, carrier.taker, view.device) is None:
            shown = _shared(giver, carrier, offer._replace(view=forwards), None)
            return carrier, carrier.compact(carrier.flipped(shown, axes) if axes else shown)
    raise CannotShare(
        offer.lender,
        None,
        f"its strides are {view.strides}, its address {view.address:#x}, and no framework is imported that could copy "
        "it into one piece",
        "make it contiguous first, or import torch or cupy",
    )


def _downloaded(x: Any, giver: Arrays, offer: Offer) -> Any:
    import numpy

    view = offer.view
    if not view.compact:
        giver, x, offer = compacted(x, giver, offer)
        giver.ready(offer, None)
    made: Any = numpy.empty(view.shape, numpy.dtype(view.dtype))
    if view.size:
        copies.to_host(made.ctypes.data, offer.view.address, view.nbytes, view.device or 0)
    return made


def _way(source: int | None, where: int | None) -> str:
    if source == where:
        return "copied" if source is None else f"copied on cuda:{source}"
    return f"copied from cuda:{source} to cuda:{where}"
