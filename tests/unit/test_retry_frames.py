"""Nothing of a failed run is alive when the next one begins: arrays, frames, the error. Nothing else is touched."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import pytest

import memguard


class OutOfMemoryError(RuntimeError):
    """As torch's, by its name."""


OutOfMemoryError.__module__ = "torch"
TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Array:
    """Stands for memory of a GPU."""


class Runs:
    """What each run made, and what of it is alive when the next one begins. Without collecting: nothing may wait."""

    def __init__(self) -> None:
        self.made: list[list[weakref.ref[Any]]] = []
        self.left: list[int] = []

    def begin(self) -> None:
        self.left.append(sum(one() is not None for run in self.made for one in run))
        self.made.append([])

    def array(self) -> Array:
        found = Array()
        self.made[-1].append(weakref.ref(found))
        return found

    def fail(self, error: BaseException | None = None) -> Any:
        error = OutOfMemoryError(TEXT) if error is None else error
        self.made[-1].append(weakref.ref(error))
        raise error

    @property
    def again(self) -> bool:
        return len(self.made) > 1


def deep(runs: Runs, depth: int = 3) -> None:
    held = runs.array()
    if depth:
        deep(runs, depth - 1)
    if not runs.again:
        runs.fail()
    assert held is not None


def plain(runs: Runs) -> None:
    runs.begin()
    deep(runs)


def comprehension(runs: Runs) -> None:
    runs.begin()
    kept = [runs.array() for _ in range(4)]
    _ = [runs.fail() if n == 3 and not runs.again else kept[n] for n in range(4)]


def chained(runs: Runs) -> None:
    runs.begin()
    try:
        deep(runs)
    except OutOfMemoryError as error:
        held = runs.array()
        raise ValueError("the batch failed", held) from error


def while_handling(runs: Runs) -> None:
    runs.begin()
    try:
        deep(runs)
    except OutOfMemoryError:
        held = runs.array()
        raise KeyError("cleaning up failed", held)  # noqa: B904


def silenced(runs: Runs) -> None:
    """Its context is not shown, and holds memory all the same."""
    runs.begin()
    held = runs.array()
    try:
        local = runs.array(), held
        raise KeyError(local)
    except KeyError:
        if not runs.again:
            raise OutOfMemoryError(TEXT) from None


def grouped(runs: Runs) -> None:
    runs.begin()
    found = []
    for _ in range(2):
        try:
            deep(runs)
        except OutOfMemoryError as error:
            found.append(error)
    if found:
        raise vars(builtins)["ExceptionGroup"]("two", found)


def in_a_with_block(runs: Runs) -> None:
    runs.begin()

    @contextlib.contextmanager
    def block() -> Iterator[Array]:
        own = runs.array()
        yield own

    with block() as entered, contextlib.ExitStack() as stack:
        stack.callback(lambda: entered)
        deep(runs)


def in_a_circle(runs: Runs) -> None:
    runs.begin()
    held = [runs.array()]
    try:
        deep(runs)
    except OutOfMemoryError as error:
        held.append(error)  # type: ignore[arg-type]  # the frame holds the error, which holds the frame
        raise


def in_a_generator(runs: Runs) -> None:
    runs.begin()

    def items() -> Iterator[Array]:
        own = runs.array()
        yield own
        deep(runs)

    for one in items():
        assert one is not None


def within_itself(runs: Runs) -> None:
    """A function that runs again, within one that does."""
    runs.begin()
    held = runs.array()

    @memguard.retry()
    def inner() -> None:
        if len(runs.made) < 3:
            runs.begin()  # it counts what is left of the outer's first run: only that run's own array
            deep_failing(runs)

    inner()
    assert held is not None


def deep_failing(runs: Runs) -> None:
    held = runs.array()
    runs.fail()
    assert held


BODIES = [
    plain,
    comprehension,
    chained,
    while_handling,
    silenced,
    in_a_with_block,
    in_a_circle,
    in_a_generator,
    grouped,
]


def decorated(body: Callable[[Runs], None], runs: Runs) -> None:
    memguard.retry()(body)(runs)


def called(body: Callable[[Runs], None], runs: Runs) -> None:
    memguard.retry.call(body, runs)


def attempted(body: Callable[[Runs], None], runs: Runs) -> None:
    for attempt in memguard.retry.attempts():
        with attempt:
            body(runs)


def in_a_method(body: Callable[[Runs], None], runs: Runs) -> None:
    class Model:
        @memguard.retry()
        def step(self) -> None:
            body(runs)

    Model().step()


def awaited(body: Callable[[Runs], None], runs: Runs) -> None:
    @memguard.retry()
    async def step() -> None:
        await asyncio.sleep(0)
        held = weakref.ref(Array())
        await asyncio.sleep(0)
        body(runs)
        assert held is not None

    asyncio.run(step())


def attempted_awaiting(body: Callable[[Runs], None], runs: Runs) -> None:
    async def inner() -> None:
        await asyncio.sleep(0)
        body(runs)

    async def step() -> None:
        for attempt in memguard.retry.attempts():
            with attempt:
                await inner()

    asyncio.run(step())


def in_a_guard(body: Callable[[Runs], None], runs: Runs) -> None:
    budget = {"version": 1, "frameworks": {"torch": {"limit": "4GiB"}}}
    with memguard.guard(budget, simulate="h200"), memguard.workload("w", framework="torch"):
        memguard.retry.call(body, runs)


WAYS = [decorated, called, attempted, in_a_method, awaited, attempted_awaiting, in_a_guard]


@pytest.fixture
def without_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that nothing hides what still has a reference: memguard's own collection too."""
    gc.collect()
    gc.disable()
    with monkeypatch.context() as patch:
        patch.setattr(gc, "collect", lambda: 0)
        yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("body", BODIES)
def test_nothing_of_the_failed_run_is_alive_in_the_next(
    body: Callable[[Runs], None], way: Callable[[Callable[[Runs], None], Runs], None]
) -> None:
    runs = Runs()
    way(body, runs)
    assert runs.left == [0, 0]
    assert len(runs.made[0]) >= 2


@pytest.mark.usefixtures("without_collector")
def test_in_nested_calls_only_what_still_runs_is_alive() -> None:
    runs = Runs()
    memguard.retry.call(within_itself, runs)
    assert runs.left == [0, 1, 1, 0], "the outer run's own array, while it runs"


def test_what_only_the_collector_finds_is_gone_too() -> None:
    def body(runs: Runs) -> None:
        runs.begin()
        held: Any = runs.array()
        held.itself = held
        if not runs.again:
            runs.fail()

    for way in WAYS:
        runs = Runs()
        way(body, runs)
        assert runs.left == [0, 0]


@pytest.mark.usefixtures("without_collector")
def test_an_error_that_the_program_keeps_holds_no_arrays() -> None:
    runs, kept = Runs(), list[BaseException]()

    def step() -> None:
        runs.begin()
        held = runs.array()
        if not runs.again:
            error = OutOfMemoryError(TEXT)
            kept.append(error)
            raise error
        assert held

    memguard.retry.call(step)
    assert runs.left == [0, 0]
    assert isinstance(kept[0].__traceback__, TracebackType), "it is whole but for the variables"


def test_a_generator_that_is_suspended_goes_on() -> None:
    """It is in the traceback of an error that it caught itself: until Python 3.12 to clear its frame would end it."""
    caught = list[OutOfMemoryError]()

    def producer() -> Iterator[str]:
        local = "kept"
        try:
            raise OutOfMemoryError(TEXT)
        except OutOfMemoryError as error:
            caught.append(error)
        yield "first"
        yield local

    items, runs = producer(), Runs()

    def step() -> str:
        runs.begin()
        if not runs.again:
            assert next(items) == "first"
            raise caught[0]
        return next(items)

    assert memguard.retry.call(step) == "kept"


def test_a_coroutine_that_is_suspended_goes_on() -> None:
    caught = list[OutOfMemoryError]()

    async def other() -> str:
        local = "kept"
        try:
            raise OutOfMemoryError(TEXT)
        except OutOfMemoryError as error:
            caught.append(error)
        await asyncio.sleep(0.001)
        return local

    @memguard.retry()
    async def step(task: asyncio.Task[str]) -> str:
        if caught:
            raise caught.pop()
        return await task

    async def main() -> str:
        task = asyncio.create_task(other())
        await asyncio.sleep(0)
        return await asyncio.wait_for(step(task), 5)  # a task whose frame was cleared never ends

    assert asyncio.run(main()) == "kept"


@pytest.mark.usefixtures("without_collector")
def test_what_the_caller_is_handling_stays_whole() -> None:
    """Its frames are not those of a failed run: a debugger may look at them later."""
    runs = Runs()

    def first() -> None:
        local = "seen later"
        raise KeyError(local)

    try:
        first()
    except KeyError as outer:
        memguard.retry.call(plain, runs)
        for attempt in memguard.retry.attempts():
            with attempt:
                if attempt.number == 1:
                    raise OutOfMemoryError(TEXT)  # noqa: B904
        assert outer.__traceback__ is not None and outer.__traceback__.tb_next is not None
        assert outer.__traceback__.tb_next.tb_frame.f_locals == {"local": "seen later"}
    assert runs.left == [0, 0]


@pytest.mark.parametrize("error", [ValueError("wrong shape"), MemoryError(), KeyboardInterrupt(), SystemExit(3)])
def test_other_errors_pass_as_they_are(error: BaseException) -> None:
    ran = []

    def step() -> None:
        local = "whole"
        ran.append(local)
        raise error

    for way in (lambda: memguard.retry.call(step), lambda: attempted(lambda _: step(), Runs())):
        ran.clear()
        with pytest.raises(type(error)) as caught:
            way()
        assert ran == ["whole"] and caught.value is error and not getattr(error, "__notes__", [])
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code is not step.__code__:
            trace = trace.tb_next
        assert trace is not None and trace.tb_frame.f_locals["local"] == "whole"


@pytest.mark.usefixtures("without_collector")
def test_the_last_error_is_the_programs_own() -> None:
    runs, raised = Runs(), list[BaseException]()

    def step() -> None:
        runs.begin()
        held = runs.array()
        error = OutOfMemoryError(TEXT)
        raised[:] = [error]
        raise error from (KeyError(held) if held is None else None)

    with pytest.raises(OutOfMemoryError) as caught:
        memguard.retry.call(step)
    assert caught.value is raised[0] and type(caught.value) is OutOfMemoryError and str(caught.value) == TEXT
    assert caught.value.__context__ is None and runs.left == [0, 0]
    (note,) = caught.value.__notes__
    assert note.startswith("memguard ran it 2 times.") and "run 1: OutOfMemoryError: CUDA out of memory" in note
    trace = caught.tb
    while trace.tb_next is not None:
        trace = trace.tb_next
    assert "held" in trace.tb_frame.f_locals, "its frames are not cleared: nothing runs again"
