"""A tree with the runner of `bench`, a small package in memguard's place, and measurements that each test writes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import results

ROOT = Path(__file__).resolve().parents[2]
FAKE = '''
"""Figures for tests."""
import os
from pathlib import Path
from bench.child import emit, main
from bench.measure import Failed, measure
TREE = Path(__file__).parents[2]

@measure("alpha", unit="s", bar="<= 5", seconds=1)
def alpha(run):
    """Seconds of alpha."""
    with open(TREE / "runs", "a") as file:
        print("quick" if run.quick else "timed", file=file)
    return [run.program("child", timeout=30)["x"] for _ in range(run.rounds(3))]

@measure("beta", unit={"a": "x", "b": "GiB"}, bar={"a": ">= 2"}, seconds=1)
def beta(run):
    """What beta comes to."""
    if not run.quick and (TREE / "broken").exists():
        raise Failed("beta is broken")
    return {"a": [[1.0, 2.0], [9.0]], "b": [float((TREE / "figure").read_text())]}

@measure("card", unit="ms", seconds=1, whole_card=True)
def card(run):
    """On a card of its own."""
    return [1.5]

@measure("pair", unit="ms", seconds=1, gpus=2)
def pair(run):
    """On two."""
    return [1.5]

def child():
    import memguard.part
    emit({"x": float((TREE / "alpha").read_text())})
    os._exit(0)

if __name__ == "__main__":
    main({"child": child})
'''


class Tree:
    """A checkout in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out.json"
        left_out = shutil.ignore_patterns("__pycache__", "results", "measures", "programs")
        shutil.copytree(ROOT / "bench", folder / "bench", ignore=left_out)
        self.write("bench/measures/__init__.py", "")
        self.write("bench/measures/fake.py", FAKE)
        self.write("memguard/__init__.py", '__version__ = "0.2.0.dev3"\n')
        self.write("memguard/part.py", "X = 1\n")
        self.write("memguard/other.py", "X = 1\n")
        self.write("alpha", "4")
        self.write("figure", "7")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def __call__(self, *words: str, code: int = 0, env: dict[str, str] | None = None) -> str:
        """Run `python -m bench` with these words; what it printed."""
        environ = self.environ | (env or {})
        done = subprocess.run(
            [sys.executable, "-m", "bench", *words], cwd=self.folder, env=environ, capture_output=True, text=True,
            timeout=100, check=False, start_new_session=True,
        )  # fmt: skip
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done.stdout + done.stderr

    @property
    def environ(self) -> dict[str, str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("BENCH_", "PYTHONPATH"))}
        return environ | {"PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""}

    def all(self, *words: str, code: int = 0) -> str:
        return self("run-all", "--commit", "abc", "-o", str(self.out), *words, code=code)

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["id"]: row for row in results.load(self.out)["rows"]}

    def runs(self) -> list[str]:
        """How often alpha ran since the last call of this."""
        path = self.folder / "runs"
        found = path.read_text().split() if path.exists() else []
        path.write_text("")
        return found


def started(word: str) -> bool:
    """Whether a process with this in its command line runs."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and word.encode() in (folder / "cmdline").read_bytes():
                return True
    return False


def gone(word: str) -> bool:
    """Whether none runs any more: a process that was killed takes a moment to end on a busy machine."""
    end = time.monotonic() + 10
    while started(word) and time.monotonic() < end:
        time.sleep(0.05)
    return not started(word)
