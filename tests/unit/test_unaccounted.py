"""What no framework holds: a leak beside live frameworks is unaccounted and said, and programs at work say nothing."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import memguard
from memguard import api
from memguard._base.framework_spec import LAZY, LIBRARIES
from memguard._base.types import Device, DeviceSample, Event, FrameworkSample, Sample
from memguard._base.units import GIB, MIB
from memguard._devices import loaded_libraries
from memguard._devices.real import RealHost
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.simulated.adapter import SimulatedFramework
from memguard._frameworks.specs import SPECS
from memguard._guard.guard import Guard
from memguard._ledger.overhead import ANY, Overhead
from memguard._runtime import runtime, session
from memguard._runtime.pressure import LEAKED, START, Action, PressureState, Settings, decide

pytestmark = pytest.mark.one_case  # no version of what is installed changes it: all of it is our own code

BEGIN = 1_700_000_000.0
UUID = "GPU-00000000-0000-4000-8000-000000000000"
SIX = {"tensorflow": "20%", "torch": "25%", "jax": "20%", "cupy": "15%", "pycuda": "10%", "numba": "10%"}
assert set(SIX) == set(SPECS)
clock = [0.0]
"""The reader's seconds, where a test takes `simulated_time`."""


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    clock[0] = 0.0
    yield
    memguard.shutdown()
    session.event_callbacks.clear()


@pytest.fixture
def simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memguard._ledger.reader.time.monotonic", lambda: clock[0])


class Process:
    """Six live frameworks on a simulated H200, that have worked with cuBLAS or not; time goes by in `sample`."""

    def __init__(self, *, at_work: bool = True, growth: bool = False, libraries: Iterable[str] = ANY) -> None:
        frameworks: dict[str, dict[str, Any]] = {name: {"share": share} for name, share in SIX.items()}
        frameworks["tensorflow"]["growth"] = growth
        budget = {"version": 1, "device": {"limit": "40GiB"}, "frameworks": frameworks}
        self.guard: Guard = memguard.init(budget, simulate="h200")
        assert isinstance(self.guard.host, SimulatedHost)
        self.host, self.state, self.now = self.guard.host, START, 0.0
        self.gpu = self.host.devices()[0]
        self.leaked = 0
        self.said: list[tuple[float, Event]] = []
        for name, framework in self.guard.frameworks.items():
            assert isinstance(framework, SimulatedFramework)
            framework.allocate(MIB)
            self.sample(0.5)
            if at_work:
                self.host.load(*libraries)
                for library, size in SPECS[name].first_uses:
                    if library in self.host.libraries():
                        self.host.take(self.gpu, size)
                        self.sample(0.5)
        self.host.load(*libraries)
        self.sample(30)
        self.before = self.unaccounted

    @property
    def unaccounted(self) -> int:
        return memguard.ledger().devices[0].row("unaccounted").bytes or 0

    def leak(self, size: int) -> None:
        self.host.take(self.gpu, size)
        self.leaked += size

    def sample(self, after: float) -> None:
        clock[0] = self.now = self.now + after
        sample = self.guard.sample()._replace(time=BEGIN + self.now)
        self.state, actions = decide(Settings(), sample, self.state)
        self.said += [(self.now, action.event) for action in actions if action.kind == "callback"]


@pytest.mark.usefixtures("simulated_time")
@pytest.mark.parametrize("at_work", [True, False])
def test_at_work_nothing_is_unaccounted_and_nothing_is_said(at_work: bool) -> None:
    process = Process(at_work=at_work)
    assert process.said == [] and abs(process.before) <= 2 * MIB


SHAPES: dict[str, Callable[[random.Random, float], int]] = {
    "even": lambda rng, seconds: round(16 * MIB * seconds / (2 * MIB)) * 2 * MIB,
    "uneven": lambda rng, seconds: round(rng.uniform(0, 2) * 16 * MIB * seconds / (2 * MIB)) * 2 * MIB,
    "now and then": lambda rng, seconds: 16 * MIB if rng.random() < seconds else 0,
}


@pytest.mark.usefixtures("simulated_time")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("interval", [0.1, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("growth", [True, False])
@pytest.mark.parametrize("at_work", [True, False])
def test_a_leak_of_16_mib_per_second_beside_six_frameworks_is_unaccounted_and_said_within_10_s(
    at_work: bool, growth: bool, interval: float, shape: str
) -> None:
    """Where frameworks have not worked yet, a part may be taken for their libraries' first uses."""
    process, rng = Process(at_work=at_work, growth=growth), random.Random(3)
    begun = process.now
    while process.now - begun < 15:
        process.leak(SHAPES[shape](rng, interval))
        process.sample(interval)
        if shape == "even":
            assert process.unaccounted - process.before >= process.leaked - 2 * SHAPES[shape](rng, interval)
    spared = LAZY * len(SPECS) + (0 if at_work else 192 * MIB)
    assert process.unaccounted - process.before >= process.leaked - spared
    (first, event), *_ = process.said
    assert first - begun <= (7 if shape == "even" else 10 if at_work or interval <= 0.5 else 12)
    assert (event.kind, event.framework, event.uuid) == ("leak", None, process.gpu.uuid)
    assert event.bytes is not None and event.bytes >= LEAKED
    assert event.text.startswith("unaccounted memory grows by ") and "no framework" in event.text


@pytest.mark.usefixtures("simulated_time")
@pytest.mark.parametrize("interval", [0.5, 5.0, 60.0])
@pytest.mark.parametrize("at_work", [True, False])
def test_a_slow_leak_of_670_mib_in_an_hour_ends_as_unaccounted_and_is_said(at_work: bool, interval: float) -> None:
    process = Process(at_work=at_work)
    begun = process.now
    while process.now - begun < 3600:
        wanted = int((process.now - begun) / 3600 * 335) * 2 * MIB
        process.leak(wanted - process.leaked)
        process.sample(interval)
    process.leak(670 * MIB - process.leaked)
    process.sample(interval)
    assert process.unaccounted - process.before >= 600 * MIB
    times = [now - begun for now, event in process.said if event.kind == "leak"]
    assert times and times[0] <= 1200 and len(times) <= 5, "once, and each time that it has doubled"


@pytest.mark.long
def test_the_monitor_says_it_at_its_default_interval_within_10_s() -> None:
    guard = memguard.init(
        {"version": 1, "frameworks": {name: {"share": "10%"} for name in SIX}, "monitor": {}}, simulate="h200"
    )
    seen: list[Event] = []
    memguard.on_event(seen.append)
    for framework in guard.frameworks.values():
        assert isinstance(framework, SimulatedFramework)
        framework.allocate(MIB)
    memguard.ledger()
    assert api.current_session().monitor is not None and isinstance(guard.host, SimulatedHost)
    begun = time.monotonic()
    leaked = 0
    while not seen and time.monotonic() - begun < 10:
        size = int((time.monotonic() - begun) * 8) * 2 * MIB - leaked
        guard.host.take(guard.host.devices()[0], size)
        leaked += size
        time.sleep(0.05)
    assert [event.kind for event in seen] == ["leak"], seen


# What was recorded on an H200


def recorded() -> list[tuple[str, list[tuple[int, frozenset[str], bool]]]]:
    """By run: the bytes that no framework held, what was live, and whether all frameworks said what they held."""
    runs = json.loads((Path(__file__).parent / "recorded_gaps.json").read_text())
    return [(name, [(gap, frozenset(live), told) for gap, live, told in series]) for name, series in runs]


RECORDED = recorded()


def test_the_recorded_runs_are_there() -> None:
    assert len(RECORDED) >= 3 and sum(len(series) for _, series in RECORDED) >= 40


@pytest.mark.parametrize(("name", "series"), RECORDED, ids=[name for name, _ in RECORDED])
@pytest.mark.parametrize("apart", [0.5, 2.0, 30.0])
def test_recorded_programs_leave_little_unaccounted_and_raise_no_alarm(
    name: str, series: list[tuple[int, frozenset[str], bool]], apart: float
) -> None:
    state, pressure, said, now = Overhead(), START, [], 0.0
    for gap, live, exact in series:
        end = now + apart
        while now < end:
            state = state.after(gap, live, exact)
            rest = gap - state.charged
            assert abs(rest) <= 24 * MIB, f"{name}: {rest / MIB:.1f} MiB of {gap / MIB:.1f}"
            pressure, actions = decide(Settings(), alone(now, rest), pressure)
            said += actions
            now += 0.5
    assert said == []


def test_the_documented_figures_are_those_of_the_rows() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "ledger.md").read_text().splitlines()
    table = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line.startswith("| ")]
    head = next(row for row in table if "first communicator" in row)
    most, measured, uses = table[table.index(head) + 2 : table.index(head) + 5]
    titles = {"cuBLAS": "cublas", "cuDNN": "cudnn", "cuSOLVER": "cusolver", "cuFFT": "cufft"}
    for row in SPECS.values():
        column = head.index(row.title)
        assert (most[column], measured[column]) == (str(row.workspace // MIB), str(row.modules // MIB))
        said: list[tuple[str, int]] = []
        for word in uses[column].replace(",", "").replace("–", "").split():
            if word in titles:
                library = titles[word]
            elif word != "and":
                said.append((library, int(word) * MIB))
        assert said == list(row.first_uses)
    text = " ".join(lines)
    sizes = sorted(size for row in SPECS.values() for _, size in row.first_uses)
    assert f"none of more than {sizes[-1] * 5 // 4 // MIB} MiB does" in text
    assert f"at most {sum(sizes[-2:]) * 5 // 4 // MIB} MiB in the reading" in text and f"{LAZY // MIB} MiB for" in text


# The rule by itself


def alone(now: float, unaccounted: int | None, uuid: str = UUID) -> Sample:
    """One GPU on which a framework without a cap lives."""
    torch = FrameworkSample(GIB, GIB, 0, None)
    used = 2 * GIB + (unaccounted or 0)
    return Sample(
        BEGIN + now,
        (DeviceSample(uuid, 140 * GIB, used, 140 * GIB - used, used, None, GIB, unaccounted, {"torch": torch}),),
    )


def follow(level: Callable[[float], int | None], seconds: float, interval: float = 0.5) -> list[Event]:
    state: PressureState = START
    actions: list[Action] = []
    for number in range(int(seconds / interval)):
        state, new = decide(Settings(), alone(number * interval, level(number * interval)), state)
        actions += new
    said = [action.event for action in actions if action.kind == "warn"]
    assert said == [action.event for action in actions if action.kind == "callback"]
    return said


def test_what_is_said_of_a_leak() -> None:
    (first, *more) = follow(lambda t: 100 * MIB + int(16 * t) * MIB, 60)
    assert first.text == (
        "unaccounted memory grows by 16.0 MiB/s and is 148.0 MiB on " + UUID + ": no framework says that it "
        "holds it. Does a library or an extension allocate by itself?"
    )
    sizes = [(event.bytes or 0) // MIB for event in (first, *more)]
    assert sizes[0] == 148 and all(2 * a <= b <= 2 * a + 16 for a, b in pairwise(sizes))
    assert len(sizes) == 3, "again when it has doubled"


def test_a_leak_that_ends_and_begins_again_is_said_again() -> None:
    def level(t: float) -> int:
        return int((10 * t if t < 20 else 0 if t < 400 else 10 * (t - 400)) * MIB)

    times = [event.time - BEGIN for event in follow(level, 406)]
    assert len(times) == 4 and times[0] <= 5 and 400 < times[-1] <= 405


@pytest.mark.parametrize("interval", [0.1, 0.5, 1.0])
@pytest.mark.parametrize(
    "level",
    [
        lambda t: None,
        lambda t: 0,
        lambda t: -int(16 * t) * MIB,
        lambda t: (31 * MIB if t > 5 else 0) + 512 * MIB,
        lambda t: 512 * MIB if t > 5 else 0,
        lambda t: (66 * MIB if t > 5 else 0) + (64 * MIB if t > 7 else 0) + (98 * MIB if t > 11 else 0),
        lambda t: int(30 * min(t / 60, 1)) * MIB,
        lambda t: int(200 * (1 - 0.5 ** (t / 2))) * MIB if t < 1 else 60 * MIB,
        lambda t: int(500 * abs(t % 4 - 2)) * MIB,
        lambda t: random.Random(t).randint(0, 500) * MIB,
        lambda t: sum(2**n * MIB for n in range(1, 9) if t > 4 * n),
    ],
    ids=["unknown", "nothing", "falls", "a step", "a large step", "three first uses", "little", "fills at once", "saw",
         "noise", "a pool that doubles"],
)  # fmt: skip
def test_what_is_no_leak_is_not_said(level: Callable[[float], int | None], interval: float) -> None:
    assert follow(level, 600, interval) == []


def test_each_gpu_is_followed_by_itself() -> None:
    state, said = START, []
    for number in range(20):
        one, other = (alone(number / 2, size, uuid) for size, uuid in ((number * 8 * MIB, UUID), (0, "GPU-1")))
        state, actions = decide(Settings(), Sample(one.time, one.devices + other.devices), state)
        said += [action.event for action in actions if action.kind == "warn"]
    assert {event.uuid for event in said} == {UUID}


# Which libraries are loaded


def test_the_loaded_libraries_are_those_that_the_kernel_maps(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    lines = [
        "7f0000000000-7f0000100000 r-xp 00000000 08:01 11  /venv/nvidia/cu13/lib/libcublas.so.13",
        "7f0000200000-7f0000300000 r--p 00000000 08:01 12  /venv/nvidia/cu13/lib/libcublasLt.so.13",
        "7f0000400000-7f0000500000 r-xp 00000000 08:01 13  /opt/with space/libcusolver.so.11.7.1",
        "7f0000600000-7f0000700000 r-xp 00000000 08:01 14  /venv/nvidia/cudnn/lib/libcudnn.so.9",
        "7f0000800000-7f0000900000 rw-p 00000000 00:00 0   [heap]",
        "7f0000a00000-7f0000b00000 r-xp 00000000 08:01 15  /home/me/libcufft.so.d/data.bin",
    ]
    maps.write_text("\n".join(lines[:2]) + "\n")
    assert loaded_libraries.libraries(str(maps)) == {"cublas"}
    maps.write_text("\n".join(lines) + "\n")
    found = loaded_libraries.libraries(str(maps))
    assert {"cublas", "cusolver"} <= found and "cudnn" not in found, "cuDNN comes with an import, and is used later"
    maps.write_text("7f00-7f01 r-xp 0 08:01 1 /x/libcudnn_graph.so.9\n7f00-7f01 r-xp 0 08:01 1 /x/libcufft.so.12\n")
    assert loaded_libraries.libraries(str(maps)) == {"cudnn", "cufft"}
    maps.write_bytes(b"\xff\xfe /x/libcu\xff\n")
    assert loaded_libraries.libraries(str(maps)) == frozenset()
    assert loaded_libraries.libraries(str(tmp_path / "nothing")) == frozenset(LIBRARIES), "each of them may be"
    assert loaded_libraries.libraries() <= set(LIBRARIES)
    assert RealHost.libraries(object.__new__(RealHost)) == loaded_libraries.libraries()


class Listing(SimulatedHost):
    looks = 0

    def libraries(self) -> frozenset[str]:
        self.looks += 1
        return super().libraries()


@pytest.mark.usefixtures("simulated_time")
def test_the_libraries_are_looked_up_only_where_one_may_be_behind_the_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "open_host", lambda names: host)
    host = Listing(["h200"])
    guard = memguard.init({"version": 1, "frameworks": {"torch": {"limit": "4GiB"}}}, simulate="h200")
    framework = guard.frameworks["torch"]
    assert isinstance(framework, SimulatedFramework)
    gpu: Device = host.devices()[0]

    def looks(grow: int = 0, seconds: float = 0.5) -> int:
        clock[0] += seconds
        host.take(gpu, grow)
        before = host.looks
        memguard.ledger()
        return host.looks - before

    assert looks() == 0, "nothing is there"
    framework.allocate(MIB)
    assert looks() == 1, "torch"
    assert looks() == looks(8 * MIB) == 0
    assert looks(16 * MIB, 2) == 1, "cuDNN?"
    assert looks(16 * MIB) == 0, "it was none a moment ago"
    assert looks(16 * MIB, 1) == 1
    host.load("cudnn", "cusolver")
    before = memguard.ledger().devices[0].row("overhead").bytes or 0
    assert looks(98 * MIB, 5) == 1
    assert memguard.ledger().devices[0].row("overhead").bytes == before + 98 * MIB
    host.load("cublas")
    assert looks(66 * MIB) == 1, "the last look showed a new one"
