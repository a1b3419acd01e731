"""What may come at any point of an allocation in the real numba-cuda: a Ctrl-C, a signal handler, another thread.

CPython looks for signals where a function begins, behind a call and at a jump back. Each such point of memguard's code
is tried by itself, found by tracing.
"""

from __future__ import annotations

from typing import Any

import pytest
from test_numba_blocks import LIVE, Run, beside

__all__ = ["beside"]  # a fixture

POINTS = (
    LIVE
    + """
import dis, gc, sys
gc.collect()
gc.freeze()
import memguard._frameworks.driver_pages as pages
import memguard._frameworks.numba.accounting as accounting
import memguard._frameworks.numba.memory as memories
import memguard._frameworks.numba.pool as pool
manager_file = sys.modules[type(manager).__module__].__file__
files = {manager_file, *(module.__file__ for module in (memories, accounting, pool, pages))}
stub.stub_idle(1)
sys.unraisablehook = lambda _: None
class Stop(BaseException): pass
known = {}
def points(code):
    if code not in known:
        good, before = set(), ""
        for step in dis.get_instructions(code):
            if step.opname in ("JUMP_BACKWARD", "JUMP_ABSOLUTE") or before.startswith("CALL"):
                good.add(step.offset)
            before = step.opname
        known[code] = good
    return known[code]
def interrupted(work, number, act):
    "Do the work, and act at this point of memguard's code. Where that was; None: it has fewer points."
    count, where = 0, None
    def here(frame):
        nonlocal count, where
        count += 1
        if count == number:
            where = f"{frame.f_code.co_name} {frame.f_lineno}"
            act()
    def local(frame, event, argument):
        if event == "opcode" and where is None and frame.f_lasti in points(frame.f_code):
            here(frame)
        return local
    def tracer(frame, event, argument):
        if where is None and frame.f_code.co_filename in files:
            if frame.f_code.co_name != "__del__":  # what comes before its first statement cannot be mended
                here(frame)
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return local
    sys.settrace(tracer)
    try:
        work()
    except Stop:
        pass
    finally:
        sys.settrace(None)
    return where
def emptied():
    manager.trim_partly()
    return [stub.stub_taken(), *manager.usage()[:3], len(manager.pool.idle), len(manager.figures.blocks)]
"""
)

WORK = {
    "from the pool": ("live[:] = [bytes_of(2 * MIB)]; live.clear(); flush()", "live.append(bytes_of(2 * MIB))"),
    "from the driver": ("pass", "live.append(bytes_of(2 * MIB))"),
    "from the driver's slab": ("live[:] = [bytes_of(700_000)]", "live.append(bytes_of(700_000))"),
    "after waiting": ("live[:] = [bytes_of(16 * MIB) for _ in range(4)]; live.clear(); manager.deallocations.clear()",
                      "live.append(bytes_of(16 * MIB))"),
    "after giving back": ("live[:] = [bytes_of(16 * MIB) for _ in range(4)]; live.clear(); flush()",
                          "live.append(bytes_of(40 * MIB))"),
    "dropped": ("live[:] = [bytes_of(2 * MIB)]", "live.clear()"),
    "flushed": ("live[:] = [bytes_of(2 * MIB) for _ in range(3)]; live.clear()", "manager.deallocations.clear()"),
    "flushed to the driver": (
        "live[:] = [bytes_of(2 * MIB) for _ in range(2)]; live[0].gpu_data.handle; live.clear()",
        "manager.deallocations.clear()",
    ),
    "a slab's flushed to the driver": (
        "live[:] = [bytes_of(1000) for _ in range(2)]; live[0].gpu_data.handle; live.clear()",
        "manager.deallocations.clear()",
    ),
    "given back": ("live[:] = [bytes_of(2 * MIB) for _ in range(3)]; live.clear()", "manager.trim_partly()"),
}  # fmt: skip


SECOND = {"alone": "", "events": "second = cuda.stream()\n"}
"""With a second stream an event is recorded after each flush. The default one alone is asked whether it is idle."""


@pytest.mark.parametrize("how", SECOND)
@pytest.mark.parametrize("kind", WORK)
def test_a_ctrl_c_loses_no_byte_of_the_cap(beside: Run, kind: str, how: str) -> None:
    before, work = WORK[kind]
    found = beside(
        POINTS
        + SECOND[how]
        + f"""
live, wrong, number = [], [], 0
def work(): {work}
def act(): raise Stop
while True:
    live.clear()
    assert emptied() == [0] * 6
    {before}
    number += 1
    where = interrupted(work, number, act)
    live.clear()
    if emptied() != [0] * 6:
        wrong.append([where, *emptied()])
        break
    if where is None:
        break
result["wrong"], result["points"] = wrong, number - 1
"""
    )
    assert found["wrong"] == [] and found["points"] >= 6


@pytest.mark.parametrize("how", SECOND)
@pytest.mark.parametrize("kind", ["from the pool", "from the driver", "after waiting", "after giving back"])
def test_a_signal_handler_finds_the_cap_full_or_takes_what_is_left(beside: Run, kind: str, how: str) -> None:
    """It allocates until it is refused, at each point. Its block and the one that it interrupts are two."""
    before, work = WORK[kind]
    found = beside(
        POINTS
        + SECOND[how]
        + f"""
stub.stub_most.restype = ctypes.c_size_t
live, theirs, number = [], [], 0
def work():
    try:
        {work}
    except module.CudaAPIError:
        pass
def act():
    try:
        while True: theirs.append(bytes_of(2 * MIB))
    except module.CudaAPIError:
        pass
result["wrong"] = []
stub.stub_level()
while True:
    {before}
    number += 1
    where = interrupted(work, number, act)
    blocks = [at(array) for array in live + theirs]
    used = sum(array.nbytes for array in live + theirs)
    if (stub.stub_most() > 64 * MIB or len(set(blocks)) != len(blocks) or manager.usage()[1] != used
            or stub.stub_taken() != manager.usage()[0]):
        result["wrong"].append([where, stub.stub_most() >> 20, len(blocks), *manager.usage()])
        break
    live.clear(); theirs.clear()
    if emptied() != [0] * 6:
        result["wrong"].append([where, *emptied()])
        break
    if where is None:
        break
result["points"] = number - 1
"""
    )
    assert found["wrong"] == [] and found["points"] >= 12


def test_a_signal_handler_that_allocates_and_frees_gets_no_block_in_use(beside: Run) -> None:
    """Nothing that was freed may come back before its work is done, at whatever point the handler came."""
    found = beside(
        POINTS
        + """
stub.stub_idle(0)
number, wrong = 0, []
while True:
    number += 1
    first = [bytes_of(4 * MIB) for _ in range(3)]
    first.clear()
    flush()
    live, running = [], set()
    def work(): live.append(bytes_of(4 * MIB))
    def act():
        array = bytes_of(4 * MIB)
        running.add(at(array))   # a kernel, which runs until `stub_finish`
        del array
        manager.deallocations.clear()
    where = interrupted(work, number, act)
    for _ in range(4):
        live.append(bytes_of(4 * MIB))
    wrong += [where for array in live if at(array) in running]
    if wrong or where is None:
        break
    live.clear()
    flush()
    emptied()
result["wrong"], result["points"] = wrong, number - 1
"""
    )
    assert found["wrong"] == [] and found["points"] >= 12


def test_a_storm_of_signals_stays_within_the_cap(beside: Run) -> None:
    found = beside(
        LIVE
        + """
import gc, random, signal, time
stub.stub_most.restype = ctypes.c_size_t
choose, live, theirs, inside, errors = random.Random(1), [], [], [], []
def step(arrays):
    if choose.random() < 0.6:
        try:
            arrays.append(bytes_of(choose.choice((2 * MIB, 4 * MIB, 6 * MIB))))
        except module.CudaAPIError:
            if arrays: arrays.pop()
        except Exception as error:
            errors.append(repr(error))
    elif arrays:
        arrays.pop(choose.randrange(len(arrays)))
    if choose.random() < 0.2: stub.stub_finish()
handled = 0
def handler(*_):
    global handled
    if not inside:
        inside.append(1)
        handled += 1
        for _ in range(20): step(theirs)
        inside.clear()
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.0004, 0.0004)
end = time.time() + 3
while time.time() < end: step(live)
signal.setitimer(signal.ITIMER_REAL, 0, 0)
live.clear(); theirs.clear(); gc.collect()
manager.trim_partly()
result["errors"], result["handled"] = errors[:3], handled > 100
result["most"], result["left"] = stub.stub_most() <= 64 * MIB, [stub.stub_taken(), *manager.usage()[:3]]
"""
    )
    assert found == {"errors": [], "handled": True, "most": True, "left": [0, 0, 0, 0]}


def test_marks_of_streams_that_were_destroyed_do_not_pile_up(beside: Run) -> None:
    found = beside(
        LIVE
        + """
from memguard._frameworks.numba import watch
stub.stub_idle(1)
kept = bytes_of(4 * MIB)
for _ in range(1000):
    stream = cuda.stream()
    del stream
result["live"] = [stub.stub_live(0) < 50, len(watch.ended.marks) < 50, manager.pooling]
"""
    )
    assert found == {"live": [True, True, True]}


def test_a_call_that_numba_refuses_and_its_own_stream_by_handle_leave_the_pool(beside: Run) -> None:
    found = beside(
        LIVE
        + """
import numpy
from memguard import exchange
stub.stub_idle(1)
refused = []
for stream in ("bad", 3.5, object()):
    try:
        cuda.to_device(numpy.zeros(10), stream=stream)
    except TypeError:
        refused.append(manager.pooling)
stream = cuda.stream()
array = exchange.to(bytes_of(4 * MIB), "numba", copy=True, stream=stream)
array.copy_to_host()
result["pooling"] = [*refused, manager.pooling]
"""
    )
    assert found == {"pooling": [True] * 4}


def test_a_mark_that_a_signal_handler_closes_while_it_is_asked_is_over(beside: Run) -> None:
    found: dict[str, Any] = beside(
        LIVE
        + """
from memguard._devices import streams
handle = int(context.handle)
real = contexts.capture_safe
made = []
class closing(real):
    def __enter__(self):
        super().__enter__()
        made[-1].close()
kept = streams.Mark(0, streams.LEGACY, handle)
kept.close()
result["over"] = []
for ask in ("passed", "wait"):
    made.append(streams.Mark(0, streams.LEGACY, handle))
    contexts.capture_safe = closing
    result["over"].append(getattr(made[-1], ask)())
    contexts.capture_safe = real
result["idle"] = len(streams._idle[contexts.primary(0)])
"""
    )
    assert found == {"over": [True, None], "idle": 1}
