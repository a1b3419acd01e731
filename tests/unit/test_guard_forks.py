"""A guard and the processes that are forked from it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from guards import BUDGET, TORCH, cap_of, hooks, simulated, start

import memguard
from memguard._base.types import State
from memguard._base.units import GIB
from memguard._frameworks.simulated.adapter import SimulatedFramework
from memguard._runtime import runtime
from memguard.errors import (
    MemguardError,
    NotActive,
    PlanError,
)

pytestmark = pytest.mark.usefixtures("nothing_stays")

# forks


def in_child(work: Callable[[], str]) -> str:
    """What `work` returns in a forked child; a child that hangs is killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        try:
            answer = work()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the child hung"
    return answer


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@forks
def test_a_forked_child_is_inert_and_the_parent_goes_on() -> None:
    guard = start()

    def child() -> str:
        simulated(guard, "torch").start_importing()
        return f"{guard.active} {hooks()} {cap_of(simulated(guard, 'torch'))} {memguard.shutdown()}"

    assert in_child(child) == "False [] None []"
    assert in_child(lambda: str(memguard.ledger())).startswith("NotActive: no budget is active in this process")
    assert in_child(lambda: str(guard.ledger())).startswith("NotActive: no budget is active here: this is a forked")
    simulated(guard, "torch").start_importing()
    assert guard.active and cap_of(simulated(guard, "torch")) == 4 * GIB


@forks
def test_a_forked_child_may_have_a_budget_of_its_own() -> None:
    start()

    def child() -> str:
        own = start(TORCH)
        simulated(own, "torch").allocate(GIB)
        part = memguard.ledger().devices[0]
        return f"{own.active} {part.row('torch').bytes} {list(own.frameworks)} {memguard.shutdown()}"

    assert in_child(child) == f"True {GIB} ['torch'] []"


@forks
def test_a_fork_inside_a_block_leaves_the_child_without_errors() -> None:
    def child() -> str:
        block.__exit__(None, None, None)
        work.__exit__(None, None, None)
        return f"{report.before} {report.after}"

    block = memguard.guard(BUDGET, simulate="h200")
    guard = block.__enter__()
    work = memguard.workload("w", framework="torch")
    report = work.__enter__()
    assert in_child(child) == "0 None" and guard.active, "no framework is asked anything in the child"
    work.__exit__(None, None, None)
    block.__exit__(None, None, None)


@forks
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("lock", ["guard", "module"])
def test_locks_that_another_thread_held_at_the_fork_do_not_stop_the_child(lock: str) -> None:
    guard = start()
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with guard.caps.lock if lock == "guard" else runtime.this.lock:
            held.set()
            release.wait(20)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(5)
    try:

        def child() -> str:
            try:
                guard.ledger()
            except NotActive as error:
                return f"{'forked' in str(error)} {start(TORCH).active} {memguard.shutdown()}"
            return "active"

        assert in_child(child) == "True True []"
    finally:
        release.set()
        thread.join(5)


@forks
def test_a_child_that_was_forked_while_another_thread_noted_a_refusal_ends(tmp_path: Path) -> None:
    """The exit function that it inherits writes what was refused; a lock of that may be held for ever in the child."""
    code = f"""
import os, signal, sys, threading
import memguard
from memguard._oom import refusal
from memguard._runtime import session
has, over = threading.Event(), threading.Event()
def clock():
    if threading.current_thread().name == "noting":
        has.set()
        over.wait(20)
    return 0.0
session.RefusalEvents = lambda: refusal.RefusalEvents(clock)
guard = memguard.init({{
    "version": 1, "frameworks": {{"torch": {{"limit": "1GiB"}}}},
    "monitor": {{"interval": "10s", "timeline": {str(tmp_path / "{pid}.jsonl")!r}}},
}}, simulate="h200")
torch = guard.frameworks["torch"]
def refused():
    try:
        torch.allocate(2 << 30)
    except Exception:
        pass
refused()
noting = threading.Thread(target=refused, name="noting")
noting.start()
has.wait(20)
pid = os.fork()
if pid == 0:
    signal.alarm(10)
    sys.exit(0)
_, status = os.waitpid(pid, 0)
over.set()
noting.join()
print(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "0", f"the child hung: {done.stdout}{done.stderr}"


@forks
def test_what_was_forked_stays_inert_in_its_own_children() -> None:
    guard = start()
    assert in_child(lambda: in_child(lambda: str(guard.active))) == "False"


def test_a_replacement_that_does_not_fit_leaves_the_old_budget_as_it_was() -> None:
    guard = start()
    before = memguard.ledger().devices[0].row("torch").cap
    with pytest.raises(PlanError):
        memguard.init({**BUDGET, "device": {"limit": "900GiB"}}, simulate="h200", replace=True)
    assert guard.active
    assert memguard.ledger().devices[0].row("torch").cap == before


def test_a_replacement_whose_caps_cannot_hold_brings_the_old_budget_back(steps: Callable[..., list[str]]) -> None:
    steps()
    start(TORCH)
    cap = memguard.ledger().devices[0].row("torch").cap
    steps("apply pycuda")
    with pytest.raises(RuntimeError, match="apply of pycuda failed"):
        memguard.init(
            {"version": 1, "frameworks": {"torch": {"limit": "2GiB"}, "pycuda": {"limit": "1GiB"}}},
            simulate="h200",
            replace=True,
        )
    assert memguard.ledger().devices[0].row("torch").cap == cap


def test_a_guard_that_was_stopped_does_not_start_again() -> None:
    guard = start(TORCH)
    memguard.shutdown()
    with pytest.raises(MemguardError, match="started before"):
        guard.start()
    assert hooks() == []


def test_init_does_not_deadlock_with_an_import_that_imports_another_framework(tmp_path: Path) -> None:
    """Another thread is importing tensorflow, which imports torch, whose hook wants what init holds."""
    (tmp_path / "torch.py").write_text("__version__ = '2'\n")
    (tmp_path / "tensorflow.py").write_text("import sys, time\nsys.importing.set()\ntime.sleep(0.5)\nimport torch\n")
    code = f"""
import faulthandler, sys, threading, time
sys.path.insert(0, {str(tmp_path)!r})
import memguard
from memguard import api
from memguard._runtime import runtime
from memguard._devices.simulated import SimulatedHost
class Host(SimulatedHost):
    simulated = False
runtime.open_host = lambda simulate: Host(["h200"])
def importing():
    try:
        import tensorflow
    except memguard.CapNotApplied:
        pass
    except Exception as error:
        print(type(error).__name__)
sys.importing = threading.Event()
thread = threading.Thread(target=importing, daemon=True)
thread.start()
sys.importing.wait(20)
faulthandler.dump_traceback_later(20, exit=True)
try:
    memguard.init({{"version": 1, "device": {{"limit": "16GiB"}},
                   "frameworks": {{"torch": {{"limit": "4GiB"}}, "tensorflow": {{"limit": "4GiB"}}}}}})
except Exception:
    pass                                   # these modules are no frameworks
thread.join(10)
print("no deadlock" if not thread.is_alive() else "deadlock")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "no deadlock" in done.stdout, done.stdout + done.stderr


def test_a_log_that_keeps_its_records_keeps_nothing_of_a_block_that_raised(caplog: pytest.LogCaptureFixture) -> None:
    """Logged as an object, the error of a block's end would hold the block's own error, and with it its frames."""
    caplog.set_level("DEBUG", logger="memguard")

    class Tensor:
        pass

    kept: list[weakref.ref[Tensor]] = []

    def work() -> None:
        tensor = Tensor()
        kept.append(weakref.ref(tensor))
        memguard.shutdown()
        raise ValueError("of the user's own")

    memguard.init({"version": 1, "frameworks": {"torch": {"share": "50%"}}}, simulate="h200")
    with pytest.raises(ValueError, match="of the user's own") as caught, memguard.workload("work", framework="torch"):
        work()
    assert any("no figures at its end" in record.getMessage() for record in caplog.records)
    del caught
    gc.collect()
    assert kept[0]() is None


def test_a_replacement_that_fails_brings_the_former_budget_back_as_it_was_resized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = {"version": 1, "device": {"limit": "40GiB"}, "frameworks": {"torch": {"limit": "4GiB"}}}
    memguard.init(budget, simulate="h200")
    memguard.resize("torch", "12GiB")
    real, calls = SimulatedFramework.state, []

    def fails_once(framework: SimulatedFramework) -> State:
        calls.append(framework)
        if len(calls) == 1:
            raise MemguardError("not today")
        return real(framework)

    monkeypatch.setattr(SimulatedFramework, "state", fails_once)
    with pytest.raises(MemguardError, match="not today"):
        memguard.init({**budget, "device": {"limit": "30GiB"}}, replace=True, simulate="h200")
    assert memguard.ledger().devices[0].row("torch").cap == 12 * GIB
