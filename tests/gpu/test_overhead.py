"""Is what libraries take at their first use overhead, and is a raw leak beside live frameworks unaccounted and said?

Answers: how much each first use takes on this GPU and whether the row's figure fits it; whether a raw `cuMemAlloc` is
seen to the page; whether quiet work of several frameworks leaves anything unaccounted. The control leaks through a
framework and through nothing at all: it must not be said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]
MIB = 1 << 20
BEGIN = """
import ctypes, time
guard = memguard.init({"version": 1, "device": {"limit": "16GiB"}, "monitor": MONITOR,
    "frameworks": {"torch": {"limit": "3GiB"}, "cupy": {"limit": "3GiB"}, "numba": {"limit": "1GiB"}}})
said = []
memguard.on_event(lambda event: said.append([time.monotonic(), event.kind, event.framework, event.text]))
import cupy, numpy, torch
from numba import cuda
libcuda = ctypes.CDLL("libcuda.so.1")
def raw(size):
    address = ctypes.c_uint64()
    assert libcuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
    return address
def free(address): assert libcuda.cuMemFree_v2(address) == 0
def row():
    torch.cuda.synchronize()
    part = memguard.ledger().devices[0]
    return [part.row("overhead").bytes, part.row("unaccounted").bytes]
def step(name, work):
    before = row()
    kept.append(work())
    time.sleep(PAUSE)
    after = row()
    result.setdefault("steps", []).append([name, after[0] - before[0], after[1] - before[1]])
kept, PAUSE = [], 0.0
first = torch.zeros(1, device="cuda"); row()
second = cupy.zeros(1); row()
third = cuda.device_array(1); row()
"""
QUIET = BEGIN.replace(', "monitor": MONITOR', "")
WORK = """
a = torch.ones((512, 512), device="cuda")
b = cupy.ones((512, 512), cupy.float32)
step("torch cuBLAS", lambda: a @ a)
images, filters = torch.ones((4, 3, 32, 32), device="cuda"), torch.ones((8, 3, 3, 3), device="cuda")
step("torch cuDNN", lambda: torch.nn.functional.conv2d(images, filters))
def backward():
    w = torch.ones((512, 512), device="cuda", requires_grad=True)
    (a @ w).sum().backward()
    return w
step("torch backward", backward)
step("torch cuSOLVER", lambda: torch.linalg.svd(torch.rand((64, 64), device="cuda")))
step("torch cuFFT", lambda: torch.fft.fft(a))
step("cupy cuBLAS", lambda: b @ b)
step("cupy cuFFT", lambda: cupy.fft.fft(b))
step("cupy cuSOLVER", lambda: cupy.linalg.svd(cupy.random.rand(64, 64)))
step("cupy kernels", lambda: [cupy.sin(b), cupy.sort(b), b.sum()])
step("torch kernels", lambda: [torch.sin(a), torch.sort(a), a.sum()])
"""


@pytest.mark.parametrize("pause", [0.0, 2.5])
def test_first_uses_of_libraries_are_overhead_and_leave_nothing_unaccounted(run: Run, pause: float) -> None:
    found = run(QUIET.replace("PAUSE = [], 0.0", f"PAUSE = [], {pause}") + WORK + "result['end'] = row()")
    unexplained = [step for step in found["steps"] if abs(step[2]) > 4 * MIB]
    assert not unexplained, f"{unexplained} of {found['steps']}"
    assert abs(found["end"][1]) <= 16 * MIB, found


@pytest.mark.parametrize("mib", [2, 126, 256, 512, 1024])
def test_a_raw_allocation_after_work_is_unaccounted_within_2_mib(run: Run, mib: int) -> None:
    """2 MiB is the control: it may pass for kernels that are loaded late."""
    found = run(
        QUIET
        + WORK
        + f"""
before = row()
address = raw({mib} * MIB)
during = row()
free(address)
result["found"] = [during[1] - before[1], row()[1] - before[1]]
"""
    )
    taken, after = found["found"]
    assert mib == 2 or abs(taken - mib * MIB) <= 2 * MIB, found
    assert abs(after) <= 2 * MIB, found


RAW = """
def raws(sizes):
    for size in sizes:
        before = row()
        address = raw(size * MIB)
        during = row()
        free(address)
        result.setdefault("raws", []).append([size] + [(part[1] - before[1]) / MIB for part in (during, row())])
"""


def wrong(found: dict[str, Any]) -> list[list[float]]:
    """Raw memory that was not unaccounted within 2 MiB, or did not go with its free: MiB taken, seen, and left."""
    return [one for one in found["raws"] if abs(one[1] - one[0]) > 2 or abs(one[2]) > 2]


def test_a_raw_allocation_as_large_as_a_first_use_is_unaccounted_and_the_first_use_then_is_overhead(run: Run) -> None:
    """18 sizes beside frameworks that have used nothing yet; then all of their first uses."""
    found = run(
        QUIET
        + RAW
        + "raws([2, 4, 6, 8, 10, 12, 16, 20, 24, 30, 60, 64, 66, 80, 98, 100, 130, 1024])"
        + WORK
        + "result['end'] = row()"
    )
    assert len(found["raws"]) == 18 and not wrong(found), wrong(found)
    unexplained = [step for step in found["steps"] if abs(step[2]) > 4 * MIB]
    assert not unexplained, f"{unexplained} of {found['steps']}"


def test_a_raw_allocation_between_first_uses_is_unaccounted(run: Run) -> None:
    """After each step of the work, while first uses of others are still to come: four sizes each."""
    # A library may take the memory of its first use for a second after a reading has seen it.
    raws = "time.sleep(0.2); row(); time.sleep(1.1); raws([8, 16, 64, 98])"
    work = "\n".join(f"{line}\n{raws}" if line.startswith("step(") else line for line in WORK.splitlines())
    found = run(QUIET + RAW + work)
    assert len(found["raws"]) == 40 and not wrong(found), wrong(found)
    unexplained = [step for step in found["steps"] if abs(step[2]) > 4 * MIB]
    assert not unexplained, f"{unexplained} of {found['steps']}"


def test_what_was_entered_is_seen_on_a_real_process(run: Run) -> None:
    """Each library by its own use and by no other, and kernels."""
    found = run(
        QUIET
        + """
from memguard._devices import loaded_libraries
def entered(name, work):
    before = dict(loaded_libraries.entry_detector.entries())
    kept.append(work())
    torch.cuda.synchronize()
    loaded_libraries.entry_detector.libraries()
    after = dict(loaded_libraries.entry_detector.entries())
    result[name] = sorted(door for door, count in after.items() if count > before.get(door, 0))
a = torch.ones((512, 512), device="cuda")
entered("nothing", lambda: None)
entered("raw", lambda: raw(64 * MIB))
entered("matmul", lambda: a @ a)
entered("again", lambda: a @ a)
images, filters = torch.ones((4, 3, 32, 32), device="cuda"), torch.ones((8, 3, 3, 3), device="cuda")
entered("conv", lambda: torch.nn.functional.conv2d(images, filters))
entered("svd", lambda: torch.linalg.svd(torch.rand((64, 64), device="cuda")))
entered("fft", lambda: torch.fft.fft(a))
b = cupy.ones((512, 512), cupy.float32)
entered("cupy matmul", lambda: b @ b)
entered("kernels", lambda: a.cumsum(0))
entered("raw again", lambda: raw(64 * MIB))
begun = time.perf_counter()
for _ in range(1000): loaded_libraries.entry_detector.entries()
result["seconds"] = time.perf_counter() - begun
"""
    )
    assert found["nothing"] == found["raw"] == found["again"] == found["raw again"] == [], found
    assert found["kernels"] == ["kernels"] and "cublas" in found["cupy matmul"], found
    for name, library in {"matmul": "cublas", "conv": "cudnn", "svd": "cusolver", "fft": "cufft"}.items():
        assert library in found[name], found
    assert found["seconds"] < 2, "for 1,000 looks"


LEAK = (
    BEGIN.replace("MONITOR", "{}")
    + WORK
    + """
time.sleep(3)
said.clear()
before, begun, leaked = row(), time.monotonic(), 0
while time.monotonic() - begun < 10:
    wanted = int((time.monotonic() - begun) * 16) // 2 * 2 * MIB
    while leaked < wanted:
        LEAK_IT
        leaked += 2 * MIB
    time.sleep(0.05)
result["leaked"], after = leaked, row()
result["unaccounted"], result["overhead"] = after[1] - before[1], after[0] - before[0]
result["leaks"] = [[at - begun, text] for at, kind, who, text in said if kind == "leak" and who is None]
"""
)


def test_a_raw_leak_of_16_mib_per_second_is_unaccounted_and_said_within_10_s(run: Run) -> None:
    found = run(LEAK.replace("LEAK_IT", "kept.append(raw(2 * MIB))"))
    assert found["unaccounted"] >= found["leaked"] - 32 * MIB, found
    assert found["leaks"] and found["leaks"][0][0] <= 10, found


@pytest.mark.parametrize(
    "how", ["torch.empty(2 * MIB, dtype=torch.uint8, device='cuda')", "cupy.empty(2 * MIB, cupy.uint8)", "None"]
)
def test_what_a_framework_keeps_and_rest_are_said_to_be_no_leak_outside_it(run: Run, how: str) -> None:
    """The control of the test before it."""
    found = run(LEAK.replace("LEAK_IT", f"kept.append({how})"))
    assert found["leaks"] == [] and abs(found["unaccounted"]) <= 4 * MIB, found


def test_the_loaded_libraries_of_a_real_process_are_found(run: Run) -> None:
    found = run(
        QUIET
        + """
from memguard._devices import loaded_libraries
result["before"] = sorted(loaded_libraries.libraries())
"""
        + WORK
        + """
result["after"] = sorted(loaded_libraries.libraries())
begun = time.perf_counter()
for _ in range(20): loaded_libraries.libraries()
result["seconds"] = time.perf_counter() - begun
"""
    )
    assert set(found["after"]) == {"cublas", "cudnn", "cufft", "cusolver"}, found
    assert "cudnn" not in found["before"]
    assert found["seconds"] < 2, "for 20 looks"
