"""Streams that are named to the real PyCUDA and Numba, over the stub of the driver: what their arrays make of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import stub_driver
from served import environment

Run = Callable[[str], dict[str, Any]]
PREAMBLE = """
import atexit, json
import pycuda.driver as drv
drv.init()
context = drv.Device(0).retain_primary_context()
context.push()
atexit.register(context.pop)
import numpy as np
from numba import cuda
from pycuda import gpuarray
from memguard.exchange import last_route, to
gpuarray.splay = lambda n, dev=None: ((1, 1), (32, 1, 1))  # the stub's GPU has no warps
SIDE, result = 0x7f0000000040, {}
def address(x): return int(x.__cuda_array_interface__["data"][0])
def named(x): return x.__cuda_array_interface__["stream"]
"""


@pytest.fixture(scope="module")
def stubbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run code with the real PyCUDA and Numba; it leaves its findings in `result`."""
    env = {**environment(), **stub_driver.build(tmp_path_factory.mktemp("cuda"))}

    def run(code: str) -> dict[str, Any]:
        program = f"{PREAMBLE}\n{textwrap.dedent(code)}\nprint('RESULT', json.dumps(result))"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            capture_output=True, text=True, errors="replace", timeout=60, env={**os.environ, **env},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, Any] = json.loads(done.stdout.split("RESULT ", 1)[1])
        return found

    return run


def test_numbas_array_names_the_stream_and_so_do_its_slices(stubbed: Run) -> None:
    found = stubbed("""
    x = gpuarray.empty(64, np.float32)
    for name, stream in {"handle": SIDE, "0": 0, "legacy": 1, "none": None}.items():
        y = to(x, "numba", stream=stream)
        result[name] = [named(y), named(y[1:]), address(y) == address(x)]
    other = cuda.external_stream(SIDE)
    result["Numba's own"] = [named(to(x, "numba", stream=other)), int(other.handle)]
    """)
    side = 0x7F0000000040
    assert found == {
        "handle": [side, side, True], "0": [1, 1, True], "legacy": [1, 1, True],
        "none": [None, None, True], "Numba's own": [side, side],
    }  # fmt: skip


@pytest.mark.parametrize("producer", ["pycuda", "numba"])
def test_a_copy_is_queued_on_the_stream_that_is_named(stubbed: Run, producer: str) -> None:
    found = stubbed(f"""
    make = {{"pycuda": lambda: gpuarray.empty(64, np.float32), "numba": lambda: cuda.device_array(64, np.float32)}}
    x = make[{producer!r}]()
    for consumer in ("pycuda", "numba"):
        for name, stream in {{"handle": SIDE, "0": 0}}.items():
            y = to(x, consumer, stream=stream, copy=True)
            result[consumer + " " + name] = [
                type(y).__name__, y.shape[0], str(y.dtype), address(y) != address(x), last_route().way, named(y),
            ]
    z = to(x, "numba", stream=SIDE, copy=True)
    result["kept"] = z.stream.owner is not None and z[1:].stream is z.stream
    """)
    assert found.pop("kept")
    for name, (kind, *rest, stream) in found.items():
        assert kind == ("GPUArray" if name.startswith("pycuda") else "DeviceNDArray")
        assert rest == [64, "float32", True, "copied on cuda:0"], name
        assert stream == {"numba handle": 0x7F0000000040, "numba 0": 1}.get(name), name
    assert len(found) == 4
