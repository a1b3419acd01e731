"""The pages of findings, their index, and that both say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doctor_facts import findings, load
from support import doctor_index

from memguard._base.findings import names, page
from memguard._budget import parse
from memguard._tools.doctor import DoctorReport, render
from memguard._tools.doctor.examine import every
from memguard._tools.doctor.finding import Severity

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "doctor"
INDEX = (DOCS / "README.md").read_text(encoding="utf-8")


def test_every_check_has_its_pages_and_every_page_a_check() -> None:
    found = {name for check in every() for name in check.names}
    assert found == {path.stem for path in DOCS.glob("*.md")} - {"README"} == set(names())


def test_the_front_matter_of_a_page_has_its_title_severities_section_and_order() -> None:
    pages = [page(name) for name in names()]
    assert len({one.order for one in pages}) == len(pages), "no two at the same place"
    for one in pages:
        text = (DOCS / f"{one.name}.md").read_text(encoding="utf-8")
        keys = re.match(r"---\ntitle: .+\nseverity: .+\nsection: .+\norder: \d+\n---\n\n# (.+)\n\n[^*]", text)
        assert keys is not None and keys[1] == one.name
        assert one.severities and set(one.severities) <= set(Severity), one.name
        assert one.text.startswith(f"# {one.name}\n\n**{one.title}.** {one.severities[0].capitalize()}"), one.name


def test_the_index_is_that_of_the_pages() -> None:
    assert doctor_index.written(INDEX) == INDEX, "python tests/support/doctor_index.py"


@pytest.mark.parametrize("name", [*names(), "README"])
def test_links_lead_somewhere_and_lines_are_short(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert target.startswith("http") or (DOCS / target).exists(), target


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
