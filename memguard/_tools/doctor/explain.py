"""The pages of the findings, as `memguard doctor --explain` prints them."""

from __future__ import annotations

from pathlib import Path

from memguard._base.findings import known
from memguard.errors import MemguardError

_PAGES = Path(__file__).resolve().parent / "pages"
"""In a checkout a link to docs/doctor, in an installed package the files themselves."""


def page(name: str) -> str:
    """The text of a finding's page. Raises MemguardError for an unknown name."""
    known([name])
    try:
        return (_PAGES / f"{name}.md").read_text(encoding="utf-8")
    except OSError as error:
        from memguard._base.distribution import requirement

        raise MemguardError(
            f"the page of {name} is not installed",
            fix=f"pip install --force-reinstall {requirement()}, or read docs/doctor/{name}.md",
        ) from error
