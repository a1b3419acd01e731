"""The whole of memguard on each kind of GPU: with memory of its own, with the machine's, a MIG slice, under WSL.

A new kind is one row of `KINDS`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import memguard
from memguard import api
from memguard._base.units import GIB, MIB
from memguard._devices import catalog
from memguard._devices.catalog import CATALOGUE, Model
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.simulated.adapter import SimulatedFramework
from memguard._ledger.types import DeviceLedger
from memguard._runtime import runtime
from memguard._tools.simulate.replay import host_of, simulate
from memguard._tools.simulate.trace import read
from memguard.cli import main
from memguard.errors import BudgetExceeded, PlanError

sys.path.insert(0, str(Path(__file__).parents[1] / "doctor"))
from doctor_facts import findings, load

from memguard._tools.doctor import DoctorReport, render


@dataclass(frozen=True)
class Kind:
    """A row. `gpu` is a name of the catalogue or a model of the test's own; `facts` what the doctor reads there."""

    gpu: str | Model
    facts: str
    unified: bool = False
    process_known: bool = True
    note: str = ""


KINDS = {
    "discrete": Kind("h200", "healthy-h200.json"),
    "unified": Kind("gb10", "unified-memory.json", unified=True),
    "unified, no list of processes": Kind("jetson-agx-orin", "unified-memory.json", True, process_known=False),
    "mig slice": Kind(Model("NVIDIA H100 80GB HBM3 MIG 2g.20gb", "hopper", 20_096 * MIB, 60 * MIB, 32), "mig.json"),
    "wsl": Kind(
        Model("NVIDIA GeForce RTX 3090", "ampere", 24_576 * MIB, 400 * MIB, 82, processes="pids", spills=True),
        "wsl.json", process_known=False, note="this is WSL",
    ),
}  # fmt: skip
BUDGET: dict[str, Any] = {
    "version": 1,
    "device": {"limit": "16GiB", "reserve": "2GiB"},
    "frameworks": {"torch": {"limit": "6GiB"}, "cupy": {"limit": "4GiB"}, "tensorflow": {"limit": "3GiB"}},
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def gpu(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name under which `simulate=` and `--device` find it."""
    if isinstance(kind.gpu, str):
        yield kind.gpu
    else:
        monkeypatch.setattr(catalog, "CATALOGUE", {**CATALOGUE, "own-card": kind.gpu})
        yield "own-card"
    memguard.shutdown()


@pytest.fixture
def start(gpu: str) -> Callable[..., dict[str, SimulatedFramework]]:
    def begin(**more: Any) -> dict[str, Any]:
        return dict(memguard.init({**BUDGET, **more}, simulate=gpu).frameworks)

    return begin


def check_sum(part: DeviceLedger) -> None:
    """The identity of this kind, to the byte; what is unknown is None, and is never counted."""
    if not part.device.unified:
        assert part.sum == part.device.total
        return
    assert [part.row(name).bytes for name in ("other processes", "driver reserve")] == [None, None]
    if part.process is None:
        assert part.sum is None and part.row("unaccounted").bytes is None and part.row("overhead").bytes is None
    else:
        assert part.sum == part.process


def test_every_kind_is_what_it_says(kind: Kind, gpu: str) -> None:
    host = SimulatedHost([gpu])
    device = host.devices()[0]
    memory = host.memory(device)
    assert device.unified is kind.unified and (memory.used is None) is kind.unified
    host.open_context(device)
    known = host.processes(device).get(host.pid) is not None
    assert known is kind.process_known and host.spills is bool(kind.note)
    assert device.usable == host.memory(device).free + 518 * MIB


def test_init_the_plan_and_what_is_printed(
    kind: Kind, start: Callable[..., dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    start()
    guard = api.current()
    part = guard.plan.devices[0]
    assert part.limit == 16 * GIB and part.caps["torch"] == 6 * GIB and part.limit <= part.device.usable
    assert part.device.name in str(guard)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [kind.note in text for text in said] == ([True] if kind.note else [])
    assert any(kind.note in note for note in memguard.ledger().notes) if kind.note else True


def test_the_ledger_adds_up_and_shows_what_is_unknown(kind: Kind, start: Callable[..., dict[str, Any]]) -> None:
    frameworks = start()
    before = memguard.ledger().devices[0]
    assert before.process == 0 and before.row("free").bytes is not None  # nothing is live: it surely holds nothing
    torch, cupy = frameworks["torch"], frameworks["cupy"]
    torch.allocate(3 * GIB)
    cupy.free(cupy.allocate(GIB))
    ledger = memguard.ledger()
    (part,) = ledger.devices
    check_sum(part)
    assert (part.process is not None) is kind.process_known
    assert part.row("torch").bytes == 3 * GIB and part.row("cupy").cached == GIB
    text, html, plain = str(ledger), ledger._repr_html_(), json.loads(ledger.to_json())["devices"][0]
    assert plain["unified"] is kind.unified and plain["total"] == part.device.total
    for shown in (text, html):
        assert ("total by CUDA" in shown) is kind.unified
        assert "unknown" in shown or (kind.process_known and not kind.unified)
    sample = api.current().sample().devices[0]
    assert (sample.used is None) is kind.unified and (sample.process is None) is not kind.process_known
    assert sample.frameworks["torch"].held == 3 * GIB and sample.free == part.row("free").bytes


def test_admission_and_workloads(kind: Kind, start: Callable[..., dict[str, Any]]) -> None:
    frameworks = start()
    torch = frameworks["torch"]
    memguard.require("torch", "5GiB")
    with pytest.raises(BudgetExceeded, match="its cap is"):
        memguard.require("torch", "7GiB")
    with memguard.workload("step", framework="torch", needs="2GiB") as report:
        array = torch.allocate(2 * GIB)
    assert report.delta == report.peak == 2 * GIB
    host = api.current().host
    assert isinstance(host, SimulatedHost)
    device = host.devices()[0]
    host.occupy(device, 999, host.memory(device).free - GIB)  # another program, of the CPU if the memory is shared
    with pytest.raises(BudgetExceeded, match="the machine, whose memory" if kind.unified else "the card has only"):
        memguard.require("torch", "3GiB")
    torch.free(array)
    memguard.require("torch", "3GiB")  # its own cache serves it
    check_sum(memguard.ledger().devices[0])


def test_resize_and_trim(start: Callable[..., dict[str, Any]]) -> None:
    frameworks = start()
    torch = frameworks["torch"]
    memguard.resize("torch", "4GiB")
    assert memguard.ledger().devices[0].row("torch").cap == 4 * GIB
    torch.free(torch.allocate(2 * GIB))
    assert memguard.trim() == 2 * GIB
    assert memguard.trim("torch") == 0


@pytest.mark.parametrize("on_busy", ["warn", "raise"])
def test_a_limit_that_is_not_free(
    kind: Kind, gpu: str, on_busy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = SimulatedHost([gpu])
    device = host.devices()[0]
    host.occupy(device, 999, host.memory(device).free - 10 * GIB)
    monkeypatch.setattr(runtime, "open_host", lambda names: host)
    says = "the machine's memory, of which programs and the system hold the rest" if kind.unified else "other processes"
    if on_busy == "raise":
        with pytest.raises(PlanError, match=says):
            memguard.init({**BUDGET, "on_busy": "raise"}, simulate=gpu)
        return
    memguard.init(BUDGET, simulate=gpu)
    assert "10.00 GiB left for this process" in caplog.text and says in caplog.text


def test_monitor_timeline_replay_and_pressure(
    kind: Kind, start: Callable[..., dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frameworks = start(monitor={"interval": "50ms", "timeline": str(tmp_path / "run-{pid}.jsonl")})
    path = tmp_path / f"run-{os.getpid()}.jsonl"
    frameworks["torch"].allocate(4 * GIB)
    frameworks["torch"].allocate(1900 * MIB)
    with pytest.raises(Exception, match="out of memory"), memguard.workload("step", framework="torch"):
        frameworks["torch"].allocate(GIB)
    monitor = api.current_session().monitor
    assert monitor is not None
    end = time.monotonic() + 60
    while "pressure critical: torch" not in caplog.text:
        assert time.monotonic() < end, caplog.text
        time.sleep(0.02)
    host = api.current().host
    assert isinstance(host, SimulatedHost)
    host.occupy(host.devices()[0], 999, host.memory(host.devices()[0]).free - GIB)
    said = "the machine's memory, which this GPU uses, is taken" if kind.unified else "hold the rest of the card"
    while said not in caplog.text:
        assert time.monotonic() < end, caplog.text
        time.sleep(0.02)
    memguard.shutdown()
    timeline = memguard.load_timeline(path)
    assert timeline.plan.devices[0].device.unified is kind.unified
    last = list(timeline.samples())[-1].devices[0]
    assert (last.used is None) is kind.unified and last.frameworks["torch"].held is not None
    assert list(timeline.ooms()) and not [r for r in caplog.records if "could not" in r.getMessage()]
    done = CliRunner().invoke(main, ["replay", str(path)])
    assert "torch" in done.output and "replay of" in done.output and done.exit_code in (0, 1), done.output
    (tmp_path / "budget.yaml").write_text(json.dumps({"version": 1, "frameworks": {"torch": {"limit": "2GiB"}}}))
    done = CliRunner().invoke(main, ["replay", str(path), "-c", str(tmp_path / "budget.yaml")])
    assert done.exit_code == 1 and "would have been refused" in done.output


def test_the_report_of_an_out_of_memory_error(kind: Kind, start: Callable[..., dict[str, Any]]) -> None:
    frameworks = start()
    torch = frameworks["torch"]
    torch.allocate(5 * GIB)
    with pytest.raises(Exception, match="out of memory"), memguard.workload("step", framework="torch"):
        torch.allocate(2 * GIB)
    report = memguard.last_oom()
    assert report is not None and report.reason == "cap" and report.requester == "torch"
    assert "cap of 6.00 GiB is reached" in str(report) and "unknown" not in report.why
    host = api.current().host
    assert isinstance(host, SimulatedHost)
    device = host.devices()[0]
    host.occupy(device, 999, host.memory(device).free - 64 * MIB)
    with pytest.raises(Exception, match="out of memory") as raised, memguard.workload("step", framework="cupy"):
        frameworks["cupy"].allocate(GIB)
    report = memguard.last_oom()
    assert report is not None and report.reason == "card" and json.dumps(report.as_dict())
    texts = [report.why, str(report), report.note, str(raised.value), *(one.text for one in report.remedies)]
    for text in texts:
        assert not kind.unified or not re.search("the card|another GPU|nvidia-smi", text), text
    if kind.unified:
        assert "the machine's memory is full" in report.why and "the machine's memory is full" in str(raised.value)
        assert "the machine's memory" in str(report).partition("why")[0]
        assert any("free -h" in remedy.text for remedy in report.remedies)


def test_a_trace_is_recorded_and_replayed(
    kind: Kind, start: Callable[..., dict[str, Any]], gpu: str, tmp_path: Path
) -> None:
    frameworks = start()
    frameworks["torch"].allocate(MIB)
    with memguard.record_trace(tmp_path / "trace.jsonl"):
        array = frameworks["torch"].allocate(GIB)
        time.sleep(0.02)
        frameworks["torch"].free(array)
    memguard.shutdown()
    recorded = read(tmp_path / "trace.jsonl").header
    (device,) = host_of(recorded).devices()
    assert recorded.devices[0].unified is device.unified is kind.unified
    outcome = simulate(read(tmp_path / "trace.jsonl"))
    assert outcome.ledger is not None
    replayed = outcome.ledger.devices[0]
    assert replayed.sum == (replayed.process if kind.unified else replayed.device.total)
    (tmp_path / "budget.yaml").write_text(json.dumps(BUDGET))
    for options in ([], ["--device", gpu], ["--json"]):
        words = ["replay", "-c", str(tmp_path / "budget.yaml"), str(tmp_path / "trace.jsonl"), *options]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0 and "simulated" in done.output, done.output


def test_the_commands_without_a_gpu(kind: Kind, gpu: str, tmp_path: Path) -> None:
    path = tmp_path / "budget.yaml"
    path.write_text(json.dumps(BUDGET))
    assert CliRunner().invoke(main, ["check", str(path)]).exit_code == 0
    done = CliRunner().invoke(main, ["plan", str(path), "--device", gpu])
    name = kind.gpu.name if isinstance(kind.gpu, Model) else CATALOGUE[kind.gpu].name
    assert done.exit_code == 0 and f"{name} (simulated)" in " ".join(done.output.split()), done.output
    plan = json.loads(CliRunner().invoke(main, ["plan", str(path), "--device", gpu, "--json"]).output)
    assert plan["devices"][0]["limit"] == 16 * GIB
    path.write_text(json.dumps({**BUDGET, "device": {"limit": "900GiB"}}))
    done = CliRunner().invoke(main, ["plan", str(path), "--device", gpu])
    assert done.exit_code == 2


def test_the_doctor_reads_facts_of_this_kind(kind: Kind) -> None:
    found = {finding.name for finding in findings(kind.facts)}
    assert ("unified-memory" in found) is kind.unified
    assert ("sysmem-fallback" in found) is bool(kind.note)
    assert render.text(DoctorReport(load(kind.facts), findings(kind.facts)))


steps = st.lists(
    st.tuples(
        st.sampled_from(["torch", "cupy", "pycuda", "numba", "jax", "tensorflow", "trim", "other", "free"]),
        st.integers(1, 3 * GIB),
    ),
    max_size=12,
)


@settings(max_examples=120)
@given(st.sampled_from(list(KINDS)), steps)
def test_the_identity_holds_whatever_is_allocated(name: str, done: list[tuple[str, int]]) -> None:
    kind = KINDS[name]
    host = SimulatedHost([kind.gpu])
    own = runtime.open_host
    runtime.open_host = lambda names: host
    names = ("torch", "cupy", "pycuda", "numba", "jax", "tensorflow")
    budget = {"version": 1, "device": {"limit": "16GiB"}, "frameworks": {name: {"share": "16%"} for name in names}}
    try:
        guard = memguard.init(budget, simulate="h200")
        device, arrays = host.devices()[0], []
        for who, size in done:
            try:
                if who == "trim":
                    memguard.trim()
                elif who == "other":
                    host.occupy(device, 999, size)
                elif who == "free" and arrays:
                    framework, array = arrays.pop(size % len(arrays))
                    framework.free(array)
                elif who in names:
                    one: Any = guard.frameworks[who]
                    arrays.append((one, one.allocate(size)))
            except RuntimeError:
                pass
            (part,) = memguard.ledger().devices
            check_sum(part)
            free = part.row("free").bytes
            assert free is not None and 0 <= free <= part.device.total
            sample = guard.sample().devices[0]
            assert sample.process == part.process and sample.free == free
    finally:
        memguard.shutdown()
        runtime.open_host = own
