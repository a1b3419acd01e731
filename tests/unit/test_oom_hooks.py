"""Out-of-memory errors on their way out: explained once, left as they are, and nothing of them kept."""

from __future__ import annotations

import code
import dataclasses
import gc
import os
import re
import subprocess
import sys
import textwrap
import threading
import traceback
import types
import weakref
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import memguard
from memguard._frameworks.simulated.adapter import FrameworkOutOfMemory
from memguard._oom import hooks
from memguard._oom.hooks import OomContext, facts_of, install, last_oom, report_error
from memguard._oom.report import Report

ROOT = Path(memguard.__file__).parents[1]


class OutOfMemoryError(RuntimeError):
    """As torch's, by its name."""


OutOfMemoryError.__module__ = "torch"
TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB"


class Budget:
    """Stands for the active budget: a scene to read, and the reports that it was given."""

    def __init__(self, scene: Callable[[], OomContext] = OomContext) -> None:
        self.scene, self.recorded = scene, list[Report]()

    def install(self, **more: Any) -> Callable[[], None]:
        return install(self.scene, self.recorded.append, **more)


@pytest.fixture
def budget() -> Iterator[Budget]:
    before = sys.excepthook, threading.excepthook
    source = Budget()
    undo = source.install()
    yield source
    undo()
    assert (sys.excepthook, threading.excepthook) == before


def raised(error: BaseException) -> BaseException:
    """The error with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def oom() -> BaseException:
    return raised(OutOfMemoryError(TEXT))


def test_an_error_is_reported_once_wherever_it_is_seen(budget: Budget, capsys: pytest.CaptureFixture[str]) -> None:
    error = oom()
    first = report_error(error)
    assert isinstance(first, Report) and first.verdict.requester == "torch" and first.verdict.requested == 2 << 30
    assert report_error(error) is first and report_error(error) is first and last_oom() is first
    err = capsys.readouterr().err
    assert err.count("memguard: torch ran out of GPU memory: 2.00 GiB asked for") == 1
    assert len(budget.recorded) == 1 and budget.recorded[0].as_dict()["memguard_oom"] == 1
    assert [note.splitlines()[0] for note in error.__notes__] == [f"memguard: {first.title}"]
    assert "memguard: torch ran out" in "".join(traceback.format_exception(error))


def test_the_next_one_is_another_even_while_the_first_is_handled(budget: Budget) -> None:
    first = second = None
    try:
        raise OutOfMemoryError(TEXT)
    except OutOfMemoryError as error:
        first = report_error(error, show=False)
        try:
            raise OutOfMemoryError(TEXT)  # a retry
        except OutOfMemoryError as again:
            second = report_error(again, show=False)
    assert first is not None and second is not None and first is not second and last_oom() is second


def test_an_error_raised_from_it_has_the_same_report(budget: Budget) -> None:
    cause = oom()
    report = report_error(cause, show=False)
    outer = RuntimeError("the batch failed")
    outer.__cause__ = cause
    assert report_error(outer, show=False) is report
    renamed = OutOfMemoryError("CUDA out of memory occurred when warming up")
    renamed.__cause__ = cause
    assert report_error(renamed, show=False) is report
    during = KeyError("cleaning up failed")
    during.__context__ = cause
    assert report_error(during, show=False) is report
    assert len(budget.recorded) == 1
    silenced = raised(ValueError("too large"))
    silenced.__context__, silenced.__suppress_context__ = cause, True  # `from None`
    assert report_error(silenced, show=False) is None


def test_it_is_found_in_causes_contexts_and_groups(budget: Budget) -> None:
    for link in ("__cause__", "__context__"):
        outer: BaseException = ValueError("outer")
        for _ in range(5):
            inner, outer = outer, ValueError("outer")
            setattr(outer, link, inner)
        while (nearest := getattr(inner, link)) is not None:
            inner = nearest
        setattr(inner, link, oom())
        assert report_error(outer, show=False) is not None
    group = type("ExceptionGroup", (Exception,), {})("two tasks")
    group.exceptions = (KeyError("x"), oom())
    assert report_error(group, show=False) is last_oom() is report_error(group, show=False)
    assert len(budget.recorded) == 3


def test_a_real_group(budget: Budget) -> None:
    group = ExceptionGroup("tasks", [KeyError("x"), oom()])
    assert report_error(group, show=False) is not None


def test_a_chain_that_bites_its_tail(budget: Budget) -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__context__, two.__context__ = two, one
    one.__cause__, two.__cause__ = two, one
    assert report_error(one) is None


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit, SystemExit])
def test_what_ends_a_program_is_not_touched(budget: Budget, kind: type[BaseException]) -> None:
    error = kind(TEXT)
    error.__context__ = oom()
    assert report_error(error) is None and not hasattr(error, "__notes__") and vars(error) == {}


def test_other_errors_are_not_touched(budget: Budget, capsys: pytest.CaptureFixture[str]) -> None:
    error = raised(ValueError("could not convert string to float: 'CUDA out of memory'"))
    assert report_error(error) is None and vars(error) == {} and capsys.readouterr().err == ""


def test_type_text_and_traceback_survive(budget: Budget) -> None:
    error = oom()
    before = type(error), str(error), error.args, error.__traceback__, error.__cause__, error.__context__
    report_error(error, show=False)
    assert (type(error), str(error), error.args, error.__traceback__, error.__cause__, error.__context__) == before


class Tensor:
    """Something that is to be freed."""


def test_nothing_keeps_the_exception_its_frames_or_what_they_held(budget: Budget) -> None:
    """Over a traceback with locals, a chain and a group, with a note, printed, and met again by a hook."""

    def fail() -> weakref.ref[Tensor]:
        tensor = Tensor()

        def allocate(held: Tensor) -> None:
            try:
                raise OutOfMemoryError(TEXT)
            except OutOfMemoryError as inner:
                inner.held = held  # type: ignore[attr-defined]
                raise RuntimeError("the step failed") from inner

        try:
            allocate(tensor)
        except RuntimeError as error:
            assert report_error(error) is not None
            assert report_error(error) is not None
            hooks._Hook.__call__(hook, type(error), error, error.__traceback__)
        return weakref.ref(tensor)

    hook = sys.excepthook
    assert isinstance(hook, hooks._Hook)
    gc.disable()
    try:
        gone = fail()
    finally:
        gc.enable()
    gc.collect()
    assert gone() is None
    report = last_oom()
    assert report is not None
    reachable, todo = set[int](), [report]
    while todo:  # nothing that the report reaches is an exception, a traceback or a frame
        for one in gc.get_referents(todo.pop()):
            if id(one) in reachable or isinstance(one, (type, types.ModuleType, types.FunctionType)):
                continue
            reachable.add(id(one))
            assert not isinstance(one, (BaseException, types.TracebackType, types.FrameType, Tensor))
            todo.append(one)


def test_facts_hold_no_object_of_the_exceptions() -> None:
    class Text(str):
        tensor: Tensor

    class Odd(OutOfMemoryError):
        def __str__(self) -> str:
            text = Text("CUDA out of memory")
            text.tensor = Tensor()
            return text

        @property
        def status(self) -> int:
            raise RuntimeError("not today")

    error = Odd()
    error.errno, error.code, error.result = 5, Tensor(), True  # type: ignore[attr-defined]
    facts = facts_of(error)
    assert type(facts.text) is str and facts.attributes == {"errno": 5}
    assert facts.mro[-3:] == ("builtins.RuntimeError", "builtins.Exception", "builtins.BaseException")

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert facts_of(Mute()).text == ""
    assert facts_of(ValueError("a" * 10**6 + "z" * 10**6)).text == f"{'a' * 4000}\n{'z' * 4000}"


def test_a_failure_in_memguard_never_replaces_the_users_error(
    budget: Budget, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> OomContext:
        raise OSError("NVML is gone")

    budget.read = broken
    budget.diagnosed = broken  # type: ignore[assignment,method-assign]
    report = report_error(oom())
    assert report is not None and report.ledger is None and report.why == "the GPU could not be read"
    assert "torch ran out of GPU memory" in capsys.readouterr().err

    class Sealed(OutOfMemoryError):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

        def add_note(self, note: str) -> None:
            raise RuntimeError(note)

    assert report_error(raised(Sealed(TEXT)), show=False) is not None


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


AGAIN = "memguard: torch out of memory again ({}): memguard.last_oom()\n"


def test_a_loop_that_tries_again_has_one_report_in_full_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    clock, source = Clock(), Budget()
    undo = source.install(clock=clock)

    def said() -> tuple[bool, str]:
        error = oom()
        report = report_error(error)
        assert report is not None and last_oom() is report, "always the newest"
        assert getattr(error, "__notes__", []) == [report.note], "complete"
        text = capsys.readouterr().err
        return text == f"{report}\n", text

    try:
        assert said()[0]
        for count, passed in (("2nd", 0.0), ("3rd", 12.0), ("4th", 59.0)):
            clock.now = 1000 + passed
            assert said()[1] == AGAIN.format(f"{count} time in {passed or 1:.0f} s")
        clock.now = 1060
        assert said()[0] and not said()[0]
        clock.now = 900  # set back
        assert said()[0]
    finally:
        undo()
    assert len(source.recorded) == 7, "every one is recorded"
    undo = source.install(clock=clock)
    assert said()[0], "another budget begins anew"
    undo()


def test_another_requester_reason_or_gpu_is_another_report(capsys: pytest.CaptureFixture[str]) -> None:
    texts = (TEXT, "CUDA out of memory. DefaultCPUAllocator", "cublas_status_alloc_failed", "CUDA error: out of memory")
    undo = Budget().install(clock=Clock())
    try:
        for text in texts:
            report_error(raised(RuntimeError(text)))
        assert capsys.readouterr().err.count("\n  error  ") == 4
        for text in texts:
            report_error(raised(RuntimeError(text)))
        assert [line.partition(" (")[0] for line in capsys.readouterr().err.splitlines()] == [
            "memguard: torch out of memory again",
            "memguard: torch out of host memory again",
            "memguard: cublas out of memory again",
            "memguard: cuda possibly out of memory again",
        ]
        assert report_error(oom(), show=False) is not None and len(hooks._shown) == 4
    finally:
        undo()


def test_a_report_that_was_not_shown_does_not_shorten_the_next(
    budget: Budget, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        report_error(oom(), show=False)
    report_error(oom())
    assert capsys.readouterr().err.count("\n  error  ") == 1


def test_numbers_in_words() -> None:
    numbers = {1: "1st", 2: "2nd", 3: "3rd", 4: "4th", 11: "11th", 12: "12th", 13: "13th", 21: "21st", 112: "112th"}
    assert {number: hooks._ordinal(number) for number in numbers} == numbers


class Sealed(OutOfMemoryError):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


class Slotted(OutOfMemoryError):
    __slots__ = ("size",)


class Dictless(OutOfMemoryError):
    @property
    def __dict__(self) -> Any:
        raise AttributeError("__dict__")


@dataclasses.dataclass(frozen=True)
class Frozen(OutOfMemoryError):
    text: str

    def __str__(self) -> str:
        return self.text


OfC = type("OutOfMemoryError", (zlib.error,), {"__module__": "torch", "__slots__": ()})


@pytest.mark.parametrize("kind", [Sealed, Slotted, Dictless, Frozen, OfC])
def test_an_error_that_takes_no_attribute_is_reported_once_too(
    budget: Budget, capsys: pytest.CaptureFixture[str], kind: type[Exception]
) -> None:
    error = raised(kind(TEXT))
    report = report_error(error)
    assert report is not None and report_error(error) is report
    sys.excepthook(type(error), error, error.__traceback__)
    assert len(budget.recorded) == 1 and capsys.readouterr().err.count("\n  error  ") == 1


@pytest.mark.parametrize("stream", [None, "closed"])
def test_a_standard_error_that_is_gone(budget: Budget, monkeypatch: pytest.MonkeyPatch, stream: str | None) -> None:
    if stream == "closed":
        with open(os.devnull, "w") as closed:
            pass
        monkeypatch.setattr(sys, "stderr", closed)
    else:
        monkeypatch.setattr(sys, "stderr", None)
    assert report_error(oom()) is not None


def test_on_a_terminal_it_is_drawn(
    budget: Budget, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    report_error(oom())
    assert "\x1b[1;31m" in capsys.readouterr().err


def test_without_a_budget_nothing_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    error = oom()
    assert report_error(error) is None and vars(error) == {} and capsys.readouterr().err == ""


def test_the_report_outlives_the_budget() -> None:
    undo = Budget().install()
    error = oom()
    report = report_error(error, show=False)
    undo()
    assert last_oom() is report and report_error(error) is report
    assert report_error(oom()) is None


def test_a_few_reports_are_remembered(budget: Budget) -> None:
    errors = [oom() for _ in range(50)]
    reports = [report_error(error, show=False) for error in errors]
    assert report_error(errors[-1]) is reports[-1] is last_oom()
    assert len(hooks._reports) <= 8 and report_error(errors[0]) is None


# hooks


def test_installed_twice_is_installed_once(budget: Budget) -> None:
    hook = sys.excepthook
    undo = budget.install()
    assert isinstance(sys.excepthook, hooks._Hook) and sys.excepthook is not hook
    report_error(oom(), show=False)
    assert len(budget.recorded) == 1
    undo()


def test_another_budget_takes_over() -> None:
    before = sys.excepthook
    first, second = Budget(), Budget()
    undo_first = first.install()
    undo_second = second.install()
    undo_first()  # late: it is the second's turn
    report_error(oom(), show=False)
    assert (len(first.recorded), len(second.recorded)) == (0, 1)
    undo_second()
    assert sys.excepthook is before and report_error(oom()) is None


def test_who_hooked_after_us_stays_and_we_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: calls.append("before"))
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    source = Budget()
    undo = source.install()
    ours = sys.excepthook

    def theirs(*args: Any) -> None:
        calls.append("after")
        ours(*args)

    sys.excepthook = theirs
    undo()
    undo()
    assert sys.excepthook is theirs
    error = oom()
    sys.excepthook(type(error), error, None)
    assert calls == ["after", "before"] and source.recorded == []
    undo = source.install()
    sys.excepthook(type(error), error, None)
    assert calls == ["after", "before"] * 2 and len(source.recorded) == 1
    undo()
    assert sys.excepthook is theirs
    sys.excepthook = ours  # they take themselves away, and put ours back
    source.install()()
    assert not isinstance(sys.excepthook, hooks._Hook) or sys.excepthook is ours
    error = oom()
    sys.excepthook(type(error), error, None)
    assert calls[-1] == "before" and len(source.recorded) == 1


def test_an_error_in_the_hook_before_ours_is_raised(budget: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = sys.excepthook
    assert isinstance(hook, hooks._Hook)

    def broken(*args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(hook, "_previous", broken)
    error = oom()
    with pytest.raises(ZeroDivisionError):
        sys.excepthook(type(error), error, None)
    assert last_oom() is report_error(error)


class Shell(code.InteractiveInterpreter):
    """Shows errors in a window of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.window = ""

    def write(self, data: str) -> None:
        self.window += data


class Console(code.InteractiveConsole):
    window = ""

    def write(self, data: str) -> None:
        self.window += data


class Wrapping(Shell):
    def showtraceback(self) -> None:
        self.write("[")
        super().showtraceback()
        self.write("]")


class Own(Shell):
    """Shows them by itself, as IPython-like shells do, and tests for a hook as Python's class does."""

    def showtraceback(self) -> None:
        if sys.excepthook is not sys.__excepthook__:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        else:
            self.write(f"own {sys.exc_info()[1]!r}")


SOURCES = {
    "an error": "1/0",
    "a chain": "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise KeyError(7) from e\n",
    "in a function": "def f(n):\n    return f(n - 1) if n else [][1]\nf(5)\n",
    "syntax": "a b",
    "indentation": "if 1:\npass\n",
    "a null byte": "\0",
    "interrupt": "raise KeyboardInterrupt",
    "no text": "class E(Exception):\n    def __str__(self): return 1/0\nraise E\n",
    "recursion": "def f(): f()\nf()\n",
    "out of memory": "raise OutOfMemoryError(TEXT)",
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", [Shell, Console, Wrapping, Own])
def test_an_interactive_interpreter_shows_what_it_shows_without_us(
    kind: type[Any], source: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    windows = []
    for hooked in (False, True):
        shell, budget = kind(), Budget()
        shell.locals.update(OutOfMemoryError=OutOfMemoryError, TEXT=TEXT)
        undo = budget.install() if hooked else None
        try:
            ours = sys.excepthook
            try:
                shell.runsource(SOURCES[source], "<input>", "exec")
            except TypeError as error:  # Python 3.13.0 of a null byte: its `code` compares a line number that is None
                shell.write(f"raised {error!r}")
            assert sys.excepthook is ours
        finally:
            if undo is not None:
                undo()
        # The note on an out-of-memory error is a part of the error.
        window = re.sub(r"memguard: .*\n(  .*\n)*", "", shell.window)
        windows.append(re.sub(r"repeated \d+ more times", "repeated", window))  # it depends on the depth of the test
    assert windows[0] == windows[1] != ""
    assert len(budget.recorded) == (source == "out of memory")
    report = capsys.readouterr().err
    assert ("memguard: torch ran out of" in report) == (source == "out of memory"), "it comes after the traceback"
    assert "Traceback" not in report


def test_idle_shows_what_it_shows_without_us(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its `run.py` tests for a hook in a function of its own. A module stands in for it: the real one needs Tk."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    text = (
        "import sys\ndef print_exception():\n    print('shown by IDLE', repr(sys.exc_info()[1]))\n"
        "def runcode():\n    try:\n        1/0\n    except BaseException:\n"
        "        if sys.excepthook is sys.__excepthook__: print_exception()\n"
        "        else: sys.excepthook(*sys.exc_info())\n"
    )
    names: dict[str, Any] = {"__name__": "idlelib.run"}
    exec(text, names)
    undo = Budget().install()
    try:
        names["runcode"]()
    finally:
        undo()
    said = capsys.readouterr()
    assert (said.out, said.err) == ("shown by IDLE ZeroDivisionError('division by zero')\n", "")


def test_a_hook_that_was_there_before_gets_an_interpreters_error_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: calls.append(args[0]))
    undo = Budget().install()
    try:
        Shell().runsource("1/0")
    finally:
        undo()
    assert calls == [ZeroDivisionError]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_thread_that_is_not_joined(budget: Budget, capsys: pytest.CaptureFixture[str]) -> None:
    thread = threading.Thread(target=oom_in_thread)
    thread.start()
    thread.join()
    assert len(budget.recorded) == 1 and "torch ran out of GPU memory" in capsys.readouterr().err


def oom_in_thread() -> None:
    raise OutOfMemoryError(TEXT)


def test_many_threads_at_once(budget: Budget) -> None:
    with ThreadPoolExecutor(8) as pool:
        reports = list(pool.map(lambda _: report_error(oom(), show=False), range(200)))
    assert len({id(report) for report in reports}) == 200 and len(budget.recorded) == 200


def test_a_forked_child_reports_nothing(budget: Budget) -> None:
    report_error(oom(), show=False)
    pid = os.fork()
    if pid == 0:
        code = 0 if report_error(oom(), show=False) is None and last_oom() is None else 1
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def run(code: str) -> subprocess.CompletedProcess[str]:
    """A program of its own, whose errors nobody catches."""
    start = f"""
        import sys, threading
        from memguard._oom import hooks
        class OutOfMemoryError(RuntimeError): pass
        OutOfMemoryError.__module__ = "torch"
        undo = hooks.install(hooks.OomContext)
        def fail(): raise OutOfMemoryError({TEXT!r})
    """
    environ = {**os.environ, "PYTHONPATH": str(ROOT)} if ROOT.name != "site-packages" else dict(os.environ)
    program = textwrap.dedent(start) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)


def test_an_uncaught_error_ends_the_program_as_usual_and_the_report_comes_last() -> None:
    done = run("fail()")
    assert done.returncode == 1
    trace, report = (
        done.stderr.split("\nmemguard: torch ran out", 1)[0],
        done.stderr.rsplit("memguard: torch ran out", 1)[1],
    )
    assert "torch.OutOfMemoryError: CUDA out of memory" in trace
    assert "2.00 GiB asked for" in report and done.stderr.count("  error  torch.OutOfMemoryError") == 1


def test_an_uncaught_error_that_a_block_reported_is_not_reported_again() -> None:
    done = run("try: fail()\nexcept Exception as error:\n    hooks.report_error(error)\n    raise")
    assert done.returncode == 1 and done.stderr.count("  error  torch.OutOfMemoryError") == 1


def test_a_thread_of_a_program() -> None:
    done = run("t = threading.Thread(target=fail); t.start(); t.join(); undo(); fail()")
    assert "Exception in thread Thread-1" in done.stderr
    assert done.stderr.count("  error  torch.OutOfMemoryError") == 1


# on simulated GPUs


def test_the_example_of_the_documents_and_that_its_first_remedy_helps() -> None:
    """torch fails because its sibling and another process hold the card; trimming the sibling frees what was said.

    torch's allocator asks nobody. CuPy's would have had its sibling's cache given back.
    """
    shares = {"cupy": {"share": "50%"}, "tensorflow": {"share": "20%", "growth": False}, "torch": {"share": "20%"}}
    with memguard.guard({"version": 1, "frameworks": shares}, simulate="h200") as guard:
        device, frameworks = guard.plan.devices[0].device, guard.frameworks

        def scene() -> OomContext:
            others = {pid: size for pid, size in guard.host.processes(device).items() if pid != guard.host.pid}
            return OomContext(guard.ledger(), guard.plan, {device.uuid: others})

        undo = Budget(scene).install()
        try:
            simulated: Any = frameworks
            simulated["tensorflow"].allocate(3 << 30)
            batches = [simulated["cupy"].allocate(2 << 30) for _ in range(10)]
            for batch in batches[:4]:
                simulated["cupy"].free(batch)
            simulated["torch"].allocate(4 << 30)
            guard.host.occupy(device, 4242, 86 << 30)  # type: ignore[attr-defined]
            with pytest.raises(FrameworkOutOfMemory) as caught:
                simulated["torch"].allocate(9 << 30)
            report = report_error(caught.value, show=False)
            assert report is not None and report.reason == "card" and report.holders[0].name == "process 4242"
            page = (Path(__file__).parents[2] / "docs" / "oom.md").read_text(encoding="utf-8")
            assert f"```\n{report}\n```" in page
            first = report.remedies[0]
            assert first.text.startswith("cupy holds 8.00 GiB reclaimable: memguard.trim('cupy')")
            assert memguard.trim("cupy") == first.bytes
            simulated["torch"].allocate(9 << 30)
        finally:
            undo()
