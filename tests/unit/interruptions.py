"""Raises KeyboardInterrupt at the k-th point of memguard's code at which Python may run a signal handler."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import memguard

PACKAGE = str(Path(memguard.__file__).parent)
_CHECKS = ("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RESUME", "SEND")
"""Opcodes after which a signal handler may run. It may also run before the first opcode of a frame."""


class Points:
    """Counts those points while `call` runs, and raises at the one with that number."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.count, self.place = at, 0, ""
        self._last: dict[int, int] = {}
        self._names: dict[CodeType, dict[int, str]] = {}

    def run(self, call: Callable[[], Any]) -> Any:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return call()
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE) or "/_config/" in frame.f_code.co_filename:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, argument: object) -> Any:
        if event != "opcode":
            if event == "return":
                self._last.pop(id(frame), None)
            return self._opcode
        code, at = frame.f_code, frame.f_lasti
        names = self._names.get(code)
        if names is None:
            names = self._names[code] = {one.offset: one.opname for one in dis.get_instructions(code)}
        before = self._last.get(id(frame))
        self._last[id(frame)] = at
        # Before the first opcode, and after one that looks for signals.
        if before is not None and not names.get(before, "CALL").startswith(_CHECKS):
            return self._opcode
        self.count += 1
        if self.count == self.at:
            self.place = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name} {names.get(at)}"
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._opcode
