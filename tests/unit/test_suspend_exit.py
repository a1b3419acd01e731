"""A program that ends while it is suspended: it comes back first, or says that it could not, and never hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
BEGIN = f"""
import atexit, sys, threading, time
sys.path.insert(0, {HERE!r})
import memguard
from memguard._node.suspend.triggers import at_exit; from memguard._node.suspend import self_suspend, backend
from suspending import FakeGate

class Gate(FakeGate):
    def __init__(self, owner):
        super().__init__(owner)
        self.opened = threading.Event()
    def open(self):
        super().open()
        self.opened.set()

gates = []
def gate(owner, undo):
    gates.append(made := Gate(owner))
    undo.add("the gate", made.open)
    return made

self_suspend.closed_gate = gate
BUDGET = {{"version": 1, "frameworks": {{"torch": {{"limit": "10GiB"}}}}, "monitor": {{"interval": "50ms"}}}}
memguard.init(BUDGET, simulate="h200").frameworks["torch"].allocate(1 << 30)
where = lambda: "off" if self_suspend.current() else "on"
atexit.register(lambda: print("the end of a framework,", where(), "its GPUs", flush=True))
memguard.suspend()
"""
FULL = """
at_exit.PATIENCE = 0.2
(uuid, size), = self_suspend._now.way.driver.cards.items()
self_suspend._now.way.driver.others[uuid] = size
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program leaves that ends off its GPUs is this test's."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("end", "status"), [("", 0), ("sys.exit(3)", 3)])
def test_with_room_it_comes_back_before_others_end(end: str, status: int) -> None:
    done = run(end)
    assert (done.returncode, done.stdout) == (status, "the end of a framework, on its GPUs\n")


def test_a_thread_that_waits_at_a_gate_is_let_go() -> None:
    done = run("threading.Thread(target=lambda: (gates[-1].opened.wait(), print('it went on', flush=True))).start()")
    assert (done.returncode, done.stdout) == (0, "it went on\nthe end of a framework, on its GPUs\n")


@pytest.mark.parametrize(("end", "status"), [("sys.exit(3)", 3), ("raise ValueError('its own')", 1)])
def test_without_room_it_leaves_and_says_so(end: str, status: int) -> None:
    done = run(FULL + "print('all of it')\n" + end)
    assert done.stdout == "all of it\n", "what was printed is flushed, and no framework ends"
    assert "this process ends while it is off its GPUs" in done.stderr and "stays suspended" in done.stderr
    assert done.returncode == status


def test_an_exit_waits_for_a_suspension_that_has_begun() -> None:
    """Else frameworks would end while the driver takes the process off its GPUs."""
    done = run("""
from memguard._devices import suspension
memguard.resume()
begun, ended = threading.Event(), threading.Event()
threading._register_atexit(ended.set)
def slow(owner, undo):
    begun.set()
    ended.wait(20)
    return gate(owner, undo)
self_suspend.closed_gate = slow
atexit.register(lambda: print(suspension.phase().name, flush=True))
threading.Thread(target=memguard.suspend, daemon=True).start()
begun.wait(20)
""")
    assert (done.returncode, done.stdout) == (0, "RUNNING\nthe end of a framework, on its GPUs\n")


def test_an_exit_in_a_forked_child_is_an_exit() -> None:
    code = (
        "import os\nif not (child := os.fork()): sys.exit(5)\nprint(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    done = run("atexit.unregister(None)\n" + code)
    assert done.returncode == 0 and "5\n" in done.stdout


def test_a_signal_ends_it_as_ever() -> None:
    done = run("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(30)")
    assert done.returncode == -15
