"""CuPy under a cap, on a model of CuPy in plain Python (`fake_cupy`) over a driver that hands out pages."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.capping import AppliedCaps, apply_caps
from support.drifts import drifts

from memguard import _budget
from memguard._base.types import Device, Enforcement, State, Usage
from memguard._base.units import GIB, MIB
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks import driver_pages
from memguard._frameworks.cupy.adapter import CuPy
from memguard._frameworks.driver_pages import TINY
from memguard._frameworks.import_hook import ImportHook
from memguard._frameworks.replacements import Replacements
from memguard._frameworks.rmm import resource
from memguard._guard.guard import Guard
from memguard.errors import CapNotApplied, ConflictingSetting

pytestmark = pytest.mark.long  # no version of what is installed changes it: all of it is our own code

HERE = Path(__file__).parent
LIMIT = "CUPY_GPU_MEMORY_LIMIT"


class NotSimulated(SimulatedHost):
    """For the real class; the cards behind it are the model's."""

    simulated = False


class Setting:
    """A framework over the model, which is not imported yet, and the model's cards."""

    def __init__(self, *gpus: str) -> None:
        self.number = len(self.card.gpus)
        """Of the GPUs that CuPy sees."""
        self.host = NotSimulated(gpus or ("h200",) * self.number)
        self.framework = CuPy(self.host)
        self.first, self.second = (self.host.devices() * 2)[:2]

    @property
    def cp(self) -> Any:
        return importlib.import_module("cupy")

    @property
    def card(self) -> Any:
        return importlib.import_module("fake_card")

    @property
    def pool(self) -> Any:
        return self.cp.get_default_memory_pool()

    @property
    def oom(self) -> type[BaseException]:
        error: type[BaseException] = self.cp.cuda.memory.OutOfMemoryError
        return error

    def apply(self, first: int = 64 * MIB, second: int | None = None) -> AppliedCaps:
        importlib.import_module("cupy")
        caps = {self.first.uuid: first, self.second.uuid: second or first}
        return apply_caps(self.framework, caps)

    def alloc(self, size: int, ordinal: int = 0) -> Any:
        if ordinal == self.card.here():
            return self.cp.cuda.alloc(size)
        with self.cp.cuda.Device(ordinal):
            return self.cp.cuda.alloc(size)

    def fill(self, size: int = 8 * MIB, ordinal: int = 0) -> list[Any]:
        """Allocate until CuPy's own error."""
        live = []
        with pytest.raises(self.oom):
            for _ in range(10_000):
                live.append(self.alloc(size, ordinal))
        return live

    def limit(self, ordinal: int = 0) -> int:
        with self.cp.cuda.Device(ordinal):
            return int(self.pool.get_limit())

    def taken(self, ordinal: int = 0) -> int:
        """What the driver has really handed out."""
        return int(self.card.gpus[ordinal].taken)

    def usage(self, gpu: Device | None = None) -> Usage:
        found = self.framework.usage(gpu or self.first)
        assert found is not None
        return found


Model = Callable[..., Setting]


def forget() -> None:
    driver_pages.slabs.clear()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("cupy", "rmm", "fake_card", "card")]:
        del sys.modules[name]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With one GPU its own pool is asked, which is quicker. What needs no second GPU is tested there too."""
    if "gpus" in metafunc.fixturenames:
        metafunc.parametrize("gpus", [2] if metafunc.definition.get_closest_marker("two_gpus") else [2, 1])


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, gpus: int) -> Iterator[Model]:
    """Make a setting. The model is imported anew for every test and gone afterwards."""
    forget()
    monkeypatch.syspath_prepend(HERE / "fake_cupy")
    monkeypatch.delenv(LIMIT, raising=False)
    monkeypatch.setattr(resource, "_limits", {})
    card = importlib.import_module("fake_card")
    del card.gpus[gpus:]
    card.stand_in(monkeypatch)
    yield Setting
    forget()


def conflict(call: Callable[[], object]) -> ConflictingSetting:
    with pytest.raises(ConflictingSetting) as caught:
        call()
    assert caught.value.framework == "cupy" and caught.value.setting and caught.value.remedy
    return caught.value


def test_a_refusal_carries_the_size_that_was_asked_for(model: Model) -> None:
    """Its text has what was asked of the pool, which is rounded up to the driver's pages."""
    setting = model()
    setting.apply(64 * MIB)
    with pytest.raises(setting.oom) as caught:
        setting.alloc(65 * MIB + 1)
    assert caught.value.memguard_requested == 65 * MIB + 1


# before anything is allocated


def test_looking_asks_nothing_of_cuda(model: Model) -> None:
    setting = model()
    framework = setting.framework
    assert framework.state() is State.IMPORTABLE
    assert "cupy" not in sys.modules
    importlib.import_module("cupy")
    assert framework.state() is State.IMPORTED
    assert framework.usage(setting.first) is None and framework.about() == {} and not framework.capturing()
    framework.trim(setting.first)
    assert setting.card.asked == 0 and not setting.card.initialised


def test_capping_asks_nothing_of_cuda(model: Model) -> None:
    setting = model()
    applied = setting.apply()
    assert applied.enforcement is Enforcement.ENFORCED
    assert applied.notes == ()
    assert setting.framework.drift() == [] and setting.framework.usage(setting.first) is None
    assert setting.framework.state() is State.IMPORTED
    assert setting.card.asked == 0 and not any(gpu.context for gpu in setting.card.gpus)


@pytest.mark.two_gpus
def test_live_through_somebody_elses_cuda_it_holds_nothing(model: Model) -> None:
    """A sibling has initialised CUDA: CuPy can be asked, and has nothing."""
    setting = model()
    setting.card.use(0)
    importlib.import_module("cupy")
    assert setting.framework.state() is State.IMPORTED and setting.framework.usage(setting.first) is None
    assert not setting.card.gpus[1].context, "asking made no context"


def test_half_imported_it_says_nothing(model: Model) -> None:
    """Another thread is importing it, and CUDA is initialised: it lacks its attributes."""
    setting = model()
    cupy = importlib.import_module("cupy")
    setting.card.use(0)
    cupy.__spec__._initializing = True  # type: ignore[union-attr]
    del cupy.cuda
    assert setting.framework.usage(setting.first) is None
    assert setting.framework.capturing() is False and setting.framework.drift() == []
    setting.framework.trim(setting.first)


def test_capped_by_the_import_hook(model: Model) -> None:
    setting, hook = model(), ImportHook()
    caps = {setting.first.uuid: 64 * MIB, setting.second.uuid: 64 * MIB}
    hook.watch(setting.framework.hook, lambda: apply_caps(setting.framework, caps) and None)
    assert importlib.import_module("cupy").cuda.get_allocator() is setting.framework._allocate
    assert hook not in sys.meta_path
    setting.fill()
    assert setting.taken() == 64 * MIB


# the cap


@pytest.mark.two_gpus
def test_each_gpu_has_its_own_cap_to_the_byte(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB, 24 * MIB)
    live = setting.fill(2 * MIB) + setting.fill(2 * MIB, 1)
    assert (setting.taken(0), setting.taken(1)) == (64 * MIB, 24 * MIB)
    assert (setting.limit(0), setting.limit(1)) == (64 * MIB, 24 * MIB)
    assert setting.usage() == Usage(64 * MIB, 64 * MIB, 0)
    assert setting.usage(setting.second) == Usage(24 * MIB, 24 * MIB, 0)
    del live


@pytest.mark.two_gpus
def test_the_gpu_is_known_by_its_uuid_and_not_by_its_number(model: Model) -> None:
    """CUDA_VISIBLE_DEVICES=1,0."""
    setting = model()
    setting.card.gpus.reverse()
    setting.apply(64 * MIB, 24 * MIB)
    live = setting.fill(2 * MIB)
    assert setting.limit(0) == 24 * MIB and setting.usage(setting.second).held == 24 * MIB
    assert setting.framework.usage(setting.first) is None
    del live


@pytest.mark.two_gpus
def test_a_gpu_that_is_not_in_the_budget_is_left_alone(model: Model) -> None:
    setting = model("h200")
    setting.apply()
    array = setting.alloc(100 * MIB, 1)
    assert setting.limit(1) == 0 and setting.taken(1) == 100 * MIB
    setting.fill()
    del array


@pytest.mark.two_gpus
def test_a_limit_is_set_at_the_first_allocation_on_its_gpu(model: Model) -> None:
    setting = model()
    setting.apply()
    array = setting.alloc(MIB)
    assert setting.limit(0) == 64 * MIB
    assert not setting.card.gpus[1].context and setting.framework.usage(setting.second) is None
    assert setting.framework.state() is State.LIVE
    other = setting.alloc(MIB, 1)
    assert setting.usage(setting.second).held == MIB
    del array, other


def test_first_allocations_of_many_threads(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = model()
    applied = setting.apply()
    one = setting.cp.cuda.memory._OfOneDevice
    get_limit, number = one.get_limit, itertools.count()
    # A later one would read what an earlier one has just set.
    monkeypatch.setattr(one, "get_limit", lambda pool: (time.sleep(0.004 * next(number)), get_limit(pool))[1])
    live: list[Any] = []
    barrier = threading.Barrier(8)

    def work(ordinal: int) -> None:
        barrier.wait()
        live.append(setting.alloc(2 * MIB, ordinal))

    threads = [threading.Thread(target=work, args=(number % setting.number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gpus = range(setting.number)
    assert len(live) == 8 and {setting.limit(gpu) for gpu in gpus} == {64 * MIB}
    applied.undo()
    assert {setting.limit(gpu) for gpu in gpus} == {0}, "none took another's cap for a limit of the pool's own"


@pytest.mark.parametrize(
    "size", [131_073, 200_000, 300_000, 400_000, 600_000, 700_000, MIB, MIB + 1, 3 * MIB, 5 * MIB + 17, 60 * MIB]
)
def test_rounding_keeps_the_pages_of_the_driver_within_the_cap(model: Model, size: int) -> None:
    """Measured without it: 220 MiB counted, 398 taken, for 200 arrays of 1.1 MiB."""
    setting = model()
    setting.apply()
    live = setting.fill(size)
    usage = setting.usage()
    assert usage.held is not None and usage.held <= setting.taken() <= 64 * MIB
    assert len(live) * size > 30 * MIB, "much less would be a waste"
    assert setting.framework.footprint(size) * len(live) == usage.held


@pytest.mark.parametrize("size", [512, 5000, 60_000, 100_000, TINY - 512, TINY])
def test_tiny_arrays_pass_the_cap_by_the_ends_of_the_slabs_only(model: Model, size: int) -> None:
    setting = model()
    cap = 4 * MIB if size < 10_000 else 64 * MIB
    setting.apply(cap)
    live = setting.fill(size)
    assert setting.taken() <= cap * 1.06 + 2 * MIB
    assert setting.usage().in_use == len(live) * -(-size // 512) * 512, "not rounded any further"


def test_what_was_cached_serves_a_request_of_another_size(model: Model) -> None:
    """Measured: at its limit CuPy gives its cache back before it refuses."""
    setting = model()
    setting.apply()
    live = setting.fill(int(1.1 * MIB))
    assert len(live) == 32
    live.clear()
    assert setting.taken() == 64 * MIB and setting.usage() == Usage(64 * MIB, 0, 64 * MIB)
    array = setting.alloc(60 * MIB)
    assert setting.taken() == 60 * MIB
    del array


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_allocated_and_freed_the_caps_hold(model: Model, seed: int) -> None:
    rng, setting = random.Random(seed), model()
    caps = [rng.choice([4, 20, 64]) * MIB, rng.choice([6, 32, 100]) * MIB][-setting.number :]
    gpus = [setting.first, setting.second][: setting.number]
    setting.apply(*caps)
    live: list[Any] = []
    served = 0
    for _ in range(300):
        if live and rng.random() < 0.4:
            live.pop(rng.randrange(len(live)))
            continue
        ordinal = rng.randrange(setting.number)
        try:
            live.append(setting.alloc(int(2 ** rng.uniform(20, 25)), ordinal))
            served += 1
        except setting.oom:
            pass
        if rng.random() < 0.02:
            setting.framework.trim(rng.choice(gpus))
        for number, gpu in enumerate(gpus):
            usage = setting.framework.usage(gpu)
            if usage is not None:
                assert usage.held is not None and usage.in_use is not None
                assert usage.in_use <= usage.held == setting.taken(number) <= caps[number]
    assert served > 50
    live.clear()
    for number, gpu in enumerate(gpus):
        setting.framework.trim(gpu)
        assert setting.taken(number) == 0 and setting.usage(gpu) == Usage(0, 0, 0)


@pytest.mark.parametrize("told", [True, False])
def test_what_an_allocation_asks_of_cupy(model: Model, monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
    """With one GPU, the pool of that GPU, if CuPy tells which one a piece of memory is of."""
    setting = model()
    setting.apply()
    memory, asked = setting.cp.cuda.memory, list[str]()
    if not told:
        without = property(lambda self: None, lambda self, pool: None)
        monkeypatch.setattr(memory.PooledMemory, "pool", without, raising=False)
    arrays = [setting.alloc(MIB)]
    here = memory.MemoryPool._here
    monkeypatch.setattr(memory.MemoryPool, "_here", lambda pool: (asked.append("pool"), here(pool))[1])
    arrays += [setting.alloc(size) for size in (512, MIB, 3 * MIB)]
    direct = setting.number == 1 and told
    assert len(asked) == (0 if direct else 8), "malloc, and the limit, or the total before and after"
    assert setting.usage().held == setting.pool.total_bytes()


@pytest.mark.two_gpus
def test_live_before_it_is_capped_at_once_and_says_what_is_above(model: Model) -> None:
    setting = model()
    live = [setting.alloc(8 * MIB) for _ in range(12)]
    assert setting.framework.state() is State.LIVE
    applied = setting.apply(64 * MIB)
    usage = setting.framework.usage(setting.first)
    assert usage is not None and usage.held == 96 * MIB and setting.limit() == 64 * MIB
    assert setting.limit(1) == 0, "no context there: its limit waits for its first allocation"
    with pytest.raises(setting.oom):
        setting.alloc(8 * MIB)
    del live[:5]
    array = setting.alloc(8 * MIB)
    assert setting.usage() == Usage(96 * MIB, 64 * MIB, 32 * MIB), "the cache serves"
    applied.undo()
    applied = setting.apply(100 * MIB)
    assert setting.limit() == 100 * MIB
    setting.framework.resize({setting.first.uuid: 64 * MIB, setting.second.uuid: 64 * MIB})
    other = setting.alloc(MIB, 1)
    assert setting.limit(1) == 64 * MIB
    del array, other


# settings of the user's own


@pytest.mark.two_gpus
@pytest.mark.parametrize("text", ["33554432", "0.0224%"])
def test_a_stricter_limit_in_the_environment_stays(model: Model, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(LIMIT, text)
    setting = model()
    setting.card.gpus[0].total = setting.card.gpus[1].total = setting.first.usable
    setting.apply(64 * MIB)
    assert setting.card.asked == 0
    setting.fill(2 * MIB)
    assert 30 * MIB <= setting.taken() <= 32 * MIB + 2 * MIB and setting.limit() < 33 * MIB
    (note,) = setting.framework.notes
    assert "its own limit of 32." in note and "stricter than the cap and stays" in note
    assert setting.framework.drift() == []


@pytest.mark.parametrize("text", ["134217728", "1%", "100%", "250%"])
def test_a_looser_limit_in_the_environment_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(LIMIT, text)
    setting = model()
    before = setting.cp.cuda.get_allocator()
    error = conflict(setting.apply)
    assert error.setting.startswith(f"{LIMIT}={text} (") and "looser than the cap of 64.0 MiB" in str(error)
    assert setting.cp.cuda.get_allocator() is before and setting.card.asked == 0


@pytest.mark.parametrize("text", ["1GiB", "half", "%", "nan%", "inf%", "-1", "-5%", "1e9"])
def test_a_limit_in_the_environment_that_cannot_be_read_is_refused(
    model: Model, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(LIMIT, text)
    setting = model()
    before = setting.cp.cuda.get_allocator()
    error = conflict(setting.apply)
    assert error.setting == f"{LIMIT}={text}" and "cannot be read" in str(error)
    assert setting.cp.cuda.get_allocator() is before


def test_no_limit_in_the_environment_is_the_cap(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "0")
    setting = model()
    setting.apply()
    setting.fill()
    assert setting.taken() == 64 * MIB and setting.framework.notes == []


@pytest.mark.two_gpus
def test_the_environment_counts_for_the_gpu_with_the_smallest_cap(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT, str(32 * MIB))
    setting = model()
    assert "looser than the cap of 24.0 MiB" in str(conflict(lambda: setting.apply(64 * MIB, 24 * MIB)))
    setting.apply(64 * MIB, 32 * MIB)
    setting.fill(2 * MIB)
    setting.fill(2 * MIB, 1)
    assert (setting.taken(0), setting.taken(1)) == (32 * MIB, 32 * MIB)


def test_a_stricter_set_limit_stays(model: Model) -> None:
    setting = model()
    setting.card.use(0)
    setting.pool.set_limit(size=30 * MIB)
    applied = setting.apply(64 * MIB)
    assert "its own limit of 30.0 MiB is stricter" in setting.framework.notes[0]
    setting.fill(2 * MIB)
    assert setting.taken() == 30 * MIB and setting.framework.drift() == []
    applied.undo()
    assert setting.limit() == 30 * MIB


def test_a_stricter_set_limit_stays_through_a_resize(model: Model) -> None:
    setting = model()
    setting.card.use(0)
    setting.pool.set_limit(size=30 * MIB)
    setting.apply(64 * MIB)
    for cap, limit in ((100, 30), (20, 20), (64, 30)):
        setting.framework.resize({setting.first.uuid: cap * MIB, setting.second.uuid: cap * MIB})
        assert setting.limit() == limit * MIB and setting.framework.drift() == []


@pytest.mark.two_gpus
@pytest.mark.parametrize("text", [None, str(32 * MIB)])
def test_a_looser_set_limit_is_refused_and_nothing_stays(
    model: Model, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    """Whatever the environment says: `set_limit` came after it."""
    if text is not None:
        monkeypatch.setenv(LIMIT, text)
    setting = model()
    before = setting.cp.cuda.get_allocator()
    for ordinal, size in ((0, 30 * MIB), (1, GIB)):
        with setting.cp.cuda.Device(ordinal):
            setting.pool.set_limit(size=size)
    error = conflict(setting.apply)
    assert error.setting == "cupy's MemoryPool.set_limit (1.00 GiB)" and "64.0 MiB" in str(error)
    assert setting.cp.cuda.get_allocator() is before
    assert (setting.limit(0), setting.limit(1)) == (30 * MIB, GIB), "the first was limited already"
    assert setting.framework.drift() == []
    array = setting.alloc(200 * MIB, 1)
    del array


def test_a_pool_of_the_users_own_is_capped_where_it_is_the_allocator(model: Model) -> None:
    setting = model()
    own = setting.cp.cuda.MemoryPool()
    setting.cp.cuda.set_allocator(own.malloc)
    setting.apply()
    setting.fill()
    assert setting.taken() == 64 * MIB == own.get_limit() and setting.pool.get_limit() == 0
    assert setting.framework.about() == {"allocator": "MemoryPool"}


def test_the_async_pool_is_watched_and_said(model: Model) -> None:
    setting = model()
    pool = setting.cp.cuda.MemoryAsyncPool()
    setting.cp.cuda.set_allocator(pool.malloc)
    before = setting.cp.cuda.get_allocator()
    applied = setting.apply()
    assert applied.enforcement is Enforcement.WATCHED
    (note,) = applied.notes
    assert "watched, not capped" in note and "async pool" in note
    assert setting.cp.cuda.get_allocator() is before and setting.card.asked == 0
    array = setting.alloc(100 * MIB)
    assert setting.framework.state() is State.LIVE and setting.framework.about() == {"allocator": "MemoryAsyncPool"}
    assert setting.usage().in_use == 100 * MIB and setting.framework.drift() == []
    assert pool.get_limit() == 0, "the threshold is everybody's"
    del array
    setting.framework.trim(setting.first)
    assert setting.taken() == 0
    applied.undo()


def test_an_allocator_that_nobody_knows_is_refused(model: Model) -> None:
    setting = model()
    cuda = setting.cp.cuda

    def own(size: int) -> Any:
        return cuda.MemoryPointer(cuda.memory.Memory(size), 0)

    class Hand:
        def give(self, size: int) -> Any:
            return own(size)

    names = {
        own: "own", None: "_malloc", cuda.malloc_managed: "malloc_managed", Hand().give: "Hand.give",
        cuda.PythonFunctionAllocator(lambda size, device: 1, print).malloc: "PythonFunctionAllocator.malloc",
    }  # fmt: skip
    cuda.alloc(MIB)  # live: it is asked what it holds
    for allocator, name in names.items():
        cuda.set_allocator(allocator)
        before = cuda.get_allocator()
        assert setting.framework.state() in (State.IMPORTED, State.LIVE)
        setting.framework.usage(setting.first)
        setting.framework.trim(setting.first)
        assert isinstance(setting.framework.about(), dict)
        error = conflict(setting.apply)
        assert name in error.setting and "module." not in error.setting
        assert cuda.get_allocator() is before and setting.limit() == 0


def test_an_allocator_of_one_thread_is_no_drift(model: Model) -> None:
    """Within `using_allocator` a thread cannot see what the others have: what was found before still stands."""
    setting = model()
    setting.apply(64 * MIB)
    cuda = setting.cp.cuda
    with cuda.using_allocator(cuda.MemoryPool().malloc):
        assert setting.framework.drift() == []
    cuda.set_allocator(None)
    found = drifts(setting.framework)
    assert len(found) == 1
    with cuda.using_allocator(setting.framework._allocate):
        assert drifts(setting.framework) == found


def test_within_using_allocator_it_cannot_be_capped_and_nothing_stays(model: Model) -> None:
    """CuPy refuses `set_allocator` there."""
    setting = model()
    setting.alloc(MIB)
    before, own = setting.cp.cuda.get_allocator(), setting.cp.cuda.MemoryPool()
    with setting.cp.cuda.using_allocator(own.malloc):
        with pytest.raises(CapNotApplied, match="using_allocator") as caught:
            setting.apply()
        assert caught.value.remedy and own.get_limit() == 0 and setting.framework.drift() == []
    assert setting.cp.cuda.get_allocator() is before and setting.limit() == 0
    setting.apply()
    setting.fill()


# what changes later


@pytest.mark.two_gpus
def test_another_allocator_later_is_seen(model: Model) -> None:
    setting = model()
    setting.apply()
    array = setting.alloc(MIB)
    told: list[list[str]] = []
    setting.framework.on_change = lambda: told.append(drifts(setting.framework))
    assert setting.framework.drift() == []
    setting.cp.cuda.set_allocator(setting.cp.cuda.malloc_managed)
    assert told == [drifts(setting.framework)], "at once"
    assert "its allocator was replaced after memguard.init (malloc_managed)" in told[0][0]
    setting.cp.cuda.set_allocator(setting.framework._allocate)
    assert told[1] == []
    setting.cp.cuda.set_allocator(None)
    assert "_malloc" in drifts(setting.framework)[0]
    other = setting.alloc(500 * MIB)
    assert setting.usage() == Usage(None, None), "what the pool holds is not what CuPy holds any more"
    assert setting.framework.usage(setting.second) is None, "no context there"
    del array, other


@pytest.mark.parametrize("size", [65 * MIB, 0, 64 * MIB, 10 * MIB, 100 * GIB])
@pytest.mark.parametrize("checked", [True, False])
def test_a_limit_set_later_meets_the_cap(model: Model, size: int, checked: bool) -> None:
    """At the next allocation, or when it is checked whether the cap holds."""
    setting = model()
    applied = setting.apply()
    last = setting.number - 1
    array = setting.alloc(MIB, last)
    with setting.cp.cuda.Device(last):
        setting.pool.set_limit(size=size)
    larger = not 0 < size <= 64 * MIB
    if checked:
        assert setting.framework.drift() == []
    live = setting.fill(MIB, last)
    assert setting.taken(last) <= min(size or GIB, 64 * MIB) and setting.limit(last) == min(size or GIB, 64 * MIB)
    said = [note for note in setting.framework.notes if "MemoryPool.set_limit asks for" in note]
    assert len(said) == larger and (not said or said[0].endswith(f"on cuda:{last}: its cap of 64.0 MiB holds"))
    applied.undo()
    assert setting.limit(last) == (size if size != 64 * MIB else 0), "what the user asked for, if it is to be seen"
    del array, live


def test_pools_that_become_the_allocator_share_the_cap(model: Model) -> None:
    """In turn, with memory in each of them, and back again."""
    setting = model()
    applied = setting.apply()
    cuda, told = setting.cp.cuda, list[object]()
    setting.framework.on_change = lambda: told.extend(drifts(setting.framework))
    pools = [setting.pool, cuda.MemoryPool(), cuda.MemoryPool()]
    pools[2].set_limit(size=8 * MIB)
    arrays = [setting.alloc(20 * MIB)]
    for pool in pools[1:]:
        cuda.set_allocator(pool.malloc)
        arrays.append(setting.alloc(6 * MIB))
        assert pool.used_bytes() == 6 * MIB, "it is the pool that the user asked for"
    with pytest.raises(setting.oom):
        setting.alloc(4 * MIB)  # its own limit is 8 MiB
    cuda.set_allocator(pools[1].malloc)
    live = setting.fill(2 * MIB)
    assert setting.taken() == 64 * MIB and setting.usage().held == 64 * MIB
    arrays.pop(0)
    assert setting.usage().held == 64 * MIB and setting.usage().in_use == 44 * MIB
    live += setting.fill(2 * MIB)  # what the first pool has idle is given to this one
    assert setting.taken() == 64 * MIB == setting.usage().in_use
    ours = cuda.get_allocator()
    cuda.set_allocator(ours)
    assert cuda.get_allocator() is ours and told == []
    live.clear()
    arrays.clear()
    setting.framework.trim(setting.first)
    assert setting.taken() == 0
    cuda.set_allocator(pools[0].malloc)
    setting.fill(2 * MIB)
    assert setting.taken() == 64 * MIB
    applied.undo()
    assert cuda.get_allocator().__self__ is pools[0]
    assert [pool.get_limit() for pool in pools] == [0, 0, 8 * MIB]


@pytest.mark.parametrize("seed", range(20))
def test_pools_changed_at_random_never_hold_more_than_the_cap(model: Model, seed: int) -> None:
    rng = random.Random(seed)
    setting = model()
    applied = setting.apply()
    pools = [setting.pool, *(setting.cp.cuda.MemoryPool() for _ in range(3))]
    live: list[Any] = []
    for _ in range(150):
        choice = rng.random()
        if choice < 0.15:
            setting.cp.cuda.set_allocator(rng.choice(pools).malloc)
        elif choice < 0.25:
            rng.choice(pools).set_limit(size=rng.choice([0, 5 * MIB, 40 * MIB, GIB]))
        elif choice < 0.5 and live:
            live.pop(rng.randrange(len(live)))
        else:
            with contextlib.suppress(setting.oom):
                live.append(setting.alloc(rng.choice([MIB + 1, 3 * MIB, 5 * MIB, 20 * MIB])))
        assert setting.taken() <= 64 * MIB
    assert setting.framework.drift() == []
    applied.undo()
    assert {pool.get_limit() for pool in pools} <= {0, 5 * MIB, 40 * MIB, GIB}, "nothing of the cap is left"


@pytest.mark.parametrize("sizes", [(512, MIB), (512, 6 * MIB)])
@pytest.mark.parametrize("seed", range(int(os.environ.get("MEMGUARD_SEEDS", "4"))))
def test_no_limit_set_later_lets_small_requests_pass_the_cap(model: Model, seed: int, sizes: tuple[int, int]) -> None:
    """At random, with blocks given back and taken anew: not by one byte of the pool's own count, not for one call."""
    rng = random.Random(seed)
    setting = model()
    cap = rng.choice([5, 8, 64]) * MIB + rng.choice([0, 700_000])
    setting.apply(cap)
    live, raised = [setting.alloc(512)], 0
    one = setting.pool._pools[0]
    taken = one._from_driver

    def most(size: int) -> Any:
        block = taken(size)
        assert one.total_bytes() <= cap
        return block

    one._from_driver = most
    for _ in range(400):
        choice = rng.random()
        if choice < 0.1:
            limit = rng.choice([0, cap // 2, cap + 1, GIB])
            setting.pool.set_limit(size=limit)
            raised += not 0 < limit <= cap
        elif choice < 0.3 and live:
            live.pop(rng.randrange(len(live)))
        elif choice < 0.32:
            setting.framework.trim(setting.first)
        else:
            with contextlib.suppress(setting.oom):
                live.append(setting.alloc(rng.randint(*sizes)))
    assert raised > 8


@pytest.mark.parametrize("resized", [48, 64, 100])
def test_a_stricter_limit_set_after_small_requests_stays_through_a_resize(model: Model, resized: int) -> None:
    """They do not look at the limit: nobody has seen it before."""
    setting = model()
    applied = setting.apply(64 * MIB)
    live = [setting.alloc(1000)]
    setting.pool.set_limit(size=30 * MIB)
    live.append(setting.alloc(1000))
    setting.framework.resize({gpu.uuid: resized * MIB for gpu in (setting.first, setting.second)})
    assert setting.limit() == 30 * MIB
    applied.undo()
    assert setting.limit() == 30 * MIB


def test_a_stricter_limit_set_after_small_requests_stays_when_another_pool_leaves_room(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    large, own = [setting.alloc(40 * MIB)], setting.cp.cuda.MemoryPool()
    setting.cp.cuda.set_allocator(own.malloc)
    live = [setting.alloc(1000)]
    own.set_limit(size=8 * MIB)
    live.append(setting.alloc(1000))
    large.clear()
    setting.framework.trim(setting.first)
    assert own.get_limit() == 8 * MIB and len(live) == 2


def test_a_refused_small_request_tells_the_stricter_limit_that_was_set_since(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    moments = list[Any]()
    setting.framework.on_refusal = moments.append
    live = [setting.alloc(1000)]
    setting.pool.set_limit(size=3 * MIB)
    with pytest.raises(setting.oom):
        while True:
            live.append(setting.alloc(MIB))
    assert [(moment.requested, moment.cap) for moment in moments] == [(MIB, 3 * MIB)]


def test_what_using_allocator_allocates_is_told(model: Model) -> None:
    setting = model()
    applied = setting.apply()
    cuda = setting.cp.cuda
    for allocator in (None, cuda.MemoryPool().malloc):
        with cuda.using_allocator(allocator):
            setting.alloc(200 * MIB)
    with cuda.using_allocator(setting.framework._allocate):
        pass
    assert [note for note in setting.framework.notes if "allocates past its cap" in note] == setting.framework.notes
    assert len(setting.framework.notes) == 2
    applied.undo()
    with cuda.using_allocator(None):
        assert len(setting.framework.notes) == 2


def test_the_functions_that_are_replaced_look_like_cupys_and_are_put_back(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = model()
    cuda = setting.cp.cuda
    names = [(cuda, "set_allocator"), (cuda.memory, "set_allocator"), (cuda, "using_allocator")]
    before = [getattr(owner, name) for owner, name in names]
    applied = setting.apply()
    for then, (owner, name) in zip(before, names, strict=True):
        now = getattr(owner, name)
        assert now is not then and (now.__name__, now.__doc__) == (then.__name__, then.__doc__)
        assert inspect.signature(now) == inspect.signature(then)
    applied.undo()
    assert [getattr(owner, name) for owner, name in names] == before
    put, allocator = Replacements.put, cuda.get_allocator()
    for step in range(3):
        left = [step]

        def interrupted(self: Replacements, owner: Any, name: str, wrap: Any, left: list[int] = left) -> bool:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return put(self, owner, name, wrap)

        monkeypatch.setattr(Replacements, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            apply_caps(CuPy(setting.host), {gpu.uuid: MIB for gpu in setting.host.devices()})
        assert [getattr(owner, name) for owner, name in names] == before and cuda.get_allocator() is allocator


def test_a_limit_set_before_the_first_allocation_does_not_lift_the_cap(model: Model) -> None:
    setting = model()
    setting.apply()
    setting.card.use(0)
    setting.pool.set_limit(size=GIB)
    setting.fill()
    assert setting.taken() == 64 * MIB
    assert setting.framework.notes == ["cupy: its own limit of 1.00 GiB is looser than the cap, so the cap holds"]


def test_a_limit_that_reads_back_as_another_does_not_stay(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = model()
    setting.apply()
    one = setting.cp.cuda.memory._OfOneDevice
    get_limit, found = one.get_limit, []

    def wrong(pool: Any) -> int:
        found.append(get_limit(pool))
        return int(found[-1]) + (len(found) == 2)

    monkeypatch.setattr(one, "get_limit", wrong)
    with pytest.raises(CapNotApplied, match=r"(?s)reads back as 67108865.*leave cupy out of the budget"):
        setting.alloc(MIB)
    monkeypatch.undo()
    assert found == [0, 64 * MIB] and setting.framework._limited == {}
    assert setting.pool._pools[0].get_limit() == 0


def test_the_gpus_that_are_limited_may_become_more_while_they_are_gone_through(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = model()
    applied = setting.apply()
    array = setting.alloc(MIB)
    ask, limited = setting.framework._call_on_device, setting.framework._limited
    numbers = itertools.count(5)

    def slow(ordinal: int, call: Callable[[Any], Any], pool: Any = None) -> Any:
        limited[next(numbers)] = (0, 64 * MIB)  # as another thread's first allocation does
        return ask(ordinal, call, pool) if ordinal < 2 else None

    monkeypatch.setattr(setting.framework, "_call_on_device", slow)
    assert setting.framework.drift() == []
    applied.undo()
    monkeypatch.undo()
    del array


@pytest.mark.two_gpus
def test_a_resize_that_fails_halfway_changes_nothing(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = model()
    setting.apply()
    arrays = [setting.alloc(MIB), setting.alloc(MIB, 1)]
    one = setting.cp.cuda.memory._OfOneDevice
    set_limit = one.set_limit

    def failing(pool: Any, size: int | None = None, fraction: float | None = None) -> None:
        if size == 30 * MIB:
            raise ValueError("not now")
        set_limit(pool, size, fraction)

    monkeypatch.setattr(one, "set_limit", failing)
    with pytest.raises(ValueError, match="not now"):
        setting.framework.resize({setting.first.uuid: 20 * MIB, setting.second.uuid: 30 * MIB})
    assert (setting.limit(0), setting.limit(1)) == (64 * MIB, 64 * MIB) and setting.framework.drift() == []
    assert set(setting.framework._caps.values()) == {64 * MIB}
    del arrays


@pytest.mark.two_gpus
def test_a_resize_changes_what_is_live_and_what_is_not(model: Model) -> None:
    setting = model()
    setting.apply()
    live = setting.fill(2 * MIB)
    asked = setting.card.asked
    setting.framework.resize({setting.first.uuid: 100 * MIB, setting.second.uuid: 20 * MIB})
    assert setting.card.asked > asked and not setting.card.gpus[1].context
    live += setting.fill(2 * MIB) + setting.fill(2 * MIB, 1)
    assert (setting.taken(0), setting.taken(1)) == (100 * MIB, 20 * MIB) and setting.framework.drift() == []
    setting.framework.resize({setting.first.uuid: 50 * MIB, setting.second.uuid: 20 * MIB})
    assert setting.usage().held == 100 * MIB and setting.framework.drift() == []
    del live[:30]
    with pytest.raises(setting.oom):
        setting.alloc(70 * MIB)
    setting.framework.trim(setting.first)
    assert setting.taken() == 0 or setting.taken() < 100 * MIB


def test_a_resize_before_anything_is_live_asks_nothing(model: Model) -> None:
    setting = model()
    setting.apply()
    setting.framework.resize({setting.first.uuid: 20 * MIB, setting.second.uuid: 20 * MIB})
    assert setting.card.asked == 0
    setting.fill(2 * MIB)
    assert setting.taken() == 20 * MIB


@pytest.mark.two_gpus
def test_a_trim_frees_whole_blocks_of_its_gpu_only(model: Model) -> None:
    setting = model()
    setting.apply()
    kept, gone, other = setting.alloc(8 * MIB), setting.alloc(16 * MIB), setting.alloc(16 * MIB, 1)
    del gone, other
    part = setting.alloc(4 * MIB)  # out of the 16: the rest cannot go back
    setting.card.use(0)
    setting.framework.trim(setting.second)
    assert (setting.taken(0), setting.taken(1)) == (24 * MIB, 0)
    setting.framework.trim(setting.first)
    assert setting.usage() == Usage(24 * MIB, 12 * MIB, 0)
    del part
    setting.framework.trim(setting.first)
    assert setting.taken() == 8 * MIB and setting.card.here() == 0
    del kept


@pytest.mark.two_gpus
def test_looking_leaves_the_threads_gpu_as_it_is(model: Model) -> None:
    setting = model()
    setting.apply()
    arrays = [setting.alloc(MIB), setting.alloc(MIB, 1)]
    setting.card.use(1)
    setting.usage(setting.first)
    setting.framework.trim(setting.first)
    assert setting.framework.drift() == [] and setting.card.here() == 1
    seen: list[int | None] = []

    def look() -> None:  # a thread without any context
        setting.usage(setting.first)
        seen.append(setting.card.current())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [None]
    del arrays


# the undo


@pytest.mark.two_gpus
@pytest.mark.parametrize("live", [False, True])
def test_an_undo_restores_allocator_and_limits(model: Model, live: bool) -> None:
    setting = model()
    before = setting.cp.cuda.get_allocator()
    applied = setting.apply()
    arrays = [setting.alloc(MIB), setting.alloc(MIB, 1)] if live else []
    applied.undo()
    assert setting.cp.cuda.get_allocator() is before and setting.framework.drift() == []
    assert live or setting.card.asked == 0
    assert (setting.limit(0), setting.limit(1)) == (0, 0)
    arrays.append(setting.alloc(200 * MIB))
    assert setting.usage().in_use == (201 if live else 200) * MIB


@pytest.mark.two_gpus
def test_an_undo_leaves_what_the_user_set_since(model: Model) -> None:
    setting = model()
    applied = setting.apply()
    arrays = [setting.alloc(MIB), setting.alloc(MIB, 1)]
    own = setting.cp.cuda.MemoryPool()
    setting.cp.cuda.set_allocator(own.malloc)
    setting.card.use(0)
    setting.pool.set_limit(size=10 * MIB)
    applied.undo()
    assert setting.cp.cuda.get_allocator().__self__ is own
    assert (setting.limit(0), setting.limit(1)) == (10 * MIB, 0)
    del arrays


@pytest.mark.two_gpus
def test_what_wraps_the_capped_allocator_goes_on_without_a_cap(model: Model) -> None:
    setting = model()
    applied = setting.apply()
    inner = setting.cp.cuda.get_allocator()
    setting.cp.cuda.set_allocator(lambda size: inner(size))
    array = setting.alloc(MIB)
    applied.undo()
    array = setting.alloc(200 * MIB)
    other = setting.alloc(200 * MIB, 1)
    del array, other


def test_a_second_budget_after_an_undo(model: Model) -> None:
    setting = model()
    first = setting.apply(32 * MIB)
    setting.fill()
    first.undo()
    again = CuPy(setting.host)
    second = apply_caps(again, {setting.first.uuid: 64 * MIB})
    setting.fill()
    assert setting.taken() == 64 * MIB
    second.undo()
    assert setting.limit() == 0


def test_a_forked_child_is_not_capped(model: Model) -> None:
    """CUDA not initialised in the parent: the child may use it."""
    setting = model()
    setting.apply()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        found = b"raised"
        try:
            setting.framework.forked()
            array = setting.alloc(200 * MIB)
            found = str(setting.limit()).encode()
            del array
        finally:
            os.write(writing, found)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b"0"
    os.waitpid(pid, 0)
    setting.fill()
    assert setting.taken() == 64 * MIB, "the parent's holds on"


def test_a_fork_while_a_thread_holds_the_lock(model: Model) -> None:
    setting = model()
    setting.apply()
    held, go, waited = threading.Event(), threading.Event(), []

    def hold() -> None:
        with setting.framework._lock:
            held.set()
            waited.append(go.wait(5))

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    setting.framework.forked()  # as the child does
    array = setting.alloc(200 * MIB)
    go.set()
    thread.join()
    assert waited == [True], "nobody waited for it"
    del array


# captures, the error, the guard


@pytest.mark.parametrize(("capturing", "said"), [(False, False), (True, True), ("elsewhere", True), ("broken", False)])
def test_capturing(model: Model, capturing: bool | str, said: bool) -> None:
    setting = model()
    setting.apply()
    assert setting.framework.capturing() is False and setting.card.asked == 0, "no context, no capture"
    array = setting.alloc(MIB)
    setting.card.capturing = capturing
    assert setting.framework.capturing() is said
    del array


def test_the_error_is_cupys_own_and_names_the_limit(model: Model) -> None:
    setting = model()
    setting.apply()
    with pytest.raises(setting.oom, match=r"allocating 104,857,600 bytes .*limit set to: 67,108,864 bytes"):
        setting.alloc(100 * MIB)
    assert issubclass(setting.oom, MemoryError)


def test_under_the_guard_from_init_to_shutdown(model: Model) -> None:
    setting = model("h200")
    budget = _budget.from_mapping({"version": 1, "frameworks": {"cupy": {"limit": "64MiB"}}})
    guard = Guard(budget, setting.host)
    guard.start()
    before = guard.ledger().devices[0].row("cupy")
    assert before is not None and before.enforcement == "pending" and setting.card.asked == 0
    own = importlib.import_module("cupy").get_default_memory_pool()
    live = setting.fill()
    row = guard.ledger().devices[0].row("cupy")
    assert row is not None and (row.enforcement, row.bytes) == ("enforced", 64 * MIB)
    live.clear()
    setting.card.capturing = True
    guard.trim("cupy")
    assert setting.taken() == 64 * MIB, "not while a graph is captured"
    setting.card.capturing = False
    guard.trim("cupy")
    assert setting.taken() == 0
    setting.cp.cuda.set_allocator(None)
    drifted = guard.ledger()
    row = drifted.devices[0].row("cupy")
    assert row is not None and row.enforcement == "watched" and any("replaced" in note for note in drifted.notes)
    assert guard.stop() == [] and own.get_limit() == 0
