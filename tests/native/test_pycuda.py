"""The real PyCUDA under a budget, over the stub of libcuda: its figures are the driver's after each step.

Each case is a random program in a process of its own (pycuda_program.py). More of them:
`python tests/native/pycuda_program.py KIND SEED STEPS`, with the environment that stub_driver.build returns.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import stub_driver
from served import environment

HERE = Path(__file__).parent
STEPS = 500


@pytest.fixture(scope="module")
def stubbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {**environment(), **stub_driver.build(tmp_path_factory.mktemp("cuda"))}


def python(stubbed: dict[str, str], *arguments: str, **more: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], env={**stubbed, **more}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["plain", "contexts", "threads", "signals", "finalizers"])
def test_the_figures_are_the_drivers(stubbed: dict[str, str], kind: str, seed: int) -> None:
    found = python(stubbed, str(HERE / "pycuda_program.py"), kind, str(seed), str(STEPS))
    requests, hits, refusals, nested = map(int, found.split())
    assert requests > 100 and hits and refusals
    assert nested or kind not in ("signals", "finalizers")


HIT = """
import ctypes, gc, sys, threading, weakref
import pycuda.driver as drv
from support.capping import apply_caps
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.pycuda.adapter import PyCUDA
class Host(SimulatedHost):
    simulated = False
drv.init()
context = drv.Device(0).retain_primary_context()
context.push()
stub = ctypes.CDLL("libcuda.so.1")
stub.stub_asked.restype = ctypes.c_char_p
host = Host(["h200"])
framework = PyCUDA(host)
applied = apply_caps(framework, {gpu.uuid: 40 << 20 for gpu in host.devices()})
gpu = host.devices()[0]
pool = drv.DeviceMemoryPool()
"""
END = "\nsys.stdout.flush(); import os; os._exit(0)"


def test_a_hit_asks_the_driver_for_nothing_and_waits_for_no_lock(stubbed: dict[str, str]) -> None:
    code = """
def work():
    context.push()
    for _ in range(1000):
        way(1024)
    drv.Context.pop()
for way in (pool.allocate, drv.mem_alloc):
    for _ in range(2):
        way(1024)
    stub.stub_forget()
    with framework._lock:
        thread = threading.Thread(target=work)
        thread.start(); thread.join(20)
        print(thread.is_alive())
    asked, name = [], True
    while name:
        name = stub.stub_asked(len(asked))
        asked.append(name)
    print({name for name in asked if name} <= {b"cuCtxPushCurrent_v2", b"cuCtxGetCurrent"})
"""
    assert python(stubbed, "-c", HIT + code + END).split() == ["False", "True"] * 2


def test_memguards_pool_gives_back_on_a_thread_without_a_context_and_the_users_on_its_own(
    stubbed: dict[str, str],
) -> None:
    """Neither leaks, of which PyCUDA warns, and no context is left on the other thread, which would end the process."""
    code = """
stub.stub_taken.restype = ctypes.c_size_t
def trim_partly(needed=3 << 20):
    framework.trim_partly(gpu, needed)
    print(drv.Context.get_current() is None)
for way in (drv.mem_alloc, pool.allocate):
    blocks = [way(8 << 20) for _ in range(3)]
    kept = blocks.pop()
    blocks.clear()
    for needed in (3 << 20, 1 << 30):
        before = stub.stub_taken()
        thread = threading.Thread(target=trim_partly, args=(needed,))
        thread.start(); thread.join()
        print(before - stub.stub_taken() >> 20)
        again = way(1 << 20)
        del again
        print(before - stub.stub_taken() >> 20, framework.usage(gpu).held == stub.stub_taken())
    del kept
    framework.trim(gpu)
"""
    done = subprocess.run(
        [sys.executable, "-c", HIT + code + END], env=stubbed, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "PyCUDA WARNING" not in done.stderr, done.stderr[-2000:]
    own = ["True", "10", "8", "True", "True", "12", "10", "True"]
    users = ["True", "0", "8", "True", "True", "0", "10", "True"]
    assert done.stdout.split() == own + users


def test_a_request_is_served_once_room_was_made(stubbed: dict[str, str]) -> None:
    """Above its cap, and on a full card; on a thread of its own too."""
    code = """
asked, refused = [], []
def short(shortage):
    asked.append(shortage)
    with_context = drv.Context.get_current() is not None
    if shortage.full:
        theirs.clear()
    else:
        framework.resize({gpu.uuid: 900 << 20})
    return with_context
framework.on_shortage, framework.on_refusal = short, refused.append
theirs = []
arrays = [drv.mem_alloc(100 << 20)]
raw = ctypes.c_uint64()
class Theirs:
    def __init__(self):
        self.at = ctypes.c_uint64()
        stub.cuMemAlloc_v2(ctypes.byref(self.at), ctypes.c_size_t(700 << 20))
    def __del__(self):
        stub.cuMemFree_v2(self.at)
theirs.append(Theirs())
def work():
    context.push()
    try:
        arrays.append(drv.mem_alloc(400 << 20))
    finally:
        drv.Context.pop()
thread = threading.Thread(target=work)
thread.start(); thread.join()
print(len(arrays), [one.full for one in asked], len(refused))
"""
    assert python(stubbed, "-c", HIT + code + END).split("\n")[0] == "2 [False, True] 0"


@pytest.mark.parametrize(("cuda", "another"), [(13000, 1), (12080, 0), (12080, 1), (11080, 0)])
def test_a_reset_of_the_primary_context_is_noticed(stubbed: dict[str, str], cuda: int, another: int) -> None:
    """What the pool kept idle is gone: it hands none of that out, and its memory is off the books.

    From CUDA 13.0 on the id is another one (measured). Of older drivers that is not known.
    """
    code = (
        f"another = {another}"
        + """
for emptied in (False, False, True, True):
    for _ in range(3):
        array = drv.mem_alloc(3 << 20)
    if emptied:
        del array
        framework.trim(gpu)
        array = drv.mem_alloc(3 << 20)
    old = int(array)
    del array
    stub.stub_reset(another)
    array = drv.mem_alloc(3 << 20)
    found = ctypes.c_uint64()
    there = stub.cuPointerGetAttribute(ctypes.byref(found), 7, ctypes.c_uint64(int(array)))
    stub.stub_taken.restype = ctypes.c_size_t
    print(there, int(array) != old, framework.usage(gpu).held == stub.stub_taken())
    del array
"""
    )
    found = python(stubbed, "-c", HIT + code + END, CUDA_STUB_VERSION=str(cuda))
    assert found.split() == ["0", "True", "True"] * 4


@pytest.mark.parametrize(("cuda", "asks"), [(13000, False), (12080, True)])
def test_a_hit_asks_for_a_block_only_where_the_contexts_id_does_not_tell(
    stubbed: dict[str, str], cuda: int, asks: bool
) -> None:
    """Of 1,000 hits: in the context of the pool, and while another one is current that PyCUDA does not know of."""
    code = """
for _ in range(2):
    drv.mem_alloc(1024)
mine = framework._last
asked, lives = [], mine.memory_exists
mine.memory_exists = lambda: (asked.append(1), lives())[1]
for _ in range(1000):
    drv.mem_alloc(1024)
print(len(asked))
asked.clear()
stub.cuCtxPushCurrent_v2(ctypes.c_void_p(0x7f0000001001))
for _ in range(1000):
    drv.mem_alloc(1024)
print(len(asked))
stub.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
"""
    found = python(stubbed, "-c", HIT + code + END, CUDA_STUB_VERSION=str(cuda))
    assert found.split() == [str(1000 * asks), "1000"]


@pytest.mark.parametrize("seed", range(3))
def test_the_peak_is_the_most_that_was_in_use_though_nobody_looked_then(stubbed: dict[str, str], seed: int) -> None:
    """Three pools with two sizes each were full one after the other. Then idle blocks serve bursts that rise and fall
    between two readings, higher and higher.
    """
    code = (
        f"dice = random.Random({seed})"
        + """
framework.resize({gpu.uuid: 1 << 30})
ways, sizes = (drv.mem_alloc, pool.allocate, drv.DeviceMemoryPool().allocate), (2 << 20, 3 << 20)
pairs = [(way, size) for way in ways for size in sizes]
for way, size in pairs:
    live = [way(size) for _ in range(20)]
    live.clear()
in_use = lambda: sum(one.active_bytes() for one in framework._all())
most, wrong, rises = framework.usage(gpu).peak, 0, 0
for burst in range(300):
    before = most
    for _ in range(burst // 2):
        if live and dice.random() < 0.3:
            live.pop(dice.randrange(len(live)))
        elif len(live) < 18:
            way, size = dice.choice(pairs)
            live.append(way(size))
            most = max(most, in_use())
        else:  # more than one bin can have
            way, size = dice.choice(pairs)
            live += [way(size) for _ in range(dice.randint(1, 3))] if len(live) < burst // 4 else []
            most = max(most, in_use())
    live.clear()
    rises += most > before
    wrong += framework.usage(gpu).peak != most
print(wrong, rises > 5)
"""
    )
    assert python(stubbed, "-c", "import random\n" + HIT + code + END).split() == ["0", "True"]


def test_a_handler_that_gives_idle_blocks_back_fails_no_free(stubbed: dict[str, str]) -> None:
    """Between the look-up of a block's bin and that of its entry, a signal handler may trim."""
    code = """
from memguard._frameworks.pycuda.pool import Pool
block = pool.allocate(16 << 20)
class Trims(dict):
    def get(self, *key):
        found = dict.get(self, *key)
        framework.trim(gpu)
        return found
(tracked,) = framework._others.values()
tracked._bin_at = Trims(tracked._bin_at)
block.free()
stub.stub_taken.restype = ctypes.c_size_t
print(framework.usage(gpu).held == stub.stub_taken())
"""
    assert python(stubbed, "-c", HIT + code + END).split() == ["True"]


def test_a_copy_into_a_block_that_is_handed_out_again_comes_after_its_former_work(stubbed: dict[str, str]) -> None:
    """By an event of the default stream, or of the whole context once PyCUDA may have a stream aside of that."""
    code = """
import numpy as np
from memguard import exchange
from memguard._frameworks.pycuda import contexts
from pycuda import gpuarray
source = gpuarray.empty(1 << 20, np.float32)
class Named:
    __cuda_array_interface__ = {**source.__cuda_array_interface__, "stream": 0x7f0000000040}
def asked():
    recycled = gpuarray.empty(1 << 20, np.float32)
    old = int(recycled.ptr)
    del recycled
    stub.stub_forget()
    made = exchange.to(Named(), "pycuda", copy=True, stream=0x7f0000000040)
    found, name = [], True
    while name:
        name = stub.stub_asked(len(found))
        found.append(name and name.decode())
    return int(made.ptr) == old, "cuEventRecord" in found, "cuCtxRecordEvent" in found
print(contexts.may_use_non_blocking_streams(), *asked())
made = drv.Stream(), drv.Stream(0)
print(contexts.may_use_non_blocking_streams(), *asked())
made = drv.Stream(flags=1)
print(contexts.may_use_non_blocking_streams(), *asked())
applied.undo()
print(contexts.may_use_non_blocking_streams(), *asked())
"""
    assert [line.split() for line in python(stubbed, "-c", HIT + code + END).splitlines()] == [
        ["True", "True", "False", "True"],  # CUDA was there before the budget, so there may be such a stream
        ["True", "True", "False", "True"],
        ["True", "True", "False", "True"],
        ["True", "False", "False", "False"],  # the driver's memory needs no order
    ]
    none = "from memguard._devices import contexts; known, contexts.initialised = contexts.initialised, lambda: False\n"
    early = HIT.replace("applied =", none + "applied =").replace(
        "gpu = host", "contexts.initialised = known\ngpu = host"
    )
    assert [line.split() for line in python(stubbed, "-c", early + code + END).splitlines()] == [
        ["False", "True", "True", "False"],
        ["False", "True", "True", "False"],
        ["True", "True", "False", "True"],
        ["True", "False", "False", "False"],
    ]


def test_a_pool_that_says_nothing_of_what_it_holds_is_refused(stubbed: dict[str, str]) -> None:
    """PyCUDA before 2021.1."""
    code = """
from memguard.errors import CapNotApplied
applied.undo()
class Old:
    pass
drv.DeviceMemoryPool = Old
try:
    apply_caps(PyCUDA(host), {gpu.uuid: 40 << 20})
except CapNotApplied as error:
    print("2021.1" in str(error))
"""
    assert python(stubbed, "-c", HIT + code + END).split() == ["True"]


def test_nothing_is_said_at_the_end_of_a_program(stubbed: dict[str, str]) -> None:
    """Allocations and pools that die with the interpreter, and one in a cycle."""
    code = """
keep = [drv.mem_alloc(1024), pool.allocate(2048), drv.mem_alloc(3 << 20)]
class Cycle:
    pass
cycle = Cycle(); cycle.itself, cycle.array = cycle, drv.mem_alloc(1024)
import atexit
atexit.register(drv.Context.pop)
"""
    done = subprocess.run([sys.executable, "-c", HIT + code], env=stubbed, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_ids_of_contexts_tell_them_apart_where_handles_do_not(stubbed: dict[str, str]) -> None:
    """The stub is what tests/gpu/test_pycuda_context_id.py asks a GPU about."""
    code = """
number = ctypes.c_uint64()
ids, handles = set(), set()
for _ in range(3):
    own = drv.Device(0).make_context.__wrapped__(drv.Device(0))
    assert stub.cuCtxGetId(None, ctypes.byref(number)) == 0
    ids.add(number.value); handles.add(own.handle)
    own.detach()
print(len(ids), len(handles))
"""
    assert python(stubbed, "-c", HIT + code + END).split() == ["3", "1"]
