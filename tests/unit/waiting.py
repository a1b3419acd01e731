"""How tests wait for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(done: Callable[[], Any], seconds: float = 10.0, pause: float = 0.01, what: str = "it comes") -> Any:
    """What `done` returns, once that is true. AssertionError if it is not within so many seconds."""
    end = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(pause)
    return found
