"""Which kind of recording a file is: a timeline, or an allocation trace."""

from __future__ import annotations

import json
import os
import re
import shlex

import click

_FIRST_KEY = re.compile(rb'\s*\{\s*"memguard_(trace|timeline)"')
_LINE = 1 << 20
"""Bytes of a first line that are read."""
KINDS = ("trace", "timeline")


def kind(path: str) -> str | None:
    """`"trace"` or `"timeline"`, from the first line; None for anything else and for no regular file."""
    try:
        if not os.path.isfile(path):  # opening a FIFO would wait
            return None
        with open(path, "rb") as file:
            line = file.readline(_LINE)
        if found := _FIRST_KEY.match(line):
            return found.group(1).decode()
        record = json.loads(line.decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None
    return next((name for name in KINDS if isinstance(record, dict) and f"memguard_{name}" in record), None)


def one(files: tuple[str, ...], budget: str | None) -> str:
    """The recording among the arguments. Raises UsageError with the right command for a budget among them."""
    usage = "memguard replay -c BUDGET RECORDING"
    if len(files) == 1 and not (files[0].endswith((".yaml", ".yml")) and kind(files[0]) is None):
        return files[0]
    if len(files) == 1:
        raise click.UsageError(f"{files[0]} looks like a budget, and no recording is given: {usage}")
    found = [name for name in files if kind(name) is not None]
    others = [name for name in files if kind(name) is None]
    if len(files) == 2 and len(found) == 1 and budget is None:
        named, recording = (shlex.quote(click.format_filename(name)) for name in (others[0], found[0]))
        raise click.UsageError(f"the budget is an option: memguard replay -c {named} {recording}")
    raise click.UsageError(f"{len(files)} files are given, and one is replayed: {usage}")
