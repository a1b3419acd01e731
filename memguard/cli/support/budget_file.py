"""The budget that a command uses if none is named."""

from __future__ import annotations

from pathlib import Path

from memguard.errors import ConfigError, Problem


def nearest(command: str) -> Path:
    """The budget.yaml of this folder, or of the nearest one above. ConfigError if there is none.

    `command` is how the file is named instead, for the error.
    """
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "budget.yaml").is_file():
            return folder / "budget.yaml"
    problem = Problem(f"there is none in {here} or a folder above it", f"name the file: {command}")
    raise ConfigError([problem], "budget.yaml")
