"""Order that is not needed is not made, on a real GPU: idle streams, captures, named streams, routes of copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gpus_here import EXCHANGE, TWO_GPUS

Run = Callable[..., dict[str, Any]]


CAPTURE = """
import ctypes, threading
import torch
torch.zeros(1, device="cuda")
torch.cuda.synchronize()
cuda, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p
GLOBAL, RELAXED, BLOCKING, NON_BLOCKING = 0, 2, 0, 1
idle, event = pointer(), pointer()
assert cuda.cuStreamCreate(ctypes.byref(idle), NON_BLOCKING) == 0
assert cuda.cuEventCreate(ctypes.byref(event), 2) == 0
context = pointer()
assert cuda.cuCtxGetCurrent(ctypes.byref(context)) == 0

def during(flags, mode, relaxed, call):
    # The code of a call that another thread makes while this one captures, and that of the end of the capture.
    stream, graph, code = pointer(), pointer(), []
    assert cuda.cuStreamCreate(ctypes.byref(stream), flags) == 0
    assert cuda.cuStreamBeginCapture_v2(stream, mode) == 0

    def other():
        assert cuda.cuCtxSetCurrent(context) == 0
        if relaxed:
            cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))
        code.append(call(stream))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    ended = cuda.cuStreamEndCapture(stream, ctypes.byref(graph))
    if graph.value:
        cuda.cuGraphDestroy(graph)
    cuda.cuStreamDestroy_v2(stream)
    return [code[0], ended]
"""


def test_asking_an_idle_stream_ends_no_capture_and_asking_the_captured_one_does(run: Run) -> None:
    """May a hand-over ask `cuStreamQuery` while another thread captures? Of each mode, and in a relaxed thread."""
    found = run(
        CAPTURE
        + """
for mode in (GLOBAL, 1, RELAXED):
    for flags in (BLOCKING, NON_BLOCKING):
        for relaxed in (False, True):
            key = f"{mode} {flags} {relaxed}"
            result[key] = during(flags, mode, relaxed, lambda stream: cuda.cuStreamQuery(idle))
result["control"] = during(NON_BLOCKING, GLOBAL, True, lambda stream: cuda.cuStreamQuery(stream))
"""
    )
    found.pop("stderr")
    code, ended = found.pop("control")
    assert code != 0 and ended != 0, "a captured stream that is asked ends its capture"
    for key, (code, ended) in found.items():
        if key.endswith("True"):  # as memguard asks
            assert (code, ended) == (0, 0), (key, code, ended)


def test_asking_the_legacy_stream_is_no_worse_than_recording_on_it(run: Run) -> None:
    """The legacy stream encompasses the blocking ones: CUDA forbids both while such a one is captured."""
    found = run(
        CAPTURE
        + """
legacy = pointer(1)
for flags in (BLOCKING, NON_BLOCKING):
    result[f"query {flags}"] = during(flags, GLOBAL, True, lambda stream: cuda.cuStreamQuery(legacy))
    result[f"record {flags}"] = during(flags, GLOBAL, True, lambda stream: cuda.cuEventRecord(event, legacy))
"""
    )
    assert found["query 1"] == found["record 1"] == [0, 0], "PyTorch captures on non-blocking streams"
    for number in (0, 1):  # the call's code, and the capture's
        assert bool(found["query 0"][number]) <= bool(found["record 0"][number]), found
    assert found["record 0"][0] in (0, 900, 901, 906), "what is said as a capture that was ended"


def test_the_driver_tells_that_the_legacy_stream_may_not_be_used_and_the_capture_goes_on(run: Run) -> None:
    """`cuStreamIsCapturing` of the legacy stream is asked before any other use of it."""
    found = run(
        CAPTURE
        + """
legacy = pointer(1)
def asks(stream):
    return cuda.cuStreamIsCapturing(legacy, ctypes.byref(ctypes.c_int()))
for mode in (GLOBAL, 1, RELAXED):
    for flags in (BLOCKING, NON_BLOCKING):
        result[f"{mode} {flags}"] = during(flags, mode, True, asks)
"""
    )
    found.pop("stderr")
    for key, (code, ended) in found.items():
        assert (code, ended) == (906 if key.endswith("0") else 0, 0), (key, code, ended)


def test_a_hand_over_on_the_default_stream_ends_no_capture_of_a_blocking_stream(run: Run) -> None:
    found = run(
        CAPTURE
        + """
import cupy
from memguard import exchange
x, kept = torch.ones(1 << 20, device="cuda"), cupy.ones(4)
side, said = torch.cuda.Stream(), []
y = exchange.to(x, "cupy")
torch.cuda.synchronize()

def hand(stream):
    global y
    with torch.cuda.stream(side):
        try:
            exchange.to(x, "cupy")  # its stream is the default one
        except exchange.CannotShare as error:
            said.append(str(error))
    y = None
    return 0

result["ended"] = during(BLOCKING, GLOBAL, True, hand)
result["said"] = said
"""
    )
    assert found["ended"] == [0, 0] and len(found["said"]) == 1, found
    assert "CUDA graph is being captured" in found["said"][0]


@pytest.mark.parametrize("consumer", ["cupy", "jax", "numba"])
def test_none_is_stale_when_the_producers_work_ends_just_then(run: Run, consumer: str) -> None:
    """Work that ends about when the hand-over asks, on any card: the stream is idle at some and busy at others."""
    found = run(
        EXCHANGE
        + f"CONSUMER = {consumer!r}\n"
        + """
from support.order import Edge
arrays.start("torch", CONSUMER)
import torch
from memguard._devices import streams
told, real = [], streams.quick_idle
streams.quick_idle = lambda *args: told.append(real(*args)) or told[-1]
side, edge, stale, rounds, asked = torch.cuda.Stream(), Edge(7, 100_000), 0, 0, 0
x = torch.zeros(1 << 16, device="cuda")
while rounds < 600 or (min(told.count(True) - 100, told.count(False)) < 100 and rounds < 4000):
    rounds += 1
    finished = rounds % 6 == 0  # work that has ended for sure
    with torch.cuda.stream(side):
        torch.cuda._sleep(edge.length())
        x.fill_(float(rounds))
        if finished:
            side.synchronize()
        y = exchange.to(x, CONSUMER)
    stale += not bool((arrays.read(y) == rounds).all())
    del y
    if len(told) > asked and not finished:
        edge.told(told[-1])
    asked = len(told)
result.update(stale=stale, idle=told.count(True), busy=told.count(False), rounds=rounds, middle=edge.middle)
""",
        timeout=150,
    )
    assert found["stale"] == 0 and found["idle"] >= 200 and found["busy"] >= 100, found


@pytest.mark.parametrize("producer", ["torch", "cupy", "pycuda"])
@pytest.mark.parametrize("consumer", ["pycuda", "numba"])
@pytest.mark.parametrize("copy", [None, True])
def test_what_pycuda_and_numba_take_follows_on_the_stream_that_is_named(
    run: Run, producer: str, consumer: str, copy: bool | None
) -> None:
    """The host goes on while the producer still works, and the named stream has the values. By hand it has not."""
    found = run(
        EXCHANGE
        + f"PRODUCER, CONSUMER, COPY = {producer!r}, {consumer!r}, {copy!r}\n"
        + """
import ctypes
import numpy as np
arrays.start("torch", PRODUCER, CONSUMER)
import torch
busy, cuda = torch.cuda.Stream(), arrays.driver()
side = torch.cuda.Stream()
pinned = torch.empty(1 << 20, pin_memory=True)
x = arrays.make(PRODUCER, np.zeros(1 << 20, np.float32))
same = torch.as_tensor(x, device="cuda")  # to write to it on a stream
torch.cuda.synchronize()

def go(named, number):
    with torch.cuda.stream(busy):
        torch.cuda._sleep(200_000_000)  # 0.1 s: longer than other processes keep this one waiting
        same.fill_(float(number))
        if PRODUCER == "cupy":
            import cupy
            with cupy.cuda.ExternalStream(busy.cuda_stream):
                y = exchange.to(x, CONSUMER, stream=side, copy=COPY) if named else x
        else:
            y = exchange.to(x, CONSUMER, stream=side, copy=COPY) if named else x
    went_on = not busy.query()
    address = arrays.facts(y).address
    read = cuda.cuMemcpyDtoHAsync_v2(
        ctypes.c_void_p(pinned.data_ptr()), ctypes.c_uint64(address), ctypes.c_size_t(pinned.nbytes),
        ctypes.c_void_p(side.cuda_stream),
    )
    assert read == 0
    side.synchronize()
    right = bool((pinned == number).all())
    torch.cuda.synchronize()
    del y
    return [went_on, right]

go(True, 1)  # loads kernels, for which CUDA waits
result["named"] = [go(True, number) for number in range(2, 12)]
result["by hand"] = [go(False, number) for number in range(12, 22)]
result["open"] = exchanged.still_open()
""",
        timeout=150,
    )
    assert found["named"] == [[True, True]] * 10, "nobody waits, and the values are there"
    assert found["by hand"] == [[True, False]] * 10, "the control is stale"
    assert found["open"] == 0


@pytest.mark.parametrize("kind", ["default", "blocking", "non-blocking"])
def test_a_copy_into_memory_that_pycuda_hands_out_again_comes_after_its_former_work(run: Run, kind: str) -> None:
    """PyCUDA's pool hands a block out while work on it still waits for a kernel. The control copies without order."""
    found = run(
        EXCHANGE
        + f"KIND = {kind!r}\n"
        + """
import ctypes
memguard.init({"version": 1, "device": {"limit": "16GiB"},
               "frameworks": {"torch": {"limit": "1GiB"}, "pycuda": {"limit": "1GiB"}}})
arrays.start("torch", "pycuda")
import numpy as np
import torch
import pycuda.driver as drv
from pycuda import gpuarray
cuda, n, MINUS_ONE = arrays.driver(), 1 << 20, 0xBF800000
x, side = torch.ones(n, device="cuda"), torch.cuda.Stream()
own = None if KIND == "default" else drv.Stream(int(KIND == "non-blocking"))
busy = torch.cuda.default_stream() if own is None else torch.cuda.ExternalStream(own.handle)
torch.cuda.synchronize()

def go(way):
    a = gpuarray.empty(n, np.float32)
    old = int(a.ptr)
    with torch.cuda.stream(busy):
        torch.cuda._sleep(20_000_000)  # 10 ms
    drv.memset_d32_async(old, MINUS_ONE, n, own)
    del a
    if way == "by hand":
        y = gpuarray.empty(n, np.float32)
        code = cuda.cuMemcpyAsync(ctypes.c_uint64(int(y.ptr)), ctypes.c_uint64(x.data_ptr()), ctypes.c_size_t(4 * n),
                                  ctypes.c_void_p(side.cuda_stream))
        assert code == 0
    else:
        y = exchange.to(x, "pycuda", copy=True, stream=side if way == "named" else None)
    torch.cuda.synchronize()
    return [int(y.ptr) == old, bool((y.get() == 1).all())]

go("named")  # loads kernels, for which CUDA waits
for way in ("named", "not named", "by hand"):
    result[way] = [go(way) for _ in range(10)]
""",
        timeout=150,
    )
    assert found["named"] == found["not named"] == [[True, True]] * 10
    assert found["by hand"] == [[True, False]] * 10, "the control is overwritten"


def test_numba_reads_on_the_stream_that_its_array_names(run: Run) -> None:
    found = run(
        EXCHANGE
        + """
arrays.start("torch", "numba")
import torch
busy, side, wrong = torch.cuda.Stream(), torch.cuda.Stream(), 0
x = torch.zeros(1 << 20, device="cuda")
torch.cuda.synchronize()
for number in range(1, 21):
    with torch.cuda.stream(busy):
        torch.cuda._sleep(20_000_000)
        x.fill_(float(number))
        y = exchange.to(x, "numba", stream=side)
    wrong += not bool((y.copy_to_host() == number).all())
result["wrong"] = wrong
"""
    )
    assert found["wrong"] == 0


@pytest.mark.parametrize("name", ["pycuda", "numba", "torch", "cupy"])
def test_a_frameworks_own_copy_has_the_values_of_an_array_with_gaps(run: Run, name: str) -> None:
    found = run(
        EXCHANGE
        + f"NAME = {name!r}\n"
        + """
import numpy as np
arrays.start("torch", NAME)
values = np.arange(48, dtype=np.float32).reshape(6, 8)
x = arrays.make(NAME, values)
cases = {"plain": (x, values), "stepped": (x[:, ::2], values[:, ::2]), "transposed": (x.T, values.T)}
for case, (one, wanted) in cases.items():
    y = exchange.to(one, NAME, copy=True)
    result[case] = [bool(np.array_equal(arrays.read(y), wanted)), str(exchange.last_route())]
"""
    )
    found.pop("stderr")
    assert len(found) == 3 and all(right for right, _ in found.values()), found


@TWO_GPUS
def test_the_route_that_is_said_is_the_one_that_the_rate_shows(run: Run) -> None:
    """Of all six, by the driver's own copies with peer access and without: JAX's copies may go through the host."""
    found = run(
        EXCHANGE
        + """
result.update(exchanged.peers(1 << 30))
""",
        timeout=240,
    )
    raw = found["by_route_gb_per_s"]
    assert set(raw) == {"through the host", "peer to peer"} and raw["peer to peer"] > 2 * raw["through the host"], raw
    assert set(found["peers"]) == {"torch", "tensorflow", "cupy", "jax", "pycuda", "numba"}
    for name, one in found["peers"].items():
        rate, said = one["gb_per_s"], one["route"].partition(", ")[2]
        near = min(raw, key=lambda way: max(raw[way] / rate, rate / raw[way]))
        assert said == near or (not said and name == "jax"), (name, one, raw)  # JAX does not report its copy route


@TWO_GPUS
@pytest.mark.parametrize("enabled", [False, True])
def test_which_memory_a_gpu_reaches_is_what_was_enabled(run: Run, enabled: bool) -> None:
    """Is `CU_POINTER_ATTRIBUTE_DEVICE_POINTER` asked in the other GPU's context true to what was enabled?"""
    found = run(
        f"ENABLED = {enabled}\n"
        + """
import ctypes
cuda, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p
assert cuda.cuInit(0) == 0
handles, blocks = [pointer(), pointer()], [ctypes.c_uint64(), ctypes.c_uint64()]
for number, (context, block) in enumerate(zip(handles, blocks)):
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(64 * MIB)) == 0
if ENABLED:
    assert cuda.cuCtxSetCurrent(handles[1]) == 0 and cuda.cuCtxEnablePeerAccess(handles[0], 0) == 0
from memguard._devices import copies
result["1 reaches 0"] = copies.reaches(1, blocks[0].value)
result["0 reaches 1"] = copies.reaches(0, blocks[1].value)
result["own"] = [copies.reaches(number, blocks[number].value) for number in (0, 1)]
"""
    )
    assert found["own"] == [True, True]
    assert (found["1 reaches 0"], found["0 reaches 1"]) == (enabled, False)
