"""The pool of what Numba frees, on a model in which kernels run until the test ends them."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_numba_model import Model, Setting, forget, model

from memguard._base.units import MIB
from memguard._devices import contexts, streams
from memguard._frameworks.numba import watch
from memguard._frameworks.numba.adapter import Numba
from memguard._frameworks.numba.pool import Block, Pool
from memguard.errors import DeviceError

pytestmark = pytest.mark.one_case  # no version of what is installed changes it: all of it is our own code

__all__ = ["model"]  # a fixture

PAGE = 2 * MIB


def address(array: Any) -> int:
    """Where an array lies, asked for as nobody else does: it is not exported by that."""
    return int(array.gpu_data._block.address)


def flush(setting: Setting) -> None:
    """Numba carries out its pending frees."""
    setting.cuda.current_context().memory_manager.deallocations.clear()


def manager(setting: Setting) -> Any:
    return setting.cuda.current_context().memory_manager


@pytest.fixture
def setting(model: Model) -> Iterator[Setting]:
    made = model("h200")
    made.applied = made.apply(64 * MIB)  # type: ignore[attr-defined]
    made.cuda.current_context()
    yield made
    made.driver.gpu.wait()


def calls(setting: Setting, name: str) -> list[Any]:
    """What a call of the driver is given from now on."""
    seen: list[Any] = []
    call = getattr(setting.driver.driver, name)

    def noted(argument: Any) -> Any:
        seen.append(argument)
        return call(argument)

    setattr(setting.driver.driver, name, noted)
    return seen


# it serves


@pytest.mark.parametrize(
    ("first", "then", "same"),
    [
        (1, 512, True), (513, 1024, True), (512, 513, False), (1000, 1, False), (MIB, MIB - 511, True),
        (MIB, MIB - 512, False), (MIB + 1, 2 * MIB, True), (MIB, MIB + 1, False), (2 * MIB, 2 * MIB + 1, False),
        (5 * MIB + 1, 6 * MIB, True), (6 * MIB, 4 * MIB + 1, True), (6 * MIB, 4 * MIB, False),
    ],
)  # fmt: skip
def test_a_block_serves_for_all_that_the_driver_would_round_up_to_it(
    setting: Setting, first: int, then: int, same: bool
) -> None:
    array = setting.cuda.device_array(first)
    where, taken = address(array), calls(setting, "cuMemAlloc")
    del array
    flush(setting)
    held = setting.usage().held
    array = setting.cuda.device_array(then)
    assert (address(array) == where, len(taken)) == ((True, 0) if same else (False, 1))
    usage = setting.usage()
    assert usage.in_use == then and usage.held == setting.taken()
    assert (usage.held == held and usage.reclaimable == 0) or not same


def test_only_a_free_that_was_carried_out_brings_a_block(setting: Setting) -> None:
    """Numba's pending frees, their counts and `defer_cleanup` keep their meaning."""
    array = setting.cuda.device_array(4 * MIB)
    where = address(array)
    setting.cuda.launch(array)
    del array
    pending = manager(setting).deallocations
    assert len(pending) == 1 and address(setting.cuda.device_array(4 * MIB)) != where
    assert len(pending) == 2 and pending._size == 8 * MIB
    with setting.cuda.defer_cleanup():
        pending.clear()
        assert len(pending) == 2 and not manager(setting).pool.idle
    pending.clear()
    assert len(pending) == 0 and len(manager(setting).pool.idle) == 2
    assert setting.driver.gpu.marks == 1, "one for all blocks of a flush"


def test_the_same_blocks_serve_a_loop_for_ever(setting: Setting) -> None:
    for _ in range(30):
        setting.cuda.device_array(1000)
    taken, given = calls(setting, "cuMemAlloc"), calls(setting, "cuMemFree")
    for _ in range(3000):
        setting.cuda.device_array(1000)
    assert taken == [] and given == [] and setting.usage().held == setting.taken() == 2 * MIB


# never before its work is done


KINDS = [
    "default",
    "legacy",
    "own",
    "external",
    "external that blocks",
    "per-thread",
    "cuda.core",
    "memset",
    "memset of a part",
    "copy",
]


def start(setting: Setting, kind: str, array: Any) -> Any:
    """Work on the array, on a stream of this kind."""
    cuda, driver = setting.cuda, setting.driver
    if kind == "default":
        return cuda.launch(array)
    if kind == "legacy":
        return cuda.launch(array, cuda.external_stream(1))
    if kind == "own":
        setting.stream = cuda.stream()  # type: ignore[attr-defined]
        return cuda.launch(array, setting.stream)  # type: ignore[attr-defined]
    if kind.startswith("external"):
        return cuda.launch(array, cuda.external_stream(driver.gpu.stream(blocking="blocks" in kind)))
    if kind == "per-thread":
        return cuda.launch(array, cuda.per_thread_default_stream())
    handle = driver.gpu.stream(blocking=False)
    foreign = type("Stream", (), {"handle": handle})()
    if kind == "cuda.core":
        return cuda.launch(array, foreign)
    if kind.startswith("memset"):
        (array[0:50] if "part" in kind else array).gpu_data.memset(0, stream=foreign)
    else:
        array.copy_to_host(stream=foreign)
    return driver.gpu.work[-1]


def exports(setting: Setting) -> dict[str, Callable[[Any], int]]:
    """How an address leaves Numba."""
    driver = setting.driver
    return {
        "interface": lambda array: array.__cuda_array_interface__["data"][0],
        "a part's interface": lambda array: array[100:200].__cuda_array_interface__["data"][0] - 100,
        "a part of a part": lambda array: array[100:300][100:200].__cuda_array_interface__["data"][0] - 200,
        "ctypes": lambda array: array.device_ctypes_pointer.value,
        "memory": lambda array: array.gpu_data.device_ctypes_pointer.value,
        "value": lambda array: array.gpu_data.device_pointer_value,
        "pointer": lambda array: array.gpu_data.device_pointer,
        "handle": lambda array: array.gpu_data.handle,
        "a part's handle": lambda array: array[100:200].gpu_data.handle - 100,
        "function": driver.device_pointer,
        "function of memory": lambda array: driver.device_pointer(array.gpu_data),
        "extents": driver.device_extents,
        "IPC": lambda array: array.get_ipc_handle()[0],
    }


EXPORTS = [
    "interface", "a part's interface", "a part of a part", "ctypes", "memory", "value", "pointer", "handle",
    "a part's handle", "function", "function of memory", "extents", "IPC",
]  # fmt: skip


@pytest.mark.parametrize("size", [1000, 4 * MIB])
@pytest.mark.parametrize("kind", KINDS)
def test_no_block_is_handed_out_while_a_stream_works_on_it(setting: Setting, kind: str, size: int) -> None:
    array = setting.cuda.device_array(size)
    work, where = start(setting, kind, array), address(array)
    frees = calls(setting, "cuMemFree")
    del array
    flush(setting)
    others = [setting.cuda.device_array(size) for _ in range(3)]
    pooled = kind in ("default", "legacy", "own")
    assert (work in setting.driver.gpu.work) == pooled and len(frees) == (not pooled), "else cuMemFree has waited"
    if pooled:
        assert where not in map(address, others)
        setting.driver.gpu.finish(work)
        assert address(setting.cuda.device_array(size)) == where, "and as soon as it is done"
    assert manager(setting).pooling == (pooled or kind.startswith("memset")), "memset tells of one array only"


@pytest.mark.parametrize("how", EXPORTS)
def test_a_block_whose_address_left_numba_goes_to_the_driver(setting: Setting, how: str) -> None:
    array, kept = setting.cuda.device_array(4 * MIB), setting.cuda.device_array(4 * MIB)
    leave = exports(setting)
    assert list(leave) == EXPORTS
    assert leave[how](array) == address(array)
    work = setting.driver.gpu.start(setting.driver.gpu.stream(blocking=False), address(array), 4 * MIB)
    frees, gone = calls(setting, "cuMemFree"), address(array)
    del array, kept
    flush(setting)
    assert frees == [gone] and work not in setting.driver.gpu.work and manager(setting).pooling
    assert len(manager(setting).pool.idle) == 1, "the other one is pooled as before"


def test_kernels_copies_parts_and_memsets_export_nothing(setting: Setting) -> None:
    array, stream = setting.cuda.device_array(4 * MIB), setting.cuda.stream()
    setting.cuda.launch(array)
    setting.cuda.launch(array[100:200], stream)
    array.copy_to_host()
    array[0:50][10:20].copy_to_host(stream)
    assert copy.copy(array.gpu_data) is array.gpu_data, "a block has one owner"
    array.bind(stream).copy_to_host()
    array.gpu_data.memset(0, stream=stream)
    array.gpu_data.memset(0)
    where, part = address(array), array[100:200]
    del array
    flush(setting)
    assert setting.pending() == 0 and not manager(setting).pool.idle, "a part keeps it"
    del part
    flush(setting)
    setting.driver.gpu.wait()
    assert address(setting.cuda.device_array(4 * MIB)) == where


@pytest.mark.parametrize("kind", [*KINDS[:3], "exported", *KINDS[3:]])
def test_control_without_the_rule_a_block_is_handed_out_under_a_kernel(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The rule switched off, each of these is found: else the tests above would prove nothing."""

    class Passed:
        def passed(self) -> bool:
            return True

        def close(self) -> None: ...

    held = manager(setting)
    array = setting.cuda.device_array(4 * MIB)
    if kind == "exported":
        exports(setting)["interface"](array)
        work = setting.driver.gpu.start(setting.driver.gpu.stream(blocking=False), address(array), 4 * MIB)
    else:
        work = start(setting, kind, array)
    monkeypatch.setattr(type(held), "pooling", True)
    monkeypatch.setattr(held.pool, "_record", lambda: [Passed()])
    array.gpu_data._block.exported = False
    where = address(array)
    del array
    flush(setting)
    again = setting.cuda.device_array(4 * MIB)
    assert address(again) == where and work in setting.driver.gpu.using(address(again), 4 * MIB)


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "control"])
def test_the_work_of_a_stream_that_was_destroyed_is_waited_for(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, marked: bool
) -> None:
    """The model's legacy stream does not wait for it. The control does without the mark that is made at the end."""
    if not marked:
        monkeypatch.setattr(watch.ended, "unfinished", list)
    array, stream = setting.cuda.device_array(4 * MIB), setting.cuda.stream()
    work, where = setting.cuda.launch(array, stream), address(array)
    del array, stream
    setting.cuda.current_context().deallocations.clear()
    assert work.stream not in setting.driver.gpu.blocking
    flush(setting)
    assert (address(setting.cuda.device_array(4 * MIB)) != where) == marked
    setting.driver.gpu.finish(work)
    flush(setting)
    assert where in [address(setting.cuda.device_array(4 * MIB)) for _ in range(2)]
    assert watch.ended.unfinished() == [] or not marked


@pytest.mark.parametrize("streams_made", [0, 1])
def test_no_event_is_needed_while_the_only_stream_has_nothing_to_do(setting: Setting, streams_made: int) -> None:
    """It is asked instead. What a second stream does, it would not say."""
    kept = [setting.cuda.stream() for _ in range(streams_made)]
    where = set()
    for _ in range(5):
        array = setting.cuda.device_array(4 * MIB)
        where.add(address(array))
        setting.driver.gpu.finish(setting.cuda.launch(array, *kept))
        del array
        flush(setting)
    assert len(where) == 1 and setting.driver.gpu.marks == 5 * streams_made
    array = setting.cuda.device_array(4 * MIB)
    work = setting.cuda.launch(array, *kept)
    del array
    flush(setting)
    assert setting.driver.gpu.marks == 5 * streams_made + 1, "it has work"
    assert address(setting.cuda.device_array(4 * MIB)) not in where and work in setting.driver.gpu.work


def test_a_stream_that_ends_is_at_no_moment_overlooked(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer marks it: whoever flushes meanwhile, on another thread, must not take the default one for alone."""
    alone: list[bool] = []
    made = setting.driver.Mark

    class Looking(made):  # type: ignore[misc, valid-type]
        def __init__(self, *place: Any) -> None:
            alone.append(watch.default_alone())
            super().__init__(*place)
            alone.append(watch.default_alone())

    array, stream = setting.cuda.device_array(4 * MIB), setting.cuda.stream()
    work = setting.cuda.launch(array, stream)
    monkeypatch.setattr(streams, "Mark", Looking)
    del stream
    alone.append(watch.default_alone())
    assert alone == [False] * 3
    setting.driver.gpu.finish(work)
    flush(setting)
    del array
    flush(setting)
    assert watch.default_alone(), "its work is known to be done"


def test_a_stream_that_cannot_be_marked_at_its_end_ends_the_pool(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Any, *args: object) -> None:
        raise DeviceError("recording an event: the stream is capturing")

    stream = setting.cuda.stream()
    monkeypatch.setattr(setting.driver.Mark, "__init__", failing)
    del stream
    assert not manager(setting).pooling


@pytest.mark.parametrize("how", ["closed", "undone"])
def test_a_stream_that_outlives_its_context_or_the_budget_is_not_marked(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The driver crashes on the handle of a stream that is no more; the next context may have the same handle."""
    marked: list[Any] = []
    monkeypatch.setattr(streams, "Mark", lambda *place: marked.append(place))
    stream = setting.cuda.stream()
    if how == "closed":
        setting.cuda.close()
        setting.cuda.current_context()
    else:
        setting.applied.undo()  # type: ignore[attr-defined]
    marked.clear()
    del stream
    assert marked == [] and manager(setting).pooling == (how == "closed")


def test_a_kernel_of_another_gpu_may_read_it(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    setting.cuda.current_context()
    with setting.cuda.gpus[1]:
        setting.cuda.device_array(1)
    setting.driver.gpu.marks = 0
    array = setting.cuda.device_array(4 * MIB)
    del array
    flush(setting)
    assert setting.driver.gpu.marks == 2, "in the contexts of both"


@pytest.mark.parametrize("own", [0, 1], ids=["no stream", "own stream"])
def test_a_capture_on_another_thread_is_not_ended(setting: Setting, own: int) -> None:
    """The model's `Mark` and `quick_idle` fail where an event or a question would end a capture."""
    kept = [setting.cuda.stream() for _ in range(own)]
    stream = setting.driver.gpu.stream(blocking=True)
    setting.driver.gpu.captures.add(stream)
    arrays = [setting.cuda.device_array(4 * MIB) for _ in range(3)]
    where = {address(array) for array in arrays}
    arrays.clear()
    flush(setting)
    array = setting.cuda.device_array(4 * MIB)
    assert address(array) not in where and setting.driver.gpu.marks == 0, "not ready"
    setting.driver.gpu.captures.clear()
    again = [setting.cuda.device_array(4 * MIB) for _ in range(3)]
    assert where.isdisjoint(map(address, again)), "marked by the next flush"
    del again[0]
    flush(setting)
    assert setting.driver.gpu.marks == len(kept)
    assert {address(setting.cuda.device_array(4 * MIB)) for _ in range(2)} & where


def test_a_capture_on_a_non_blocking_stream_does_not_hold_it_up(setting: Setting) -> None:
    setting.driver.gpu.captures.add(setting.driver.gpu.stream(blocking=False))
    array = setting.cuda.device_array(4 * MIB)
    where = address(array)
    del array
    flush(setting)
    assert address(setting.cuda.device_array(4 * MIB)) == where


# the cap, and giving back


def test_at_the_cap_a_block_in_use_by_a_kernel_is_waited_for(setting: Setting) -> None:
    arrays = [setting.cuda.device_array(8 * MIB) for _ in range(8)]
    where = {address(array) for array in arrays}
    for array in arrays:
        setting.cuda.launch(array)
    del array
    arrays.clear()
    taken, given = calls(setting, "cuMemAlloc"), calls(setting, "cuMemFree")
    array = setting.cuda.device_array(8 * MIB)
    assert address(array) in where and taken == given == [] and not setting.driver.gpu.work
    assert setting.usage().held == setting.taken() == 64 * MIB


@pytest.mark.parametrize("size", [2 * MIB, 30 * MIB, 64 * MIB])
def test_what_is_pooled_is_given_back_before_a_refusal_and_no_more_than_needed(setting: Setting, size: int) -> None:
    arrays = [setting.cuda.device_array(4 * MIB) for _ in range(16)]
    arrays.clear()
    flush(setting)
    given = calls(setting, "cuMemFree")
    array = setting.cuda.device_array(size)
    assert setting.usage().held == setting.taken() <= 64 * MIB and len(given) == -(-size // (4 * MIB))
    setting.refused(64 * MIB - size + 1)
    del array


def test_a_full_card_gets_the_pool_back(setting: Setting) -> None:
    arrays = [setting.cuda.device_array(4 * MIB) for _ in range(10)]
    arrays.clear()
    flush(setting)
    setting.driver.cards[0].total = 44 * MIB
    array = setting.cuda.device_array(30 * MIB)
    assert setting.taken() == setting.usage().held
    assert "memguard" not in setting.refused(20 * MIB).msg
    del array


def test_a_lower_cap_hands_out_nothing_above_it(setting: Setting) -> None:
    live = [setting.cuda.device_array(8 * MIB) for _ in range(8)]
    del live[4:]
    flush(setting)
    setting.framework.resize({setting.gpu.uuid: 32 * MIB})
    setting.refused(8 * MIB)
    assert setting.taken() == 32 * MIB
    live.pop()
    assert setting.cuda.device_array(8 * MIB) is not None and setting.taken() == 32 * MIB


def test_another_context_of_the_gpu_gets_back_what_the_first_pooled(setting: Setting) -> None:
    """They share the cap: no refusal while blocks or pending frees of the other are idle."""
    arrays = [setting.cuda.device_array(8 * MIB) for _ in range(8)]
    theirs = setting.driver.Context(setting.driver.driver.devices[0])
    setting.kept = theirs  # type: ignore[attr-defined]
    del arrays[4:]
    flush(setting)
    arrays.pop()
    assert setting.pending() == 1
    memory = theirs.memalloc(40 * MIB)
    assert setting.taken() == 64 * MIB == setting.usage().held and setting.usage().in_use == 64 * MIB
    del memory


def test_a_context_that_numba_makes_no_arrays_in_is_not_pooled(setting: Setting) -> None:
    theirs = setting.driver.Context(setting.driver.driver.devices[0])
    memory = theirs.memalloc(8 * MIB)
    del memory
    theirs.memory_manager.deallocations.clear()
    assert setting.taken() == 0 and not theirs.memory_manager.pool.idle


@pytest.mark.parametrize("end", ["trim", "undo", "reset", "close"])
def test_everything_goes_back_to_the_driver(setting: Setting, end: str) -> None:
    live = [setting.cuda.device_array(size) for size in (1000, 4 * MIB, 4 * MIB)]
    live.pop()
    flush(setting)
    live.pop()
    held = manager(setting)
    if end == "trim":
        setting.framework.trim(setting.gpu)
    elif end == "undo":
        flush(setting)
        setting.applied.undo()  # type: ignore[attr-defined]
    elif end == "reset":
        held.reset()
    else:
        setting.cuda.close()
    assert not held.pool.idle and setting.taken() == (0 if end in ("reset", "close") else 2 * MIB)
    live.clear()
    if end == "close":
        return
    array = setting.cuda.device_array(8 * MIB)
    del array
    flush(setting)
    assert (8 * MIB in [block.size for block in held.pool.idle]) == (end != "undo"), "undone: to the driver as ever"


def test_after_a_budget_nobody_watched_the_streams_so_the_next_one_pools_nothing(model: Model) -> None:
    setting = model("h200")
    applied = setting.apply(64 * MIB)
    applied.undo()
    setting.framework = Numba(setting.host)
    setting.apply(64 * MIB)
    array = setting.cuda.device_array(8 * MIB)
    del array
    flush(setting)
    assert setting.taken() == 0 and setting.usage().held == 0


def test_another_stream_is_said_once(setting: Setting) -> None:
    for _ in range(3):
        start(setting, "external", setting.cuda.device_array(1))
    assert [note for note in setting.framework.notes if "stream" in note] == setting.framework.notes
    assert len(setting.framework.notes) == 1


@pytest.mark.parametrize("name", ["Stream", "_stream_handle", "_to_core_stream"])
def test_a_numba_whose_streams_cannot_be_watched_is_capped_and_unpooled(
    model: Model, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    setting = model("h200")
    setting.bring()
    monkeypatch.delattr(setting.driver, name)
    setting.apply(64 * MIB)
    array = setting.cuda.device_array(8 * MIB)
    del array
    flush(setting)
    assert setting.taken() == 0 and len(setting.fill()) == 8


def test_a_numba_that_asks_for_addresses_otherwise_pools_no_array_that_a_kernel_had(setting: Setting) -> None:
    array = setting.cuda.device_array(8 * MIB)

    def launch_otherwise(array: Any) -> None:
        setting.driver.gpu.start(0, array.device_ctypes_pointer.value, array.nbytes)

    launch_otherwise(array)
    del array
    flush(setting)
    assert setting.taken() == 0


@pytest.mark.parametrize("how", ["event", "question"])
def test_a_mark_that_fails_leaves_the_blocks_to_the_driver(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def failing(*_: Any) -> bool:
        raise DeviceError("cuEventQuery: an illegal memory access was encountered")

    if how == "event":
        kept = setting.cuda.stream()
        monkeypatch.setattr(setting.driver.Mark, "passed", failing)
        assert kept is not None
    else:
        monkeypatch.setattr(streams, "quick_idle", failing)
    arrays = [setting.cuda.device_array(8 * MIB) for _ in range(8)]
    where = {address(array) for array in arrays[:1]}
    arrays.clear()
    flush(setting)
    taken = calls(setting, "cuMemAlloc")
    array = setting.cuda.device_array(8 * MIB)
    assert taken == [8 * MIB] and setting.taken() == 64 * MIB and where
    del array


def test_freed_by_hand_and_freed_again(setting: Setting) -> None:
    array = setting.cuda.device_array(8 * MIB)
    array.gpu_data.free()
    with pytest.raises(RuntimeError, match="Freeing dead memory"):
        array.gpu_data.free()
    flush(setting)
    kept = setting.cuda.device_array(8 * MIB)
    assert address(kept) == address(array)
    del array
    flush(setting)
    assert setting.usage().in_use == 8 * MIB and not manager(setting).pool.idle, "the block is the other one's now"


def test_an_array_that_outlives_a_reset_frees_nothing_later(setting: Setting) -> None:
    array = setting.cuda.device_array(8 * MIB)
    where = address(array)
    manager(setting).reset()
    assert setting.taken() == 0
    again = setting.cuda.device_array(8 * MIB)
    assert address(again) == where
    del array
    flush(setting)
    assert setting.taken() == 8 * MIB and setting.usage().in_use == 8 * MIB


def test_in_a_forked_child_nothing_is_handed_out(setting: Setting) -> None:
    array = setting.cuda.device_array(8 * MIB)
    where = address(array)
    del array
    flush(setting)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        setting.framework.forked()
        os._exit(int(address(setting.cuda.device_array(8 * MIB)) == where))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert address(setting.cuda.device_array(8 * MIB)) == where


def test_a_signal_handler_allocates_within_an_allocation(setting: Setting) -> None:
    """At every point: a handler that runs between two instructions of memguard's."""
    live: list[Any] = []
    busy = [False]

    def handler(*_: object) -> None:
        if not busy[0]:
            busy[0] = True
            with contextlib.suppress(setting.driver.CudaAPIError):
                live.append(setting.cuda.device_array(random.choice((1000, 4 * MIB))))
            del live[:-3]
            busy[0] = False

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        kept: list[Any] = []
        for step in range(6000):
            with contextlib.suppress(setting.driver.CudaAPIError):
                kept.append(setting.cuda.device_array((700_000, 1000, 4 * MIB)[step % 3]))
            del kept[: -(step % 7) or None]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0, 0)
        signal.signal(signal.SIGALRM, before)
    kept.clear()
    live.clear()
    setting.framework.trim(setting.gpu)
    usage = setting.usage()
    assert (usage.held, usage.in_use, setting.taken()) == (0, 0, 0)


def test_a_block_that_another_thread_frees_within_an_allocation_is_counted_with_its_own_size(setting: Setting) -> None:
    """It comes into the pool after the log was applied, and is handed out for another size that is rounded equally."""
    kept = [setting.cuda.device_array(4 * MIB)]
    first = setting.cuda.device_array(3 * MIB)
    del first
    flush(setting)
    held = manager(setting)
    take = held.pool.take

    def freed_meanwhile(size: int, taker: Any) -> Any:
        kept.clear()
        flush(setting)
        return take(size, taker)

    held.pool.take = freed_meanwhile
    array = setting.cuda.device_array(3 * MIB + 1)
    assert setting.usage().in_use == 3 * MIB + 1 and setting.usage().peak == 7 * MIB
    del array


def test_threads_never_share_a_block(model: Model) -> None:
    setting = model("h200")
    setting.apply(256 * MIB)
    setting.cuda.current_context()
    live: dict[int, int] = {}
    wrong: list[Any] = []

    def work(seed: int) -> None:
        choose, own = random.Random(seed), list[Any]()

        def drop(number: int) -> None:
            del live[address(own[number])]
            del own[number]

        with setting.cuda.gpus[0]:
            for _ in range(2000):
                if own and choose.random() < 0.5:
                    drop(choose.randrange(len(own)))
                try:
                    own.append(setting.cuda.device_array(choose.choice((500, 1000, 3 * MIB, 6 * MIB))))
                except setting.driver.CudaAPIError as error:
                    wrong.append(error)
                if live.setdefault(address(own[-1]), seed) != seed:
                    wrong.append(address(own[-1]))
                if len(own) > 10:
                    drop(0)
            while own:
                drop(0)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    setting.framework.trim(setting.gpu)
    assert wrong == [] and setting.taken() == 0 == setting.usage().held and setting.driver.cards[0].most <= 256 * MIB


# whatever comes in between


class Moving:
    """A mark that is over when asked, and while it is asked something happens."""

    def __init__(self, happens: Callable[[], None]) -> None:
        self.happens = happens

    def passed(self) -> bool:
        self.happens()
        return True

    wait = passed

    def close(self) -> None: ...


class Taker:
    _block: Block | None = None
    _freed = False


def test_a_batch_that_two_look_at_is_handed_out_once() -> None:
    """A signal handler, or a finalizer, allocates and frees while the marks are asked: one that it has freed waits."""
    got: list[Block | None] = []

    def happens() -> None:
        if not got:
            got.append(None)
            got[0] = pool.take(PAGE, Taker())
            assert got[0] is not None
            pool.put(got[0])
            pool.mark()

    marks = [[Moving(happens)], [Endless()]]
    pool = Pool(lambda: marks.pop(0))
    for _ in range(2):
        pool.put(Block(PAGE, True))
    pool.mark()
    taker = Taker()
    other = pool.take(PAGE, taker)
    assert other is taker._block is not got[0] and len(pool.idle) == 1
    assert pool.take(PAGE, Taker()) is None, "the handler's is under way again"


class Endless(Moving):
    def __init__(self) -> None:
        super().__init__(lambda: None)

    def passed(self) -> bool:
        return False


def test_what_another_thread_marks_while_a_request_looks_for_its_size() -> None:
    """The request goes through what waits; a flush on another thread adds to it."""

    class Looked(Block):
        __slots__ = ("looked",)

        @property
        def size(self) -> int:  # type: ignore[override]
            if getattr(self, "looked", 0) < 3:
                self.looked = getattr(self, "looked", 0) + 1
                pool.put(Block(PAGE, True))
                pool.mark()
            return 4 * PAGE

        @size.setter
        def size(self, _: int) -> None: ...

    pool = Pool(lambda: [Endless()])
    pool.put(Looked(PAGE, True))
    pool.mark()
    assert pool.wait(8 * PAGE, Taker()) is None and len(pool.idle) > 1


def test_a_batch_that_cannot_be_marked_is_marked_later() -> None:
    answers: list[Any] = [None, DeviceError("no"), [Moving(lambda: None)]]

    def record() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, DeviceError):
            raise answer
        return answer

    pool = Pool(record)
    blocks = [Block(PAGE, True) for _ in range(3)]
    for block in blocks:
        pool.put(block)
    pool.mark()
    assert len(pool.unmarked) == 3 and pool.take(PAGE, Taker()) is None
    with pytest.raises(DeviceError):
        pool.mark()
    assert len(pool.unmarked) == 3 and pool.take(PAGE, Taker()) is None
    pool.mark()
    assert {pool.take(PAGE, Taker()) for _ in range(3)} == set(blocks) and not pool.idle and not pool.unmarked


def test_a_reading_does_not_wait_for_an_allocation_that_waits_for_the_gpu(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [setting.cuda.device_array(4 * MIB) for _ in range(16)]
    for array in kept:
        setting.cuda.launch(array)
    del array
    kept.clear()
    waits, go = threading.Event(), threading.Event()
    real = setting.driver.Mark.wait

    def wait(self: Any) -> None:
        waits.set()
        assert go.wait(20)
        real(self)

    monkeypatch.setattr(setting.driver.Mark, "wait", wait)

    def allocate() -> None:
        with setting.cuda.gpus[0]:
            kept.append(setting.cuda.device_array(4 * MIB))

    thread = threading.Thread(target=allocate)
    thread.start()
    assert waits.wait(20)
    readings: list[Any] = []
    reader = threading.Thread(target=lambda: readings.append(setting.usage()), daemon=True)
    reader.start()
    reader.join(5)
    go.set()
    thread.join()
    assert readings and readings[0].held == 64 * MIB and readings[0].in_use == 0
    assert setting.usage().in_use == 4 * MIB


@pytest.mark.parametrize("deferred", [True, False])
def test_a_reset_gives_back_what_is_pending_at_once(setting: Setting, deferred: bool) -> None:
    """Within `defer_cleanup` too: afterwards its addresses are the next context's."""
    live = [setting.cuda.device_array(4 * MIB) for _ in range(3)]
    given = calls(setting, "cuMemFree")
    held = manager(setting)
    with setting.cuda.current_context().defer_cleanup() if deferred else contextlib.nullcontext():
        live.pop()
        held.reset()
        assert setting.taken() == 0 and len(given) == 3 and held not in held.group.members and held.group.single
    live.clear()
    flush(setting)
    assert len(given) == 3 and setting.usage().held == 0 and setting.usage().in_use == 0
    array = setting.cuda.device_array(4 * MIB)
    assert setting.usage().held == setting.taken() == 4 * MIB
    del array


def test_within_defer_cleanup_the_pool_serves_rather_than_a_refusal(setting: Setting) -> None:
    arrays = [setting.cuda.device_array(16 * MIB) for _ in range(4)]
    arrays.clear()
    flush(setting)
    with setting.cuda.defer_cleanup():
        kept = setting.cuda.device_array(30 * MIB)
        assert setting.taken() == 62 * MIB
    del kept


def test_what_a_refused_request_gives_back_ends_no_capture_of_another_thread(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[None] = []
    seen: list[bool] = []

    @contextlib.contextmanager
    def beside() -> Iterator[None]:
        inside.append(None)
        yield
        inside.pop()

    monkeypatch.setattr(contexts, "capture_safe", beside)
    free = setting.driver.driver.cuMemFree
    monkeypatch.setattr(setting.driver.driver, "cuMemFree", lambda at: (seen.append(bool(inside)), free(at))[1])
    arrays = [setting.cuda.device_array(16 * MIB) for _ in range(4)]
    arrays.clear()
    flush(setting)
    array = setting.cuda.device_array(48 * MIB)
    del array
    assert seen == [True] * 3


def test_a_stream_that_ends_while_another_context_does_is_still_marked(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = setting.cuda.stream()
    real = setting.driver.Mark

    def mark(*place: Any) -> Any:
        watch.ended.forget(12345)
        return real(*place)

    monkeypatch.setattr(streams, "Mark", mark)
    del stream
    assert len(watch.ended.marks) == 1


# whatever is done

STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("take"),
            st.sampled_from([1, 512, 513, 1000, 700_000, MIB, MIB + 1, 2 * MIB, 3 * MIB, 4 * MIB, 9 * MIB]),
        ),
        st.tuples(st.just("drop"), st.integers(0, 1000)),
        st.tuples(st.just("launch"), st.integers(0, 1000)),
        st.tuples(st.just("stream"), st.integers(0, 1000)),
        st.tuples(st.just("finish"), st.integers(0, 1000)),
        st.tuples(st.sampled_from(["flush", "trim", "capture", "cycle", "another stream"]), st.just(0)),
        st.tuples(st.just("resize"), st.integers(1, 16).map(lambda n: n * PAGE)),
        st.tuples(st.sampled_from(["foreign", "export"]), st.integers(0, 1000)),
    ),
    max_size=80,
)


@settings(
    max_examples=int(os.environ.get("NUMBA_POOL_EXAMPLES", "200")), deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@example([("take", MIB), ("launch", 0), ("drop", 0), ("flush", 0), ("take", MIB)])
@example([("take", MIB), ("stream", 0), ("drop", 0), ("flush", 0), ("take", MIB)])
@example([("take", MIB), ("stream", 0), ("another stream", 0), ("drop", 0), ("flush", 0), ("take", MIB)])
@given(steps=STEPS)
def test_no_block_is_handed_out_while_work_on_it_is_outstanding(model: Model, steps: list[tuple[str, int]]) -> None:
    """The oracle is the model's list of work: it knows which bytes are still read, on whatever stream."""
    forget()
    setting = model("h200")
    cap = 16 * MIB
    setting.apply(cap)
    setting.cuda.current_context()
    gpu, card = setting.driver.gpu, setting.driver.cards[0]
    streams: list[Any] = []  # none until one is needed: the default one alone is asked whether it is idle
    live: list[Any] = []
    for step, number in steps:
        if step == "take":
            try:
                array = setting.cuda.device_array(number)
            except setting.driver.CudaAPIError:
                idle = setting.usage().reclaimable
                pages = -(-number // PAGE) * PAGE
                assert idle == 0 and setting.pending() == 0 and not manager(setting).pool.idle
                assert (setting.usage().held or 0) + pages > cap, "giving back would have served"
                continue
            assert not gpu.using(address(array), number), "handed out under a kernel"
            assert not [one for one in live if address(one) == address(array)]
            live.append(array)
            del array
        elif step == "drop" and live:
            del live[number % len(live)]
        elif step == "cycle" and live:
            cycle = [live.pop()]
            cycle.append(cycle)
            del cycle
        elif step == "launch" and live:
            setting.cuda.launch(live[number % len(live)])
        elif step == "stream" and live:
            streams = streams or [setting.cuda.stream()]
            setting.cuda.launch(live[number % len(live)], streams[number % len(streams)])
        elif step == "another stream":
            streams = [] if streams else [setting.cuda.stream()]
            setting.cuda.current_context().deallocations.clear()
        elif step == "foreign" and live and number % 5 == 0:
            setting.cuda.launch(live[number % len(live)], setting.cuda.external_stream(gpu.stream(blocking=False)))
        elif step == "export" and live:
            array = live[number % len(live)]
            gpu.start(gpu.stream(blocking=False), array.__cuda_array_interface__["data"][0], array.nbytes)
            del array
        elif step == "finish" and gpu.work:
            gpu.finish(gpu.work[number % len(gpu.work)])
        elif step == "flush":
            flush(setting)
        elif step == "trim":
            before, promised = setting.usage().held or 0, setting.usage().reclaimable or 0
            setting.framework.trim(setting.gpu)
            assert before - (setting.usage().held or 0) == promised and not manager(setting).pool.idle
        elif step == "capture":
            gpu.captures = set() if gpu.captures else {streams[0].handle if streams else gpu.stream(blocking=True)}
        elif step == "resize":
            cap = max(number, setting.usage().held or 0)
            setting.framework.resize({setting.gpu.uuid: cap})
        usage = setting.usage()
        assert usage.held is not None and usage.in_use is not None and usage.reclaimable is not None
        assert usage.held == setting.taken() <= cap and usage.reclaimable <= usage.held
        assert usage.in_use == sum(array.nbytes for array in live) or step == "cycle" or gc.isenabled()
    live.clear()
    gc.collect()
    setting.framework.trim(setting.gpu)
    assert setting.usage().held == 0 == setting.usage().in_use and card.taken == 0
