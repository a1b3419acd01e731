"""What the benchmarks share: scenarios in processes of their own, NVML sampling from outside, one JSON."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
GIB = 1 << 30
SIX = {"tensorflow": "20%", "torch": "25%", "jax": "20%", "cupy": "15%", "pycuda": "10%", "numba": "10%"}
"""All six frameworks, with their shares of `SIX_LIMIT`."""
SIX_LIMIT = 40 * GIB
APART = ("_doctor", "cli")
"""Packages of memguard that no measured program loads."""
_PACKAGES = (
    "torch", "tensorflow", "pycuda", "cupy-cuda13x", "cupy-cuda12x", "jax", "jaxlib", "numba", "numba-cuda", "rmm-cu13",
    "cuda-core", "ml-dtypes", "nvidia-ml-py", "cuda-bindings", "pydantic", "PyYAML", "numpy", "keras",
)  # fmt: skip


def budget_of_six(**tensorflow: Any) -> dict[str, Any]:
    """Every framework under 40 GiB, with more settings for TensorFlow (`growth=False`: then it says what it holds)."""
    frameworks: dict[str, dict[str, Any]] = {name: {"share": share} for name, share in SIX.items()}
    frameworks["tensorflow"].update(tensorflow)
    return {"version": 1, "device": {"limit": "40GiB"}, "frameworks": frameworks}


def source_hash(whole: bool = False) -> str:
    """A hash of `memguard/`: results measured with another one are stale.

    Without `cli/` and `checkup/`, unless `whole`: a program under a budget loads nothing of them, so they change no
    figure of it. tests/unit/test_measured_source.py holds that.
    """
    digest = hashlib.sha256()
    package = ROOT / "memguard"
    if not package.is_dir():  # a tree that is tested against an installed wheel
        spec = importlib.util.find_spec("memguard")
        assert spec is not None and spec.origin is not None
        package = Path(spec.origin).parent
    for path in sorted(package.rglob("*.py")):
        if not whole and path.relative_to(package).parts[0] in APART:
            continue
        digest.update(str(path.relative_to(package.parent)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def header(command: str, *, whole: bool = False) -> dict[str, Any]:
    """What a result begins with. `whole`: commands and doctor are what is measured."""
    about = {
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "memguard_hash": source_hash(whole),
        "versions": versions(),
    }
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        about["gpu"] = pynvml.nvmlDeviceGetName(handle)
        about["driver"] = pynvml.nvmlSystemGetDriverVersion()
        about["gpus"] = pynvml.nvmlDeviceGetCount()
    except Exception as error:  # no GPU: the result says so
        about["gpu"] = None
        about["gpu_missing"] = str(error)
    if "tensorflow" in about["versions"]:
        about["tensorflow_build"] = os.environ.get("MEMGUARD_TF_BUILD", "as it is installed")
    return about


class Sampler:
    """NVML's figure for one PID every 50 ms, from a thread of the parent: the child's GIL cannot slow it."""

    def __init__(self, interval: float = 0.05) -> None:
        self.interval = interval
        self.pid = 0
        self.samples: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, pid: int) -> None:
        self.pid = pid
        self._thread.start()

    def stop(self) -> dict[str, Any]:
        self._stop.set()
        self._thread.join()
        gaps = [b[0] - a[0] for a, b in zip(self.samples, self.samples[1:])]
        return {
            "samples": len(self.samples),
            "interval_ms": self.interval * 1e3,
            "longest_gap_ms": round(max(gaps, default=0) * 1e3, 1),
            "max_bytes": max((size for _, size in self.samples), default=0),
        }

    def _run(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            by_uuid = shown.startswith("GPU-") and "," not in shown
            handle = pynvml.nvmlDeviceGetHandleByUUID(shown) if by_uuid else pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception:
            return
        following = time.monotonic()
        while not self._stop.is_set():
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == self.pid:
                    self.samples.append((time.monotonic(), process.usedGpuMemory or 0))
            following += self.interval
            self._stop.wait(max(following - time.monotonic(), 0))


def run_scenario(script: str, name: str, *, env: dict[str, str] | None = None, timeout: float = 240) -> dict[str, Any]:
    """One scenario in a process of its own: what it printed as RESULT, how it ended, and NVML's view of it."""
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1", "TF_CPP_MIN_LOG_LEVEL": "0", **(env or {})}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    started = time.monotonic()
    sampler = Sampler()
    child = subprocess.Popen(
        [sys.executable, script, "--scenario", name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    sampler.start(child.pid)
    try:
        out, err = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        child.kill()
        out, err = child.communicate()
        err += "\n(killed: time limit)"
    outcome: dict[str, Any] = {
        "returncode": child.returncode,
        "seconds": round(time.monotonic() - started, 1),
        "wall_s": round(time.monotonic() - started, 1),
        "nvml": sampler.stop(),
    }
    results = [line[7:] for line in out.splitlines() if line.startswith("RESULT ")]
    if results:
        outcome.update(json.loads(results[-1]))
    else:
        outcome["stderr_tail"] = err[-1500:]
        outcome["stdout_tail"] = out[-800:]
    outcome["_stderr"] = err
    return outcome


def emit(result: dict[str, Any]) -> None:
    """Print a scenario's result for its parent."""
    print("RESULT " + json.dumps(result), flush=True)


def conclude(result: dict[str, Any], output: Path | None) -> None:
    """Write the result where that was asked for, and print its checks."""
    if output:
        output.write_text(json.dumps(result, indent=1) + "\n")
    for name, (passed, figure) in result["checks"].items():
        print(f"{'pass' if passed else 'FAIL'}  {name}: {figure}")


def main(script: str, scenarios: dict[str, Callable[[], dict[str, Any]]], parent: Callable[[Path], None]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scenario", choices=sorted(scenarios))
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if arguments.scenario:
        emit(scenarios[arguments.scenario]())
    else:
        parent(arguments.output)
