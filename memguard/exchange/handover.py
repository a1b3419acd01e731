"""`to`: one framework's array as another's, shared where that is right, copied only where it was asked for."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any, NamedTuple

from memguard.devices import copies, streams
from memguard.errors import CannotShare
from memguard.exchange import loans, rules
from memguard.exchange.arrays import registry
from memguard.exchange.arrays.base import Arrays
from memguard.exchange.loans import Offer
from memguard.exchange.rules import Layout
from memguard.units import format_size

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
    taker, giver = registry.by_name(framework), registry.of(x)
    then = _handle(stream, taker)
    if giver is taker and device is None and not copy:
        return x
    offer = giver.offer(x)
    view = offer.view
    where = taker.place(view, device)
    if giver is taker and view.device == where and not copy:
        return x
    hindrance = giver.reservation(x) or rules.obstacle(view, taker.taker, where)
    if copy is False and view.readonly and hindrance is not None:
        writable = view._replace(readonly=False)
        if giver.reservation(x) is None and rules.obstacle(writable, taker.taker, where) is None:
            hindrance = None
    if hindrance is not None and not (copy and hindrance.copied):
        raise CannotShare(offer.lender, taker.name, hindrance.reason, hindrance.remedy)
    if copy:
        made, way = _copied(x, giver, taker, offer, where, then)
    else:
        made, way = _shared(giver, taker, offer, then), "shared"
    _last.route = Route(offer.lender, taker.name, way, view.nbytes, hindrance.reason if hindrance else "")
    _log.debug("exchange: %s", _last.route)
    return made


def last_route() -> Route | None:
    """How this thread's last hand-over was done; None before the first."""
    return getattr(_last, "route", None)


def _shared(giver: Arrays, taker: Arrays, offer: Offer, then: int | None) -> Any:
    device = offer.view.device
    uses = then if then is not None or device is None else taker.stream(device)
    loan = loans.begin(offer, taker.name, uses, taker.taker.settles)
    try:
        return taker.take(offer.view, loan, lambda stream: giver.ready(offer, stream), uses)
    except streams.Captured as error:
        loan.cancel()
        raise CannotShare(offer.lender, taker.name, str(error), "hand arrays over before the capture begins") from error
    except BaseException:
        loan.cancel()
        raise


def _copied(x: Any, giver: Arrays, taker: Arrays, offer: Offer, where: int | None, then: int | None) -> tuple[Any, str]:
    """A copy in the target's own memory. What it cannot be shown is compacted first, by the framework it is of."""
    view = offer.view
    if where is None and view.device is not None:
        giver.ready(offer, None)
        return _downloaded(x, giver, offer), f"copied from cuda:{view.device} through pinned host memory"
    if where is not None and view.device is None:
        host = _shared(giver, registry.by_name("numpy"), offer._replace(view=view._replace(readonly=False)), None)
        return taker.upload(host, where), f"copied from the host to cuda:{where}"
    writable = offer._replace(view=view._replace(readonly=False))
    if giver is taker:
        if giver.waits == "host":
            giver.ready(offer, None)
        return giver.copy(x, where), _way(view.device, where)
    if rules.obstacle(writable.view, taker.taker, view.device) is not None or not (view.compact or taker.taker.strided):
        giver, x = compacted(x, giver, writable)
        writable = giver.offer(x)
        left = rules.obstacle(writable.view, taker.taker, view.device)
        if left is not None:
            raise CannotShare(writable.lender, taker.name, left.reason, left.remedy)
    if view.device is None or where is None:
        return taker.copy(_shared(giver, taker, writable, None), where), _way(view.device, where)
    shown = _shared(giver, taker, writable, None)  # on the target's own stream: its copy runs there
    made = taker.copy(shown, where)
    if where != view.device:  # on streams of both GPUs, which the loan knows nothing of
        streams.follow(where, None, None)
    elif then is not None:
        streams.follow(where, taker.stream(where), then)
    return made, _way(view.device, where)


def compacted(x: Any, giver: Arrays, offer: Offer) -> tuple[Arrays, Any]:
    """The array without gaps: by its own framework, or by one of those that are imported and can."""
    view = offer.view
    if giver.gathers is Layout.FORWARD or (giver.gathers is Layout.COMPACT and view.compact):
        if giver.waits == "host":
            giver.ready(offer, None)
        return giver, giver.compact(x)
    forwards, axes = view.forwards()
    for carrier in (registry.by_name(name) for name in _CARRIERS if name in sys.modules):
        if rules.obstacle(forwards, carrier.taker, view.device) is None:
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
        giver, x = compacted(x, giver, offer._replace(view=view._replace(readonly=False)))
        offer = giver.offer(x)
        giver.ready(offer, None)
    made: Any = numpy.empty(view.shape, numpy.dtype(view.dtype))
    if view.size:
        copies.to_host(made.ctypes.data, offer.view.address, view.nbytes)
    return made


def _way(source: int | None, where: int | None) -> str:
    if source == where:
        return "copied" if source is None else f"copied on cuda:{source}"
    return f"copied from cuda:{source} to cuda:{where}"


def _handle(stream: Any, taker: Arrays) -> int | None:
    """The handle of a stream, whoever made it."""
    if stream is None:
        return None
    if not taker.told:
        raise ValueError(f"{taker.name} chooses its streams itself: stream= cannot be given\n    fix: leave it out")
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return streams.Handle((protocol() if callable(protocol) else protocol)[1], stream)
    for name in ("cuda_stream", "ptr", "handle"):  # PyTorch's, CuPy's, PyCUDA's and Numba's
        found = getattr(stream, name, None)
        if found is not None:
            return streams.Handle(int(getattr(found, "value", found) or 0), stream)
    raise ValueError(f"{stream!r} is no stream\n    fix: a stream of the framework's, or its handle as an int")
