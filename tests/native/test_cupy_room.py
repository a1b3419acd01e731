"""The real CuPy over the stub of libcuda: what its pool gives back, and requests that need room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import stub_driver
from served import Run, serve

LIVE = """
import cupy_card  # first
import contextlib, dataclasses, gc, random, threading, time
import cupy
from cupy_card import pool, taken
from memguard._devices import contexts
from memguard._frameworks.cupy import blocks
from memguard._frameworks.cupy.adapter import CuPy
(uuid, *_), host = contexts.ordinals(), Host()
gpu, framework = dataclasses.replace(host.gpus[0], uuid=uuid), CuPy(host)
applied = apply_caps(framework, {uuid: 256 * MIB})
OOM, alloc = cupy.cuda.memory.OutOfMemoryError, cupy.cuda.alloc
streams = [contextlib.nullcontext(), cupy.cuda.ExternalStream(64), cupy.cuda.ExternalStream(128)]
blocks.FRESH = 0
asked, told = [], []
def short(answer):
    def call(shortage):
        asked.append([shortage.framework, shortage.uuid == uuid, shortage.requested, shortage.needed, shortage.full])
        return answer(shortage)
    framework.on_shortage = call
framework.on_refusal = lambda moment: told.append([moment.requested, moment.reclaimable]) and None
def refused(size):
    try:
        alloc(size)
    except OOM as error:
        return [type(error).__name__, error.memguard_requested]
def raised_by(work):
    try:
        work()
    except OOM:
        return True
def limit(mib): framework.resize({uuid: mib * MIB})
alloc(1)
framework.trim(gpu)
"""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    environ = stub_driver.build_numbas(tmp_path_factory.mktemp("cuda"), "-DPER_THREAD=__thread")
    for run in serve("cupy_card", {**environ, "CUDA_STUB_COUNT": "1"}):
        yield lambda code, run=run: run(LIVE + code)


# what a trim gives back


@pytest.mark.parametrize("low", ["MIB + 1", "1"])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_reclaimable_is_what_free_all_blocks_returns(live: Run, seed: int, low: str) -> None:
    """To the byte; of small pieces, whose slabs others may share, no more than that."""
    found = live(
        f"""
rng, arrays, wrong, whole, split = random.Random({seed}), [], [], 0, 0
for step in range(1500):
    with rng.choice(streams):
        try:
            arrays.append(alloc(rng.randint({low}, rng.choice([2, 16]) * MIB)))
        except OOM:
            del arrays[::2]
    while arrays and rng.random() < 0.5:
        arrays.pop(rng.randrange(len(arrays)))
    if step % 10 == 0:
        usage, before = framework.usage(gpu), taken()
        if rng.random() < 0.5:
            framework.trim(gpu)
        else:
            pool.free_all_blocks()
        back = before - taken()
        if not (usage.reclaimable == back if {low} > MIB else usage.reclaimable <= back):
            wrong.append([step, *usage[:3], back])
        if usage.held != before and {low} > MIB:
            wrong.append([step, usage.held, before])
        whole += usage.reclaimable > 0
        split += usage.reclaimable < usage.held - usage.in_use
result.update(wrong=wrong, whole=whole, split=split)
"""
    )
    assert found["wrong"] == [] and found["whole"] > 20 and found["split"] > 20


def test_nothing_of_it_keeps_a_block_from_the_driver(live: Run) -> None:
    """A thread reads on and on: what the others give back is back at once, and no reading is absurd."""
    found = live(
        """
stop, wrong, count = False, [], 0
def read():
    global count
    while not stop:
        count += 1
        usage = framework.usage(gpu)
        if usage.reclaimable is None or not 0 <= usage.reclaimable <= max(usage.held - usage.in_use, 0):
            wrong.append(list(usage))
def work(seed):
    rng = random.Random(seed)
    with streams[seed]:
        for _ in range(300):
            kept = [alloc(rng.randint(MIB + 1, 9 * MIB)) for _ in range(rng.randint(1, 4))]
            if seed == 0:
                kept.clear()
                pool.free_all_blocks(stream=cupy.cuda.Stream.null)
sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=read)] + [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
for thread in threads: thread.start()
for thread in threads[1:]: thread.join()
for _ in range(200):
    alloc(40 * MIB)
    pool.free_all_blocks()
    if taken() != pool.total_bytes(): wrong.append([taken(), pool.total_bytes()])
stop = True
threads[0].join()
result.update(wrong=wrong[:3], count=count, left=[taken(), pool.total_bytes()])
"""
    )
    assert found["wrong"] == [] and found["count"] > 0 and found["left"] == [0, 0]


def test_a_finalizer_that_allocates_while_it_reads_does_not_wait_for_ever(live: Run) -> None:
    """Python before 3.12 collects garbage wherever an object is made, which may be where CuPy has its pool's lock."""
    found = live(
        """
class Thing:
    def __init__(self): self.me = self
    def __del__(self): kept.append(alloc(3 * MIB))
kept = []
cupy_card.full(8192)
limit(8192)
del [alloc(2 * MIB) for _ in range(3000)][:]
gc.collect()
gc.set_threshold(1500)  # so it collects while the 3,000 are read
Thing()
readings = [framework.usage(gpu).reclaimable]
gc.collect()
result["collected"] = len(kept)
result.update(on=gc.isenabled(), known=None not in readings)
"""
    )
    assert found == {"on": True, "known": True, "collected": 1}


def test_a_ctrl_c_in_a_reading_leaves_everything_as_it_was(live: Run) -> None:
    found = live(
        """
class Stop(BaseException): pass
def interrupted(number):
    "Whether the reading has so many lines."
    count = 0
    def trace(frame, event, argument):
        nonlocal count
        if frame.f_code.co_filename == blocks.__file__ and event == "line":
            count += 1
            if count == number: raise Stop
        return trace
    sys.settrace(trace)
    try:
        framework.usage(gpu)
    except Stop:
        return True
    finally:
        sys.settrace(None)
    return False
del [alloc(2 * MIB) for _ in range(3)][:]
number = 1
while interrupted(number):
    usage = framework.usage(gpu)
    assert gc.isenabled() and usage.reclaimable == 6 * MIB, (number, usage)
    number += 1
framework.trim(gpu)
result.update(points=number, left=taken())
"""
    )
    assert found["points"] > 10 and found["left"] == 0


def test_unknown_where_cupy_does_not_tell_or_has_too_many(live: Run) -> None:
    found = live(
        """
def said(): return framework.usage(gpu).reclaimable
arrays = [alloc(3 * MIB) for _ in range(5)]
del arrays[:2]
result["known"] = said() == 8 * MIB
blocks.MOST = 1
result["many"] = said()
blocks.MOST, figures, blocks.INDEX = 4096, blocks._figures, "_of_another_version"
result["without"] = said()
blocks.INDEX, blocks._figures = "_debug_arena_get_index", lambda chunk: chunk.extent
result["other"], blocks._figures = said(), figures
result["since"] = said()
framework.trim_partly(gpu, MIB)
result["left"] = [taken() // MIB, framework.usage(gpu).held // MIB]
"""
    )
    assert found == {"known": True, "many": None, "without": None, "other": None, "since": None, "left": [12, 12]}


def test_the_streams_with_most_trim_partly_first_and_only_if_that_is_enough(live: Run) -> None:
    found = live(
        """
def fill():
    pool.free_all_blocks()
    for stream, mib in zip(streams, (8, 40, 20)):
        with stream: alloc(mib * MIB)
def left(needed):
    fill()
    framework.trim_partly(gpu, needed * MIB)
    return taken() // MIB
result["left"] = [left(needed) for needed in (1, 40, 41, 60, 61, 68, 100)]
fill()
thread = threading.Thread(target=framework.trim_partly, args=(gpu, MIB))
thread.start()
thread.join()
result["elsewhere"] = taken() // MIB
"""
    )
    assert found == {"left": [28, 28, 8, 8, 0, 0, 0], "elsewhere": 28}


# shortages


def test_a_request_that_the_gpu_refused_is_served_when_others_gave_back(live: Run) -> None:
    found = live(
        """
others = [cupy_card.take(64 * MIB, 0) for _ in range(14)]
short(lambda shortage: others and cupy_card.give(others.pop(), 0) is None)
first = alloc(200 * MIB - 5)
result.update(first=asked[:], others=len(others), told=told[:])
second = alloc(56 * MIB)
asked.clear()
result["cap"] = [refused(8 * MIB), [entry[4] for entry in asked]]
del first, second
framework.trim(gpu)
result["left"] = taken() // MIB - 64 * len(others)
"""
    )
    assert found["first"] == [["cupy", True, (200 << 20) - 5, 200 << 20, True]] * 2
    assert found["others"] == 12 and found["told"] == [] and found["left"] == 0
    assert found["cap"] == [["OutOfMemoryError", 8 << 20], [False] * 3], "the GPU had room"


def test_a_request_that_the_cap_refused_is_served_when_it_was_raised(live: Run) -> None:
    found = live(
        """
limit(64)
caps = []
def raise_cap(shortage):
    held = framework.usage(gpu).held
    limit((held + shortage.needed) // MIB)
    caps.append(pool.get_limit() // MIB)
    return True
short(raise_cap)
arrays = [alloc(48 * MIB), alloc(30 * MIB), alloc(700_000), alloc(900_000)]
result.update(caps=caps, asked=[entry[2:] for entry in asked], told=told, held=taken() // MIB)
result["drift"] = drifts(framework)
"""
    )
    assert found["caps"] == [78, 80] and found["told"] == [] and found["drift"] == []
    assert found["asked"] == [[30 << 20, 30 << 20, False], [700_000, 2 << 20, False]]
    assert found["held"] == 82, "each small piece takes a page of this driver"


def test_its_own_cache_goes_before_others_are_asked(live: Run) -> None:
    """Above its limit CuPy gives its idle blocks back only after it has collected garbage, and that is when we ask."""
    found = live(
        """
limit(64)
alloc(64 * MIB)
held = []
def answer(shortage):
    held.append(framework.usage(gpu).held // MIB)
    limit(192)
    return True
short(answer)
array = alloc(192 * MIB)
result.update(held=held, asked=asked, taken=taken() // MIB, told=told)
del array
framework.trim(gpu)
limit(64)
idle = alloc(48 * MIB)
del idle
array = alloc(60 * MIB)
result.update(again=len(asked), after=taken() // MIB)
"""
    )
    assert found["held"] == [0] and len(found["asked"]) == 1 and found["taken"] == 192 and found["told"] == []
    assert (found["again"], found["after"]) == (1, 60), "with what idles given back nobody has to be asked"


def test_short_of_its_cap_and_then_of_the_gpu(live: Run) -> None:
    found = live(
        """
others = [cupy_card.take(128 * MIB, 0) for _ in range(7)]
limit(64)
short(lambda s: cupy_card.give(others.pop(), 0) is None if s.full else limit(256) is None)
memory = alloc(200 * MIB)
result.update(full=[entry[4] for entry in asked], told=told)
"""
    )
    assert found == {"full": [False, True], "told": []}


def test_no_garbage_is_collected_if_others_make_room(live: Run) -> None:
    """Each takes tenths of a second where several frameworks are loaded. Without room CuPy does as it always does."""
    found = live(
        """
collections = []
gc.callbacks.append(lambda phase, info: phase == "stop" and info["generation"] == 2 and collections.append(1))
gc.set_threshold(0)
def counted(work):
    collections.clear(), asked.clear()
    work()
    return [len(collections), [entry[4] for entry in asked]]
limit(64)
arrays = [alloc(60 * MIB)]
short(lambda shortage: limit(256) is None)
result["cap"] = counted(lambda: arrays.append(alloc(8 * MIB)))
others = [cupy_card.take(64 * MIB, 0) for _ in range(14)]
short(lambda shortage: cupy_card.give(others.pop(), 0) is None)
result["gpu"] = counted(lambda: arrays.append(alloc(80 * MIB)))
short(lambda shortage: False)
result["neither"] = counted(lambda: refused(150 * MIB)), counted(lambda: refused(100 * MIB))
result["direct"] = counted(lambda: raised_by(lambda: pool.malloc(150 * MIB)))
result["gc"] = cupy.cuda.memory.gc.isenabled()
applied.undo()
result["undone"] = cupy.cuda.memory.gc is gc
"""
    )
    assert found == {
        "cap": [0, [False]], "gpu": [0, [True]], "neither": [[1, [False] * 2], [2, [True] * 2]], "direct": [1, []],
        "gc": True, "undone": True,
    }  # fmt: skip


@pytest.mark.parametrize(("answer", "times"), [("False", [1, 3]), ("True", [2, 5]), ("1 / 0", [1, 3])])
def test_what_cannot_be_served_is_cupys_own_error_told_once(live: Run, answer: str, times: list[int]) -> None:
    found = live(
        f"""
limit(64)
short(lambda shortage: {answer})
result["first"] = refused(65 * MIB)
result.update(asked=len(asked), told=told, free=not framework._lock._is_owned(), left=taken())
keep = alloc(64 * MIB)
result["small"] = refused(300)
result["times"] = [len(asked), len(told)]
"""
    )
    assert found["first"] == ["OutOfMemoryError", 65 << 20] and found["asked"] == times[0]
    assert found["told"] == [[65 << 20, 0], [300, 0]][: len(found["told"])] and found["free"] and found["left"] == 0
    # What is larger than the limit is refused at once; else CuPy collects garbage first, and before that is asked too.
    assert found["small"] == ["OutOfMemoryError", 300] and found["times"] == [times[1], 2]


def test_nobody_is_asked_where_it_would_not_help(live: Run) -> None:
    """In a capture of this thread, above the user's own limit, and for what no refusal of memory is."""
    found = live(
        """
limit(64)
short(lambda shortage: True)
cupy_card.capturing[0] = 1
result["capture"] = [refused(65 * MIB), len(asked), len(told)]
cupy_card.capturing[0] = 0
pool.set_limit(size=32 * MIB)
result["own"] = [refused(33 * MIB), len(asked), len(told)]
"""
    )
    assert found == {
        "capture": [["OutOfMemoryError", 65 << 20], 0, 1],
        "own": [["OutOfMemoryError", 33 << 20], 0, 2],
    }


def test_the_failed_try_keeps_nothing_alive_in_the_next(live: Run) -> None:
    """What the program dropped while room was made is gone for the second try, without a collection of garbage."""
    found = live(
        """
gc.disable()
limit(64)
kept = [alloc(60 * MIB)]
def drop(shortage):
    kept.clear()
    result["cached"] = framework.usage(gpu).reclaimable // MIB
    return True
short(drop)
def asking():
    large = [alloc(62 * MIB)]
    return taken() // MIB
result["taken"] = asking()
result["errors"] = sum(isinstance(thing, OOM) for thing in gc.get_objects())
"""
    )
    assert found == {"cached": 60, "taken": 62, "errors": 0}


@pytest.mark.parametrize(
    ("before", "size"),
    [("", 100), ("kept = alloc(40 * MIB)", 30), ("others = [cupy_card.take(60 * MIB, 0) for _ in range(17)]", 64)],
)
def test_a_ctrl_c_while_room_is_made_reaches_the_program(live: Run, before: str, size: int) -> None:
    """Above the limit at once, short of the cap, and refused by the driver: CuPy's own figures are right as well."""
    found = live(
        f"""
limit(64)
{before}
held = pool.total_bytes()
alloc(1)
framework.trim(gpu)
class Stop(KeyboardInterrupt): pass
def stop(shortage): raise Stop
short(stop)
try:
    alloc({size} * MIB)
    result["stopped"] = False
except Stop:
    result["stopped"] = True
result["held"] = pool.total_bytes() == held
def serve(shortage):
    if shortage.full: cupy_card.give(others.pop(), 0)
    else: limit(128)
    return True
short(serve)
memory = alloc({size} * MIB)
result.update(free=not framework._lock._is_owned(), drift=drifts(framework), told=told)
applied.undo()
result["undone"] = [pool.get_limit(), cupy.cuda.get_allocator() == pool.malloc]
"""
    )
    assert found["stopped"] and found["held"] and found["free"] and found["drift"] == found["told"] == []
    assert found["undone"] == [0, True]


def test_threads_that_are_short_at_once_are_all_served(live: Run) -> None:
    """The cap rises and falls within their requests, and is never passed."""
    found = live(
        """
limit(32)
turn, over, errors = threading.Lock(), [], []
def move(shortage):
    with turn:
        limit(128)
        return True
short(move)
def work(seed):
    rng = random.Random(seed)
    with streams[seed]:
        for _ in range(150):
            try:
                kept = [alloc(rng.randint(MIB, 20 * MIB)) for _ in range(2)]
                if pool.total_bytes() > 128 * MIB: over.append(pool.total_bytes())
                del kept[:]
                if rng.random() < 0.3:
                    with turn: limit(32)
            except OOM as error:
                errors.append(str(error))
            except BaseException as error:
                errors.append(repr(error))
sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
result.update(over=over, errors=[text for text in errors if "Out of memory" not in text], refused=len(errors))
result.update(told=len(told), asked=len(asked))
framework.trim(gpu)
result.update(left=taken(), drift=drifts(framework))
"""
    )
    assert found["over"] == [] and found["errors"] == [] and found["left"] == 0 and found["drift"] == []
    assert found["asked"] > 0 and found["refused"] == found["told"]


def test_a_cap_below_what_is_held_evicts_nothing(live: Run) -> None:
    found = live(
        """
arrays = [alloc(100 * MIB), alloc(50 * MIB)]
del arrays[1]
limit(64)
result["held"] = taken() // MIB
kept = alloc(50 * MIB)
result["cache"] = taken() // MIB
result["refused"] = refused(2 * MIB)
limit(256)
memory = alloc(2 * MIB)
result["after"] = [taken() // MIB, drifts(framework)]
"""
    )
    assert found["held"] == found["cache"] == 150
    assert found["refused"] == ["OutOfMemoryError", 2 << 20] and found["after"] == [152, []]
