"""A guard and its threads."""

from __future__ import annotations

import importlib
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from guards import BUDGET, TORCH, cap_of, hooks, replaced, simulated, start

import memguard
from memguard import api
from memguard._base.types import Device, Usage
from memguard._frameworks.base import Framework
from memguard._frameworks.simulated.adapter import SimulatedFramework
from memguard._runtime import runtime
from memguard.errors import CapNotApplied, MemguardError

pytestmark = pytest.mark.usefixtures("nothing_stays")

# threads


def patient(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


def test_threads_may_call_everything_at_once() -> None:
    strange: list[BaseException] = []
    switch = sys.getswitchinterval()
    done = [0]

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            try:
                chance = rng.randrange(9)
                if chance == 0:
                    start(rng.choice([BUDGET, TORCH]), replace=rng.random() < 0.5)
                elif chance == 1:
                    memguard.shutdown()
                elif chance == 2:
                    memguard.require("torch", rng.choice(["1GiB", "5GiB"]))
                elif chance == 3:
                    memguard.resize("torch", rng.choice(["2GiB", "4GiB"]))
                elif chance == 4:
                    memguard.trim()
                elif chance == 5:
                    with memguard.workload("w", framework="torch", needs="1GiB"):
                        time.sleep(0)
                elif chance == 6:
                    str(api.current())
                elif chance == 7 and seed == 0:
                    framework = api.current().frameworks.get("pycuda")
                    if isinstance(framework, SimulatedFramework):
                        framework.allocate(1000)
                else:
                    for part in memguard.ledger().devices:
                        if sum(row.bytes or 0 for row in part.rows) != part.device.total:
                            raise AssertionError("the rows do not add up")
                done[0] += 1
            except MemguardError:
                done[0] += 1
            except BaseException as error:
                strange.append(error)
                return

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(8)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(switch)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    assert strange == []
    memguard.shutdown()
    assert hooks() == []


def test_an_import_that_waits_while_the_budget_is_shut_down() -> None:
    guard = start(TORCH)
    torch = simulated(guard, "torch")
    errors: list[BaseException] = []

    def importing() -> None:
        try:
            torch.start_importing()
        except BaseException as error:
            errors.append(error)

    with guard.caps.lock:
        thread = threading.Thread(target=importing, daemon=True)
        thread.start()
        assert patient(lambda: hooks() == [])  # its callback is on its way, and waits for us
        time.sleep(0.02)
        memguard.shutdown()
    thread.join(5)
    assert errors == [] and not thread.is_alive()
    assert cap_of(torch) is None, "a budget that is gone applies nothing"


@pytest.mark.parametrize("then", ["ledger", "require", "sample"])
def test_an_import_does_not_wait_for_ever_for_another_threads_call_and_a_later_call_sets_the_cap(
    then: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("memguard._guard.guard._IMPORT_LOCK_TIMEOUT", 0.05)
    guard = start(TORCH)
    torch, has, over = simulated(guard, "torch"), threading.Event(), threading.Event()
    calls: dict[str, Callable[[], object]] = {
        "ledger": memguard.ledger,
        "require": lambda: memguard.require("torch", "1GiB"),
        "sample": guard.sample,
    }
    guard.sample()  # its first one looks for drift anyway

    def hold() -> None:
        with guard.caps.lock:
            has.set()
            over.wait(5)

    other = threading.Thread(target=hold, daemon=True)
    other.start()
    assert has.wait(5)
    with caplog.at_level("WARNING", "memguard"):
        torch.start_importing()
    imported = not over.is_set() and other.is_alive()
    assert memguard.ledger().devices[0].row("torch").enforcement == "pending", "the lock is not free yet"
    over.set()
    other.join(5)
    assert imported, "the import waited for the other call's end"
    assert cap_of(torch) is None and len(caplog.messages) == 1
    assert "torch: its cap is not set yet: another thread held memguard's lock for 0.05 s" in caplog.messages[0]
    calls[then]()
    assert cap_of(torch) == 4 << 30
    assert memguard.ledger().devices[0].row("torch").enforcement == "enforced"


def test_a_cap_that_cannot_be_set_after_the_import_is_said_and_watched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Late(SimulatedFramework):
        def apply(self, caps: Any, options: Any, undo: Any) -> Any:
            raise CapNotApplied("torch", "it is live already", "call memguard.init first")

    monkeypatch.setattr("memguard._guard.guard._IMPORT_LOCK_TIMEOUT", 0.05)
    replaced(monkeypatch, torch=Late)
    guard, has, over = start(TORCH), threading.Event(), threading.Event()

    def hold() -> None:
        with guard.caps.lock:
            has.set()
            over.wait(5)

    other = threading.Thread(target=hold, daemon=True)
    other.start()
    assert has.wait(5)
    simulated(guard, "torch").start_importing()
    over.set()
    other.join(5)
    ledger = memguard.ledger()
    assert ledger.devices[0].row("torch").enforcement == "watched"
    assert any("torch: its cap could not be set after its import" in note for note in ledger.notes)


@pytest.mark.parametrize("call", ["trim", "ledger", "require"])
def test_a_call_while_another_thread_imports_the_framework_does_not_deadlock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str
) -> None:
    """The importing thread holds the import's lock and needs the guard's; the caller must not hold it and wait."""

    class Importable(SimulatedFramework):
        state = Framework.state  # the real frameworks' own: it waits for a running import

        def _live(self, module: Any) -> bool:
            return hasattr(module, "cuda") and bool(self._pools)

        def usage(self, device: Device) -> Usage | None:
            module = sys.modules.get(self.hook)
            return super().usage(device) if module is not None and self._live(module) else None

    (tmp_path / "memguard_simulated_torch.py").write_text(
        "import builtins\nbuiltins.mg_importing.set()\nbuiltins.mg_go_on.wait(5)\ncuda = None\n"
    )
    importing, go_on = threading.Event(), threading.Event()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("builtins.mg_importing", importing, raising=False)
    monkeypatch.setattr("builtins.mg_go_on", go_on, raising=False)
    replaced(monkeypatch, torch=Importable)
    guard = start(TORCH)
    calls: dict[str, Callable[[], object]] = {
        "trim": memguard.trim,
        "ledger": memguard.ledger,
        "require": lambda: memguard.require("torch", "1GiB"),
    }
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    def thread(work: Callable[[], object]) -> threading.Thread:
        started = threading.Thread(target=run, args=(work,), daemon=True)
        started.start()
        return started

    one = thread(lambda: importlib.import_module("memguard_simulated_torch"))
    assert importing.wait(5)
    other = thread(calls[call])
    other.join(0.1)
    go_on.set()
    one.join(5)
    other.join(5)
    stuck = one.is_alive() or other.is_alive()
    sys.modules.pop("memguard_simulated_torch", None)
    if stuck:
        monkeypatch.setattr(runtime.this, "_state", runtime.Empty())  # its lock is lost
        guard._hook.clear()
    assert not stuck and errors == []
