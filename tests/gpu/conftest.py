"""GPU tests run where NVML shows a GPU, and are skipped nowhere else.

With pytest-xdist: `-n 6 -m "not whole_card"`, then `-m whole_card`: those fill the card.

`MEMGUARD_GPU_REPORT=path` writes what ran, with a hash of `memguard/`: committed under `benchmarks/results/`. What ran
before on the same code is kept beside it: a test that passes when it runs again has failed once all the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))


def gpu_missing() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return None if pynvml.nvmlDeviceGetCount() else "NVML shows no GPU"
    except Exception as error:
        return f"no GPU: {error}"


MISSING = gpu_missing()
HERE = Path(__file__).parent
results: dict[str, str] = {}
chosen: set[str] = set()
"""The tests that were to run: one that the run ends before is reported as `not run`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if MISSING:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=MISSING))


def pytest_collection_finish(session: pytest.Session) -> None:
    chosen.update(item.nodeid for item in session.items if HERE in item.path.parents)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """With pytest-xdist only the workers collect."""
    chosen.update(name for name in ids if "tests/gpu/" in name)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "tests/gpu/" in report.nodeid and (report.when == "call" or report.outcome != "passed"):
        results[report.nodeid] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    target = os.environ.get("MEMGUARD_GPU_REPORT")
    if not target or MISSING or hasattr(session.config, "workerinput"):  # a worker of pytest-xdist sees only its part
        return
    from _run import RESULTS, header, with_earlier_tests

    results.update(dict.fromkeys(chosen - set(results), "not run"))
    about = header(f"python -m pytest {' '.join(session.config.invocation_params.args)}")
    path = Path(target)
    place = next((place for place in (path, RESULTS / path.name) if place.exists()), None)
    before = json.loads(place.read_text()) if place is not None else None
    path.write_text(json.dumps(with_earlier_tests(before, about, results), indent=1) + "\n")


@pytest.fixture
def run() -> Callable[..., dict[str, Any]]:
    """Run code in a process of its own; it leaves its findings in `result`. A crash fails the test with its stderr."""

    def call(code: str, *, env: dict[str, str] | None = None, timeout: float = 120, rc: int = 0) -> dict[str, Any]:
        program = (
            "import faulthandler, json, os\nfaulthandler.enable()\nimport memguard\nGIB, MIB = 1 << 30, 1 << 20\n"
            "result = {}\n" + textwrap.dedent(code) + "\nprint('RESULT ' + json.dumps(result), flush=True)\n"
        )
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "MEMGUARD_ROOT": str(ROOT), **(env or {})}
        environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=timeout, env=environment
        )
        said = done.stderr.partition("\nExtension modules: ")[0]  # of a crash: hundreds of names that hide its stacks
        assert done.returncode == rc, f"rc {done.returncode}\n{done.stdout[-2000:]}\n{said[-8000:]}"
        lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        found["stderr"] = done.stderr
        return found

    return call


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where there is no GPU: when these tests last ran on one, and whether memguard has changed since."""
    if MISSING:
        from table import status

        terminalreporter.write_line(f"tests/gpu: {MISSING}. Last results on a GPU:")
        for line in status():
            terminalreporter.write_line(f"  {line}")
