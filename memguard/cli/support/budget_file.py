"""The budget that a command uses if none is named."""

from __future__ import annotations

from pathlib import Path

from memguard.errors import ConfigError, Problem


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
