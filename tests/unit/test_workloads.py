"""Workloads that reserve memory and wait their turn: threads, tasks, generators, interruptions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import gc
import inspect
import os
import random
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

import pytest
import waiting
from guards import BUDGET, host_of, simulated, start
from interruptions import Points

import memguard
from memguard import api
from memguard._base.types import WorkloadReport
from memguard._base.units import GIB, MIB
from memguard._frameworks.simulated.adapter import FrameworkOutOfMemory
from memguard._guard import admission, queue, reservations
from memguard._guard.reservations import EMPTY
from memguard.errors import BudgetExceeded, MemguardError, NotActive

pytestmark = pytest.mark.usefixtures("nothing_stays")
STRIDE = max(int(os.environ.get("MEMGUARD_TEST_STRIDE", "97")) // 4, 1)
"""Every so many points at which a signal may come are tried. 1 tries all."""
SMALL = {
    "version": 1,
    "device": {"limit": "16GiB", "reserve": "2GiB"},
    "frameworks": {"torch": {"limit": "4GiB"}, "cupy": {"limit": "10GiB"}},
}


def book() -> reservations.Reservations:
    return api.current().admission.get().queue.prune()


until = functools.partial(waiting.until, pause=0.002)


def background(work: Callable[[], object], name: str = "other") -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def block(needs: str = "3GiB", name: str = "w", framework: str = "torch", **more: Any) -> Any:
    return memguard.workload(name, framework=framework, needs=needs, **more)


# reservations


def test_three_are_not_admitted_to_the_same_bytes() -> None:
    torch = simulated(start(), "torch")
    with block("2GiB", "first"), block("2GiB", "second"):
        array = torch.allocate(1536 * MIB)
    with block("2GiB", "first") as report:  # of the array as of before
        with pytest.raises(BudgetExceeded) as caught:
            background_call(lambda: block("1GiB", "third").__enter__())
        assert caught.value.available == 512 * MIB and report.reserved == 2 * GIB and report.waited == 0
        text = str(caught.value)
        assert text.startswith("torch needs 1.00 GiB, and beside what is reserved it can get 512.0 MiB:\n")
        assert "'first' (torch, thread MainThread) reserved 2.00 GiB 0.0 s ago, 0 B of it in use" in text
        assert 'fix: wait="60s" waits its turn, or reserve less' in text
        with pytest.raises(BudgetExceeded, match="ask again once one of them has ended"):
            background_call(lambda: memguard.require("torch", "1GiB"))
        background_call(lambda: memguard.require("torch", "512MiB"))
        background_call(lambda: memguard.require("pycuda", "1GiB"))
        memguard.require("torch", "2GiB")  # its own
        torch.free(torch.allocate(2 * GIB))
    torch.free(array)
    assert book() is EMPTY
    background_call(lambda: memguard.require("torch", "4GiB"))


def background_call(call: Callable[[], Any]) -> Any:
    """What the call returns or raises on a thread of its own."""
    found: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            found.append(call())
        except BaseException as error:
            errors.append(error)

    background(work).join(30)
    if errors:
        raise errors[0]
    return found[0]


def test_the_card_is_reserved_for_all_frameworks() -> None:
    guard = start(SMALL)
    (gpu,) = guard.host.devices()
    host_of(guard).occupy(gpu, 1, guard.host.memory(gpu).free - 3 * GIB)
    with block("2GiB", framework="torch"):
        with pytest.raises(BudgetExceeded, match=r"beside what is reserved it can get 1\.00 GiB"):
            background_call(lambda: block("2GiB", framework="cupy").__enter__())
        with pytest.raises(BudgetExceeded, match=r"1\.00 GiB"):
            background_call(lambda: memguard.require("cupy", "2GiB"))
        background_call(lambda: memguard.require("cupy", "1GiB"))
    background_call(lambda: memguard.require("cupy", "2GiB"))


def test_what_is_open_is_told_for_lending() -> None:
    guard = start()
    torch = simulated(guard, "torch")
    (gpu,) = guard.host.devices()
    assert guard.reserved_not_taken("torch", gpu.uuid) == 0
    with block("3GiB"):
        assert (
            guard.reserved_not_taken("torch", gpu.uuid) == 3 * GIB and guard.reserved_not_taken("pycuda", gpu.uuid) == 0
        )
        array = torch.allocate(GIB)
        assert guard.reserved_not_taken("torch", gpu.uuid) == 2 * GIB
        torch.free(array)
        assert guard.reserved_not_taken("torch", gpu.uuid) == 3 * GIB
    assert guard.reserved_not_taken("torch", gpu.uuid) == 0


def test_with_several_gpus_it_reserves_on_those_the_framework_uses() -> None:
    guard = start(simulate=["h200", "t4"], budget={**BUDGET, "device": {"limit": "12GiB", "reserve": "2GiB"}})
    simulated(guard, "torch").allocate(1, device=1)
    first, second = guard.host.devices()
    with block("3GiB"):
        assert (
            guard.reserved_not_taken("torch", first.uuid) == 0
            and guard.reserved_not_taken("torch", second.uuid) == 3 * GIB
        )


def test_a_workload_within_a_workload_takes_its_bytes() -> None:
    start()
    with block("3GiB", "outer"), block("2GiB", "inner") as inner:
        assert [one.size for one in book().active] == [3 * GIB, 0] and inner.reserved == 2 * GIB
        memguard.require("torch", "3GiB")
    with block("3GiB", "outer"):
        with pytest.raises(BudgetExceeded, match="'outer', within which it is asked") as caught:
            begun = time.monotonic()
            block("3.5GiB", "inner", wait=60).__enter__()
        assert time.monotonic() - begun < 30 and "wait for itself" in str(caught.value)
        with block("1GiB", framework="pycuda"):
            pass
    assert book() is EMPTY


def test_an_inner_one_does_not_queue_behind_those_who_wait_for_the_outer_one() -> None:
    start()
    with block("2GiB", "outer", framework="torch"):
        waiter = background(lambda: block("4GiB", wait="20s").__enter__().name)
        until(lambda: bool(book().waiting))
        with block("1GiB", framework="pycuda", wait="5s") as inner:
            assert inner.waited == 0
        with block("1GiB", wait="5s") as inner:
            assert inner.waited == 0
    waiter.join(20)
    assert not waiter.is_alive()


def test_wrong_arguments() -> None:
    start()
    with pytest.raises(MemguardError, match="wait= without needs="):
        memguard.workload("w", framework="torch", wait=1).__enter__()
    for wait in ("soon", -1, True, float("nan")):
        with pytest.raises(MemguardError, match="not a duration"):
            block(wait=wait).__enter__()
    with pytest.raises(MemguardError, match="not in the budget"):
        block(framework="cupy", wait="1s").__enter__()
    begun = time.monotonic()
    with pytest.raises(BudgetExceeded, match="its cap is"):  # which it can never have
        block("5GiB", wait="60s").__enter__()
    assert time.monotonic() - begun < 30 and book() is EMPTY


# waiting


@pytest.fixture
def woken_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits does not look by itself."""
    monkeypatch.setattr(admission, "_FIRST_PAUSE", 60.0)
    monkeypatch.setattr(admission, "_LAST_PAUSE", 60.0)


@pytest.mark.usefixtures("woken_only")
def test_who_waits_is_admitted_when_another_ends() -> None:
    start()
    first = block()
    first.__enter__()
    reports: list[WorkloadReport] = []

    def work() -> None:
        with block(name="second", wait="50s") as report:
            reports.append(report)

    thread = background(work)
    until(lambda: bool(book().waiting))
    time.sleep(0.1)
    first.__exit__(None, None, None)
    thread.join(30)
    assert 0.05 < reports[0].waited < 40 and re.search(r"after it waited \d", str(reports[0]))
    assert book() is EMPTY


def test_who_waits_in_vain_is_told_who_holds_what() -> None:
    torch = simulated(start(), "torch")
    with block(name="holder"):
        torch.allocate(GIB)
        begun = time.monotonic()
        with pytest.raises(BudgetExceeded) as caught:
            background_call(lambda: block(name="waiter", wait=0.2).__enter__())
        assert 0.2 <= time.monotonic() - begun < 20
    text = str(caught.value)
    assert (
        "after 0.2 s in which it waited its turn:\n      'holder' (torch, thread MainThread) reserved 3.00 GiB" in text
    )
    assert "1.00 GiB of it in use" in text and "'waiter'" not in text and "let it wait longer" in text
    assert book() is EMPTY


def test_memory_that_is_freed_without_memguard_is_found() -> None:
    torch = simulated(start(), "torch")
    array = torch.allocate(3 * GIB)
    found: list[float] = []

    def work() -> None:
        with block("2GiB", wait="20s") as report:
            found.append(report.waited)

    thread = background(work)
    until(lambda: bool(book().waiting))
    torch.free(array)
    thread.join(20)
    assert found and found[0] < 5


def test_first_come_first_served() -> None:
    start()
    order: list[int] = []

    def work(number: int, needs: str) -> None:
        with block(needs, f"w{number}", wait="30s"):
            order.append(number)
            time.sleep(0.01)

    with block("4GiB"):
        threads = []
        for number, needs in enumerate(["4GiB", "1GiB", "4GiB", "1GiB", "4GiB", "1GiB"]):
            threads.append(background(lambda number=number, needs=needs: work(number, needs)))  # type: ignore[misc]
            until(lambda number=number: len(book().waiting) == number + 1)  # type: ignore[misc]
        assert "'w1' (torch, thread other) has waited" in refusal("4GiB")
    for thread in threads:
        thread.join(30)
    assert order == [0, 1, 2, 3, 4, 5]


def refusal(needs: str, **more: Any) -> str:
    with pytest.raises(BudgetExceeded) as caught:
        background_call(lambda: block(needs, **more).__enter__())
    return str(caught.value)


def test_who_comes_later_takes_nothing_from_those_who_wait() -> None:
    start()
    with block("2GiB"):
        waiting = background(lambda: enter_and_leave(block("3GiB", "waiter", wait="20s")))
        until(lambda: bool(book().waiting))
        assert "'waiter'" in refusal("1GiB")  # it would fit, and the one who waits would wait longer
        background_call(lambda: enter_and_leave(block("1GiB", framework="pycuda")))  # nobody waits for that
    waiting.join(20)
    assert not waiting.is_alive() and book() is EMPTY


def enter_and_leave(one: Any) -> None:
    with one:
        pass


def test_the_end_of_the_budget_wakes_those_who_wait() -> None:
    start()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            block(wait="60s").__enter__()
        except BaseException as error:
            errors.append(error)

    one = block()
    one.__enter__()
    thread = background(work)
    until(lambda: bool(book().waiting))
    memguard.shutdown()
    thread.join(10)
    assert isinstance(errors[0], NotActive)
    one.__exit__(None, None, None)


def test_a_block_that_is_dropped_reserves_nothing() -> None:
    """A thread that died within it, a generator that nobody goes on with, an interruption."""
    start()

    def work() -> None:
        one = block()
        one.__enter__()
        assert len(book().active) == 1

    gc.collect()
    gc.disable()  # it goes at once, not at the next collection
    try:
        background_call(work)
        assert book() is EMPTY
    finally:
        gc.enable()


def test_a_forked_child_has_an_empty_book() -> None:
    guard = start()
    with block():
        guard.admission.get().queue.forked()
        assert book() is EMPTY


def test_sixteen_threads_never_run_out_if_each_keeps_to_its_needs() -> None:
    refused, admitted = crowd(reserving=True)
    assert refused == 0 and admitted == 16 * 12
    assert book() is EMPTY


def test_without_reservations_they_do() -> None:
    refused, _ = crowd(reserving=False)
    assert refused > 0


PIECE = 64 * MIB


def crowd(*, reserving: bool) -> tuple[int, int]:
    """Out-of-memory errors, and workloads that ran. All arrays have one size: nothing is left in fragments.

    Without reservations the first round begins and ends together: all of them were admitted to the same bytes.
    """
    together = threading.Barrier(1 if reserving else 16)
    guard = start(SMALL)
    (gpu,) = guard.host.devices()
    host_of(guard).occupy(gpu, 1, guard.host.memory(gpu).free - 12 * GIB)  # the caps add up to more than is free
    frameworks = {name: simulated(guard, name) for name in ("torch", "cupy")}
    counts = {"refused": 0, "admitted": 0}
    strange: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for number in range(12):
            name = rng.choice(["torch", "cupy"])
            pieces = rng.randint(1, 32 if name == "torch" else 64)
            mine: list[int] = []
            try:
                wait = {"needs": pieces * PIECE, "wait": "60s"} if reserving else {}
                if not reserving:
                    memguard.require(name, pieces * PIECE)
                if number == 0:
                    together.wait(60)
                with memguard.workload("w", framework=name, **wait):  # type: ignore[arg-type]
                    counts["admitted"] += 1
                    for _ in range(pieces):
                        mine.append(frameworks[name].allocate(PIECE))
                        if rng.random() < 0.2:
                            frameworks[name].free(mine.pop(rng.randrange(len(mine))))
                        time.sleep(0)
            except FrameworkOutOfMemory:
                counts["refused"] += 1
            except BudgetExceeded as error:
                if reserving:
                    strange.append(error)
            except BaseException as error:
                strange.append(error)
            if number == 0:
                together.wait(60)
            while mine:
                frameworks[name].free(mine.pop())

    threads = [background(lambda seed=seed: work(seed)) for seed in range(16)]  # type: ignore[misc]
    for thread in threads:
        thread.join(120)
    assert not strange, strange[0]
    return counts["refused"], counts["admitted"]


# interruptions


def interrupted(call: Callable[[], object], at: int | None) -> Points:
    points = Points(at)
    with contextlib.suppress(KeyboardInterrupt, BudgetExceeded):
        points.run(call)
    return points


@pytest.mark.parametrize("wait", [None, 0.06])
@pytest.mark.parametrize("full", [False, True])
def test_ctrl_c_at_any_point_leaves_nothing_reserved(wait: float | None, full: bool) -> None:
    guard = start()
    if full:
        simulated(guard, "torch").allocate(3 * GIB)

    def call() -> None:
        with block("2GiB", wait=wait):
            pass

    points = interrupted(call, None)
    stays, tried = {}, range(1, points.count + 1, STRIDE)
    for at in tried:
        place = interrupted(call, at).place
        if book() is not EMPTY:
            stays[place] = book()
            guard.admission.get().queue.forked()
        assert queue.enclosing_tickets() & book().ids == frozenset()
    print(f"{len(tried)} points tried")
    assert stays == {}


# async


@pytest.mark.usefixtures("woken_only")
def test_waiting_in_async_code_does_not_block_the_loop() -> None:
    start()
    ticks = [0]
    free: list[asyncio.Event] = []

    async def tick() -> None:
        while True:
            ticks[0] += 1
            await asyncio.sleep(0.005)

    async def first() -> None:
        async with block(name="first"):
            await free[0].wait()

    async def second() -> float:
        async with block(name="second", wait="50s") as report:
            return report.waited

    async def main() -> None:
        free.append(asyncio.Event())
        ticking, holding = asyncio.create_task(tick()), asyncio.create_task(first())
        await asyncio.sleep(0)
        waiting = asyncio.create_task(second(), name="the second")
        await waits()
        assert book().waiting[0].owner == "task the second"
        before = ticks[0]
        while ticks[0] <= before + 5:
            await asyncio.sleep(0.005)
        free[0].set()
        await holding
        assert 0 < await waiting < 40
        ticking.cancel()

    asyncio.run(main())
    assert book() is EMPTY


async def waits() -> None:
    end = time.monotonic() + 10
    while not book().waiting:
        assert time.monotonic() < end
        await asyncio.sleep(0)


def test_a_task_that_is_cancelled_gives_up_its_place() -> None:
    start()

    async def waiter() -> None:
        async with block(wait="20s"):
            pass

    async def main() -> None:
        waiting = asyncio.create_task(waiter())
        async with block():
            await waits()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not book().waiting
        with pytest.raises(BudgetExceeded):
            async with block("5GiB"):
                pass

    asyncio.run(main())
    assert book() is EMPTY


def test_tasks_made_within_a_block_share_what_it_reserved() -> None:
    start()
    seen: list[int] = []

    async def part(free: asyncio.Event) -> None:
        async with block("2GiB", "part", wait="1ms"):
            seen.append(len(book().active))
            await free.wait()

    async def main() -> None:
        free = asyncio.Event()
        async with block("4GiB", "whole"):
            parts = [asyncio.create_task(part(free)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(BudgetExceeded, match="'whole'"):
                await asyncio.create_task(part(free))
            free.set()
            await asyncio.gather(*parts)
            await part(free)

    asyncio.run(main())
    assert seen == [2, 3, 2] and book() is EMPTY


def test_an_async_function_is_one_block_for_each_run() -> None:
    start()

    @block("1GiB", "f")
    async def work(seconds: float) -> int:
        "Text."
        count = len(book().active)
        await asyncio.sleep(seconds)
        if seconds < 0.002:
            raise error
        return count

    error = ValueError("its own")
    assert inspect.iscoroutinefunction(work) and work.__name__ == "work" and work.__doc__ == "Text."

    async def main() -> list[Any]:
        made = [work(0.02), work(0.03), work(0.001)]
        assert book() is EMPTY  # nothing has run
        return await asyncio.gather(*made, return_exceptions=True)

    found = asyncio.run(main())
    assert found == [1, 2, error] and found[2] is error and book() is EMPTY


# generators


def test_a_generator_is_one_block_for_its_body() -> None:
    start()
    error = ValueError("thrown in")

    @block("1GiB", "g")
    def echo(first: int) -> Generator[object, object, str]:
        got: object = first
        while True:
            try:
                got = yield got
            except ValueError as thrown:
                got = thrown
            if got is None:
                return "the end"

    assert inspect.isgeneratorfunction(echo)
    made = echo(1)
    assert book() is EMPTY
    assert next(made) == 1 and len(book().active) == 1
    assert made.send(2) == 2
    assert made.throw(error) is error
    with pytest.raises(StopIteration) as stopped:
        made.send(None)
    assert stopped.value.value == "the end" and book() is EMPTY
    for how in ("close", "drop", "raise"):
        made = echo(1)
        next(made)
        assert len(book().active) == 1
        if how == "raise":
            with pytest.raises(ZeroDivisionError):
                made.throw(ZeroDivisionError)
        elif how == "close":
            made.close()
        del made
        gc.collect()
        assert book() is EMPTY, how


def test_who_a_generator_yields_to_is_not_within_its_block() -> None:
    start()
    seen: list[tuple[int, int]] = []

    @block("3GiB", "batches")
    def batches() -> Iterator[int]:
        memguard.require("torch", "3GiB")
        yield 1
        memguard.require("torch", "3GiB")
        yield 2

    @block("3GiB", "batches")
    async def later() -> AsyncIterator[int]:
        memguard.require("torch", "3GiB")
        yield 1
        await asyncio.sleep(0)
        memguard.require("torch", "3GiB")
        yield 2

    def body(number: int) -> None:
        with pytest.raises(BudgetExceeded, match="'batches'"):
            memguard.require("torch", "2GiB")
        with pytest.raises(BudgetExceeded, match="'batches'"):
            block("2GiB").__enter__()
        with block("1GiB"):
            seen.append((number, len(queue.enclosing_tickets())))

    async def loop() -> None:
        async for number in later():
            body(number)

    for number in batches():
        body(number)
    asyncio.run(loop())
    assert seen == [(1, 1), (2, 1)] * 2 and book() is EMPTY


def test_the_errors_that_leave_a_body_are_the_same_objects() -> None:
    start()
    error = ValueError()

    @block("1GiB")
    def numbers() -> Iterator[int]:
        yield 1
        raise error

    @block("1GiB")
    async def later() -> AsyncIterator[int]:
        yield 1
        raise error

    async def run() -> list[int]:
        return [number async for number in later()]

    for call in (lambda: list(numbers()), lambda: asyncio.run(run())):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            call()
        assert caught.value is error and error.__context__ is None and error.__cause__ is None
    assert book() is EMPTY


def test_an_async_generator_is_one_block_for_its_body() -> None:
    start()
    closed: list[str] = []

    @block("1GiB", "a")
    async def echo(first: int) -> Any:
        got: object = first
        try:
            while True:
                try:
                    got = yield got
                except ValueError as thrown:
                    got = thrown
                await asyncio.sleep(0)
                if got is None:
                    return
        finally:
            await asyncio.sleep(0)
            closed.append("closed")

    async def main() -> None:
        error = ValueError("thrown in")
        made = echo(1)
        assert book() is EMPTY
        assert await made.__anext__() == 1 and len(book().active) == 1
        assert await made.asend(2) == 2
        assert await made.athrow(error) is error
        with pytest.raises(StopAsyncIteration):
            await made.asend(None)
        assert book() is EMPTY
        made = echo(1)
        await made.__anext__()
        await made.aclose()
        assert book() is EMPTY
        async for number in echo(3):
            assert number == 3
            break
        gc.collect()
        await asyncio.sleep(0.01)

    assert inspect.isasyncgenfunction(echo)
    asyncio.run(main())
    assert closed == ["closed"] * 3 and book() is EMPTY


def test_a_guard_s_block_goes_around_bodies_too() -> None:
    @memguard.guard(BUDGET, simulate="h200")
    def numbers() -> Iterator[bool]:
        yield api.current().active

    assert list(numbers()) == [True]
    with pytest.raises(NotActive):
        memguard.ledger()

    async def run() -> bool:
        async with memguard.guard(BUDGET, simulate="h200") as guard:
            return guard.active

    assert asyncio.run(run())
    assert "asyncio" in sys.modules


# elastic caps

ELASTIC = {
    "version": 1,
    "device": {"limit": "14GiB", "reserve": "2GiB"},
    "frameworks": {"torch": {"min": "2GiB", "max": "10GiB"}, "cupy": {"min": "2GiB", "max": "10GiB"}},
}


def test_a_refusal_at_an_elastic_cap_has_a_line_for_each_thing_it_says() -> None:
    guard = start(ELASTIC)
    torch = simulated(guard, "torch")
    torch.allocate(7 * GIB)
    with block("1GiB", name="holder"), pytest.raises(BudgetExceeded) as caught:
        background_call(lambda: block("4800MiB", framework="cupy", wait=0.1).__enter__())
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("cupy needs 4.69 GiB but can get 2.00 GiB: its cap is 2.00 GiB and it holds 0 B")
    assert lines[1].strip().startswith("cupy is elastic: min 2.00 GiB, max 10.00 GiB; lent to others, in live arrays:")
    assert lines[2:4] == ["    it waited 0.1 s for this", "    reserved or waited for on this GPU:"]
    assert lines[4].startswith("      'holder' (torch, thread MainThread) reserved 1.00 GiB")
    assert lines[5].strip().startswith("fix: free arrays") and len(lines) == 6


def test_what_is_reserved_is_not_lent_away() -> None:
    guard = start(ELASTIC)
    with block("8GiB", framework="cupy"):
        cap = guard.plan.devices[0].caps["cupy"]
        assert cap >= 8 * GIB
        room = guard.make_room("torch", 6 * GIB)
        assert room.missing and guard.plan.devices[0].caps["cupy"] >= 8 * GIB
        with pytest.raises(BudgetExceeded):
            background_call(lambda: block("6GiB", framework="torch").__enter__())
        background_call(lambda: enter_and_leave(block("4GiB", framework="torch")))
        cupy = simulated(guard, "cupy")
        arrays = [cupy.allocate(GIB) for _ in range(8)]
    for array in arrays:
        cupy.free(array)
    assert not guard.make_room("torch", 6 * GIB).missing
    with block("10GiB", framework="torch", wait="60s") as report:
        assert report.waited == 0
    begun = time.monotonic()
    with pytest.raises(BudgetExceeded):  # more than its max
        block("11GiB", framework="torch", wait="60s").__enter__()
    assert time.monotonic() - begun < 5


def test_a_workload_waits_for_what_is_lent() -> None:
    guard = start(ELASTIC)
    one = block("9GiB", framework="cupy")
    one.__enter__()
    waited: list[float] = []

    def work() -> None:
        with block("9GiB", framework="torch", wait="20s") as report:
            waited.append(report.waited)
            assert guard.plan.devices[0].caps["torch"] >= 9 * GIB

    thread = background(work)
    until(lambda: bool(book().waiting))
    one.__exit__(None, None, None)
    thread.join(20)
    assert waited and book() is EMPTY


def test_one_that_others_forestall_at_each_look_is_refused_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room at each look, and each time the reservations change before its own is made."""
    monkeypatch.setattr(admission, "_MAX_ATTEMPTS", 20, raising=False)
    guard = start(SMALL)
    torch, looks, standing = type(simulated(guard, "torch")), 0, [block("1MiB", "other", "cupy")]
    usage = torch.usage
    standing[0].__enter__()

    def forestalled(self: Any, device: Any) -> Any:
        nonlocal looks
        if self.name == "torch" and threading.current_thread().name == "beginning":
            looks += 1
            assert looks < 500, "for ever"
            other.submit(forestall).result(10)
        return usage(self, device)

    def forestall() -> None:
        after = block("1MiB", "other", "cupy")
        after.__enter__()
        standing.pop().__exit__(None, None, None)
        standing.append(after)

    refused: list[BaseException] = []

    def begin() -> None:
        try:
            with block("1GiB"):
                pass
        except BaseException as error:
            refused.append(error)

    other = concurrent.futures.ThreadPoolExecutor(1)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "usage", forestalled)
        background(begin, "beginning").join(60)
    assert len(refused) == 1 and isinstance(refused[0], BudgetExceeded), refused
    assert "other threads changed reservations or caps 20 times" in str(refused[0])
    assert "    fix: ask again" in str(refused[0])
    with block("1GiB"):
        pass
    other.submit(lambda: standing.pop().__exit__(None, None, None)).result(10)
    other.shutdown()
    assert book() is EMPTY
