"""The budget that a command is given: a file, standard input, or the one that it uses if none is named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memguard.errors import ConfigError, Problem

if TYPE_CHECKING:
    from memguard._budget import Budget

STDIN = "-"


def name(path: str) -> str:
    """What messages call it."""
    return "<stdin>" if path == STDIN else path


def load(path: str) -> Budget:
    """The budget in a file, or for `-` on standard input. Raises ConfigError."""
    from memguard import _budget

    return _budget.parse(_standard_input(), name(path)) if path == STDIN else _budget.load(path)


def one(argument: str | None, option: str | None) -> str | None:
    """The budget of a command that takes it as an argument and as `-c`. Raises UsageError if both name one."""
    if argument is not None and option is not None:
        raise click.UsageError("the budget is given twice: as BUDGET and with -c")
    return option if argument is None else argument


def _standard_input() -> bytes:
    from memguard._base.yaml import MAX_BYTES

    try:
        if sys.stdin is None:
            raise OSError(0, "it is closed")
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: closed since
        why = getattr(error, "strerror", None) or str(error)
        fix = "pipe a budget into it, or name its file"
        raise ConfigError([Problem(f"cannot be read: {why}", fix)], name(STDIN)) from None


def found() -> Path | None:
    """The budget.yaml of this folder, or of the nearest one above; None if there is none."""
    here = Path.cwd()
    return next(
        (folder / "budget.yaml" for folder in (here, *here.parents) if (folder / "budget.yaml").is_file()), None
    )


def nearest(command: str) -> Path:
    """The budget.yaml of this folder, or of the nearest one above. ConfigError if there is none.

    `command` is how the file is named instead, for the error.
    """
    path, here = found(), Path.cwd()
    if path is not None:
        return path
    problem = Problem(f"there is none in {here} or a folder above it", f"name the file: {command}")
    raise ConfigError([problem], "budget.yaml")
