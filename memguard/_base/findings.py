"""Names and pages of the doctor's findings: each file in `docs/doctor` is the page of one finding.

The file's name is the finding's name. Names are public: `doctor: {ignore: [...]}` in a budget uses them. Only the
page's front matter states the finding's title, severities and place in the index.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from memguard._base.advice import MemguardError

PAGES = Path(__file__).resolve().parents[1] / "_tools" / "doctor" / "pages"
"""The folder of the pages; in a checkout it is a symbolic link to docs/doctor."""


@dataclass(frozen=True)
class Page:
    """The page of a finding. `severities`: every severity that the finding may have, the usual one first."""

    name: str
    title: str
    severities: tuple[str, ...]
    section: str
    order: int
    text: str
    """The text that `memguard doctor --explain` prints: the title and the body, without the front matter."""


def page(name: str) -> Page:
    """The page of a finding. Raises MemguardError for an unknown name and for a page that is not installed."""
    known([name])
    return _read(PAGES / f"{name}.md")


@functools.cache
def _read(path: Path) -> Page:
    try:
        _, head, body = path.read_text(encoding="utf-8").split("---\n", 2)
    except (OSError, ValueError) as error:
        from memguard._base.distribution import requirement

        raise MemguardError(
            f"the page of {path.stem} is not installed",
            fix=f"pip install --force-reinstall {requirement()}, or read docs/doctor/{path.name}",
        ) from error
    keys = {key: value.strip().strip('"') for key, _, value in (line.partition(":") for line in head.splitlines())}
    severities = tuple(keys["severity"].split(", "))
    heading, _, rest = body.strip().partition("\n\n")
    if rest.startswith("#"):  # the body has no sentence about the severity
        rest = f"{severities[0].capitalize()}.\n\n{rest}"
    text = f"{heading}\n\n**{keys['title']}.** {rest}"
    return Page(path.stem, keys["title"], severities, keys["section"], int(keys["order"]), text)


def names() -> tuple[str, ...]:
    """The names of all findings, in the order of the index; empty if no page is installed."""
    return _names(PAGES)


@functools.cache
def _names(folder: Path) -> tuple[str, ...]:
    pages = [_read(path) for path in folder.glob("*.md") if path.stem != "README"]
    return tuple(one.name for one in sorted(pages, key=lambda one: (one.order, one.name)))


def nearest(name: str) -> str | None:
    """The known name closest to a misspelt one."""
    import difflib

    return next(iter(difflib.get_close_matches(name, names(), 1)), None)


def known(given: Iterable[str]) -> frozenset[str]:
    """The names, validated. Raises MemguardError for an unknown name. If no page is installed, accept every name."""
    for name in given:
        if names() and name not in names():
            meant = nearest(name)
            fix = f"write {meant}" if meant else "memguard doctor --list prints them"
            raise MemguardError(f"no finding has the name {name!r}", fix=fix)
    return frozenset(given)
