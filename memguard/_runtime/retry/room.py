"""Makes room for another run, through the budget that is active. Only this module of the room knows the guard.

A run that is repeated takes everything again: what its framework held in the failed run, and the request that failed.
So figures of before the frames were cleared and of after it are compared. Without a budget there is nothing to do here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from memguard._base import specs
from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._base.types import Event, Room, Sample
from memguard._budget.joint import POOL
from memguard._devices import suspension
from memguard._oom.causes import WORKSPACE, device_of
from memguard._runtime.retry.types import Done, Failure
from memguard._runtime.runtime import this

_ASKED = 4
"""How often the guard is asked for less than before: what it lacks for the most may be of the card, or of the caps."""

if TYPE_CHECKING:
    from memguard._base.framework_spec import CacheName, FrameworkName
    from memguard._base.types import Device
    from memguard._guard.guard import Guard


def active() -> Guard | None:
    """The guard of the budget in effect; None if there is none. It activates none."""
    session = this.session
    return session.guard if session is not None and session.active else None


def capturing() -> bool:
    """Whether this thread captures a CUDA graph, with a framework that tells."""
    if suspension.now is not None:  # a process that captures is not taken off its GPUs
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
    """With what the frameworks hold while the error is alive. Without a budget, or if a driver fails, as it was."""
    sample = _sample()
    return failure if sample is None else failure._replace(in_use=_of(sample, "in_use"), held=_of(sample, "held"))


def make(failure: Failure) -> Done:
    """Once the failed run is let go of: have everything idle given back, and raise the cap as far as it goes.

    More than the request that failed, as nobody knows what the run would have asked for after it, and a run that fails
    again costs more than caches that fill anew.
    """
    guard, now = active(), _sample()
    if guard is None or now is None:
        return Done()
    live = _of(now, "in_use")
    freed = sum(_less(failure.in_use[uuid], live.get(uuid, {})) for uuid in failure.in_use)
    returned: dict[str, int] = {}
    pool = [POOL] if any(part.joined for part in guard.plan.devices) else []
    for name in (*pool, *guard.frameworks):
        _add(returned, {name: guard.trim(cast("CacheName", name))})
    device, who = _device(guard, failure), failure.who
    uuid = None if device is None else device.uuid
    if device is None or who is None or who not in guard.frameworks:  # a library: its memory lies outside every cap
        return Done(freed, returned, uuid=uuid)
    cap = guard.part(device.uuid).caps.get(who)
    room = _raise(guard, failure, cast("FrameworkName", who), device, returned)
    after = guard.part(device.uuid).caps.get(who)
    moved = (cap, after) if cap is not None and after is not None and cap != after else None
    return Done(freed, returned, moved, room.live, uuid)


def _raise(guard: Guard, failure: Failure, who: FrameworkName, device: Device, returned: dict[str, int]) -> Room:
    """Make room for as much as it may ever have; if that is not there, for what is, and at least for the same again."""
    now = _sample()
    held = 0 if now is None else _of(now, "held").get(device.uuid, {}).get(who, 0)
    refused = failure.request.held if failure.request is not None else None
    then = max(failure.held.get(device.uuid, {}).get(who, 0), refused or 0)
    size = WORKSPACE if failure.asked is None else failure.asked
    least = guard.frameworks[who].footprint(size) + max(then - held, 0)
    _, most = guard.part(device.uuid).elastic.get(who, (0, 0))
    needed = max(most - held, least)
    room = guard.make_room(who, needed, device)
    for _ in range(_ASKED):
        _add(returned, room.returned)
        if not room.missing or needed <= least:
            break
        needed = max(needed - room.missing, least)
        room = guard.make_room(who, needed, device)
    return room


def announce(failure: Failure, done: Done, text: str) -> None:
    """Into the timeline, and to the functions of `on_event`."""
    session = this.session
    if session is not None and session.active:
        size = sum(done.returned.values())
        session.announce(Event(time.time(), "retry", text, uuid=done.uuid, framework=failure.who, bytes=size))


def _add(returned: dict[str, int], more: Mapping[str, int]) -> None:
    for name, size in more.items():
        if size > 0:
            returned[name] = returned.get(name, 0) + size


def _device(guard: Guard, failure: Failure) -> Device | None:
    """Where the request failed: as a report would say."""
    parts = guard.plan.devices
    if len(parts) == 1:
        return parts[0].device
    found = device_of(failure.facts.text, failure.verdict, guard.ledger(), failure.request)
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
