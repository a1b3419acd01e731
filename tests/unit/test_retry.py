"""Running again after a GPU ran out of memory: what is run, how often, with which size, and what is said of it."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from guards import simulated, start
from hypothesis import given
from hypothesis import strategies as st

import memguard
from memguard._base.types import Room
from memguard._base.units import GIB
from memguard._runtime.retry import room
from memguard._runtime.retry.failure import first_sentences
from memguard._runtime.retry.run import halved, lowest, steps
from memguard.types import Event


class OutOfMemoryError(RuntimeError):
    """As torch's, by its name."""


OutOfMemoryError.__module__ = "torch"
TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB."


def out_of_memory() -> OutOfMemoryError:
    return OutOfMemoryError(TEXT)


class Fails:
    """Fails so often, and then returns what it is given."""

    def __init__(self, times: int, error: Callable[[], BaseException] = out_of_memory) -> None:
        self.times, self.error, self.ran = times, error, 0

    def __call__(self, value: object = "fine") -> object:
        self.ran += 1
        if self.ran <= self.times:
            raise self.error()
        return value


def note_of(error: BaseException) -> str:
    """The one note."""
    (note,) = error.__notes__
    return str(note)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank of a job, whatever runs the tests."""
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def test_once_if_nothing_else_is_said(caplog: pytest.LogCaptureFixture) -> None:
    step = Fails(1)
    assert memguard.retry.call(step, 5) == 5 and step.ran == 2
    (said,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert said.name == "memguard"
    assert said.getMessage().startswith("torch ran out of GPU memory (2.00 GiB asked for): ")
    assert said.getMessage().endswith("; running again (1 of 1)")
    step = Fails(2)
    with pytest.raises(OutOfMemoryError) as caught:
        memguard.retry.call(step)
    assert step.ran == 2
    note = note_of(caught.value)
    assert note.startswith(
        "memguard ran it 2 times. Each time a GPU ran out of memory.\n  run 1: OutOfMemoryError: CUDA"
    )
    assert note.endswith("\n  run 2: this error")


@pytest.mark.parametrize("times", [1, 3])
def test_as_often_as_is_said(times: int) -> None:
    step = Fails(times)
    assert memguard.retry(times)(step)() == "fine" and step.ran == times + 1
    step = Fails(times + 1)
    with pytest.raises(OutOfMemoryError):
        memguard.retry(times=times)(step)()
    assert step.ran == times + 1
    numbers = []
    with pytest.raises(OutOfMemoryError):
        for attempt in memguard.retry.attempts(times):
            with attempt:
                numbers.append(attempt.number)
                raise out_of_memory()
    assert numbers == list(range(1, times + 2))


def test_another_error_in_the_second_run_is_not_hidden() -> None:
    errors = iter([out_of_memory(), ValueError("half written")])
    with pytest.raises(ValueError, match="half written") as caught:
        memguard.retry.call(Fails(2, lambda: next(errors)))
    note = note_of(caught.value)
    assert note.startswith("memguard ran it 2 times. It failed in another way.\n  run 1: OutOfMemoryError")
    assert caught.value.__context__ is None


def test_a_function_keeps_its_face() -> None:
    @memguard.retry()
    def step(x: int, *, y: int = 2) -> int:
        """Adds."""
        return x + y

    assert step(1, y=3) == 4
    assert (step.__name__, step.__doc__) == ("step", "Adds.")
    assert list(inspect.signature(step).parameters) == ["x", "y"]
    assert not inspect.iscoroutinefunction(step)


def test_methods() -> None:
    class Model:
        times = 1

        @memguard.retry()
        def step(self, x: int) -> int:
            self.times -= 1
            if self.times >= 0:
                raise out_of_memory()
            return x

        @classmethod
        @memguard.retry()
        def make(cls) -> str:
            return cls.__name__

        @staticmethod
        @memguard.retry()
        def free(x: int) -> int:
            return x

    assert (Model().step(3), Model.make(), Model.free(4)) == (3, "Model", 4)
    for kind in (classmethod, staticmethod):
        with pytest.raises(TypeError, match=f"write @{kind.__name__} above @memguard.retry"):
            memguard.retry()(kind(lambda: None))  # type: ignore[type-var]


def test_async_functions_are_awaited_again() -> None:
    ran: list[str] = []

    @memguard.retry(times=2)
    async def step(x: int) -> int:
        await asyncio.sleep(0)
        ran.append("run")
        if len(ran) < 3:
            raise out_of_memory()
        return x

    class Model:
        async def __call__(self, x: int) -> int:
            return await step(x)

    assert inspect.iscoroutinefunction(step)
    assert asyncio.run(step(7)) == 7 and len(ran) == 3
    ran.clear()
    assert asyncio.run(memguard.retry()(Model())(8)) == 8
    ran[:] = ["run"]
    assert asyncio.run(memguard.retry.call(functools.partial(step, 9))) == 9


def test_a_cancelled_task_stays_cancelled() -> None:
    ran: list[int] = []

    @memguard.retry()
    async def step() -> None:
        ran.append(1)
        await asyncio.sleep(10)

    async def main() -> None:
        task = asyncio.create_task(step())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ran == [1]


def items() -> Iterator[int]:
    yield 1


async def later() -> AsyncIterator[int]:
    yield 1


class Items:
    def __call__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize("function", [items, later, Items(), functools.partial(items)])
def test_generators_are_refused(function: Callable[[], object]) -> None:
    for use in (memguard.retry(), memguard.retry.call):
        with pytest.raises(TypeError, match=r"is an? (async )?generator: .*\n    fix: .*memguard\.retry\.attempts"):
            use(function)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"times": 0}, ValueError, "times is at least 1"),
        ({"times": True}, TypeError, "times is a whole number"),
        ({"times": "1"}, TypeError, "times is a whole number"),
        ({"shrink": "n", "floor": 0}, ValueError, "floor is at least 1"),
        ({"shrink": "n", "multiple": 1.5}, TypeError, "multiple is a whole number"),
        ({"shrink": 3}, TypeError, "shrink is the name of an argument"),
        ({"floor": 4}, TypeError, "fix: name its argument: shrink='batch_size'"),
        ({"ranks": "alone"}, ValueError, "ranks is 'refuse' or 'independent'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        memguard.retry(**arguments)


def test_the_call_that_is_easily_forgotten() -> None:
    with pytest.raises(TypeError, match=r"fix: write @memguard\.retry\(\)"):

        @memguard.retry  # type: ignore[arg-type]
        def step() -> None: ...

    with pytest.raises(TypeError, match="takes a function, found 3"):
        memguard.retry()(3)  # type: ignore[arg-type]


def test_a_loop_without_its_block() -> None:
    with pytest.raises(RuntimeError, match="this attempt had no block\n    fix: for attempt"):
        for _ in memguard.retry.attempts():
            pass
    ran = 0
    for attempt in memguard.retry.attempts():
        with attempt:
            ran += 1
        with pytest.raises(RuntimeError, match="has begun already"), attempt:
            pass
    assert ran == 1
    for attempt in memguard.retry.attempts():
        with attempt:
            break  # leaving the loop is no failure
    every = memguard.retry.attempts()
    assert [
        attempt.number for attempt in every if attempt.__enter__() is attempt and not attempt.__exit__(None, None, None)
    ] == [1]
    assert list(every) == []


# sizes


@given(st.integers(1, 10**6), st.integers(1, 2000), st.integers(1, 300))
def test_sizes_shrink_to_the_floor_and_no_further(size: int, floor: int, multiple: int) -> None:
    found = [size]
    while (one := halved(found[-1], floor, multiple)) is not None:
        assert one < found[-1] and one >= floor and one % multiple == 0
        assert one <= found[-1] // 2 or one == lowest(floor, multiple)
        found.append(one)
    assert steps(size, floor, multiple) == len(found) - 1
    least = lowest(floor, multiple)
    assert found[-1] == least or (len(found) == 1 and size < least)


class Fits:
    """A function that fits up to a size, and writes down what it was given."""

    def __init__(self, most: int, **options: Any) -> None:
        self.most, self.given = most, list[int]()

        @memguard.retry(shrink="batch_size", **options)
        def step(data: str, batch_size: int = 64) -> int:
            self.given.append(batch_size)
            if batch_size > self.most:
                raise out_of_memory()
            return batch_size

        self.step = step


def test_the_size_is_halved_until_it_fits_and_remembered() -> None:
    fits = Fits(20)
    assert fits.step("x") == 16 and fits.given == [64, 32, 16]
    fits.given.clear()
    assert fits.step("x", 128) == 16 and fits.given == [16], "what fitted comes first"
    assert fits.step("x", batch_size=8) == 8, "never more than the caller passes"
    assert fits.step(data="x", batch_size=64) == 16
    fits.most = 5
    assert fits.step("x") == 4 and fits.step("x") == 4
    fits.step.forget()
    fits.given.clear()
    fits.most = 100
    assert fits.step("x") == 64 and fits.given == [64]


def test_a_floor_a_multiple_and_a_number_of_times(caplog: pytest.LogCaptureFixture) -> None:
    fits = Fits(0, floor=10, multiple=8)
    with pytest.raises(OutOfMemoryError) as caught:
        fits.step("x", 100)
    assert fits.given == [100, 48, 24, 16]
    assert [m.rpartition("; ")[2] for m in caplog.messages[:3]] == [
        "running again with batch_size=48 (1 of 3)",
        "running again with batch_size=24 (2 of 3)",
        "running again with batch_size=16 (3 of 3)",
    ]
    note = note_of(caught.value)
    assert note.startswith("memguard ran it 4 times. batch_size=16 is as small as it may get (the floor is 16).\n")
    assert "\n  run 2: batch_size=48: OutOfMemoryError" in note
    fits = Fits(0, times=1)
    with pytest.raises(OutOfMemoryError) as caught:
        fits.step("x")
    assert fits.given == [64, 32]
    assert "The last one had batch_size=32." in note_of(caught.value)
    fits = Fits(0, floor=64)
    with pytest.raises(OutOfMemoryError) as caught:
        fits.step("x")
    assert fits.given == [64]
    assert note_of(caught.value) == (
        "memguard did not run it again: batch_size=64 is as small as it may get (the floor is 64)"
    )
    fits.step.forget()
    assert fits.step.__name__ == "step"


def test_sizes_of_every_kind_of_argument() -> None:
    given = []

    @memguard.retry(shrink="n")
    def positional(a: int, n: int, /, b: int = 3, *rest: int) -> tuple[int, ...]:
        given.append(n)
        if n > 2:
            raise out_of_memory()
        return a, n, b, *rest

    assert positional(1, 8, 5, 6, 7) == (1, 2, 5, 6, 7) and given == [8, 4, 2]

    @memguard.retry(shrink="n")
    def anything(**options: int) -> dict[str, int]:
        if options.get("n", 0) > 2:
            raise out_of_memory()
        return options

    assert anything(n=5, m=9) == {"n": 2, "m": 9}
    assert anything(m=9) == {"m": 9}
    with pytest.raises(TypeError, match=r"shrink='size': .*fit has no such argument; it has: batch"):

        @memguard.retry(shrink="size")
        def fit(batch: int) -> None: ...

    with pytest.raises(TypeError, match="shrink='n': that is a whole number, found '8'"):
        positional(1, "8")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="missing"):
        positional()  # type: ignore[call-arg]


def test_sizes_of_methods_and_coroutines() -> None:
    class Model:
        @memguard.retry(shrink="n")
        def step(self, n: int) -> int:
            if n > 4:
                raise out_of_memory()
            return n

        @memguard.retry(shrink="n")
        async def later(self, n: int) -> int:
            return self.step(n) if n <= 4 else Fails(1)()  # type: ignore[return-value]

    model = Model()
    assert model.step(16) == 4 and Model().step(16) == 4
    model.step.forget()
    assert asyncio.run(model.later(8)) == 4


def test_sizes_of_attempts() -> None:
    given = []
    for attempt in memguard.retry.attempts(size=32, floor=4):
        with attempt:
            given.append(attempt.size)
            if attempt.size is None or attempt.size > 8:
                raise out_of_memory()
    assert given == [32, 16, 8]
    for attempt in memguard.retry.attempts():
        with attempt:
            assert attempt.size is None
    for wrong in (0, "8", True):
        with pytest.raises(ValueError, match="size is a whole number above 0"):
            memguard.retry.attempts(size=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="give the first one: size=64"):
        memguard.retry.attempts(floor=2)


# under a budget


BUDGET = {"version": 1, "frameworks": {"torch": {"limit": "60GiB"}, "cupy": {"limit": "62GiB"}}}


class Array:
    """Memory of a simulated framework that goes back when Python lets go of it."""

    def __init__(self, framework: Any, size: int) -> None:
        self._framework, self._id = framework, framework.allocate(size)

    def __del__(self) -> None:
        if hasattr(self, "_id"):
            self._framework.free(self._id)


@pytest.fixture
def guard(nothing_stays: None) -> memguard.Guard:
    """An H200 of which other things hold 30 GiB, and CuPy's idle cache 60."""
    found = start(BUDGET)
    found.host.take(found.host.devices()[0], 30 * GIB)  # type: ignore[attr-defined]
    arrays = [Array(simulated(found, "cupy"), 10 * GIB) for _ in range(6)]
    del arrays
    return found


def test_a_siblings_cache_serves_the_second_run(guard: memguard.Guard, caplog: pytest.LogCaptureFixture) -> None:
    """What the failed run held counts: 48 GiB of torch's own are taken again, and the 4 GiB that failed besides."""
    torch, events, runs = simulated(guard, "torch"), list[Event](), []
    memguard.on_event(events.append)

    @memguard.retry()
    def step() -> int:
        runs.append(1)
        return len([Array(torch, 4 * GIB) for _ in range(14)])

    assert step() == 14 and len(runs) == 2
    (said,) = caplog.messages[-1:]
    assert re.fullmatch(
        r"torch ran out of GPU memory \(4\.00 GiB asked for\): torch gave back its own cache, 48\.00 GiB by NVML; "
        r"cupy gave back 60\.00 GiB by NVML; running again \(1 of 1\)",
        said,
    )
    (event,) = [one for one in events if one.kind == "retry"]
    assert (event.framework, event.text) == ("torch", said) and event.bytes == 108 * GIB


def test_without_it_the_same_program_fails(guard: memguard.Guard) -> None:
    torch = simulated(guard, "torch")
    with pytest.raises(Exception, match="the card is full"):
        _ = [Array(torch, 4 * GIB) for _ in range(14)]


class Asked:
    """A guard whose `make_room` only writes down what it is asked, and answers that so much is missing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, guard: memguard.Guard, missing: Callable[[int], int]) -> None:
        self.asked: list[tuple[str, int, str | None]] = []
        self.trimmed: list[str | None] = []
        trim = guard.trim

        def make_room(framework: str, needed: int, device: Any = None) -> Room:
            self.asked.append((framework, needed, device.uuid))
            return Room({}, None, missing(needed), {"cupy": GIB})

        def trims(framework: str | None = None) -> int:
            self.trimmed.append(framework)
            return trim(framework)

        monkeypatch.setattr(guard, "make_room", make_room)
        monkeypatch.setattr(guard, "trim", trims)


def test_what_is_asked_of_the_guard(
    guard: memguard.Guard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything idle, and room for the request beside what the run will take again."""
    torch, uuid = simulated(guard, "torch"), guard.plan.devices[0].device.uuid
    asked = Asked(monkeypatch, guard, lambda needed: 0)
    assert len(memguard.retry.call(lambda: [Array(torch, 4 * GIB) for _ in range(14)])) == 14
    assert asked.asked == [("torch", 52 * GIB, uuid)]
    assert asked.trimmed == ["torch", "cupy"]
    assert "; cupy holds 1.00 GiB more in live arrays than its min; running again" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("missing", "asked"),
    [
        (lambda needed: 0, [90]),
        (lambda needed: max(needed - 70 * GIB, 0), [90, 70]),
        (lambda needed: max(needed - 20 * GIB, 0), [90, 60]),
        (lambda needed: 12 * GIB, [90, 78, 66, 60]),
        (lambda needed: GIB, [90, 89, 88, 87, 86]),
    ],
)
def test_an_elastic_cap_rises_as_far_as_it_goes(
    monkeypatch: pytest.MonkeyPatch, nothing_stays: None, missing: Callable[[int], int], asked: list[int]
) -> None:
    """Nobody knows what the run would have asked for next."""
    names = {"torch": {"min": "4GiB", "max": "90GiB"}, "cupy": {"min": "8GiB", "max": "90GiB"}}
    found = start({"version": 1, "frameworks": names})
    found.host.take(found.host.devices()[0], 80 * GIB)  # type: ignore[attr-defined]
    torch, guard = simulated(found, "torch"), Asked(monkeypatch, found, missing)
    with pytest.raises(Exception, match="out of memory"):
        memguard.retry.call(lambda: [Array(torch, 4 * GIB) for _ in range(50)])
    assert [round(needed / GIB) for _, needed, _ in guard.asked] == asked, "at least the 56 GiB that it had, and 4"


def test_an_elastic_program_that_fails_without_it(nothing_stays: None, caplog: pytest.LogCaptureFixture) -> None:
    names = {"torch": {"min": "20%", "max": "80%"}, "cupy": {"min": "10%", "max": "80%"}}
    found = start({"version": 1, "frameworks": names})
    torch, cupy = simulated(found, "torch"), simulated(found, "cupy")

    def step() -> int:
        return len([Array(torch, GIB) for _ in range(70)])

    def idle() -> None:
        arrays = [Array(cupy, GIB) for _ in range(90)]
        del arrays

    idle()
    with pytest.raises(Exception, match="out of memory"):
        step()
    memguard.trim("torch")
    idle()
    assert memguard.retry.call(step) == 70
    assert re.search(r"; cupy gave back \d+\.00 GiB by NVML; torch's cap went from .* GiB to .* GiB; ", caplog.text)


def test_room_is_made_on_the_gpu_of_the_request(monkeypatch: pytest.MonkeyPatch, nothing_stays: None) -> None:
    names = {"torch": {"limit": "20GiB"}, "cupy": {"limit": "20GiB"}}
    found = start({"version": 1, "frameworks": names}, simulate=["h200", "h200"])
    first, second = (part.device.uuid for part in found.plan.devices)
    guard, torch = Asked(monkeypatch, found, lambda needed: 0), simulated(found, "torch")
    for device, uuid in ((1, second), (0, first)):
        with pytest.raises(Exception, match="cap is reached"):
            memguard.retry.call(torch.allocate, 30 * GIB, device)
        assert guard.asked.pop()[2] == uuid
    on_gpu_1 = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 139.80 GiB"
    memguard.retry.call(Fails(1, lambda: OutOfMemoryError(on_gpu_1)))
    assert guard.asked.pop()[2] == second


class CUBLASError(RuntimeError):
    """As CuPy's."""


CUBLASError.__module__ = "cupy_backends.cuda.libs.cublas"


def no_workspace() -> BaseException:
    return CUBLASError("CUBLAS_STATUS_ALLOC_FAILED")


def of_no_size() -> BaseException:
    return OutOfMemoryError("CUDA out of memory.")


def test_a_librarys_error_and_one_without_a_size(
    guard: memguard.Guard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = Asked(monkeypatch, guard, lambda needed: 0)
    assert memguard.retry.call(Fails(1, no_workspace)) == "fine"
    assert (asked.asked, asked.trimmed) == ([], ["torch", "cupy"]), "a workspace lies outside the caps"
    assert caplog.messages[-1].startswith(
        "cublas ran out of GPU memory: cupy gave back 60.00 GiB by NVML; running again"
    )
    asked.trimmed.clear()
    assert memguard.retry.call(Fails(1, of_no_size)) == "fine"
    assert ([who for who, _, _ in asked.asked], asked.trimmed) == (["torch"], ["torch", "cupy"])


def test_what_fails_in_making_room_stops_nothing(guard: memguard.Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, name in ((guard, "make_room"), (guard, "trim"), (guard, "sample"), (guard.elastic, "capturing")):
        with monkeypatch.context() as patch:
            patch.setattr(part, name, Fails(99, lambda: RuntimeError("a driver is lost")))
            assert memguard.retry.call(Fails(1)) == "fine"
    with monkeypatch.context() as patch:
        patch.setattr(room, "with_figures", Fails(99, lambda: RuntimeError("a driver is lost")))
        with pytest.raises(OutOfMemoryError):
            memguard.retry.call(Fails(1))


def test_a_budget_that_ends_in_the_run(guard: memguard.Guard) -> None:
    step = Fails(1)

    def ends() -> object:
        memguard.shutdown()
        return step()

    assert memguard.retry.call(ends) == "fine"


def test_nothing_runs_again_within_a_capture(guard: memguard.Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated(guard, "torch"), "capturing", lambda: True)
    step = Fails(1)
    with pytest.raises(OutOfMemoryError) as caught:
        memguard.retry.call(step)
    assert step.ran == 1
    assert note_of(caught.value).startswith(
        "memguard did not run it again: this thread captures a CUDA graph, which another run would spoil\n  fix: "
    )


def test_the_report_of_a_block_stands_beside_it(guard: memguard.Guard, capsys: pytest.CaptureFixture[str]) -> None:
    torch = simulated(guard, "torch")
    with pytest.raises(Exception, match="cap is reached") as caught, memguard.workload("w", framework="torch"):
        memguard.retry.call(lambda: [Array(torch, 4 * GIB) for _ in range(17)])
    report = memguard.last_oom()
    assert report is not None and report.verdict.requester == "torch" and not report.caught
    assert capsys.readouterr().err.count("torch ran out of GPU memory") == 1
    assert [note.partition(" ")[0] for note in caught.value.__notes__] == ["memguard", "memguard:"]


def test_the_timeline_has_it(tmp_path: Any, nothing_stays: None) -> None:
    found = start({**BUDGET, "monitor": {"interval": "10s", "timeline": str(tmp_path / "run.jsonl")}})
    assert found.active and memguard.retry.call(Fails(1)) == "fine"
    memguard.shutdown()
    (path,) = tmp_path.glob("run*.jsonl")
    events = [event for event in memguard.load_timeline(path).events() if event.kind == "retry"]
    assert len(events) == 1 and events[0].text.startswith("torch ran out of GPU memory (2.00 GiB asked for): ")


def test_the_example_runs_without_a_gpu() -> None:
    path = Path(__file__).parents[2] / "examples" / "retry.py"
    environ = {"PATH": "/usr/bin", "PYTHONPATH": str(Path(memguard.__file__).parents[1])}
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, env=environ, check=True, timeout=60)
    said = [line.strip() for line in done.stdout.splitlines()]
    assert said[1] == "SimulatedTorchOutOfMemory" and said[3] == said[5] == "PyTorch held 66 GiB"
    assert done.stderr.count("running again") == 3


TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 9.09 GiB is "
    "free. Process 1234 has 70.00 GiB memory in use. 8.00 GiB allowed; Of the allocated memory 69.50 GiB is allocated "
    "by PyTorch, and 1.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
    "setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (TORCH_SAYS, TORCH_SAYS.partition(" 8.00 GiB allowed")[0] + " …"),
        ("Out of memory allocating 1,024 bytes (limit set to: 600 bytes).",) * 2,
        ("Out of memory while trying to allocate 8 bytes.\nBuffers:\n" + "x" * 300, None),
        ("an error of one sentence " + "with very much to say " * 20 + "and an end. " + "Then more. " * 20, None),
        ("no end " * 1000, None),
        ("", ""),
    ],
)
def test_of_an_errors_text_whole_sentences_are_kept(text: str, kept: str | None) -> None:
    found = first_sentences(text)
    assert kept is None or found == kept
    first = " ".join(text.partition("\n")[0].split(". ")[0].split())
    assert found.startswith(first) or (len(first) > 1000 and first.startswith(found.removesuffix(" …")))
    assert "\n" not in found and len(found) <= 1002
