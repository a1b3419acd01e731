"""The index of the doctor's findings, made of the front matter of their pages.

`python tests/support/doctor_index.py` writes it into docs/doctor/README.md, below the heading "All findings".
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from memguard._base import findings

README = Path(__file__).resolve().parents[2] / "docs" / "doctor" / "README.md"
HEADING = "## All findings\n"


def index() -> str:
    """A table for each section, with a row for each finding."""
    pages = map(findings.page, findings.names())
    return "".join(
        f"\n**{section}**\n\n| | |\n| --- | --- |\n"
        + "".join(f"| [{p.name}]({p.name}.md) | {p.title} |\n" for p in each)
        for section, each in groupby(pages, key=lambda page: page.section)
    )


def written(readme: str) -> str:
    """The README with the index of today."""
    return readme.partition(HEADING)[0] + HEADING + index()


if __name__ == "__main__":
    README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")
