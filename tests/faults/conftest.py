"""The real nvidia-ml-py over a stub library, in processes of their own.

gcc is needed: without it these tests fail, so that they are never thought to have run.
"""

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
from stub_gpus import ONE, Run

ROOT = Path(__file__).resolve().parents[2]
PREAMBLE = """
import json, os, pathlib, sys
import memguard
from memguard._devices.nvml import Nvml
from memguard.errors import DeviceError
GIB, MIB = 1 << 30, 1 << 20
result = {}

def scenario(**changes):
    path = pathlib.Path(os.environ["NVML_STUB"])
    lines = dict(line.split("=", 1) for line in path.read_text().splitlines()) | changes
    path.write_text("".join(f"{key}={value}\\n" for key, value in lines.items()))

def refused(call):
    try:
        call()
    except DeviceError as error:
        return str(error)
    return None
"""


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder with the stub library, built once for each set of missing functions."""
    built: dict[tuple[str, ...], Path] = {}

    def make(*without: str) -> Path:
        if without not in built:
            folder = tmp_path_factory.mktemp("nvml")
            flags = [f"-DNO_{name}" for name in without]
            source = str(Path(__file__).with_name("nvml_stub.c"))
            library = str(folder / "libnvidia-ml.so.1")
            subprocess.run(["gcc", "-shared", "-fPIC", *flags, "-o", library, source], check=True)
            built[without] = folder
        return built[without]

    return make


@pytest.fixture(scope="session")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the stub of libcuda."""
    folder = tmp_path_factory.mktemp("cuda")
    source = str(Path(__file__).with_name("cuda_stub.c"))
    flags = ["-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, "-o", str(folder / "libcuda.so.1"), source], check=True)
    return folder


@pytest.fixture
def without_cuda(tmp_path: Path, build: Callable[..., Path]) -> dict[str, str]:
    """An environment with the stub of NVML and a libcuda that cannot be loaded, whatever this machine has."""
    (tmp_path / "no-cuda").mkdir()
    (tmp_path / "no-cuda" / "libcuda.so.1").write_text("no library")
    return {"LD_LIBRARY_PATH": f"{tmp_path / 'no-cuda'}{os.pathsep}{build()}"}


@pytest.fixture
def run(build: Callable[..., Path], tmp_path: Path) -> Run:
    """Run code over a scenario; it leaves its findings in `result`."""

    def call(
        code: str,
        gpus: dict[str, object] = ONE,
        *,
        without: tuple[str, ...] = (),
        library: Path | None = None,
        env: dict[str, str] | None = None,
        **changes: object,
    ) -> dict[str, Any]:
        scenario = tmp_path / "scenario"
        scenario.write_text("".join(f"{key}={value}\n" for key, value in {**gpus, **changes}.items()))
        environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
        environment |= {
            "LD_LIBRARY_PATH": str(library or build(*without)),
            "NVML_STUB": str(scenario),
            "NVML_STUB_LOG": str(tmp_path / "log"),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            **(env or {}),
        }
        program = f"{PREAMBLE}\n{textwrap.dedent(code)}\nprint('RESULT', json.dumps(result), flush=True)"
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, env=environment
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
        found: dict[str, Any] = json.loads(line[7:])
        found["stderr"] = done.stderr
        log = tmp_path / "log"
        found["log"] = [entry.split() for entry in log.read_text().splitlines()] if log.exists() else []
        return found

    return call
