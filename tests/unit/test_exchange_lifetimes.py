"""Lifetimes: who waits when a view dies, on which thread memory is released, and what counts as lent."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import gpu_clocks
import pytest
from gpu_clocks import PRIMARY, Driver

from memguard._devices import contexts, streams
from memguard._devices.streams import Mark
from memguard._frameworks.arrays import lifetimes
from memguard._frameworks.arrays.lifetimes import Lifetime, Offer
from memguard._frameworks.arrays.view import View
from memguard.errors import DeviceError


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """The work of a GPU that ends only when a test says so."""
    found = gpu_clocks.stand_in(monkeypatch)
    yield found
    found.fails.clear()
    found.finish()
    here = time.monotonic()
    while lifetimes._parked and time.monotonic() < here + 5:
        lifetimes.sweep()
    gc.collect()
    assert not lifetimes._open and not lifetimes._parked and not found.stack
    idle = [event for events in streams._idle.values() for event in events]
    assert sorted(idle) == sorted(found.events), "each event is kept for the next, once"


class Owner:
    """Releases its memory when it is freed, and records on which thread."""

    def __init__(self, driver: Driver, address: int, stream: int | None) -> None:
        self.driver, self.address, self.stream = driver, address, stream
        self.threads: list[int] = []

    def __del__(self) -> None:
        self.threads.append(threading.get_ident())
        self.driver.free(self.address, self.stream)


class HandOver:
    """A hand-over of 1 KiB from a producer with a stream or without."""

    def __init__(
        self,
        driver: Driver,
        consumer: int | None,
        producer: int | None,
        *,
        releases_when_done: bool = False,
        thread: int | None = None,
        context: int | None = None,
    ) -> None:
        self.driver, self.address = driver, driver.alloc(1024, context=context)
        owner = Owner(driver, self.address, producer)
        self.threads = owner.threads
        view = View(self.address, (1024,), (1,), "uint8", 0)
        offer = Offer("torch", view, owner, producer, context, thread)
        self.lifetime: Lifetime | None = lifetimes.begin(offer, "tensorflow", consumer, releases_when_done)

    def released(self) -> bool:
        return self.address in self.driver.freed

    def end(self) -> None:
        lifetime, self.lifetime = self.lifetime, None
        assert lifetime is not None
        lifetime.end()
        lifetime.end()
        del lifetime


def until(fact: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not fact() and time.monotonic() < deadline:
        time.sleep(0.002)
    return fact()


def sweepers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "memguard-exchange"]


# who waits


def test_memory_is_released_at_once_if_nothing_runs(driver: Driver) -> None:
    for consumer in (None, driver.stream()):
        shared = HandOver(driver, consumer, None)
        shared.end()
        assert shared.released() and not lifetimes._parked
    assert driver.wrong == [] and "cuEventSynchronize" not in driver.asked


def test_the_producers_stream_waits_for_the_consumers(driver: Driver) -> None:
    mine, theirs = driver.stream(), driver.stream()
    shared = HandOver(driver, theirs, mine)
    work = driver.read(theirs, shared.address)
    shared.end()
    assert shared.released() and driver.wrong == [], "the producer's stream waits for that work"
    assert work not in driver.over and not lifetimes._parked, "the host has not waited"


@pytest.mark.parametrize("consumer", [None, "stream"])
def test_a_producer_without_a_stream_gets_its_memory_when_the_work_is_done(
    driver: Driver, consumer: str | None
) -> None:
    theirs = driver.stream()
    shared = HandOver(driver, theirs if consumer else None, None)
    driver.read(theirs, shared.address)
    shared.end()
    time.sleep(0.02)
    assert not shared.released() and len(sweepers()) == 1
    driver.finish()
    assert until(lambda: shared.released()) and driver.wrong == []
    assert shared.threads == [] or shared.threads != [threading.get_ident()]
    assert until(lambda: not sweepers()), "the thread ends with the last of them"


def test_work_on_any_stream_is_waited_for_if_the_consumer_names_none(driver: Driver) -> None:
    mine, hidden = driver.stream(), driver.stream()
    shared = HandOver(driver, None, mine)
    driver.read(hidden, shared.address)
    shared.end()
    assert shared.released() and driver.wrong == [] and "cuCtxRecordEvent" in driver.asked


@pytest.mark.parametrize("consumer", ["side", None])
def test_the_per_thread_stream_of_a_producer_is_not_that_of_the_thread_where_the_view_ends(
    driver: Driver, consumer: str | None
) -> None:
    """Its handle is the same on every thread, so no stream of the producer's is known: the memory waits instead."""
    side = driver.stream()
    shared = HandOver(driver, side if consumer else None, streams.PER_THREAD)
    work = driver.write(side, shared.address)
    thread = threading.Thread(target=shared.end)
    thread.start()
    thread.join()
    assert not shared.released() and "cuStreamWaitEvent" not in driver.asked
    driver.finish(work)
    assert until(shared.released) and driver.wrong == []


@pytest.mark.parametrize(("mine", "theirs"), [(0, 0), (0, 1), (1, 0), (7, 7)])
def test_a_stream_does_not_wait_for_itself(driver: Driver, mine: int, theirs: int) -> None:
    if mine == 7:
        mine = theirs = driver.stream()
    shared = HandOver(driver, theirs, mine)
    driver.read(theirs, shared.address)
    shared.end()
    assert shared.released() and driver.wrong == []
    assert not {"cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"} & set(driver.asked)


def test_a_consumer_that_releases_when_done_has_waited_itself(driver: Driver) -> None:
    shared = HandOver(driver, driver.stream(), None, releases_when_done=True)
    driver.asked.clear()
    shared.end()
    assert shared.released() and driver.asked == []


def test_a_captured_graph_is_not_waited_for(driver: Driver) -> None:
    stream = driver.stream()
    driver.capturing.add(stream)
    shared = HandOver(driver, stream, None)
    shared.end()
    assert shared.released() and "cuEventRecord" not in driver.asked


def test_host_memory_and_empty_arrays_need_no_driver_call(driver: Driver) -> None:
    for view in (View(64, (4,), (1,), "int8", None), View(0, (0, 4), (4, 1), "int8", 0)):
        owner = threading.Event()
        seen = weakref.ref(owner)
        lifetime = lifetimes.begin(Offer("torch", view, owner), "numba", None)
        del owner
        driver.asked.clear()
        lifetime.end()
        del lifetime
        assert seen() is None and driver.asked == []


# where CUDA refuses


@pytest.mark.parametrize("producer", [None, "stream"])
@pytest.mark.parametrize(
    "call",
    [
        "cuEventCreate",
        "cuEventRecord",
        "cuCtxRecordEvent",
        "cuCtxPushCurrent_v2",
        "cuEventQuery",
        "cuStreamIsCapturing",
    ],
)
@pytest.mark.parametrize("consumer", [None, "stream"])
def test_a_call_that_fails_at_the_end_raises_nothing_and_keeps_nothing(
    driver: Driver, call: str, consumer: str | None, producer: str | None
) -> None:
    theirs = driver.stream()
    shared = HandOver(driver, theirs if consumer else None, driver.stream() if producer else None)
    driver.fails[call] = 700
    shared.end()
    assert shared.released() and not driver.stack and not lifetimes._open


def test_if_the_producers_stream_cannot_wait_the_memory_is_kept_until_the_work_is_done(
    driver: Driver,
) -> None:
    mine, theirs = driver.stream(), driver.stream()
    shared = HandOver(driver, theirs, mine)
    driver.read(theirs, shared.address)
    driver.fails["cuStreamWaitEvent"] = 1
    shared.end()
    assert not shared.released()
    driver.finish()
    assert until(lambda: shared.released()) and driver.wrong == []


def test_a_lost_context_ends_the_waiting(driver: Driver) -> None:
    theirs = driver.stream()
    shared = HandOver(driver, theirs, None)
    work = driver.read(theirs, shared.address)
    shared.end()
    assert not shared.released()
    driver.fails["cuEventQuery"] = 709
    assert until(lambda: shared.released())
    assert driver.wrong == [f"freed before work [{work}] is over"], "the work ended with its context"


# threads


def test_a_view_may_die_on_any_thread(driver: Driver) -> None:
    all_shared = [HandOver(driver, driver.stream(), driver.stream()) for _ in range(40)]
    for shared in all_shared:
        assert shared.lifetime is not None
        driver.read(shared.lifetime.stream or 0, shared.address)
    threads = [threading.Thread(target=shared.end) for shared in all_shared]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(shared.released() for shared in all_shared) and driver.wrong == []


def test_memory_of_a_thread_is_released_on_that_thread(driver: Driver) -> None:
    """As PyCUDA's memory, which leaks when another thread frees it."""
    here = threading.get_ident()
    shared = HandOver(driver, None, None, thread=here)
    other = threading.Thread(target=shared.end)
    other.start()
    other.join()
    assert not shared.released() and len(lifetimes._parked) == 1
    another = threading.Thread(target=lifetimes.sweep)
    another.start()
    another.join()
    assert not shared.released() and not sweepers(), "no other thread may release it"
    lifetimes.begin(Offer("torch", View(0, (), (), "int8", None), None), "jax", None).end()
    assert shared.released() and shared.threads == [here], "at the thread's next hand-over"


def test_on_its_own_thread_memory_is_released_at_once(driver: Driver) -> None:
    shared = HandOver(driver, None, None, thread=threading.get_ident())
    shared.end()
    assert shared.released()


def test_on_its_own_thread_memory_still_waits_for_the_work(driver: Driver) -> None:
    theirs = driver.stream()
    shared = HandOver(driver, None, None, thread=threading.get_ident())
    driver.read(theirs, shared.address)
    shared.end()
    lifetimes.sweep()
    assert not shared.released() and not sweepers()
    driver.finish()
    lifetimes.sweep()
    assert shared.released() and driver.wrong == []


def test_the_sweeper_is_one_daemon_thread_and_starts_again(driver: Driver) -> None:
    for _ in range(3):
        theirs = driver.stream()
        all_shared = [HandOver(driver, theirs, None) for _ in range(20)]
        for shared in all_shared:
            driver.read(theirs, shared.address)
            shared.end()
        assert until(lambda: [thread.daemon for thread in sweepers()] == [True])
        driver.finish()
        assert until(lambda all_shared=all_shared: all(shared.released() for shared in all_shared))  # type: ignore[misc]
        assert until(lambda: not sweepers())
    assert driver.wrong == []


def test_a_thread_that_cannot_start_is_tried_again(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = driver.stream()
    shared = HandOver(driver, theirs, None)
    driver.read(theirs, shared.address)

    class Ending(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", Ending)
        shared.end()
        assert until(lambda: not lifetimes._sweeper._running)
    assert not shared.released() and not sweepers()
    second = HandOver(driver, theirs, None)
    driver.read(theirs, second.address)
    second.end()
    assert until(lambda: len(sweepers()) == 1)
    driver.finish()
    assert until(lambda: shared.released() and second.released())


def test_an_owners_destructor_may_begin_and_end_lifetimes(driver: Driver) -> None:
    """A destructor may hand arrays over, too."""

    class Nested:
        def __del__(self) -> None:
            HandOver(driver, None, None).end()
            lifetimes.sweep()

    lifetime = lifetimes.begin(Offer("torch", View(64, (1,), (1,), "int8", None), Nested()), "numba", None)
    lifetime.end()
    del lifetime
    gc.collect()
    assert len(driver.freed) == 1


# what is shared


def test_lent_bytes_by_gpu_producer_and_consumer(driver: Driver) -> None:
    assert lifetimes.lent() == {} and lifetimes.lent_by("torch", 0) == 0

    def share(producer: str, consumer: str, first: int, n: int, device: int | None = 0) -> Lifetime:
        view = View((1 << 20) + first, (n,), (1,), "float32", device)
        return lifetimes.begin(Offer(producer, view, None), consumer, None, releases_when_done=True)

    live = [
        share("torch", "tensorflow", 0, 100),
        share("torch", "tensorflow", 200, 100),  # the same bytes in part
        share("torch", "cupy", 0, 100),
        share("torch", "cupy", 4096, 10, device=1),
        share("cupy", "jax", 8192, 1),
        share("numpy", "torch", 0, 100, device=None),
        share("torch", "jax", 0, 0),
    ]
    assert lifetimes.lent() == {
        0: {"torch": {"tensorflow": 600, "cupy": 400}, "cupy": {"jax": 4}},
        1: {"torch": {"cupy": 40}},
    }
    assert (lifetimes.lent_by("torch", 0), lifetimes.lent_by("torch", 1), lifetimes.lent_by("cupy", 0)) == (600, 40, 4)
    assert lifetimes.lent_by("cupy", 1) == lifetimes.lent_by("numpy", 0) == 0
    for lifetime in live:
        lifetime.end()
    assert lifetimes.lent() == {}


def test_a_strided_view_counts_the_bytes_between_its_elements(driver: Driver) -> None:
    view = View(1 << 20, (3, 2), (100, 1), "int16", 0)
    lifetime = lifetimes.begin(Offer("torch", view, None), "cupy", None, releases_when_done=True)
    assert lifetimes.lent_by("torch", 0) == (2 * 100 + 1 + 1) * 2
    lifetime.end()


def test_lent_bytes_can_be_read_while_other_threads_share(driver: Driver) -> None:
    stop, errors = threading.Event(), []

    def work() -> None:
        while not stop.is_set():
            shared = HandOver(driver, None, None)
            shared.end()

    def ask() -> None:
        try:
            for _ in range(500):
                lifetimes.lent()
                lifetimes.lent_by("torch", 0)
        except RuntimeError as error:  # a dict that changed its size
            errors.append(error)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for thread in workers:
        thread.start()
    ask()
    stop.set()
    for thread in workers:
        thread.join()
    assert not errors


# marks


def test_a_mark_covers_the_work_before_it(driver: Driver) -> None:
    stream, address = driver.stream(), driver.alloc(8)
    first = driver.write(stream, address)
    with Mark(0, stream) as mark:
        driver.write(stream, address)
        assert not mark.passed()
        driver.finish(first)
        assert mark.passed()
    assert mark.passed(), "closed: nothing to wait for"
    mark.close()
    driver.free(address, stream)


def test_events_are_used_again_in_their_context(driver: Driver) -> None:
    stream = driver.stream()
    for _ in range(50):
        with Mark(0, stream), Mark(0, None), Mark(1, None):
            pass
    assert len(driver.events) == 3 and {len(events) for events in streams._idle.values()} == {1, 2}


def test_events_of_another_context_go_with_the_mark(driver: Driver) -> None:
    other = driver.context()
    hidden, address = driver.stream(other), driver.alloc(8, context=other)
    work = driver.write(hidden, address)
    streams.follow(0, None, None, other)
    assert work in driver.over and not driver.events and not driver.stack
    mine = driver.stream()
    driver.write(hidden, address)
    streams.follow(0, None, mine, other)
    driver.read(mine, address)
    assert driver.wrong == [] and not driver.events
    driver.finish()
    driver.free(address)


@pytest.mark.parametrize("in_another", [False, True])
@pytest.mark.parametrize("then", [None, "stream"])
def test_a_stream_that_is_done_needs_no_event_in_whatever_context(
    driver: Driver, then: str | None, in_another: bool
) -> None:
    """At the hand-over and at the end of the view. With work under way each of them needs one."""
    context = driver.context() if in_another else None
    first, last = driver.stream(context or PRIMARY), driver.stream()
    address = driver.alloc(8, context=context)
    view = View(address, (8,), (1,), "uint8", 0)
    offer = Offer("torch", view, None, last if then else None, context, None)
    for busy in (False, True):
        for waits in (
            lambda: streams.follow(0, first, last if then else None, context),
            lambda: lifetimes._running_work(offer, first, context),
        ):
            if busy:
                driver.write(first, address)
            driver.asked.clear()
            mark = waits()
            events = [call for call in driver.asked if "Event" in call and "Destroy" not in call]
            assert bool(events) == busy, events
            driver.finish()
            if mark is not None:
                mark.close()


def test_the_default_stream_that_waits_is_the_primary_contexts(driver: Driver) -> None:
    """Handles 0 to 2 name another stream in each context."""
    other, mine = driver.context(), driver.stream()
    driver.stack.append(other)
    address = driver.alloc(8)
    driver.write(mine, address)
    streams.follow(0, mine, 0)
    driver.stack.pop()
    driver.read(0, address)
    assert driver.wrong == []
    driver.finish()


def test_the_default_stream_waits_in_the_primary_context_for_another_one(driver: Driver) -> None:
    other = driver.context()
    hidden, address = driver.stream(other), driver.alloc(8, context=other)
    driver.write(hidden, address)
    streams.follow(0, None, 0, other)
    assert not driver.stack
    driver.read(0, address)
    assert driver.wrong == [] and not driver.events
    driver.finish()


def test_a_gpu_without_a_context_was_given_nothing(driver: Driver) -> None:
    del driver.contexts[PRIMARY + 1]
    with Mark(1, None) as mark:
        assert mark.passed()
        mark.before(7)
        mark.wait()
    assert not driver.events


def test_without_cuda_a_mark_raises_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "loaded", lambda: None)
    with pytest.raises(DeviceError, match="nothing has initialised CUDA") as refusal:
        Mark(0, None)
    assert "fix:" in str(refusal.value)
    assert streams.place(64) is None


def test_a_driver_before_12_5_waits_for_the_context(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def __getattr__(self, name: str) -> Any:
            if name == "cuCtxRecordEvent":
                raise AttributeError(name)
            return getattr(driver, name)

    monkeypatch.setattr(contexts, "_initialised", Old())
    work = driver.write(driver.stream(), driver.alloc(8))
    with Mark(0, None) as mark:
        assert work in driver.over and mark.passed()
    assert not driver.events


def test_waiting_does_not_spoil_a_capture_of_another_thread(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    wait = Driver.cuEventSynchronize

    def watched(self: Driver, event: int) -> None:
        modes.append(self.mode)
        wait(self, event)

    monkeypatch.setattr(Driver, "cuEventSynchronize", watched)
    stream = driver.stream()
    driver.write(stream, driver.alloc(8))
    streams.follow(0, stream, None)
    assert modes == [2] and driver.mode == 0, "relaxed while it waits, and only then"


@pytest.mark.parametrize("who", [(True, False), (False, True)])
def test_a_captured_stream_neither_waits_nor_is_waited_for(driver: Driver, who: tuple[bool, bool]) -> None:
    both = driver.stream(), driver.stream()
    driver.capturing |= {stream for stream, captured in zip(both, who, strict=True) if captured}
    with pytest.raises(streams.Captured):
        streams.follow(0, *both)
    assert "cuEventRecord" not in driver.asked and driver.capturing, "and the capture goes on"
    driver.capturing |= set(both)
    streams.follow(0, *both)


def test_a_lifetime_may_end_while_threadings_own_lock_is_held(driver: Driver) -> None:
    """As when the collector runs inside `threading.enumerate()`."""
    theirs = driver.stream()
    shared = HandOver(driver, theirs, None)
    driver.read(theirs, shared.address)

    def ends() -> None:
        with threading._active_limbo_lock:  # type: ignore[attr-defined]
            shared.end()

    thread = threading.Thread(target=ends, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    driver.finish()
    assert until(lambda: shared.released())
