"""What memguard costs before any work: its import, `init`, and `memguard.pth` at the start of every Python.

Each way runs in processes of its own, in an order that changes with each round. `nvmlInit` is timed apart and taken
off, but for the rows `.whole`. memguard lies in a folder with bytecode, as pip installs it."""

from __future__ import annotations

import compileall
import json
import os
import random
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.child import COVERS, ROOT, package
from bench.measure import Failed, Run, Values, gpu_here, measure
from bench.programs.six import SHARES

BUDGET = """version: 1
device: {limit: 40GiB}
frameworks:
{frameworks}
monitor: {interval: 500ms, timeline: "run-{pid}.jsonl"}
on_pressure: [trim]
"""

# Programs. They import nothing of bench, which would load modules that `init` needs. `took[0]`: seconds in nvmlInit.
_CLOCK = """
import json, sys, time
now, took = time.perf_counter, [0.0]
def begin():
    global begun
    begun = now()
def end():
    global seconds
    seconds = now() - begun
def timed(module):
    start = module.nvmlInit
    def nvmlInit():
        before = now()
        try:
            return start()
        finally:
            took[0] += now() - before
    module.nvmlInit = nvmlInit
def say(**more):
    print("RESULT", json.dumps({"seconds": seconds, "nvml_init": took[0], **more}), flush=True)
"""
_DEPENDENCIES = """
import pydantic, pynvml, yaml
class Used(pydantic.BaseModel):
    size: int = 0
"""
_DONE = """
end()
caps = dict(line.split()[::3] for line in str(guard).splitlines() if line.startswith("  "))
memguard.shutdown()
say(absent=[name for name, cap in caps.items() if cap == "absent"])
"""
_INIT = "guard = memguard.init(sys.argv[1], **json.loads(sys.argv[2]))\n"
ALONE = f"{_CLOCK}{_DEPENDENCIES}timed(pynvml)\nimport memguard\nbegin()\n{_INIT}{_DONE}"
FRESH = f"{_CLOCK}begin()\nimport pynvml\ntimed(pynvml)\nimport memguard\n{_INIT}{_DONE}"
THEIRS = f"{_CLOCK}begin()\n{_DEPENDENCIES}end()\nsay()\n"
WAYS = {"init": ALONE, "fresh": FRESH, "theirs": THEIRS, "theirs again": THEIRS}
IMPORT = "import time\nt = time.perf_counter()\nimport {}\nprint('RESULT', time.perf_counter() - t)"
PTH = """
import site, sys, time
values = []
for _ in range(int(sys.argv[2])):
    started = time.perf_counter()
    site.addpackage(sys.argv[1], "memguard.pth", set())
    values.append(time.perf_counter() - started)
print('RESULT', values)
"""


@measure(
    "startup",
    unit={
        "import": "times", "import.control": "times", "init": "ms", "init.whole": "ms",
        "fresh": "ms", "fresh.control": "ms", "fresh.whole": "ms", "start": "ms",
        "start.control": "ms", "pth": "ms",
    },
    bar={
        "import": "<= 1.5", "init": "<= 50", "init.whole": "<= 50",
        "fresh": "<= 60", "fresh.whole": "<= 50", "start": "<= 1", "pth": "<= 1",
    },
    by={
        **dict.fromkeys(("import", "init", "init.whole", "fresh.whole", "pth"), "p95"),
        "fresh": "high", "start": "high",
    },
    seconds=65,
)  # fmt: skip
def startup(run: Run) -> dict[str, Values | Failed]:
    """Import against `import pydantic, yaml`; `init` of six; a Python's start with `memguard.pth`."""
    found: dict[str, Values | Failed] = {}
    place = Place(run.folder)
    parts: list[tuple[tuple[str, ...], Callable[[], dict[str, Any]]]] = [
        (("import",), lambda: imports(run.rounds(20))),
        (("init", "init.whole", "fresh", "fresh.whole"), lambda: inits(place, run.rounds(18, 1))),
        (("start", "pth"), lambda: starts(run, run.rounds(120, 2))),
    ]
    for names, part in parts:
        try:
            found |= part()
        except Failed as error:
            found |= dict.fromkeys(names, error)
    return found


def python(words: Sequence[str], env: dict[str, str], timeout: float = 100, cwd: Path | None = None) -> Any:
    """What a Python printed as RESULT. Raises Failed with its stderr."""
    try:
        done = subprocess.run(words, check=False, capture_output=True, text=True, env=env, timeout=timeout, cwd=cwd)
    except subprocess.TimeoutExpired:
        raise Failed(f"a process took longer than {timeout:.0f} s") from None
    return told(done.stdout, done.stderr, done.returncode)


def told(out: str, err: str, code: int) -> Any:
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    if code or not lines:
        raise Failed(f"a process ended with {code}: {err[-1000:]}")
    return json.loads(lines[-1][7:])


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(names)}


def paths(*first: Path | str) -> str:
    """A PYTHONPATH. In the untimed pass it begins with what records modules."""
    return os.pathsep.join(map(str, [*([COVERS] if "BENCH_COVERS" in os.environ else []), *first]))


def imports(rounds: int) -> dict[str, list[float]]:
    """`import memguard` against `import pydantic, yaml`, interleaved; beside it the control against itself."""
    env = os.environ | {"PYTHONPATH": paths(ROOT, os.environ.get("PYTHONPATH", ""))}
    ours, control, again = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        for taken, what in ((control, "pydantic, yaml"), (ours, "memguard"), (again, "pydantic, yaml")):
            taken.append(python([sys.executable, "-c", IMPORT.format(what)], env))
    return {
        "import": [a / b for a, b in zip(ours, control, strict=True)],
        "import.control": [a / b for a, b in zip(again, control, strict=True)],
    }


class Place:
    """A folder with memguard, compiled, and a budget of six."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        self.others = [path for path in others if Path(path).resolve() not in (ROOT, COVERS)]
        """Where other packages lie that are not installed for this Python."""
        left_out = shutil.ignore_patterns("__pycache__", "pages")  # of the doctor: a link into docs/
        shutil.copytree(package(), folder / "compiled" / "memguard", ignore=left_out)
        compileall.compile_dir(folder / "compiled", quiet=1, workers=1)
        parts = "\n".join(f"  {name}: {{share: {share}}}" for name, share in SHARES.items())
        self.budget = folder / "budget.yaml"
        self.budget.write_text(BUDGET.replace("{frameworks}", parts))
        self.real = gpu_here()
        self.env = without("MEMGUARD_", "PYTHON", "CUDA_VISIBLE_DEVICES") | {
            "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": paths(folder / "compiled", *self.others),
        }  # fmt: skip

    def words(self, code: str) -> list[str]:
        return [sys.executable, "-c", code, str(self.budget), json.dumps({} if self.real else {"simulate": "h200"})]

    def run(self, way: str) -> dict[str, Any]:
        return self.known(python(self.words(WAYS[way]), self.env, cwd=self.folder))

    def known(self, found: dict[str, Any]) -> dict[str, Any]:
        if self.real and found.get("absent"):
            raise Failed(f"not installed for a GPU: {', '.join(found['absent'])}")
        return found


def inits(place: Place, rounds: int) -> dict[str, list[float]]:
    """`init` with its dependencies loaded and in a fresh interpreter. The first round fills the caches."""
    kept: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        order = [*WAYS]
        random.Random(number).shuffle(order)
        for way in order:
            found = place.run(way)
            if number or rounds == 1:
                kept[way].append(found)
    whole = {way: [1e3 * one["seconds"] for one in runs] for way, runs in kept.items()}
    apart = {way: [1e3 * (one["seconds"] - one["nvml_init"]) for one in runs] for way, runs in kept.items()}
    return {
        "init": apart["init"], "init.whole": whole["init"], "fresh.whole": whole["fresh"],
        "fresh": [a - b for a, b in zip(apart["fresh"], apart["theirs"], strict=True)],
        "fresh.control": [a - b for a, b in zip(apart["theirs again"], apart["theirs"], strict=True)],
    }  # fmt: skip


def starts(run: Run, rounds: int) -> dict[str, list[float]]:
    """Three environments, one with memguard.pth and two without, start in turn; then the file alone, read by `site`."""
    activation = package() / "_tools/activation"
    file, installed = activation / "memguard.pth", package().parent / "memguard.pth"  # where a wheel puts it
    file = file if file.exists() else installed
    for path in (file, activation / "_memguard_environment.py"):
        run.covers(path)
    made = {}
    for name in ("with", "without", "again"):
        folder = run.folder / name
        venv.create(folder, with_pip=False, symlinks=True)
        packages = next(folder.glob("lib/python*/site-packages"))
        (packages / "_checkout.pth").write_text(f"{package().parent}\n")
        if name == "with":
            shutil.copy(file, packages)
            alone = [str(folder / "bin" / "python"), "-c", PTH, str(packages), str(2000 if rounds > 10 else 20)]
        made[name] = str(folder / "bin" / "python")
    plain = without("MEMGUARD_", "PYTHON")
    if "BENCH_COVERS" in os.environ:
        plain["PYTHONPATH"] = paths()
    times: dict[str, list[float]] = {name: [] for name in made}
    order = list(made)
    for number in range(rounds + 5):
        random.Random(number).shuffle(order)
        for name in order:
            before = time.perf_counter()
            subprocess.run([made[name], "-c", "pass"], env=plain, check=True, timeout=30)
            if number >= 5:  # the first fill the caches
                times[name].append((time.perf_counter() - before) * 1e3)

    def more(name: str) -> list[float]:
        return [a - b for a, b in zip(times[name], times["without"], strict=True)]

    read = [1e3 * value for value in python(alone, plain)]
    return {"start": more("with"), "start.control": more("again"), "pth": read}
