"""Names and documentation pages of the findings of `memguard doctor`: each file in `docs/doctor` is one finding's page.

The file name without `.md` is the finding's name. Names are public, because a budget lists them in
`doctor: {ignore: [...]}`. Only the page's front matter states the finding's title, severities and position in the
index.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from memguard._base.advice import MemguardError

PAGES = Path(__file__).resolve().parents[1] / "_tools" / "doctor" / "pages"
"""A symbolic link to docs/doctor in a checkout; a folder that contains the pages in an installed package."""


@dataclass(frozen=True)
class Page:
    """The page of a finding. `severities` lists every severity that the finding may have, the usual one first."""

    name: str
    title: str
    severities: tuple[str, ...]
    section: str
    order: int
    text: str
    """The output of `memguard doctor --explain`: the title and the body, without the front matter."""


def page(name: str) -> Page:
    """The page of a finding. Raises MemguardError if the name is unknown or the page is not installed."""
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
    if rest.startswith("#"):  # no sentence about the severity precedes the first section
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
    """The finding's name most similar to the misspelt `name`; None if none is similar."""
    import difflib

    return next(iter(difflib.get_close_matches(name, names(), 1)), None)


def known(given: Iterable[str]) -> frozenset[str]:
    """Validate names of findings and return them as a set. Raises MemguardError for an unknown name; accepts every name
    if no page is installed."""
    for name in given:
        if names() and name not in names():
            meant = nearest(name)
            fix = f"write {meant}" if meant else "memguard doctor --list prints them"
            raise MemguardError(f"no finding has the name {name!r}", fix=fix)
    return frozenset(given)
