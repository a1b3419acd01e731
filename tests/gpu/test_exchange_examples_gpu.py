"""The programs under examples/exchange_* and the code in docs/exchange.md, on a real GPU. Each checks itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., dict[str, Any]]
EXAMPLES = sorted(path.name for path in ROOT.glob("examples/exchange_*.py"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_does_what_it_says(name: str) -> None:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(ROOT / "examples" / name)],
        capture_output=True, text=True, timeout=180, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, f"rc {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    assert "Exception ignored" not in done.stderr


def test_the_code_of_the_page_does_what_it_says(run: Run) -> None:
    """In one process, with all six: the last line that it printed before a crash says which one it was."""
    page = (ROOT / "docs" / "exchange.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    found = run(
        f"""
import gc, io, sys, traceback, weakref
import torch
import cupy, jax, numpy, tensorflow as tf
import jax.numpy as jnp
from numba import cuda
import pycuda.driver
from pycuda import gpuarray
from memguard import exchange
known = dict(globals())
failed, ran = [], 0
for number, block in enumerate({blocks!r}):
    if "device=1" in block and torch.cuda.device_count() < 2:
        continue
    print(f"block {{number}}", file=sys.stderr, flush=True)
    try:
        exec(compile(block, f"block {{number}}", "exec"), dict(known))
    except Exception:
        failed.append([block, traceback.format_exc()[-1500:]])
    ran += 1
    gc.collect()
result.update(failed=failed, ran=ran)
""",
        env={"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        timeout=240,
    )
    assert found["failed"] == []
    assert found["ran"] >= len(blocks) - 1
