"""A notebook's cells: which run now, and the process back on its GPUs before the next one runs.

IPython's events before a cell cannot keep it from running; an input transformer can, by an error. It is one of
`input_transformers_post`, which only what is about to run goes through: no completion, no inspection, no look at
whether the input is complete. An interruption becomes an error too: ipykernel answers none of its clients otherwise.
"""

from __future__ import annotations

import ast
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from memguard._base import life
from memguard._base.advice import Advice
from memguard._base.units import format_duration
from memguard._devices import suspension
from memguard._node.suspend.triggers.progress import Line
from memguard.errors import CannotResume, MemguardError

_SLICE = 0.05
"""Seconds between two looks at a suspension that is under way."""
_NAMES = ("pre_execute", "post_execute")


class NotRun(MemguardError):
    """The cell did not run: what it needs is not on the GPUs."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: its own frames and memguard's are of no interest."""
        return [f"memguard: {self}"]


class Cells:
    """The cells of one shell, from `attach` to `detach`. ipykernel may run some on other threads (subshells)."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.owner = threading.main_thread().ident
        """The thread that runs cells: what needs a GPU there raises, as nobody could bring the process back."""
        self._running: dict[int, int] = {}
        self._ran = False
        self._leaving = False
        self._lock = threading.Lock()
        self._refused: dict[int, tuple[str, NotRun]] = {}
        """By thread: ipykernel transforms what was refused a second time, to show the error."""

    # the events

    def pre_execute(self) -> None:
        me = threading.get_ident()
        self._refused.pop(me, None)
        self._running[me] = self._running.get(me, 0) + 1
        self._ran = True

    def post_execute(self) -> None:
        """It comes after an empty cell too, before which nothing came."""
        last = getattr(self.shell, "last_execution_result", None)
        raw = getattr(getattr(last, "info", None), "raw_cell", None)
        me = threading.get_ident()
        if not (isinstance(raw, str) and (not raw or raw.isspace())):
            self._running[me] = max(self._running.get(me, 0) - 1, 0)
        self._ran = True

    # who watches

    @property
    def running(self) -> bool:
        return any(list(self._running.values()))

    def ran(self) -> bool:
        """Whether a cell runs, or has run since this was asked last."""
        ran, self._ran = self._ran, False
        return ran or self.running

    @contextmanager
    def none(self) -> Iterator[bool]:
        """Whether no cell runs; then none begins within the block."""
        with self._lock:
            free = not self.running and not self._ran and not self._leaving
            self._leaving = self._leaving or free
        try:
            yield free
        finally:
            if free:
                self._leaving = False

    # the transformer

    def transform(self, lines: list[str]) -> list[str]:
        """Bring the process back, if it is off its GPUs, before the cell runs. Raises NotRun if that fails."""
        with self._lock:
            self._ran = True
        if suspension.now is None and not self._leaving:
            return lines
        text = "".join(lines)
        if not text.strip() or is_magic_only(text):
            return lines
        me = threading.get_ident()
        before = self._refused.pop(me, None)
        if before is not None and before[0] == text:
            self._refused[me] = before
            raise before[1].with_traceback(None)
        error = self._back()
        if error is not None:
            self._refused[me] = text, error
            raise error
        return lines

    def _back(self) -> NotRun | None:
        """Bring it back. What a failure or an interruption is to the cell; None if it is back."""
        from memguard._node.suspend import self_suspend

        line = Line(self.shell)
        off = suspension.now
        began = time.monotonic()
        try:
            while self._leaving:  # the watcher has decided, and may not have begun
                time.sleep(_SLICE)
            self_suspend.resume(None, line.show)
        except CannotResume as error:
            return _refusal(line, error.advice)
        except Exception as error:
            return _refusal(line, Advice(f"{type(error).__name__}: {error}"))
        except BaseException as error:  # Ctrl-C, or what a signal handler raises
            return _refusal(line, _interrupted(error, self.shell))
        if off is not None and off.bytes:
            line.end(f"back on the GPUs in {format_duration(time.monotonic() - began)}: {off.text_of_bytes}")
        else:
            line.end()
        return None


def _refusal(line: Line, why: Advice) -> NotRun:
    line.end()
    return NotRun(why.within("this cell did not run"))


def _interrupted(error: BaseException, shell: Any) -> Advice:
    what = "interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
    off = suspension.now
    if off is None:
        return Advice(f"{what}; the process is on its GPUs", "run the cell again")
    look = "%memguard" if shell.find_line_magic("memguard") is not None else "`memguard ps` in a shell"
    return Advice(
        f"{what}; the process stays {off}, whole",
        f"run a cell again: it waits for room again; {look} shows who holds the GPUs meanwhile",
    )


def is_magic_only(text: str) -> bool:
    """Whether a cell, as it is transformed, consists of `%memguard ...` lines only."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return False
    return bool(body) and all(_is_magic(statement) for statement in body)


def _is_magic(statement: ast.stmt) -> bool:
    """`get_ipython().run_line_magic('memguard', ...)`."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    return (
        call.func.attr == "run_line_magic"
        and bool(call.args)
        and isinstance(call.args[0], ast.Constant)
        and call.args[0].value == "memguard"
    )


def attach(shell: Any) -> Cells:
    """The cells of the shell; those that are attached already."""
    found = of(shell)
    if found is not None:
        return found
    detach(shell)  # of a module that was reloaded
    cells = Cells(shell)
    for name in _NAMES:
        shell.events.register(name, getattr(cells, name))
    cells._ran = True
    cells._running = dict.fromkeys(_in_cells(shell), 1)  # their end will come
    shell.input_transformers_post.append(cells.transform)
    return cells


def detach(shell: Any) -> None:
    """Take away what is ours, also of a module that was reloaded."""
    transformers: list[Callable[..., Any]] = shell.input_transformers_post
    for one in [one for one in transformers if _is_ours(one)]:
        transformers.remove(one)
    for name in _NAMES:
        for callback in [one for one in shell.events.callbacks[name] if _is_ours(one)]:
            shell.events.unregister(name, callback)


def of(shell: Any) -> Cells | None:
    for one in shell.input_transformers_post:
        owner = getattr(one, "__self__", None)
        if isinstance(owner, Cells):
            return owner
    return None


def owner() -> int | None:
    """The thread on which a call that needs a GPU raises Suspended, once this thread has suspended the process.

    In a notebook it is the one of the cells, which then begin to be what brings the process back. None in other
    programs, and for a thread beside a cell that runs: that one waits.
    """
    shell = shell_here()
    if shell is None:
        return None
    found = attach(shell)
    others = found.running and threading.get_ident() != found.owner
    return None if others else found.owner


def shell_here() -> Any:
    """IPython's shell of this process; None if there is none. A forked child has a copy, which runs no cells."""
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get() if callable(get) and not _forked else None
    session = getattr(getattr(shell, "kernel", None), "session", None)
    return None if getattr(session, "pid", os.getpid()) != os.getpid() else shell


def _is_child() -> None:
    global _forked
    _forked = True


_forked = False
life.at_fork(life.HookOrder.NOTEBOOK, child=_is_child)


def _in_cells(shell: Any) -> Iterator[int]:
    """The threads that run a cell now: this may be called by one (`%load_ext memguard`, `memguard.init(...)`)."""
    for thread, frame in sys._current_frames().items():
        here: Any = frame
        while here is not None:
            if here.f_code.co_name == "run_code" and here.f_locals.get("self") is shell:
                yield thread
                break
            here = here.f_back


def _is_ours(function: Any) -> bool:
    owner = type(getattr(function, "__self__", None))
    return (owner.__module__, owner.__qualname__) == (__name__, "Cells")
