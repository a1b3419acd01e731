"""The pages of the findings, as `memguard doctor --explain` prints them."""

from __future__ import annotations

from pathlib import Path

from memguard.errors import MemguardError
from memguard.findings import known

_HERE = Path(__file__).resolve().parent
_FOLDERS = (_HERE / "pages", _HERE.parents[1] / "docs" / "doctor")
"""In an installed package, to which the build copies them; and in a checkout, which an editable installation is too."""


def page(name: str) -> str:
    """The text of a finding's page. Raises MemguardError for a name that there is not."""
    known([name])
    for folder in _FOLDERS:
        try:
            return (folder / f"{name}.md").read_text(encoding="utf-8")
        except OSError:
            continue
    raise MemguardError(
        f"the page of {name} is not installed\n    fix: install memguard again, or read docs/doctor/{name}.md"
    )
