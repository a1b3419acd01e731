"""The programs that `tests/gpu` would run on a GPU, found without one.

As a plugin of pytest (`-p gpu_programs`) it stands in for the fixture `run`: it notes what a test hands over, with all
that the test filled in, and runs nothing. As a command it has mypy read those programs:

    python tests/unit/gpu_programs.py

A misspelt attribute or a call that memguard does not take costs minutes of a GPU, and is found here in seconds.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGET = "MEMGUARD_GPU_PROGRAMS"
BEFORE = (
    "import faulthandler, json, os\nfaulthandler.enable()\nimport memguard\nGIB, MIB = 1 << 30, 1 << 20\n"
    "THOROUGH = True\nresult: dict = {}\n"
)
"""What the fixture puts before each."""
MISUSE = ("attr-defined", "call-arg", "call-overload", "name-defined", "used-before-def", "import-not-found", "syntax")
"""What of mypy's errors is one whatever the types: a test knows better than mypy what is not None."""
programs: dict[str, list[str]] = {}


class Anything(dict[str, Any]):
    """A result that has whatever the test looks for, so that most tests get to their next program."""

    def __missing__(self, key: str) -> Anything:
        return Anything()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that take `run`, whatever this machine lacks."""
    for item in items:
        for node in item.listchain():
            node.own_markers[:] = [mark for mark in node.own_markers if mark.name not in ("skip", "skipif")]
    items[:] = [item for item in items if "run" in getattr(item, "fixturenames", ())]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    noted = programs.setdefault(pyfuncitem.nodeid, [])

    def note(code: str, **_: Any) -> Anything:
        noted.append(textwrap.dedent(code))
        return Anything()

    pyfuncitem.funcargs["run"] = note
    pytest.importorskip = lambda *_, **__: None
    try:
        yield
    except Exception as error:  # of what it asserts about a program that did not run
        if not noted:
            print(f"no program: {pyfuncitem.nodeid}: {type(error).__name__}: {error}")
    return True


def pytest_sessionfinish() -> None:
    Path(os.environ[TARGET]).write_text(json.dumps(programs))


def found(folder: Path) -> dict[str, list[str]]:
    """The programs of each test. `folder`: for what is written meanwhile."""
    target = folder / "programs.json"
    environment = {
        **os.environ,
        TARGET: str(target),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT)]),
    }
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-s", "-p", "gpu_programs", "-p", "no:cacheprovider",
         "-p", "no:xdist", "--basetemp", str(folder / "t")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    programs: dict[str, list[str]] = json.loads(target.read_text())
    return programs


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "programs").mkdir()
        tests: dict[str, str] = {}
        for test, codes in found(folder).items():
            for code in codes:
                tests.setdefault(code, test)
        for number, (code, test) in enumerate(tests.items()):
            called = re.sub(r"\W+", "_", test.removeprefix("tests/gpu/"))[:100]
            (folder / "programs" / f"{called}_{number}.py").write_text(BEFORE + code)
        paths = sorted(map(str, (folder / "programs").glob("*.py")))
        paths += sorted(map(str, [*ROOT.glob("tests/support/*.py"), *ROOT.glob("tests/gpu/*.py")]))
        done = subprocess.run(
            [sys.executable, "-m", "mypy", "--config-file=", "--ignore-missing-imports", "--follow-imports=silent",
             "--check-untyped-defs", "--no-error-summary", "--scripts-are-modules", "--explicit-package-bases", *paths],
            env={**os.environ, "MYPYPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}, cwd=ROOT, capture_output=True,
            text=True,
        )  # fmt: skip
        wrong = [line for line in done.stdout.splitlines() if line.endswith(tuple(f"[{name}]" for name in MISUSE))]
        if done.returncode not in (0, 1) or done.stderr:
            sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
        print("\n".join(wrong) or f"{len(tests)} programs of tests/gpu, and tests/support: nothing is misused")
        sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
