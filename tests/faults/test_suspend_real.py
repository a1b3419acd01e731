"""`memguard.suspend` with the real helper process, over stubs of libcuda and NVML, in programs of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from stub_gpus import GIB, ONE, UUIDS
from test_suspend_helper import libraries

__all__ = ["libraries"]
ROOT = Path(__file__).resolve().parents[2]
BEGIN = """
import os, pathlib, signal, sys, threading, time
folder, GIB = pathlib.Path(os.environ["CHECKPOINT_STUB"]), 1 << 30
me = folder / f"{os.getpid()}.process"
me.write_text(f"0 0 {GIB}\\n")
scenario = pathlib.Path(os.environ["NVML_STUB"])
scenario.write_text(scenario.read_text() + f"processes0={os.getpid()}:{GIB}\\n")
import contextlib, memguard
from memguard._node.suspend import self_suspend, backend; from memguard._node.suspend.store import records

@contextlib.contextmanager
def room(*_):  # the stub has no memory to hold
    yield None

backend.Waiting = lambda timeout, progress, where: room

class Gate:
    closed, unheld = True, ()
    def open(self):
        self.closed = False
    lift = open
    def on_this_thread(self):
        return contextlib.ExitStack()

def gate(owner, undo):
    made = Gate()
    undo.add("the gate", made.open)
    return made

self_suspend.closed_gate = gate
def state():
    return ("running", "locked", "off", "failed")[int(me.read_text().split()[0])]
def wrong(*faults):
    (folder / "faults").write_text("".join(f"{fault}\\n" for fault in faults))
"""


class Program:
    def __init__(self, folder: Path, libraries: Path) -> None:
        self.folder = folder
        scenario = {**ONE, "total0": 16 * GIB, "reserved0": 0, "used0": 2 * GIB}
        (folder / "scenario").write_text("".join(f"{key}={value}\n" for key, value in scenario.items()))
        (folder / "free").write_text(f"{8 * GIB}\n")
        (folder / "calls").write_text("")
        (folder / "faults").write_text("")
        self.environ = {
            **os.environ,
            "CHECKPOINT_STUB": str(folder),
            "NVML_STUB": str(folder / "scenario"),
            "LD_LIBRARY_PATH": str(libraries),
            "PYTHONPATH": str(ROOT),
        }

    def run(self, code: str) -> list[str]:
        command = [sys.executable, "-c", BEGIN + code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=25, env=self.environ)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    @property
    def calls(self) -> list[str]:
        found = [line.split()[0] for line in (self.folder / "calls").read_text().splitlines()]
        return [call for call in found if call != "state"]


@pytest.fixture
def program(tmp_path: Path, libraries: Path) -> Program:
    return Program(tmp_path, libraries)


def test_a_process_without_a_budget_leaves_and_comes_back(program: Program) -> None:
    said = program.run(
        "with memguard.suspended() as found:\n    print(state(), dict(found.bytes), found.process.pid == os.getpid(), "
        "records.of(found.process).step)\n"
        "print(state(), self_suspend.current(), records.of(found.process))"
    )
    assert said == [f"off {{'{UUIDS[0]}': {GIB}}} True suspended", "running None None"]
    assert program.calls == ["lock", "checkpoint", "restore", "unlock"]


def test_another_program_brings_it_back(program: Program) -> None:
    said = program.run(
        "memguard.suspend()\nme.write_text(f'0 0 {GIB}')\n"
        "while self_suspend.current() is not None: time.sleep(0.02)\nprint('back', self_suspend._now)"
    )
    assert said == ["back None"] and "restore" not in program.calls


def test_work_that_does_not_end_in_time_changes_nothing(program: Program) -> None:
    said = program.run(
        "wrong('lock code 600')\n"
        "try: memguard.suspend(timeout=0.2)\n"
        "except memguard.CannotSuspend as error: print(state(), self_suspend.current(), str(error).splitlines()[0])"
    )
    assert len(said) == 1 and said[0].startswith("running None cannot suspend: ")
    assert "did not end within the time" in said[0]


def test_a_helper_that_is_killed_takes_nothing_with_it(program: Program) -> None:
    said = program.run(
        "wrong('checkpoint die 1')\n"
        "try: memguard.suspend(); print('suspended')\n"
        "except memguard.CannotSuspend: print('not suspended')\n"
        "print((state() == 'off') == (self_suspend.current() is not None))\nmemguard.resume()\nprint(state())"
    )
    assert said[1:] == ["True", "running"]


@pytest.mark.parametrize("call", ["lock", "checkpoint"])
def test_a_ctrl_c_takes_it_back(program: Program, call: str) -> None:
    said = program.run(
        f"wrong('{call} slow 400')\n"
        "threading.Timer(0.1, lambda: None).start()\n"
        "def press():\n"
        f"    while '{call}' not in (folder / 'calls').read_text(): time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=press).start()\n"
        "try: memguard.suspend()\nexcept KeyboardInterrupt: print(state(), self_suspend.current())"
    )
    assert said == ["running None"]


def test_host_memory_that_is_too_little_refuses_it_unless_told(program: Program) -> None:
    huge = 1 << 44
    text = (program.folder / "scenario").read_text()
    (program.folder / "scenario").write_text(text.replace(f"total0={16 * GIB}", f"total0={huge}"))
    said = program.run(
        f"text = scenario.read_text().replace(f'{{os.getpid()}}:{{GIB}}', f'{{os.getpid()}}:{huge // 2}')\n"
        "scenario.write_text(text)\n"
        "try: memguard.suspend()\nexcept memguard.CannotSuspend as error: print([code for code, *_ in error.reasons])\n"
        "memguard.suspend(host_memory='ignore'); print(state())\nmemguard.resume()"
    )
    assert said[-1] == "off" and "host-memory" in said[0]
