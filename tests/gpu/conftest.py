"""GPU tests run if NVML reports a GPU; otherwise all of them are skipped.

With pytest-xdist, run `-n 8 -m "not whole_card"`, then `-m whole_card`: those tests fill the GPU.

`--thorough` runs the full counts and durations of a release: 1,000 rounds instead of 60, five minutes at the caps, ten
without an alarm, all 30 import orders, each third-party suite completely. The assertions are the same. It takes about
an hour. `--pycuda-tests FOLDER` (or MEMGUARD_PYCUDA_TESTS) names the folder `test/` of PyCUDA's sdist, in the installed
version; without it PyCUDA's own tests are skipped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpus_here import environment

from bench.child import Sampler


def gpu_missing() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return None if pynvml.nvmlDeviceGetCount() else "NVML shows no GPU"
    except Exception as error:
        return f"no GPU: {error}"


MISSING = gpu_missing()
HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="tests/gpu: the full counts and durations of a release")
    parser.addoption(
        "--pycuda-tests", type=Path, default=os.environ.get("MEMGUARD_PYCUDA_TESTS"),
        help="tests/gpu: the folder test/ of PyCUDA's sdist",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "thorough: repeats other cases; runs only with --thorough")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    thorough = config.getoption("--thorough", default=False)
    for item in items:
        if HERE in item.path.parents and MISSING:
            item.add_marker(pytest.mark.skip(reason=MISSING))
        elif item.get_closest_marker("thorough") and not thorough:
            item.add_marker(pytest.mark.skip(reason="runs only with --thorough"))
        elif HERE in item.path.parents and thorough:
            item.add_marker(pytest.mark.time_limit(1200))


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--thorough", default=False))


@pytest.fixture
def run(thorough: bool) -> Callable[..., dict[str, Any]]:
    """Run code in a new process and return its dict `result`. A crash fails the test with the process's stderr.

    timeout   seconds, after which it is killed with all processes that it started
    rc        the expected exit code
    sampled   `nvml` contains NVML's figures of the process, sampled every 20 ms: see `bench.sampler.summary`
    """

    def call(
        code: str, *, env: dict[str, str] | None = None, timeout: float = 120, rc: int = 0, sampled: bool = False
    ) -> dict[str, Any]:
        program = (
            "import faulthandler, json, os\nfaulthandler.enable()\nimport memguard\nGIB, MIB = 1 << 30, 1 << 20\n"
            f"THOROUGH = {thorough}\nresult = {{}}\n"
            + textwrap.dedent(code)
            + "\nprint('RESULT ' + json.dumps(result), flush=True)\n"
        )
        sampler, begun = Sampler(0.02) if sampled else None, time.monotonic()
        with subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(**{"TF_CPP_MIN_LOG_LEVEL": "2", **(env or {})}), start_new_session=True,
        ) as child:  # fmt: skip
            try:
                if sampler is not None:
                    sampler.start(child.pid)
                out, err = child.communicate(timeout=timeout)
            except BaseException:
                os.killpg(child.pid, signal.SIGKILL)
                raise
            finally:
                nvml = {**sampler.stop(), "wall_s": time.monotonic() - begun} if sampler is not None else None
        said = err.partition("\nExtension modules: ")[0]  # without a crash's hundreds of names, which hide its stacks
        assert child.returncode == rc, f"rc {child.returncode}\n{out[-2000:]}\n{said[-8000:]}"
        lines = [line[7:] for line in out.splitlines() if line.startswith("RESULT ")]
        found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        return {**found, "stderr": err, **({} if nvml is None else {"nvml": nvml})}

    return call
