"""benchmarks/leases.py: it runs whole over a stand-in for the card, and each of its checks can fail."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lease_results
import pytest

pytestmark = pytest.mark.long  # no version of what is installed changes what the benchmarks' own code does

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
leases: Any = importlib.import_module("leases")
turns: Any = importlib.import_module("_leases_turns")
checks: Any = importlib.import_module("_leases_checks")
stand_in: Any = importlib.import_module("_leases_stand_in")
table: Any = importlib.import_module("table")
listed: Any = importlib.import_module("_listed")
GIB = 1 << 30


@pytest.fixture
def rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(leases, "REHEARSAL", str(tmp_path))
    for module in (leases, checks):
        monkeypatch.setattr(module, "WAITS", 0.5)
    return tmp_path


def outcomes(part: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    leases.ran(leases.PARTS[part], found.__setitem__)
    return found


def listed_of(part: str) -> list[str]:
    return [name for scenario in leases.PARTS[part] for name in listed.LEASES[scenario]]


def test_four_fit_and_a_fifth_waits_over_a_stand_in(rehearsal: Path) -> None:
    result = outcomes("four")
    result["together"]["looks"] = max(result["together"].get("looks", 0), 20)  # it is over before that
    result["together"]["fifth"]["after_end_s"] = min(result["together"]["fifth"]["after_end_s"], 1.0)  # a busy machine
    found = leases.lease_checks(result)
    assert list(found) == listed.names(listed.LEASES)
    assert all(found[name][0] for name in listed_of("four")), found
    assert len(result["control"]["died"]) >= 1 and result["control"]["full"] <= 4


def test_two_take_turns_over_simulated_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only a GPU has, is put in: what each had on the card at most, and in host memory."""
    for name, value in {"REHEARSAL": str(tmp_path), "ON_DEMAND": 1, "WORK": 0.2, "PAUSE": 5.0}.items():
        monkeypatch.setattr(turns, name, value)
    for module in (turns, checks):
        monkeypatch.setattr(module, "WAIT", 2)
        monkeypatch.setattr(module, "COUNT", 2)
    told: list[dict[str, Any]] = []
    found: dict[str, Any] = {}

    def add(name: str, outcome: dict[str, Any]) -> None:
        told.append(copy.deepcopy(outcome))
        found[name] = outcome

    leases.ran(leases.PARTS["turns"], add)
    one = found["turns"]
    assert one["returncode"] == 0, one
    assert [len(turn["turns"]["first"]) for turn in told[:3]] == [1, 1, 2] and told[0]["returncode"] == 1
    assert one["most_host"] > 0
    assert len(one["nvml"]["changes"]) > 2 and len(one["leases"]["states"]) > 1  # a busy machine looks seldom
    one["most_host"] = 88 * GIB
    one["available_after"] = one["available"]  # others use this machine
    one["leases"]["looks"] = max(one["leases"]["looks"], 20)
    result = leases.lease_checks(found)
    assert [(name, result[name]) for name in listed_of("turns") if not result[name][0]] == []


WORSE: dict[str, tuple[Callable[[Any], object], tuple[Any, ...]]] = {
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
    "a turn less": (lambda one: one["turns"]["turns"]["first"].pop(0), ("turns", 0, 1)),
    "one twice in a row": (lambda one: one["turns"]["turns"]["second"][0].update(served=200.0), ("turns", 0, 1)),
    "it fills a part": (lambda one: one["turns"]["filled"].update(first=30 * GIB), ("turns", 0)),
    "room for both": (lambda one: one["turns"].update(room=88 * GIB), ("turns", 0)),
    "late": (lambda one: one["turns"]["turns"]["first"][2].update(asked=-60.0), ("turns", 1)),
    "a wrong bit": (lambda one: one["turns"]["turns"]["second"][1].update(wrong=1), ("turns", 2)),
    "it never left": (lambda one: one["turns"]["turns"]["second"][2]["back"].clear(), ("turns", 2)),
    "both on the card": (lambda one: one["turns"]["nvml"].update(both=1), ("turns", 3)),
    "more than the card": (lambda one: one["turns"]["nvml"].update(over=1), ("turns", 3)),
    "more than its lease": (lambda one: one["turns"]["nvml"]["most"].update(second=45 * GIB), ("turns", 3)),
    "nobody looked": (lambda one: one["turns"]["nvml"].update(looks=3), ("turns", 3)),
    "a wrong sum": (lambda one: one["turns"]["leases"].update(wrong_sums=1), ("turns", 4)),
    "both hold": (lambda one: one["turns"]["leases"].update(both=1), ("turns", 4)),
    "a listing that failed": (lambda one: one["turns"]["leases"].update(failed=["no"]), ("turns", 4)),
    "not both in host memory": (lambda one: one["turns"].update(most_host=44 * GIB), ("turns", 5)),
    "a wrong bit at last": (lambda one: one["turns"]["alone"].update(wrong=1), ("turns", 6)),
    "a lease that stays": (lambda one: one["turns"]["left"].update(claims=1), ("turns", 6)),
    "one on the card at last": (lambda one: one["turns"]["left"].update(listed=["first"]), ("turns", 6)),
    "host memory that stays": (lambda one: one["turns"].update(available_after=80 * GIB), ("turns", 6)),
    "not refused": (lambda one: one["without suspend-idle"].update(refused=None), ("without suspend-idle", 0)),
    "refused at once": (lambda one: one["without suspend-idle"].update(waited=0.1), ("without suspend-idle", 0)),
    "nobody is named": (lambda one: one["without suspend-idle"].update(first=43), ("without suspend-idle", 0)),
    "the first left": (lambda one: one["without suspend-idle"].update(out=1), ("without suspend-idle", 0)),
}


@pytest.mark.parametrize("name", WORSE)
def test_each_check_can_fail(name: str) -> None:
    change, (scenario, *places) = WORSE[name]
    result = copy.deepcopy(lease_results.whole())
    assert all(passed for passed, _ in leases.lease_checks(result).values())
    change(result)
    failed = [name for name, (passed, _) in leases.lease_checks(result).items() if not passed]
    assert failed == [listed.LEASES[scenario][place] for place in places]


def test_what_breaks_off_fails_its_checks() -> None:
    broken = {**lease_results.whole(), "together": leases.attempt(lambda: 1 / 0)}
    found = leases.lease_checks(broken)
    assert [passed for passed, _ in found.values()] == [False] * 6 + [True] * 9
    assert "ZeroDivisionError" in str(found)


def test_the_documents_have_its_table_once_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    assert table.leases() == []
    about = {"command": "python benchmarks/leases.py", "date": "2026-01-01T", "memguard_hash": "x", "gpu": None}
    result = {
        "about": {**about, "versions": {}},
        "scenarios": lease_results.whole(),
        "checks": leases.lease_checks(lease_results.whole()),
    }
    (tmp_path / "h200-leases.json").write_text(json.dumps(result))
    text = "\n".join(table.leases())
    assert "| the fifth | 31.00 GiB | 32.00 GiB |" in text
    assert "1.50 s after the first was told to end. Without leases 1 of five died: jax." in text
    assert "| second | 40.00 GiB | 50, 50, 50 | 30, 30 | 30, 30 |" in text


def test_what_ends_a_run_loses_nothing_and_another_part_is_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rehearsal: Path
) -> None:
    output = tmp_path / "1.json"
    one = leases.kept(output, {})
    one.add("together", lease_results.whole()["together"])
    cut = {**lease_results.in_turn(), "returncode": 1, "stderr_tail": "it was cut off"}
    one.add("turns", cut)
    found = json.loads(output.read_text())
    assert [*found["scenarios"]] == ["together", "turns"]
    passed = [name for name, (good, _) in found["checks"].items() if good]
    assert passed == list(listed.LEASES["together"])
    assert "it was cut off" in found["checks"][listed.LEASES["turns"][0]][1]
    ran: list[str] = []
    monkeypatch.setattr(leases, "ran", lambda names, add: ran.extend(names))
    monkeypatch.setattr(sys, "argv", ["leases.py", "--merge", str(output), "-o", str(tmp_path / "2.json")])
    leases.main()
    assert ran == ["control", "without suspend-idle"]


def test_the_stand_in_refuses_what_it_has_not_and_forgets_the_dead(tmp_path: Path) -> None:
    card = stand_in.Card(str(tmp_path))
    card.take(100 * GIB)
    with pytest.raises(MemoryError):
        card.take(50 * GIB)
    (size,) = card.listed().values()
    assert size == 100 * GIB + stand_in.CONTEXT
    (tmp_path / "card.json").write_text(json.dumps({str(2**22): 100 * GIB}))
    assert card.listed() == {} and card.take(100 * GIB)
