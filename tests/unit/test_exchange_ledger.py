"""What the ledger says of loans, of memory held for other processes, and of contexts beside the primary one."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from memguard._base.types import Applied, Device, DeviceSample, Plan, Sample, Usage
from memguard._base.undo import Undo
from memguard._base.units import GIB, MIB
from memguard._budget import from_mapping, policy
from memguard._devices import contexts
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks import second_contexts
from memguard._frameworks.base import Framework
from memguard._ledger.overhead import Overhead
from memguard._ledger.reader import LedgerReader
from memguard._ledger.rows import Reading, device_ledger
from memguard._ledger.types import Ledger, Lent, Row
from memguard._runtime.pressure import START, Settings, decide
from memguard._timeline import Writer, load_timeline
from memguard._timeline.replay import replay_timeline

CONTEXT, TORCH = 518 * MIB, 94 * MIB
LOANS = "memguard._frameworks.arrays.lifetimes"


class Real(SimulatedHost):
    """A host of real frameworks: its driver's memory is simulated, and nothing else."""

    simulated = False


class Stub(Framework):
    """A framework whose figures are set from outside."""

    name = module = hook = "stub"

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        self.held: Usage | None = None
        self.handles: set[int] = set()

    def _live(self, module: ModuleType) -> bool:
        return self.held is not None

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
        raise AssertionError("the reader applies nothing")

    def usage(self, device: Device) -> Usage | None:
        return self.held

    def trim(self, device: Device) -> None:
        raise AssertionError("the reader trims nothing")

    def contexts(self, device: Device) -> frozenset[int]:
        return frozenset(self.handles)


class Setting:
    """A process with torch and PyCUDA on one GPU, whose memory and contexts are set by hand."""

    def __init__(self, **device: Any) -> None:
        self.host = Real(["h200"])
        self.gpu = self.host.devices()[0]
        frameworks = {"torch": {"limit": "8GiB"}, "pycuda": {"limit": "1GiB"}}
        budget = from_mapping({"version": 1, "device": device, "frameworks": frameworks})
        self.plan: Plan = policy.plan(budget, self.host.devices())
        (self.part,) = self.plan.devices
        self.stubs = {name: Stub(self.host) for name in frameworks}
        self.warnings: list[str] = []
        self.reader = LedgerReader(self.host, (), self.warnings.append)

    def live(self) -> None:
        self.stubs["torch"].held = Usage(0, 0, 0)
        self.host.open_context(self.gpu, CONTEXT)
        self.host.take(self.gpu, TORCH)

    def allocate(self, size: int) -> None:
        self.stubs["torch"].held = Usage(size, size, 0)
        self.host.take(self.gpu, size)

    def read(self) -> Ledger:
        part = self.reader.ledger(self.part, self.stubs, dict.fromkeys(self.stubs, "enforced"))
        assert sum(row.bytes or 0 for row in part.rows) == part.device.total, "to the byte"
        return Ledger(0.0, (part,))

    def row(self, name: str) -> Row:
        return self.read().devices[0].row(name)

    def figures(self, *names: str) -> list[int | None]:
        rows = {row.name: row.bytes for row in self.read().devices[0].rows}
        return [None if (size := rows.get(name)) is None else size // MIB for name in names]

    def sample(self) -> DeviceSample:
        return self.reader.sample(self.part, self.stubs)


class Loans(ModuleType):
    """`lifetimes` as the reader sees it: by names that it looks up in a module which it does not import."""

    def __init__(self) -> None:
        super().__init__(LOANS)
        self.held_for_processes: Counter[int] = Counter()
        self.open: dict[int, dict[str, dict[str, int]]] = {}
        self.once: dict[str, int] = {}

    def lent(self) -> dict[int, dict[str, dict[str, int]]]:
        return self.open

    def lent_by(self, producer: str, device: int) -> int:
        return self.once[producer] if producer in self.open.get(device, {}) else 0


@pytest.fixture
def loans(monkeypatch: pytest.MonkeyPatch) -> Loans:
    module, real = Loans(), importlib.import_module(LOANS)
    assert all(hasattr(real, name) for name in ("held_for_processes", "lent", "lent_by")), "as the real one has them"
    monkeypatch.setitem(sys.modules, LOANS, module)
    return module


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """The contexts that can be seen: handle and who made it. The tests set them."""
    seen: dict[int, str] = {}

    def look(ordinal: int, pools: Any = ()) -> dict[int, str]:
        return {**dict.fromkeys(pools, "PyCUDA"), **seen} if ordinal == 0 else {}

    monkeypatch.setattr(second_contexts, "find", look)
    return seen


# lent


def test_what_is_lent_is_in_the_producers_row_and_charged_once(loans: Loans) -> None:
    setting = Setting()
    setting.live()
    setting.allocate(2 * GIB)
    before = setting.figures("torch", "pycuda", "overhead", "unaccounted")
    loans.open = {0: {"torch": {"tensorflow": GIB, "jax": GIB // 2}}, 1: {"pycuda": {"torch": GIB}}}
    loans.once = {"torch": GIB, "pycuda": GIB}
    assert setting.figures("torch", "pycuda", "overhead", "unaccounted") == before == [2048, 0, 612, 0]
    row = setting.row("torch")
    assert (row.bytes, row.lent) == (2 * GIB, GIB), "each byte once"
    assert row.note == "lends 1.00 GiB: to tensorflow 1.00 GiB, to jax 512.0 MiB"
    assert setting.row("pycuda").lent is None, "on another GPU"
    loans.once["torch"] = 0
    assert setting.row("torch").note == "", "it ended between two looks"
    loans.open = {}
    row = setting.row("torch")
    assert (row.lent, row.note) == (None, "")


def test_tables_and_json_say_what_is_lent(loans: Loans) -> None:
    setting = Setting()
    setting.live()
    setting.allocate(2 * GIB)
    plain = setting.read()
    assert "lends" not in str(plain) and "lends" not in plain._repr_html_()
    loans.open, loans.once = {0: {"torch": {"tensorflow": GIB}}}, {"torch": GIB}
    ledger = setting.read()
    assert "* torch: lends 1.00 GiB: to tensorflow 1.00 GiB" in [line.rstrip() for line in str(ledger).splitlines()]
    assert "<div>* torch: lends 1.00 GiB: to tensorflow 1.00 GiB</div>" in ledger._repr_html_()
    rows = {row["name"]: row for row in json.loads(ledger.to_json())["devices"][0]["rows"]}
    assert rows["torch"]["lent"] == GIB and rows["pycuda"]["lent"] is None and rows["free"]["lent"] is None


def test_a_producer_that_is_no_framework_of_the_ledger_is_not_shown(loans: Loans) -> None:
    setting = Setting()
    setting.live()
    names = [row.name for row in setting.read().devices[0].rows]
    loans.open, loans.once = (
        {0: {"rmm": {"torch": GIB}, "another process": {"jax": GIB}}},
        {"rmm": 1, "another process": 1},
    )
    ledger = setting.read()
    assert [row.name for row in ledger.devices[0].rows] == names and "lends" not in str(ledger)


def test_a_row_that_has_a_note_already_gets_both() -> None:
    usages = {"tensorflow": Usage(None, GIB, 0, held_at_least=GIB)}
    gpu = SimulatedHost(["h200"]).devices()[0]
    memory = SimulatedHost(["h200"]).memory(gpu)
    lent = {"tensorflow": Lent(MIB, {"jax": MIB})}
    part = device_ledger(Reading(gpu, memory, GIB, usages, lent=lent))
    assert part.row("tensorflow").note == "held unknown, at least this; lends 1.0 MiB: to jax 1.0 MiB"


def test_a_simulated_process_lends_nothing(loans: Loans) -> None:
    """Its GPUs have CUDA's numbers, and what is lent is lent on real ones."""
    loans.open, loans.once = {0: {"torch": {"jax": GIB}}}, {"torch": GIB}
    loans.held_for_processes[0] = GIB
    setting = Setting()
    setting.host.simulated = True  # type: ignore[misc]
    setting.live()
    assert setting.row("torch").lent is None and "exchange" not in setting.sample().frameworks


def test_cuda_is_asked_for_the_ordinal_if_the_plan_has_none(loans: Loans, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    setting = Setting()
    setting.live()
    setting.part = replace(setting.part, device=replace(setting.gpu, ordinal=None))
    loans.open, loans.once = {1: {"torch": {"jax": GIB}}}, {"torch": GIB}
    assert setting.row("torch").lent is None, "CUDA does not say"
    asked = []
    monkeypatch.setattr(contexts, "ordinals", lambda: asked.append(1) or {setting.gpu.uuid: 1})
    assert setting.row("torch").lent == GIB and setting.row("torch").lent == GIB
    assert len(asked) == 1, "it stays what it is"


# what is held for other processes


def test_memory_held_for_other_processes_has_a_row_of_its_own(loans: Loans) -> None:
    setting = Setting()
    setting.live()
    assert setting.figures("overhead", "unaccounted", "exchange") == [612, 0, None], "no row where there is none"
    assert "exchange" not in setting.sample().frameworks
    setting.host.take(setting.gpu, 3 * GIB)
    loans.held_for_processes[0] = 3 * GIB
    assert setting.figures("overhead", "unaccounted", "exchange") == [612, 0, 3072]
    row = setting.row("exchange")
    assert (row.kind, row.enforcement, row.cap) == ("framework", "watched", None)
    assert (row.bytes, row.in_use, row.cached, row.reclaimable) == (3 * GIB, 3 * GIB, 0, 0)
    seen = setting.sample()
    assert tuple(seen.frameworks["exchange"]) == (3 * GIB, 3 * GIB, 0, None) and seen.unaccounted == 0
    loans.held_for_processes[0] = 0
    setting.host.give(setting.gpu, 3 * GIB)
    assert setting.figures("overhead", "unaccounted", "exchange") == [612, 0, None]
    assert "exchange" not in setting.sample().frameworks


def test_pressure_timeline_and_replay_take_such_a_row(loans: Loans, tmp_path: Path) -> None:
    setting = Setting()
    setting.live()
    setting.host.take(setting.gpu, 3 * GIB)
    loans.held_for_processes[0] = 3 * GIB
    samples = [Sample(float(n), (setting.sample(),)) for n in range(20)]
    state = START
    monitor = from_mapping({"version": 1, "monitor": {}, "frameworks": {"torch": {"share": "5%"}}}).monitor
    assert monitor is not None
    for sample in samples:
        state, actions = decide(Settings.of(monitor, (), [setting.gpu]), sample, state)
        assert not actions
    writer = Writer(str(tmp_path / "run.jsonl"), setting.plan)
    for sample in samples:
        writer.sample(sample)
    writer.close()
    timeline = load_timeline(writer.path)
    assert [sample.devices for sample in timeline.samples()] == [sample.devices for sample in samples]
    outcome = replay_timeline(timeline.records(), setting.plan)
    assert {row.framework for row in outcome.frameworks} == {"torch"}, "it is under no cap"
    assert [gpu.outside for gpu in outcome.devices] == [3 * GIB + 612 * MIB], "a reserve has to hold it"


# contexts beside the primary one


def test_a_second_context_has_a_row_with_its_cost_and_who_made_it(beside: dict[int, str]) -> None:
    setting = Setting()
    setting.live()
    assert setting.figures("overhead", "second context", "unaccounted") == [612, None, 0]
    beside[7] = "pycuda.autoinit"
    setting.host.take(setting.gpu, CONTEXT)
    assert setting.figures("overhead", "second context", "unaccounted") == [612, 518, 0]
    ledger = setting.read()
    row = ledger.devices[0].row("second context")
    assert row.kind == "overhead" and setting.sample().overhead == 612 * MIB + CONTEXT
    text = " ".join(str(ledger).split())
    for said in (
        "* second context: made by pycuda.autoinit, about 518.0 MiB each (measured on an H200)",
        "import pycuda.autoinit after memguard.init",
        "`context: primary`",
        "memguard.exchange.pycuda_context",
    ):
        assert said in text, said
    assert "second context" in ledger._repr_html_()


@pytest.mark.parametrize(("owner", "said"), [("PyCUDA", "made by PyCUDA,"), ("unknown", "made by something unknown,")])
def test_unaccounted_memory_is_charged_to_a_second_context_once_that_is_seen(
    beside: dict[int, str], owner: str, said: str
) -> None:
    """Made on a thread that does not read the ledger, or before the first reading that finds it."""
    setting = Setting()
    setting.live()
    setting.read()
    setting.host.take(setting.gpu, CONTEXT)
    assert setting.figures("overhead", "second context", "unaccounted") == [612, None, 518]
    beside[7] = owner
    assert setting.figures("overhead", "second context", "unaccounted") == [612, 518, 0]
    assert said in setting.row("second context").note
    beside.clear()
    assert setting.figures("overhead", "second context", "unaccounted") == [612, 518, 0], "it is on another thread"
    beside[7] = "unknown"
    assert setting.figures("overhead", "second context", "unaccounted") == [612, 518, 0], "and is charged once"
    assert said in setting.row("second context").note, "who made it is not forgotten"


def test_one_made_before_the_first_reading_is_not_taken_for_the_primary_one(beside: dict[int, str]) -> None:
    setting = Setting()
    beside[7] = "pycuda.autoinit"
    setting.live()
    setting.host.take(setting.gpu, CONTEXT)
    assert setting.figures("overhead", "second context", "unaccounted") == [612, 518, 0]


def test_a_context_takes_all_at_once_and_nothing_later() -> None:
    """Unlike a communicator, which leaves room for what it takes at its first collective."""
    names = frozenset({"context", "torch"})
    state = Overhead().after(612 * MIB, names).after(612 * MIB, names | {"second context"})
    assert state.communicators_owed == 0 and state.charged == 612 * MIB


def test_another_budget_begins_with_what_it_sees_itself(beside: dict[int, str]) -> None:
    setting = Setting()
    setting.live()
    beside[7] = "PyCUDA"
    setting.host.take(setting.gpu, CONTEXT)
    setting.read()
    beside.clear()
    setting.reader.clear()
    assert setting.figures("second context") == [None]


def test_it_goes_with_its_memory(beside: dict[int, str]) -> None:
    setting = Setting()
    setting.live()
    beside.update({7: "PyCUDA", 8: "PyCUDA"})
    setting.host.take(setting.gpu, 2 * CONTEXT)
    assert setting.figures("overhead", "second context", "unaccounted") == [612, 1036, 0]
    assert setting.row("second context").note.startswith("2 contexts, made by PyCUDA, about 518.0 MiB each")
    del beside[7]
    setting.host.give(setting.gpu, CONTEXT)
    assert setting.figures("overhead", "second context", "unaccounted") == [612, 518, 0]
    beside.clear()
    setting.host.give(setting.gpu, CONTEXT)
    assert setting.figures("overhead", "second context", "unaccounted") == [612, None, 0]
    beside[7] = "PyCUDA"
    setting.host.take(setting.gpu, CONTEXT)
    assert setting.figures("overhead", "second context", "unaccounted") == [612, 518, 0], "and again"


def test_the_contexts_of_a_frameworks_pools_count(beside: dict[int, str]) -> None:
    setting = Setting()
    setting.live()
    setting.stubs["pycuda"].handles = {9}
    setting.host.take(setting.gpu, CONTEXT)
    assert setting.figures("second context", "unaccounted") == [518, 0]


def test_a_raw_allocation_as_large_beside_it_stays_unaccounted(beside: dict[int, str]) -> None:
    setting = Setting()
    setting.live()
    beside[7] = "PyCUDA"
    setting.host.take(setting.gpu, CONTEXT)
    setting.read()
    setting.host.take(setting.gpu, CONTEXT)
    assert setting.figures("second context", "unaccounted") == [518, 518]


def test_its_cost_is_unknown_and_not_zero_if_nvml_names_no_process(
    beside: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting()
    setting.live()
    beside[7] = "PyCUDA"
    setting.host.take(setting.gpu, CONTEXT)
    monkeypatch.setattr(setting.host, "processes", lambda device: {})
    row = setting.row("second context")
    assert row.bytes is None and "its cost is in unaccounted" in row.note


def test_an_auto_reserve_that_it_exceeds_warns_with_the_fix(beside: dict[int, str]) -> None:
    setting = Setting()
    setting.live()
    beside.update({7: "PyCUDA", 8: "PyCUDA"})
    setting.host.take(setting.gpu, 2 * CONTEXT)
    setting.read()
    (said,) = setting.warnings
    assert "avoid the second context (memguard.ledger() shows what made it); or device: {reserve:" in said


def test_a_sample_asks_nothing_for_an_exchange_that_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many of them are taken each second."""
    monkeypatch.delitem(sys.modules, LOANS, raising=False)
    setting = Setting()
    setting.live()
    setting.sample()

    def asked(*_: object) -> Any:
        raise AssertionError("nothing has changed")

    monkeypatch.setattr(contexts, "ordinals", asked)
    monkeypatch.setattr(second_contexts, "find", asked)
    monkeypatch.setattr(setting.reader, "_ordinal", asked)
    assert setting.sample().overhead == 612 * MIB
