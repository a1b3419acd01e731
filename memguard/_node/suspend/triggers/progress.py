"""One line of text that changes while a cell waits for room on the GPUs: in a notebook, and in a terminal."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any

from memguard._base.units import format_duration, format_size
from memguard._node.suspend.types import Wait

_WIDTH = 20
"""Characters of the bar."""
_OFTEN = 0.5
"""Seconds between two changes of the line."""


def bar(wait: Wait) -> str:
    """How much of what is needed is free: `[#####---------------]`."""
    part = min(max(wait.free / wait.needs, 0.0), 1.0) if wait.needs > 0 else 1.0
    full = min(int(part * _WIDTH), _WIDTH)
    return f"[{'#' * full}{'-' * (_WIDTH - full)}]"


def text(wait: Wait) -> str:
    """One line for people. Who holds the memory comes last, as it may be cut off."""
    parts = [f"{bar(wait)} {format_size(wait.free)} of {format_size(wait.needs)} free"]
    parts.append(f"{format_duration(int(wait.seconds))}, interrupt to stop waiting")
    if wait.ahead:
        parts.append(f"{wait.ahead} before this one")
    if wait.holders:
        parts.append("held by " + ", ".join(wait.holders))
    return f"memguard: waits for room on {wait.uuid[:12]} " + "; ".join(parts)


class Line:
    """The line of one wait. It never raises: what cannot be shown is not shown."""

    def __init__(self, shell: Any) -> None:
        self._kernel = getattr(shell, "kernel", None) is not None
        self._handle: Any = None
        self._shown = ""
        self._when = float("-inf")

    def show(self, wait: Wait) -> None:
        now = time.monotonic()
        if now - self._when < _OFTEN:
            return
        self._when = now
        self._put(text(wait))

    def end(self, last: str = "") -> None:
        """The wait is over. `last` stays to be read."""
        if self._kernel and self._handle is not None and last:
            self._put(f"memguard: {last}")
        elif last:
            self._write(f"{self._blank()}memguard: {last}\n")
        elif self._shown and not self._kernel:
            self._write("\n")

    def _put(self, line: str) -> None:
        if not self._kernel:
            width = shutil.get_terminal_size().columns - 1
            line = line if len(line) <= width else line[: max(width - 1, 0)] + "…"
            self._write(self._blank() + line)
            self._shown = line
            return
        self._shown = line
        try:
            from IPython.display import display

            if self._handle is None:
                self._handle = display({"text/plain": line}, raw=True, display_id=True)
            else:
                self._handle.update({"text/plain": line}, raw=True)
        except Exception:
            self._handle = None

    def _blank(self) -> str:
        return f"\r{' ' * len(self._shown)}\r" if self._shown else ""

    @staticmethod
    def _write(line: str) -> None:
        try:
            sys.stderr.write(line)
            sys.stderr.flush()
        except Exception:
            pass
