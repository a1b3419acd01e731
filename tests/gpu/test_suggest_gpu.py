"""A budget from a run on a real GPU: the program succeeds under `memguard suggest`'s budget, and fails with less."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import memguard

ROOT = Path(__file__).resolve().parents[2]
MONITOR = "monitor: {interval: 50ms, timeline: %s, warn: 98%%, critical: 99%%}\n"
WIDE = "version: 1\nframeworks:\n  torch: {limit: 8GiB}\n  cupy: {limit: 8GiB}\n"
PROGRAM = """
import time
import cupy, torch
for size in (1, 2, 1):
    x = torch.randn(size * 2048, 8192, device="cuda")
    batches = [cupy.sort(cupy.asarray(x), axis=1) for _ in range(3 * size)]
    y = torch.nn.functional.gelu(x @ torch.randn(8192, 8192, device="cuda"))
    y.sum().item()
    cupy.cuda.get_current_stream().synchronize()
    time.sleep(0.5)
    del batches, x, y
"""


class Runs:
    """Runs of the program, with its files in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MEMGUARD_")}
        self._environ = {**clean, "PYTHONPATH": f"{ROOT}{os.pathsep}{clean.get('PYTHONPATH', '')}"}
        (folder / "program.py").write_text(PROGRAM)

    def _memguard(self, *words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "memguard", *map(str, words)]
        return subprocess.run(command, env=self._environ, capture_output=True, text=True, timeout=120)

    def passes(self, name: str, budget: str | None) -> bool:
        """Whether it exits normally without any refused request, caught or not."""
        timeline = self.folder / f"{name}.jsonl"
        way: list[object] = ["--record", timeline]
        if budget is not None:
            path = self.folder / f"{name}.yaml"
            path.write_text(budget + MONITOR % json.dumps(str(timeline)))
            way = ["-c", path]
        done = self._memguard("run", *way, "--", sys.executable, self.folder / "program.py")
        timelines = [memguard.load_timeline(path) for path in self.folder.glob(f"{name}-*.jsonl")]
        assert timelines, done.stderr[-2000:]
        refused = sum(event.times or 1 for one in timelines for event in one.events() if event.kind == "refused")
        return done.returncode == 0 and not refused

    def suggested(self, name: str, *words: str) -> dict[str, Any]:
        done = self._memguard("suggest", *sorted(self.folder.glob(f"{name}-*.jsonl")), "--json", *words)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@pytest.mark.parametrize("budget", [WIDE, None], ids=["wide budget", "no budget"])
def test_a_program_passes_under_the_budget_of_its_own_run(budget: str | None, tmp_path: Path) -> None:
    """A run under a large budget, and one without a budget."""
    runs = Runs(tmp_path)
    assert runs.passes("first", budget)
    offer = runs.suggested("first")
    rows = {row["framework"]: row for row in offer["frameworks"]}
    assert set(rows) == {"torch", "cupy"}
    assert budget is None or rows["torch"]["peak"], "its allocator says its own peak"
    assert runs.passes("again", offer["yaml"])
    needed = runs.suggested("first", "--headroom", "0%")
    caps = {row["framework"]: row["limit"] * 3 // 4 >> 20 for row in needed["frameworks"]}
    less = needed["yaml"]
    for name, cap in caps.items():
        less, times = re.subn(rf"(?m)^(  {name}: {{limit: )\d+MiB", rf"\g<1>{cap}MiB", less)
        assert times == 1
    assert not runs.passes("less", less), "the control"
