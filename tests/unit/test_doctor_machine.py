"""The programs and variables that are read of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memguard._tools.doctor.collect import machine

NVCC = "nvcc off the PATH"


def _program(folder: Path, name: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_an_nvcc_that_is_not_on_the_path_is_found_where_the_toolkit_is(tmp_path: Path, variable: str) -> None:
    _program(tmp_path / "cuda-13" / "bin", "nvcc")
    gcc = _program(tmp_path / "bin", "gcc")
    found = machine.tools({"PATH": str(tmp_path / "bin"), variable: "/cuda-13"}, str(tmp_path))
    assert found == {"nvcc": None, "gcc": gcc, "g++": None, "cc": None, NVCC: "/cuda-13/bin/nvcc"}


def test_the_usual_folder_of_the_toolkit_is_looked_into(tmp_path: Path) -> None:
    _program(tmp_path / "usr" / "local" / "cuda" / "bin", "nvcc")
    found = machine.tools({"PATH": "", "CUDA_HOME": "/gone"}, str(tmp_path))
    assert found[NVCC] == os.path.join("/usr/local/cuda", "bin", "nvcc")


def test_one_on_the_path_is_enough_and_none_is_none(tmp_path: Path) -> None:
    assert machine.tools({"PATH": ""}, str(tmp_path)) == dict.fromkeys(("nvcc", "gcc", "g++", "cc"))
    nvcc = _program(tmp_path / "usr" / "local" / "cuda" / "bin", "nvcc")
    assert NVCC not in machine.tools({"PATH": os.path.dirname(nvcc)}, str(tmp_path))


def test_the_environment_of_conda_is_read() -> None:
    assert machine.environment({"CONDA_PREFIX": "/conda/envs/train", "CONDA_EXE": "/conda/bin/conda"}) == {
        "CONDA_PREFIX": "/conda/envs/train"
    }
