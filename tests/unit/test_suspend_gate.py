"""A closed gate: calls wait in Python, raise on the owner's thread, and everything is as before once it is open."""

from __future__ import annotations

import datetime
import functools
import gc
import importlib
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import interruptions
import pytest
import waiting

from memguard._base.undo import Undo
from memguard._devices import c_functions
from memguard._frameworks.optional_modules import GatedFunction, Gates, KeptType, entries
from memguard._node.suspend.gates import gate as gates
from memguard.errors import Suspended

NAME = "framework_of_the_gate"


class Base:
    def inherited(self) -> str:
        return "inherited"


class Stream(Base):
    limit = 3

    def synchronize(self, *, again: bool = False) -> tuple[object, bool]:
        return self, again

    @staticmethod
    def current() -> str:
        return "current"

    @classmethod
    def made(cls) -> type:
        return cls

    @property
    def done(self) -> bool:
        return True

    def __bool__(self) -> bool:
        return False


def synchronize(device: int = 0) -> int:
    """Waits for the device."""
    return device + 1


@pytest.fixture
def framework() -> Iterator[Any]:
    module: Any = ModuleType(NAME)
    module.Stream = type("Stream", (Stream,), {**vars(Stream)})
    module.synchronize, module.free, module.cuA, module.cuB = synchronize, synchronize, synchronize, synchronize
    module.constant = 4
    sys.modules[NAME] = module
    yield module
    del sys.modules[NAME]


METHODS = "Stream.synchronize Stream.current Stream.made Stream.done Stream.__bool__ Stream.inherited"


def table(*waits: GatedFunction, **more: Any) -> list[Gates]:
    every = waits or entries(NAME, "crash", "cuCtxSynchronize", f"synchronize {METHODS}")
    return [Gates(NAME, every, **more)]


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


until = functools.partial(waiting.until, seconds=5.0)


def dicts(framework: Any) -> list[dict[str, Any]]:
    return [dict(vars(one)) for one in (framework, framework.Stream, Base)]


CALLS: list[tuple[str, Callable[[Any], Any]]] = [
    ("synchronize", lambda f: f.synchronize(4) == 5),
    ("Stream.synchronize", lambda f: f.Stream().synchronize(again=True)[1]),
    ("Stream.current", lambda f: f.Stream.current() == "current"),
    ("Stream.made", lambda f: f.Stream.made() is f.Stream),
    ("Stream.done", lambda f: f.Stream().done),
    ("Stream.__bool__", lambda f: not f.Stream()),
    ("Stream.inherited", lambda f: f.Stream().inherited() == "inherited"),
]


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[name for name, _ in CALLS])
def test_a_call_waits_and_then_returns_what_the_original_does(
    framework: Any, name: str, call: Callable[..., Any]
) -> None:
    before = dicts(framework)
    gate = gates.close(given=table())
    try:
        thread, found = in_thread(lambda: call(framework))
        until(lambda: gate.inside == 1)
        thread.join(0.05)
        assert not found
    finally:
        gate.open()
    thread.join(5)
    assert found == [True] and gate.inside == 0
    assert dicts(framework) == before


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[name for name, _ in CALLS])
def test_the_owner_is_refused(framework: Any, name: str, call: Callable[..., Any]) -> None:
    gate = gates.close(threading.get_ident(), given=table())
    try:
        with pytest.raises(Suspended, match=rf"{NAME}.{name} needs the GPU(.|\n)*fix: end the `with"):
            call(framework)
    finally:
        gate.open()
    assert call(framework)


def test_who_has_kept_the_replacement_gets_the_original_later(framework: Any) -> None:
    gate = gates.close(given=table())
    kept = framework.synchronize
    assert kept is not synchronize and (kept.__name__, kept.__doc__) == ("synchronize", "Waits for the device.")
    gate.open()
    assert kept(1) == 2


def test_what_somebody_replaced_meanwhile_stays(framework: Any) -> None:
    gate = gates.close(given=table())
    underneath = framework.synchronize

    def theirs(device: int = 0) -> int:
        return int(underneath(device)) + 10

    framework.synchronize = framework.Stream.inherited = theirs
    gate.open()
    assert framework.synchronize is theirs and vars(framework.Stream)["inherited"] is theirs
    assert framework.synchronize(1) == 12


def test_nothing_of_a_framework_that_is_not_imported(framework: Any) -> None:
    gate = gates.close(given=[Gates("not_imported_at_all", entries(NAME, "crash", "", "synchronize"))])
    assert framework.synchronize is synchronize
    assert not gate.left
    gate.open()


def test_what_is_not_there_is_left_and_what_is_optional_is_not(framework: Any) -> None:
    rows = (
        GatedFunction(f"{NAME}:gone", "crash", ""),
        GatedFunction(f"{NAME}:Stream.gone", "crash", "", optional=True),
    )
    gate = gates.close(given=table(*rows, not_gated=("launches wait",)))
    gate.open()
    assert gate.left == ("launches wait", f"{NAME}.gone: not in this version")


def test_a_pattern(framework: Any) -> None:
    gate = gates.close(given=table(*entries(NAME, "crash", "", "cu*", but=("cuB",))))
    assert framework.cuB is synchronize and framework.cuA is not synchronize
    gate.open()
    assert framework.cuA is synchronize


def test_only_calls_that_need_a_gpu_wait(framework: Any) -> None:
    rows = entries(NAME, "wait", "", "synchronize", touches=lambda args, kwargs: args[0] > 0)
    gate = gates.close(threading.get_ident(), given=table(*rows))
    try:
        assert framework.synchronize(0) == 1
        assert framework.synchronize(device=-3) == -2  # the question fails: the call says by itself what is wrong
        with pytest.raises(Suspended):
            framework.synchronize(1)
    finally:
        gate.open()


def test_a_wait_is_interrupted_at_once(framework: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "_SLICE", 60.0)

    class Stop(BaseException):
        pass

    def stop(number: int, frame: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    gate = gates.close(given=table())
    began = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Stop):
            framework.synchronize()
        assert time.monotonic() - began < 30, "not after a slice of the wait"
        assert gate.inside == 0
    finally:
        gate.open()
        signal.signal(signal.SIGALRM, before)


def test_a_signal_handler_may_wait_within_a_wait(framework: Any) -> None:
    found = []
    before = signal.signal(signal.SIGALRM, lambda *_: found.append(framework.synchronize(6)))
    gate = gates.close(given=table())
    opener = threading.Thread(target=lambda: (until(lambda: gate.inside == 2), gate.open()))
    try:
        opener.start()
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        assert framework.synchronize(1) == 2
    finally:
        gate.open()
        opener.join()
        signal.signal(signal.SIGALRM, before)
    assert found == [7]


def test_many_wait_and_all_go_on(framework: Any) -> None:
    gate = gates.close(given=table())
    threads = [in_thread(lambda n=n: framework.synchronize(n)) for n in range(20)]
    until(lambda: gate.inside == 20)
    gate.open()
    for thread, _ in threads:
        thread.join(5)
    assert [found for _, found in threads] == [[n + 1] for n in range(20)]


def test_a_finalizers_call_comes_later(framework: Any) -> None:
    calls: list[Any] = []
    framework.free = lambda *args, **kwargs: calls.append((args, kwargs))
    gate = gates.close(threading.get_ident(), given=table(later=entries(NAME, "crash", "", "free")))
    assert framework.free(1, block=2) is None
    assert not calls
    gate.open()
    assert calls == [((1,), {"block": 2})]


def test_an_object_lives_until_the_gate_opens(framework: Any) -> None:
    class Special(framework.Stream):  # type: ignore[misc, name-defined]
        pass

    def local() -> tuple[Any, list[Any]]:
        one = Special()  # only in the frame of a function that runs
        reference = weakref.ref(one)
        return gates.close(given=table(kept_alive=(KeptType(f"{NAME}:Stream", ""),))), [reference]

    stream, other = framework.Stream(), framework.Stream()
    gate, dead = local()
    dead += [weakref.ref(stream), weakref.ref(other)]
    del stream, other
    gc.collect()
    assert all(one() is not None for one in dead)
    gate.open()
    gc.collect()
    assert not any(one() for one in dead)


def test_only_objects_that_have_to_live(framework: Any) -> None:
    stream, other = framework.Stream(), framework.Stream()
    stream.on_gpu, other.on_gpu = True, False
    gate = gates.close(given=table(kept_alive=(KeptType(f"{NAME}:Stream", "", lambda one: one.on_gpu),)))
    dead = weakref.ref(stream), weakref.ref(other)
    del stream, other
    gc.collect()
    assert dead[0]() is not None and dead[1]() is None
    gate.open()


def test_an_import_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "late_framework.py").write_text("def synchronize(): return 1\n")
    (tmp_path / "another_late.py").write_text("")
    finders = sys.meta_path
    gate = gates.close(given=[Gates("late_framework", (), imports=("another_late",))])
    threads = [
        in_thread(lambda name=name: importlib.import_module(name)) for name in ("late_framework", "another_late")
    ]
    until(lambda: gate.inside == 2)
    assert not {"late_framework", "another_late"} & sys.modules.keys()
    gate.owner = threading.get_ident()
    with pytest.raises(Suspended, match="import third_late needs the GPU"):
        gate.enter("import third_late")
    gate.open()
    for thread, _ in threads:
        thread.join(5)
    assert [found[0].__name__ for _, found in threads] == ["late_framework", "another_late"]
    assert [*finders] == [*sys.meta_path]
    for name in ("late_framework", "another_late"):
        del sys.modules[name]


def test_a_method_of_a_c_type() -> None:
    # `datetime.date` refuses `setattr`, as the types of CuPy and torch do that are written in C.
    before = dict(vars(datetime.date))
    day = datetime.date(2026, 1, 2)
    with pytest.raises(TypeError):
        datetime.date.isoformat = None  # type: ignore[method-assign, assignment]
    rows = entries("datetime", "crash", "cuCtxSynchronize", "date.isoformat date.today date.year date.__repr__")
    gate = gates.close(threading.get_ident(), given=[Gates("datetime", rows)])
    try:
        for call in (day.isoformat, datetime.date.today, lambda: day.year):
            with pytest.raises(Suspended, match=r"datetime\.date\."):
                call()
        assert gate.left == ("datetime.date.__repr__: its type cannot be changed (cuCtxSynchronize)",)
    finally:
        gate.open()
    after = vars(datetime.date)
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
    assert day.isoformat() == "2026-01-02" and day.year == 2026 and isinstance(datetime.date.today(), datetime.date)


def test_an_inherited_method_of_a_c_type_is_inherited_again() -> None:
    assert "isoformat" in vars(datetime.datetime) and "weekday" not in vars(datetime.datetime)
    moment = datetime.datetime(2026, 1, 2)
    assert c_functions.put_method(datetime.datetime, "weekday", lambda self: "put")
    assert moment.weekday() == "put"
    gone = c_functions.put_method(datetime.datetime, "weekday", c_functions.ABSENT)
    assert not gone or "weekday" not in vars(datetime.datetime)
    assert moment.weekday() == 4


@pytest.fixture
def every_kind(framework: Any) -> tuple[list[Gates], Callable[[], Any]]:
    rows = entries(NAME, "crash", "", "synchronize Stream.done Stream.inherited")
    more = entries("datetime", "crash", "", "date.isoformat")
    given = [
        Gates(NAME, rows, later=entries(NAME, "wait", "", "free"), holds=object),
        Gates("datetime", more),
    ]

    def state() -> Any:
        return [*dicts(framework), dict(vars(datetime.date)), [*sys.meta_path]]

    return given, state


def opens(undo: Undo, gate: gates.Gate) -> None:
    """What a return does with the gate: lift it, then destroy what it kept."""
    undo.run()
    gate.open()


def test_an_interruption_at_any_point_leaves_nothing(every_kind: tuple[list[Gates], Callable[[], Any]]) -> None:
    given, state = every_kind
    before = state()
    undo = Undo()
    counted = interruptions.Points()
    gate = counted.run(lambda: gates.close(undo=undo, given=given))
    opened = interruptions.Points()
    assert state() != before
    opened.run(lambda: opens(undo, gate))
    assert state() == before
    assert counted.count > 50 and opened.count > 20
    for at in range(1, counted.count + 1):
        undo, points = Undo(), interruptions.Points(at)
        with pytest.raises(KeyboardInterrupt):
            points.run(lambda undo=undo: gates.close(undo=undo, given=given))
        undo.run()
        assert state() == before, f"close, {points.place}"
    for at in range(1, opened.count + 1):
        undo, points = Undo(), interruptions.Points(at)
        gate = gates.close(undo=undo, given=given)
        with pytest.raises(KeyboardInterrupt):
            points.run(lambda undo=undo, gate=gate: opens(undo, gate))
        opens(undo, gate)
        assert state() == before, f"open, {points.place}"
        assert not gate.closed and not gate._kept._objects
        assert datetime.date(2026, 1, 2).isoformat() == "2026-01-02"
