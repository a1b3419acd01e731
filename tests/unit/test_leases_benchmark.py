"""benchmarks/leases.py: it runs whole over a stand-in for the card, and each of its checks can fail."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long  # no version of what is installed changes what the benchmarks' own code does

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
leases: Any = importlib.import_module("leases")
stand_in: Any = importlib.import_module("_leases_stand_in")
table: Any = importlib.import_module("table")
listed: Any = importlib.import_module("_listed")
GIB = 1 << 30


@pytest.fixture
def rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(leases, "REHEARSAL", str(tmp_path))
    monkeypatch.setattr(leases, "WAITS", 0.5)
    return tmp_path


def test_four_fit_and_a_fifth_waits_over_a_stand_in(rehearsal: Path) -> None:
    result = leases.measured()
    result["together"]["looks"] = max(result["together"].get("looks", 0), 20)  # it is over before that
    result["together"]["fifth"]["after_end_s"] = min(result["together"]["fifth"]["after_end_s"], 1.0)  # a busy machine
    found = leases.lease_checks(result)
    assert list(found) == listed.names(listed.LEASES) and all(passed for passed, _ in found.values()), found
    assert len(result["control"]["died"]) >= 1 and result["control"]["full"] <= 4


WORSE: dict[str, tuple[Callable[[Any], object], tuple[str, int]]] = {
    "one fills less": (lambda one: one["together"]["filled"].update(jax=20 * GIB), ("together", 0)),
    "one has more": (lambda one: one["together"]["most"].update(jax=34 * GIB + 1), ("together", 1)),
    "one was not seen": (lambda one: one["together"]["most"].update(jax=0), ("together", 1)),
    "a wrong value": (lambda one: one["together"]["right"].update(b=False), ("together", 2)),
    "it does not wait": (lambda one: one["together"]["fifth"].update(early=True), ("together", 3)),
    "it has a context": (lambda one: one["together"]["fifth"].update(meanwhile=5 << 20), ("together", 3)),
    "it starts late": (lambda one: one["together"]["fifth"].update(after_end_s=1.01), ("together", 4)),
    "it starts before": (lambda one: one["together"]["fifth"].update(after_told_s=-0.1), ("together", 4)),
    "a wrong value later": (lambda one: one["together"]["right_after"].update(b=False), ("together", 5)),
    "nobody dies": (lambda one: one["control"]["died"].clear(), ("control", 0)),
}


def whole() -> Any:
    filled = {**dict.fromkeys(leases.JOBS, 31 * GIB), "the fifth": 31 * GIB}
    fifth = {"early": False, "meanwhile": 0, "waited": 9.0, "after_told_s": 1.5, "after_end_s": 0.12}
    right = dict.fromkeys("abcd", True)
    most = {name: size + GIB for name, size in filled.items()}
    together = {"filled": filled, "most": most, "looks": 90, "right": right, "right_after": dict(right), "fifth": fifth}
    return {
        "together": {"returncode": 0, **together},
        "control": {"returncode": 0, "full": 4, "died": {"jax 3": "rc 1: out of memory"}},
    }


@pytest.mark.parametrize("name", WORSE)
def test_each_check_can_fail(name: str) -> None:
    change, (scenario, place) = WORSE[name]
    result = copy.deepcopy(whole())
    assert all(passed for passed, _ in leases.lease_checks(result).values())
    change(result)
    failed = [name for name, (passed, _) in leases.lease_checks(result).items() if not passed]
    assert failed == [listed.LEASES[scenario][place]]


def test_what_breaks_off_fails_its_checks() -> None:
    broken = {"together": leases.attempt(lambda: 1 / 0), "control": whole()["control"]}
    found = leases.lease_checks(broken)
    assert [passed for passed, _ in found.values()] == [False] * 6 + [True]
    assert "ZeroDivisionError" in str(found)


def test_the_documents_have_its_table_once_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    assert table.leases() == []
    about = {"command": "python benchmarks/leases.py", "date": "2026-01-01T", "memguard_hash": "x", "gpu": None}
    result = {"about": {**about, "versions": {}}, **whole(), "checks": leases.lease_checks(whole())}
    (tmp_path / "h200-leases.json").write_text(json.dumps(result))
    text = "\n".join(table.leases())
    assert "| the fifth | 31.00 GiB | 32.00 GiB |" in text
    assert "0.12 s after the end of the first. Without leases 1 of five died." in text


def test_the_stand_in_refuses_what_it_has_not_and_forgets_the_dead(tmp_path: Path) -> None:
    card = stand_in.Card(str(tmp_path))
    card.take(100 * GIB)
    with pytest.raises(MemoryError):
        card.take(50 * GIB)
    (size,) = card.listed().values()
    assert size == 100 * GIB + stand_in.CONTEXT
    (tmp_path / "card.json").write_text(json.dumps({str(2**22): 100 * GIB}))
    assert card.listed() == {} and card.take(100 * GIB)
