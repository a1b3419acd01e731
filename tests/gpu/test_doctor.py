"""`memguard doctor` on this GPU: what works is said to work, and a framework that dies or hangs is a finding."""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from gpus_here import ROOT

from memguard._tools.doctor.examine import examine
from memguard._tools.doctor.facts import Facts


def doctor(*arguments: str, **variables: str) -> tuple[int, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "memguard", "doctor", *arguments],
        capture_output=True, text=True, timeout=170, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **variables},
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax", "cupy", "pycuda", "numba"])
def test_each_framework_is_seen_at_work(framework: str) -> None:
    _, facts = doctor("--dump-facts", "--framework", framework)
    found = facts["frameworks"][framework]
    assert found["probe"]["exit"] == 0
    last = found["probe"]["stages"][-1]  # Numba's is its second try where NumPy is too new for it
    assert last["name"].startswith("compute") and not last.get("error"), found["probe"]["stages"]
    assert found["gpus"] >= 1 and found["version"] and found["path"]
    assert any("libcuda.so" in path for path in found["probe"]["libraries"])


def test_the_driver_is_read_from_all_its_sides() -> None:
    _, facts = doctor("--dump-facts", "--framework", "cupy")
    driver = facts["driver"]
    assert driver["module"] == driver["nvml"]["driver"]
    assert driver["cuda"]["init"] == "CUDA_SUCCESS" and driver["cuda"]["version"] == driver["nvml"]["cuda"]
    assert {gpu["uuid"] for gpu in driver["cuda"]["devices"]} <= {gpu["uuid"] for gpu in driver["nvml"]["devices"]}
    assert facts["driver"]["files"]["/dev/nvidiactl"] == "ok"


def test_a_framework_that_hangs_is_a_finding_and_the_others_are_told_of(tmp_path: Path) -> None:
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text("import time\ntime.sleep(600)\n")
    path = f"{ROOT}{os.pathsep}{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    rc, found = doctor("--json", "--framework", "cupy", "--framework", "torch", "--timeout", "20", PYTHONPATH=path)
    named = {(finding["name"], finding["subject"]) for finding in found["findings"]}
    assert rc == 1 and ("probe-hung", "cupy") in named
    assert not [name for name, subject in named if subject == "torch" and name.startswith(("probe", "framework"))]


def test_a_framework_that_dies_is_a_finding_and_the_others_are_told_of() -> None:
    """XLA ends the process over a flag that it does not know."""
    rc, found = doctor("--json", "--framework", "jax", "--framework", "torch", XLA_FLAGS="--no_such_flag=1")
    named = {(finding["name"], finding["subject"]) for finding in found["findings"]}
    assert rc == 1 and ("probe-crashed", "jax") in named
    assert not [name for name, subject in named if subject == "torch" and name.startswith(("probe", "framework"))]


# --- faults that can be provoked: the doctor finds and names each, and nothing else


def true_of_this_machine() -> set[tuple[str, str]]:
    """Findings on this machine besides the provoked fault: too new a NumPy for Numba, different CUDAs of TensorFlow and
    PyTorch."""
    found: set[tuple[str, str]] = set()
    if np_version() >= (2, 5) and importlib.metadata.version("numba-cuda") == "0.30.4":
        found.add(("numpy-abi", "numba"))
    tensorflow = cuda_of("tensorflow", "python/platform/build_info.py", r"'cuda_version'\W+(\d+)")
    torch = cuda_of("torch", "version.py", r"cuda: .*= '(\d+)")
    if tensorflow != torch:
        found |= {("library-wrong-major", "tensorflow"), ("cuda-majors-mixed", "torch, jax"), ("import-order", "torch")}
    return found


def np_version() -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version("numpy").split(".")[:2])


def cuda_of(name: str, file: str, pattern: str) -> str:
    """The major CUDA version that a framework was built for, read from one of its files without an import."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    found = re.search(pattern, (Path(spec.origin).parent / file).read_text())
    assert found is not None
    return found[1]


def above_info(facts: Any) -> dict[tuple[str, str], str]:
    """The findings' names and subjects, with their causes, from recorded facts."""
    found = examine(Facts.from_json(json.dumps(facts)))
    return {(one.name, one.subject): one.cause for one in found if str(one.severity) != "info"}


def within(code: str, framework: str) -> Any:
    """The facts of `memguard.doctor()` in a process that ran `code` first."""
    code += f"\nimport memguard\nreport = memguard.doctor(frameworks=[{framework!r}])\n"
    code += "print('FACTS' + report.facts.to_json().replace('\\n', ' '))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=170, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    lines = [line.removeprefix("FACTS") for line in done.stdout.splitlines() if line.startswith("FACTS")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0])


def found_and_nothing_else(facts: Any, expected: str) -> str:
    """The finding's cause."""
    found = above_info(facts)
    others = {name for name, _ in found} - {name for name, _ in true_of_this_machine()} - {expected}
    causes = [cause for (name, _), cause in found.items() if name == expected]
    assert causes and not others, found
    return causes[0]


def test_doctor_finds_only_this_machines_own_faults_with_all_six() -> None:
    _, facts = doctor("--dump-facts")
    assert set(above_info(facts)) == true_of_this_machine()
    probes = Facts.from_json(json.dumps(facts)).seconds
    assert {"torch", "tensorflow", "jax", "cupy", "pycuda", "numba"} <= set(probes), "each probe's time is shown"


SOME = ("--framework", "torch", "--framework", "cupy")
BUDGET = "version: 1\ndevice: {limit: 8GiB}\nframeworks:\n  tensorflow: {limit: 2GiB}\n  torch: {limit: 2GiB}\n"
FRACTIONS = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3", "XLA_CLIENT_MEM_FRACTION": "0.3"}
PROVOKED = {
    "visible-devices-unknown": (SOME, {"CUDA_VISIBLE_DEVICES": "7"}),
    "xla-fractions": (("--framework", "jax"), FRACTIONS),
    "async-allocator": (
        ("-c", "budget.yaml", "--framework", "tensorflow"), {"TF_GPU_ALLOCATOR": "cuda_malloc_async"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROVOKED)
def test_a_setting_that_is_wrong(name: str, tmp_path: Path) -> None:
    arguments, variables = PROVOKED[name]
    (tmp_path / "budget.yaml").write_text(BUDGET)
    arguments = tuple(str(tmp_path / one) if one.endswith(".yaml") else one for one in arguments)
    found_and_nothing_else(doctor("--dump-facts", *arguments, **variables)[1], name)


def test_a_second_context() -> None:
    facts = within("import torch, pycuda.autoinit\ntorch.ones(1, device='cuda')", "torch")
    found_and_nothing_else(facts, "second-context")


def test_two_copies_of_a_library() -> None:
    """Open the toolkit's CUDA by its path, as some libraries do."""
    major = cuda_of("torch", "version.py", r"cuda: .*= '(\d+)")
    copies = sorted(glob.glob(f"/usr/local/cuda-{major}*/targets/*/lib/libcudart.so.{major}"))
    if not copies:
        pytest.skip("needs CUDA's toolkit")
    code = f"import ctypes, torch\ntorch.ones(1, device='cuda')\nctypes.CDLL({copies[0]!r})"
    found_and_nothing_else(within(code, "torch"), "library-twice")


def test_a_program_that_imports_tensorflow_before_pytorch(tmp_path: Path) -> None:
    if ("import-order", "torch") not in true_of_this_machine():
        pytest.skip("needs TensorFlow and PyTorch for different CUDAs")
    script = tmp_path / "train.py"
    script.write_text("import tensorflow as tf\nimport torch\n")
    _, facts = doctor("--dump-facts", "--script", str(script), "--framework", "torch", "--framework", "tensorflow")
    cause = found_and_nothing_else(facts, "import-order")
    # torch reads 1 multiprocessor, not 132; whether it then dies depends on the cuBLAS that it finds.
    assert "torch reads its GPU wrongly" in cause or "torch dies" in cause, cause


@pytest.mark.whole_card
def test_a_full_card() -> None:
    code = (
        "import sys, torch\nfree, total = torch.cuda.mem_get_info()\n"
        "kept = torch.empty(free - (320 << 20), dtype=torch.uint8, device='cuda')\n"
        "print('full', flush=True)\nsys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        timer = threading.Timer(200, other.kill)
        timer.start()
        try:
            assert other.stdout is not None and other.stdout.readline().strip() == "full"
            facts = doctor("--dump-facts", *SOME)[1]
        finally:
            timer.cancel()
            other.kill()
    found_and_nothing_else(facts, "card-filled")


@pytest.mark.thorough
@pytest.mark.whole_card
def test_six_frameworks_take_at_most_20_s() -> None:
    times = []
    for _ in range(3):
        begun = time.monotonic()
        doctor("--dump-facts")
        times.append(time.monotonic() - begun)
    assert max(times) <= 20, times
