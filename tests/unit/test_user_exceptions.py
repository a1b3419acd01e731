"""Whatever exception leaves a block of memguard's: the same object goes on, unchanged but for the note."""

from __future__ import annotations

import builtins
import dataclasses
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest
from IPython.core.compilerop import CachingCompiler
from IPython.core.inputtransformer2 import TransformerManager

import memguard
from memguard import exchange, notebook, pytest_plugin
from memguard._oom import hooks
from memguard._runtime import runtime

HOME = str(Path(memguard.__file__).parent)
TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB"
BUDGET = {"version": 1, "frameworks": {"torch": {"limit": "4GiB"}}}
Make = Callable[[type[BaseException]], BaseException]


class OutOfMemoryError(RuntimeError):
    """As torch's, by its name."""


OutOfMemoryError.__module__ = "torch"


class Odd(BaseException):
    """No Exception: `except Exception` does not catch it."""


def raising(error: type[BaseException]) -> Callable[..., Any]:
    def code(*_: object, **__: object) -> Any:
        raise error("the exception's own code")

    return code


CODE = {
    "raises": raising(ValueError),
    "exits": raising(SystemExit),
    "odd": raising(Odd),
    "recurses": raising(RecursionError),
}
PROPERTIES = (
    "exceptions", "__cause__", "__context__", "__suppress_context__", "__notes__", "__class__", "__traceback__",
    "__dict__", "args", "requested", "errno",
)  # fmt: skip
METHODS = (
    "__getattribute__", "__setattr__", "__str__", "__repr__", "add_note", "with_traceback", "__eq__", "__hash__",
    "__bool__", "__iter__", "__len__", "__reduce__", "__format__", "__setstate__",
)  # fmt: skip


def frozen(base: type[BaseException]) -> BaseException:
    @dataclasses.dataclass(frozen=True)
    class Frozen(base):  # type: ignore[misc,valid-type]
        what: str

    return Frozen(TEXT)


def slots(base: type[BaseException]) -> BaseException:
    class Slots(base):  # type: ignore[misc,valid-type]
        __slots__ = ("__notes__", "_memguard_report", "exceptions")

    return Slots(TEXT)


def dunder(name: str, made: Callable[[Callable[..., Any]], Any], code: Callable[..., Any]) -> Make:
    return lambda base: type("Hostile", (base,), {name: made(code)})(TEXT)


def deep_group(base: type[BaseException]) -> BaseException:
    """1,000 groups, one in the other."""
    error = base(TEXT)
    group: Any = getattr(builtins, "BaseExceptionGroup", None)
    for _ in range(1000 if group is not None else 0):
        error = group("many", [error])
    return error


def wide_group(base: type[BaseException]) -> BaseException:
    group: Any = getattr(builtins, "BaseExceptionGroup", None)
    return base(TEXT) if group is None else group("many", [base(TEXT) for _ in range(1000)])


def long_chain(base: type[BaseException]) -> BaseException:
    error = first = base(TEXT)
    for _ in range(5000):
        error.__cause__ = base("caused by")
        error = error.__cause__
    return first


def circle(base: type[BaseException]) -> BaseException:
    error, other = base(TEXT), ValueError("other")
    error.__cause__, other.__context__ = other, error
    error.exceptions = [error, None, 3, other]  # type: ignore[attr-defined]
    return error


def two_arguments(base: type[BaseException]) -> BaseException:
    class Two(base):  # type: ignore[misc,valid-type]
        def __init__(self, one: object, two: object) -> None:
            super().__init__(one)

    return Two(TEXT, 2)


def odd_text(base: type[BaseException]) -> BaseException:
    class Text(str):
        __slots__ = ()
        __getitem__ = __contains__ = __len__ = lower = raising(ValueError)  # type: ignore[assignment]

    return type("OddText", (base,), {"__str__": lambda self: Text(TEXT)})(TEXT)


def notes_taken(base: type[BaseException]) -> BaseException:
    error = base(TEXT)
    error.__notes__ = "not a list"  # type: ignore[attr-defined]
    return error


def lying(base: type[BaseException]) -> BaseException:
    return type("Lying", (base,), {"__class__": KeyboardInterrupt})(TEXT)


CLASSES: dict[str, Make] = {
    "plain": lambda base: base(TEXT),
    "frozen": frozen,
    "slots": slots,
    "deep group": deep_group,
    "wide group": wide_group,
    "long chain": long_chain,
    "circle": circle,
    "two arguments": two_arguments,
    "odd text": odd_text,
    "notes taken": notes_taken,
    "lying": lying,
    **{f"property {n} {c}": dunder(n, property, code) for n in PROPERTIES for c, code in CODE.items()},
    **{f"method {n} {c}": dunder(n, lambda code: code, code) for n in METHODS for c, code in CODE.items()},
}
BASES: tuple[type[BaseException], ...] = (
    ValueError,
    OutOfMemoryError,
    StopIteration,
    Odd,
    KeyboardInterrupt,
    SystemExit,
)
FIELDS = {name: vars(BaseException)[name] for name in ("args", "__cause__", "__context__", "__suppress_context__")}


def fail(error: BaseException) -> None:
    raise error


class Shell:
    """What the magic needs of IPython's shell."""

    def __init__(self) -> None:
        self.displayhook = SimpleNamespace(prompt_count=1)
        self.compile, self.user_ns = CachingCompiler(), {"fail": fail}
        self.transform_cell = TransformerManager().transform_cell
        self.transform_ast = lambda tree: tree


def in_guard(error: BaseException) -> None:
    with memguard.guard(BUDGET, simulate="h200"):
        fail(error)


def in_workload(error: BaseException) -> None:
    with memguard.workload("w", framework="torch"):
        fail(error)


def in_the_guards_workload(error: BaseException) -> None:
    with memguard.init(BUDGET, simulate="h200").workload("w", framework="torch", needs="1MiB"):
        fail(error)


def in_both(error: BaseException) -> None:
    with memguard.guard(BUDGET, simulate="h200"), memguard.workload("w", framework="torch"):
        fail(error)


def in_a_block_that_is_shut_down(error: BaseException) -> None:
    with memguard.workload("w", framework="torch"):
        memguard.shutdown()
        fail(error)


def in_a_recording(error: BaseException) -> None:
    number = next(NUMBERS)
    with memguard.record_trace(FOLDER[0] / f"{number}.jsonl"):
        fail(error)


def in_a_recording_that_fails(error: BaseException) -> None:
    folder = FOLDER[0] / str(next(NUMBERS))
    folder.mkdir()
    with memguard.record_trace(folder / "trace.jsonl"):
        folder.rmdir()
        fail(error)


def decorated(error: BaseException) -> None:
    memguard.workload("w", framework="torch")(fail)(error)


def decorated_by_a_guard(error: BaseException) -> None:
    memguard.guard(BUDGET, simulate="h200")(fail)(error)


def in_a_cell(error: BaseException) -> None:
    shell = Shell()
    shell.user_ns["error"] = error
    notebook.Extension(shell).magic("--framework torch", "fail(error)")


def in_pycudas_context_of_another_thread(error: BaseException) -> None:
    block = exchange.pycuda_context()
    try:
        fail(error)
    except BaseException as caught:
        block.__exit__(type(caught), caught, None)
        raise


def called_again(error: BaseException) -> None:
    memguard.retry(ranks="independent")(fail)(error)


def attempted_again(error: BaseException) -> None:
    for attempt in memguard.retry.attempts(ranks="independent"):
        with attempt:
            fail(error)


BLOCKS = (
    in_guard, in_workload, in_the_guards_workload, in_both, in_a_block_that_is_shut_down, in_a_recording,
    in_a_recording_that_fails, decorated, decorated_by_a_guard, in_a_cell, in_pycudas_context_of_another_thread,
    called_again, attempted_again,
)  # fmt: skip
NUMBERS, FOLDER = itertools.count(), [Path()]


@pytest.fixture(autouse=True)
def budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    FOLDER[0] = tmp_path
    monkeypatch.setattr(hooks, "_write", lambda shown: None)
    memguard.init(BUDGET, simulate="h200")
    yield
    memguard.shutdown()


def places(error: BaseException) -> list[str]:
    found, place = [], vars(BaseException)["__traceback__"].__get__(error)
    while place is not None:
        assert isinstance(place, TracebackType)
        found.append(f"{place.tb_frame.f_code.co_filename}:{place.tb_frame.f_code.co_name}")
        place = place.tb_next
    return found


def own(error: BaseException) -> dict[str, Any]:
    kept: dict[str, Any] = dict(vars(BaseException)["__dict__"].__get__(error))
    return {key: value for key, value in kept.items() if key not in ("__notes__", "_memguard_report")}


@pytest.mark.usefixtures("only_own_objects_are_collected")
@pytest.mark.parametrize("block", BLOCKS)
def test_the_users_exception_goes_on_as_it_is(block: Callable[[BaseException], None]) -> None:
    tried = 0
    for (name, make), base in itertools.product(CLASSES.items(), BASES):
        error = make(base)
        if not runtime.this.session:
            memguard.init(BUDGET, simulate="h200")
        before = {field: get.__get__(error) for field, get in FIELDS.items()}, own(error)
        try:
            block(error)
        except BaseException as caught:
            assert caught is error, (name, base, type(caught))
        else:
            raise AssertionError(f"{name} of {base} was swallowed")
        after = {field: get.__get__(error) for field, get in FIELDS.items()}, own(error)
        assert [a is b for a, b in zip(before[0].values(), after[0].values(), strict=True)] == [True] * 4, (name, base)
        assert before[1].keys() == after[1].keys()
        where = places(error)
        assert where[-1].endswith(":fail") and where[0].endswith(":test_the_users_exception_goes_on_as_it_is"), where
        if block not in (decorated, decorated_by_a_guard, in_a_cell, called_again):
            assert not [place for place in where if place.startswith(HOME)], where
        tried += 1
    assert tried == len(CLASSES) * len(BASES) == 666


@pytest.mark.usefixtures("only_own_objects_are_collected")
def test_a_notebook_and_a_failed_test_look_at_it_without_harm() -> None:
    extension = notebook.Extension(Shell())
    for make, base in itertools.product(CLASSES.values(), BASES):
        error = make(base)
        try:
            fail(error)
        except BaseException as caught:
            extension.runs()
            extension.ran(SimpleNamespace(error_in_exec=caught))
            report = SimpleNamespace(failed=True, sections=[])
            wrapper = pytest_plugin.pytest_runtest_makereport(
                SimpleNamespace(config=SimpleNamespace(stash={pytest_plugin._RUN: SimpleNamespace()})),
                SimpleNamespace(excinfo=SimpleNamespace(value=caught)),  # type: ignore[arg-type]
            )
            next(wrapper)
            with pytest.raises(StopIteration):
                wrapper.send(SimpleNamespace(get_result=lambda report=report: report))
        hook, other = sys.excepthook, threading.excepthook
        assert isinstance(hook, hooks._Hook) and isinstance(other, hooks._Hook)
        with pytest.MonkeyPatch.context() as patch:  # the budget's end puts the hooks before ours back
            for one in (hook, other):
                patch.setattr(one, "_previous", lambda *_: None)
            hook(type(error), error, None)
            other(SimpleNamespace(exc_value=error))


@pytest.mark.parametrize(
    "make", [frozen, slots, deep_group, circle, two_arguments, notes_taken], ids=lambda m: m.__name__
)
def test_what_is_hostile_is_reported_all_the_same(make: Make) -> None:
    error = make(OutOfMemoryError)
    with pytest.raises(BaseException) as caught, memguard.workload("w", framework="torch"):  # noqa: PT011
        fail(error)
    assert caught.value is error
    if make is not deep_group:  # only the first hundred of a chain are looked at
        report = memguard.last_oom()
        assert report is not None and report.requester == "torch" and hooks.report_error(error) is report
        notes = vars(BaseException)["__dict__"].__get__(error).get("__notes__")
        assert make is notes_taken or notes == [report.note]


def test_a_block_begins_once_at_a_time_and_decorates_any_number_of_calls() -> None:
    block = memguard.workload("w", framework="torch")
    with block as report:
        assert report.framework == "torch"
        with pytest.raises(RuntimeError, match="has begun and is not over"), block:
            pass
    with block:
        pass

    @memguard.workload("w", framework="torch")
    def twice(number: int) -> int:
        "Text."
        return number if number > 3 else twice(number + 1)

    assert twice(0) == 4 and twice.__name__ == "twice" and twice.__doc__ == "Text."
