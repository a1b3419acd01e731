"""What a program plugs into Python and memguard: none of it ends the monitor, or raises out of memguard's own words."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from guards import start

import memguard
from memguard import api
from memguard._base.logs import text_of
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.simulated.adapter import SimulatedFramework

pytestmark = [
    pytest.mark.usefixtures("nothing_stays"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]

BUDGET = {
    "version": 1,
    "frameworks": {"torch": {"limit": "4GiB"}},
    "monitor": {"interval": "100ms", "warn": "1%", "critical": "2%"},
    "on_pressure": ["trim"],
}


class HostileMeta(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise RuntimeError("no name")


class HostileError(Exception, metaclass=HostileMeta):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class ExitingError(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


class Callback:
    """Hostile in every way in which memguard may look at it."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, event: object) -> None:
        raise self.error

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no attributes")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Handler(logging.Handler):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def emit(self, record: logging.LogRecord) -> None:
        raise self.error


class Stream(io.StringIO):
    def write(self, text: str) -> int:
        raise RuntimeError("no writing")

    flush = isatty = write  # type: ignore[assignment]


Plug = Callable[[pytest.MonkeyPatch], object]


def handler(error: BaseException) -> Plug:
    def plug(patch: pytest.MonkeyPatch) -> None:
        logger = logging.getLogger("memguard")
        patch.setattr(logger, "handlers", [*logger.handlers, Handler(error)])
        patch.setattr(logger, "level", logging.DEBUG)
        patch.setattr(logging.getLogger("memguard").manager, "_clear_cache", lambda: None, raising=False)
        logger._cache.clear()  # type: ignore[attr-defined]

    return plug


def callback(error: BaseException) -> Plug:
    return lambda patch: memguard.on_event(Callback(error))


def raises(error: BaseException) -> Callable[..., Any]:
    def hostile(*args: object, **more: object) -> Any:
        raise error

    return hostile


def log_filter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(logging.getLogger("memguard"), "filters", [raises(RuntimeError("no filter"))])


def full_stderr(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys, "stderr", Stream())
    logger = logging.getLogger("memguard")
    patch.setattr(logger, "handlers", [*logger.handlers, logging.StreamHandler(sys.stderr)])


def in_module(module: Any, name: str, with_: object) -> Plug:
    return lambda patch: patch.setattr(module, name, with_)


def failing_framework(error: BaseException) -> Plug:
    def plug(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(SimulatedFramework, "usage", raises(error))

    return plug


def failing_host(error: BaseException) -> Plug:
    return lambda patch: patch.setattr(SimulatedHost, "memory", raises(error))


ERRORS: dict[str, BaseException] = {
    "RuntimeError": RuntimeError("hostile"),
    "hostile text": HostileError(),
    "exit in its text": ExitingError(),
    "SystemExit": SystemExit(1),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "GeneratorExit": GeneratorExit(),
    "RecursionError": RecursionError(),
    "MemoryError": MemoryError(),
}
PLUGS: dict[str, Plug] = {
    **{f"handler: {name}": handler(error) for name, error in ERRORS.items()},
    **{f"callback: {name}": callback(error) for name, error in ERRORS.items()},
    **{f"framework: {name}": failing_framework(error) for name, error in ERRORS.items()},
    **{f"GPU: {name}": failing_host(error) for name, error in ERRORS.items()},
    "filter": log_filter,
    "stderr": full_stderr,
    "no stderr": in_module(sys, "stderr", None),
    "record factory": in_module(logging, "_logRecordFactory", raises(RuntimeError())),
    "excepthook": in_module(sys, "excepthook", raises(RuntimeError())),
    "threads' excepthook": in_module(threading, "excepthook", raises(RuntimeError())),
    "unraisablehook": in_module(sys, "unraisablehook", raises(RuntimeError())),
    "time.time raises": in_module(time, "time", raises(RuntimeError())),
    "time.time is text": in_module(time, "time", lambda: "now"),
    "time.time is nan": in_module(time, "time", lambda: float("nan")),
    "time.time stands still": in_module(time, "time", lambda: 0.0),
    "time.thread_time raises": in_module(time, "thread_time", raises(RuntimeError())),
    "time.thread_time goes back": in_module(time, "thread_time", iter(range(10**6, 0, -1)).__next__),
    "time.thread_time is nan": in_module(time, "thread_time", lambda: float("nan")),
    "time.thread_time is None": in_module(time, "thread_time", lambda: None),
    "time.monotonic raises": in_module(time, "monotonic", raises(RuntimeError())),
    "Event.wait raises": in_module(threading.Event, "wait", raises(RuntimeError())),
    "warnings are errors": lambda patch: warnings.simplefilter("error"),
}


@pytest.fixture
def forgotten() -> Iterator[None]:
    from memguard._runtime import session

    yield
    session.event_callbacks.clear()
    logging.getLogger("memguard")._cache.clear()  # type: ignore[attr-defined]


NOT_BEFORE = (
    "framework: ",
    "GPU: ",
    "Event.wait",
    *(f"handler: {n}" for n, e in ERRORS.items() if not isinstance(e, Exception)),
)
"""With these `init` itself raises, as it should."""


@pytest.mark.parametrize(
    ("name", "before"),
    [
        *((name, False) for name in PLUGS),
        *(pytest.param(name, True, marks=pytest.mark.long) for name in PLUGS if not name.startswith(NOT_BEFORE)),
    ],
)
def test_nothing_that_is_plugged_in_ends_the_monitor(
    name: str, before: bool, monkeypatch: pytest.MonkeyPatch, forgotten: None
) -> None:
    with monkeypatch.context() as patch:
        if before:
            PLUGS[name](patch)
        guard = start(BUDGET)
        torch = guard.frameworks["torch"]
        assert isinstance(torch, SimulatedFramework)
        torch.allocate(2 << 30)
        if not before:
            PLUGS[name](patch)
        monitor = api.current_session().monitor
        assert monitor is not None
        nap = threading.Lock()
        nap.acquire()
        nap.acquire(timeout=0.35)
        assert monitor.alive, "the thread has ended"
    taken = len(monitor._ring)
    end = time.monotonic() + 60
    while len(monitor._ring) <= taken and time.monotonic() < end:
        time.sleep(0.02)
    assert monitor.alive and len(monitor._ring) > taken, "it samples again"


@pytest.mark.parametrize("name", [name for name, error in ERRORS.items() if isinstance(error, Exception)])
def test_what_memguard_logs_never_raises_into_the_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handler(ERRORS[name])(monkeypatch)
    guard = start({**BUDGET, "devices": {"A100*": {"limit": "16GiB"}}})  # logs a warning
    memguard.trim()
    memguard.require("torch", "1GiB")
    print(guard, memguard.ledger(), file=io.StringIO())
    memguard.resize("torch", "1GiB")
    memguard.checkpoint()
    assert memguard.shutdown() == []


@pytest.mark.parametrize("name", ERRORS)
def test_the_text_of_any_error(name: str) -> None:
    error = ERRORS[name]
    if isinstance(error, ExitingError):  # on the main thread that may be a real exit
        with pytest.raises(SystemExit):
            text_of(error)
    else:
        assert text_of(error)
