"""The quick pass of measurements that need no GPU, or run on simulated ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.measure import discover

ROOT = Path(__file__).resolve().parents[2]


def quick(name: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What the quick pass of a measurement emits."""
    module = discover()[name].function.__module__
    environ = {key: value for key, value in os.environ.items() if not key.startswith("MEMGUARD_")}
    done = subprocess.run(
        [sys.executable, "-m", "bench.one", module, name, "--quick"], cwd=ROOT, capture_output=True, text=True,
        env={**environ, **(env or {})}, timeout=150, check=False, start_new_session=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.rpartition("BENCH-RESULT ")[2])
    assert "error" not in found, found
    return dict(found["values"])


def test_every_measurement_says_what_it_is() -> None:
    found = discover()
    assert len(found) >= 4
    for one in found.values():
        assert one.function.__doc__
        assert one.seconds <= 150, one.id  # a call of run-all may end after nine minutes
        assert "." not in one.id
    assert sum(one.seconds for one in found.values()) <= 1200


def test_startup() -> None:
    found = quick("startup")
    errors = {name: value for name, value in found.items() if isinstance(value, dict)}
    assert not errors
    assert {"import", "init", "fresh", "start", "pth"} <= set(found)
    assert all(value and min(value) == min(value) for value in found.values())


def test_top() -> None:
    pytest.importorskip("textual")
    found = quick("top", {"CUDA_VISIBLE_DEVICES": ""})
    assert [len(found[name]) for name in ("follows", "attached", "control")] == [2, 2, 2]
    assert found["follows.drawn"][0] > 0.5
