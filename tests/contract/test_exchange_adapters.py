"""Every ordered pair of frameworks on models of their arrays and of the driver's streams: who waits for whom.

`fake_arrays` and `gpu_clocks` say how the models follow the real ones. tests/native and tests/gpu have the real ones.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import itertools
import operator
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memguard._devices import contexts, streams
from memguard._frameworks.arrays import lifetimes
from memguard._frameworks.arrays.lifetimes import Offer
from memguard.errors import CannotShare, DeviceError
from memguard.exchange import last_route, to, transfer
from memguard.exchange.adapters import registry

pytestmark = pytest.mark.one_case  # no version of what is installed changes it: all of it is our own code

HERE = Path(__file__).parent
PRIMARY = 0x1000
"""The primary context of `gpu_clocks`."""
NAMES = ("torch", "tensorflow", "cupy", "jax", "pycuda", "numba")
PAIRS = list(itertools.permutations(NAMES, 2))
ORDERS_ITSELF = {"tensorflow", "jax"}
"""As producers: TensorFlow waits when it exports, JAX makes the consumer's stream wait."""
ON_THE_HOST = {"tensorflow", "pycuda", "numba"}
"""As consumers: which of their streams comes next is not known."""
TELLS = {"torch", "cupy"}
"""Producers whose memory is used next on a stream that is known."""

pairs = pytest.mark.parametrize(("producer", "consumer"), PAIRS, ids=["-".join(pair) for pair in PAIRS])


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(HERE.parent / "unit")
    monkeypatch.syspath_prepend(HERE)
    clocks, arrays = importlib.import_module("gpu_clocks"), importlib.import_module("fake_arrays")
    found = arrays.World(clocks.stand_in(monkeypatch))
    for name in [name for name in sys.modules if name.partition(".")[0] in (*NAMES, "numba_cuda")]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in found.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    importlib.import_module("memguard._frameworks.tensorflow.arrays")._logical.cache_clear()
    found.driver.stack.append(clocks.PRIMARY)
    yield found
    settle(found.driver)
    gc.collect()
    assert not lifetimes._open and not lifetimes._parked
    assert found.driver.stack == [clocks.PRIMARY], "every context that was pushed is popped"
    assert not found.driver._memory, "all memory was released"


def settle(driver: Any) -> None:
    """The GPU finishes all work, and the parked memory is released."""
    driver.fails.clear()
    driver.finish()
    deadline = time.monotonic() + 10
    while lifetimes._parked and time.monotonic() < deadline:
        lifetimes.sweep()


def idle_and_live(driver: Any) -> tuple[list[int], list[int]]:
    return sorted(event for events in streams._idle.values() for event in events), sorted(driver.events)


# the order of work


@pairs
def test_the_consumer_reads_after_the_producers_work(world: Any, producer: str, consumer: str) -> None:
    driver = world.driver
    x = world.array(producer)
    work = x.work()
    y = to(x, consumer)
    y.look()
    y.work()
    assert driver.wrong == [] and y.ptr == x.ptr
    assert idle_and_live(driver)[0] == idle_and_live(driver)[1], "no event is lost"
    assert driver.waits == (1 if consumer in ON_THE_HOST and producer not in ORDERS_ITSELF else 0)
    assert (work in driver.over) == (consumer in ON_THE_HOST or producer == "tensorflow"), "the host waits only there"
    assert registry.by_name(consumer).waits == ("host" if consumer in ON_THE_HOST else "stream")


@pairs
def test_without_stream_order_the_models_report_an_error(
    world: Any, producer: str, consumer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without the order the test above would fail."""
    monkeypatch.setattr(streams, "follow", lambda *_: None)
    monkeypatch.setattr(type(registry.by_name("jax")), "ready", lambda *_: None)
    x = world.array(producer)
    x.work()
    y = to(x, consumer)
    y.look()
    assert bool(world.driver.wrong) == (producer != "tensorflow")
    y.work()


@pairs
def test_the_producer_uses_its_memory_again_after_the_consumers_work(world: Any, producer: str, consumer: str) -> None:
    driver = world.driver
    x = world.array(producer)
    address = x.ptr
    y = to(x, consumer)
    y.look()
    del x
    assert address not in driver.freed, "the view keeps it"
    driver.asked.clear()
    del y
    gc.collect()
    if producer in TELLS or consumer == "jax":
        assert address in driver.freed, "released at once: only the stream waits"
    else:
        assert address not in driver.freed
    assert not {"cuEventSynchronize", "cuCtxSynchronize"} & set(driver.asked), "a destructor never waits"
    settle(driver)
    assert address in driver.freed and driver.wrong == []


@pytest.mark.parametrize("consumer", ["torch", "cupy", "tensorflow", "pycuda", "numba"])
def test_memory_that_was_allocated_on_the_default_stream_is_used_there_after_the_consumers_work(
    world: Any, consumer: str
) -> None:
    """A caching allocator gives memory out again on the stream where it was allocated, not on that of the hand-over."""
    producer = "cupy" if consumer == "torch" else "torch"
    x = world.array(producer)
    x.memory.stream = 0
    y = to(x, consumer)
    y.look()
    del x, y
    gc.collect()
    assert world.driver.wrong == []
    settle(world.driver)


@pairs
def test_without_waiting_at_the_end_the_models_report_an_error(
    world: Any, producer: str, consumer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifetimes, "_running_work", lambda *_: None)
    x = world.array(producer)
    y = to(x, consumer)
    y.look()
    del x, y
    gc.collect()
    assert bool(world.driver.wrong) == (consumer != "jax")


@pairs
def test_on_an_idle_gpu_nobody_waits(world: Any, producer: str, consumer: str) -> None:
    """And the memory is released with the view."""
    x = world.array(producer)
    x.work()
    world.driver.finish()
    y = to(x, consumer)
    del x, y
    gc.collect()
    assert world.driver.waits == 0 and world.driver.wrong == []
    assert len(world.driver.freed) == 1 and not lifetimes._parked


EVENTS = {"cuEventCreate", "cuEventRecord", "cuCtxRecordEvent", "cuStreamWaitEvent", "cuEventSynchronize"}
NAMED = [(producer, consumer) for producer in NAMES for consumer in ("torch", "cupy", "pycuda", "numba")]
"""Pairs whose consumer uses the stream that a user names."""


@pytest.mark.parametrize(
    ("producer", "consumer", "named"),
    [(*pair, False) for pair in PAIRS] + [(*pair, True) for pair in NAMED if len({*pair}) == 2],
)
def test_an_idle_stream_needs_no_event(world: Any, producer: str, consumer: str, named: bool) -> None:
    """An event is recorded only where no stream is known, and then on the whole context: PyCUDA's names none."""
    driver, side = world.driver, world.driver.stream()
    x = world.array(producer)
    if producer == "numba":
        x.named = world.own["numba"]
    x.work()
    driver.finish()
    driver.asked.clear()
    y = to(x, consumer, **({"stream": side} if named else {}))
    assert bool(EVENTS & set(driver.asked)) == (producer == "pycuda")
    driver.read(side if named else world.own[consumer], y.ptr)
    driver.finish()
    driver.asked.clear()
    del x, y
    gc.collect()
    known = named or consumer in ("torch", "cupy", "jax")
    assert EVENTS & set(driver.asked) <= (set() if known else {"cuEventCreate", "cuCtxRecordEvent"})
    assert driver.wrong == [] and driver.waits == 0 and len(driver.freed) == 1


@pytest.mark.parametrize(("producer", "consumer"), NAMED)
def test_a_copy_on_the_stream_that_is_named_makes_nobody_wait(world: Any, producer: str, consumer: str) -> None:
    """PyCUDA's and Numba's copies too. What is copied lives until the copy is made, also if nothing else keeps it."""
    driver, side = world.driver, world.driver.stream()
    x = world.array(producer)
    address = x.ptr
    ctypes.memset(address, 7, x.nbytes)
    work = x.work()
    y = to(x, consumer, copy=True, stream=side)
    assert y.ptr != address and ctypes.string_at(y.ptr, y.nbytes) == b"\x07" * 1024
    assert not {"cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"} & set(driver.asked)
    assert (work in driver.over) == (producer == "tensorflow"), "its export waits"
    driver.read(side, y.ptr)
    assert driver.wrong == [] and str(last_route()) == f"{producer} to {consumer}: 1.0 KiB copied on cuda:0"
    if consumer == "numba":
        assert y.named == side, "what Numba does with it follows on that stream"
    del x
    gc.collect()
    settle(driver)
    assert address in driver.freed and driver.wrong == []


@pytest.mark.parametrize("producer", NAMES)
@pytest.mark.parametrize("former", ["default", "non-blocking"])
@pytest.mark.parametrize("named", ["side", "default", None])
def test_a_copy_into_memory_that_pycuda_hands_out_again_comes_after_its_former_work(
    world: Any, monkeypatch: pytest.MonkeyPatch, producer: str, former: str, named: str | None
) -> None:
    """PyCUDA's pool hands a block out while a kernel still uses it: on the default stream, or on one aside of it."""
    monkeypatch.setattr("memguard._frameworks.pycuda.arrays.may_use_non_blocking_streams", lambda: former != "default")
    driver, side = world.driver, world.driver.stream()
    world.own["pycuda"] = 1 if former == "default" else driver.stream()
    x = world.array(producer)
    world.recycled["pycuda"] = []
    old = world.array("pycuda")
    old.work()
    address = old.ptr
    del old
    if former == "default":
        driver.asked.clear()
    stream = {"side": side, "default": 0, None: None}[named]
    y = to(x, "pycuda", copy=True, stream=stream)
    assert y.ptr == address and driver.wrong == []
    if former == "default" and named and producer in ("torch", "cupy"):
        assert "cuCtxRecordEvent" not in driver.asked, "it would end the captures of others"
    waits = driver.waits
    driver.finish()
    y = None
    y = to(x, "pycuda", copy=True, stream=stream)
    assert y.ptr == address and driver.waits == waits, "nothing runs, so nobody waits"
    del x, y
    gc.collect()
    settle(driver)
    for idle in world.recycled.pop("pycuda"):
        driver.free(idle)
    assert driver.wrong == []


@pytest.mark.parametrize("pooled", [False, True])
def test_a_copy_into_memory_of_anothers_pool_follows_the_default_stream_in_numba(
    world: Any, monkeypatch: pytest.MonkeyPatch, pooled: bool
) -> None:
    """RMM's plugin hands out what the default stream may still use. Numba's own manager waits."""
    driver, side = world.driver, world.driver.stream()
    x = world.array("torch")
    world.own["numba"] = 1
    if pooled:
        world.recycled["numba"] = []
        old = world.array("numba")
        old.work()
        del old
    else:
        monkeypatch.setattr(streams, "follow_default", None)
    y = to(x, "numba", copy=True, stream=side)
    assert driver.wrong == []
    del x, y
    gc.collect()
    settle(driver)
    for idle in world.recycled.pop("numba", ()):
        driver.free(idle)


@pytest.mark.parametrize("producer", [name for name in NAMES if name != "numba"])
def test_numbas_array_names_the_stream_that_was_given(world: Any, producer: str) -> None:
    """So that whatever comes next waits for that stream, and not for the whole context."""
    driver, side = world.driver, world.driver.stream()
    x = world.array(producer)
    x.work()
    y = to(x, "numba", stream=side)
    assert y.named == side and to(x, "numba", stream=0).named == 1 and to(x, "numba").named is None
    driver.write(side, y.ptr)
    driver.asked.clear()
    z = to(y, "cupy")
    z.look()
    assert driver.wrong == [] and "cuCtxRecordEvent" not in driver.asked
    driver.finish()


@pairs
def test_empty_arrays_need_no_stream_order(world: Any, producer: str, consumer: str) -> None:
    x = world.array(producer, (0, 4))
    y = to(x, consumer)
    assert y.shape == (0, 4) and lifetimes.lent() == {}
    assert not {"cuEventRecord", "cuCtxRecordEvent", "cuEventSynchronize"} & set(world.driver.asked)


def test_on_one_stream_no_event_is_recorded(world: Any) -> None:
    world.own["cupy"] = world.own["torch"]
    x = world.array("torch")
    x.work()
    y = to(x, "cupy")
    y.look()
    del y, x
    assert not {"cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"} & set(world.driver.asked)
    assert world.driver.wrong == [] and len(world.driver.freed) == 1


@pytest.mark.parametrize(("producer", "consumer"), [pair for pair in PAIRS if pair[1] in ("pycuda", "numba")])
@pytest.mark.parametrize("kind", ["int", "method", "attribute", "cuda_stream", "ptr", "handle"])
def test_the_given_stream_waits_and_the_host_does_not(world: Any, producer: str, consumer: str, kind: str) -> None:
    driver = world.driver
    side = driver.stream()
    spelled: dict[str, Any] = {
        "int": side,
        "method": types.SimpleNamespace(__cuda_stream__=lambda: (0, side)),
        "attribute": types.SimpleNamespace(__cuda_stream__=(0, side)),
        "cuda_stream": types.SimpleNamespace(cuda_stream=side),
        "ptr": types.SimpleNamespace(ptr=side),
        "handle": types.SimpleNamespace(handle=ctypes.c_void_p(side)),
    }
    x = world.array(producer)
    work = x.work()
    y = to(x, consumer, stream=spelled[kind])
    driver.read(side, y.ptr)
    assert driver.wrong == [] and "cuEventSynchronize" not in driver.asked
    assert (work in driver.over) == (producer == "tensorflow")
    driver.read(side, y.ptr)
    del x, y
    gc.collect()
    driver.finish()
    lifetimes.sweep()
    assert driver.wrong == []


@pytest.mark.parametrize("options", [{}, {"device": 0}, {"copy": False}, {"copy": False, "device": 0}])
@pytest.mark.parametrize("name", ["torch", "cupy", "pycuda", "numba"])
def test_a_frameworks_own_array_is_returned_and_the_stream_waits(
    world: Any, name: str, options: dict[str, Any]
) -> None:
    driver = world.driver
    side = driver.stream()
    x = world.array(name)
    x.work()
    assert to(x, name, **options) is x and not driver.waits
    assert to(x, name, stream=side, **options) is x
    driver.read(side, x.ptr)
    assert driver.wrong == [] and not driver.waits
    driver.finish()


@pytest.mark.parametrize("consumer", ["tensorflow", "jax"])
def test_frameworks_that_choose_their_streams_refuse_one(world: Any, consumer: str) -> None:
    x = world.array("torch")
    with pytest.raises(ValueError, match="chooses its streams itself") as refusal:
        to(x, consumer, stream=world.driver.stream())
    assert "fix:" in str(refusal.value)


def test_wrong_streams_and_frameworks_are_refused(world: Any) -> None:
    x = world.array("torch")
    with pytest.raises(ValueError, match="is not a stream"):
        to(x, "cupy", stream="cuda:0")
    with pytest.raises(ValueError, match="did you mean 'tensorflow'"):
        to(x, "tensorflw")
    with pytest.raises(ValueError, match="one of torch, tensorflow"):
        to(x, "mxnet")


def test_only_the_stream_that_numbas_array_names_is_waited_for(world: Any) -> None:
    driver = world.driver
    x, other = world.array("numba"), world.array("torch")
    x.named = world.own["numba"]
    x.work()
    unrelated = other.work()
    y = to(x, "pycuda")
    y.look()
    assert driver.wrong == [] and unrelated not in driver.over
    assert "cuCtxRecordEvent" not in driver.asked


@pytest.mark.parametrize("consumer", ["torch", "tensorflow", "numba"])
def test_work_in_another_context_is_waited_for(world: Any, consumer: str) -> None:
    driver = world.driver
    own = driver.context()
    world.own["pycuda"] = driver.stream(own)
    x = world.array("pycuda", context=own)
    x.work()
    y = to(x, consumer)
    y.look()
    assert driver.wrong == []
    del x, y
    driver.finish()


# lifetime


@pairs
def test_views_of_views_keep_the_memory_of_the_first_array(world: Any, producer: str, consumer: str) -> None:
    x = world.array(producer)
    address = x.ptr
    y = to(x, consumer)
    z = to(y, producer)
    assert z.ptr == address and lifetimes.lent_by(producer, 0) == lifetimes.lent_by(consumer, 0) == 1024
    del x, y
    gc.collect()
    assert address not in world.driver.freed
    z.look()
    del z
    gc.collect()
    settle(world.driver)
    assert address in world.driver.freed and world.driver.wrong == [] and lifetimes.lent() == {}


def test_pycudas_memory_is_released_on_its_own_thread(world: Any) -> None:
    x = world.array("pycuda")
    address = x.ptr
    views = [to(x, "torch")]
    del x
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert address not in world.driver.freed
    y = world.array("torch")
    to(y, "cupy")
    assert address in world.driver.freed and world.driver.wrong == [], "released at the next hand-over on that thread"


def test_lent_bytes_are_counted_by_producer_and_consumer(world: Any) -> None:
    x = world.array("torch", (256,), "uint8")
    views = [to(x, name) for name in NAMES if name != "torch"]
    assert lifetimes.lent() == {0: {"torch": dict.fromkeys(NAMES[1:], 256)}} and lifetimes.lent_by("torch", 0) == 256
    route = last_route()
    assert str(route) == "torch to numba: 256 B shared"
    views.clear()
    gc.collect()
    assert lifetimes.lent() == {}


# refusals


@pytest.mark.parametrize(
    ("consumer", "made", "reason"),
    [
        ("tensorflow", {"strides": (1, 64)}, "only row-major arrays without gaps"),
        ("tensorflow", {"past": 4}, "multiples of 64 bytes, this one is 4 past"),
        ("jax", {"strides": (8, 1)}, "only arrays without gaps"),
        ("jax", {"past": 8}, "multiples of 16 bytes, this one is 8 past"),
        ("torch", {"strides": (-4, 1)}, "strides are negative"),
        ("numba", {"dtype": "bfloat16"}, "no arrays of dtype bfloat16"),
        ("pycuda", {"dtype": "bfloat16"}, "no arrays of dtype bfloat16"),
    ],
)
def test_what_cannot_be_shared_is_refused_and_nothing_stays_shared(
    world: Any, consumer: str, made: dict[str, Any], reason: str
) -> None:
    x = world.array("cupy", **made)
    for copy in (None, False):
        with pytest.raises(CannotShare, match=reason) as refusal:
            to(x, consumer, copy=copy)
        assert (refusal.value.producer, refusal.value.consumer) == ("cupy", consumer) and refusal.value.remedy
    assert not lifetimes._open and "cuEventRecord" not in world.driver.asked


def test_another_gpu_is_refused_or_copied_to(world: Any) -> None:
    x = world.array("cupy")
    x.work()
    with pytest.raises(CannotShare, match="it lies on cuda:0, not on cuda:1"):
        to(x, "torch", device=1)
    y = to(x, "torch", device=1, copy=True)
    y.look()
    route = last_route()
    assert route is not None and "not on cuda:1" in route.reason
    assert route.way == "copied from cuda:0 to cuda:1, through the host"
    assert y.gpu == 1 and world.driver.wrong == []
    del x, y
    gc.collect()
    world.driver.finish()


@pytest.mark.parametrize(
    ("peers", "way"),
    [
        (set(), ", through the host"),
        ({(1, 0)}, ", peer to peer"),  # the second GPU reads what lies on the first
        ({(0, 1)}, ", peer to peer"),  # the first writes to the second
        ({(0, 1), (1, 0)}, ", peer to peer"),
    ],
)
def test_a_copy_to_another_gpu_says_by_which_route_it_went(world: Any, peers: set[tuple[int, int]], way: str) -> None:
    world.driver.peers |= peers
    for producer in ("torch", "cupy", "pycuda"):
        x = world.array(producer)
        y = to(x, "torch", device=1, copy=True)
        route = last_route()
        assert route is not None and route.way == f"copied from cuda:0 to cuda:1{way}" and y.gpu == 1
        to(x, "torch", copy=True)
        assert last_route().way == "copied on cuda:0"
        del x, y
    settle(world.driver)


@pytest.mark.parametrize("consumer", NAMES)
@pytest.mark.parametrize(
    ("reached", "way"),
    [((False, False), ", through the host"), ((True, False), ", peer to peer"), ((True, True), ", peer to peer")],
)
def test_only_frameworks_that_copy_directly_say_so(
    world: Any, monkeypatch: pytest.MonkeyPatch, consumer: str, reached: tuple[bool, ...], way: str
) -> None:
    """Memory that is reached is no proof that a copy went there directly: JAX's went at a fifth of the rate."""
    answers = list(reached)
    monkeypatch.setattr("memguard._devices.copies.reaches", lambda ordinal, address: answers.pop())
    x = world.array("torch")
    view = types.SimpleNamespace(size=1, device=0, address=x.ptr)
    found = transfer._route(view, registry.by_name(consumer), world.array(consumer, ordinal=1), 1)
    assert found == ("" if consumer == "jax" and True in reached else way)
    settle(world.driver)


@pytest.mark.parametrize("known", [(None, None), (None, False), (False, None)])
def test_a_route_that_cuda_does_not_say_is_not_made_up(
    world: Any, known: tuple[bool | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = list(known)
    monkeypatch.setattr("memguard._devices.copies.reaches", lambda ordinal, address: answers.pop())
    x = world.array("torch")
    to(x, "torch", device=1, copy=True)
    assert last_route().way == "copied from cuda:0 to cuda:1"
    settle(world.driver)


@pytest.mark.parametrize("name", ["torch", "cupy", "pycuda", "numba"])
@pytest.mark.parametrize(
    ("shape", "strides"), [((5,), (2,)), ((3, 4), (1, 3)), ((3, 4), (8, 2)), ((4, 3), (0, 1)), ((2, 3, 4), (24, 8, 2))]
)
def test_a_frameworks_own_copy_has_the_values_of_an_array_with_gaps(
    world: Any, name: str, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """Also one that its copy cannot read: PyCUDA's and Numba's copies take the bytes as they lie."""
    x = world.array(name, shape, "uint8", strides=strides)
    count = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    ctypes.memmove(x.ptr, bytes(range(count)), count)
    places = [sum(map(operator.mul, index, strides)) for index in itertools.product(*map(range, shape))]
    for options in ({}, {"stream": world.driver.stream()}):
        y = to(x, name, copy=True, **options)
        assert ctypes.string_at(y.ptr, y.nbytes) == bytes(places) and y.shape == shape
        assert world.driver.wrong == [] and str(last_route()).startswith(f"{name} to {name}: ")
        settle(world.driver)


def test_numba_and_pycuda_take_arrays_on_the_gpu_of_the_current_context(world: Any) -> None:
    x = world.array("torch", ordinal=1)
    for consumer in ("pycuda", "numba"):
        with pytest.raises(CannotShare, match="it lies on cuda:1, not on cuda:0"):
            to(x, consumer)
    world.driver.stack.append(next(handle for handle, gpu in world.driver.contexts.items() if gpu == 1))
    assert to(x, "numba").ptr == x.ptr
    world.driver.stack.pop()


def test_memory_that_cuda_does_not_know_is_refused(world: Any) -> None:
    x = world.array("numba")
    stale = type(x)(None, 64, (4,), (1,), "float32", 0)
    with pytest.raises(CannotShare, match="CUDA knows no memory at its address 0x40"):
        to(stale, "torch")


def test_objects_that_are_no_arrays_are_refused(world: Any) -> None:
    for thing in (7, "x", [1.0], None, object()):
        with pytest.raises(CannotShare, match="has neither __cuda_array_interface__ nor __dlpack__"):
            to(thing, "torch")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"typestr": "|V8"}, r"its dtype '\|V8'"),
        ({"typestr": ">f4"}, "its dtype '>f4'"),
        ({"strides": (3,)}, "not multiples of its item size"),
        ({"mask": object()}, "masked"),
    ],
)
def test_a_wrong_array_interface_is_refused(world: Any, changes: dict[str, Any], reason: str) -> None:
    memory = world.array("torch", (4,))
    interface = {"shape": (4,), "typestr": "<f4", "data": (memory.ptr, False), "version": 3, **changes}
    with pytest.raises(CannotShare, match=reason):
        to(types.SimpleNamespace(__cuda_array_interface__=interface), "torch")


def test_read_only_memory_is_shared_with_frameworks_that_cannot_write_or_with_copy_false(world: Any) -> None:
    memory = world.array("torch", (64,))
    interface = {"shape": (64,), "typestr": "<f4", "data": (memory.ptr, True), "version": 3}
    x = types.SimpleNamespace(__cuda_array_interface__=interface)
    assert to(x, "tensorflow").ptr == to(x, "jax").ptr == memory.ptr
    for consumer in ("torch", "cupy", "numba", "pycuda"):
        with pytest.raises(CannotShare, match="it is read-only"):
            to(x, consumer)
        assert to(x, consumer, copy=False).ptr == memory.ptr, "copy=False shares read-only memory"
    del x, interface
    gc.collect()


@pytest.mark.parametrize("consumer", NAMES)
def test_a_buffer_with_an_interface_and_no_stream_waits_for_the_context(world: Any, consumer: str) -> None:
    """As RMM's, of version 0 of the interface."""
    memory, hidden = world.array("cupy", (64,), "uint8"), world.driver.stream()
    world.driver.write(hidden, memory.ptr)

    interface = {"shape": (64,), "typestr": "|u1", "data": (memory.ptr, False), "version": 0}
    rmm = type("DeviceBuffer", (), {"__module__": "rmm.pylibrmm", "__cuda_array_interface__": interface})
    y = to(rmm(), consumer)
    y.look()
    assert world.driver.wrong == [] and lifetimes.lent_by("rmm", 0) == 64
    world.driver.finish()
    del y
    gc.collect()


@pytest.mark.parametrize("consumer", NAMES)
def test_a_buffer_with_dlpack_orders_itself_on_the_default_stream(world: Any, consumer: str) -> None:
    """As cuda.core's."""
    driver, hidden = world.driver, world.driver.stream()
    memory = world.array("cupy", (64,), "uint8")
    driver.write(hidden, memory.ptr)

    y = to(Buffer(memory, lambda stream: driver.tell(stream, hidden)), consumer)
    y.look()
    assert driver.wrong == [] and y.ptr == memory.ptr and lifetimes.lent_by("cuda", 0) == 64
    settle(driver)


class Buffer:
    __module__ = "cuda.core"

    def __init__(self, memory: Any, order: Any) -> None:
        self.memory, self.order = memory, order

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        self.order(stream)
        return self.memory.capsule()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


# CUDA graphs


@pytest.mark.parametrize(("producer", "consumer"), [pair for pair in PAIRS if TELLS & set(pair)])
def test_no_other_stream_waits_for_a_captured_one_nor_it_for_them(world: Any, producer: str, consumer: str) -> None:
    driver = world.driver
    x = world.array(producer)
    captured = {world.own[producer if producer in TELLS else consumer]}
    driver.capturing |= captured
    if producer == "tensorflow":  # it has waited itself, and no stream has to
        to(x, consumer)
    else:
        with pytest.raises(CannotShare, match="CUDA graph is being captured") as refusal:
            to(x, consumer)
        assert "before the capture" in refusal.value.remedy
    assert driver.capturing == captured and not lifetimes._open, "the capture goes on"
    assert not {"cuCtxRecordEvent", "cuStreamWaitEvent"} & set(driver.asked)
    driver.capturing.clear()
    to(x, consumer)


@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_a_captured_stream_is_refused_for_a_frameworks_own_array(world: Any, name: str) -> None:
    side = world.driver.stream()
    x = world.array(name)
    world.driver.capturing.add(side)
    with pytest.raises(CannotShare, match=f"{name} to {name}: .*CUDA graph is being captured") as refusal:
        to(x, name, stream=side)
    assert "before the capture" in refusal.value.remedy
    assert world.driver.capturing == {side}, "the capture goes on"
    assert to(x, name) is x
    world.driver.capturing.clear()


@pytest.mark.parametrize("producer", NAMES)
@pytest.mark.parametrize("consumer", NAMES)
def test_the_default_stream_is_not_used_while_a_stream_that_it_waits_for_is_captured(
    world: Any, producer: str, consumer: str
) -> None:
    """Asking it whether it is idle ends the capture as recording on it does, and making it wait."""
    driver = world.driver
    if producer == consumer or not TELLS & {producer, consumer}:
        return
    x = world.array(producer)
    for name in TELLS & {producer, consumer}:
        world.own[name] = 0
    captured = driver.stream()
    driver.capturing.add(captured)
    driver.blocking.add(captured)
    if {producer, consumer} == TELLS or producer == "tensorflow":  # one stream, or nobody waits
        to(x, consumer)
    else:
        with pytest.raises(CannotShare, match="CUDA graph is being captured"):
            to(x, consumer)
    assert driver.capturing == {captured} and not lifetimes._open, "the capture goes on"
    driver.capturing.clear()
    y = to(x, consumer)
    y.look()
    assert driver.wrong == []
    del x, y
    gc.collect()
    settle(driver)


@pytest.mark.parametrize("default", ["producer", "consumer", "neither"])
def test_a_view_that_ends_beside_such_a_capture_keeps_its_memory_until_its_work_is_done(
    world: Any, default: str
) -> None:
    """Also the default stream, on which the memory was allocated, is not made to wait."""
    driver = world.driver
    if default != "neither":
        world.own["torch" if default == "producer" else "cupy"] = 0
    x = world.array("torch")
    address, captured = x.ptr, driver.stream()
    y = to(x, "cupy")
    work = y.look()
    driver.capturing.add(captured)
    driver.blocking.add(captured)
    del x, y
    gc.collect()
    lifetimes.sweep()
    assert driver.capturing == {captured} and driver.freed == [], "the capture goes on, and the memory is kept"
    driver.finish(work)
    lifetimes.sweep()
    if default == "consumer":  # its work cannot be marked before
        assert driver.freed == []
        driver.capturing.clear()
        lifetimes.sweep()
    assert driver.freed == [address] and driver.wrong == [] and not lifetimes._parked


def test_two_captured_streams_of_one_graph_may_wait_for_each_other(world: Any) -> None:
    world.driver.capturing |= {world.own["torch"], world.own["cupy"]}
    x = world.array("torch")
    x.work()
    y = to(x, "cupy")
    y.look()
    assert world.driver.wrong == [] and len(world.driver.capturing) == 2
    del x, y
    gc.collect()
    world.driver.capturing.clear()
    world.driver.finish()


# copies


def test_copies_on_the_gpu_are_in_order_and_have_memory_of_their_own(world: Any) -> None:
    for producer in NAMES:
        for consumer in ("torch", "cupy", "pycuda", "numba"):
            x = world.array(producer)
            ctypes.memset(x.ptr, 7, x.nbytes)
            x.work()
            y = to(x, consumer, copy=True)
            y.look()
            route = last_route()
            assert world.driver.wrong == [], (producer, consumer)
            assert y.ptr != x.ptr and ctypes.string_at(y.ptr, y.nbytes) == b"\x07" * 1024
            assert route is not None and (route.way, route.reason, route.nbytes) == ("copied on cuda:0", "", 1024)
            settle(world.driver)
            del x, y
    assert not lifetimes._open


@pytest.mark.parametrize("producer", NAMES)
def test_copies_to_the_host_go_through_pinned_memory(world: Any, producer: str) -> None:
    x = world.array(producer, (1024, 5), "uint8")
    ctypes.memmove(x.ptr, bytes(range(256)) * 20, 5120)
    work = x.work()
    with pytest.raises(CannotShare, match="NumPy never holds GPU memory"):
        to(x, "numpy")
    y = to(x, "numpy", copy=True)
    assert y.tobytes() == bytes(range(256)) * 20 and work in world.driver.over
    route = last_route()
    assert route is not None and route.way == "copied from cuda:0 through pinned host memory"
    assert not world.driver.pinned, "the pinned memory is freed"
    world.driver.finish()


# a driver that fails


@pairs
def test_each_call_of_the_driver_may_fail(world: Any, producer: str, consumer: str) -> None:
    driver = world.driver
    x = world.array(producer)
    x.work()
    driver.asked.clear()
    to(x, consumer)
    quiet = {"cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2", "cuThreadExchangeStreamCaptureMode"}
    for call in sorted(set(driver.asked) - quiet):
        settle(driver)
        for event in [event for events in streams._idle.values() for event in events]:
            driver.cuEventDestroy_v2(event)
        contexts._primaries.clear()
        streams._idle.clear()
        x.work()
        driver.fails[call] = 719
        try:
            to(x, consumer)
        except (DeviceError, CannotShare) as error:
            assert "fix:" in str(error)
        settle(driver)
        assert len(driver.stack) == 1 and not lifetimes._open and not lifetimes._parked, call
        assert idle_and_live(driver)[0] == idle_and_live(driver)[1], f"{call}: no event is lost"


def test_an_error_of_the_consumer_leaves_nothing_shared(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no")

    torch: Any = sys.modules["torch"]
    monkeypatch.setattr(torch.utils.dlpack, "from_dlpack", refuses)
    monkeypatch.setattr(sys.modules["cupy"], "from_dlpack", refuses)
    x = world.array("jax")
    for consumer in ("torch", "cupy"):
        with pytest.raises(RuntimeError, match="no"):
            to(x, consumer)
        gc.collect()  # what the error's frames kept
        assert not lifetimes._open and not lifetimes._parked
        assert not {"cuEventRecord", "cuCtxRecordEvent"} & set(world.driver.asked), (
            "no consumer got the memory, so nobody waits"
        )
    address = x.ptr
    del x
    gc.collect()
    assert address in world.driver.freed


def test_the_registry_asks_only_the_frameworks_of_the_class(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's subclass still belongs to its framework. No other framework is asked, so none is imported."""
    base = type(world.array("torch"))
    cls = type("Mine", (base,), {"__module__": "my.package"})
    x = world.array("torch")
    mine = cls(x.memory, x.address, x.dims, x.steps, x.kind, x.gpu)
    assert registry.of(mine).name == "torch"
    for name in ("cupy", "jax", "tensorflow", "numba", "numba.cuda", "pycuda", "pycuda.gpuarray"):
        monkeypatch.delitem(sys.modules, name)
    assert registry.of(mine).name == "torch" and to(mine, "torch") is mine
    assert not {"cupy", "jax", "tensorflow"} & set(sys.modules)


def test_only_pycudas_offers_are_bound_to_a_thread(world: Any) -> None:
    for name in NAMES:
        x = world.array(name)
        offer: Offer = registry.by_name(name).offer(x)
        assert offer.thread == (threading.get_ident() if name == "pycuda" else None)
        assert offer.stream == (world.own[name] if name in TELLS else None)


def _elsewhere(world: Any, call: Any) -> Any:
    """On a thread that has no current context."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    world.driver.finish()
    return found[0]


@pytest.mark.parametrize("producer", ["torch", "tensorflow", "jax", "cupy", "numba", "pycuda"])
def test_a_copy_to_the_host_needs_no_context_on_the_thread(world: Any, producer: str) -> None:
    x = world.array(producer)
    x.work()
    found = _elsewhere(world, lambda: to(x, "numpy", copy=True))
    assert getattr(found, "shape", found) == x.shape


def test_numbas_own_copy_needs_no_context_on_the_thread(world: Any) -> None:
    x = world.array("numba")
    found = _elsewhere(world, lambda: to(x, "numba", copy=True).shape)
    assert found == x.shape


@pytest.mark.parametrize(("producer", "consumer"), [("torch", "torch"), ("cupy", "cupy"), ("torch", "cupy")])
def test_the_given_stream_waits_for_a_copy_too(world: Any, producer: str, consumer: str) -> None:
    x = world.array(producer)
    x.work()
    side = world.driver.stream()
    y = to(x, consumer, copy=True, stream=side)
    world.driver.read(side, y.address)
    assert world.driver.wrong == []
    world.driver.finish()


@pytest.mark.parametrize("told", [False, True])
def test_pycudas_work_in_a_context_of_its_own_is_waited_for_at_the_end(world: Any, told: bool) -> None:
    world.driver.stack.append(world.driver.context())
    try:
        world.own["pycuda"] = world.driver.stream(world.driver.stack[-1])
        x = world.array("torch")
        x.work()
        y = to(x, "pycuda", **({"stream": world.own["pycuda"]} if told else {}))
        y.look()
        del y
        gc.collect()
        x.work()
        assert world.driver.wrong == []
    finally:
        world.driver.stack.pop()
        world.driver.finish()


@pytest.mark.parametrize(("producer", "consumer"), [("torch", "numpy"), ("torch", "pycuda"), ("pycuda", "pycuda")])
def test_a_copy_in_a_capture_is_refused_as_any_hand_over(world: Any, producer: str, consumer: str) -> None:
    x = world.array(producer)
    world.driver.capturing.add(world.own["torch"])
    with pytest.raises(CannotShare) as refusal:
        to(x, consumer, copy=True)
    assert "before the capture" in refusal.value.remedy and refusal.value.copied
    world.driver.capturing.clear()
    world.driver.finish()


@pytest.mark.parametrize("device", ["cuda:0", "cpu", -1, True, 1.0, 1 << 40])
def test_a_device_must_be_the_number_of_a_gpu(world: Any, device: Any) -> None:
    x = world.array("torch")
    with pytest.raises(ValueError, match=r"not the number of a GPU\n    fix: CUDA's ordinal"):
        to(x, "cupy", device=device)


@pytest.mark.parametrize("copy", ["no", 0, 1, "True"])
def test_copy_must_be_none_true_or_false(world: Any, copy: Any) -> None:
    x = world.array("torch")
    with pytest.raises(ValueError, match="copy must be None, True or False"):
        to(x, "cupy", copy=copy)


@pytest.mark.parametrize("stream", [True, -1, "0", types.SimpleNamespace(), type("Event", (), {"ptr": 7})()])
def test_a_stream_must_be_a_stream(world: Any, stream: Any) -> None:
    x = world.array("torch")
    with pytest.raises(ValueError, match=r"is not a stream\n    fix:"):
        to(x, "cupy", stream=stream)


def test_a_framework_must_be_known_and_installed(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = world.array("torch")
    for name, hint in {
        "tf": "'tensorflow'",
        "np": "'numpy'",
        "pytorch": "'torch'",
        "flax": "'jax'",
        "cuda": "one of",
    }.items():
        with pytest.raises(ValueError, match=hint):
            to(x, name)
    with pytest.raises(ValueError, match="by its name, not as Tensor"):
        to("torch", x)
    monkeypatch.delitem(sys.modules, "pycuda", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    with pytest.raises(ImportError, match="fix: pip install pycuda"):
        to(x, "pycuda")
    with pytest.raises(ImportError, match=r"fix: pip install 'jax\[cuda13\]'"):
        to(x, "jax")


# what it costs, without a clock


MOST_CALLS = {"memguard": 40, "driver": 13, "instructions": 1200}
"""Of the worst pair: Python calls within memguard, calls of the driver, and bytecode instructions of CPython 3.11.
Before they were counted it had 101, 14 and 1,873."""


@pairs
def test_a_hand_over_on_idle_streams_takes_few_calls(world: Any, producer: str, consumer: str) -> None:
    """The view's end included. More of them is time on every hand-over: a call takes about 50 ns, one of the driver
    1 us, and both several times that when the caches are cold."""
    driver, ours = world.driver, str(Path(lifetimes.__file__).parents[2])
    world.own |= {"torch": 0, "cupy": 0}  # the default stream, as in most programs
    x = world.array(producer)

    def hand_over() -> None:
        y = to(x, consumer)
        del y

    for _ in range(3):  # what is found once
        hand_over()
    gc.collect()
    driver.finish()
    driver.asked.clear()
    calls: list[str] = []
    instructions = 0

    def called(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith((ours, "<string>")):  # named tuples too
            calls.append(frame.f_code.co_name)

    def ran(frame: types.FrameType, event: str, _: Any) -> Any:
        nonlocal instructions
        if not frame.f_code.co_filename.startswith(ours):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        instructions += event == "opcode"
        return ran

    profiled, traced = sys.getprofile(), sys.gettrace()
    gc.disable()
    try:
        sys.setprofile(called)
        hand_over()
        sys.setprofile(profiled)
        asked = len(driver.asked)
        sys.settrace(ran)
        hand_over()
    finally:
        sys.settrace(traced)
        sys.setprofile(profiled)
        gc.enable()
    assert 15 <= len(calls) <= MOST_CALLS["memguard"], calls
    assert asked <= MOST_CALLS["driver"], driver.asked
    if sys.version_info[:2] == (3, 11) and traced is None:
        assert 500 <= instructions <= MOST_CALLS["instructions"]


@pairs
def test_nothing_is_asked_twice_on_idle_streams(world: Any, producer: str, consumer: str) -> None:
    """At the hand-over and at its end the current context is looked up once, and the capture mode is changed once."""
    driver = world.driver
    x = world.array(producer)
    to(x, consumer)
    gc.collect()
    driver.finish()
    driver.asked.clear()
    y = to(x, consumer)
    handed = list(driver.asked)
    driver.asked.clear()
    del y
    own = {"cuCtxGetCurrent": 1} if consumer == "pycuda" else {}  # PyCUDA works in the current context
    for asked, more in ((handed, own), (driver.asked, {})):
        for call in set(asked) - {"cuThreadExchangeStreamCaptureMode", "cuStreamIsCapturing"}:
            assert asked.count(call) <= 1 + more.get(call, 0), (call, asked)
        assert asked.count("cuThreadExchangeStreamCaptureMode") in (0, 2), "and put back"
        assert asked.count("cuStreamIsCapturing") <= 2, "of each stream once"


def test_the_capture_mode_is_put_back_whenever_a_signal_comes(world: Any) -> None:
    """A Ctrl-C at every point at which Python may run a signal handler, one after the other."""
    points = importlib.import_module("interruptions").Points
    driver = world.driver
    side, other = driver.stream(), driver.stream()
    for first, then in ((side, other), (None, other), (None, None), (side, None), (0, other)):
        streams.follow(0, first, then)
        for number in range(1, 200):
            try:
                points(number).run(lambda first=first, then=then: streams.follow(0, first, then))
                break
            except KeyboardInterrupt:
                assert (driver.mode, driver.stack) == (0, [PRIMARY]), (first, then, number)
        assert 10 < number < 199, "every point was tried"
