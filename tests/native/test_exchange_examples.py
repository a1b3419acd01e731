"""What docs/exchange.md and its examples say, done: on host arrays, with the real PyTorch, TensorFlow, JAX and NumPy.

The frameworks are imported once; everything runs in a fork of that process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "exchange.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
NEEDS_GPU = re.compile(r"cupy|pycuda|gpuarray|numba|export\(|device=1")
ON_HOST = {
    f"block {number}": block.replace('"cuda"', '"cpu"')
    for number, block in enumerate(BLOCKS)
    if not NEEDS_GPU.search(block)
}
PROGRAMS = ("exchange_torch_to_tensorflow", "exchange_torch_to_tf1_graph", "exchange_all_six")
ALL = """
import json, os, signal, sys
import io, weakref
import jax, numpy, tensorflow as tf, torch
import jax.numpy as jnp
import memguard
from memguard import exchange

answers = os.fdopen(os.dup(1), "w")
done = {}
for name, program in json.load(sys.stdin).items():
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(60)
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        sys.argv = [name, "--cpu"]
        try:
            exec(compile(program, name, "exec"), dict(globals()))
            code = 0
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            import traceback
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)
    os.close(writing)
    with os.fdopen(reading, errors="replace") as pipe:
        text = pipe.read()
    done[name] = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text[-3000:]]
json.dump(done, answers)
answers.flush()
"""


@pytest.fixture(scope="module")
def done() -> dict[str, Any]:
    """The exit code and the output of each."""
    programs = {
        **ON_HOST,
        **{name: (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8") for name in PROGRAMS},
    }
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALL],
        input=json.dumps(programs), capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize("name", [*ON_HOST, *PROGRAMS])
def test_it_does_what_it_says(done: dict[str, Any], name: str) -> None:
    code, text = done[name]
    assert code == 0, f"{ON_HOST.get(name, name)}\n{text}"


def test_most_of_the_page_runs_on_the_host() -> None:
    assert len(ON_HOST) >= 14


@pytest.mark.parametrize("name", ["exchange_cupy_to_tensorflow", "exchange_pycuda_and_tensorflow"])
def test_examples_that_need_a_gpu_say_so(name: str) -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--cpu"],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ran.returncode == 2 and "needs a GPU" in ran.stderr
