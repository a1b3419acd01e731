"""A seventh framework takes one folder and a changelog line: a copy of the package gets exactly that folder.

`toys/` has two, each with the library that it caps: `toy` has everything that a framework may have, and `arenas`
divides one cap among several objects. They allocate on the CPU. Each program below runs in a Python of its own, with
the copy on its path.
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
TOYS = Path(__file__).parent / "toys"

BUDGET = """version: 1
device: {limit: 16GiB}
frameworks:
  torch: {limit: 4GiB}
  toy: {share: 25%, tidy: true}
"""

HELPERS = '''
import json, sys
import memguard
from memguard import api, _budget; from memguard._budget import policy; from memguard._runtime import runtime
from memguard._devices.simulated import SimulatedHost
MIB, result = 1 << 20, {}

class Double(SimulatedHost):
    """Simulated GPUs that count as real."""
    simulated = False

def fill(take, size, name="toy"):
    """Allocate until the framework refuses; what the ledger and the report say then."""
    live = []
    try:
        with memguard.workload("fill", framework=name):
            while len(live) < 10_000:
                live.append(take(size))
    except Exception as error:
        result["refusal"] = [type(error).__module__, str(error)]
    report, ledger = memguard.last_oom(), memguard.ledger()
    result["report"] = report.as_dict(), str(report)
    (part,) = ledger.devices
    row = part.row(name)
    result["row"] = {name: getattr(row, name) for name in ("kind", "bytes", "in_use", "cap", "enforcement")}
    result["sum"] = sum(row.bytes or 0 for row in part.rows) - part.device.total
    result["table"] = str(ledger)
    return live
'''


@pytest.fixture(scope="module")
def seventh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the copy, the toy, and a budget that names it."""
    return copied(tmp_path_factory.mktemp("seventh"), "toy", BUDGET)


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the framework of several sessions."""
    budget = "version: 1\ndevice: {limit: 16GiB}\nframeworks:\n  arenas: {limit: 3GiB}\n"
    return copied(tmp_path_factory.mktemp("divided"), "arenas", budget)


def copied(folder: Path, name: str, budget: str) -> Path:
    copy, without = folder / "memguard", shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, copy, ignore=without)
    shutil.copy(TOYS / f"{name}.py", folder)
    shutil.copytree(TOYS / name, copy / "_frameworks" / name, ignore=without)  # the one change to memguard
    (folder / "budget.yaml").write_text(budget)
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
    schema = json.loads(command(seventh, "check", "--schema"))
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


def test_the_doctor_examines_it(seventh: Path, divided: Path) -> None:
    """By its probe; without one it tries the import."""
    for folder, name, version in ((seventh, "toy", "7.0"), (divided, "arenas", None)):
        for chosen in (["--framework", name], ["-c", "budget.yaml"]):
            done = run(folder, "-m", "memguard", "doctor", "--json", *chosen)
            found = json.loads(done.stdout)["frameworks"][name]
            assert found["seconds"] is not None and "not installed" not in found["state"], "its import was tried"
            assert found["version"] == version


def test_the_exchange_hands_its_arrays_over(seventh: Path) -> None:
    found = program(
        seventh,
        """
import numpy, toy
from memguard import exchange
values = numpy.arange(6.0).reshape(2, 3)
tensor = exchange.to(values, "toy")
result["kind"] = type(tensor).__name__
tensor.values[1, 2] = 7
result["shared"] = values[1, 2]
back = exchange.to(tensor, "numpy")
result["back"] = [back.tolist(), back.ctypes.data == values.ctypes.data]
for name in ("ty", "plaything"):
    try:
        exchange.to(values, name)
    except ValueError as error:
        result[name] = str(error)
""",
    )
    assert (found["kind"], found["shared"]) == ("Tensor", 7)
    assert found["back"] == [[[0, 1, 2], [3, 4, 7]], True]
    assert all("did you mean 'toy'?" in found[name] for name in ("ty", "plaything"))


def test_suspension_gates_it_and_asks_what_it_has_under_way(seventh: Path) -> None:
    found = program(
        seventh,
        """
from memguard._node.suspend.checks import in_process_checks; from memguard._node.suspend.gates import tables
result["gates"] = [entry.name for gates in tables.tables() if gates.hook == "toy" for entry in gates.waits]
import toy
result["idle"] = in_process_checks.look().captures
toy.capturing = 2
result["capturing"] = in_process_checks.look().captures
""",
    )
    assert found["gates"] == ["toy:empty", "toy:free_cache"]
    assert (found["idle"], found["capturing"]) == ([], ["toy: 2 captures under way"])


def test_one_cap_is_divided_among_several_objects_of_it(divided: Path) -> None:
    """As a framework needs it whose sessions have limits of their own, and nothing that limits them together."""
    found = program(
        divided,
        """
host = Double(["h200"])
(gpu,) = host.devices()
runtime.open_host = lambda simulate: host
import arenas
arenas.driver = lambda size: host.take(gpu, size) if size >= 0 else host.give(gpu, -size)
host.open_context(gpu, 518 * MIB)
guard = memguard.init("budget.yaml")
cap = result["plan"] = guard.plan.caps("arenas")[gpu.uuid]
one, two = arenas.Session(), arenas.Session()
own = arenas.Session(256 * MIB)
sessions = (one, two, own)
def limits():
    return [None if session.limit is None else session.limit // MIB for session in sessions]
def held():
    return [session.held // MIB for session in sessions]
result["begun"] = limits()
live = fill(one.run, 64 * MIB, "arenas")
result["full"] = held(), limits()
del live[24:]
more = [two.run(64 * MIB) for _ in range(16)]
result["moved"] = held(), limits()
try:
    while True:
        more.append(own.run(64 * MIB))
except arenas.Full:
    result["kept"] = held(), limits()
more.clear()
two.close()
result["closed"] = limits()
memguard.resize("arenas", "2560MiB")
result["resized"] = limits()
live.clear()
result["trimmed"] = memguard.trim("arenas") // MIB
result["after"] = limits()
result["stays"] = memguard.shutdown()
result["undone"] = [session.limit for session in (one, own, arenas.Session())]
""",
    )
    cap = 3 << 30
    assert found["plan"] == cap and found["begun"] == [1024, 1024, 256], "equal parts, and the user's own limit"
    assert found["full"] == [[3072, 0, 0], [3072, 0, 0]], "who asks gets what is left"
    row, (report, _) = found["row"], found["report"]
    assert (row["bytes"], row["in_use"], row["cap"], row["enforcement"]) == (cap, cap, cap, "enforced")
    assert found["refusal"][0] == report["requester"] == "arenas" and found["sum"] == 0
    assert (report["reason"], report["requested"], report["moment"]["held"]) == ("cap", 64 << 20, cap)
    assert found["moved"] == [[1536, 1024, 0], [1536, 1536, 0]], "and what others hold without need"
    assert found["kept"] == [[1536, 1024, 256], [1536, 1024, 256]], "its user's limit is the smaller one"
    assert found["closed"] == [1536 + (3072 - 1536 - 256) // 2, None, 256], "divided anew: held, and a part of the rest"
    assert found["resized"] == [1536 + (2560 - 1536 - 256) // 2, None, 256]
    assert (found["trimmed"], found["after"]) == (1536 + 256, [1280, None, 256])
    assert found["stays"] == [] and found["undone"] == [None, 256 << 20, None]


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
host = Double(["h200"])
(gpu,) = host.devices()
runtime.open_host = lambda simulate: host
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
