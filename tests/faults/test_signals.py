"""Signal handlers and finalizers that call memguard while the same thread is within a call of it."""

from __future__ import annotations

import os

import pytest
from stub_gpus import Run

SECONDS = float(os.environ.get("MEMGUARD_TEST_STORM", "0.8"))
"""How long each storm lasts."""

PROGRAM = """
import contextlib, faulthandler, gc, io, random, signal, threading, time
from memguard.errors import MemguardError
faulthandler.dump_traceback_later(40 + SECONDS, exit=True)
BUDGET = {"version": 1, "frameworks": {"torch": {"limit": "1GiB"}, "pycuda": {"limit": "1GiB"}},
          "monitor": {"interval": "100ms", "timeline": str(pathlib.Path(os.environ["NVML_STUB"]).parent / "run.jsonl")}}
HOST = SIMULATE
OTHER = {**BUDGET, "frameworks": {"torch": {"limit": "2GiB"}}}

def begin():
    return memguard.init(BUDGET, simulate=HOST)

guard, held = begin(), []

def work():
    with memguard.workload("w", framework="torch", needs="1MiB"):
        pass

def block():
    with memguard.guard(BUDGET, simulate=HOST):
        pass

def allocate():
    torch = memguard.api.current().frameworks.get("torch")
    if torch is not None and HOST:
        one = torch.allocate(random.choice([1 << 10, 3 << 20]))
        torch.free(one)

CALLS = {
    "ledger": memguard.ledger,
    "sample": lambda: memguard.api.current().sample(),
    "print": lambda: str(memguard.api.current()) + str(memguard.ledger()),
    "last_oom": memguard.last_oom,
    "trim": memguard.trim,
    "require": lambda: memguard.require("torch", "1MiB"),
    "resize": lambda: memguard.resize("torch", random.choice(["512MiB", "1GiB"])),
    "checkpoint": memguard.checkpoint,
    "workload": work,
    "on_event": lambda: memguard.on_event(print).remove(),
    "allocate": allocate,
    "shutdown": lambda: (memguard.shutdown(), begin()),
    "init": begin,
    "replace": lambda: (memguard.init(OTHER, simulate=HOST, replace=True), begin()),
    "guard": block,
}
counts, strange, depth, slowest = {"main": 0, "within": 0, "refused main": 0, "refused within": 0}, [], 0, 0.0

def call(name, where):
    global slowest
    began = time.monotonic()
    try:
        CALLS[name]()
        counts[where] += 1
    except MemguardError:
        counts["refused " + where] += 1
    except BaseException as error:
        import traceback
        strange.append(f"{where} {name}: {traceback.format_exc()[-1500:]}")
    slowest = max(slowest, time.monotonic() - began)

def importing():
    # A handler within an import finds half a module, whoever's it is: here the simulated framework's.
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None

running = []

def storm(*_):
    global depth
    if depth < 2 and not importing():
        depth += 1
        running.append(depth)
        try:
            if depth < 99:
                call(random.choice(WITHIN), "within")
        finally:
            depth -= 1
            running.pop()

class Finalized:
    def __init__(self):
        self.me = self
    def __del__(self):
        storm()

WITHIN = WITHIN_NAMES or list(CALLS)
for name in CALLS:  # what is imported late: a handler within an import finds half a module, whoever's it is
    call(name, "main")
random.seed(1)
end = time.monotonic() + SECONDS
others = []
if THREADS:
    def other():
        while time.monotonic() < end:
            with contextlib.suppress(MemguardError):
                random.choice([memguard.ledger, memguard.trim, allocate])()
    others = [threading.Thread(target=other, daemon=True) for _ in range(2)]
    for one in others:
        one.start()
if KIND == "signals":
    signal.signal(signal.SIGALRM, storm)
    signal.setitimer(signal.ITIMER_REAL, 0.0007, 0.0007)
else:
    gc.set_threshold(50, 2, 2)
while time.monotonic() < end:
    name = random.choice(MAIN_NAMES or list(CALLS))
    if KIND != "signals":
        Finalized()
    call(name, "main")
signal.setitimer(signal.ITIMER_REAL, 0)
depth = 99  # the storm is over, also for objects that are collected from now on
until = time.monotonic() + 20
while running and time.monotonic() < until:  # a finalizer may run on the monitor's thread
    time.sleep(0.01)
for one in others:
    one.join(10)
result["hang"] = [one.name for one in others if one.is_alive()]
result.update(counts=counts, strange=strange[:3], strange_count=len(strange), slowest=slowest)
memguard.shutdown()
try:
    begin()
except MemguardError:  # a rare one: say who has the timeline
    from memguard._timeline.writer import Writer
    for one in gc.get_objects():
        if type(one) is Writer and one._opened:
            print(one._pid, one._closing, one._begun, one._opened, len(one._pending), one._writing, one._locked._lock,
                  [type(two).__name__ for two in gc.get_referrers(one)], file=sys.stderr)
    print(memguard.api.this.session, sys.modules["memguard._timeline.writer"]._closing_writers, file=sys.stderr)
    faulthandler.dump_traceback()
    raise
result["alive"] = memguard.api.current_session().monitor.alive
ledger = memguard.ledger()
result["adds_up"] = all(sum(row.bytes or 0 for row in part.rows) == part.device.total for part in ledger.devices)
memguard.shutdown()
result["finders"] = [type(one).__name__ for one in sys.meta_path if "memguard" in type(one).__module__]
result["threads"] = [one.name for one in threading.enumerate() if one.name.startswith("memguard")]
faulthandler.cancel_dump_traceback_later()
"""
READING = ["ledger", "sample", "print", "last_oom", "checkpoint", "on_event"]
ACTING = ["trim", "require", "workload", "resize"]


def storm(run: Run, without_cuda: dict[str, str], host: str | None, **names: object) -> dict[str, object]:
    values = {"SIMULATE": host, "SECONDS": SECONDS, "THREADS": False, "WITHIN_NAMES": None, "MAIN_NAMES": None, **names}
    program = PROGRAM
    for name in sorted(values, key=len, reverse=True):
        program = program.replace(name, repr(values[name]))
    found = run(program, env=without_cuda)
    print({name: found[name] for name in ("counts", "slowest")})
    assert found["strange"] == [], found["strange_count"]
    assert found["hang"] == [] and found["finders"] == [] and found["threads"] == []
    assert found["alive"] and found["adds_up"]
    assert found["counts"]["within"] > 5, "the storm did not reach memguard"  # type: ignore[index]
    return found


@pytest.mark.parametrize("host", ["h200", None], ids=["simulated", "real"])
@pytest.mark.parametrize("kind", ["signals", "finalizers"])
def test_every_call_within_every_other(run: Run, without_cuda: dict[str, str], host: str | None, kind: str) -> None:
    storm(run, without_cuda, host, KIND=kind)


@pytest.mark.parametrize("host", ["h200", None], ids=["simulated", "real"])
@pytest.mark.parametrize("names", [READING, ACTING], ids=["reading", "acting"])
def test_calls_within_others_while_threads_call_too(
    run: Run, without_cuda: dict[str, str], host: str | None, names: list[str]
) -> None:
    """A reading waits for nobody. Another call is refused if the threads would wait for each other."""
    every = [*READING, *ACTING, "allocate"]
    found = storm(run, without_cuda, host, KIND="signals", THREADS=True, WITHIN_NAMES=names, MAIN_NAMES=every)
    slowest = found["slowest"]
    assert isinstance(slowest, float) and slowest < (2 if names is READING else 8)
    if names is READING:
        assert found["counts"]["refused within"] == 0  # type: ignore[index]


WITHIN_PYNVML = """
import pynvml
from memguard.errors import MemguardError
BUDGET = {"version": 1, "frameworks": {"torch": {"limit": "1GiB"}}}

def block():
    with memguard.guard(BUDGET):
        pass

CALLS = {
    "ledger": memguard.ledger,
    "require": lambda: memguard.require("torch", "1MiB"),
    "init": lambda: memguard.init(BUDGET),
    "replace": lambda: memguard.init(BUDGET, replace=True),
    "shutdown": memguard.shutdown,
    "guard": block,
}

def anew():
    pynvml.nvmlLib.nvmlShutdown()  # by other code: the ledger starts NVML again
    memguard.ledger()

OUTER = {"start": lambda: memguard.init(BUDGET), "ledger": memguard.ledger, "anew": anew, "end": memguard.shutdown}

class Lock:
    # Pynvml's own, which is not re-entrant. As if a signal came right after the thread has taken it the n-th time.
    def __init__(self):
        self.lock, self.at, self.count, self.then = threading.Lock(), 0, 0, None

    def acquire(self, *arguments):
        assert not self.lock.locked(), "for ever"
        self.lock.acquire()
        self.count += 1
        if self.count == self.at:
            try:
                self.then()
            except MemguardError as error:
                said.add(str(error))

    def release(self):
        self.lock.release()

    def locked(self):
        return self.lock.locked()

import threading
said, tried, wrong = set(), 0, []
for outer in OUTER:
    for name, call in CALLS.items():
        for at in range(1, 99):
            memguard.shutdown()
            pynvml.libLoadLock = lock = Lock()
            pynvml._nvmlGetFunctionPointer_cache.clear()
            if outer != "start":
                memguard.init(BUDGET)
            pynvml._nvmlGetFunctionPointer_cache.clear()
            lock.count, lock.at, lock.then = 0, at, call
            try:
                OUTER[outer]()
            except MemguardError as error:  # what came within has shut it down, say
                said.add(str(error))
            except BaseException as error:
                wrong.append(f"{name} within {outer}, {at}: {type(error).__name__}: {error}")
            if lock.count < at:
                break
            tried += 1
            lock.at = 0
            memguard.shutdown()
            memguard.init(BUDGET)
            memguard.ledger()
memguard.shutdown()
result.update(tried=tried, wrong=wrong, said=sorted(said))
"""


def test_every_call_while_this_thread_has_the_lock_of_nvmls_bindings(run: Run, without_cuda: dict[str, str]) -> None:
    found = run(WITHIN_PYNVML, env=without_cuda)
    print(found["tried"], found["said"])
    assert found["wrong"] == []
    assert found["tried"] > 80
    assert any("NVML is just being asked on this thread" in text for text in found["said"])
