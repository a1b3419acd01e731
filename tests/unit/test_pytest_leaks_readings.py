"""What the check for leaks makes of a process's bytes: the ledger's own reader over figures that are set by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from test_ledger_reader import Setting

from memguard._base.types import Usage
from memguard._base.units import GIB, MIB
from memguard._devices.simulated import SimulatedHost
from memguard._ledger.reader import LedgerReader
from memguard._tools.testing import leaks
from memguard._tools.testing.budgets import Before
from memguard._tools.testing.leaks import Check, Watcher


class Host(SimulatedHost):
    """Real to all who ask, with libraries that are entered by hand."""

    entered: tuple[str, ...] = ()

    def libraries(self) -> frozenset[str]:
        return frozenset({"cublas", "cusolver"})

    def entries(self, mark: bool = True) -> frozenset[tuple[str, int]]:
        return frozenset((name, int(name in self.entered)) for name in ("cublas", "cusolver", "kernels"))


class Process(Setting):
    """torch has begun, and has arrays and a cache already."""

    kind = Host
    host: Host

    def __init__(self) -> None:
        super().__init__()
        self.held = self.in_use = 0
        self.live()
        self.torch_takes(GIB, GIB // 2)

    def torch_takes(self, held: int, in_use: int) -> None:
        self.held, self.in_use = self.held + held, self.in_use + in_use
        self.torch.usages[self.gpu.uuid] = Usage(self.held, self.in_use, self.held - self.in_use)
        self.host.take(self.gpu, held)

    def raw(self, size: int) -> None:
        self.host.take(self.gpu, size)

    def enters(self, library: str, size: int) -> None:
        self.host.entered = (*self.host.entered, library)
        self.host.take(self.gpu, size)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    monkeypatch.setattr(leaks, "PAUSES", (0.0,))
    return Process()


@pytest.fixture(params=["no budget", "a budget", "a budget that begins in the test"])
def check(request: pytest.FixtureRequest, process: Process, monkeypatch: pytest.MonkeyPatch) -> Check:
    watcher = Watcher()
    own = LedgerReader(process.host, ("torch",), process.warnings.append)
    own._created["torch"] = process.torch
    watcher._reader, watcher._parts = own, process.parts

    def sample() -> Any:
        return SimpleNamespace(devices=(process.reader.sample(process.part, process.stubs),))

    guard = SimpleNamespace(
        active=True, plan=SimpleNamespace(devices=process.parts), sample=sample, host=SimpleNamespace(simulated=False)
    )

    class Session:
        pass

    session = Session()
    session.guard = guard  # type: ignore[attr-defined]
    now = Before(session if request.param == "a budget" else None)
    monkeypatch.setattr(leaks, "active", lambda: now)
    found = Check(watcher, MIB)
    if request.param == "a budget that begins in the test":
        now = Before(session)
        found.begun()
    return found


@pytest.mark.parametrize(
    ("does", "left"),
    [
        (lambda p: p.torch_takes(256 * MIB, 256 * MIB), [("torch", 256)]),
        (lambda p: p.torch_takes(0, 256 * MIB), [("torch", 256)]),
        (lambda p: p.torch_takes(GIB, 0), []),
        (lambda p: p.enters("cublas", 66 * MIB), []),
        (lambda p: p.enters("cusolver", 98 * MIB), []),
        (lambda p: (p.enters("cublas", 66 * MIB), p.enters("cusolver", 98 * MIB)), []),
        (lambda p: p.enters("kernels", 30 * MIB), []),
        (lambda p: p.raw(512 * MIB), [("", 512)]),
        (lambda p: (p.raw(512 * MIB), p.torch_takes(GIB, 256 * MIB)), [("torch", 256), ("", 512)]),
        (lambda p: (p.enters("cusolver", 98 * MIB), p.torch_takes(GIB, 256 * MIB)), [("torch", 256)]),
        (lambda p: None, []),
    ],
    ids=[
        "array", "array in its cache", "cache", "cuBLAS", "cuSOLVER", "both", "kernels", "raw", "raw and array",
        "cuSOLVER and array", "nothing",
    ],
)  # fmt: skip
def test_arrays_and_raw_bytes_are_left_and_nothing_else(
    check: Check, process: Process, does: Callable[[Process], object], left: list[tuple[str, int]]
) -> None:
    does(process)
    found = check.leaks(None)
    assert [(one.framework, (one.after - one.before) // MIB) for one in found] == left
