"""Why a Python does not get as far as a probe: from what it says on stderr. Pure."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence

_ERROR = re.compile(r"[A-Za-z_][\w.]*: \S")
_FRAME = re.compile(r'File "([^"]*)", line \d+')
_STANDARD = re.compile(r"/(python3[^/]*|pypy3[^/]*)(/|$)")


def quoted(said: Sequence[str]) -> str:
    """The line to quote: the error of the traceback where there is one."""
    return next((line.strip() for line in reversed(said) if _ERROR.match(line)), said[-1].strip() if said else "")


def remedy(python: Sequence[str], said: Sequence[str]) -> str:
    """What to do where an interpreter does not run a line."""
    for path in (match[1] for line in said for match in _FRAME.finditer(line)):
        folder, name = os.path.split(path)
        if name.removesuffix(".py") in sys.stdlib_module_names and folder and not _STANDARD.search(folder):
            return f"rename {name} in {folder}: it stands in for Python's own module of that name"
    command = shlex.join((*python, "-c", "pass"))
    return f"`{command}` has to work, with Python 3.8 or newer: look at its sitecustomize and at PYTHONPATH"
