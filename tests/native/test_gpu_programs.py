"""The programs of tests/gpu/test_pycuda_speed.py, over the stubs of the driver and of NVML: they run to their end."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import stub_driver

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from stub_gpus import ONE, UUIDS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("gpu")
    nvml, scenario = folder / "libnvidia-ml.so.1", folder / "gpus"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(nvml), str(ROOT / "tests" / "faults" / "nvml_stub.c")], check=True
    )
    scenario.write_text("\n".join(f"{key}={value}" for key, value in {**ONE, "driver": "580.0"}.items()) + "\n")
    more = {"NVML_STUB": str(scenario), "CUDA_STUB_UUIDS": UUIDS[0], "CUDA_STUB_MIB": "65536"}
    return {**os.environ, **stub_driver.build(folder), **more, "PYTHONPATH": str(ROOT)}


def of(name: str) -> ModuleType:
    """A module of tests/gpu, which has no package."""
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", ROOT / "tests" / "gpu" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("fill", [10, 90, 99.9])
def test_the_program_that_times_pycuda_fills_and_times(env: dict[str, str], fill: float) -> None:
    code = of("test_pycuda_speed").SPEED.format(fill=fill).replace("range(300)", "range(70)")
    begin = "import json, os\nimport memguard\nGIB, MIB, result = 1 << 30, 1 << 20, {}\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{begin}{code}\nprint('RESULT ' + json.dumps(result))"],
        env=env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.split("RESULT ")[1])
    assert abs(found["filled"] - fill / 100) < 0.01
    assert found["us"].keys() == found["spread"].keys() == {"plain", "user", "mem_alloc"} and found["control"] > 0
