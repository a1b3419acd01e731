"""The pool in the real numba-cuda, over a libcuda without a GPU: who asks for an address, and whose stream it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import stub_driver
from served import serve

Run = Callable[..., dict[str, Any]]

LIVE = """
import ctypes
from numba import cuda
from numba.cuda.cudadrv import driver as module
from memguard._devices import contexts
from memguard._frameworks.numba.adapter import Numba
stub = ctypes.CDLL("libcuda.so.1")
stub.stub_taken.restype = ctypes.c_size_t
module.driver.ensure_initialized()
(uuid, *_), host = contexts.ordinals(), Host()
framework = Numba(host)
applied = apply_caps(framework, {uuid: 64 * MIB})
context = cuda.current_context()
manager = context.memory_manager
def bytes_of(size): return cuda.device_array(size, "u1")
def at(array): return array.gpu_data._block.address
def flush(): manager.deallocations.clear(); stub.stub_finish()
def pooled(use):
    "Whether the block of an array comes into the pool after this use of it."
    manager.trim_partly()
    array = bytes_of(4 * MIB)
    use(array)
    del array
    flush()
    return len(manager.pool.idle)
"""


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    yield from serve("numba.cuda", stub_driver.build_numbas(tmp_path_factory.mktemp("cuda")))


def test_a_block_is_handed_out_when_the_event_after_its_flush_is_over(beside: Run) -> None:
    found = beside(
        LIVE
        + """
first = [bytes_of(4 * MIB) for _ in range(3)]
where = {at(array) for array in first}
first.clear()
manager.deallocations.clear()
early = bytes_of(4 * MIB)
result["early"] = at(early) in where
stub.stub_finish()
late = [bytes_of(4 * MIB) for _ in range(3)]
result["late"] = {at(array) for array in late} == where
result["held"] = [manager.held(), stub.stub_taken()]
del early
late.clear()
result["loop"] = []
for _ in range(200):
    result["loop"].append(stub.stub_taken())
    bytes_of(4 * MIB)
    stub.stub_finish()
result["loop"] = len(set(result["loop"][50:]))
manager.deallocations.clear()
result["pooled"] = len(manager.pool.idle) > 0
applied.undo()
result["undone"] = [stub.stub_taken(), len(manager.pool.idle)]
array = bytes_of(8 * MIB)
del array
manager.deallocations.clear()
result["after"] = stub.stub_taken()
"""
    )
    assert found == {
        "early": False, "late": True, "held": [16 << 20] * 2, "loop": 1, "pooled": True,
        "undone": [0, 0], "after": 0,
    }  # fmt: skip


def test_at_the_cap_the_event_is_waited_for_and_then_blocks_go_back(beside: Run) -> None:
    found = beside(
        LIVE
        + """
live = [bytes_of(8 * MIB) for _ in range(8)]
where = {at(array) for array in live}
live.clear()
array = bytes_of(8 * MIB)
result["waited"] = at(array) in where
result["pooled"] = len(manager.pool.idle)
large = bytes_of(50 * MIB)
result["large"] = [manager.held() >> 20, stub.stub_taken() >> 20]
try:
    bytes_of(8 * MIB)
except module.CudaAPIError as error:
    result["refused"] = error.code.name
framework.trim(host.gpus[0])
"""
    )
    assert found == {"waited": True, "pooled": 7, "large": [58, 58], "refused": "CUDA_ERROR_OUT_OF_MEMORY"}


def test_each_way_in_which_an_address_leaves_numba_and_each_in_which_it_does_not(beside: Run) -> None:
    found = beside(
        LIVE
        + """
import copy
import numpy
from numba.cuda.cudadrv import devicearray
stream, host_array = cuda.stream(), numpy.zeros(4 * MIB, "u1")
def ipc(array):
    try:
        array.get_ipc_handle()
    except Exception:
        pass
stays = {
    "nothing": lambda a: None,
    "kernel": lambda a: devicearray._to_strided_memory_view(a),
    "kernel's part": lambda a: devicearray._to_strided_memory_view(a[100:200]),
    "kernel's row": lambda a: devicearray._to_strided_memory_view(a.reshape(1024, -1)[3]),
    "to host": lambda a: a.copy_to_host(),
    "to host on a stream": lambda a: a.copy_to_host(host_array, stream=stream),
    "from host": lambda a: a.copy_to_device(host_array),
    "from an array": lambda a: a.copy_to_device(a),
    "element": lambda a: a[5],
    "part": lambda a: a[100:200].copy_to_host(),
    "part of a part": lambda a: a[100:200][3:5].copy_to_host(stream=stream),
    "bound": lambda a: a.bind(stream).copy_to_host(),
    "copied object": lambda a: copy.copy(a),
    "view": lambda a: a.view("f4").ravel().copy_to_host(),
    "split": lambda a: [part.copy_to_host() for part in a.split(MIB)],
    "memset": lambda a: a.gpu_data.memset(0),
    "memset on a stream": lambda a: a.gpu_data.memset(0, stream=stream),
    "type": lambda a: cuda.typeof(a) if hasattr(cuda, "typeof") else a._numba_type_,
    "printed": lambda a: repr(a),
}
leaves = {
    "interface": lambda a: a.__cuda_array_interface__,
    "is_cuda_array": lambda a: cuda.is_cuda_array(a),
    "as_cuda_array": lambda a: cuda.as_cuda_array(a),
    "part's interface": lambda a: a[100:200].__cuda_array_interface__,
    "row's interface": lambda a: a.reshape(1024, -1)[3].__cuda_array_interface__,
    "ctypes": lambda a: a.device_ctypes_pointer,
    "memory's ctypes": lambda a: a.gpu_data.device_ctypes_pointer,
    "pointer": lambda a: a.gpu_data.device_pointer,
    "value": lambda a: a.gpu_data.device_pointer_value,
    "handle": lambda a: a.gpu_data.handle,
    "part's handle": lambda a: a[1:2].gpu_data.handle,
    "part's pointer": lambda a: a[1:2].gpu_data.device_pointer,
    "part's value": lambda a: a[1:2].gpu_data.device_pointer_value,
    "part's ctypes": lambda a: a[1:2].gpu_data.device_ctypes_pointer,
    "owned": lambda a: a.gpu_data.own(),
    "device_pointer": lambda a: module.device_pointer(a),
    "device_ctypes_pointer": lambda a: module.device_ctypes_pointer(a.gpu_data),
    "extents": lambda a: module.device_extents(a),
    "IPC": ipc,
}
result["stays"] = [name for name, use in stays.items() if pooled(use) != 1]
result["leaves"] = [name for name, use in leaves.items() if pooled(use) != 0]
result["tried"] = [len(stays), len(leaves), manager.pooling]
"""
    )
    assert found == {"stays": [], "leaves": [], "tried": [19, 19, True]}


STREAMS = {
    "0": ("0", True),
    "default": ("cuda.default_stream()", True),
    "legacy": ("cuda.legacy_default_stream()", True),
    "external legacy": ("cuda.external_stream(1)", True),
    "own": ("cuda.stream()", True),
    "external": ("cuda.external_stream(0x7f0000900010)", False),
    "external of Numba's": ("cuda.external_stream(int(kept.handle))", True),
    "per-thread": ("cuda.per_thread_default_stream()", False),
    "by hand": ("module.Stream(module.binding.CUstream(0x7f0000900010))", False),
    "by hand, not blocking": ("module.Stream(module.binding.CUstream(0x7f0000900010), lambda: None)", False),
    "cuda.core": ("Device().create_stream()", False),
}


@pytest.mark.parametrize("use", ["kernel", "copy", "memset"])
@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_that_the_legacy_one_does_not_wait_for_ends_the_pool(beside: Run, kind: str, use: str) -> None:
    text, covered = STREAMS[kind]
    found = beside(
        LIVE
        + f"""
from cuda.core import Device
kept = cuda.stream()
@cuda.jit
def kernel(array): pass
Device(0).set_current()
stream, array = {text}, bytes_of(4 * MIB)
result["made"] = manager.pooling
if {use!r} == "kernel":
    kernel[1, 1, stream]
elif {use!r} == "copy":
    array.copy_to_host(stream=stream)
else:
    array.gpu_data.memset(0, stream=stream)
result["given"] = manager.pooling
del array
flush()
result["pooled"] = len(manager.pool.idle)
result["notes"] = len(framework.notes)
"""
    )
    ends = not covered and use != "memset"
    assert found == {"made": True, "given": not ends, "pooled": int(covered), "notes": int(ends)}


def test_with_per_thread_default_streams_nothing_is_pooled(beside: Run) -> None:
    found = beside(
        """
from numba.cuda.core import config
config.CUDA_PER_THREAD_DEFAULT_STREAM = 1
"""
        + LIVE
        + 'result["pooled"] = [manager.pooling, pooled(lambda array: None), stub.stub_taken()]\n'
    )
    assert found["pooled"] == [False, 0, 0]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_kernel_that_was_given_a_stream_before_the_budget_is_not_overlooked(beside: Run, before: bool) -> None:
    """Its configuration is kept, and nobody saw the stream in it."""
    given = """
from cuda.core import Device
from numba import cuda
@cuda.jit
def kernel(array): pass
Device(0).set_current()
kernel[1, 1, Device(0).create_stream()]
"""
    found = beside((given if before else "") + LIVE + 'result["pooled"] = pooled(lambda array: None)\n')
    assert found["pooled"] == (not before)


def test_an_idle_gpu_is_asked_and_no_event_recorded_while_there_is_no_second_stream(beside: Run) -> None:
    """Each flush that meets the cap, and is served at once: what it asked of the driver."""
    found = beside(
        LIVE
        + """
stub.stub_asked.restype = ctypes.c_char_p
live = [bytes_of(8 * MIB) for _ in range(7)]
bytes_of(8 * MIB)
def asked():
    "Of the driver, while the only block that there is room for is pending."
    stub.stub_forget()
    array = bytes_of(8 * MIB)
    del array
    found, number = [], 0
    while (name := stub.stub_asked(number)) is not None:
        found.append(name.decode())
        number += 1
    return [name for name in found if "Event" in name or name == "cuStreamQuery"]
stub.stub_idle(1)
result["alone"] = [asked() for _ in range(3)][-1]
stub.stub_idle(0)
result["at work"] = asked()
stub.stub_idle(1)
stream = cuda.stream()
result["second"] = asked()
del stream
result["destroyed"] = asked()
result["alone again"] = [asked() for _ in range(3)][-1]
result["held"] = manager.held()
"""
    )
    assert found["alone"] == found["alone again"] == ["cuStreamQuery"]
    assert found["at work"][0] == "cuStreamQuery" and "cuEventRecord" in found["at work"]
    assert "cuEventSynchronize" in found["at work"]
    for how in ("second", "destroyed"):
        assert "cuStreamQuery" not in found[how] and "cuEventRecord" in found[how], how
    assert found["held"] == 64 << 20


def test_a_stream_is_marked_before_numba_destroys_it(beside: Run) -> None:
    found = beside(
        LIVE
        + """
from memguard._frameworks.numba import watch
stream, array = cuda.stream(), bytes_of(4 * MIB)
array.copy_to_host(stream=stream)
del stream
result["marks"] = len(watch.ended.marks)
del array
manager.deallocations.clear()
result["of the flush"] = len(manager.pool._marked[0].marks)
stub.stub_finish()
result["over"] = [len(watch.ended.unfinished()), manager.pooling]
"""
    )
    assert found == {"marks": 1, "of the flush": 2, "over": [0, True]}


def test_nothing_is_recorded_while_a_blocking_stream_captures(beside: Run) -> None:
    """The driver answers the question about the legacy stream with CUDA_ERROR_STREAM_CAPTURE_IMPLICIT then."""
    found = beside(
        LIVE
        + """
array = bytes_of(4 * MIB)
del array
stub.stub_fail(b"cuStreamIsCapturing", 906, 2)
flush()
result["first"] = [len(manager.pool.unmarked), len(manager.pool._marked)]
flush()
result["second"] = [len(manager.pool.unmarked), len(manager.pool._marked)]
flush()
result["third"] = [len(manager.pool.unmarked), len(manager.pool._marked)]
"""
    )
    assert found == {"first": [1, 0], "second": [1, 0], "third": [0, 1]}


@pytest.mark.parametrize("call", ["cuEventCreate", "cuEventRecord", "cuThreadExchangeStreamCaptureMode"])
def test_where_cuda_refuses_a_mark_blocks_are_not_handed_out_and_nothing_is_lost(beside: Run, call: str) -> None:
    found = beside(
        LIVE
        + f"""
live = [bytes_of(8 * MIB) for _ in range(8)]
where = {{at(array) for array in live}}
live.clear()
stub.stub_fail({call!r}.encode(), 700, 100)
flush()
result["held"] = [manager.held() >> 20, stub.stub_taken() >> 20]
array = bytes_of(8 * MIB)
result["after"] = [manager.held() >> 20, stub.stub_taken() >> 20]
manager.trim_partly()
result["given"] = [manager.held() >> 20, stub.stub_taken() >> 20]
"""
    )
    assert found == {"held": [64, 64], "after": [64, 64], "given": [8, 8]}


def test_derived_pointers_count_as_numbas_own_tests_expect(beside: Run) -> None:
    found = beside(
        LIVE
        + """
memory = context.memalloc(1024)
seen = [memory.refct]
first = memory.view(1)
seen.append([memory.refct, int(first.handle) - int(memory.handle), int(first.owner.handle) == int(memory.handle)])
second = first.view(1)
seen.append([memory.refct, int(second.handle) - int(memory.handle), int(second.owner.handle) == int(memory.handle)])
del second
seen.append(memory.refct)
del first
seen.append(memory.refct)
result["seen"] = seen
result["kind"] = [module.is_device_memory(memory), type(memory.device_ctypes_pointer) is ctypes.c_size_t,
    type(memory.view(10).device_ctypes_pointer) is ctypes.c_size_t, isinstance(memory, module.MemoryPointer)]
part = memory.view(10)
del memory
flush()
result["kept"] = [len(manager.deallocations), stub.stub_taken()]
del part
flush()
result["gone"] = stub.stub_taken()
"""
    )
    assert found["seen"] == [1, [2, 1, True], [3, 2, True], 2, 1] and all(found["kind"])
    assert found["kept"] == [0, 2 << 20] and found["gone"] == 0


def test_after_a_reset_of_the_device_it_begins_anew(beside: Run) -> None:
    found = beside(
        LIVE
        + """
kept = [bytes_of(4 * MIB) for _ in range(3)]
kept.pop()
flush()
cuda.close()
result["closed"] = [stub.stub_taken(), len(manager.pool.idle)]
array = bytes_of(4 * MIB)
kept.clear()
new = cuda.current_context().memory_manager
result["new"] = [new is not manager, new.held(), stub.stub_taken()]
del array
new.deallocations.clear()
result["pooled"] = len(new.pool.idle)
"""
    )
    assert found == {"closed": [0, 0], "new": [True, 4 << 20, 4 << 20], "pooled": 1}


def test_threads_and_cycles_lose_no_byte_and_share_no_block(beside: Run) -> None:
    found = beside(
        LIVE
        + """
import gc, random, threading
live, wrong = {}, []
def work(seed):
    choose, own = random.Random(seed), []
    with cuda.gpus[0]:
        for step in range(2500):
            if own and choose.random() < 0.5:
                array = own.pop(choose.randrange(len(own)))
                del live[at(array)]
                if choose.random() < 0.3:
                    cycle = [array]; cycle.append(cycle); del cycle
                del array
            try:
                array = bytes_of(choose.choice((2 * MIB, 3 * MIB, 4 * MIB)))
            except module.CudaAPIError:
                continue
            if live.setdefault(at(array), seed) != seed: wrong.append(at(array))
            if step % 50 == 0: array[5:9].copy_to_host()
            if step % 400 == 0: array.__cuda_array_interface__
            own.append(array)
            del array
            if len(own) > 4:
                del live[at(own[0])]
                del own[0]
            if step % 7 == 0: stub.stub_finish()
            if stub.stub_taken() > 64 * MIB: wrong.append(stub.stub_taken())
        while own:
            del live[at(own[0])]
            del own[0]
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
for thread in threads: thread.start()
for _ in range(200):
    framework.usage(host.gpus[0])
    if len(threads) % 3: gc.collect(0)
for thread in threads: thread.join()
gc.collect()
manager.trim_partly()
result["wrong"], result["left"] = wrong[:3], [manager.held(), stub.stub_taken(), manager.figures.in_use]
"""
    )
    assert found == {"wrong": [], "left": [0, 0, 0]}


def test_a_part_of_the_pool_goes_back_and_the_rest_serves(beside: Run) -> None:
    found = beside(
        LIVE
        + """
from types import SimpleNamespace
blocks = [bytes_of(size * MIB) for size in (2, 4, 8, 16)]
blocks.clear()
flush()
result["given"] = []
for needed in (3, 3, 9, 40):
    before = stub.stub_taken()
    framework.trim_partly(SimpleNamespace(uuid=uuid), needed * MIB)
    result["given"].append((before - stub.stub_taken()) // MIB)
    result["held"] = manager.held() == stub.stub_taken()
    if needed == 9:
        taken = stub.stub_taken()
        two = bytes_of(2 * MIB)
        result["served"] = taken == stub.stub_taken()
        del two
"""
    )
    assert found == {"given": [4, 8, 16, 2], "held": True, "served": True}


def test_a_request_is_served_once_room_was_made(beside: Run) -> None:
    """Above its cap, and on a full card."""
    found = beside(
        LIVE
        + """
asked, refused, theirs = [], [], ctypes.c_uint64()
def short(shortage):
    asked.append([shortage.requested // MIB, shortage.needed // MIB, shortage.full])
    if shortage.full:
        stub.cuMemFree_v2(theirs)
    else:
        framework.resize({uuid: 900 * MIB})
    return True
framework.on_shortage, framework.on_refusal = short, refused.append
arrays = [bytes_of(99 * MIB)]
stub.cuMemAlloc_v2(ctypes.byref(theirs), ctypes.c_size_t(700 * MIB))
arrays.append(bytes_of(400 * MIB))
result.update(asked=asked, refused=len(refused), held=manager.held() == stub.stub_taken() == 500 * MIB)
"""
    )
    assert found == {"asked": [[99, 100, False], [400, 400, True]], "refused": 0, "held": True}
