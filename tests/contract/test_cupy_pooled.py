"""CuPy in the pool that frameworks share, on the model of CuPy: counted, capped together with others, undone."""

from __future__ import annotations

import contextlib
import gc
import importlib
import random
import threading
from typing import Any

import pytest
from support.drifts import drifts
from test_cupy_model import Setting, model

from memguard import _budget
from memguard._base.types import POOL, Enforcement, Shortage, State
from memguard._base.units import MIB
from memguard._devices import pools
from memguard._frameworks.cupy.pooled import PooledCuPy
from memguard._frameworks.shared_pool import SharedPool
from memguard._guard.guard import Guard
from memguard.errors import CapNotApplied, ConflictingSetting, DeviceError

__all__ = ["model"]


@pytest.fixture
def gpus() -> int:
    return 1


class FakePool:
    """`CappedPool` over the model's card."""

    fails = ""

    def __init__(self, ordinal: int, size: int) -> None:
        if FakePool.fails:
            raise DeviceError(FakePool.fails)
        self.gpu: Any = importlib.import_module("fake_card").gpus[ordinal]
        self.gpu.pool_most, self.gpu.threshold, self.gpu.ours = size, 2**64 - 1, True

    def reserved(self) -> int:
        return int(self.gpu.pool_held)

    def used(self) -> int:
        return int(self.gpu.pool_used)

    def trim(self, keep: int = 0) -> None:
        self.gpu.trim_pool(keep)

    def keep(self) -> int | None:
        found, self.gpu.threshold = self.gpu.threshold, 2**64 - 1
        return None if found == 2**64 - 1 else int(found)

    def current(self) -> bool:
        return bool(self.gpu.ours)

    def restore(self) -> None:
        self.gpu.pool_most = None


class Joint:
    """A CuPy that draws from a pool, and the pool."""

    def __init__(self, setting: Setting, size: int) -> None:
        self.warned: list[str] = []
        self.uuid = setting.first.uuid
        self.pool = SharedPool({self.uuid: size}, self.warned.append)
        self.setting = setting
        self.framework = setting.framework = PooledCuPy(setting.host, self.pool)

    @property
    def gpu(self) -> Any:
        return self.setting.card.gpus[0]


@pytest.fixture
def joint(model: Any, monkeypatch: pytest.MonkeyPatch) -> Joint:
    monkeypatch.setattr(pools, "CappedPool", FakePool)
    monkeypatch.setattr(FakePool, "fails", "")
    return Joint(model(), 256 * MIB)


def test_capping_asks_nothing_of_cuda_and_the_first_array_makes_the_pool(joint: Joint) -> None:
    setting = joint.setting
    applied = setting.apply(256 * MIB)
    assert applied.enforcement is Enforcement.ENFORCED and not setting.card.initialised
    assert joint.framework.usage(setting.first) is None and joint.pool.figures(joint.uuid) is None
    live = setting.alloc(3 * MIB + 1)
    assert joint.gpu.pool_most == 256 * MIB and joint.framework.state() is State.LIVE
    usage = joint.framework.usage(setting.first)
    assert usage is not None and (usage.held, usage.in_use, usage.reclaimable) == (3 * MIB + 512, 3 * MIB + 512, 0)
    del live
    assert joint.framework.usage(setting.first)[:2] == (0, 0)  # type: ignore[index]
    assert joint.gpu.pool_used == 0 and joint.gpu.pool_held == 32 * MIB, "what is freed stays in the pool"


def test_it_stops_where_the_pool_is_full_whoever_has_filled_it(joint: Joint) -> None:
    setting = joint.setting
    setting.apply(256 * MIB)
    others = 64 * MIB
    setting.card.use(0)
    live = [setting.alloc(MIB)]
    joint.gpu.malloc_async(others)  # somebody else's, in the same pool
    live += setting.fill(8 * MIB)
    assert joint.gpu.pool_held == 256 * MIB
    assert joint.framework.usage(setting.first)[1] == MIB + 8 * MIB * (len(live) - 1)  # type: ignore[index]
    assert joint.pool.remainder(joint.uuid) == others


def test_a_refusal_is_cupys_own_is_told_and_carries_the_size(joint: Joint) -> None:
    setting, told = joint.setting, []
    setting.apply(256 * MIB)
    joint.framework.on_refusal = told.append  # type: ignore[assignment, func-returns-value]
    with pytest.raises(setting.oom) as caught:
        setting.alloc(257 * MIB)
    assert caught.value.memguard_requested == 257 * MIB  # type: ignore[attr-defined]
    (moment,) = told
    assert (moment.requested, moment.source, moment.uuid) == (257 * MIB, "refusal", joint.uuid)
    assert joint.framework.unseen() is None


def test_an_error_keeps_no_array_alive(joint: Joint) -> None:
    setting = joint.setting
    setting.apply(256 * MIB)
    gc.disable()
    try:
        live = setting.alloc(200 * MIB)
        with contextlib.suppress(setting.oom):
            setting.alloc(100 * MIB)
        del live
        assert joint.gpu.pool_used == 0 and setting.alloc(256 * MIB).ptr
        with contextlib.suppress(setting.oom):
            kept = setting.alloc(8 * MIB), setting.alloc(300 * MIB)
            del kept
        assert joint.gpu.pool_used == 0
    finally:
        gc.enable()


def test_before_it_refuses_it_asks_for_room_and_tries_again(joint: Joint) -> None:
    setting, asked = joint.setting, list[Shortage]()
    setting.apply(256 * MIB)
    other = setting.alloc(200 * MIB)

    def short(shortage: Shortage) -> bool:
        nonlocal other
        asked.append(shortage)
        other = None
        return True

    joint.framework.on_shortage = short
    assert setting.alloc(100 * MIB).ptr
    (shortage,) = asked
    assert shortage == Shortage("cupy", joint.uuid, 100 * MIB, 128 * MIB, False)


def test_a_capture_is_not_waited_in(joint: Joint) -> None:
    setting = joint.setting
    setting.apply(256 * MIB)
    live = setting.alloc(MIB)
    setting.card.capturing = True
    before = setting.card.synchronized
    with pytest.raises(setting.oom):
        setting.alloc(512 * MIB)
    assert setting.card.synchronized == before and live.ptr


def test_the_undo_restores_the_allocator_and_live_arrays_outlive_it(joint: Joint) -> None:
    setting = joint.setting
    before = setting.cp.cuda.get_allocator()
    applied = setting.apply(256 * MIB)
    ours = setting.cp.cuda.get_allocator()
    assert ours is not before and joint.framework.drift() == []
    live = setting.alloc(MIB)
    for _ in range(2):
        applied.undo()
        joint.pool.restore()
        assert setting.cp.cuda.get_allocator() is before
    assert joint.gpu.pool_most is None
    del live
    gc.collect()
    assert joint.gpu.pool_used == 0 and joint.framework.drift() == []


def test_an_apply_that_is_interrupted_leaves_nothing(joint: Joint, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = joint.setting
    before = setting.cp.cuda.get_allocator()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(joint.pool, "count", interrupted)
    with pytest.raises(KeyboardInterrupt):
        setting.apply(256 * MIB)
    assert setting.cp.cuda.get_allocator() is before and joint.pool._counts == {}


def test_an_allocator_that_is_set_later_is_told_and_an_async_pool_is_the_same(joint: Joint) -> None:
    setting = joint.setting
    applied = setting.apply(256 * MIB)
    ours = setting.cp.cuda.get_allocator()
    theirs = setting.cp.cuda.MemoryAsyncPool().malloc
    setting.cp.cuda.set_allocator(theirs)
    assert setting.cp.cuda.get_allocator() is ours and joint.framework.drift() == []
    changed: list[list[str]] = []
    joint.framework.on_change = lambda: changed.append(drifts(joint.framework))
    setting.cp.cuda.set_allocator(setting.pool.malloc)
    assert "its allocator was replaced after memguard.init (MemoryPool.malloc)" in changed[0][0]
    setting.cp.cuda.set_allocator(theirs)
    assert changed[1] == []
    applied.undo()
    assert setting.cp.cuda.get_allocator() == theirs, "the user gets what was asked for meanwhile"


def test_what_is_elsewhere_already_is_refused_with_the_reason(joint: Joint, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = joint.setting
    kept = setting.cp.cuda.alloc(4 * MIB)
    with pytest.raises(CapNotApplied, match="in a pool of its own, from before") as caught:
        setting.apply(256 * MIB)
    assert "before CuPy's first array" in caught.value.remedy and kept.ptr
    monkeypatch.setenv("CUPY_GPU_MEMORY_LIMIT", "50%")
    with pytest.raises(ConflictingSetting) as setting_of:
        setting.apply(256 * MIB)
    assert setting_of.value.setting == "CUPY_GPU_MEMORY_LIMIT"
    monkeypatch.delenv("CUPY_GPU_MEMORY_LIMIT")
    setting.cp.cuda.set_allocator(setting.cp.cuda.malloc_managed)
    with pytest.raises(ConflictingSetting, match="allocates past the shared pool"):
        setting.apply(256 * MIB)


def test_a_driver_without_pools_refuses_the_first_array_and_says_what_to_do(
    joint: Joint, monkeypatch: pytest.MonkeyPatch
) -> None:
    joint.setting.apply(256 * MIB)
    monkeypatch.setattr(
        FakePool, "fails", "CUDA: a driver for CUDA 12.0 cannot limit a memory pool\n    fix: update it"
    )
    with pytest.raises(CapNotApplied) as caught:
        joint.setting.alloc(MIB)
    assert "cannot limit a memory pool" in caught.value.reason and "strategy: caps" in caught.value.remedy


def test_the_threshold_that_others_set_is_set_again_and_told_once(joint: Joint) -> None:
    setting = joint.setting
    setting.apply(256 * MIB)
    live = setting.alloc(MIB)
    for threshold in (0, 0, 5 * MIB):
        joint.gpu.threshold = threshold
        joint.pool.cache(setting.first, MIB, False)
        assert joint.gpu.threshold == 2**64 - 1
    assert len(set(joint.warned)) == 2 and "release threshold on cuda:0 was set to 0 B" in joint.warned[0]
    assert live.ptr


def test_another_current_pool_is_a_drift(joint: Joint) -> None:
    setting = joint.setting
    setting.apply(256 * MIB)
    live = setting.alloc(MIB)
    joint.gpu.ours = False
    (said,) = drifts(joint.framework)
    assert "another memory pool was made current on cuda:0" in said and live.ptr


def test_under_the_guard_the_rows_add_up_and_shutdown_takes_all_back(
    joint: Joint, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = joint.setting
    text = {"version": 1, "strategy": "pool", "frameworks": {"cupy": {"limit": "96MiB"}}}
    context = 100 * MIB
    monkeypatch.setattr(
        setting.host, "processes", lambda device: {setting.host.pid: context + joint.gpu.pool_held}, raising=True
    )
    guard = Guard(_budget.from_mapping(text), setting.host)
    guard.start()
    cupy = importlib.import_module("cupy")
    before = guard.ledger().devices[0]
    assert before.row("cupy").enforcement == "enforced" and POOL not in [row.name for row in before.rows]
    live = [setting.alloc(40 * MIB), setting.alloc(MIB)]
    del live[0]
    device = guard.ledger().devices[0]
    assert (device.row("cupy").bytes, device.row("cupy").cap) == (MIB, 96 * MIB)
    assert (device.row(POOL).bytes, device.row(POOL).cached, device.row(POOL).in_use) == (63 * MIB, 63 * MIB, 0)
    assert device.row("cupy").bytes + device.row(POOL).bytes == joint.gpu.pool_held
    assert (device.row("overhead").bytes, device.row("unaccounted").bytes) == (context, 0), "the cache is neither"
    assert device.sum == device.device.total and "may hold 96.0 MiB" in device.row(POOL).note
    sample = guard.sample().devices[0].frameworks
    assert (sample["cupy"].held, sample[POOL].held) == (MIB, 63 * MIB)
    guard.require("cupy", "95MiB")
    with pytest.raises(Exception, match="cupy needs 96"):
        guard.require("cupy", "96MiB")
    guard.trim()
    assert joint.gpu.pool_held == 32 * MIB
    assert guard.stop() == []
    assert joint.gpu.pool_most is None and cupy.cuda.get_allocator() == cupy.get_default_memory_pool().malloc


def test_where_the_driver_cannot_cap_the_pool_memguard_refuses(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's default pool, of which others take too."""
    monkeypatch.setattr(pools, "DefaultPool", lambda ordinal: FakePool(ordinal, 1 << 50))
    joint = Joint(model(), 256 * MIB)
    joint.pool = SharedPool({joint.uuid: 256 * MIB}, joint.warned.append, clients=["jax"])
    joint.framework.shared_pool = joint.pool
    setting = joint.setting
    setting.apply(256 * MIB)
    live = [setting.alloc(MIB)]
    joint.gpu.malloc_async(100 * MIB)
    live += setting.fill(8 * MIB)
    assert joint.gpu.pool_used == MIB + 100 * MIB + 19 * 8 * MIB
    del live
    gc.collect()  # what the test's own helper caught
    assert setting.alloc(156 * MIB).ptr


def test_two_threads_do_not_pass_that_cap_together(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both look at what is in use before either has allocated."""
    monkeypatch.setattr(pools, "DefaultPool", lambda ordinal: FakePool(ordinal, 1 << 50))
    joint = Joint(model(), 256 * MIB)
    joint.pool = SharedPool({joint.uuid: 256 * MIB}, joint.warned.append, clients=["jax"])
    joint.framework.shared_pool = joint.pool
    setting, both, waits = joint.setting, threading.Barrier(2, timeout=10), list[int]()
    looked = FakePool.used

    def used(pool: FakePool) -> int:
        found = looked(pool)
        if waits:
            waits.pop()
            both.wait()
        return found

    monkeypatch.setattr(FakePool, "used", used)
    setting.apply(256 * MIB)
    live, refused = [setting.alloc(MIB)], []
    waits += [1, 1]

    def work() -> None:
        setting.card.use(0)
        try:
            live.append(setting.alloc(200 * MIB))
        except setting.oom as error:
            refused.append(type(error))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(live) == 2 and len(refused) == 1 and joint.gpu.pool_used == 201 * MIB


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_allocated_and_freed_the_count_is_that_of_live_arrays(joint: Joint, seed: int) -> None:
    setting, rng = joint.setting, random.Random(seed)
    setting.apply(256 * MIB)
    live: list[tuple[int, Any]] = []
    for _ in range(400):
        if live and rng.random() < 0.45:
            live.pop(rng.randrange(len(live)))
            continue
        size = round(2 ** rng.uniform(0, 25))
        try:
            live.append((-(-size // 512) * 512, setting.alloc(size)))
        except setting.oom:
            live.clear()
        assert joint.framework._counted(joint.uuid) == sum(size for size, _ in live) == joint.gpu.pool_used
        assert joint.gpu.pool_held <= 256 * MIB
