"""The corpus of facts: `examine` finds in each file what it expects, and nothing else.

A file holds facts as `memguard doctor --dump-facts` writes them (`facts`), or says what to change in another
(`edited_from`, `changes`: a JSON merge patch, RFC 7396), and what is to be found: name, severity, subject.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from doctor_facts import FILES, entry, findings, load

from memguard._base.findings import names, page
from memguard._tools.doctor.facts import Facts

ROOT = Path(__file__).parents[2]
NOT_OURS = re.compile(r"/(home|Users|root|work|tmp)/|/opt/|\b[\w.+-]+@[\w-]+\.\w")
"""Places and people that facts made to be shown do not name."""


@pytest.mark.parametrize("name", FILES)
def test_what_is_expected_is_found_and_nothing_else(name: str) -> None:
    found = [[finding.name, str(finding.severity), finding.subject] for finding in findings(name)]
    assert sorted(found) == sorted(entry(name)["expected"])


@pytest.mark.parametrize("name", FILES)
def test_a_finding_is_one_sentence_with_evidence_a_remedy_and_a_page(name: str) -> None:
    for finding in findings(name):
        assert finding.cause.strip() == finding.cause != "", finding
        assert not re.search(r"\n|[.!?]\s+[A-Z]|[.!]$", finding.cause), finding
        assert finding.evidence and all(line.strip() == line != "" for line in finding.evidence), finding
        assert not any("\n" in line for line in finding.evidence), finding
        assert finding.remedy.strip() == finding.remedy != "", finding
        assert (ROOT / finding.page).is_file(), finding.page
        assert finding.severity in page(finding.name).severities, finding


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_its_fields(name: str) -> None:
    found = entry(name)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*\.json", name)
    if "facts" in found:
        assert found.keys() == {"facts", "expected"}
        assert re.match("(real|edited): ", found["facts"]["label"])
    else:
        assert found.keys() == {"edited_from", "label", "changes", "expected"}
        assert found["label"].startswith("edited: ")
        assert load(name) != load(found["edited_from"]).model_copy(update={"label": found["label"]})
    assert not NOT_OURS.search(json.dumps(found))


@pytest.mark.parametrize("name", FILES)
def test_facts_come_back_from_their_json(name: str) -> None:
    facts = load(name)
    assert Facts.from_json(facts.to_json()) == facts


def test_healthy_is_healthy() -> None:
    assert {str(finding.severity) for finding in findings("healthy-h200.json")} <= {"info"}


def test_there_are_enough() -> None:
    """Real ones among them, from a machine with a GPU and from one without."""
    assert len(FILES) >= 40


def test_every_finding_has_a_file_that_provokes_it_and_a_page() -> None:
    expected = {name for file in FILES for name, _, _ in entry(file)["expected"]}
    assert sorted(set(names()) - expected) == []
    assert [name for name in names() if not (ROOT / "docs" / "doctor" / f"{name}.md").is_file()] == []
