"""Raises KeyboardInterrupt, or calls, at the k-th point of memguard's code at which Python may run a signal handler."""

from __future__ import annotations

import dis
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import memguard

PACKAGE = str(Path(memguard.__file__).parent)
_CHECKS = ("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RESUME", "SEND")
"""Opcodes after which a signal handler may run. It may also run before the first opcode of a frame."""
_TOOL = 4
"""A number of `sys.monitoring` that no coverage tool, debugger or profiler has."""


def ctrl_c() -> None:
    """As a handler of `Points`: send a real SIGINT, whose handler `deferred_signals` may defer."""
    signal.raise_signal(signal.SIGINT)


class Points:
    """Counts those points while `call` runs. At the one with that number it raises, or runs `handler` if one is given.

    To raise stands for a Ctrl-C outside `deferred_signals`, and anywhere for an exception that another thread sets.

    Other threads go on.
    """

    def __init__(self, at: int | None = None, handler: Callable[[], object] | None = None) -> None:
        self.at, self.count, self.place, self.handler = at, 0, "", handler
        self._last: dict[int, int] = {}
        self._names: dict[CodeType, dict[int, str]] = {}
        self._handlers: dict[CodeType, frozenset[int]] = {}

    def run(self, call: Callable[[], Any]) -> Any:
        # Python 3.13's `sys.settrace` skips opcodes of a function when they are traced again after an interruption.
        return self._monitored(call) if sys.version_info >= (3, 12) else self._traced(call)

    def _monitored(self, call: Callable[[], Any]) -> Any:
        monitoring, own = sys.monitoring, threading.get_ident()
        events = monitoring.events

        def begins(code: CodeType, offset: int) -> Any:
            if not _ours(code):
                return monitoring.DISABLE
            if threading.get_ident() == own:
                self._last.pop(id(sys._getframe(1)), None)
            return None

        def opcode(code: CodeType, offset: int) -> Any:
            if not _ours(code):
                return monitoring.DISABLE
            if threading.get_ident() == own:
                self._opcode(sys._getframe(1), offset, lambda: monitoring.set_events(_TOOL, 0))
            return None

        monitoring.use_tool_id(_TOOL, "interruptions")
        try:
            monitoring.register_callback(_TOOL, events.PY_START, begins)
            monitoring.register_callback(_TOOL, events.INSTRUCTION, opcode)
            monitoring.set_events(_TOOL, events.PY_START | events.INSTRUCTION)
            return call()
        finally:
            monitoring.set_events(_TOOL, 0)
            monitoring.register_callback(_TOOL, events.PY_START, None)
            monitoring.register_callback(_TOOL, events.INSTRUCTION, None)
            monitoring.free_tool_id(_TOOL)

    def _traced(self, call: Callable[[], Any]) -> Any:
        def begins(frame: FrameType, event: str, argument: object) -> Any:
            if not _ours(frame.f_code):
                return None
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
            return traced

        def traced(frame: FrameType, event: str, argument: object) -> Any:
            if event == "opcode":
                self._opcode(frame, frame.f_lasti, lambda: sys.settrace(None))
            elif event == "return":
                self._last.pop(id(frame), None)
            return traced

        before = sys.gettrace()
        sys.settrace(begins)
        try:
            return call()
        finally:
            sys.settrace(before)

    def _opcode(self, frame: FrameType, offset: int, stop: Callable[[], object]) -> None:
        code = frame.f_code
        names = self._names.get(code)
        if names is None:
            names = self._names[code] = {one.offset: one.opname for one in dis.get_instructions(code)}
            self._handlers[code] = _handlers(code)
        before = self._last.get(id(frame))
        self._last[id(frame)] = offset
        # Before the first opcode, and after one that looks for signals.
        if before is not None and not names.get(before, "CALL").startswith(_CHECKS):
            return
        # A call that has raised looks for none. To raise here would leave its error behind as the one being handled.
        if offset in self._handlers[code]:
            return
        self.count += 1
        if self.count == self.at:
            self.place = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name} {names.get(offset)}"
            stop()
            if self.handler is None:
                raise KeyboardInterrupt
            self.handler()


PLANNING = ("findings", "mps", "policy", "ranks", "shared_pool")
"""What `_budget` has beside the reading of the file, which takes too many steps."""


def _handlers(code: CodeType) -> frozenset[int]:
    """Offsets at which what handles an error begins."""
    return frozenset(entry.target for entry in dis.Bytecode(code).exception_entries)


def _ours(code: CodeType) -> bool:
    path = Path(code.co_filename)
    of_the_file = path.parent.name == "_budget" and path.stem not in PLANNING
    return code.co_filename.startswith(PACKAGE) and not of_the_file
