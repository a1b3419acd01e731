"""Moves and mixes of `benchmarks/elastic.py`: the real PyCUDA and Numba over the stubs of the driver and of NVML."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stub_driver

ROOT = Path(__file__).resolve().parents[2]
MOVES = """
import json, _elastic_arrays, _elastic_moves
from memguard._reclaim.reclaimer import Reclaimer
def held(guard, device):
    usages = [one.usage(device) for one in guard.frameworks.values()]
    return sum(usage.held for usage in usages if usage is not None)
# What the stubs do not know: values, and what of the card this process has by NVML.
_elastic_arrays.Written.fill = lambda *_: None
_elastic_arrays.Arrays.right = lambda *_: True
_elastic_arrays.Card.own = lambda _: 0
Reclaimer.available = lambda self, device: -held(self._guard, device)
_elastic_moves.GIVERS, _elastic_moves.MOVES = ("numba", "pycuda"), 2
_elastic_moves.Mover.rounds.__defaults__ = ((("numba", "pycuda"), ("pycuda", "numba")),)
found = _elastic_moves.moves()
print("FOUND " + json.dumps({"blocks": found["blocks"], "pieces": found["pieces"]}))
"""


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One GPU of 64 GiB, of which neither the driver nor NVML is real."""
    found = stub_driver.one_gpu(tmp_path_factory.mktemp("gpu"))
    paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), found.get("PYTHONPATH", "")])
    return {**found, "PYTHONPATH": paths}


def test_moves_between_pycuda_and_numba_are_served_and_told(env: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", MOVES], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.split("FOUND ")[1])
    for kind in ("blocks", "pieces"):
        for pair, one in found[kind]["pairs"].items():
            assert one["error"] is None, (kind, pair, one["error"])
            assert (one["n"], len(one["by_hand_ms"]), one["wrong"]) == (2, 1, 0) and one["p99_ms"] > 0


@pytest.mark.parametrize(("library", "way"), [("numba", "caps"), ("pycuda", "own pool")])
def test_a_way_of_a_mix_answers_each_line_with_its_time(env: dict[str, str], library: str, way: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "elastic.py"), "--child", library, way],
        input='{"seed": 1, "core": 0}\n{"seed": 2, "core": 0}\n{}\n', env=env, capture_output=True, text=True,
        timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, *answers = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert first == {} and len(answers) == 2 and all(one["us"] > 0 for one in answers), (first, answers)
