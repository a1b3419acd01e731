"""`%load_ext memguard`: the ledger as a table, a budget for a cell, and memory freed after an out-of-memory error.

    %memguard                                        the ledger
    %memguard plan                                   each cap, and whether it is enforced yet
    %memguard trim [FRAMEWORK]                       return idle caches to the driver
    %memguard suspend [--when-idle 10min]            suspend the process until the next cell; now, or once it is idle
    %memguard resume                                 resume the process on the GPUs
    %%memguard --framework torch --needs 4GiB        admission before the cell; after it, its peak and its growth

The magics use the active budget, which `memguard.init` in a cell or MEMGUARD_CONFIG applied.
"""

from __future__ import annotations

import argparse
import ast
import gc
import inspect
import shlex
import sys
from collections.abc import Callable, Iterator
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType, TracebackType
from typing import Any, NoReturn, cast

from memguard import api
from memguard._base.framework_spec import CacheName
from memguard._base.types import WorkloadReport
from memguard._base.units import format_duration, format_size
from memguard._devices import suspension
from memguard._node.suspend.triggers import notebook_cells
from memguard._oom import hooks
from memguard._oom.report import Report
from memguard.errors import MemguardError

_LINE = "%memguard [plan | trim [FRAMEWORK] | suspend [--when-idle DURATION | --when-idle never] | resume]"
_TRACEBACK = vars(BaseException)["__traceback__"]
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_CELL = "%%memguard --framework NAME [--needs SIZE] [--name TEXT]"


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext memguard`."""
    _unload(shell)  # registered before a reload of this module
    extension = Extension(shell)
    shell.register_magic_function(extension.magic, "line_cell", "memguard")
    shell.events.register("pre_run_cell", extension.runs)
    shell.events.register("post_run_cell", extension.ran)
    hooks.display = extension.show
    notebook_cells.attach(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Called by `%unload_ext memguard`. The budget stays: `memguard.shutdown()` ends it."""
    _unload(shell)


def _unload(shell: Any) -> None:
    """Remove memguard's callbacks and magic, found by class name: a reload defines the class again."""
    from memguard._node.suspend.triggers import when_idle

    for magics in shell.magics_manager.magics.values():
        if _is_ours(magics.get("memguard")):
            del magics["memguard"]
    for event in ("pre_run_cell", "post_run_cell"):
        for callback in list(shell.events.callbacks[event]):
            if _is_ours(callback):
                shell.events.unregister(event, callback)
    if _is_ours(hooks.display):
        hooks.display = None
    when_idle.let_go(shell)


def _is_ours(function: Any) -> bool:
    owner = type(getattr(function, "__self__", None))
    return (owner.__module__, owner.__qualname__) == (__name__, "Extension")


class Extension:
    """The extension of one shell, from load to unload."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._running = False
        self._reports: list[Report | str] = []  # to show at the end of the cell
        self._notes: list[Callable[[], None]] = []  # each restores a note that the cell's traceback omits

    def magic(self, line: str, cell: str | None = None) -> Any:
        """The ledger; or `%memguard plan`, `%memguard trim [FRAMEWORK]`, `%%memguard --framework NAME --needs SIZE`."""
        # Hide the frames above the cell.
        __tracebackhide__ = "__ipython_bottom__"
        if cell is not None:
            return self._cell(_cell_options(line), cell)
        words = _words(line, _LINE)
        try:
            return _line(words, self._shell)
        except MemguardError as error:
            _refuse(str(error))

    # IPython reads this attribute: a semicolon at the end of the cell suppresses the value of its last line.
    magic._ipython_magic_output_can_be_silenced = True  # type: ignore[attr-defined]

    def _cell(self, options: argparse.Namespace, cell: str) -> Any:
        """Run the cell in the user's namespace. Raises the cell's error unchanged."""
        __tracebackhide__ = "__ipython_bottom__"
        body, last = self._compiled(cell)
        name = options.name or f"cell {self._number}"
        report: WorkloadReport | None = None
        failed = True
        try:
            with api.workload(name, framework=options.framework, needs=options.needs) as report:
                value = _run(body, last, self._shell.user_ns)
            failed = False
        except MemguardError as error:
            if report is None:  # refused before the cell ran: hide memguard's frames
                raise error.with_traceback(None) from None
            raise
        except BaseException as error:
            if self._running:  # show the report after the traceback
                self._notes.append(hooks.without_note(error, True))
            raise
        finally:
            if report is not None:
                print(_summary(report, failed))
        return value

    @property
    def _number(self) -> int:
        """The number in brackets before the cell. The shell's own counter is one ahead in newer versions of IPython."""
        number: int = self._shell.displayhook.prompt_count
        return number

    def _compiled(self, cell: str) -> tuple[Any, Any]:
        """Compile the cell: its statements, and its last line if that is an expression whose value the shell shows."""
        compiler = self._shell.compile
        text = self._shell.transform_cell(cell)
        place = compiler.cache(text, self._number, raw_code=cell)  # so that tracebacks show the cell's lines
        tree = self._shell.transform_ast(compiler.ast_parse(text, filename=place))
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = compiler(ast.Expression(tree.body.pop().value), place, "eval")
        return compiler(tree, place, "exec"), last

    def show(self, report: Report | str) -> None:
        """Show a report or its one-line replacement: at once, or after the traceback while a cell runs."""
        if self._running:
            self._reports.append(report)
        else:
            print(report, file=sys.stderr)

    def runs(self, info: Any = None) -> None:
        """Called before each cell."""
        hooks.show_next_in_full()  # the report of an earlier cell may have scrolled away
        self._put_notes_back()
        self._running = True

    def _put_notes_back(self) -> None:
        while self._notes:
            self._notes.pop()()

    def ran(self, result: Any) -> None:
        """Called after each cell and its traceback."""
        self._put_notes_back()
        error = getattr(result, "error_in_exec", None)
        found = hooks.report_error(error) if error is not None else None
        self._running = False
        reports, self._reports = self._reports, []
        for report in reports:
            if isinstance(report, str):
                print(report, file=sys.stderr)
                continue
            from IPython.display import display

            display({"text/plain": str(report), "text/html": report._repr_html_()}, raw=True)
        if error is not None and found is not None:  # keep the locals of other errors for %debug
            _release(error)


def _release(error: BaseException) -> None:
    """Clear the error's frames, and print the memory that this freed."""
    before = _in_use()
    let_go(error)
    after = _in_use()
    freed = {name: size - after.get(name, size) for name, size in before.items()}
    sizes = ", ".join(f"{name} {format_size(size)}" for name, size in freed.items() if size > 0)
    if sizes:
        print(f"memguard: let go of what the traceback held: {sizes}", file=sys.stderr)


def let_go(error: BaseException) -> None:
    """Clear the frames of the error, its causes and contexts: their locals keep arrays alive.

    The error, its traceback and its text stay available (`sys.last_value`, the shell, a variable of the user's): `%tb`
    shows them again, but `%debug` finds no locals. A suspended generator or coroutine that caught the error keeps its
    locals.
    """
    frames = [place.tb_frame for one in _chain(error) for place in _places(_TRACEBACK.__get__(one))]
    waiting = _waiting([frame for frame in frames if frame.f_code.co_flags & _GENERATORS])
    for frame in frames:
        if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a module's or cell's frame: its names are the user's
            continue
        if id(frame) in waiting:  # up to Python 3.12 `clear` would end the generator
            continue
        try:
            frame.clear()
        except RuntimeError:  # the frame still runs
            continue
        _ = frame.f_locals  # up to Python 3.12 a cached copy, which this read empties
    gc.collect()


def _places(place: TracebackType | None) -> Iterator[TracebackType]:
    while place is not None:
        yield place
        place = place.tb_next


def _waiting(frames: list[FrameType]) -> set[int]:
    """The ids of those frames that belong to an unfinished generator or coroutine.

    A frame has no reference to its generator, so this searches all of Python's objects.
    """
    owners = gc.get_referrers(*frames) if frames else []
    names = {GeneratorType: "gi_frame", CoroutineType: "cr_frame", AsyncGeneratorType: "ag_frame"}
    return {id(getattr(owner, names[type(owner)])) for owner in owners if type(owner) in names}


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes and contexts, and the members of groups; each once."""
    waiting, known = [error], set()
    while waiting:
        one = waiting.pop()
        if id(one) in known:
            continue
        known.add(id(one))
        yield one
        cause, context, members = hooks.related(one)
        waiting += [other for other in (cause, context, *members) if other is not None]


def _line(words: list[str], shell: Any) -> Any:
    if not words:
        return api.ledger()
    if words == ["plan"]:
        print(api.current())
    elif words[0] == "trim" and len(words) <= 2:
        print(f"{format_size(api.trim(*cast('list[CacheName]', words[1:])))} given back to the driver")
    elif words[0] == "suspend" and len(words) in (1, 3) and words[1:2] in ([], ["--when-idle"]):
        print(_suspended(shell, words[2] if len(words) == 3 else None))
    elif words == ["resume"]:
        print(_resumed(shell))
    else:
        _refuse(f"usage: {_LINE}\n       {_CELL}")
    return None


def _suspended(shell: Any, when: str | None) -> str:
    """Carry out `%memguard suspend`, now or when idle. Returns the text to show."""
    from memguard._budget.values import IDLE, duration
    from memguard._node.suspend import self_suspend
    from memguard._node.suspend.triggers import when_idle
    from memguard._node.suspend.types import TIMEOUT

    found, ignored = notebook_cells.attach(shell), self_suspend.ignores_host_memory()
    if when is None:
        return f"{self_suspend.suspend(TIMEOUT, 'asked', found.owner, ignored)}; the next cell brings it back"
    if when == "never":
        when_idle.end()
        return "this process stays on its GPUs, however long it is idle"
    try:
        seconds = duration(when, *IDLE)
    except ValueError as error:
        _refuse(str(error))
    when_idle.begin(seconds, shell, "notebook")
    return f"idle for {format_duration(seconds)}, this process leaves its GPUs; the next cell brings it back"


def _resumed(shell: Any) -> str:
    """Carry out `%memguard resume`, waiting for GPU memory. Returns the text to show."""
    from memguard._node import suspend
    from memguard._node.suspend.triggers import progress

    off = suspension.now
    line = progress.Line(shell)
    try:
        suspend.resume(progress=line.show)
    finally:
        line.end()
    return "this process is on its GPUs" if off is None else f"back on the GPUs: {off.text_of_bytes}"


def _run(body: Any, last: Any, names: dict[str, Any]) -> Any:
    __tracebackhide__ = "__ipython_bottom__"
    exec(body, names)
    return eval(last, names) if last is not None else None


def _summary(report: WorkloadReport, failed: bool = False) -> str:
    return f"{report}{', with what the traceback holds' if failed and report.delta is not None else ''}"


def _in_use() -> dict[str, int]:
    """Bytes of live arrays by framework; empty if no budget is active."""
    found: dict[str, int] = {}
    try:
        for part in api.ledger().devices:
            for row in part.rows:
                if row.in_use is not None:
                    found[row.name] = found.get(row.name, 0) + row.in_use
    except MemguardError:
        return {}
    return found


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _refuse(f"{message}\nusage: {_CELL}")


def _cell_options(line: str) -> argparse.Namespace:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-f", "--framework", required=True)
    parser.add_argument("-n", "--needs")
    parser.add_argument("--name")
    return parser.parse_args(_words(line, _CELL))


def _words(line: str, usage: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:  # an unclosed quotation mark
        _refuse(f"{error}\nusage: {usage}")


def _refuse(text: str) -> NoReturn:
    """Raise an error that the shell shows without a traceback."""
    from IPython.core.error import UsageError

    raise UsageError(text) from None
