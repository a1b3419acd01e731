"""What a guard reads: the ledger, GPUs that others fill, communicators."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from guards import BUDGET, TORCH, Absent, hooks, host_of, imported, replaced, simulated, start

import memguard
from memguard import api
from memguard._base.types import Device, MemoryInfo, Usage
from memguard._base.units import GIB, MIB, format_size
from memguard._budget import from_mapping, parse
from memguard._devices.simulated import CONTEXT, SimulatedHost
from memguard._frameworks import registry, second_contexts
from memguard._frameworks.simulated.adapter import FrameworkOutOfMemory, SimulatedFramework
from memguard._frameworks.specs import SPECS
from memguard._guard.guard import Guard
from memguard._runtime import runtime
from memguard.errors import (
    NotActive,
    PlanError,
)

pytestmark = pytest.mark.usefixtures("nothing_stays")

# ledger


def test_the_ledger_accounts_for_everything() -> None:
    guard = start()
    (gpu,) = guard.host.devices()
    empty = memguard.ledger().devices[0]
    assert empty.process == 0 and empty.row("free").bytes == gpu.usable and empty.row("overhead").bytes == 0
    torch, tensorflow = simulated(guard, "torch"), simulated(guard, "tensorflow")
    torch.free(torch.allocate(GIB))
    torch.allocate(2 * GIB)
    host_of(guard).occupy(gpu, 7, 3 * GIB)
    part = memguard.ledger().devices[0]
    assert part.row("torch").bytes == 3 * GIB and part.row("torch").in_use == 2 * GIB
    assert part.row("overhead").bytes == CONTEXT + 94 * MIB and part.row("unaccounted").bytes == 0
    assert part.row("other processes").bytes == 3 * GIB
    host_of(guard).take(gpu, 512 * MIB)  # past every framework
    part = memguard.ledger().devices[0]
    assert part.row("unaccounted").bytes == 512 * MIB and part.row("overhead").bytes == CONTEXT + 94 * MIB
    tensorflow.allocate(GIB)
    part = memguard.ledger().devices[0]
    assert part.row("tensorflow").at_least == GIB
    assert sum(row.bytes or 0 for row in part.rows) == gpu.total
    assert memguard.ledger().simulated and "(simulated)" in str(memguard.ledger())


def test_a_ledger_shows_the_moment_when_it_was_read_whenever_somebody_looks() -> None:
    """Its rows are made late. What happens until then is not in them: each of 60 ledgers is compared with its twin,
    which was read at the same moment and looked at at once."""
    rng = random.Random(5)
    guard = start()
    (gpu,) = guard.host.devices()
    live: list[int] = []
    pairs = []
    for _ in range(60):
        torch = simulated(guard, "torch")
        if live and rng.random() < 0.4:
            torch.free(live.pop(rng.randrange(len(live))))
        else:
            with contextlib.suppress(FrameworkOutOfMemory):
                live.append(torch.allocate(rng.randrange(1, 4 * GIB)))
        host_of(guard).occupy(gpu, 7, rng.randrange(GIB))
        guard.resize("torch", rng.choice(["7GiB", "8GiB"]))
        pairs.append((memguard.ledger(), memguard.ledger().devices[0].rows))
    memguard.shutdown()
    assert [later.devices[0].rows for later, _ in pairs] == [rows for _, rows in pairs]


def test_random_work_always_adds_up_to_the_byte() -> None:
    rng = random.Random(11)
    guard = start(simulate=["h200", "l4"])
    live: list[tuple[SimulatedFramework, int]] = []
    for _ in range(150):
        framework = simulated(guard, rng.choice(["torch", "tensorflow", "pycuda"]))
        if live and rng.random() < 0.45:
            owner, array = live.pop(rng.randrange(len(live)))
            owner.free(array)
        else:
            with contextlib.suppress(FrameworkOutOfMemory):
                live.append((framework, framework.allocate(rng.randrange(1, 700 * MIB), device=rng.randrange(2))))
        if rng.random() < 0.1:
            memguard.trim()
        ledger = memguard.ledger()
        for part in ledger.devices:
            assert sum(row.bytes or 0 for row in part.rows) == part.device.total
            assert part.process == guard.host.processes(part.device).get(guard.host.pid, 0)
            for name in ("torch", "pycuda"):
                assert (part.row(name).bytes or 0) <= (part.row(name).cap or 0)


def test_overhead_above_the_reserve_warns_once_with_the_reserve_that_fits() -> None:
    guard = start({**BUDGET, "device": {"limit": "16GiB", "reserve": "600MiB"}})
    simulated(guard, "torch").allocate(1)
    for _ in range(3):
        memguard.ledger()
    (note,) = [note for note in guard.notes if "overhead" in note]
    assert "more than the reserve of 600.0 MiB" in note and "reserve: 612MiB" in note


@pytest.mark.parametrize("seed", range(6))
def test_threads_that_allocate_while_others_read_leave_nothing_charged_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The threads' calls come one after the other: some between two readings, some between two frameworks of one."""
    rng, held = random.Random(seed), list[tuple[SimulatedFramework, int]]()
    guard = start({"version": 1, "device": {"limit": "40GiB"}, "frameworks": {n: {"share": "15%"} for n in SPECS}})
    reading, ask = False, SimulatedFramework.usage

    def call() -> None:
        framework = simulated(guard, rng.choice(list(SPECS)))
        if held and rng.random() < 0.5:
            one, array = held.pop(rng.randrange(len(held)))
            one.free(array)
            return
        with contextlib.suppress(FrameworkOutOfMemory):
            held.append((framework, framework.allocate(rng.choice([MIB, 20 * MIB, 300 * MIB, GIB]))))

    def usage(self: SimulatedFramework, device: Device) -> Usage | None:
        nonlocal reading
        found = ask(self, device)
        if reading and rng.random() < 0.1:
            reading = False  # what makes room for the request reads too
            call()
            reading = True
        return found

    monkeypatch.setattr(SimulatedFramework, "usage", usage)
    for _ in range(400):
        call()
        if rng.random() < 0.2:
            reading = True
            memguard.ledger()
            reading = False
    for one, array in held:
        one.free(array)
    memguard.trim()
    tensorflow = simulated(guard, "tensorflow")
    for size in (GIB, 300 * MIB, 20 * MIB, MIB):  # until its peak says all that its pool holds
        with contextlib.suppress(FrameworkOutOfMemory):
            while True:
                tensorflow.allocate(size)
    row = memguard.ledger().devices[0].row
    taken = CONTEXT + sum(simulated(guard, name).model.first_work for name in SPECS)
    overhead, unaccounted = row("overhead").bytes or 0, row("unaccounted").bytes or 0
    assert abs(overhead + unaccounted - taken) <= MIB and overhead <= taken + MIB, "no more than each began with"
    assert unaccounted <= 34 * MIB, "JAX's, where the pool of TensorFlow seemed to have shrunk when JAX appeared"


class Growing(SimulatedFramework):
    """Holds a MiB more each time it is asked, and counts that."""

    asked = 0

    def usage(self, device: Device) -> Usage | None:
        self.asked += 1
        return Usage(5 * GIB + self.asked * MIB, GIB, 0)


@pytest.mark.parametrize("gpus", ["h200", ["h200", "l4"]])
def test_a_framework_is_asked_once_for_each_gpu_so_that_a_note_agrees_with_its_row(
    monkeypatch: pytest.MonkeyPatch, gpus: str | list[str]
) -> None:
    made: list[Growing] = []

    def make(host: SimulatedHost, name: str) -> SimulatedFramework:
        made.append(Growing(host, name, imported=True))
        return made[-1]

    replaced(monkeypatch, torch=make)
    guard = start(TORCH, gpus)
    asked = made[0].asked
    ledger = guard.ledger()
    assert made[0].asked == asked + len(ledger.devices)
    above = [note for note in ledger.notes if "above its cap" in note]
    rows = [part.row("torch") for part in ledger.devices]
    sizes = [format_size((row.bytes or 0) - (row.cap or 0)) for row in rows]
    assert [note.split(" above")[0] for note in above] == [f"torch: holds {size}" for size in sizes]


class Restless(SimulatedHost):
    """Another process takes a byte whenever somebody looks, `times` times."""

    times = 0

    def memory(self, device: Device) -> MemoryInfo:
        if self.times:
            self.times -= 1
            self.occupy(device, 7, (self.processes(device).get(7) or 0) + 1)
        return super().memory(device)


def test_a_card_that_rests_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    readings = []
    memory = SimulatedHost.memory
    monkeypatch.setattr(SimulatedHost, "memory", lambda self, gpu: readings.append(gpu) or memory(self, gpu))
    memguard.ledger()
    assert len(readings) == 2


@pytest.mark.parametrize(("times", "moved"), [(0, False), (2, False), (3, False), (4, False), (100, True)])
def test_a_card_whose_figures_move_is_read_again_and_marked_if_they_never_rest(times: int, moved: bool) -> None:
    host = Restless(["h200"])
    guard = Guard(from_mapping(TORCH), host)
    guard.start()
    host.times = times
    (part,) = guard.ledger().devices
    assert part.moved is moved
    assert sum(row.bytes or 0 for row in part.rows) == part.device.total
    guard.stop()


class Container(SimulatedHost):
    """NVML lists other PIDs than this process's own; whether a context exists is `active`."""

    active: bool | None = None

    def processes(self, device: Device) -> Mapping[int, int | None]:
        return {pid + 1: size for pid, size in super().processes(device).items()}

    def context_active(self, device: Device) -> bool:
        return self.active  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("live", "active", "process"),
    [
        (True, True, None),  # it is there, and NVML does not name it: unknown
        (True, None, None),  # whether there is a context cannot be asked, but a framework is live
        (False, True, None),
        (False, None, 0),  # nothing is live, nothing is listed
        (False, False, 0),
        (True, False, 0),  # live without a context on this GPU: it holds nothing there
    ],
)
def test_a_process_that_nvml_does_not_name_is_unknown(live: bool, active: bool | None, process: int | None) -> None:
    host = Container(["h200"])
    guard = Guard(from_mapping(TORCH), host)
    guard.start()
    host.active = active
    if live:
        simulated(guard, "torch").allocate(GIB)
    (part,) = guard.ledger().devices
    assert part.process is process or part.process == process
    assert sum(row.bytes or 0 for row in part.rows) == part.device.total
    guard.stop()


@pytest.mark.parametrize("active", [True, None])
def test_a_context_that_another_library_opened_is_overhead(
    active: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = start()
    (gpu,) = guard.host.devices()
    host_of(guard).open_context(gpu)
    monkeypatch.setattr(SimulatedHost, "context_active", lambda self, device: active)
    part = memguard.ledger().devices[0]
    assert part.row("overhead").bytes == CONTEXT and part.row("unaccounted").bytes == 0


class NotSimulated(SimulatedHost):
    """For what is done on real GPUs only."""

    simulated = False


@pytest.mark.parametrize(
    ("names", "version", "answer", "asked"),
    [
        (("torch", "tensorflow"), "13.0", "loaded a library first", True),
        (("tensorflow", "torch"), "13.0", None, True),
        (("tensorflow", "torch"), None, "never", False),
        (("torch", "pycuda"), "13.0", "never", False),
        (("tensorflow",), "13.0", "never", False),
    ],
)
def test_torch_and_tensorflow_together_have_their_cuda_runtimes_kept_apart(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], version: str | None, answer: str | None, asked: bool
) -> None:
    versions: list[str] = []
    monkeypatch.setattr(registry, "create", lambda name, host: imported(host, name))
    monkeypatch.setattr("memguard._frameworks.torch.settings.cuda_version", lambda: version)
    monkeypatch.setattr("memguard._frameworks.torch.cudart.cure", lambda v: versions.append(v) or answer)
    budget = {"version": 1, "frameworks": {name: {"share": "10%"} for name in names}}
    guard = Guard(from_mapping(budget), NotSimulated(["h200"]))
    guard.start()
    assert versions == (["13.0"] if asked else [])
    kept_apart = asked and answer is not None
    assert any("loaded a library first" in note for note in guard.notes) is kept_apart
    assert guard.stop() == (["torch: the CUDA runtime loaded first stays loaded"] if kept_apart else [])


def test_cuda_runtimes_are_left_alone_if_one_of_the_two_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "create", lambda name, host: (Absent if name == "torch" else imported)(host, name))
    monkeypatch.setattr("memguard._frameworks.torch.settings.cuda_version", lambda: "13.0")
    monkeypatch.setattr("memguard._frameworks.torch.cudart.cure", lambda v: pytest.fail("it has nothing to cure"))
    budget = {"version": 1, "frameworks": {"torch": {"share": "10%"}, "tensorflow": {"share": "10%"}}}
    guard = Guard(from_mapping(budget), NotSimulated(["h200"]))
    guard.start()
    guard.stop()


def test_two_gpus_have_a_plan_and_a_table_each() -> None:
    guard = start({"version": 1, "frameworks": {"torch": {"share": "50%"}}}, ["h200", "t4"])
    torch = simulated(guard, "torch")
    torch.allocate(GIB, device=1)
    first, second = memguard.ledger().devices
    assert first.row("torch").bytes == 0 and second.row("torch").bytes == GIB
    assert (first.row("torch").cap or 0) > 60 * GIB > 7 * GIB > (second.row("torch").cap or 0)
    assert first.process == 0 and second.process == GIB + CONTEXT + 94 * MIB
    assert str(memguard.ledger()).count("total ") == 2


BUSY = {"version": 1, "on_busy": "raise", "device": {"limit": "100GiB"}, "frameworks": {"torch": {"share": "50%"}}}


def test_what_this_process_may_hold_itself_is_no_reason_to_refuse_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container NVML knows this process by another number."""
    host = SimulatedHost(["h200"])
    gpu = host.devices()[0]
    host.open_context(gpu, CONTEXT)
    host.take(gpu, 60 * GIB)
    monkeypatch.setattr(host, "processes", lambda device: {4711: 60 * GIB + CONTEXT})
    guard = Guard(from_mapping(BUSY), host)
    guard.start()
    assert any("this process and others hold 60." in note for note in guard.notes)
    guard.stop()


def test_a_card_that_others_hold_is_refused_if_the_budget_says_so() -> None:
    host = SimulatedHost(["h200"])
    host.occupy(host.devices()[0], 1, 100 * GIB)
    for budget, where in ((from_mapping(BUSY), "init: "), (parse(json.dumps(BUSY), "b.json"), r"b\.json:1:\d+: ")):
        guard = Guard(budget, host)
        with pytest.raises(PlanError, match=f"^{where}on_busy: .*other processes hold 100.00 GiB") as caught:
            guard.start()
        assert "on_busy: warn" in str(caught.value) and not guard.active


# on_busy


def busy_budget(rule: str, **more: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "on_busy": rule,
        "device": {"limit": "14GiB"},
        "frameworks": {"torch": {"share": "50%"}},
        **more,
    }


@pytest.mark.parametrize("others", [0, 10 * GIB])
def test_a_busy_card_stops_init_before_anything_is_applied(
    steps: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    done = steps()
    monkeypatch.setattr(runtime, "open_host", lambda simulate: occupied)
    for rule in ("raise", "warn"):
        occupied = SimulatedHost(["t4", "t4"])
        occupied.occupy(occupied.devices()[1], 1, others)
        if not others:
            assert start(busy_budget(rule)).notes == [] and done == ["apply torch"]
            memguard.shutdown()
        elif rule == "raise":
            with pytest.raises(PlanError, match=r"other processes hold 10\.00 GiB") as caught:
                start(busy_budget(rule))
            (problem,) = caught.value.problems
            assert problem.path == "on_busy" and "on_busy: warn" in problem.fix
            assert done == [] and hooks() == []
            with pytest.raises(NotActive):
                memguard.ledger()
        else:
            guard = start(busy_budget(rule))
            (note,) = guard.notes
            assert "other processes hold 10.00 GiB" in note and done == ["apply torch"]
            assert note in memguard.ledger().notes
            memguard.shutdown()
        done.clear()


def test_a_busy_card_leaves_the_budget_that_was_active_before(monkeypatch: pytest.MonkeyPatch) -> None:
    host = SimulatedHost(["t4"])
    monkeypatch.setattr(runtime, "open_host", lambda simulate: host)
    start(TORCH, simulate=None)
    host.occupy(host.devices()[0], 1, 10 * GIB)
    with pytest.raises(PlanError, match="on_busy"):
        start(busy_budget("raise"), simulate=None, replace=True)
    assert api.current().active and memguard.ledger().devices[0].row("torch").cap == 4 * GIB


# communicators, from the reserve to the ledger


def test_communicators_are_kept_for_charged_and_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    beside: list[str] = []
    monkeypatch.setattr(SimulatedFramework, "libraries", lambda self: frozenset(beside))
    guard = start({"version": 1, "device": {"limit": "16GiB"}, "frameworks": {"torch": {"limit": "4GiB", "nccl": 2}}})
    (part,) = guard.plan.devices
    assert part.reserve == 544 * MIB + 384 * MIB + 64 * MIB + 896 * MIB + 512 * MIB
    (gpu,) = guard.host.devices()
    simulated(guard, "torch").allocate(GIB)

    def figures() -> list[int]:
        found = memguard.ledger().devices[0]
        return [(found.row(name).bytes or 0) // MIB for name in ("overhead", "unaccounted")]

    assert figures() == [612, 0] == figures(), "init_process_group takes nothing yet"
    host_of(guard).take(gpu, 838 * MIB)
    beside.append("nccl 1")
    assert figures() == [612 + 838, 0]
    host_of(guard).take(gpu, 486 * MIB)
    beside.append("nccl 2")
    assert figures() == [612 + 838 + 486, 0] and not [note for note in guard.notes if "overhead" in note]
    host_of(guard).take(gpu, 486 * MIB)
    beside.append("nccl 3")
    assert figures() == [612 + 838 + 486 + 486, 0]
    (note,) = [note for note in guard.notes if "overhead" in note]
    assert note.endswith("fix: frameworks.torch.nccl: 3 in the budget")
    host_of(guard).give(gpu, (838 + 2 * 486) * MIB)
    beside.clear()
    assert figures() == [612, 0]


def test_peaks_come_with_the_last_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeline and a report ask for them right after a sample or a ledger, which has read each framework once."""
    guard, read = start(), Counter[str]()
    (gpu,), torch = guard.host.devices(), simulated(guard, "torch")
    torch.free(torch.allocate(2 * GIB))
    guard.sample()  # charges the context
    usage = SimulatedFramework.usage

    def counted(self: SimulatedFramework, device: Device) -> Usage | None:
        read[self.spec.name] += 1
        return usage(self, device)

    monkeypatch.setattr(SimulatedFramework, "usage", counted)
    assert guard.sample() and guard.peaks()[gpu.uuid] == {"torch": 2 * GIB}
    assert read == dict.fromkeys(guard.frameworks, 1)
    torch.allocate(3 * GIB)
    read.clear()
    assert guard.ledger().devices and guard.peaks()[gpu.uuid] == {"torch": 3 * GIB}
    assert read == dict.fromkeys(guard.frameworks, 1)


def test_a_simulated_gpu_has_no_context_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real contexts, as of a program that uses a GPU beside its simulation, are on real GPUs."""
    guard = start()
    simulated(guard, "torch").allocate(GIB)
    monkeypatch.setattr(second_contexts, "find", lambda *_: {17: "PyCUDA"})
    assert [row.name for row in memguard.ledger().devices[0].rows if row.kind == "overhead"] == ["overhead"]
