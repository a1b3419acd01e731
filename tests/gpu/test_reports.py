"""Reports of real out-of-memory errors, compared with independent readings: at a framework's own cap, on a full GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from gpus_here import environment
from support import reports

Run = Callable[..., dict[str, Any]]
STRANGER = f"""
import sys, cupy
blocks = [cupy.empty(1 << 30, cupy.uint8) for _ in range({reports.STRANGER >> 30})]
print("READY", flush=True)
sys.stdin.read()
"""


def test_at_its_own_cap(run: Run) -> None:
    """CuPy's asynchronous pool has no cap of its own."""
    kinds = [kind for kind in reports.KINDS if kind != "cupy async"]

    def one(kind: str) -> dict[str, Any]:
        return run(f"from support import reports\nresult.update(reports.refused({kind!r}, 'own cap'))\n", timeout=180)

    with ThreadPoolExecutor(3) as pool:
        found = dict(zip(kinds, pool.map(one, kinds), strict=True))
    for kind, report in found.items():
        print(kind, report["exception"], report["rows"])
        reports.judge(report)


class Waiting:
    """A process that prints READY, waits for a line, and prints its RESULT. It is killed at the end of the block."""

    def __init__(self, stack: ExitStack, folder: Path, *arguments: str) -> None:
        self.errors = stack.enter_context((folder / f"{arguments[-1][:40].split()[0]}-{id(self)}").open("w+"))
        self.process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
                text=True, env=environment(TF_CPP_MIN_LOG_LEVEL="2"),
            )
        )  # fmt: skip
        stack.callback(self.process.kill)

    def said(self, begin: str) -> str:
        """The rest of its next line with this prefix, within two minutes."""
        timer = threading.Timer(120, self.process.kill)
        timer.start()
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:  # libraries also print to stdout
                if line.startswith(begin):
                    return line.removeprefix(begin).strip()
        finally:
            timer.cancel()
        self.errors.seek(0)
        raise AssertionError(f"it ended: rc {self.process.wait(30)}, {self.errors.read()[-3000:]}")

    def go(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.said("RESULT "))
        self.process.wait(60)  # otherwise the next process lacks its memory
        return found


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, dict[str, Waiting]]]:
    """Another process with 40 GiB, and one process per kind, which has imported its frameworks and waits for a line."""
    folder = tmp_path_factory.mktemp("reports")
    with ExitStack() as stack:
        stranger = Waiting(stack, folder, "-c", STRANGER)
        stranger.said("READY")
        every = {kind: Waiting(stack, folder, "-m", "support.reports", kind, "full") for kind in reports.KINDS}
        for one in every.values():
            one.said("READY")
        yield stranger.process.pid, every


@pytest.mark.whole_card
@pytest.mark.parametrize("kind", reports.KINDS)
def test_on_a_full_card(card: tuple[int, dict[str, Waiting]], kind: str) -> None:
    stranger, every = card
    reports.judge(every[kind].go(), stranger)
