"""A seventh framework takes one folder and a changelog line: a copy of the package gets exactly that folder.

The toy allocates on the CPU. Each program below runs in a Python of its own, with the copy on its path.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import memguard

pytestmark = pytest.mark.long  # no version of what is installed changes what only developers run

PACKAGE = Path(memguard.__file__).parent

TOY = '''
"""A framework whose arrays lie in the CPU's memory. Its pool keeps what is freed until `free_cache`."""


class Exhausted(Exception):
    pass


limit, used, cached, peak = None, 0, 0, 0
driver_take = driver_give = lambda size: None


def empty(size):
    global used, cached, peak
    grow = max(size - cached, 0)
    if limit is not None and used + cached + grow > limit:
        raise Exhausted(f"toy memory is exhausted: failed to allocate {size} bytes")
    driver_take(grow)
    used, cached = used + size, cached + grow - size
    peak = max(peak, used)
    return Array(size)


def free_cache():
    global cached
    driver_give(cached)
    cached = 0


class Array:
    def __init__(self, size):
        self.size = size

    def __del__(self):
        global used, cached
        used, cached = used - self.size, cached + self.size
'''

ADAPTER = '''
"""The toy, capped by the limit of its pool."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from memguard._frameworks.base import Framework
from memguard._frameworks.toy.spec import SPEC
from memguard._base.types import Applied, Device, Enforcement, Usage


class Toy(Framework):
    """The toy's pool."""

    spec = SPEC

    def _live(self, module: ModuleType) -> bool:
        return module.peak > 0

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any]) -> Applied:
        toy = sys.modules["toy"]
        before, toy.limit = toy.limit, min(caps.values())
        toy.tidy = options["tidy"]
        return Applied(Enforcement.ENFORCED, lambda: setattr(toy, "limit", before))

    def usage(self, device: Device) -> Usage | None:
        toy = sys.modules.get("toy")
        if toy is None or not self._live(toy):
            return None
        return Usage(toy.used + toy.cached, toy.used, toy.cached, peak=toy.peak)

    def trim(self, device: Device) -> None:
        if "toy" in sys.modules:
            sys.modules["toy"].free_cache()

    def resize(self, caps: Mapping[str, int]) -> None:
        sys.modules["toy"].limit = min(caps.values())
'''

SPEC = """
from memguard._base.framework_spec import ErrorPattern, FrameworkSpec, Option
from memguard._base.units import MIB

SPEC = FrameworkSpec(
    name="toy",
    title="Toy",
    module="toy",
    adapter="memguard._frameworks.toy.adapter:Toy",
    modules=2 * MIB,
    workspace=16 * MIB,
    cap_is="the limit of its toy pool",
    aliases=("plaything",),
    options=(
        Option(
            name="tidy",
            kind="flag",
            default=False,
            description="true: the toy frees its cache at once.",
            elsewhere="{name} frees its cache by itself",
        ),
    ),
    families=("toy",),
    errors=(ErrorPattern("gpu", True, "the toy's own type", "toy memory is exhausted", r"^toy\\.Exhausted$"),),
    own_trim="toy.free_cache()",
)
"""

BUDGET = """version: 1
device: {limit: 16GiB}
frameworks:
  torch: {limit: 4GiB}
  toy: {share: 25%, tidy: true}
"""

HELPERS = '''
import json, sys
import memguard
from memguard import api, _budget; from memguard._budget import policy
from memguard._devices.simulated import SimulatedHost
MIB, result = 1 << 20, {}

def fill(take, size):
    """Allocate until the framework refuses; what the ledger and the report say then."""
    live = []
    try:
        with memguard.workload("fill", framework="toy"):
            while len(live) < 10_000:
                live.append(take(size))
    except Exception as error:
        result["refusal"] = [type(error).__module__, str(error)]
    report, ledger = memguard.last_oom(), memguard.ledger()
    result["report"] = report.as_dict(), str(report)
    (part,) = ledger.devices
    row = part.row("toy")
    result["row"] = {name: getattr(row, name) for name in ("kind", "bytes", "in_use", "cap", "enforcement")}
    result["sum"] = sum(row.bytes or 0 for row in part.rows) - part.device.total
    result["table"] = str(ledger)
'''


@pytest.fixture(scope="module")
def seventh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the copy, the toy, and a budget that names it."""
    folder = tmp_path_factory.mktemp("seventh")
    copy = folder / "memguard"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "toy.py").write_text(TOY)
    (copy / "_frameworks" / "toy").mkdir()
    for name, text in {"__init__": "", "spec": SPEC, "adapter": ADAPTER}.items():
        (copy / "_frameworks" / "toy" / f"{name}.py").write_text(text)
    (folder / "budget.yaml").write_text(BUDGET)
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEMGUARD_")}
    environment["PYTHONPATH"] = str(folder)
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def program(folder: Path, code: str) -> dict[str, Any]:
    """What `result` holds after the code."""
    code = f"{HELPERS}{code}\nassert memguard.__file__.startswith({str(folder)!r})\nprint('RESULT', json.dumps(result))"
    done = run(folder, "-c", code)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.split("RESULT ", 1)[1])
    return found


def command(folder: Path, *arguments: str) -> str:
    done = run(folder, "-m", "memguard", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_planned(seventh: Path) -> None:
    table = command(seventh, "plan", "budget.yaml", "--device", "h200")
    (line,) = [line for line in table.splitlines() if line.split()[:1] == ["toy"]]
    assert "the limit of its toy pool" in line
    (part,) = json.loads(command(seventh, "plan", "budget.yaml", "--device", "h200", "--json"))["devices"]
    room = part["limit"] - part["reserve"]
    assert part["reserve"] == (544 + 384 + 16 + 64) << 20, "context, torch, the toy's workspace, slack"
    assert 0 <= room // 4 - part["caps"]["toy"] < 2 << 20


def test_it_is_in_the_schema_and_in_the_errors_that_name_the_frameworks(seventh: Path) -> None:
    schema = json.loads(command(seventh, "schema"))
    frameworks = schema["properties"]["frameworks"]["properties"]
    assert list(frameworks)[-1] == "toy"
    settings = schema["$defs"][frameworks["toy"]["$ref"].removeprefix("#/$defs/")]["properties"]
    assert list(settings) == ["share", "limit", "min", "max", "tidy"]
    tidy = settings["tidy"]
    assert tidy["type"] == "boolean" and tidy["default"] is False and "frees its cache" in tidy["description"]
    assert "theano" in refused(seventh, "theano: {share: 50%}", "numba, toy")
    refused(seventh, "plaything: {share: 50%}", "'toy'")  # an alias of its row
    refused(seventh, "toy: {share: 50%, tidy: 7}", "frameworks.toy.tidy")
    refused(seventh, "cupy: {share: 50%, tidy: true}", "tidy is a setting of toy", "cupy frees its cache by itself")


def test_the_doctor_examines_it(seventh: Path) -> None:
    """It has no probe of its own: the doctor tries the import."""
    for chosen in (["--framework", "toy"], ["budget.yaml"]):
        done = run(seventh, "-m", "memguard", "doctor", "--json", *chosen)
        found = json.loads(done.stdout)["frameworks"]["toy"]
        assert found["seconds"] is not None and "not installed" not in found["state"], "its import was tried"


def refused(folder: Path, line: str, *words: str) -> str:
    """The message about a budget with this line."""
    (folder / "wrong.yaml").write_text(f"version: 1\nframeworks:\n  {line}\n")
    done = run(folder, "-m", "memguard", "check", "wrong.yaml")
    assert done.returncode == 2 and "wrong.yaml:3:" in done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    return done.stderr


def test_the_real_adapter_is_capped_reported_and_undone(seventh: Path) -> None:
    """On a host double: simulated GPUs that count as real, from which the toy's driver takes."""
    found = program(
        seventh,
        """
class Double(SimulatedHost):
    simulated = False
host = Double(["h200"])
(gpu,) = host.devices()
api._host = lambda simulate: host
guard = memguard.init("budget.yaml")
result["before"] = str(guard)
import toy
result["plan"] = guard.plan.caps("toy")[gpu.uuid]
result["tidy"] = toy.tidy
result["class"] = type(guard.frameworks["toy"]).__module__
toy.driver_take, toy.driver_give = lambda n: host.take(gpu, n), lambda n: host.give(gpu, n)
host.open_context(gpu, 518 * MIB)
fill(toy.empty, 64 * MIB)
with memguard.workload("half", framework="toy") as work:
    kept = toy.empty(256 * MIB)
result["workload"] = work.peak
memguard.resize("toy", "512MiB")
result["resized"] = toy.limit
del kept
result["trimmed"] = memguard.trim("toy")
result["stays"] = memguard.shutdown()
result["limit"] = toy.limit
""",
    )
    assert found["class"] == "memguard._frameworks.toy.adapter" and "toy" in found["before"] and found["tidy"] is True
    assert found["refusal"][0] == "toy"
    check(found)
    assert found["resized"] == 512 << 20 and found["trimmed"] > 0 and found["stays"] == [] and found["limit"] is None


def test_its_simulated_stand_in_is_capped_and_reported(seventh: Path) -> None:
    found = program(
        seventh,
        """
guard = memguard.init("budget.yaml", simulate="h200")
(gpu,) = guard.host.devices()
result["plan"] = guard.plan.caps("toy")[gpu.uuid]
fill(guard.frameworks["toy"].allocate, 64 * MIB)
""",
    )
    assert "simulated toy" in found["refusal"][1]
    check(found)


def check(found: dict[str, Any]) -> None:
    row, cap = found["row"], found["plan"]
    assert (row["kind"], row["cap"], row["enforcement"]) == ("framework", cap, "enforced")
    assert cap - (128 << 20) < row["bytes"] <= cap and 0 < row["in_use"] <= row["bytes"]
    assert found["sum"] == 0 and "toy" in found["table"]
    report, text = found["report"]
    assert (report["memory"], report["requester"], report["requested"]) == ("gpu", "toy", 64 << 20)
    assert report["reason"] == "cap" and report["certain"] and "toy ran out of GPU memory" in text
    assert any("frameworks.toy" in remedy["text"] for remedy in report["remedies"])
