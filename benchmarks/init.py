"""What `memguard.init` of six frameworks and a monitor takes: alone, in a fresh interpreter, and after their imports.

    python benchmarks/init.py -o benchmarks/results/h200-init.json                   # on a GPU: four minutes
    python benchmarks/init.py -o init.json --rounds 15 --imported-rounds 0           # without: half a minute

Each way runs in processes of its own, in an order that changes with each round. Beside those with a bar runs the same
way once more: what the two differ by is what the measurement resolves. `nvmlInit` is timed apart and taken off. `cpu`
is what the process computed meanwhile: on a busy machine the steadier figure.

memguard lies in a folder with bytecode, as pip installs it; the way "from source" has none, as a checkout under
PYTHONDONTWRITEBYTECODE=1. Other packages are as they are installed. On a machine without a GPU the same calls go to the
stub of NVML in `tests/faults` (gcc builds it), and without gcc to a simulated GPU; `about.gpus_are` says which.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import startup
from _run import ROOT, SIX, conclude, header, package
from checks import init_checks

IMPORTS = ("tensorflow", "torch", "jax", "cupy", "pycuda.driver", "numba.cuda")
UUID = "GPU-11111111-1111-1111-1111-111111111111"
STUB = {"count": 1, "uuid0": UUID, "name0": "NVIDIA H200", "arch0": 9, "total0": 150_754_820_096,
        "reserved0": 644_874_240, "used0": 0}  # fmt: skip
BUDGET = """version: 1
device: {limit: 40GiB}
frameworks:
{frameworks}
monitor: {interval: 500ms, timeline: "run-{pid}.jsonl"}
on_pressure: [trim]
"""

# Programs. `took[0]` is the seconds in nvmlInit.
_CLOCK = """
import json, sys, time
now, took = time.perf_counter, [0.0]
def begin():
    global begun, computed
    computed, begun = time.process_time(), now()
def end():
    global seconds, cpu
    seconds, cpu = now() - begun, time.process_time() - computed
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
    print("RESULT", json.dumps({"seconds": seconds, "cpu": cpu, "nvml_init": took[0], **more}), flush=True)
"""
_DEPENDENCIES = """
import pydantic, pynvml, yaml
class Used(pydantic.BaseModel):
    size: int = 0
"""
_DONE = """
end()
caps = dict(line.split()[::3] for line in str(guard).splitlines() if line.startswith("  "))
loaded = [name for name in sys.modules if name.startswith("memguard")]
memguard.shutdown()
before, nvml = now(), took[0]
memguard.init(sys.argv[1], **json.loads(sys.argv[2]))
again, took[0] = now() - before - took[0] + nvml, nvml
memguard.shutdown()
say(caps=caps, modules=len(loaded), again=again)
"""
_INIT = "guard = memguard.init(sys.argv[1], **json.loads(sys.argv[2]))\n"
ALONE = f"{_CLOCK}{_DEPENDENCIES}timed(pynvml)\nimport memguard\nbegin()\n{_INIT}{_DONE}"
FRESH = f"{_CLOCK}begin()\nimport pynvml\ntimed(pynvml)\nimport memguard\n{_INIT}{_DONE}"
THEIRS = f"{_CLOCK}begin()\n{_DEPENDENCIES}end()\nsay()\n"
IMPORTED = f"""{_CLOCK}{_DEPENDENCIES}
import importlib, os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
there = []
for name in {IMPORTS}:
    try:
        importlib.import_module(name)
        there.append(name)
    except Exception:
        pass
timed(pynvml)
import memguard
begin()
{_INIT}{_DONE.replace("caps=caps", "imported=there, caps=caps")}"""
WAYS = {
    "init": ALONE, "init again": ALONE, "fresh": FRESH, "their imports": THEIRS, "their imports again": THEIRS,
    "from source": ALONE, "simulated": ALONE, "one GPU visible": ALONE, "imported": IMPORTED,
}  # fmt: skip
"""`one GPU visible`: with CUDA_VISIBLE_DEVICES, which `init` asks CUDA about in a child process."""


class Place:
    """A folder with memguard, a budget and what stands in for a missing GPU."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        self.others = [path for path in paths if Path(path).resolve() != package().parent]
        """Where other packages lie that are not installed for this Python."""
        for name in ("compiled", "source"):
            left_out = shutil.ignore_patterns("__pycache__", "pages")  # of the doctor: a link into docs/
            shutil.copytree(package(), folder / name / "memguard", ignore=left_out)
        compileall.compile_dir(folder / "compiled", quiet=1, workers=1)
        parts = "\n".join(f"  {name}: {{share: {share}}}" for name, share in SIX.items())
        self.budget = folder / "budget.yaml"
        self.budget.write_text(BUDGET.replace("{frameworks}", parts))
        self.stub, self.gpus_are = {}, "NVML's"
        if not gpu_here():
            built = self._stub()
            self.stub, self.gpus_are = (built, "a stub of NVML's") if built is not None else ({}, "simulated")

    def _stub(self) -> dict[str, str] | None:
        faults = ROOT / "tests" / "faults"
        if shutil.which("gcc") is None or not faults.is_dir():
            return None
        for source, library in (("nvml_stub.c", "libnvidia-ml.so.1"), ("cuda_stub.c", "libcuda.so.1")):
            subprocess.run(
                ["gcc", "-shared", "-fPIC", "-o", str(self.folder / library), str(faults / source)], check=True
            )
        scenario = self.folder / "scenario"
        scenario.write_text("".join(f"{key}={value}\n" for key, value in STUB.items()))
        paths = f"{self.folder}{os.pathsep}{os.environ.get('LD_LIBRARY_PATH', '')}"
        return {"LD_LIBRARY_PATH": paths, "NVML_STUB": str(scenario), "CUDA_STUB_UUIDS": UUID}

    def run(self, way: str) -> dict[str, Any]:
        """One process. Raises RuntimeError with its stderr if it fails."""
        left_out = ("MEMGUARD_", "PYTHON", "CUDA_VISIBLE_DEVICES")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        environ |= {**self.stub, "PYTHONDONTWRITEBYTECODE": "1"}
        paths = [str(self.folder / ("source" if way == "from source" else "compiled")), *self.others]
        environ["PYTHONPATH"] = os.pathsep.join(paths)
        if way == "one GPU visible":
            environ["CUDA_VISIBLE_DEVICES"] = "0"
        simulate = {"simulate": "h200"} if way == "simulated" or self.gpus_are == "simulated" else {}
        done = subprocess.run(
            [sys.executable, "-c", WAYS[way], str(self.budget), json.dumps(simulate)],
            capture_output=True, text=True, env=environ, cwd=self.folder, timeout=300,
        )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if done.returncode or not lines:
            raise RuntimeError(f"{way}: exit code {done.returncode}: {done.stderr[-1500:]}")
        found: dict[str, Any] = json.loads(lines[-1][7:])
        return found


def gpu_here() -> bool:
    try:
        import pynvml

        pynvml.nvmlInit()
        return bool(pynvml.nvmlDeviceGetCount())
    except Exception:
        return False


def measured(run: Callable[[str], dict[str, Any]], rounds: Mapping[str, int]) -> dict[str, list[dict[str, Any]]]:
    """What each way said, round by round. The first round of each is not kept: it fills the caches."""
    kept: dict[str, list[dict[str, Any]]] = {way: [] for way in rounds}
    for number in range(max(rounds.values(), default=0) + 1):
        order = [way for way, count in rounds.items() if number <= count and count]
        random.Random(number).shuffle(order)
        for way in order:
            found = run(way)
            if number:
                kept[way].append(found)
    return kept


def spread(values: list[float]) -> dict[str, float]:
    """As in startup.py, with readings in place of quantiles between them: the slowest counts if there are few."""
    inorder = sorted(values)
    last = len(values) - 1
    low, high = inorder[last // 20], inorder[last - last // 20]
    return {**startup.spread(values), "p5_ms": round(low * 1e3, 4), "p95_ms": round(high * 1e3, 4)}


def summary(kept: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Milliseconds of each way without nvmlInit, what nvmlInit and a second `init` took, and what it came to."""
    ways: dict[str, Any] = {}
    for way, runs in kept.items():
        if len(runs) < 2:
            continue
        one = ways[way] = {"without_nvml_init": spread([run["seconds"] - run["nvml_init"] for run in runs])}
        one["cpu"] = spread([run["cpu"] for run in runs])
        one["nvml_init"] = spread([run["nvml_init"] for run in runs])
        if "again" in runs[0]:
            one["a_second_init"] = spread([run["again"] for run in runs])
            one |= {key: runs[-1][key] for key in ("imported", "caps", "modules") if key in runs[-1]}

    def difference(way: str, control: str) -> dict[str, float]:
        pairs = zip(kept[way], kept[control])
        return spread([a["seconds"] - a["nvml_init"] - b["seconds"] + b["nvml_init"] for a, b in pairs])

    wanted = {"init again": "init", "fresh": "their imports", "their imports again": "their imports"}
    differences = {way: difference(way, control) for way, control in wanted.items() if {way, control} <= set(ways)}
    return {"ways": ways, "difference": differences}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--imported-rounds", type=int, default=5, help="each imports all six, which takes half a minute"
    )
    arguments = parser.parse_args()
    rounds = dict.fromkeys(WAYS, arguments.rounds) | {"imported": arguments.imported_rounds}
    with tempfile.TemporaryDirectory() as name:
        place = Place(Path(name))
        if place.gpus_are == "simulated":
            del rounds["one GPU visible"]
        about = {**header("python benchmarks/init.py"), "gpus_are": place.gpus_are, "cpus": os.cpu_count()}
        result: dict[str, Any] = {"about": about, **summary(measured(place.run, rounds))}
    result["checks"] = init_checks(result)
    conclude(result, arguments.output)
    for way, one in result["ways"].items():
        value, nvml = one["without_nvml_init"], one["nvml_init"]["median_ms"]
        second = f", a second init {one['a_second_init']['median_ms']:.1f}" if "a_second_init" in one else ""
        said = f"{value['median_ms']:.1f} ms (p5 {value['p5_ms']:.1f}, p95 {value['p95_ms']:.1f})"
        said += f", cpu {one['cpu']['median_ms']:.1f}"
        print(f"      {way}: {said}, nvmlInit {nvml:.1f}{second}")


if __name__ == "__main__":
    main()
