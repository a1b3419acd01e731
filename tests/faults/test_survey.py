"""The doctor's survey of the driver, over stub libraries, broken ones among them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stub_gpus import GIB, MIB, TWO, UUIDS, Run

from memguard._devices import survey
from memguard._tools.doctor.collect import gather
from memguard._tools.doctor.facts import Driver, Facts

SURVEY = """
from memguard._devices import survey
survey.survey(result.update, frozenset({7}))
"""


@pytest.fixture
def surveyed(run: Run, build: Callable[..., Path], cuda: Path) -> Callable[..., Driver]:
    def call(*without: str, env: dict[str, str] | None = None, **changes: Any) -> Driver:
        search = f"{cuda}{os.pathsep}{build(*without)}"
        found = run(SURVEY, TWO, env={"LD_LIBRARY_PATH": search, **(env or {})}, **changes)
        return Driver.model_validate({key: found[key] for key in ("module", "pci", "files", "nvml", "cuda")})

    return call


def test_a_driver_that_works(surveyed: Callable[..., Driver], cuda: Path) -> None:
    found = surveyed(driver="580.159.04", processes0="7:1024,8:2048,8:1024,9:na")
    nvml, driver = found.nvml, found.cuda
    assert nvml.error is None and nvml.driver == "580.159.04" and str(nvml.path).endswith("libnvidia-ml.so.1")
    first, second = nvml.devices
    assert (first.index, first.uuid, first.name, first.mig) == (0, UUIDS[0], "NVIDIA H200", False)
    assert (first.total, first.used) == (143_771 * MIB, 3 * GIB)
    assert first.free == 143_771 * MIB - 615 * MIB - 3 * GIB
    assert first.processes == {"8": 3072, "9": None}, "7 is the doctor's own"
    assert second.uuid == UUIDS[1]
    assert first.vgpu is None and driver.checkpoint is False, "neither the stub NVML nor the stub libcuda knows it"
    assert (driver.path, driver.version, driver.init) == (str(cuda / "libcuda.so.1"), 13000, "CUDA_SUCCESS")
    assert driver.candidates[0] == driver.path
    gpu, part = driver.devices
    assert (gpu.ordinal, gpu.uuid, gpu.capability, gpu.multiprocessors) == (0, UUIDS[0], (9, 0), 132)
    assert (gpu.total, gpu.peers) == (GIB, (1,))
    assert (part.uuid, part.peers) == (UUIDS[1].replace("GPU-", "MIG-"), ())


@pytest.mark.parametrize(("code", "name"), [(100, "CUDA_ERROR_NO_DEVICE"), (77777, "error 77777")])
def test_a_cuda_that_cannot_start(surveyed: Callable[..., Driver], code: int, name: str) -> None:
    found = surveyed(env={"CUDA_STUB_INIT": str(code)})
    assert (found.cuda.init, found.cuda.devices, found.cuda.version) == (name, (), 13000)


def test_an_nvml_that_cannot_start_says_why_by_name(surveyed: Callable[..., Driver]) -> None:
    found = surveyed(init=18)
    assert found.nvml.error == "NVMLError_LibRmVersionMismatch" and found.nvml.text
    assert found.nvml.path is not None and found.nvml.devices == ()
    assert found.cuda.init == "CUDA_SUCCESS"


def test_a_gpu_that_is_refused_is_reported_beside_the_others(surveyed: Callable[..., Driver]) -> None:
    first, second = surveyed(handle0=4).nvml.devices
    assert (first.index, first.error, first.uuid) == (0, "NVMLError_NoPermission", "")
    assert second.error is None and second.uuid == UUIDS[1]


def test_figures_that_an_old_driver_lacks_are_unknown(surveyed: Callable[..., Driver]) -> None:
    found = surveyed("MEMORY_V2", "PROCESSES_V3", driver="470.82.01")
    assert found.nvml.devices[0].used is not None and found.nvml.devices[0].mode is None


def test_bytes_of_drivers_that_swap_fields_are_ignored(surveyed: Callable[..., Driver]) -> None:
    found = surveyed(driver="535.54.03", processes0="8:2048")
    assert found.nvml.devices[0].processes == {"8": None}


def test_another_library_under_cudas_name(run: Run, build: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "empty.c").write_text("int nothing;")
    library = str(tmp_path / "libcuda.so.1")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, str(tmp_path / "empty.c")], check=True)
    found = run(SURVEY, env={"LD_LIBRARY_PATH": f"{tmp_path}{os.pathsep}{build()}"})["cuda"]
    assert "cuInit" in found["error"] and found["path"] == library and "init" not in found


def test_no_libraries_at_all(run: Run, tmp_path: Path) -> None:
    found = run(SURVEY, library=tmp_path)
    if found["cuda"].get("path") is None:  # else this machine has a driver of its own
        assert "libcuda.so.1" in found["cuda"]["error"]
        assert found["nvml"]["error"] == "NVMLError_LibraryNotFound"


def facts(tmp_path: Path, cuda: Path, nvml: Path, timeout: float, **env: str) -> Facts:
    (tmp_path / "scenario").write_text("".join(f"{key}={value}\n" for key, value in TWO.items()))
    environ = {**os.environ, "LD_LIBRARY_PATH": f"{cuda}:{nvml}", "NVML_STUB": str(tmp_path / "scenario"), **env}
    python = [sys.executable]
    return gather.facts(None, frameworks=[], timeout=timeout, python=python, environ=environ)


@pytest.mark.parametrize(
    ("does", "init"), [("nothing", "CUDA_SUCCESS"), ("crash", "ended by SIGSEGV"), ("hang", "no answer in 3 s")]
)
def test_a_driver_that_crashes_or_hangs_is_reported(
    tmp_path: Path, cuda: Path, build: Callable[..., Path], does: str, init: str
) -> None:
    started = time.monotonic()
    found = facts(tmp_path, cuda, build(), 3, CUDA_STUB_DOES=does).driver
    assert time.monotonic() - started < 20
    assert (found.cuda.init, found.cuda.version) == (init, 13000)
    assert len(found.nvml.devices) == 2
    assert len(found.cuda.devices) == (2 if does == "nothing" else 0)


def test_the_kernel_module_and_the_bus(tmp_path: Path) -> None:
    assert survey.module(str(tmp_path)) is None and survey.pci(str(tmp_path)) == []
    module = tmp_path / "sys/module/nvidia"
    module.mkdir(parents=True)
    assert survey.module(str(tmp_path)) == ""
    (module / "version").write_text("535.104.05\n")
    assert survey.module(str(tmp_path)) == "535.104.05"
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    for line, number in (
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)", "580.159.04"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Oct 27 21:21:55 UTC 2021", "470.82.01"),
        ("nonsense", ""),
    ):
        version.write_text(f"{line}\nGCC version:  gcc version 15.3.0 (GCC)\n")
        assert survey.module(str(tmp_path)) == number
    for address, vendor, kind in (
        ("0000:00:06.0", "0x10de", "0x030200"),
        ("0000:00:07.0", "0x10de", "0x068000"),
        ("0000:00:08.0", "0x1002", "0x030000"),
    ):
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "class").write_text(kind + "\n")
    (tmp_path / "sys/bus/pci/devices/0000:00:09.0").mkdir()
    assert survey.pci(str(tmp_path)) == ["0000:00:06.0"]


def test_device_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    found = survey.files(["/dev/null", "/dev/tty", str(tmp_path / "*"), "/dev/no-such-thing"])
    assert found["/dev/null"] == "ok"
    assert str(tmp_path / "plain") not in found
    assert found.get("/dev/tty", "ENXIO") in ("ok", "ENXIO", "ENODEV")


CACHE = """3 libs found in cache `/etc/ld.so.cache'
\tlibcuda.so.1 (libc6,x86-64, OS ABI: Linux 2.4.0) => {a}/libcuda.so.1
\tlibcuda.so.1 (libc6,AArch64) => {b}/libcuda.so.1
\tlibcuda.so.1 (libc6) => {c}/libcuda.so.1
\tlibcuda.so (libc6,x86-64) => {d}/libcuda.so
"""


def test_every_libcuda_that_the_loader_could_find(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in "abcde"}
    for folder in folders.values():
        folder.mkdir()
        (folder / "libcuda.so.1").touch()
    (tmp_path / "link").symlink_to(folders["a"])
    cache = CACHE.format(**folders)
    found = survey.candidates(f"{folders['e']}::{tmp_path}/none", cache, [str(tmp_path / "link"), str(folders["d"])])
    assert found == [str(folders[name] / "libcuda.so.1") for name in "eabd"]


@pytest.mark.parametrize(("mode", "virtual"), [(0, False), (1, False), (2, True), (3, False)])
def test_a_virtual_gpu_is_none_that_was_passed_on_whole(
    surveyed: Callable[..., Driver], mode: int, virtual: bool
) -> None:
    assert surveyed(virtual0=str(mode)).nvml.devices[0].vgpu is virtual
