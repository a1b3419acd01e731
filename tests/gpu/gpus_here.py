"""The GPUs that the tests run on, and what several files of them begin with."""

from __future__ import annotations

import pytest


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
import sys
sys.path.insert(0, os.path.join(os.environ["MEMGUARD_ROOT"], "benchmarks"))
import _arrays, exchange as bench
from memguard import exchange
"""
"""The start of a program that uses `benchmarks/exchange.py`."""
