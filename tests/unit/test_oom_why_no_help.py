"""Why no room was made for a refused request: in the record, the report's text and data, and the timeline's event."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import memguard
from memguard import api
from memguard._base.types import NoHelp
from memguard._frameworks.simulated.adapter import SimulatedFramework
from memguard._guard import elastic
from memguard._oom.report import Report

GIB = 1 << 30
ELASTIC = {"torch": {"min": "10%", "max": "70%"}, "cupy": {"min": "10%", "max": "70%"}}
FIXED = {"torch": {"limit": "10GiB"}, "cupy": {"limit": "20GiB"}}
Frameworks = dict[str, SimulatedFramework]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    memguard.shutdown()


class Case(NamedTuple):
    kind: NoHelp | None
    text: str
    budget: dict[str, Any]
    prepare: Callable[[Frameworks, pytest.MonkeyPatch], object]
    who: str = "cupy"
    size: int = 20
    first: str = ""
    """How the first remedy begins."""


def torch_has(size: int) -> Callable[[Frameworks, pytest.MonkeyPatch], object]:
    return lambda frameworks, patch: frameworks["torch"].allocate(size * GIB)


def captures(frameworks: Frameworks, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(frameworks["cupy"], "capturing", lambda: True)
    frameworks["torch"].allocate(20 * GIB)


def captures_and_asks_nobody(frameworks: Frameworks, patch: pytest.MonkeyPatch) -> None:
    """As the real CuPy, PyCUDA and Numba do."""
    captures(frameworks, patch)
    frameworks["cupy"].on_shortage = None


def asks_nobody(frameworks: Frameworks, patch: pytest.MonkeyPatch) -> None:
    frameworks["torch"].allocate(20 * GIB)
    frameworks["cupy"].on_shortage = None


def communicates(frameworks: Frameworks, patch: pytest.MonkeyPatch) -> None:
    frameworks["torch"].allocate(20 * GIB)
    patch.setattr(frameworks["torch"], "communicating", lambda: True)
    patch.setattr(elastic.thread_flags, "started_by_memguard", True, raising=False)


def fills_the_card(frameworks: Frameworks, idle: int) -> None:
    """With another process's memory, but for 1 GiB; so many GiB idle in CuPy's cache."""
    guard = api.current()
    (device,) = guard.host.devices()
    frameworks["cupy"].free(frameworks["cupy"].allocate(idle * GIB))
    frameworks["torch"].start_importing()
    frameworks["torch"].free(frameworks["torch"].allocate(GIB))
    frameworks["torch"].trim(device)
    guard.host.occupy(device, 4242, guard.host.memory(device).free - GIB)  # type: ignore[attr-defined]


def full_for_torch(frameworks: Frameworks, patch: pytest.MonkeyPatch) -> None:
    fills_the_card(frameworks, 8)


def full(frameworks: Frameworks, patch: pytest.MonkeyPatch) -> None:
    fills_the_card(frameworks, 1)


CASES = {
    "a capture": Case(
        NoHelp.CAPTURE, "a CUDA graph is being captured on this thread", ELASTIC, captures, first="run the work once"
    ),
    "a capture, in which the allocator does not ask": Case(
        NoHelp.CAPTURE, "a CUDA graph is being captured on this thread", ELASTIC, captures_and_asks_nobody
    ),
    "communicators": Case(
        NoHelp.COMMUNICATORS, "torch has communicators, for which other processes wait", ELASTIC, communicates,
        first="do it on a thread of the program",
    ),
    "nothing idle": Case(NoHelp.NOTHING_IDLE, "too little was idle elsewhere", ELASTIC, torch_has(20)),
    "an allocator that never asks": Case(
        NoHelp.NOT_ASKED, "torch's allocator does not ask", FIXED, full_for_torch, "torch", 5,
        "cupy holds 8.00 GiB reclaimable: memguard.trim('cupy') frees it",
    ),
    "an allocator that could not ask": Case(
        NoHelp.NOT_ASKED, "cupy's allocator could not ask", ELASTIC, asks_nobody
    ),
    "a fixed cap, which no room helps": Case(None, "", FIXED, torch_has(1), size=21),
    "a capture under a fixed cap": Case(
        None, "", {"torch": {"limit": "20GiB"}, "cupy": {"limit": "10GiB"}}, captures, size=21
    ),
    "a full GPU without an idle sibling": Case(None, "", FIXED, full, "torch", 5),
    "a full GPU, and more than a fixed cap": Case(None, "", FIXED, full_for_torch, "torch", 11),
    "more than the most of an elastic cap": Case(None, "", ELASTIC, torch_has(1), size=30),
}  # fmt: skip


def refused(case: Case, path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    guard = memguard.init(
        {
            "version": 1,
            "device": {"limit": "40GiB"},
            "frameworks": case.budget,
            "monitor": {"interval": "10s", "timeline": str(path)},
        },
        simulate="h200",
    )
    frameworks = {name: one for name, one in guard.frameworks.items() if isinstance(one, SimulatedFramework)}
    with monkeypatch.context() as patch:
        case.prepare(frameworks, patch)
        with pytest.raises(Exception, match="out of memory"):
            frameworks[case.who].allocate(case.size * GIB)
    report = memguard.last_oom()
    assert report is not None and report.moment is not None
    return report


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_reason_is_said(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = refused(case, tmp_path / "run.jsonl", monkeypatch)
    assert report.moment is not None
    memguard.shutdown()
    (event,) = [one for one in memguard.load_timeline(next(tmp_path.glob("*.jsonl"))).events() if one.kind == "refused"]
    data = report.as_dict()["moment"]["why_no_help"]
    if case.kind is None:
        assert report.moment.why_no_help is None and data is None
        assert "no room was made" not in report.why + event.text
        return
    assert report.moment.why_no_help == (case.kind, case.text) and data == {"kind": case.kind.value, "text": case.text}
    if case.kind in (NoHelp.NOTHING_IDLE, NoHelp.NOT_ASKED):
        assert report.why.endswith(f"; no room was made: {case.text}")
    else:
        assert report.why.startswith(f"no room was made for it: {case.text}; ")
    assert case.text in " ".join(str(report).split()), "it is not cut off"
    assert event.text.endswith(f"; no room was made for it: {case.text}")
    assert report.remedies[0].text.startswith(case.first)
    assert "is reached" not in report.why, "an elastic cap could have been raised"


def test_what_came_back_and_did_not_suffice_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process takes it meanwhile."""

    def prepare(frameworks: Frameworks, patch: pytest.MonkeyPatch) -> None:
        torch, cupy, host = frameworks["torch"], frameworks["cupy"], api.current().host
        (device,) = host.devices()
        torch.free(torch.allocate(8 * GIB))
        cupy.free(cupy.allocate(GIB))
        cupy.trim(device)
        other = host.memory(device).free - GIB
        host.occupy(device, 4242, other)  # type: ignore[attr-defined]
        gives = torch.trim_partly

        def taken(*arguments: Any) -> None:
            gives(*arguments)
            host.occupy(device, 4242, host.memory(device).free + other - 3 * GIB)  # type: ignore[attr-defined]

        patch.setattr(torch, "trim_partly", taken)

    report = refused(Case(None, "", FIXED, prepare, size=8), tmp_path / "run.jsonl", monkeypatch)
    assert report.moment is not None and report.moment.why_no_help is not None
    assert report.moment.why_no_help == (NoHelp.NOTHING_IDLE, "others gave back 8.00 GiB, 5.00 GiB too little")


def test_the_reason_of_one_thread_is_not_that_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ask for the same size; only one is within another call."""
    refused(Case(None, "", FIXED, torch_has(1), size=21), tmp_path / "run.jsonl", monkeypatch)
    guard, reasons = api.current(), {}

    def ask(name: str) -> None:
        with pytest.raises(Exception, match="out of memory"):
            guard.frameworks["cupy"].allocate(21 * GIB)  # type: ignore[attr-defined]
        report = memguard.last_oom()
        assert report is not None and report.moment is not None
        reasons[name] = report.moment.why_no_help and report.moment.why_no_help.kind

    with guard.caps.lock:
        ask("within")
    other = threading.Thread(target=ask, args=["alone"])
    other.start()
    other.join(30)
    assert reasons == {"within": NoHelp.WITHIN_CALL, "alone": None}
