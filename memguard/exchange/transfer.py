"""`to`: turns one framework's array into another's. It shares the memory, and copies only with `copy=True`."""

from __future__ import annotations

import functools
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from memguard._base.logs import log as _log
from memguard._base.units import format_size
from memguard._devices import copies, streams, suspension
from memguard._frameworks.arrays import compatibility, lifetimes
from memguard._frameworks.arrays.base import Arrays
from memguard._frameworks.arrays.compatibility import Layout
from memguard._frameworks.arrays.lifetimes import Offer
from memguard._frameworks.arrays.view import View
from memguard.errors import CannotShare
from memguard.exchange import arguments
from memguard.exchange.adapters import registry

if TYPE_CHECKING:
    from memguard._base.framework_spec import ArraysName

_last = threading.local()


class Route(NamedTuple):
    """How an array was handed over. `way` is `shared`, `copied`, `copied on cuda:0`, and so on.

    For a copy between two GPUs `way` is `copied from cuda:0 to cuda:1, peer to peer`, or `..., through the host`, which
    is slower. `way` omits the path if it is unknown: CUDA does not report it, or JAX may have used either path.
    `nbytes` is the size of the elements. `reason`, for a copy that the caller requested with `copy=True`, is what
    would have prevented sharing; empty if sharing was possible. `source` and `target` are older names of `producer`
    and `consumer`.
    """

    producer: str
    consumer: str
    way: str
    nbytes: int
    reason: str = ""

    @property
    def source(self) -> str:
        """The same as `producer`."""
        return self.producer

    @property
    def target(self) -> str:
        """The same as `consumer`."""
        return self.consumer

    def __str__(self) -> str:
        return f"{self.producer} to {self.consumer}: {format_size(self.nbytes)} {self.way}"


def to(
    x: Any, framework: ArraysName, *, copy: bool | None = None, stream: Any = None, device: int | None = None
) -> Any:
    """Return `x` as an array of `framework`: torch, tensorflow, cupy, jax, pycuda or numba; numpy for host memory.

    `copy=None` shares the memory, and raises CannotShare with reason and remedy if that would not be safe. `copy=True`
    copies on the GPU, to another GPU with `device` (CUDA's ordinal), and through the host only to or from host memory;
    `last_route()` returns the path. `copy=False` shares or raises; it also shares read-only memory, which you then must
    not write to. `stream` is the stream that will use the result: a handle, or any object with `__cuda_stream__`. The
    default is the framework's current stream; if the framework names none, the host waits for the producer's work. The
    memory lives as long as any view of it.
    """
    if suspension.now is not None:
        raise suspension.refused("memguard.exchange.to")
    consumer = registry.by_name(framework)
    if copy is not None or device is not None or consumer.module not in sys.modules:
        arguments.check(copy, device, consumer)
    producer = registry.of(x)
    if stream is not None:
        stream = arguments.stream_handle(stream, consumer)
    own = producer is consumer and not copy
    if own and device is None and stream is None:
        return x
    offer = producer.offer(x)
    if producer.immutable and copy is None and consumer.keeps_readonly:
        offer = offer._replace(view=offer.view._replace(readonly=True))
    view = offer.view
    place = view.device if own and device is None else consumer.place(view, device)
    own = own and view.device == place
    wanted = view._replace(readonly=False) if copy is False else view  # copy=False accepts read-only memory
    obstacle = None if own else producer.obstacle(x) or compatibility.obstacle(wanted, consumer.traits, place)
    if obstacle is not None and not (copy and obstacle.copied):
        raise CannotShare(offer.producer, consumer.name, obstacle.reason, obstacle.remedy, copied=bool(copy))
    try:
        if own:
            if stream is not None:
                producer.ready(offer, stream)
            return x
        if copy:
            made, way = _copied(x, producer, consumer, offer, place, stream)
        else:
            made, way = _shared(producer, consumer, offer, stream), "shared"
    except streams.Captured as error:
        raise CannotShare(
            offer.producer, consumer.name, str(error), "hand arrays over before the capture begins", copied=bool(copy)
        ) from error
    _last.route = offer.producer, consumer.traits.name, way, view, obstacle
    if _log.debugs():
        _log.debug("exchange: %s", last_route())
    return made


def last_route() -> Route | None:
    """The route of this thread's last hand-over; None before the first."""
    found = getattr(_last, "route", None)  # `to` stores a plain tuple, because few programs read the route
    if found is None:
        return None
    producer, consumer, way, view, obstacle = found
    return Route(producer, consumer, way, view.nbytes, obstacle.reason if obstacle else "")


def _shared(producer: Arrays, consumer: Arrays, offer: Offer, stream: int | None) -> Any:
    view, traits = offer.view, consumer.traits
    use_stream = stream if stream is not None or view.device is None else consumer.stream(view.device)
    context = consumer.context(view.device) if consumer.own_contexts else None
    lifetime = lifetimes.begin(offer, traits.name, use_stream, traits.releases_when_done, context)
    try:
        return consumer.import_view(view, lifetime, functools.partial(producer.ready, offer), use_stream)
    except BaseException:
        lifetime.cancel()
        raise


def _copied(
    x: Any, producer: Arrays, consumer: Arrays, offer: Offer, place: int | None, stream: int | None
) -> tuple[Any, str]:
    """Copy into the consumer's own memory, and make `stream` wait for the copy. Returns the copy and `Route.way`."""
    on = stream if place is not None and place == offer.view.device and consumer.copies_on else None
    made, way = _copy(x, producer, consumer, offer, place, on)
    if stream is not None and on is None and place is not None:  # the copy runs on the framework's own stream
        streams.follow(place, consumer.stream(place), stream)
    return made, way


def _copy(
    x: Any, producer: Arrays, consumer: Arrays, offer: Offer, place: int | None, on: int | None
) -> tuple[Any, str]:
    """Copy the array, first compacted by the producer if the consumer cannot read its layout. The copy runs on the
    stream `on`, if the user named a stream. Returns the copy and `Route.way`."""
    view, traits = offer.view, consumer.traits
    if view.device is not None and place is None:
        producer.ready(offer, None)
        return _downloaded(x, producer, offer), f"copied from cuda:{view.device} through pinned host memory"
    if view.device is None and place is not None:
        return _uploaded(x, producer, consumer, offer, place), f"copied from the host to cuda:{place}"
    if producer is consumer and on is None and (view.compact or traits.strided):
        if place != view.device or producer.waits == "host":
            producer.ready(offer, None)
        made = producer.copy(x, place)
    else:
        writable = _without_readonly(offer)
        if compatibility.obstacle(writable.view, traits, view.device) or not (view.compact or traits.strided):
            producer, x, writable = compacted(x, producer, writable)
            left = compatibility.obstacle(writable.view, traits, view.device)
            if left is not None:
                raise CannotShare(writable.producer, consumer.name, left.reason, left.remedy, copied=True)
        if place != view.device:  # the host waits, because the copy may run on a stream of the other GPU
            producer.ready(writable, None)
        view, shared = writable.view, _shared(producer, consumer, writable, on)
        if on is not None and place is not None:
            made = consumer.copy_on(shared, place, on)
        else:
            made = consumer.copy(shared, place)  # queued on the stream of the imported view
    if place is None or view.device is None or place == view.device:
        return made, _way(view.device, place)
    streams.follow(place, None, None)  # the host waits, because a `Lifetime` cannot track a second GPU's streams
    return made, _way(view.device, place) + _route(view, consumer, made, place)


def _route(view: View, consumer: Arrays, made: Any, place: int) -> str:
    """The suffix of `Route.way` that names the path of a copy between two GPUs; empty if unknown."""
    if not view.size or view.device is None:
        return ""
    try:
        address = consumer.offer(made).view.address
    except CannotShare:
        return ""
    reached = copies.reaches(place, view.address), copies.reaches(view.device, address)
    if reached == (False, False):  # neither GPU can access the other's memory
        return ", through the host"
    return ", peer to peer" if True in reached and consumer.direct else ""


def _without_readonly(offer: Offer) -> Offer:
    """Return the offer without the read-only flag, because a copy only reads the array."""
    return offer._replace(view=offer.view._replace(readonly=False))


def _uploaded(x: Any, producer: Arrays, consumer: Arrays, offer: Offer, place: int) -> Any:
    """Copy from host memory to the GPU. The source is a NumPy array, because every framework can upload one."""
    numpy = registry.by_name("numpy")
    if offer.view.dtype not in numpy.traits.dtypes:
        raise CannotShare(
            offer.producer,
            consumer.name,
            f"the upload goes through NumPy, which has no dtype {offer.view.dtype}",
            "bring it to a GPU in its own framework first",
            copied=True,
        )
    if not offer.view.compact:
        producer, x, offer = compacted(x, producer, offer)
    return consumer.upload(_shared(producer, numpy, offer, None), place)


def compacted(x: Any, producer: Arrays, offer: Offer) -> tuple[Arrays, Any, Offer]:
    """Make a compact copy of the array, in its own framework or in another imported one.

    Returns the adapter of the framework that made the copy, the copy, and the copy's offer. Raises CannotShare if no
    imported framework can make the copy.
    """
    maker, x = _compact_copy(x, producer, _without_readonly(offer))
    return maker, x, maker.offer(x)


def _compact_copy(x: Any, producer: Arrays, offer: Offer) -> tuple[Arrays, Any]:
    view = offer.view
    if producer.compacts is Layout.FORWARD or (producer.compacts is Layout.COMPACT and view.compact):
        if producer.waits == "host":
            producer.ready(offer, None)
        return producer, producer.compact(x)
    forwards, axes = view.forwards()
    for maker in (registry.by_name(name) for name in registry.COMPACTORS if name in sys.modules):
        if compatibility.obstacle(forwards, maker.traits, view.device) is None:
            shared = _shared(producer, maker, offer._replace(view=forwards), None)
            return maker, maker.compact(maker.flip(shared, axes) if axes else shared)
    raise CannotShare(
        offer.producer,
        None,
        f"its strides are {view.strides}, its address {view.address:#x}, and no framework is imported that could copy "
        "it into one piece",
        f"make it contiguous first, or import {' or '.join(registry.COMPACTORS)}",
    )


def _downloaded(x: Any, producer: Arrays, offer: Offer) -> Any:
    import numpy

    view = offer.view
    if not view.compact:
        producer, x, offer = compacted(x, producer, offer)
        producer.ready(offer, None)
    made: Any = numpy.empty(view.shape, numpy.dtype(view.dtype))
    if view.size:
        copies.to_host(made.ctypes.data, offer.view.address, view.nbytes, view.device or 0)
    return made


def _way(source: int | None, place: int | None) -> str:
    if source == place:
        return "copied" if source is None else f"copied on cuda:{source}"
    return f"copied from cuda:{source} to cuda:{place}"
