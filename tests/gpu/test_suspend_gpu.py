"""Suspend and resume on a real GPU, from within the process: its gates, the commands on it, no room.

Tests from outside the process: test_suspend_rounds.py.

Each program exits by itself while suspended, even if it fails: killing a restored process may hang the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

GIB, MIB = 1 << 30, 1 << 20
Run = Callable[..., dict[str, Any]]
START = """
import subprocess, sys, threading, time
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
from support.suspend_children import command
from memguard.errors import CannotResume, Suspended

def listed():
    # NVML's word, from another process: this one would wait for NVML while it is suspended.
    code = f"from support.suspend_children import Card; print(Card().of({os.getpid()}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() != "None"

def leave(code):
    if not suspension.now: memguard.suspend()
    os._exit(code)

def over():
    print("RESULT " + json.dumps(result), flush=True)
    leave(0)

def failed(kind, error, trace):
    sys.__excepthook__(kind, error, trace)
    leave(1)

sys.excepthook = failed
late = threading.Timer(100, leave, [9])
late.daemon = True
late.start()
from memguard._devices import suspension
"""
END = "\nover()\n"


def test_calls_of_another_thread_wait_and_those_of_the_block_are_refused(run: Run) -> None:
    found = run(
        START
        + """
import torch
x = torch.ones(1 << 20, device="cuda")
calls = {"synchronize": lambda: torch.cuda.synchronize(), "item": lambda: x.sum().item()}
calls["to"] = lambda: torch.ones(9).cuda()
done, go = {}, threading.Event()
def work(name):
    go.wait()
    calls[name]()
    done[name] = time.monotonic()
threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in calls]
for thread in threads: thread.start()
result["refused"] = []
with memguard.suspended():
    go.set()
    time.sleep(0.5)
    result["meanwhile"] = len(done)
    for name in calls:
        try: calls[name]()
        except Suspended as error: result["refused"].append("fix:" in str(error))
for thread in threads: thread.join(30)
result.update(after=len(done), right=float(x.sum()) == 1 << 20)
"""
        + END,
        timeout=180,
    )
    assert found["meanwhile"] == 0 and found["after"] == 3 and found["right"]
    assert found["refused"] == [True, True, True]


def test_commands_list_suspend_and_resume_a_process_that_allows_it(run: Run) -> None:
    found = run(
        START
        + """
import torch
budget = {"version": 1, "device": {"limit": "8GiB"}, "frameworks": {"torch": {"share": "90%"}}}
budget["suspend"] = {"by_others": True}
memguard.init(budget)
x = torch.arange(1 << 20, device="cuda")
pid = str(os.getpid())
def called(*words):
    box = []
    thread = threading.Thread(target=lambda: box.append(command(*words)))
    thread.start()
    thread.join(90)
    return box[0] if box else {"rc": None, "out": "", "err": "it does not end"}
result["ps"] = pid in called("ps", "--json")["out"]
off = called("suspend", pid)
result.update(off=off["rc"], said=off["err"][-300:], away=suspension.now is not None, listed=listed())
result["ps_off"] = pid in called("ps", "--json")["out"]
on = called("resume", pid, "--wait", "30s")
until = time.monotonic() + 5
while suspension.now is not None and time.monotonic() < until: time.sleep(0.1)
result.update(on=on["rc"], back=suspension.now is None, right=int(x[-1]) == (1 << 20) - 1)
"""
        + END,
        timeout=180,
    )
    assert found["ps"] and found["ps_off"] and found["off"] == 0 and found["away"] and not found["listed"], found
    assert found["on"] == 0 and found["back"] and found["right"]


@pytest.mark.whole_card
def test_without_room_it_waits_and_names_who_holds_the_card(run: Run) -> None:
    found = run(
        START
        + """
import cupy
x = cupy.ones(1 << 27)
memguard.suspend()
filler = subprocess.Popen([sys.executable, "-m", "support.suspend_others", "filler"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True)
def tell(**what):
    filler.stdin.write(json.dumps(what) + "\\n"); filler.stdin.flush()
    return json.loads(filler.stdout.readline()[7:])
tell(do="begin")
tell(do="fill", leave=600 * MIB)
looks = []
try:
    memguard.resume(timeout=2, progress=looks.append)
    result["text"] = ""
except CannotResume as error:
    result.update(text=str(error), lost=error.lost)
result["named"] = any(str(filler.pid) in line for look in looks for line in look.holders)
result["away"] = suspension.now is not None
threading.Timer(1.0, lambda: tell(do="empty")).start()
memguard.resume(timeout=60)
result["right"] = float(x.sum()) == 1 << 27
filler.stdin.close(); filler.wait(30)
"""
        + END,
        timeout=180,
    )
    assert "free" in found["text"] and not found["lost"] and found["named"] and found["away"] and found["right"]
