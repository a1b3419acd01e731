"""Why an interpreter does not even start a probe, from its stderr. Pure."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence

_ERROR = re.compile(r"[A-Za-z_][\w.]*: \S")
_FRAME = re.compile(r'File "([^"]*)", line \d+')
_STANDARD = re.compile(r"/(python3[^/]*|pypy3[^/]*)(/|$)")


def quoted(stderr: Sequence[str]) -> str:
    """The line to quote: the traceback's error, if there is one, else the last line."""
    return next((line.strip() for line in reversed(stderr) if _ERROR.match(line)), stderr[-1].strip() if stderr else "")


def remedy(python: Sequence[str], stderr: Sequence[str]) -> str:
    """What to do about an interpreter that runs nothing."""
    for path in (match[1] for line in stderr for match in _FRAME.finditer(line)):
        folder, name = os.path.split(path)
        if name.removesuffix(".py") in sys.stdlib_module_names and folder and not _STANDARD.search(folder):
            return f"rename {name} in {folder}: it hides Python's own module of that name"
    command = shlex.join((*python, "-c", "pass"))
    return f"`{command}` must work, with Python 3.8 or newer: check its sitecustomize and PYTHONPATH"
