"""Print the version differences between two locks (constraints files), or between a lock and the installed packages.

_moved.py OLD        compare the packages installed for this Python with the lock
_moved.py OLD NEW    compare two locks
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement


def pins(path: str, *, all_markers: bool) -> dict[str, str]:
    """A lock's versions by package: those for this Python, or all of them joined into one string."""
    found: dict[str, str] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        one = Requirement(line)
        if all_markers:
            version = f"{one.specifier}".removeprefix("==") + (f" ({one.marker})" if one.marker else "")
            found[one.name] = ", ".join(filter(None, [found.get(one.name), version]))
        elif one.marker is None or one.marker.evaluate():
            found[one.name] = f"{one.specifier}".removeprefix("==")
    return found


def installed() -> dict[str, str]:
    """The versions of this Python's packages without their local part: torch 2.13.0+cpu becomes 2.13.0."""
    return {
        re.sub(r"[-_.]+", "-", found.name).lower(): found.version.partition("+")[0]
        for found in metadata.distributions()
    }


def main(old_path: str, new_path: str | None = None) -> None:
    old = pins(old_path, all_markers=new_path is not None)
    if new_path is not None:
        new = pins(new_path, all_markers=True)
        names = {*old, *new}
    else:
        new = installed()
        names = {*new} - {"memguard-gpu", "setuptools"}  # venv may have installed setuptools
    moved = [name for name in sorted(names) if old.get(name) != new.get(name)]
    for name in moved:
        print(f"{name} {old.get(name, 'absent')} -> {new.get(name, 'absent')}")
    if not moved:
        print("nothing moved")


if __name__ == "__main__":
    main(*sys.argv[1:])
