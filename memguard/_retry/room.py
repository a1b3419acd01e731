"""Makes room for another run, through the budget that is active. Only this module of the room knows the guard.

A run that is repeated takes everything again: what its frameworks held in the failed run, and the request that failed.
So figures of before the frames were cleared and of after it are compared. Without a budget there is nothing to do here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memguard import _api
from memguard._devices import contexts
from memguard._logs import log as _log
from memguard._logs import text_of
from memguard._oom.remedies import WORKSPACE
from memguard._oom.report import device_of
from memguard._retry.types import Done, Failure
from memguard._types import Event, Room, Sample

if TYPE_CHECKING:
    from memguard._guard import Guard
    from memguard._types import Device


def active() -> Guard | None:
    """The guard of the budget in effect; None if there is none. It activates none."""
    session = _api._active
    return session.guard if session is not None and session.active else None


def capturing() -> bool:
    """Whether this thread captures a CUDA graph, with a framework of the budget, torch or CuPy."""
    try:
        guard = active()
        if guard is not None:
            return guard._capturing()
        cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and cuda.is_initialized() and cuda.is_current_stream_capturing():
            return True
        cupy: Any = sys.modules.get("cupy")
        return cupy is not None and contexts.current() is not None and _captures(cupy)
    except Exception as failure:
        _log.debug("whether a CUDA graph is being captured is unknown: %s", text_of(failure))
        return False


def _captures(cupy: Any) -> bool:
    return bool(cupy.cuda.get_current_stream().is_capturing())


def with_figures(failure: Failure) -> Failure:
    """With what the frameworks hold while the error is alive. Without a budget, or if a driver fails, as it was."""
    sample = _sample()
    return failure if sample is None else failure._replace(in_use=_of(sample, "in_use"), held=_of(sample, "held"))


def make(failure: Failure, again: int) -> Done:
    """Once the failed run is let go of: have idle memory given back, and the cap raised. `again`: which repetition."""
    guard, now = active(), _sample()
    if guard is None or now is None:
        return Done()
    live = _of(now, "in_use")
    freed = sum(_less(failure.in_use[uuid], live.get(uuid, {})) for uuid in failure.in_use)
    name = failure.who if failure.who in guard.frameworks else None
    returned: dict[str, int] = {}
    room = Room({}, None, 0, {})
    others = False
    device = _device(guard, failure)
    if name is not None and device is not None and failure.asked is not None:
        _trim(guard, [name], returned)  # in one piece again; else it is not known which part of it serves the request
        needed = guard.frameworks[name].footprint(failure.asked) + _again(failure, name, device, _sample() or now)
        room = guard.make_room(name, needed, device)
        then = {who: size for who, size in failure.in_use.get(device.uuid, {}).items() if who != name}
        others = _less(then, live.get(device.uuid, {})) > 0
        _add(returned, room.returned)
    if name is None or failure.asked is None or device is None or room.missing or others or again > 1:
        # A library's workspace, an unknown size, or what the others will take again: everything idle goes.
        _trim(guard, list(guard.frameworks), returned)
        if name is not None and failure.asked is None and device is not None:
            room = guard.make_room(name, WORKSPACE, device)
            _add(returned, room.returned)
    return Done(freed, returned, room.cap, room.live)


def announce(failure: Failure, done: Done, text: str) -> None:
    """Into the timeline, and to the callbacks of `on_pressure`."""
    session = _api._active
    if session is not None and session.active:
        who, returned = failure.who, sum(done.returned.values())
        uuid = failure.moment.uuid if failure.moment is not None else None
        session._announce(Event(time.time(), "retry", text, uuid=uuid, framework=who, bytes=returned))


def _trim(guard: Guard, names: list[str], returned: dict[str, int]) -> None:
    for name in names:
        _add(returned, {name: guard.trim(name)})


def _add(returned: dict[str, int], more: Mapping[str, int]) -> None:
    for name, size in more.items():
        if size > 0:
            returned[name] = returned.get(name, 0) + size


def _again(failure: Failure, name: str, device: Device, now: Sample) -> int:
    """What the framework took from the driver for the failed run, and does not hold any more."""
    moment = failure.moment.held if failure.moment is not None else None
    then = max(failure.held.get(device.uuid, {}).get(name, 0), moment or 0)
    return max(then - _of(now, "held").get(device.uuid, {}).get(name, then), 0)


def _device(guard: Guard, failure: Failure) -> Device | None:
    """Where the request failed: as a report would say."""
    parts = guard.plan.devices
    if len(parts) == 1:
        return parts[0].device
    found = device_of(failure.facts.text, failure.verdict, guard.ledger(), failure.moment)
    return None if found is None else found.device


def _sample() -> Sample | None:
    guard = active()
    try:
        return guard.sample() if guard is not None else None
    except Exception as failure:  # a GPU is lost
        _log.debug("no figures before another run: %s", text_of(failure))
        return None


def _of(sample: Sample, field: str) -> dict[str, dict[str, int]]:
    """One figure of each framework where it is known, by UUID and name."""
    return {
        device.uuid: {
            name: size for name, one in device.frameworks.items() if (size := getattr(one, field)) is not None
        }
        for device in sample.devices
    }


def _less(then: Mapping[str, int], now: Mapping[str, int]) -> int:
    return sum(max(size - now.get(name, 0), 0) for name, size in then.items())
