"""Room for one request: who gives back, how much of it, and what the guard believes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from guards import host_of, replaced, simulated, start

from memguard._base.types import Device, Room, Shortage, Usage
from memguard._base.units import GIB, MIB
from memguard._frameworks.simulated.adapter import SimulatedFramework
from memguard._guard.lending import ReclaimableCache, pick_donor, reclaimable_caches

pytestmark = pytest.mark.usefixtures("nothing_stays")

SIX = {"version": 1, "device": {"limit": "100GiB", "reserve": "2GiB"}}
FOUR = {**SIX, "frameworks": {name: {"limit": "20GiB"} for name in ("torch", "cupy", "pycuda", "numba")}}
STRANGER = 4242


def cached(guard: Any, name: str, size: int, pieces: int = 1) -> None:
    framework = simulated(guard, name)
    for array in [framework.allocate(size // pieces) for _ in range(pieces)]:
        framework.free(array)


def leave(guard: Any, free: int) -> Device:
    """Another process takes all of the card but so much."""
    host = host_of(guard)
    gpu = host.devices()[0]
    host.occupy(gpu, STRANGER, host.memory(gpu).free - free)
    return gpu


def test_the_one_that_has_most_gives_back_and_nobody_else_if_that_suffices() -> None:
    guard = start(FOUR)
    cached(guard, "torch", 2 * GIB)
    cached(guard, "numba", 6 * GIB)
    simulated(guard, "cupy").free(simulated(guard, "cupy").allocate(MIB))
    gpu = leave(guard, GIB)
    room = guard.make_room("cupy", 4 * GIB)
    assert (room.missing, room.cap) == (0, None)
    assert set(room.returned) == {"numba"} and room.returned["numba"] >= 3 * GIB
    assert simulated(guard, "torch").stats(gpu).held >= 2 * GIB


def test_nobody_gives_back_what_would_not_suffice() -> None:
    guard = start(FOUR)
    cached(guard, "torch", 2 * GIB)
    gpu = leave(guard, GIB)
    before = simulated(guard, "torch").stats(gpu).held
    room = guard.make_room("cupy", 8 * GIB)
    assert room.missing >= 4 * GIB and not room.returned
    assert simulated(guard, "torch").stats(gpu).held == before


def test_what_came_back_is_what_nvml_says_and_the_next_one_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's empty_cache() does nothing, silently, while a MemPool is in use."""

    class Deaf(SimulatedFramework):
        def trim(self, device: Device) -> None:
            pass

        trim_partly = lambda self, device, needed: None  # noqa: E731

    replaced(monkeypatch, torch=Deaf)
    guard = start(FOUR)
    cached(guard, "torch", 8 * GIB)
    cached(guard, "pycuda", 6 * GIB)
    leave(guard, GIB)
    room = guard.make_room("cupy", 4 * GIB)
    assert room.missing == 0 and set(room.returned) == {"pycuda"}


def test_a_sibling_that_fails_to_trim_partly_does_not_fail_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(SimulatedFramework):
        def trim_partly(self, device: Device, needed: int) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    replaced(monkeypatch, torch=Broken)
    guard = start(FOUR)
    cached(guard, "torch", 8 * GIB)
    leave(guard, GIB)
    assert guard.make_room("cupy", 4 * GIB).missing > 0


def test_within_a_capture_nothing_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Capturing(SimulatedFramework):
        def capturing(self) -> bool:
            return True

    replaced(monkeypatch, torch=Capturing)
    guard = start(FOUR)
    cached(guard, "torch", 8 * GIB)
    gpu = leave(guard, GIB)
    assert guard.make_room("cupy", 4 * GIB) == Room({}, None, 4 * GIB, {})
    assert not guard.elastic.shortage(Shortage("cupy", gpu.uuid, GIB, 4 * GIB, True))


def test_a_request_does_not_wait_for_a_call_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memguard._guard.elastic._LOCK_TIMEOUT", 0.05)
    guard = start(FOUR)
    cached(guard, "torch", 8 * GIB)
    gpu = leave(guard, GIB)
    shortage = Shortage("cupy", gpu.uuid, 4 * GIB, 4 * GIB, True)
    answers: list[bool] = []
    with guard.caps.lock:
        assert not guard.elastic.shortage(shortage), "within a call of the guard on this thread"
        other = threading.Thread(target=lambda: answers.append(guard.elastic.shortage(shortage)))
        other.start()
        other.join(10)
    assert answers == [False]
    assert guard.elastic.shortage(shortage)


def test_a_budget_that_is_over_makes_no_room() -> None:
    guard = start(FOUR)
    gpu = leave(guard, GIB)
    torch = simulated(guard, "torch")
    guard.stop()
    assert not guard.elastic.shortage(Shortage("cupy", gpu.uuid, GIB, GIB, True))
    assert torch.on_shortage is None


def test_who_never_gives_back_or_says_nothing_offers_nothing() -> None:
    usages = {
        "tensorflow": Usage(8 * GIB, GIB, 0),
        "jax": Usage(8 * GIB, GIB, 7 * GIB),
        "numba": Usage(None, None),
        "torch": Usage(8 * GIB, GIB, 5 * GIB),
        "cupy": Usage(8 * GIB, 2 * GIB, None),
        "pycuda": None,
    }
    assert reclaimable_caches(usages, "torch") == [ReclaimableCache("cupy", 6 * GIB, 6 * GIB, False)]
    assert pick_donor(reclaimable_caches(usages, "pycuda"), GIB) == ReclaimableCache("torch", 5 * GIB, 7 * GIB, True), (
        "who knows comes first"
    )
    assert pick_donor(reclaimable_caches(usages, "pycuda"), 14 * GIB) is None


def test_a_pool_that_grows_by_regions_of_its_own_choice_gets_all_that_its_cap_leaves() -> None:
    """TensorFlow's and XLA's allocators try smaller regions once in their life only."""
    guard = start({**SIX, "frameworks": {name: {"limit": "20GiB"} for name in ("torch", "jax")}})
    jax = simulated(guard, "jax")
    jax.allocate(GIB)
    cached(guard, "torch", 16 * GIB)
    gpu = leave(guard, 2 * GIB)
    left = 20 * GIB - jax.stats(gpu).held
    assert guard.make_room("jax", GIB).missing == 0
    assert host_of(guard).memory(gpu).free >= min(left, 18 * GIB)
    leave(guard, 2 * GIB)
    assert guard.make_room("jax", GIB).missing == 0, "as much as there is, if that serves the request"
