"""The real PyCUDA and numba-cuda in the shared pool, over a libcuda without a GPU: blocks, order, refusals, undo."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import stub_driver
from served import environment, serve

Run = Callable[..., dict[str, Any]]

COMMON = """
import ctypes, gc, json, signal, sys, threading
from stand_ins import Host, GIB, MIB, apply_caps, drifts
from memguard._devices import contexts, streams
from memguard._frameworks.shared_pool import SharedPool
stub = ctypes.CDLL("libcuda.so.1")
stub.stub_asked.restype = ctypes.c_char_p
stub.stub_taken.restype = ctypes.c_size_t
host = Host()
def asked():
    found, number = [], 0
    while (name := stub.stub_asked(number)) is not None:
        found.append(name.decode())
        number += 1
    return found
"""
PYCUDA = (
    COMMON
    + """
import pycuda.driver as drv
from memguard._frameworks.pycuda.pooled import PooledPyCUDA
drv.init()
context = drv.Device(0).retain_primary_context()
context.push()
uuid = list(contexts.ordinals())[0]
gpu = next(iter(host.gpus)).__class__(uuid, "stub", 0, GIB, 0, "hopper")
joint = SharedPool({uuid: 64 * MIB}, print)
framework = PooledPyCUDA(host, joint)
result = {}
"""
)
NUMBA = (
    COMMON
    + """
from numba import cuda
from numba.cuda.cudadrv import driver as module
from memguard._frameworks.numba.pooled import PooledNumba
module.driver.ensure_initialized()
uuid = list(contexts.ordinals())[0]
gpu = host.gpus[0].__class__(uuid, "stub", 0, GIB, 0, "hopper")
joint = SharedPool({uuid: 64 * MIB}, print)
framework = PooledNumba(host, joint)
def bytes_of(size): return cuda.device_array(size, "u1")
"""
)


@pytest.fixture(scope="module")
def stubbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {**environment(), **stub_driver.build(tmp_path_factory.mktemp("cuda"))}


@pytest.fixture
def pycuda(stubbed: dict[str, str]) -> Run:
    def run(code: str) -> dict[str, Any]:
        program = PYCUDA + textwrap.dedent(code) + "\ncontext.pop()\nprint('RESULT', json.dumps(result))"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program], env=stubbed, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, Any] = json.loads(done.stdout.split("RESULT ", 1)[1])
        return found

    return run


@pytest.fixture(scope="module")
def numba(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    yield from serve("numba.cuda", stub_driver.build_numbas(tmp_path_factory.mktemp("cuda")))


def test_pycudas_arrays_are_blocks_of_the_pool_and_undone_they_are_its_own(pycuda: Run) -> None:
    found = pycuda(
        """
        raw = drv.mem_alloc
        applied = apply_caps(framework, {uuid: 64 * MIB})
        first, (second, pitch) = drv.mem_alloc(5 * MIB), drv.mem_alloc_pitch(1000, 1024, 4)
        third = drv.DeviceMemoryPool().allocate(MIB)
        result["pitch"] = pitch
        result["usage"] = framework.usage(gpu)[:3]
        result["pool"], result["plain"] = joint.figures(uuid), stub.stub_taken()
        result["kinds"] = [type(x).__name__ for x in (first, second, third)]
        result["address"] = [int(first) == first.gpudata == first.get_pointer() != 0]
        result["address"] += [isinstance(first, drv.PointerHolderBase)]
        first.free()
        try:
            first.free()
        except drv.LogicError as error:
            result["twice"] = str(error)
        del third
        result["left"] = framework._counted_on(uuid)
        result["drift"] = drifts(framework)
        applied.undo(); applied.undo()
        result["undone"] = drv.mem_alloc is raw
        del second  # after the undo
        result["blocks"] = stub.stub_blocks()
        drv.mem_alloc(MIB)
        """
    )
    mib = 1 << 20
    assert found["pitch"] == 1024 and found["usage"] == [7 * mib, 7 * mib, 0]
    assert found["pool"] == [32 * mib, 7 * mib] and found["plain"] == 0
    assert found["kinds"] == ["PoolAllocation"] * 3 and found["address"] == [True, True]
    assert "invalid resource handle" in found["twice"] and found["left"] == mib
    assert found["drift"] == [] and found["undone"] and found["blocks"] == 0


def test_a_free_comes_after_all_work_of_the_context_and_a_block_is_ready_at_once(pycuda: Run) -> None:
    found = pycuda(
        """
        apply_caps(framework, {uuid: 64 * MIB})
        block = drv.mem_alloc(MIB)
        stub.stub_forget()
        block = None
        result["free"] = asked()
        stub.stub_forget()
        block = drv.mem_alloc(MIB)
        result["take"] = asked()
        """
    )
    free = [name for name in found["free"] if name in ("cuCtxRecordEvent", "cuStreamWaitEvent", "cuMemFreeAsync")]
    assert free == ["cuCtxRecordEvent", "cuStreamWaitEvent", "cuMemFreeAsync"]
    take = [name for name in found["take"] if name in ("cuMemAllocFromPoolAsync", "cuStreamSynchronize")]
    assert take == ["cuMemAllocFromPoolAsync", "cuStreamSynchronize"]


def test_a_free_that_would_end_a_capture_is_made_with_the_next(pycuda: Run) -> None:
    found = pycuda(
        """
        apply_caps(framework, {uuid: 64 * MIB})
        block = drv.mem_alloc(MIB)
        stub.stub_fail(b"cuCtxRecordEvent", 901, 1)
        block = None
        result["waiting"] = [stub.stub_blocks(), framework._counted_on(uuid)]
        block = drv.mem_alloc(2 * MIB)
        result["freed"] = [stub.stub_blocks(), framework._counted_on(uuid)]
        """
    )
    assert found == {"waiting": [1, 1 << 20], "freed": [1, 2 << 20]}


def test_pycuda_is_refused_where_the_pool_is_full_whoever_fills_it(pycuda: Run) -> None:
    found = pycuda(
        """
        apply_caps(framework, {uuid: 64 * MIB})
        told, asked_for = [], []
        framework.on_refusal = lambda moment: told.append([moment.requested, moment.source])
        framework.on_shortage = lambda shortage: asked_for.append(list(shortage)) or False
        live = [drv.mem_alloc(20 * MIB)]
        pool = joint._pools[uuid]
        held = ctypes.c_ulonglong()
        stub.cuMemAllocFromPoolAsync(ctypes.byref(held), ctypes.c_size_t(30 * MIB), ctypes.c_void_p(pool.handle), None)
        live.append(drv.mem_alloc(14 * MIB))
        try:
            drv.mem_alloc(1 * MIB)
        except drv.MemoryError as error:
            result["text"], result["size"] = str(error), error.memguard_requested
        result["told"], result["shortage"] = told, asked_for
        result["remainder"] = joint.remainder(uuid)
        live.clear()
        framework.trim(gpu)
        result["trimmed"] = joint.figures(uuid)
        """
    )
    mib = 1 << 20
    assert "asked for 1.0 MiB; the shared pool of the memguard budget may hold 64.0 MiB" in found["text"]
    assert found["size"] == mib and found["told"] == [[mib, "refusal"]]
    assert [entry[2:] for entry in found["shortage"]] == [[mib, 32 * mib, False]]
    assert found["remainder"] == 30 * mib and found["trimmed"] == [30 * mib, 30 * mib]


def test_a_ctrl_c_within_pycudas_allocation_or_free_loses_no_block(pycuda: Run) -> None:
    """At each line that memguard runs meanwhile."""
    found = pycuda(
        """
        import memguard
        apply_caps(framework, {uuid: 64 * MIB})
        drv.mem_alloc(MIB)
        root, state = memguard.__path__[0], {"left": None}
        def trace(frame, event, arg):
            if frame.f_code.co_filename.startswith(root) and "pool_blocks" in frame.f_code.co_filename:
                if event == "line" and state["left"] is not None:
                    state["left"] -= 1
                    if state["left"] < 0:
                        state["left"] = None
                        raise KeyboardInterrupt
            return trace
        lost, times = [], 0
        for number in range(60):
            state["left"] = number
            sys.settrace(trace)
            try:
                block = drv.mem_alloc(MIB)
                block.free()
            except KeyboardInterrupt:
                times += 1
            finally:
                sys.settrace(None)
            block = None
            gc.collect()
            drv.mem_alloc(MIB).free()
            if framework._counted_on(uuid) != stub.stub_blocks() * MIB or stub.stub_blocks():
                lost.append(number)
                break
        result["lost"], result["times"] = lost, times
        """
    )
    assert found["lost"] == [] and found["times"] > 20


def test_another_context_of_pycudas_lies_outside_and_that_is_said(pycuda: Run) -> None:
    found = pycuda(
        """
        make_context = drv.Device.make_context
        apply_caps(framework, {uuid: 64 * MIB})
        other = make_context(drv.Device(0))
        block = drv.mem_alloc(MIB)
        result["notes"], result["plain"] = framework.notes, stub.stub_taken()
        del block
        other.pop()
        """
    )
    (note,) = found["notes"]
    assert "not the primary one" in note and found["plain"] == 2 << 20


def test_where_the_driver_cannot_cap_the_pool_memguard_refuses(pycuda: Run) -> None:
    found = pycuda(
        """
        joint = SharedPool({uuid: 64 * MIB}, print, clients=["jax"])
        framework = PooledPyCUDA(host, joint)
        apply_caps(framework, {uuid: 64 * MIB})
        first = drv.mem_alloc(40 * MIB)
        try:
            drv.mem_alloc(30 * MIB)
        except drv.MemoryError as error:
            result["text"] = str(error)
        result["second"] = drv.mem_alloc(24 * MIB) is not None
        result["current"] = stub.stub_current_pool()
        del first
        """
    )
    assert "may hold 64.0 MiB" in found["text"] and found["second"] and found["current"] == 0


def test_two_threads_do_not_pass_that_cap_together(pycuda: Run) -> None:
    """Both look at what is in use before either has allocated."""
    found = pycuda(
        """
        joint = SharedPool({uuid: 64 * MIB}, print, clients=["jax"])
        framework = PooledPyCUDA(host, joint)
        apply_caps(framework, {uuid: 64 * MIB})
        both, waits = threading.Barrier(2, timeout=10), []
        from memguard._devices.pools import DefaultPool as kind
        looked = kind.used
        def used(pool):
            found = looked(pool)
            if waits:
                waits.pop()
                both.wait()
            return found
        kind.used = used
        live, refused = [drv.mem_alloc(MIB)], []
        waits += [1, 1]
        def work():
            context.push()
            try:
                live.append(drv.mem_alloc(40 * MIB))
            except drv.MemoryError as error:
                refused.append(str(error))
            finally:
                context.pop()
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads: thread.start()
        for thread in threads: thread.join(30)
        result["live"], result["refused"], result["used"] = len(live), len(refused), joint.figures(uuid)[1]
        live.clear()
        """
    )
    assert found == {"live": 2, "refused": 1, "used": 41 << 20}


def test_numbas_arrays_are_blocks_of_the_pool_and_large_ones_go_back_at_once(numba: Run) -> None:
    found = numba(
        NUMBA
        + """
applied = apply_caps(framework, {uuid: 64 * MIB})
large, small = bytes_of(5 * MIB), bytes_of(1000)
result["usage"], result["pool"] = framework.usage(gpu)[:3], joint.figures(uuid)
result["plain"] = stub.stub_taken()
part = large[: 2 * MIB]
del large
result["part"] = framework._counted_on(uuid)
del part
result["large"] = framework._counted_on(uuid)
del small
result["pending"] = framework._counted_on(uuid)
framework.trim(gpu)
result["trimmed"] = [framework._counted_on(uuid), *joint.figures(uuid)]
result["drift"], result["unseen"] = drifts(framework), framework.unseen()
kept = bytes_of(MIB)
applied.undo(); applied.undo()
plain = bytes_of(MIB)
result["undone"] = stub.stub_taken()
del kept, plain
cuda.current_context().memory_manager.deallocations.clear()
result["end"] = [stub.stub_blocks(), stub.stub_taken()]
"""
    )
    mib = 1 << 20
    assert found["usage"] == [5 * mib + 1000, 5 * mib + 1000, 0] and found["pool"] == [32 * mib, 5 * mib + 1000]
    assert found["plain"] == 0 and found["part"] == 5 * mib + 1000
    assert found["large"] == 1000 and found["pending"] == 1000 and found["trimmed"] == [0, 0, 0]
    assert found["drift"] == [] and found["unseen"] is None
    assert found["undone"] == 2 * mib and found["end"] == [0, 0]


def test_numba_is_refused_with_its_own_error_after_its_pending_frees(numba: Run) -> None:
    found = numba(
        NUMBA
        + """
apply_caps(framework, {uuid: 64 * MIB})
told = []
framework.on_refusal = lambda moment: told.append(moment.requested)
live = bytes_of(40 * MIB)
try:
    bytes_of(30 * MIB)
except module.CudaAPIError as error:
    result["code"], result["text"] = int(error.code), str(error)
result["told"] = told
with cuda.defer_cleanup():
    del live
    try:
        bytes_of(30 * MIB)
    except module.CudaAPIError as error:
        result["deferred"] = int(error.code)
result["served"] = bytes_of(30 * MIB).size
"""
    )
    assert found["code"] == 2 and "the shared pool of the memguard budget may hold 64.0 MiB" in found["text"]
    assert found["told"][0] == 30 << 20 and found["deferred"] == 2 and found["served"] == 30 << 20


def test_a_numba_that_is_live_or_has_another_manager_is_refused(numba: Run) -> None:
    found = numba(
        NUMBA
        + """
from memguard.errors import CapNotApplied, ConflictingSetting
array = bytes_of(10)
try:
    apply_caps(framework, {uuid: 64 * MIB})
except CapNotApplied as error:
    result["live"] = str(error)
module._memory_manager = type("Other", (module.NumbaCUDAMemoryManager,), {})
try:
    apply_caps(framework, {uuid: 64 * MIB})
except ConflictingSetting as error:
    result["other"] = error.setting
result["nothing"] = [framework.usage(gpu), joint._counts == {}]
"""
    )
    assert "it was live before memguard.init()" in found["live"] and found["other"].startswith("set_memory_manager(")
    assert found["nothing"] == [None, True]


def test_a_new_budget_finds_the_contexts_of_the_one_before(numba: Run) -> None:
    found = numba(
        NUMBA
        + """
applied = apply_caps(framework, {uuid: 64 * MIB})
first = bytes_of(3 * MIB)
applied.undo()
joint.restore()
again = SharedPool({uuid: 64 * MIB}, print)
second = PooledNumba(host, again)
apply_caps(second, {uuid: 64 * MIB})
array = bytes_of(2 * MIB)
result["counted"] = [second._counted_on(uuid), again.figures(uuid)[1]]
del first
result["former"] = stub.stub_blocks()
"""
    )
    assert found["counted"] == [2 << 20, 2 << 20] and found["former"] == 1
