"""Tells traces, timelines and budgets apart, for a command that was given the wrong one."""

from __future__ import annotations

import os
import re

_FIRST_KEY = re.compile(rb'\s*\{\s*"memguard_(trace|timeline)"')


def kind(path: str) -> str | None:
    """`"trace"` or `"timeline"`, from the first key in the file; None for anything else and for no regular file."""
    try:
        if not os.path.isfile(path):  # opening a FIFO would wait
            return None
        with open(path, "rb") as file:
            found = _FIRST_KEY.match(file.read(100))
    except (OSError, ValueError):
        return None
    return found.group(1).decode() if found else None
