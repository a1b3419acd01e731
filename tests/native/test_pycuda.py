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
applied = framework.apply({gpu.uuid: 40 << 20 for gpu in host.devices()}, {})
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


def test_a_reset_of_the_primary_context_is_noticed_whatever_it_does_to_the_id(stubbed: dict[str, str]) -> None:
    """What the pool kept idle is gone: it hands none of that out, and its memory is off the books."""
    code = """
for another in (0, 1):
    for _ in range(3):
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
    assert python(stubbed, "-c", HIT + code + END).split() == ["0", "True", "True"] * 2


def test_a_pool_that_says_nothing_of_what_it_holds_is_refused(stubbed: dict[str, str]) -> None:
    """PyCUDA before 2021.1."""
    code = """
from memguard.errors import CapNotApplied
applied.undo()
class Old:
    pass
drv.DeviceMemoryPool = Old
try:
    PyCUDA(host).apply({gpu.uuid: 40 << 20}, {})
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
    """The stub is what tests/gpu/test_pycuda_reset.py asks a GPU about."""
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
