"""GPUs that use the machine's memory, of which NVML says NOT_SUPPORTED: the real nvidia-ml-py over stub libraries."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stub_gpus import GIB, MIB, ONE, TWO, UUIDS, Run

from memguard._devices import proc

TOTAL = 124_610
BUDGET = """
import ctypes
from memguard import api
from memguard._devices import contexts, libcuda, proc
BUDGET = {"version": 1, "device": {"limit": "40GiB"}, "frameworks": {"pycuda": {"share": "50%"}}}
def meminfo(size):
    proc.available_memory = lambda root="/": size
def framework():
    # what a framework does: it initialises CUDA and makes the primary context
    ctypes.CDLL("libcuda.so.1").cuInit(0)
    contexts.active = lambda ordinal: True
def rows():
    part, = memguard.ledger().devices
    return {row.name: row.bytes for row in part.rows} | {"sum": part.sum, "process": part.process}
meminfo(60 * GIB)
"""
SPARK = {**ONE, "name0": "NVIDIA GB10", "arch0": 10, "memory": 3, "memory_v2": 3}
Environment = Callable[..., dict[str, str]]


@pytest.fixture
def shown(cuda: Path, build: Callable[..., Path]) -> Environment:
    """The environment of a process to which CUDA shows these GPUs."""

    def environment(*uuids: str, integrated: int = 1, free: int = 20 << 10, **more: str) -> dict[str, str]:
        return {
            "LD_LIBRARY_PATH": f"{cuda}{os.pathsep}{build()}", "CUDA_STUB_UUIDS": ",".join(uuids or UUIDS[:1]),
            "CUDA_STUB_INTEGRATED": str(integrated), "CUDA_STUB_TOTAL": str(TOTAL), "CUDA_STUB_FREE": str(free), **more,
        }  # fmt: skip

    return environment


def test_a_budget_before_any_context_asks_the_machine_and_loads_nothing(run: Run, shown: Environment) -> None:
    found = run(
        BUDGET
        + """
guard = memguard.init(BUDGET)
device = guard.plan.devices[0].device
result["device"] = [device.total, device.reserved, device.unified, device.ordinal, device.name]
result["memory"] = guard.host.memory(device)
result["rows"] = rows()
result["text"] = str(memguard.ledger())
sample = guard.sample().devices[0]
result["sample"] = [sample.total, sample.used, sample.free, sample.process]
result["untouched"] = [contexts.initialised(), libcuda.already_loaded() is None]
""",
        SPARK,
        env=shown(),
        processes0=f"7:{GIB}",
    )
    assert found["device"] == [TOTAL * MIB, None, True, 0, "NVIDIA GB10"]
    assert found["memory"] == [TOTAL * MIB, None, None, 60 * GIB, None]
    rows = found["rows"]
    assert rows["other processes"] is None and rows["driver reserve"] is None and rows["free"] == 60 * GIB
    assert rows["sum"] == rows["process"] == 0 and "unknown" in found["text"]
    assert found["sample"] == [TOTAL * MIB, None, 60 * GIB, 0]
    assert found["untouched"] == [False, True]


@pytest.mark.parametrize(
    ("available", "cuda_free", "free"),
    [(60, 20, 60), (10, 20, 20), (200, 20, TOTAL / 1024), (None, 20, 20), (0, 0, 0)],
    ids=["file cache", "CUDA knows more", "more than CUDA gives", "no meminfo", "full"],
)
def test_with_a_context_cudas_figure_counts_too(
    run: Run, shown: Environment, available: int | None, cuda_free: int, free: float
) -> None:
    found = run(
        BUDGET
        + f"""
guard = memguard.init(BUDGET)
framework()
meminfo({None if available is None else available * GIB})
device = guard.plan.devices[0].device
result["memory"] = guard.host.memory(device)
result["rows"] = rows()
stub = ctypes.CDLL("libcuda.so.1")
result["depth"] = stub.stub_live(3)
memguard.shutdown()
""",
        SPARK,
        env=shown(free=cuda_free << 10),
        processes0=f"7:{GIB}",
    )
    assert found["memory"] == [TOTAL * MIB, None, None, int(free * GIB), cuda_free * GIB]
    assert found["rows"]["free"] == int(free * GIB) and found["depth"] == 0, "the context was popped again"


def test_the_identity_with_this_process_in_nvmls_list(run: Run, shown: Environment) -> None:
    found = run(
        BUDGET
        + """
guard = memguard.init(BUDGET)
framework()
found = []
for size in (0, 1, 518 * MIB, 700 * MIB, 3 * GIB, 2 * GIB, 64 * MIB):
    scenario(processes0=f"{os.getpid()}:{size},7:{GIB}")
    one = rows()
    own = sum(one[name] or 0 for name in ("pycuda", "overhead", "unaccounted"))
    found.append([one["process"] == size, one["sum"] == size, own == size])
    sample = guard.sample().devices[0]
    found.append([sample.process == size])
result["right"] = all(all(one) for one in found)
result["count"] = len(found)
""",
        SPARK,
        env=shown(),
    )
    assert found["right"] and found["count"] == 14


def test_a_jetson_has_no_list_of_processes(run: Run, shown: Environment) -> None:
    found = run(
        BUDGET
        + """
guard = memguard.init(BUDGET)
result["before"] = rows()
framework()
result["after"] = rows()
result["sample"] = guard.sample().devices[0].process
memguard.require("pycuda", "1GiB")
""",
        {**SPARK, "name0": "Orin (nvgpu)", "arch0": 7},
        env=shown(),
        processes_code=3,
    )
    assert found["before"]["process"] == 0, "without a context it surely holds nothing"
    after = found["after"]
    assert [after[name] for name in ("process", "sum", "unaccounted", "overhead")] == [None] * 4
    assert found["sample"] is None


@pytest.mark.parametrize(
    ("gpus", "env", "says"),
    [
        (SPARK, {"CUDA_STUB_INIT": "803"}, "and CUDA could not be asked\n    fix: run `memguard doctor`"),
        (SPARK, {"CUDA_STUB_INTEGRATED": "0"}, "CUDA does not say that it uses the machine's\n    fix: "),
        (SPARK, {"CUDA_STUB_TOTAL": "0"}, "CUDA does not say that it uses the machine's\n    fix: "),
    ],
    ids=["CUDA does not start", "memory of its own", "no total"],
)
@pytest.mark.parametrize("missing_gpu", ["raise", "warn", "simulate"])
def test_what_cannot_be_budgeted_is_an_error_always(
    run: Run, shown: Environment, gpus: dict[str, object], env: dict[str, str], says: str, missing_gpu: str
) -> None:
    code = BUDGET + f"result['text'] = refused(lambda: memguard.init(BUDGET, missing_gpu={missing_gpu!r}))"
    found = run(code, gpus, env=shown(**env))
    assert "NVML does not report the memory of NVIDIA GB10" in found["text"] and says in found["text"]


def test_a_total_of_zero_is_no_figure(run: Run, shown: Environment) -> None:
    code = BUDGET + "result['device'] = vars(memguard.init(BUDGET).plan.devices[0].device)"
    found = run(code, {**ONE, "total0": 0, "reserved0": 0, "used0": 0}, env=shown())
    assert found["device"]["unified"] and found["device"]["total"] == TOTAL * MIB


def test_one_of_each_kind(run: Run, shown: Environment) -> None:
    """A card in a machine whose own GPU shares its memory: each is shown in its own way."""
    found = run(
        BUDGET
        + """
guard = memguard.init(BUDGET)
result["unified"] = [part.device.unified for part in guard.plan.devices]
ledger = memguard.ledger()
result["sums"] = [part.sum - (0 if part.device.unified else part.device.total) for part in ledger.devices]
result["used"] = [sample.used for sample in guard.sample().devices]
""",
        {**TWO, "denied0": 3, "total1": 80 << 30},
        env=shown(*UUIDS),
    )
    assert found["unified"] == [True, False] and found["sums"] == [0, 0] and found["used"] == [None, 0]


def test_nothing_known_is_an_error_with_its_fix_and_the_monitor_goes_on(run: Run, shown: Environment) -> None:
    found = run(
        BUDGET
        + """
import time
guard = memguard.init({**BUDGET, "monitor": {"interval": "50ms"}})
meminfo(None)
device = guard.plan.devices[0].device
result["text"] = refused(lambda: guard.host.memory(device))
monitor = api.current_session().monitor
time.sleep(0.3)
meminfo(30 * GIB)
end = time.monotonic() + 20
while time.monotonic() < end and not (monitor.last(1) and monitor.last(0)[-1].devices[0].free == 30 * GIB):
    time.sleep(0.05)
result["again"] = monitor.last(0)[-1].devices[0].free
memguard.shutdown()
""",
        SPARK,
        env=shown(),
    )
    assert "/proc/meminfo does not say how much is available\n    fix: mount /proc" in found["text"]
    assert found["again"] == 30 * GIB


# /proc/meminfo, and WSL


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("MemTotal: 127600748 kB\nMemFree: 1 kB\nMemAvailable:   118566368 kB\n", 118566368 << 10),
        ("MemAvailable: 0 kB\n", 0),
        ("MemTotal: 127600748 kB\nMemFree: 1 kB\n", None),
        ("", None), ("\n\n", None), ("MemAvailable:", None), ("MemAvailable: kB", None), ("MemAvailable: -5 kB", None),
        ("MemAvailable: 5", None), ("MemAvailable: 5 MB", None), ("MemAvailable: 5.5 kB", None),
        ("MemAvailable: \u0665 kB", None), ("MemAvailableX: 5 kB", None), ("\0\1\2", None),
    ],
)  # fmt: skip
def test_what_the_machine_has_available(text: str, size: int | None, tmp_path: Path) -> None:
    assert proc.parse_meminfo(text) == size
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text(text, encoding="utf-8")
    assert proc.available_memory(str(tmp_path)) == size


def test_a_machine_without_proc(tmp_path: Path) -> None:
    assert proc.available_memory(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("kernel", "device", "wsl"),
    [
        ("5.15.153.1-microsoft-standard-WSL2", False, True), ("4.4.0-19041-Microsoft", False, True),
        ("6.8.0-45-generic", True, True), ("6.8.0-45-generic", False, False), ("", False, False),
    ],
)  # fmt: skip
def test_what_is_wsl(kernel: str, device: bool, wsl: bool, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    if device:
        (tmp_path / "dev" / "dxg").write_text("")
    assert proc.is_wsl(kernel, str(tmp_path)) is wsl


@pytest.mark.parametrize("wsl", [True, False])
def test_init_says_that_wsl_may_spill(run: Run, build: Callable[..., Path], wsl: bool) -> None:
    found = run(
        f"""
import logging
from memguard._devices import proc
proc.is_wsl = lambda kernel, root="/": {wsl}
logging.basicConfig()
budget = {{"version": 1, "frameworks": {{"pycuda": {{"share": "50%"}}}}}}
memguard.init(budget)
memguard.init(budget)
result["notes"] = memguard.ledger().notes
""",
        processes0="7:na",
    )
    about: list[Any] = [note for note in found["notes"] if note.startswith("this is WSL")]
    assert len(about) == wsl and found["stderr"].count("this is WSL") == wsl
