"""Frees memory for a retry: trims caches and raises the elastic cap of the framework whose request failed.

A retry needs as much memory as the framework held in the failed run, plus the failed request. So this module compares
the framework's memory before and after the frames are cleared. Without a budget this module does nothing. No
other module in `retry/` uses the guard, the object that applies the budget.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, cast

from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._base.types import Event, Room, Sample
from memguard._devices import suspension
from memguard._frameworks import specs
from memguard._oom.causes import WORKSPACE, device_of
from memguard._runtime.retry.failure import Failure
from memguard._runtime.runtime import this

_ATTEMPTS = 4
"""The most calls of `Guard.make_room` with a reduced size after the GPU or the caps did not allow a larger size."""

if TYPE_CHECKING:
    from memguard._base.framework_spec import CacheName, FrameworkName
    from memguard._base.types import Device
    from memguard._guard.guard import Guard


class RoomMade(NamedTuple):
    """The memory freed before a retry, in bytes.

    freed     the decrease of bytes in use by clearing the failed run's frames; None without a budget
    returned  the bytes that each framework returned to the driver, by NVML
    cap       the cap of the requesting framework before and after; None if it did not change
    live      by name, bytes of live arrays that another framework has above its min, or above a fixed cap
    uuid      the UUID of the GPU; None if unknown
    """

    freed: int | None = None
    returned: Mapping[str, int] = {}
    cap: tuple[int, int] | None = None
    live: Mapping[str, int] = {}
    uuid: str | None = None


def active() -> Guard | None:
    """The guard of the budget in effect; None without a budget. Does not apply MEMGUARD_CONFIG."""
    session = this.session
    return session.guard if session is not None and session.active else None


def capturing() -> bool:
    """True if a framework reports that this thread is capturing a CUDA graph."""
    if suspension.now is not None:  # a suspended process cannot be capturing
        return False
    try:
        guard = active()
        if guard is not None:
            return guard.elastic.capturing()
        asks = (module.IN_PROCESS.capturing for module in specs.modules("in_process"))
        return any(ask(sys.modules) for ask in asks if ask is not None)
    except Exception as failure:
        _log.debug("whether a CUDA graph is being captured is unknown: %s", text_of(failure))
        return False


def with_figures(failure: Failure) -> Failure:
    """Return `failure` with the frameworks' current memory; unchanged without a budget, or if the driver fails."""
    sample = _sample()
    return failure if sample is None else failure._replace(in_use=_of(sample, "in_use"), held=_of(sample, "held"))


def make_room(failure: Failure) -> RoomMade:
    """Trim all idle caches and raise the requester's cap as far as possible. Returns the freed memory.

    Called after the failed run's frames are cleared. Frees more memory than the failed request needs, because the
    later requests of the run are unknown, and another failed run costs more than refilling caches.
    """
    guard, now = active(), _sample()
    if guard is None or now is None:
        return RoomMade()
    live = _of(now, "in_use")
    freed = sum(
        max(size - live.get(uuid, {}).get(name, 0), 0)
        for uuid, sizes in failure.in_use.items()
        for name, size in sizes.items()
    )
    returned: dict[str, int] = {}
    shared = guard.caps.allocators.keys() - guard.frameworks.keys()
    for name in (*shared, *guard.frameworks):
        _add(returned, {name: guard.trim(cast("CacheName", name))})
    device, requester = _device(guard, failure), failure.requester
    uuid = None if device is None else device.uuid
    if device is None or requester is None or requester not in guard.frameworks:
        # A library requested the memory, or a framework outside the budget: there is no cap to raise.
        return RoomMade(freed, returned, uuid=uuid)
    cap = guard.device_plan(device.uuid).caps.get(requester)
    room = _raise(guard, failure, cast("FrameworkName", requester), device, returned)
    after = guard.device_plan(device.uuid).caps.get(requester)
    moved = (cap, after) if cap is not None and after is not None and cap != after else None
    return RoomMade(freed, returned, moved, room.live, uuid)


def _raise(guard: Guard, failure: Failure, requester: FrameworkName, device: Device, returned: dict[str, int]) -> Room:
    """Raise the cap to the framework's max. If the memory is not available, try smaller caps, down to the memory of the
    failed run plus its failed request. Returns the result of the last `Guard.make_room`."""
    now = _sample()
    held = 0 if now is None else _of(now, "held").get(device.uuid, {}).get(requester, 0)
    refused = failure.request.held if failure.request is not None else None
    then = max(failure.held.get(device.uuid, {}).get(requester, 0), refused or 0)
    size = WORKSPACE if failure.requested is None else failure.requested
    least = guard.frameworks[requester].footprint(size) + max(then - held, 0)
    _, most = guard.device_plan(device.uuid).elastic.get(requester, (0, 0))
    needed = max(most - held, least)
    room = guard.make_room(requester, needed, device)
    for _ in range(_ATTEMPTS):
        _add(returned, room.returned)
        if not room.missing or needed <= least:
            break
        needed = max(needed - room.missing, least)
        room = guard.make_room(requester, needed, device)
    return room


def announce(failure: Failure, done: RoomMade, text: str) -> None:
    """Write an event of kind `retry` to the timeline and pass it to the `on_event` callbacks."""
    session = this.session
    if session is not None and session.active:
        size = sum(done.returned.values())
        session.announce(Event(time.time(), "retry", text, uuid=done.uuid, framework=failure.requester, bytes=size))


def _add(returned: dict[str, int], more: Mapping[str, int]) -> None:
    for name, size in more.items():
        if size > 0:
            returned[name] = returned.get(name, 0) + size


def _device(guard: Guard, failure: Failure) -> Device | None:
    """The GPU of the failed request, determined as for out-of-memory reports; None if unknown."""
    parts = guard.plan.devices
    if len(parts) == 1:
        return parts[0].device
    found = device_of(failure.facts.text, failure.classification, guard.ledger(), failure.request)
    return None if found is None else found.device


def _sample() -> Sample | None:
    guard = active()
    try:
        return guard.sample() if guard is not None else None
    except Exception as failure:  # for example because a GPU is lost
        _log.debug("no figures before another run: %s", text_of(failure))
        return None


def _of(sample: Sample, field: str) -> dict[str, dict[str, int]]:
    """The figure `field` of each framework that reports it, by UUID and name."""
    return {
        device.uuid: {
            name: size for name, one in device.frameworks.items() if (size := getattr(one, field)) is not None
        }
        for device in sample.devices
    }
