"""The GPUs of the tests, and set-up code shared by several test files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def environment(**more: str) -> dict[str, str]:
    """The environment of a test's subprocess, in which memguard and `support` are importable."""
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "MEMGUARD_ROOT": str(ROOT), "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}


def _uuids() -> list[str]:
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        return [pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(count)]
    except Exception:
        return []


GPUS = _uuids()
"""Their UUIDs."""
TWO_GPUS = pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")
EXCHANGE = """
from support import arrays, exchanged
from memguard import exchange
"""
"""The first lines of a program that exchanges arrays."""
