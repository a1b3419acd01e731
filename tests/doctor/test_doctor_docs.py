"""The pages of findings, their index, and that both say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doctor_facts import findings, load

from memguard._base.findings import NAMES
from memguard._budget import parse
from memguard._tools.doctor import DoctorReport, render

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "doctor"
INDEX = (DOCS / "README.md").read_text(encoding="utf-8")


def test_every_finding_has_a_page_and_every_page_a_finding() -> None:
    assert {path.stem for path in DOCS.glob("*.md")} - {"README"} == set(NAMES)


def test_the_index_has_every_finding_in_order_with_the_first_sentence_of_its_page() -> None:
    rows = re.findall(r"^\| \[([a-z-]+)\]\(([a-z-]+)\.md\) \| (.+) \|$", INDEX, re.MULTILINE)
    assert [name for name, _, _ in rows] == [link for _, link, _ in rows] == list(NAMES)
    for name, _, says in rows:
        first = re.search(
            r"^\*\*(.+?)\*\*", (DOCS / f"{name}.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
        assert first is not None and says == " ".join(first[1].split()).rstrip("."), name


@pytest.mark.parametrize("name", [*NAMES, "README"])
def test_links_lead_somewhere_and_lines_are_short(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert target.startswith("http") or (DOCS / target).exists(), target
    assert text.startswith(f"# {name}\n") or name == "README"


def test_the_screen_in_the_index_is_what_is_really_printed() -> None:
    name = "second-context-script.json"
    (shown,) = re.findall(r"```text\n(memguard doctor: .*?)\n```", INDEX, re.DOTALL)
    assert render.text(DoctorReport(load(name), findings(name)), brief=True) == shown


def test_the_finding_in_the_quick_start_is_what_is_really_printed() -> None:
    quickstart = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```text\n(error  .*?)\n```", quickstart, re.DOTALL)
    name = "h200-tensorflow-first.json"
    assert f"\n\n{shown}\n\n" in render.text(DoctorReport(load(name), findings(name)))


def test_the_line_for_a_budget_is_one() -> None:
    (line,) = re.findall(r"```yaml\n(.*?)```", INDEX, re.DOTALL)
    assert parse(f"version: 1\nframeworks: {{torch: {{share: 50%}}}}\n{line}").doctor is not None
