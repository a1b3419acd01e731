"""The files that `simulate` and `replay` are given: which is the budget, which the recording, and of what kind."""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import dataclass

import click

_FIRST_KEY = re.compile(rb'\s*\{\s*"memguard_(trace|timeline)"')
_LINE = 1 << 20
"""Bytes of a first line that are read."""
_COMMANDS = {"trace": "simulate", "timeline": "replay"}


@dataclass(frozen=True)
class Given:
    """What a command line names. `wrong`: the command for it, if the recording is of the other kind."""

    budget: str | None
    recording: str
    wrong: str | None = None


def given(words: tuple[str, ...], budget: str | None, wanted: str, *, without_budget: bool = False) -> Given:
    """Sort out `[BUDGET] RECORDING [--budget BUDGET]`. Raises UsageError with the right command.

    `wanted` is the kind of recording that the command takes: trace or timeline.
    """
    name, command = wanted.upper(), f"memguard {_COMMANDS[wanted]}"
    if len(words) > 2:
        raise click.UsageError(f"{len(words)} files are given: {command} {name} --budget BUDGET")
    *first, recording = words
    if first:
        if budget is not None:
            raise click.UsageError(f"the budget is given twice: {command} {name} --budget BUDGET")
        (budget,) = first
        found = kind(budget)
        if found is not None and found != wanted and not without_budget:
            raise click.UsageError(f"{budget} is a {found}, not a {wanted}: {_right(found, budget, recording)}")
        if found is not None and not without_budget:
            also = f"{command} BUDGET {name}" if kind(recording) else _right(wanted, budget, recording)
            raise click.UsageError(f"{budget} is a {found}, not a budget: {also}")
    found = kind(recording)
    if not first and wanted == "timeline" and found is None and recording.endswith((".yaml", ".yml")):
        raise click.UsageError(f"{recording} looks like a budget, and no timeline is given: {command} BUDGET {name}")
    if found not in (None, wanted):
        return Given(budget, recording, _right(str(found), recording, None if without_budget else budget))
    return Given(budget, recording)


def _right(found: str, recording: str, budget: str | None) -> str:
    """The command for this kind of recording."""
    recording = shlex.quote(recording)
    if found == "timeline":
        return f"memguard replay {recording}" + ("" if budget is None else f" --budget {shlex.quote(budget)}")
    if budget is None:
        return f"memguard simulate {recording} --without-budget"
    return f"memguard simulate {shlex.quote(budget)} {recording}"


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
    return next((name for name in _COMMANDS if isinstance(record, dict) and f"memguard_{name}" in record), None)
