"""What tests/gpu holds memguard to, without a GPU: NVML from another process, refusals that are tried, CUPTI."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import independent

from bench import sampler
from bench.child import Sampler
from bench.programs import cupti

pytestmark = pytest.mark.long  # no version of what is installed changes what this code does

MIB, GIB, PAGE = 1 << 20, 1 << 30, 2 << 20
Result = dict[str, Any]


# The sampler


def test_a_summary_names_the_longest_gap_and_the_most_bytes() -> None:
    found = sampler.summary([(1.0, 5), (1.05, 9), (1.164, 7), (1.2, 8)], 0.05, failed=2)
    assert found == {
        "samples": 4, "interval_ms": 50.0, "longest_gap_ms": 114.0, "seconds": 0.2, "failed": 2, "max_bytes": 9,
    }  # fmt: skip
    assert sampler.summary([], 0.05)["longest_gap_ms"] == 0 and sampler.summary([], 0.05)["samples"] == 0


FAKE = """
import os, time
class Process:
    def __init__(self, pid): self.pid, self.usedGpuMemory = pid, 1000 + os.getpid()
calls = 0
def nvmlInit(): pass
def nvmlDeviceGetHandleByIndex(number): return number
def nvmlDeviceGetComputeRunningProcesses(handle):
    global calls
    calls += 1
    if calls == 3: raise OSError("no answer")
    return [Process(4711), Process(1)]
"""


def test_the_sampler_is_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent holds its GIL meanwhile, which stops a thread of it and not another process."""
    (tmp_path / "pynvml.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    looking = Sampler(0.02)
    looking.start(4711)
    until = time.monotonic() + 0.8
    while time.monotonic() < until:
        sum(range(1000))
    seen = looking.stop()
    assert seen["max_bytes"] > 1000 and seen["max_bytes"] != 1000 + os.getpid()
    assert seen["samples"] >= 8 and seen["failed"] == 1 and 0.1 <= seen["seconds"] <= 5
    assert seen["longest_gap_ms"] >= 20


def test_without_nvml_and_without_a_start_the_sampler_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text("def nvmlInit(): raise OSError('no NVML')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    looking = Sampler()
    looking.start(1)
    assert looking.stop()["samples"] == 0
    assert Sampler().stop()["samples"] == 0
    (tmp_path / "pynvml.py").write_text("import os\nos._exit(3)\n")
    looking = Sampler()
    looking.start(1)
    assert looking.stop() == sampler.summary([], 0.05), "it died, and that is not the test's end"


# Refusals that are tried, on a driver of this file's own


class Driver:
    """Above 1 MiB whole pages, else pieces of 512 bytes in slabs of a page, the first with room: as CUDA's does."""

    def __init__(self) -> None:
        self.slabs: list[int] = []
        self.large = 0

    def held(self) -> int:
        return self.large + PAGE * sum(1 for used in self.slabs if used)

    def take(self, size: int) -> Callable[[], None]:
        if size > MIB:
            pages = -(-size // PAGE) * PAGE
            self.large += pages
            return lambda: self._give(pages)
        piece = -(-size // 512) * 512
        at = next((n for n, used in enumerate(self.slabs) if used + piece <= PAGE), len(self.slabs))
        if at == len(self.slabs):
            self.slabs.append(0)
        self.slabs[at] += piece

        def give() -> None:
            self.slabs[at] -= piece

        return give

    def _give(self, pages: int) -> None:
        self.large -= pages


class Refused(Exception):
    pass


class Capped:
    """A framework that refuses what would pass its cap, `early` bytes too soon. It frees what Python lets go of."""

    def __init__(self, cap: int, early: int = 0) -> None:
        self.driver, self.cap, self.early = Driver(), cap, early

    def take(self, size: int) -> Any:
        give = self.driver.take(size)
        if self.driver.held() > self.cap - self.early:
            give()
            raise Refused

        class Block:
            def __del__(self) -> None:
                give()

        return Block()

    def resize(self, cap: int) -> None:
        self.cap = cap


def tried(framework: Capped, rounds: int, rng: random.Random) -> Result:
    cap, live, found = framework.cap, [], []
    for number in range(rounds):
        low, high = (1, MIB) if number % 2 else (MIB + 1, 8 * MIB)
        rng.shuffle(live)
        del live[: rng.randint(1, 1 + len(live) // 4)]
        while True:
            size = rng.randint(low, high)
            try:
                live.append(framework.take(size))
            except Refused:
                break
        found.append(independent.trial(size, cap, framework.driver.held, framework.take, Refused, framework.resize))
        assert framework.cap == cap, "it has its own cap again"
    return {"name": "x", "beside": False, "cap": cap, "tried": found, "foreign": []}


@pytest.mark.parametrize("seed", range(10))
def test_refusals_at_the_cap_are_right_and_a_page_early_is_found(seed: int) -> None:
    """800 refusals: half by an allocator that uses its cap to the last page, half by one that stops a page early."""
    good, figure = independent.refused_rightly(tried(Capped(64 * MIB), 40, random.Random(seed)))
    assert good and figure.startswith("40 of 40 right"), figure
    found = tried(Capped(64 * MIB, early=PAGE), 40, random.Random(seed))
    good, figure = independent.refused_rightly(found)
    assert not good and "when granted" in figure
    assert sum(one["would_hold"] <= found["cap"] for one in found["tried"]) >= 10, "not by chance"


def test_a_request_that_no_cap_allows_is_a_wrong_refusal() -> None:
    framework = Capped(64 * MIB, early=1 << 40)
    one = independent.trial(5, 64 * MIB, framework.driver.held, framework.take, Refused, framework.resize)
    assert one["grown"] == 0 and one["raised_by"] >= 256 * MIB and framework.cap == 64 * MIB
    found = {"name": "x", "beside": False, "cap": 64 * MIB, "tried": [one] * 40, "foreign": []}
    assert not independent.refused_rightly(found)[0]


def test_only_the_gaps_in_cupys_slabs_may_pass_a_cap() -> None:
    one = {"bytes": 5, "held": GIB + 20 * MIB, "raised_by": PAGE, "grown": PAGE, "would_hold": GIB + 22 * MIB}
    for name, beside, good in (("cupy", False, True), ("cupy", True, False), ("pycuda", False, False)):
        found = {"name": name, "beside": beside, "cap": GIB, "tried": [one] * 40, "foreign": []}
        assert independent.refused_rightly(found)[0] == good, name
        found["tried"] = [{**one, "held": GIB + 60 * MIB}] * 40
        assert not independent.refused_rightly(found)[0]


def test_freed_memory_is_compared_with_the_drivers_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    framework = Capped(GIB)
    monkeypatch.setattr(independent, "bytes_now", lambda: framework.driver.held() + 600 * MIB)
    live: list[int] = []

    def take(size: int) -> Any:
        live.append(size)
        return framework.take(size)

    def row(part: int = 1) -> Result:
        return {"held": framework.driver.held() // part, "in_use": sum(live)}

    found = independent.counted(take, row, lambda: None)
    for step in ("large", "small", "emptied"):
        good, figure = independent.agrees(found[step], 0, MIB)
        assert good, (step, figure)
    assert found["emptied"]["nvml"][0] == 600 * MIB and len(live) == 424
    good, figure = independent.in_use_is_live(found["small"])
    assert good and found["small"]["asked"] == sum(live), figure
    missing = independent.counted(take, lambda: row(2), lambda: None)
    assert not independent.agrees(missing["large"], 2 * MIB, MIB)[0]
    block = framework.take(100 * MIB)
    held = framework.driver.held

    def empty() -> None:
        nonlocal block
        block = None

    assert independent.agrees(independent.emptied("x", held, empty), 0, 100 * MIB)[0]


# CUPTI's records


def test_cuptis_allocations_are_summed_by_library() -> None:
    """100 random histories against a count by hand: releases come in any order, addresses are taken again."""
    rng = random.Random(3)
    sources = ["/x/libc10_cuda.so", "libtensorflow_cc.so.2", "/y/xla_cuda_plugin.so", "runtime.cpython-312.so",
               "_driver.cpython-312-linux-gnu.so", "cydriver.cpython-312.so", "libcublas.so.13", None]  # fmt: skip
    names = ["torch", "tensorflow", "jax", "cupy", "pycuda", "numba", "libcublas.so.13", "unknown"]
    for _ in range(100):
        records: list[tuple[Any, ...]] = []
        live: dict[int, tuple[str, int]] = {}
        for at in range(200):
            if live and rng.random() < 0.4:
                address = rng.choice(list(live))
                del live[address]
                records.append((at, 2, 3, address, 0, None))
            else:
                number, size, kind = rng.randrange(8), rng.choice([512, MIB, MIB + 1, 20 * MIB]), rng.choice([3, 3, 2])
                address = rng.choice([n for n in range(50) if n not in live])
                records.append((at, 1, kind, address, size, sources[number]))
                if kind == 3:
                    live[address] = names[number], size if size <= MIB else -(-size // PAGE) * PAGE
        rng.shuffle(records)
        expected: dict[str, int] = {}
        for name, size in live.values():
            expected[name] = expected.get(name, 0) + size
        assert cupti.live_bytes(records, 1, 2, 3) == expected
