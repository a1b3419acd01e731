"""A Python with `memguard.pth` in its site-packages, as after installing the wheel, and all packages of this one."""

from __future__ import annotations

import os
import shutil
import sys
import venv
from pathlib import Path

import memguard

PACKAGE = Path(memguard.__file__).parent
PTH = next(p for p in (PACKAGE / "_tools/activation" / "memguard.pth", PACKAGE.parent / "memguard.pth") if p.is_file())
"""Its place in a checkout, else its place in an installation."""


START = [PTH.with_suffix(".start"), PTH.with_name("_memguard_start.py")]
"""What Python 3.15 and later read in its place, and what that names."""

_EARLIER = (
    "import pkgutil\nlines = open({!r}, encoding='utf-8-sig').read().splitlines()\n"
    "for name in filter(None, (line.partition('#')[0].strip() for line in lines)): pkgutil.resolve_name(name)()\n"
)
"""What `site` does with a .start file from Python 3.15 on. Before, `sitecustomize` does so, which runs after it."""


def make(folder: Path, *, pth: bool = True, start: bool = False) -> Path:
    """The interpreter of a new environment in `folder`. `_all.pth` adds folders; their .pth files are not read."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    packages = next(folder.glob("lib/python*/site-packages"))
    seen = [str(PACKAGE.parent), *(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))]
    (packages / "_all.pth").write_text("\n".join(dict.fromkeys(seen)) + "\n")
    if pth:
        shutil.copy(PTH, packages)
    if start:
        for file in START:
            shutil.copy(file, packages)
        if sys.version_info < (3, 15):
            (packages / "sitecustomize.py").write_text(_EARLIER.format(str(packages / START[0].name)))
    return python


def environ(**more: str) -> dict[str, str]:
    """This process's environment without memguard's variables, and `more`."""
    return {n: v for n, v in os.environ.items() if not n.startswith(("MEMGUARD_", "PYTHON"))} | more
