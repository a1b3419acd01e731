"""Stands in for `memguard run` and a program of `suggest_programs/`, on a simulated GPU: for rehearsals.

    python benchmarks/_suggest_stand_in.py -c BUDGET FRAMEWORKS
    python benchmarks/_suggest_stand_in.py --record TIMELINE FRAMEWORKS
    python benchmarks/_suggest_stand_in.py --tight BUDGET

It works in steps as they do: weights that stay, and arrays that come and go, more of them in every tenth step.
"""

from __future__ import annotations

import contextlib
import sys
import time
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import memguard
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.simulated.adapter import FrameworkOutOfMemory, SimulatedFramework
from memguard._specs import SPECS
from memguard._suggest import record

MIB = 1 << 20
STEPS, PAUSE, RECORDED = 30, 0.01, 2.0


def works(found: dict[str, SimulatedFramework]) -> None:
    for one in found.values():
        for _ in range(8):
            one.allocate(48 * MIB)
    for step in range(STEPS):
        for one in found.values():
            arrays = [one.allocate(size * MIB) for size in (16, 24, 32) for _ in range(8 if step % 10 == 9 else 4)]
            time.sleep(PAUSE)
            for array in reversed(arrays):
                one.free(array)


def under(budget: str, names: list[str]) -> int:
    guard = memguard.init(budget, simulate="h200")
    try:
        works({name: one for name in names if isinstance(one := guard.frameworks.get(name), SimulatedFramework)})
    except FrameworkOutOfMemory as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def recorded(timeline: str, names: list[str]) -> int:
    for name in names:
        sys.modules[SPECS[name].hook] = sys.modules[name] = types.ModuleType(name)
    recorder = record.Recorder(timeline, SimulatedHost(["h200"]), interval=0.02)
    recorder.start()
    found = {name: one for name, one in recorder.reader.unnamed().items() if isinstance(one, SimulatedFramework)}
    works({name: found[name] for name in names if name in found})
    return 0


def tight(budget: str) -> int:
    guard = memguard.init(budget, simulate="h200")
    found = {name: one for name, one in guard.frameworks.items() if isinstance(one, SimulatedFramework)}
    began = time.monotonic()
    while time.monotonic() - began < RECORDED:
        for name, what in (("torch", "train"), ("jax", "score"), ("cupy", "features")):
            with memguard.workload(what, framework=name):
                found[name].free(found[name].allocate(512 * MIB))
                time.sleep(0.02)
    for name in ("torch", "cupy"):
        with contextlib.suppress(FrameworkOutOfMemory), memguard.workload("validate", framework=name):
            found[name].allocate(8192 * MIB)
    return 0


if __name__ == "__main__":
    how, what, *rest = sys.argv[1:]
    if how == "--tight":
        sys.exit(tight(what))
    sys.exit((recorded if how == "--record" else under)(what, rest[0].split(",")))
