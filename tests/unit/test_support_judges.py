"""What tests/gpu asserts of frameworks at their caps and of reports: the right passes, each wrong figure fails."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from support import at_caps, reports
from support.driving import GIB, MIB, bfc_refusals

pytestmark = pytest.mark.long  # no version of what is installed changes what this code does

CAP = 8 * GIB
LOG = "Total size in pool: 7.99GiB memory_limit_: {} available size: {}\n"
Spoil = Callable[[dict[str, Any]], object]


def at_their_caps() -> dict[str, Any]:
    refused = [
        {"refused_bytes": 300 * MIB, "native": True, "exception": "x"},
        {"refused_bytes": MIB, "native": True, "exception": "x"},
    ]
    one = {"cap": CAP, "most_held": CAP - MIB, "refusals": refused}
    steps = [("init", 0, 0), ("full", 3 * MIB, 500 * MIB)]
    readings = [{"label": n, "unaccounted": u, "overhead": o, "sum_minus_total": 0} for n, u, o in steps]
    raw = [
        {"bytes": size, "unaccounted": [MIB, MIB + size, MIB], "nvml": [GIB, GIB + size, GIB]}
        for size in (16 * MIB, 100 * MIB, 300 * MIB)
    ]
    return {
        "driven": {"tensorflow": one, "torch": copy.deepcopy(one)},
        "caps": {"tensorflow": CAP, "torch": CAP},
        "emptied": {"torch": {"name": "torch", "held": [CAP, 0], "nvml": [CAP + GIB, GIB]}},
        "raw": raw,
        "readings": readings,
        "reserve": GIB,
        "stderr": LOG.format("8.00GiB", "20.00MiB") + LOG.format("8.00GiB", "512B"),
        "nvml": {
            "samples": 3000, "interval_ms": 20.0, "longest_gap_ms": 40.0, "wall_s": 80.0, "max_bytes": 39 * GIB
        },
    }  # fmt: skip


SPOILT: dict[str, Spoil] = {
    "above its cap": lambda one: one["driven"]["torch"].update(most_held=CAP + 1),
    "early": lambda one: one["driven"]["torch"].update(most_held=CAP // 2),
    "an error of another kind": lambda one: one["driven"]["torch"]["refusals"][1].update(native=False),
    "one refusal": lambda one: one["driven"]["torch"]["refusals"].pop(),
    "its log has room": lambda one: one.update(stderr=one["stderr"].replace("20.00MiB", "400.00MiB")),
    "its log is not there": lambda one: one.update(stderr=""),
    "its pool is above its cap": lambda one: one.update(stderr=one["stderr"].replace("8.00GiB", "8.20GiB")),
    "its row is off": lambda one: one["emptied"]["torch"].update(held=[CAP - 32 * MIB, 0]),
    "raw memory is a framework's": lambda one: one["raw"][1].update(unaccounted=[0, 90 * MIB, 0]),
    "raw memory stays": lambda one: one["raw"][2].update(unaccounted=[0, 300 * MIB, 300 * MIB]),
    "unaccounted": lambda one: one["readings"][1].update(unaccounted=65 * MIB),
    "unaccounted below nothing": lambda one: one["readings"][1].update(unaccounted=-65 * MIB),
    "beyond the reserve": lambda one: one["readings"][1].update(overhead=GIB + 1),
    "no overhead": lambda one: one["readings"][1].update(overhead=0),
    "no sum": lambda one: one["readings"][0].update(sum_minus_total=512),
    "above the limit": lambda one: one["nvml"].update(max_bytes=40 * GIB + 1),
    "a hole in the samples": lambda one: one["nvml"].update(longest_gap_ms=2001.0),
    "few samples": lambda one: one["nvml"].update(samples=100),
}


def test_correct_measurements_pass() -> None:
    at_caps.at_the_caps(at_their_caps(), 2)
    assert len(bfc_refusals(at_their_caps()["stderr"])) == 2


@pytest.mark.parametrize("what", SPOILT)
def test_each_wrong_figure_at_the_caps_is_found(what: str) -> None:
    found = at_their_caps()
    SPOILT[what](found)
    with pytest.raises(AssertionError):
        at_caps.at_the_caps(found, 2)


def reported(full: bool) -> dict[str, Any]:
    rows = {"cupy": 20 * GIB if full else 7 * GIB, "torch": 70 * GIB if full else 2 * GIB}
    idle = 50 * GIB if full else GIB
    holders = [
        {"kind": "framework", "name": name, "bytes": size, "reclaimable": idle if name == "torch" else 0}
        for name, size in sorted(rows.items(), key=lambda row: -row[1])
    ]
    holders.append({"kind": "process", "name": "process 77", "bytes": 40 * GIB + 500 * MIB, "reclaimable": None})
    report = {
        "requester": "cupy", "requested": reports.STEP, "holders": holders, "reason": "card" if full else "cap",
        "why": "so",
    }  # fmt: skip
    freed = {"cupy": 0, "torch": idle}
    return {
        "exception": None, "report": report, "rows": rows, "requester": "cupy", "sibling": "torch", "idle": idle,
        "returned": dict(freed), "by_driver": dict(freed),
    }  # fmt: skip


WRONG: dict[str, Spoil] = {
    "no report": lambda one: one.update(report=None),
    "requester": lambda one: one["report"].update(requester="torch"),
    "size": lambda one: one["report"].update(requested=reports.STEP + 2 * MIB),
    "no size": lambda one: one["report"].update(requested=None),
    "holder": lambda one: one["report"]["holders"].pop(0),
    "its bytes": lambda one: one["report"]["holders"][0].update(bytes=one["report"]["holders"][0]["bytes"] + 3 * MIB),
    "reclaimable": lambda one: one["report"]["holders"][0 if one["rows"]["torch"] > 9 * GIB else 1].update(
        reclaimable=one["idle"] * 2
    ),
    "a trim said more": lambda one: one["returned"].update(torch=one["idle"] * 2),
    "the cache stayed": lambda one: one["by_driver"].update(torch=0),
    "why": lambda one: one["report"].update(reason="unknown"),
}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("what", [None, *WRONG])
def test_each_wrong_figure_of_a_report_is_found(what: str | None, full: bool) -> None:
    found, stranger = reported(full), 77 if full else None
    if what is None:
        return reports.judge(found, stranger)
    WRONG[what](found)
    with pytest.raises(AssertionError):
        reports.judge(found, stranger)
    return None


def test_the_other_process_on_a_full_card_is_named_with_its_bytes() -> None:
    found = reported(True)
    found["report"]["holders"][-1]["bytes"] = 10 * GIB
    with pytest.raises(AssertionError):
        reports.judge(found, 77)


def test_the_oracle_finds_a_cache_that_would_have_served_the_request() -> None:
    found = reported(True) | {"served": True}
    with pytest.raises(AssertionError, match="would have served"):
        reports.judge(found, 77)
    found["report"]["holders"][0]["reclaimable"] = 0
    found |= {"returned": {"cupy": 0, "torch": 0}, "by_driver": {"cupy": 0, "torch": 0}}
    reports.judge(found, 77)
