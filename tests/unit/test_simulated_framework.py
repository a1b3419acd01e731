"""The simulated framework keeps the contract of base.py, and holds what the real ones were measured to hold."""

from __future__ import annotations

import pickle
import sys
import threading

import pytest
from support.capping import apply_caps

from memguard._base.types import Enforcement, State, Usage
from memguard._base.units import GIB, MIB
from memguard._devices.simulated import CONTEXT, SimulatedHost, SimulatedOutOfMemory
from memguard._frameworks.base import Framework
from memguard._frameworks.import_hook import ImportHook
from memguard._frameworks.simulated.adapter import FrameworkOutOfMemory, SimulatedFramework, oom_type
from memguard.errors import CapNotApplied, DeviceError

NAMES = ["torch", "tensorflow", "cupy", "jax", "pycuda", "numba"]
FIXED = ["tensorflow", "jax"]


def own(host: SimulatedHost) -> int:
    return host.processes(host.devices()[0]).get(host.pid) or 0


def uuid(host: SimulatedHost) -> str:
    return host.devices()[0].uuid


@pytest.mark.parametrize("name", NAMES)
def test_states(name: str) -> None:
    host = SimulatedHost()
    framework: Framework = SimulatedFramework(host, name)
    assert isinstance(framework, SimulatedFramework)
    (gpu,) = host.devices()
    assert framework.name == name and framework.why_absent() is None
    assert framework.state() is State.IMPORTABLE
    framework.start_importing()
    assert framework.state() is State.IMPORTED
    assert framework.usage(gpu) is None
    framework.trim(gpu)
    apply_caps(framework, {gpu.uuid: GIB})
    assert own(host) == 0 and not host.context_active(gpu), "looking and capping must not bring it to life"
    framework.allocate(1)
    assert framework.state() is State.LIVE and host.context_active(gpu)
    assert framework.usage(gpu) is not None
    assert SimulatedFramework(host, name, imported=True).state() is State.IMPORTED


def test_any_name_with_an_allocator() -> None:
    framework = SimulatedFramework(SimulatedHost(), "mine", "pool")
    assert framework.name == "mine" and SimulatedFramework(SimulatedHost()).name == "torch"
    for allocator in (None, "other"):
        with pytest.raises(ValueError, match="no simulated allocator for 'mine'"):
            SimulatedFramework(SimulatedHost(), "mine", allocator)


def test_the_context_is_shared() -> None:
    """Measured: torch on top of another's context adds 94 MiB, not 612."""
    host = SimulatedHost()
    SimulatedFramework(host, "pycuda").allocate(1)
    assert own(host) == CONTEXT + 2 * MIB
    SimulatedFramework(host, "torch").allocate(1)
    assert own(host) == CONTEXT + 2 * MIB + 94 * MIB + 2 * MIB


@pytest.mark.parametrize(
    ("name", "modules"), [("torch", 94), ("tensorflow", 4), ("cupy", 94), ("jax", 34), ("pycuda", 0), ("numba", 2)]
)
def test_what_its_own_modules_take(name: str, modules: int) -> None:
    """Measured on an H200, beside the context; and the first 2 MiB of its own."""
    host = SimulatedHost()
    framework = SimulatedFramework(host, name)
    apply_caps(framework, {uuid(host): GIB})
    framework.allocate(1)
    assert own(host) == CONTEXT + (modules + 2) * MIB


def test_a_thread_that_allocates_during_the_import_waits_for_its_hook() -> None:
    """As Python's import lock has it: else it would be live before its cap is set."""
    host, hook = SimulatedHost(), ImportHook()
    framework = SimulatedFramework(host, "tensorflow")
    begun, other = threading.Event(), threading.Thread(target=lambda: (begun.wait(5), framework.allocate(1)))

    def apply() -> None:
        begun.set()
        other.join(0.2)
        apply_caps(framework, {uuid(host): GIB})

    hook.watch(framework.hook, apply)
    other.start()
    framework.start_importing()
    other.join(5)
    hook.clear()
    assert framework.stats(host.devices()[0]).cap == GIB
    assert framework.stats(host.devices()[0]).held == 2 * MIB


def test_an_import_hook_sees_the_import() -> None:
    host, hook = SimulatedHost(), ImportHook()
    framework = SimulatedFramework(host, "torch")
    seen = []
    hook.watch(framework.hook, lambda: seen.append(framework.state()))
    framework.allocate(1)
    assert seen == [State.IMPORTED]
    framework.start_importing()
    assert seen == [State.IMPORTED]
    assert framework.hook not in sys.modules and hook not in sys.meta_path


def test_a_hook_that_raises_stops_the_import() -> None:
    framework, hook = SimulatedFramework(SimulatedHost(), "torch"), ImportHook()

    def refuse() -> None:
        raise CapNotApplied("torch", "no", "none")

    before = list(sys.meta_path)
    forget = hook.watch(framework.hook, refuse)
    with pytest.raises(CapNotApplied):
        framework.allocate(1)
    assert framework.state() is State.IMPORTABLE
    forget()
    assert [f for f in sys.meta_path if f not in before] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_cap_holds_and_the_error_is_its_own(name: str) -> None:
    host = SimulatedHost()
    framework = SimulatedFramework(host, name)
    applied = apply_caps(framework, {uuid(host): 4 * GIB})
    assert applied.enforcement is Enforcement.ENFORCED and not applied.permanent
    arrays = []
    with pytest.raises(FrameworkOutOfMemory, match=f"simulated {name}: .* its cap is reached") as caught:
        while True:
            arrays.append(framework.allocate(100 * MIB))
    assert type(caught.value) is oom_type(name)
    assert caught.value.requested == 100 * MIB and caught.value.cap == 4 * GIB and caught.value.driver is None
    stats = framework.stats(host.devices()[0])
    assert 3.8 * GIB < stats.held <= 4 * GIB and caught.value.held == stats.held
    for array in arrays:
        framework.free(array)
    with pytest.raises(ValueError, match="not live"):
        framework.free(arrays[0])


def test_its_error_is_the_same_in_another_process() -> None:
    framework = SimulatedFramework(SimulatedHost(), "torch")
    with pytest.raises(FrameworkOutOfMemory) as caught:
        framework.allocate(2**40)
    caught.value.mark = "kept"  # type: ignore[attr-defined]
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is oom_type("torch") and str(again) == str(caught.value)
    assert (again.requested, again.mark, again.free) == (2**40, "kept", caught.value.free)
    assert str(again.driver) == str(caught.value.driver) and again.driver.free == caught.value.driver.free


def test_out_of_memory_classes_are_distinct() -> None:
    types = [oom_type(name) for name in NAMES]
    assert len(set(types)) == len(NAMES) and types[0] is oom_type("torch")
    assert all(issubclass(t, SimulatedOutOfMemory) for t in types)


def test_uncapped_tensorflow_takes_the_card_and_torch_finds_none() -> None:
    """Measured: TF takes 141,350 MiB of the H200 (the whole process), and torch then gets no 4 GiB."""
    host = SimulatedHost()
    SimulatedFramework(host, "tensorflow").allocate(1)
    assert abs(own(host) - 141_350 * MIB) < 16 * MIB
    with pytest.raises(FrameworkOutOfMemory, match=r"no cap.*the card is full") as caught:
        SimulatedFramework(host, "torch").allocate(4 * GIB)
    assert caught.value.driver is not None and caught.value.cap is None
    assert caught.value.__cause__ is None and caught.value.driver.__traceback__ is None


def test_no_room_for_a_context() -> None:
    host = SimulatedHost()
    (gpu,) = host.devices()
    host.occupy(gpu, 1, gpu.usable - CONTEXT - 50 * MIB)
    framework = SimulatedFramework(host, "torch")
    with pytest.raises(FrameworkOutOfMemory, match="the card is full"):
        framework.allocate(1)
    assert framework.state() is State.IMPORTED
    host.occupy(gpu, 1, 0)
    framework.allocate(1)
    assert own(host) == CONTEXT + 96 * MIB


def test_tensorflow_with_growth_as_measured() -> None:
    """Measured: limit 4,096 MiB with growth, 778 MiB of process after a 256 MiB tensor; held is not told."""
    host = SimulatedHost()
    framework = SimulatedFramework(host, "tensorflow")
    apply_caps(framework, {uuid(host): 4096 * MIB}, {"growth": True})
    framework.allocate(256 * MIB)
    assert own(host) == 778 * MIB
    size = 256 * MIB
    usage = framework.usage(host.devices()[0])
    assert usage == Usage(None, size, 0, held_at_least=size, held_at_most=4096 * MIB, peak=size)


def test_tensorflow_without_growth_holds_its_cap() -> None:
    host = SimulatedHost()
    framework = SimulatedFramework(host, "tensorflow")
    apply_caps(framework, {uuid(host): 4096 * MIB}, {"growth": False})
    array = framework.allocate(256 * MIB)
    framework.free(array)
    assert framework.usage(host.devices()[0]) == Usage(4096 * MIB, 0, 0, peak=256 * MIB)
    framework.trim(host.devices()[0])
    assert own(host) == (4096 + 518 + 4) * MIB


@pytest.mark.parametrize("name", FIXED)
def test_a_limit_that_is_fixed_once_live(name: str) -> None:
    host = SimulatedHost()
    framework = SimulatedFramework(host, name)
    undo = apply_caps(framework, {uuid(host): GIB}).undo
    with pytest.raises(CapNotApplied, match="fixed"):
        framework.resize({uuid(host): 2 * GIB})
    framework.allocate(1)
    with pytest.raises(CapNotApplied, match="too late"):
        apply_caps(framework, {uuid(host): 2 * GIB})
    with pytest.raises(CapNotApplied, match="permanent"):
        undo()
    assert framework.stats(host.devices()[0]).cap == GIB
    with pytest.raises(FrameworkOutOfMemory):
        framework.allocate(2 * GIB)


@pytest.mark.parametrize("name", FIXED)
def test_undone_before_it_is_live(name: str) -> None:
    host = SimulatedHost()
    framework = SimulatedFramework(host, name)
    undo = apply_caps(framework, {uuid(host): GIB}).undo
    undo()
    framework.allocate(1)
    assert own(host) > 100 * GIB


def test_jax_as_measured() -> None:
    """Measured: 4 GiB stops at 4,294,967,296 bytes of pool; deleting arrays returns nothing, nor does a trim."""
    host = SimulatedHost()
    framework = SimulatedFramework(host, "jax")
    (gpu,) = host.devices()
    apply_caps(framework, {gpu.uuid: 4 * GIB}, {"growth": False})  # which is TensorFlow's
    arrays = [framework.allocate(MIB)]
    assert framework.usage(gpu) == Usage(2 * MIB, MIB, 0, peak=MIB), "it grows"
    with pytest.raises(FrameworkOutOfMemory, match=r"simulated jax: .* its cap is reached"):
        while True:
            arrays.append(framework.allocate(100 * MIB))
    while arrays:
        framework.free(arrays.pop())
    framework.trim(gpu)
    usage = framework.usage(gpu)
    assert usage is not None and (usage.held, usage.in_use, usage.reclaimable) == (4_294_967_296, 0, 0)
    assert own(host) == CONTEXT + 34 * MIB + 4 * GIB


def test_uncapped_jax_takes_three_quarters_at_once() -> None:
    host = SimulatedHost()
    framework = SimulatedFramework(host, "jax")
    framework.allocate(1)
    (gpu,) = host.devices()
    assert framework.stats(gpu).held == gpu.usable * 3 // 4
    framework.allocate(100 * GIB)
    assert framework.stats(gpu).held == gpu.usable * 3 // 4


def test_cupy_gives_back_what_is_not_split() -> None:
    host = SimulatedHost()
    framework = SimulatedFramework(host, "cupy")
    (gpu,) = host.devices()
    apply_caps(framework, {gpu.uuid: GIB})
    framework.free(framework.allocate(100 * MIB))
    framework.allocate(10 * MIB)
    assert framework.usage(gpu) == Usage(100 * MIB, 10 * MIB, 0)
    framework.free(framework.allocate(200 * MIB))
    assert framework.usage(gpu) == Usage(300 * MIB, 10 * MIB, 200 * MIB)
    framework.trim(gpu)
    assert framework.usage(gpu) == Usage(100 * MIB, 10 * MIB, 0), "of the other nothing is split"


def test_cupy_counts_what_it_asked_for() -> None:
    host = SimulatedHost()
    framework = SimulatedFramework(host, "cupy")
    apply_caps(framework, {uuid(host): GIB})
    framework.allocate(1000)
    assert framework.usage(host.devices()[0]) == Usage(1024, 1024, 0)
    assert own(host) == CONTEXT + 94 * MIB + 2 * MIB


def test_numba_holds_what_is_pending() -> None:
    host = SimulatedHost()
    framework = SimulatedFramework(host, "numba")
    (gpu,) = host.devices()
    apply_caps(framework, {gpu.uuid: GIB})
    arrays = [framework.allocate(3 * MIB) for _ in range(3)]
    framework.free(arrays[0])
    assert framework.usage(gpu) == Usage(12 * MIB, 6 * MIB, 4 * MIB, peak=9 * MIB)
    framework.trim(gpu)
    assert framework.usage(gpu) == Usage(8 * MIB, 6 * MIB, 0, peak=9 * MIB)
    framework.resize({gpu.uuid: 100 * GIB})
    large = gpu.usable // 5 + MIB
    framework.free(framework.allocate(large))  # more than a fifth of the card: flushed at once, into the pool
    pooled = -(-large // (2 * MIB)) * 2 * MIB
    assert framework.usage(gpu) == Usage(8 * MIB + pooled, 6 * MIB, pooled, peak=6 * MIB + large)
    framework.trim(gpu)
    assert framework.usage(gpu) == Usage(8 * MIB, 6 * MIB, 0, peak=6 * MIB + large)


def test_numba_live_before_the_first_cap_keeps_its_memory_manager() -> None:
    host = SimulatedHost()
    framework = SimulatedFramework(host, "numba")
    framework.allocate(1)
    with pytest.raises(CapNotApplied, match="too late: it is live, and its context keeps its memory manager"):
        apply_caps(framework, {uuid(host): GIB})
    assert framework.stats(host.devices()[0]).cap is None


def test_numba_live_under_a_cap_takes_another() -> None:
    host = SimulatedHost()
    framework = SimulatedFramework(host, "numba")
    undo = apply_caps(framework, {uuid(host): GIB}).undo
    framework.allocate(1)
    undo()
    framework.allocate(2 * GIB)
    apply_caps(framework, {uuid(host): GIB})
    with pytest.raises(FrameworkOutOfMemory):
        framework.allocate(4 * MIB)


@pytest.mark.parametrize(
    ("name", "size", "takes"),
    [
        ("torch", 3 * MIB, 20 * MIB),
        ("tensorflow", 1000, 1024),
        ("cupy", 3 * MIB, 4 * MIB),
        ("cupy", 700 * 1024, MIB),
        ("jax", 1000, 1024),
        ("pycuda", 3 * MIB + 1, 4 * MIB),
        ("pycuda", 444 * 1024, 2 * MIB),
        ("numba", 3 * MIB, 4 * MIB),
        ("numba", 1, 2 * MIB),
    ],
)
def test_the_footprint_is_what_the_first_allocation_takes(name: str, size: int, takes: int) -> None:
    host = SimulatedHost()
    framework = SimulatedFramework(host, name)
    apply_caps(framework, {uuid(host): GIB})
    assert framework.footprint(size) == takes
    framework.allocate(size)
    held = framework.stats(host.devices()[0]).held
    assert held == takes or (name in FIXED and held == 2 * MIB)


@pytest.mark.parametrize("name", ["torch", "cupy", "pycuda"])
def test_capped_while_live(name: str) -> None:
    host = SimulatedHost()
    framework = SimulatedFramework(host, name)
    (gpu,) = host.devices()
    first = framework.allocate(2 * GIB)
    applied = apply_caps(framework, {gpu.uuid: GIB})
    usage = framework.usage(gpu)
    assert usage is not None and usage.held is not None and usage.held >= 2 * GIB
    with pytest.raises(FrameworkOutOfMemory):
        framework.allocate(4 * MIB)
    framework.free(first)
    after = framework.usage(gpu)
    assert after is not None and (after.held, after.in_use, after.reclaimable) == (usage.held, 0, usage.held)
    framework.trim(gpu)
    assert framework.stats(gpu).held == 0
    apply_caps(framework, {gpu.uuid: 3 * GIB})
    framework.resize({gpu.uuid: 3 * GIB})
    framework.free(framework.allocate(2 * GIB))
    applied.undo()
    framework.allocate(10 * GIB)
    assert framework.stats(gpu).cap is None


def test_caps_are_per_device() -> None:
    host = SimulatedHost(("l4", "h200"))
    first, second = host.devices()
    framework = SimulatedFramework(host, "torch")
    apply_caps(framework, {first.uuid: GIB, second.uuid: 4 * GIB})
    framework.allocate(2 * GIB, device=1)
    assert framework.usage(first) is None and not host.context_active(first)
    with pytest.raises(FrameworkOutOfMemory):
        framework.allocate(2 * GIB, device=0)
    for wrong in (-1, 2):
        with pytest.raises(DeviceError, match="there are 2"):
            framework.allocate(1, device=wrong)


@pytest.mark.parametrize("name", NAMES)
def test_a_cap_for_a_strange_device_leaves_nothing_applied(name: str) -> None:
    host = SimulatedHost()
    framework = SimulatedFramework(host, name)
    with pytest.raises(CapNotApplied, match="no simulated GPU GPU-strange"):
        apply_caps(framework, {uuid(host): GIB, "GPU-strange": GIB})
    assert framework.stats(host.devices()[0]).cap is None


def test_recording() -> None:
    host = SimulatedHost(("h200", "h200"))
    for name in ("tensorflow", "cupy", "jax", "numba"):
        assert SimulatedFramework(host, name).record() is None
    framework = SimulatedFramework(host, "torch")
    before = framework.allocate(5)
    stop = framework.record()
    assert stop is not None
    array = framework.allocate(7, device=1)
    framework.free(array)
    framework.free(before)  # nobody who reads the recording knows it
    events = stop()
    framework.allocate(9)
    assert [(e.op, e.id, e.bytes, e.device) for e in events] == [
        ("alloc", array, 7, 1),
        ("free", array, None, 1),
    ]
    again = framework.record()
    assert len(stop()) == 2, "an old recording's end does not end the new one"
    framework.allocate(11)
    assert again is not None and [e.bytes for e in again()] == [11]
    assert events[0].framework == "torch" and events[0].time <= events[1].time


def test_a_call_within_one_of_the_machine_does_not_wait_for_a_thread_that_waits_for_the_machine() -> None:
    """As a signal handler makes it. The other thread trims: it wants the framework first, then the machine."""
    host = SimulatedHost()
    (gpu,) = host.devices()
    framework = SimulatedFramework(host, "torch")
    framework.start_importing()
    apply_caps(framework, {gpu.uuid: GIB})
    framework.free(framework.allocate(64 * MIB))
    seen: list[Usage | None] = []
    within, trims = threading.Event(), threading.Thread(target=lambda: framework.trim(gpu), daemon=True)

    def call() -> None:
        with host.lock:
            trims.start()
            trims.join(0.1)
            seen.append(framework.usage(gpu))
        within.set()

    threading.Thread(target=call, daemon=True).start()
    assert within.wait(10), "they wait for each other"
    trims.join(10)
    assert not trims.is_alive() and seen[0] is not None and seen[0].reclaimable
