"""The real frameworks without a GPU. Each is imported once; every test runs in a fork of that process."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from served import Run, environment, serve


def _beside(module: str) -> Any:
    """A fixture that runs code beside the imported module; findings go into `result`."""

    @pytest.fixture(scope="session")
    def beside() -> Iterator[Run]:
        yield from serve(module)

    return beside


with_torch = _beside("torch")
with_tensorflow = _beside("tensorflow")
with_cupy = _beside("cupy")
with_jax = _beside("jax")
with_numba = _beside("numba.cuda")


@pytest.fixture
def alone() -> Run:
    """Run code in a Python of its own, where nothing is imported yet."""

    def run(code: str) -> dict[str, Any]:
        program = (
            f"from stand_ins import *\nresult = {{}}\n{textwrap.dedent(code)}\nprint('RESULT', json.dumps(result))"
        )
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            capture_output=True, text=True, timeout=120, env=environment(),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, Any] = json.loads(done.stdout.split("RESULT ", 1)[1])
        return found

    return run
