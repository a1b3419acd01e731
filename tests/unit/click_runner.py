"""click's runner of commands, with standard error apart: before 8.2 click does that only if it is told."""

from __future__ import annotations

import inspect
from typing import Any

from click.testing import CliRunner

_APART: dict[str, Any] = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}


def apart() -> CliRunner:
    return CliRunner(**_APART)
