"""A process leaves a real GPU and comes back: values, the ledger and the timeline, gates, refusals, commands, no room.

Each program ends itself while it is suspended, also if it fails: one that was restored is not to be killed as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

GIB, MIB = 1 << 30, 1 << 20
Run = Callable[..., dict[str, Any]]
SIX = ("torch", "tensorflow", "jax", "cupy", "pycuda", "numba")
START = """
import subprocess, sys, threading, time
sys.path.insert(0, os.path.join(os.environ["MEMGUARD_ROOT"], "benchmarks"))
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
from _suspend_arrays import Kept
from _suspend_children import Card, command
from memguard.errors import CannotResume, CannotSuspend, Suspended

BESIDE = os.path.join(os.environ["MEMGUARD_ROOT"], "benchmarks")

def listed():
    # NVML's word, from another process: this one would wait for NVML while it is suspended.
    code = f"from _suspend_children import Card; print(Card().of({os.getpid()}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=BESIDE)
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


def test_each_of_six_in_one_process_is_back_with_its_values(run: Run) -> None:
    found = run(
        START
        + f"names = {SIX!r}"
        + """
guard = memguard.init({"version": 1, "device": {"limit": "16GiB"}, "frameworks": {n: {"share": "16%"} for n in names},
                       "monitor": {"interval": "100ms"}})
kept = []
for number, name in enumerate(names):
    one = Kept(name)
    one.random(8 * MIB, 100 * number)
    kept.append(one)
result["before"] = [one.wrong() for one in kept]
off = memguard.suspend()
result.update(bytes=off.total, host=off.host, listed=listed(), ledger=str(memguard.ledger()))
time.sleep(11)  # JAX's monitor asks every 5 s
memguard.resume(timeout=60)
result.update(wrong=[one.wrong() for one in kept], back=listed(), arrays=[one.count for one in kept])
result["later"] = "in host memory" in str(memguard.ledger())
"""
        + END,
        timeout=180,
    )
    assert found["before"] == found["wrong"] == [0] * 6 and found["arrays"] == [4] * 6
    assert not found["listed"] and found["back"] and found["bytes"] > 512 * MIB
    assert "suspended, " in found["ledger"] and "in host memory" in found["ledger"] and not found["later"]


@pytest.mark.parametrize("name", SIX)
def test_a_framework_alone_is_back_with_its_values(run: Run, name: str) -> None:
    found = run(
        START
        + f"kept = Kept({name!r})"
        + """
kept.random(16 * MIB, 7)
with memguard.suspended() as off:
    result.update(listed=listed(), bytes=off.total, host=off.host)
result.update(back=listed(), wrong=kept.wrong())
"""
        + END,
        timeout=180,
    )
    assert not found["listed"] and found["back"] and found["wrong"] == 0
    assert found["bytes"] > 100 * MIB and found["host"] > found["bytes"] // 2


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


@pytest.mark.parametrize(
    ("begin", "end", "code"),
    [
        ("one = cupy.cuda.malloc_managed(2 * MIB); cupy.cuda.runtime.memset(one.ptr, 1, 2 * MIB)", "del one",
         "managed-memory"),
        ("from memguard import exchange; handle = exchange.export(x)", "handle.close()", "cuda-ipc"),
        ("from memguard._devices import machine_memory as m; was = m.available; m.available = lambda *_: MIB",
         "m.available = was", "host-memory"),
    ],
)  # fmt: skip
def test_what_would_be_lost_is_refused_and_nothing_is_touched(run: Run, begin: str, end: str, code: str) -> None:
    found = run(
        START
        + "import cupy\nx = cupy.arange(1 << 20)\n"
        + begin
        + """
try:
    memguard.suspend()
    result["codes"] = []
except CannotSuspend as error:
    result.update(codes=[reason[0] for reason in error.reasons], text=str(error))
result.update(there=listed(), right=int(x.sum()) == (1 << 20) * ((1 << 20) - 1) // 2)
"""
        + end
        + """
try:
    memguard.suspend()
    result["left"] = not listed()
except CannotSuspend as error:
    result["left"] = str(error)
"""
        + END,
        timeout=180,
    )
    assert found["codes"] == [code] and "fix:" in found["text"] and found["there"] and found["right"]
    if code != "managed-memory":  # the driver keeps its mapping until the process ends
        assert found["left"] is True


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
filler = subprocess.Popen([sys.executable, "_suspend_others.py", "filler"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True, cwd=BESIDE)
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
