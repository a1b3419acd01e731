"""What `memguard.pth` adds to the start of every Python: without MEMGUARD_CONFIG, and with it before any framework.

    python benchmarks/startup.py -o benchmarks/results/startup.json

Three new virtual environments, one with the file and two without, start in turn, in an order that changes: the
difference of each round, and beside it that of the two without, which shows what the measurement resolves. Then the
file alone, read by `site` in one process. No GPU is needed, and none is touched.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _run import ROOT, attempt, conclude, header
from checks import startup_checks

ROUNDS = 200
PTH = ROOT / "memguard" / "_activation" / "memguard.pth"
ALONE = """
import site, sys, time
values = []
for _ in range(2000):
    started = time.perf_counter()
    site.addpackage(sys.argv[1], "memguard.pth", set())
    values.append(time.perf_counter() - started)
print(*values)
"""


def make(folder: Path, *files: Path) -> str:
    """The Python of a new environment that has those files in its site-packages, and this checkout on its path."""
    venv.create(folder, with_pip=False, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "_checkout.pth").write_text(f"{ROOT}\n")
    for file in files:
        shutil.copy(file, packages)
    return str(folder / "bin" / "python")


def environ(**more: str) -> dict[str, str]:
    return {n: v for n, v in os.environ.items() if not n.startswith(("MEMGUARD_", "PYTHON"))} | more


def started(python: str, env: dict[str, str]) -> float:
    before = time.perf_counter()
    subprocess.run([python, "-c", "pass"], env=env, check=True)
    return time.perf_counter() - before


def spread(values: list[float]) -> dict[str, float]:
    """In milliseconds. `low` and `high`: 95 % of the medians of 2,000 resamples lie between."""
    draw = random.Random(7)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    cuts = statistics.quantiles(values, n=20)
    found = {
        "median_ms": statistics.median(values), "low_ms": medians[50], "high_ms": medians[-51],
        "p5_ms": cuts[0], "p95_ms": cuts[-1],
    }  # fmt: skip
    return {"n": len(values), **{name: round(value * 1e3, 4) for name, value in found.items()}}


def starts(folder: Path, rounds: int) -> dict[str, Any]:
    with_file, without, again = (make(folder / name, *files) for name, files in
                                 (("with", [PTH]), ("without", []), ("again", [])))  # fmt: skip
    plain, armed = environ(), environ(MEMGUARD_CONFIG=str(folder / "budget.yaml"))
    ways = {
        "without": (without, plain), "again": (again, plain), "with": (with_file, plain), "armed": (with_file, armed),
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for number in range(rounds + 5):
        random.Random(number).shuffle(order)
        for name in order:
            took = started(*ways[name])
            if number >= 5:  # the first fill the caches
                times[name].append(took)
    return {
        "start": {name: spread(values) for name, values in times.items()},
        "difference": {
            name: spread([a - b for a, b in zip(times[name], times["without"])]) for name in order if name != "without"
        },
    }


def alone(folder: Path) -> dict[str, float]:
    """`site` reading the file, without the variable: all that the start has more."""
    python = folder / "with" / "bin" / "python"
    packages = next((folder / "with").glob("lib/python*/site-packages"))
    done = subprocess.run(
        [python, "-c", ALONE, str(packages)], env=environ(), capture_output=True, text=True, check=True
    )
    return spread([float(value) for value in done.stdout.split()])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result: dict[str, Any] = {"about": header("python benchmarks/startup.py"), "cpus": os.cpu_count()}
        measured = attempt(lambda: starts(Path(name), arguments.rounds))
        result |= measured
        result["alone"] = attempt(lambda: alone(Path(name)))
    result["checks"] = startup_checks(result, measured)
    conclude(result, arguments.output)
    armed = result.get("difference", {}).get("armed")
    if armed is not None:
        spread = f"{armed['low_ms']:+.2f} to {armed['high_ms']:+.2f}"
        print(f"      with MEMGUARD_CONFIG: {armed['median_ms']:+.2f} ms ({spread})")


if __name__ == "__main__":
    main()
