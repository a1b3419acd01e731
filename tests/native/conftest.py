"""Native tests: the real PyTorch and TensorFlow (CPU builds do), each in its own process, as their state is global."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run() -> Callable[..., dict[str, Any]]:
    """Run code that leaves its findings in `result`; a crash fails the test with its stderr."""

    def call(code: str, *, env: dict[str, str] | None = None) -> dict[str, Any]:
        program = (
            "import faulthandler, json, os, sys\nfaulthandler.enable()\nfrom memguard.devices.simulated import "
            "SimulatedHost\nfrom memguard.errors import CapNotApplied\nfrom memguard.model import Enforcement, State\n"
            "GIB, MIB = 1 << 30, 1 << 20\nhost = SimulatedHost(['h200'])\ndevice = host.devices()[0]\nresult = {}\n"
            + textwrap.dedent(code)
            + "\nprint('RESULT ' + json.dumps(result), flush=True)\n"
        )
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **(env or {})}
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, env=environment, cwd=ROOT
        )
        assert done.returncode == 0, f"rc {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        found: dict[str, Any] = json.loads(lines[-1])
        return found

    return call
