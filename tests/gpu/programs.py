"""Check the programs of these tests where there is no GPU: names that nobody defines, attributes that nobody has.

    python tests/gpu/programs.py

Each test runs as far as the first program that it would start, which is written down instead. Then Ruff looks for
undefined names in all of them, and mypy for attributes that memguard's types do not have, and calls that do not fit.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BEGIN = """import faulthandler, json, os, typing
import memguard
GIB, MIB = 1 << 30, 1 << 20
result: dict[typing.Any, typing.Any] = {}
"""
"""As the fixture `run` begins a program, with a type for what mypy would ask one for."""
LOOKED_FOR = {"attr-defined", "call-arg", "name-defined", "syntax"}


class Noted:
    """A plugin of pytest: `run` writes a program into the folder, and ends the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if "run" in getattr(item, "fixturenames", ())]
        for item in items:
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name not in ("skip", "skipif")]

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Any:
        if fixturedef.argname != "run":
            return None

        def note(code: str, **_: Any) -> None:
            self.count += 1
            name = "".join(char if char.isalnum() else "_" for char in request.node.name)
            path = self.folder / f"{request.node.path.stem}__{name}.py"
            path.write_text(BEGIN + textwrap.dedent(code))
            pytest.skip("written down")

        fixturedef.cached_result = (note, fixturedef.cache_key(request), None)
        return note


def wrong(folder: Path) -> list[str]:
    """What Ruff and mypy find in the programs of a folder."""
    paths = sorted(map(str, folder.glob("*.py")))
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--output-format", "concise"]
    mypy = [
        sys.executable, "-m", "mypy", "--config-file=", "--check-untyped-defs", "--ignore-missing-imports",
        "--no-strict-optional", "--cache-dir", str(folder / "cache"),
    ]  # fmt: skip
    found = []
    for command in (ruff, mypy):
        done = subprocess.run([*command, *paths], cwd=ROOT, capture_output=True, text=True)
        if done.returncode not in (0, 1):
            return [done.stderr or done.stdout]
        lines = [line for line in done.stdout.splitlines() if ".py:" in line]
        kinds = [f"[{kind}]" for kind in LOOKED_FOR]
        found += [line for line in lines if "F821" in line or any(line.endswith(kind) for kind in kinds)]
    return found


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        noted = Noted(Path(folder))
        with contextlib.redirect_stdout(io.StringIO()):
            pytest.main(
                ["-q", "--no-header", "--no-summary", "-p", "no:cacheprovider", f"--rootdir={ROOT}", str(HERE)],
                plugins=[noted],
            )
        found = wrong(Path(folder))
    for line in found:
        print(line)
    print(f"{noted.count} programs of tests/gpu, {len(found)} mistakes")
    return 1 if found or not noted.count else 0


if __name__ == "__main__":
    sys.exit(main())
