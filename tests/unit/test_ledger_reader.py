"""The reader over figures that are set by hand: what is charged as communicators come and go, and the warnings."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from memguard._base.types import Applied, Device, DevicePlan, Enforcement, FrameworkSample, Usage
from memguard._base.undo import Undo
from memguard._base.units import GIB, MIB
from memguard._budget import from_mapping, policy
from memguard._devices.simulated import PID, SimulatedHost
from memguard._frameworks import driver_pages, registry
from memguard._frameworks.base import Framework
from memguard._frameworks.driver_pages import Slabs
from memguard._ledger.reader import LedgerReader
from memguard._ledger.types import DeviceLedger

pytestmark = pytest.mark.one_case  # no version of what is installed changes it: all of it is our own code

FIRST = 518 * MIB + 94 * MIB
"""A context and torch's own modules."""
COLLECTIVE, FURTHER = 838 * MIB, 486 * MIB


class Stub(Framework):
    """A framework whose figures are set from outside."""

    name = module = hook = "stub"

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        self.usages: dict[str, Usage] = {}
        self.beside: frozenset[str] = frozenset()
        self.asked = 0

    def _live(self, module: types.ModuleType) -> bool:
        return bool(self.usages)

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
        raise AssertionError("the reader applies nothing")

    def usage(self, device: Device) -> Usage | None:
        self.asked += 1
        return self.usages.get(device.uuid)

    def trim(self, device: Device) -> None:
        raise AssertionError("the reader trims nothing")

    def libraries(self) -> frozenset[str]:
        return self.beside


class Setting:
    """A process with torch (and what else is named), on simulated GPUs whose figures are set by hand."""

    kind: type[SimulatedHost] = SimulatedHost

    def __init__(self, *names: str, gpus: int = 1, unnamed: tuple[str, ...] = (), **budget: Any) -> None:
        self.host = self.kind(["h200"] * gpus)
        self.gpu = self.host.devices()[0]
        frameworks = {
            "torch": {"limit": "8GiB", "nccl": budget.pop("nccl", 0)},
            **{n: {"limit": "1GiB"} for n in names},
        }
        mapping = {"version": 1, "frameworks": frameworks, **budget}
        self.parts = policy.plan(from_mapping(mapping), self.host.devices()).devices
        self.stubs = {name: Stub(self.host) for name in frameworks}
        self.warnings: list[str] = []
        self.taken = 0  # by nobody, on the first GPU
        self.reader = LedgerReader(self.host, unnamed, self.warnings.append)

    @property
    def torch(self) -> Stub:
        return self.stubs["torch"]

    @property
    def part(self) -> DevicePlan:
        return self.parts[0]

    def live(self, usage: Usage | None = None, extra: int = FIRST, number: int = 0) -> None:
        """torch is live on a GPU, and its modules and the context are there."""
        self.torch.usages[self.host.devices()[number].uuid] = usage or Usage(0, 0, 0)
        self.host.open_context(self.host.devices()[number], 518 * MIB)
        self.host.take(self.host.devices()[number], extra - 518 * MIB)

    def read(self, number: int = 0) -> DeviceLedger:
        enforcements = dict.fromkeys(self.stubs, Enforcement.ENFORCED.value)
        part = self.reader.ledger(self.parts[number], self.stubs, enforcements)
        assert sum(row.bytes or 0 for row in part.rows) == part.device.total
        return part

    def figures(self, number: int = 0) -> list[int]:
        part = self.read(number)
        return [(part.row(name).bytes or 0) // MIB for name in ("overhead", "unaccounted")]


def nccl(count: int) -> frozenset[str]:
    return frozenset(f"nccl {number}" for number in range(1, count + 1))


def test_gaps_in_the_drivers_slabs_are_overhead_and_not_charged() -> None:
    """They come and go with the pieces in them; what was charged stays as it was."""
    setting, shared = Setting(), Slabs()
    setting.live()
    assert setting.figures() == [612, 0]
    uuid = setting.gpu.uuid
    driver_pages.slabs[uuid] = shared
    try:
        shared.add_piece(0)
        shared.count(0, MIB)
        setting.torch.usages[uuid] = Usage(MIB, MIB, 0)
        setting.host.take(setting.gpu, 2 * MIB)
        assert setting.figures() == [613, 0]
        shared.count(0, -MIB)
        shared.remove_piece(0)
        setting.torch.usages[uuid] = Usage(0, 0, 0)
        setting.host.give(setting.gpu, 2 * MIB)
        assert setting.figures() == [612, 0]
    finally:
        del driver_pages.slabs[uuid]


class Asked(SimulatedHost):
    asked = 0

    def processes(self, device: Device) -> Mapping[int, int | None]:
        self.asked += 1
        return super().processes(device)


class TestSample:
    """The monitor's reading: the ledger's figures, and each asked for once where nothing has changed."""

    def figures(self, setting: Setting) -> None:
        sample = setting.reader.sample(setting.part, setting.stubs)
        part = setting.read()
        rows = {row.name: row.bytes for row in part.rows}
        assert (sample.uuid, sample.process, sample.limit) == (setting.gpu.uuid, part.process, part.limit)
        assert (sample.overhead, sample.unaccounted, sample.free) == (
            rows["overhead"],
            rows["unaccounted"],
            rows["free"],
        )
        row = part.row("torch")
        usage = sample.frameworks.get("torch", FrameworkSample(0, None, None, row.cap))
        assert usage == (row.bytes, row.in_use, row.reclaimable, row.cap)

    def test_it_agrees_with_the_ledger(self) -> None:
        setting = Setting()
        self.figures(setting)
        setting.live()
        self.figures(setting)
        setting.torch.usages[setting.gpu.uuid] = Usage(GIB, GIB // 2, GIB // 4)
        setting.host.take(setting.gpu, GIB)
        self.figures(setting)
        setting.host.take(setting.gpu, 3 * GIB)  # nobody's
        self.figures(setting)
        setting.host.take(setting.gpu, 66 * MIB)  # cuBLAS
        self.figures(setting)

    def test_it_asks_once_until_something_is_unaccounted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Setting, "kind", Asked)
        setting = Setting()
        setting.live()
        setting.read()
        host = cast("Asked", setting.host)

        def asked() -> int:
            before = host.asked
            setting.reader.sample(setting.part, setting.stubs)
            return host.asked - before

        assert [asked() for _ in range(12)] == [1, *[0] * 9, 1, 0], "a page may have changed hands"
        setting.torch.usages[setting.gpu.uuid] = Usage(2 * MIB, 2 * MIB, 0)
        setting.host.take(setting.gpu, 2 * MIB)
        assert asked() == 1
        setting.host.take(setting.gpu, 3 * GIB)
        assert asked() > 1 and asked() == 0, "it stays nobody's, and is looked at once"
        setting.host.take(setting.gpu, 66 * MIB)
        assert asked() > 1, "it may be a library's first use"
        setting.reader.clear()
        assert asked() > 1


# communicators


@pytest.mark.parametrize("between", [False, True])
def test_communicators_are_charged_when_they_take_their_memory_and_go_with_it(between: bool) -> None:
    setting = Setting(nccl=2)
    assert setting.figures() == [0, 0]
    setting.live()
    assert setting.figures() == [612, 0]
    if between:  # init_process_group: nothing has been taken
        assert setting.figures() == [612, 0]
    setting.host.take(setting.gpu, COLLECTIVE)
    setting.torch.beside = nccl(1)
    assert setting.figures() == [612 + 838, 0]
    setting.host.take(setting.gpu, FURTHER)
    setting.torch.beside = nccl(2)
    assert setting.figures() == [612 + 838 + 486, 0]
    setting.host.give(setting.gpu, FURTHER)
    setting.torch.beside = nccl(1)
    assert setting.figures() == [612 + 838, 0]
    setting.host.give(setting.gpu, COLLECTIVE - 2 * MIB)
    setting.torch.beside = nccl(0)
    assert setting.figures() == [614, 0] and setting.warnings == []


def test_a_communicator_made_eagerly_is_charged_at_its_first_collective() -> None:
    setting = Setting(nccl=1)
    setting.live()
    setting.read()
    setting.host.take(setting.gpu, 100 * MIB)
    setting.torch.beside = nccl(1)
    assert setting.figures() == [712, 0]
    setting.host.take(setting.gpu, COLLECTIVE - 100 * MIB)
    assert setting.figures() == [612 + 838, 0]
    setting.host.take(setting.gpu, 512 * MIB)
    assert setting.figures() == [612 + 838, 512], "past every framework"


def test_what_torch_allocates_beside_a_communicator_is_torchs() -> None:
    setting = Setting(nccl=1)
    setting.live()
    setting.read()
    setting.host.take(setting.gpu, COLLECTIVE + 3 * GIB)
    setting.torch.usages[setting.gpu.uuid] = Usage(3 * GIB, 3 * GIB, 0)
    setting.torch.beside = nccl(1)
    assert setting.figures() == [612 + 838, 0]


@pytest.mark.parametrize("declared", [0, 1, 2])
def test_a_reserve_that_is_too_small_names_the_communicators_that_it_lacks(declared: int) -> None:
    setting = Setting(nccl=declared)
    setting.live()
    setting.host.take(setting.gpu, COLLECTIVE + FURTHER)
    setting.torch.beside = nccl(2)
    for _ in range(3):
        setting.read()
    if declared == 2:
        assert setting.warnings == []
        return
    (warning,) = setting.warnings
    assert "NVIDIA H200: overhead is 1.89 GiB, more than the reserve of" in warning
    assert warning.endswith("fix: frameworks.torch.nccl: 2 in the budget")


def test_the_warning_about_a_small_declared_reserve_names_the_size() -> None:
    setting = Setting(nccl=2, device={"reserve": "1GiB"})
    setting.live()
    setting.host.take(setting.gpu, COLLECTIVE + 1)
    setting.torch.beside = nccl(1)
    setting.read()
    (warning,) = setting.warnings
    assert warning.endswith("fix: device: {reserve: 1451MiB}")


def test_the_warning_about_a_small_auto_reserve_names_the_size_without_communicators() -> None:
    setting = Setting()
    setting.parts = tuple(
        DevicePlan(p.device, p.limit, 600 * MIB, p.caps, p.unallocated, "auto") for p in setting.parts
    )
    setting.live()
    setting.read()
    (warning,) = setting.warnings
    assert warning.endswith("fix: device: {reserve: 612MiB}")


def test_the_warning_comes_once_for_each_gpu_and_again_under_another_budget() -> None:
    setting = Setting(gpus=2, device={"reserve": "512MiB"})
    for number in (0, 1):
        setting.live(number=number)
    for _ in range(2):
        for number in (0, 1):
            assert setting.figures(number) == [612, 0]
    assert len(setting.warnings) == 2
    setting.reader.clear()
    setting.read()
    assert len(setting.warnings) == 3


def test_each_gpu_is_charged_by_itself() -> None:
    setting = Setting(gpus=2, nccl=1)
    setting.live()
    setting.host.take(setting.gpu, COLLECTIVE)
    setting.torch.beside = nccl(1)
    assert setting.figures(0) == [612 + 838, 0] and setting.figures(1) == [0, 0]
    setting.live(number=1)
    assert setting.figures(1) == [612, 0] and setting.figures(0) == [612 + 838, 0]


def test_a_cleared_reader_begins_anew() -> None:
    setting = Setting()
    setting.live()
    setting.host.take(setting.gpu, 300 * MIB)
    assert setting.figures() == [912, 0]
    setting.host.take(setting.gpu, 300 * MIB)
    assert setting.figures() == [912, 300]
    setting.reader.clear()
    assert setting.figures() == [992, 220], "all that is expected of a context and torch"


# what is read


class Restless(SimulatedHost):
    """After each of the first `times` looks at its own process, that one takes a page more."""

    times = 0

    def processes(self, device: Device) -> Mapping[int, int | None]:
        found = super().processes(device)
        if self.times and found.get(PID):
            self.times -= 1
            self.take(device, 2 * MIB)
        return found


@pytest.mark.parametrize(("times", "moved"), [(0, False), (1, False), (2, False), (4, False), (5, True), (6, True)])
def test_nothing_is_charged_while_another_thread_allocates(
    monkeypatch: pytest.MonkeyPatch, times: int, moved: bool
) -> None:
    monkeypatch.setattr(Setting, "kind", Restless)
    setting = Setting()
    setting.live()
    setting.read()
    assert isinstance(setting.host, Restless)
    setting.host.times = times
    part = setting.read()
    assert part.moved is moved
    charged = (part.row("overhead").bytes or 0) // MIB
    assert charged == 612 if moved else charged == 612 + 2 * times


class Interleaved(Setting):
    """Between the readings of two frameworks another thread allocates with the first, which trims the second."""

    def __init__(self, size: int) -> None:
        super().__init__("jax", "cupy")
        self.host.load("cublas")
        self.live()
        for name in ("torch", "jax"):
            self.stubs[name].usages[self.gpu.uuid] = Usage(GIB, GIB, 0)
        self.host.take(self.gpu, 2 * GIB + 34 * MIB)
        assert self.figures() == [646, 0]
        self.size, self.times = size, 0
        ask = self.torch.usage

        def usage(device: Device) -> Usage | None:
            found = ask(device)
            if self.times:
                self.times -= 1
                for name, size in (("torch", self.size), ("jax", -self.size)):
                    held = (self.stubs[name].usages[device.uuid].held or 0) + size
                    self.stubs[name].usages[device.uuid] = Usage(held, held, 0)
            return found

        self.torch.usage = usage  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["ledger", "sample"])
@pytest.mark.parametrize("size", [2 * MIB, 66 * MIB, 226 * MIB])
def test_what_a_framework_takes_after_it_was_asked_is_not_charged_with_one_that_appears(how: str, size: int) -> None:
    """The process's bytes are the same before and after, so only the frameworks' own figures tell."""
    setting = Interleaved(size)
    setting.stubs["cupy"].usages[setting.gpu.uuid] = Usage(0, 0, 0)
    setting.host.take(setting.gpu, 94 * MIB)
    setting.times = 1 if how == "ledger" else 2
    if how == "ledger":
        part = setting.read()
        assert part.moved and part.row("overhead").bytes == 646 * MIB, "it is no single moment's reading"
    else:
        assert setting.reader.sample(setting.part, setting.stubs).overhead == 646 * MIB
    assert setting.times == 0
    sample = setting.reader.sample(setting.part, setting.stubs)
    assert (sample.overhead, sample.unaccounted) == (740 * MIB, 0), "the next tick charges what is there"
    assert setting.figures() == [740, 0]


def test_what_a_framework_takes_after_it_was_asked_hides_no_first_use_that_comes_later() -> None:
    setting = Interleaved(300 * MIB)
    setting.times = 1
    assert setting.read().moved
    assert setting.figures() == [646, 0]
    setting.host.take(setting.gpu, 66 * MIB)
    assert setting.figures() == [712, 0]


def test_a_reading_asks_each_framework_once_and_again_only_where_a_charge_depends_on_it() -> None:
    setting = Setting("jax")
    setting.live()

    def asked(read: Callable[[], object]) -> list[int]:
        before = {name: stub.asked for name, stub in setting.stubs.items()}
        read()
        return [stub.asked - before[name] for name, stub in setting.stubs.items()]

    def tick() -> object:
        return setting.reader.sample(setting.part, setting.stubs)

    assert asked(setting.read) == [2, 2], "the context and torch are charged"
    assert asked(setting.read) == asked(tick) == [1, 1]
    setting.torch.usages[setting.gpu.uuid] = Usage(GIB, GIB, 0)
    setting.host.take(setting.gpu, GIB)
    assert asked(tick) == asked(setting.read) == [1, 1], "torch took it"
    setting.host.load("cublas")
    setting.host.take(setting.gpu, 66 * MIB)
    assert asked(tick) == [2, 2], "cuBLAS: the whole reading follows the tick's own figures"
    assert setting.figures() == [678, 0]


def test_others_that_allocate_do_not_keep_this_process_from_being_charged() -> None:
    setting = Setting()
    memory = setting.host.memory

    def moving(device: Device) -> Any:
        setting.host.occupy(device, 7, (setting.host.processes(device).get(7) or 0) + 1)
        return memory(device)

    setting.host.memory = moving  # type: ignore[method-assign]
    setting.live()
    part = setting.read()
    assert part.moved and part.row("overhead").bytes == FIRST and part.row("unaccounted").bytes == 0


def test_a_page_that_changes_hands_is_seen_though_the_card_is_as_full_as_before() -> None:
    setting = Setting()
    setting.live()
    setting.host.occupy(setting.gpu, 7, GIB)
    setting.read()
    usage = setting.torch.usage

    def swapping(device: Device) -> Usage | None:
        setting.host.occupy(device, 7, (setting.host.processes(device).get(7) or 0) - 2 * MIB)
        setting.host.take(device, 2 * MIB)
        return usage(device)

    setting.torch.usage = swapping  # type: ignore[method-assign]
    part = setting.read()
    assert part.moved and part.row("overhead").bytes == FIRST and part.row("unaccounted").bytes == 6 * MIB


def test_a_context_that_only_the_process_list_shows_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA does not say whether there is a context; the process holds memory, so there is."""
    setting = Setting()
    monkeypatch.setattr(setting.host, "context_active", lambda device: None)
    setting.host.open_context(setting.gpu, 518 * MIB)
    assert setting.figures() == [518, 0]


def test_communicators_of_a_torch_that_is_not_live_there_are_not_asked_for() -> None:
    setting = Setting()
    setting.torch.beside = nccl(1)
    setting.host.open_context(setting.gpu, 518 * MIB)
    setting.host.take(setting.gpu, COLLECTIVE)
    assert setting.figures() == [608, 518 + 838 - 608]


def test_a_process_that_nvml_does_not_name_is_charged_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting()
    setting.live()
    monkeypatch.setattr(setting.host, "processes", lambda device: {4711: FIRST})
    part = setting.read()
    assert part.process is None and part.row("overhead").bytes == 0 and part.row("unaccounted").bytes == FIRST


def test_beside_an_unknown_pool_no_more_is_charged_than_was_measured() -> None:
    setting = Setting("tensorflow")
    setting.live()
    setting.stubs["tensorflow"].usages[setting.gpu.uuid] = Usage(None, GIB, 0, held_at_least=GIB)
    setting.host.take(setting.gpu, 8 * GIB)
    part = setting.read()
    assert part.row("overhead").bytes == (518 + 368 + 92) * MIB
    assert "tensorflow may hold" in part.row("unaccounted").note


# frameworks that the budget does not name


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Stub]:
    """What the registry makes: stubs, kept here."""
    stubs: list[Stub] = []

    def create(name: str, host: Any) -> Framework:
        stub = Stub(host)
        stub.name = name  # type: ignore[misc]
        stubs.append(stub)
        return stub

    monkeypatch.setattr(registry, "create", create)
    for name in ("cupy", "jax"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return stubs


def test_one_that_is_not_named_is_watched_from_its_import_on(made: list[Stub], monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(unnamed=("cupy", "jax"))
    names: Callable[[], list[str]] = lambda: [row.name for row in setting.read().rows if row.kind == "framework"]  # noqa: E731
    assert names() == ["torch"] and made == [], "its file is not even loaded"
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    assert names() == ["torch"] and [stub.name for stub in made] == ["cupy"]
    setting.live()
    setting.read()
    made[0].usages[setting.gpu.uuid] = Usage(GIB, GIB, 0)
    setting.host.take(setting.gpu, GIB + 94 * MIB)
    part = setting.read()
    assert names() == ["torch", "cupy"] and len(made) == 1, "made once"
    row = part.row("cupy")
    assert (row.bytes, row.cap, row.enforcement) == (GIB, None, "watched")
    assert part.row("torch").enforcement == "enforced"
    assert part.row("overhead").bytes == FIRST + 94 * MIB and part.row("unaccounted").bytes == 0


@pytest.mark.parametrize("bytes_outside", [0, 1, 2 * MIB - 1, 512 * MIB, 1536 * MIB])
@pytest.mark.parametrize("live", [True, False])
def test_what_a_framework_takes_past_its_count_is_named_where_it_may_be(
    bytes_outside: int, live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting("numba")
    setting.live()
    if live:
        setting.stubs["numba"].usages[setting.gpu.uuid] = Usage(0, 0, 0)
    monkeypatch.setattr(setting.stubs["numba"], "uncounted", lambda: "copies of numba's arguments")
    setting.read()
    setting.host.take(setting.gpu, bytes_outside)
    row = setting.read().row("unaccounted")
    named = live and (row.bytes or 0) >= 2 * MIB
    assert ("copies of numba's arguments" in row.note) is named and (bytes_outside < 2 * MIB or not live or named)


@pytest.mark.parametrize("seed", range(20))
def test_readings_that_change_nothing_keep_the_state_that_is_there(seed: int) -> None:
    rng, one = random.Random(seed), Setting(nccl=2)
    one.live()
    for _ in range(60):
        step, size = rng.choice(["take", "give", "nccl", "gone", "use", *["nothing"] * 4]), rng.randrange(1, 300) * MIB
        if step == "take":
            one.host.take(one.gpu, size)
            one.taken += size
        elif step == "give":
            back = min(size, one.taken)
            one.host.give(one.gpu, back)
            one.taken -= back
        elif step == "nccl":
            one.torch.beside = nccl(1 + size // MIB % 2)
        elif step == "gone":
            one.torch.beside = frozenset()
        elif step == "use":
            one.torch.usages[one.gpu.uuid] = Usage(size, size // 2, 0)
        one.figures()
    states = [(one.read(), one.reader._overhead[one.gpu.uuid])[1] for _ in range(4)]
    assert states[2] is states[3], "quiet readings keep the state that is there"
