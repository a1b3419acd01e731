"""Whatever the guard of a budget offers, the guards that stand in for it answer, or refuse with a MemguardError."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from guards import TORCH

import memguard
from memguard._base.types import Plan, Room, Sample
from memguard._runtime import workers
from memguard.errors import MemguardError, NotActive, Suspended

WHY = "no budget is active: MEMGUARD_DISABLE is set"
NAMES: dict[str, tuple[Any, ...] | None] = {
    "active": None, "admission": None, "begin_workload": ("step", "torch", None, None),
    "begin_workload_in_loop": ("step", "torch", None, None), "budget": None, "busy": (), "callbacks": None,
    "caps": None, "elastic": None, "forked": (), "frameworks": None, "host": None, "last_sample": (), "ledger": (),
    "make_room": ("torch", 1), "take_events": (), "notes": None, "own_plan": None, "device_plan": ("UUID",),
    "peaks": (), "permanent": None, "plan": None, "reader": None, "rebalance": (Sample(0.0, ()),), "reclaimable": (),
    "refusals": None, "require": ("torch", 1),
    "reserved_not_taken": ("torch", "UUID"), "resize": ("torch", 1), "resumed": (), "sample": (), "sharing": None,
    "start": (), "stop": (), "suspend": (None, None, None), "trim": (), "trims": None, "undo": None, "undone": None,
    "workload": ("step",),
}  # fmt: skip
"""Every public name of a guard: the arguments of a call, or None for an attribute."""
PARTS = {"admission", "callbacks", "caps", "elastic", "reader", "undo"}
"""What a guard is composed of, for memguard's own rooms: an idle guard has none, as it has no GPU."""
REFUSED = {
    "idle": {"host", "device_plan", "resumed", "suspend", *PARTS},
    "suspended": {
        "begin_workload", "begin_workload_in_loop", "busy", "make_room", "reclaimable", "require", "resize", "sample",
        "start", "stop", "trim", "workload",
    },
}  # fmt: skip
"""What raises. Everything else answers."""


@pytest.fixture(autouse=True)
def _shut_down() -> Iterator[None]:
    yield
    memguard.shutdown()


def asked(guard: Any, name: str) -> object:
    arguments = NAMES[name]
    if arguments is None:
        return getattr(guard, name)
    more = {"framework": "torch"} if name == "workload" else {}
    uuid = guard.plan.devices[0].device.uuid if guard.plan.devices else "UUID"
    result = getattr(guard, name)(*(uuid if one == "UUID" else one for one in arguments), **more)
    if name == "workload":
        with result:
            return None
    if inspect.iscoroutine(result):
        return asyncio.run(result)
    return list(result) if isinstance(result, Iterator) else result


def test_the_table_has_every_name() -> None:
    guard = memguard.init(TORCH, simulate="h200")
    assert {name for name in (*dir(guard), *vars(guard)) if not name.startswith("_")} == NAMES.keys()


@pytest.mark.parametrize("name", sorted(NAMES))
def test_an_idle_guard(name: str) -> None:
    guard = workers.IdleGuard(WHY, TORCH)
    if name not in REFUSED["idle"]:
        asked(guard, name)
        return
    with pytest.raises(NotActive if name == "device_plan" else AttributeError, match="MEMGUARD_DISABLE is set"):
        asked(guard, name)


@pytest.mark.parametrize("name", sorted(NAMES.keys() - {"resumed", "suspend"}))
def test_a_suspended_guard(name: str) -> None:
    guard = memguard.init(TORCH, simulate="h200")
    with memguard.suspended():
        if name not in REFUSED["suspended"]:
            asked(guard, name)
            return
        with pytest.raises(MemguardError if name == "start" else Suspended):
            asked(guard, name)


def test_what_an_idle_guard_says() -> None:
    guard = workers.IdleGuard(WHY, TORCH)
    assert guard.make_room("torch", 1 << 40) == Room({}, None, 0, {}), "no cap is in the way"
    assert guard.own_plan == guard.plan == Plan((), notes=(WHY,)) and guard.undone
    assert guard.take_events() == [] and guard.last_sample() is None and guard.peaks() == {}
    assert guard.refusals.totals() == {} and not list(guard.busy())


def test_what_a_suspended_guard_changes() -> None:
    """A cap that cannot be set stays as planned."""
    guard = memguard.init(TORCH, simulate="h200")
    (part,) = guard.plan.devices
    with memguard.suspended(), pytest.raises(Suspended, match="a change of a cap"):
        guard.caps.set_cap("torch", part.device.uuid, 1 << 30)
    assert guard.plan.devices == (part,)
