"""GPU tests run if NVML reports a GPU; otherwise all of them are skipped.

With pytest-xdist, run `-n 8 -m "not whole_card"`, then `-m whole_card`: those tests fill the GPU. The long tests then
start first, and each process gets one test at a time. One line reports each failure at once; an interrupted run
(`timeout -s INT`) also lists the tests that had not ended.

`--thorough` runs the full counts and durations of a release: 1,000 rounds instead of 60, five minutes at the caps, ten
without an alarm, all 30 import orders, each third-party suite completely. The assertions are the same. It takes about
an hour. `--pycuda-tests FOLDER` (or MEMGUARD_PYCUDA_TESTS) names the folder `test/` of PyCUDA's sdist, in the installed
version; without it PyCUDA's own tests are skipped.
"""

from __future__ import annotations

import itertools
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
LONG = (
    "test_six_frameworks_stop_at_their_caps_while_the_others_are_full",
    "test_out_of_memory[generate]",
    "test_six_frameworks_at_their_caps_do_not_drift",
    "test_each_round_keeps_the_values_and_leaks_nothing[all six]",
    "test_rising_and_falling_use_raises_no_alarm",
    "test_calls_of_other_threads_wait_or_are_refused_without_a_crash",
    "test_no_exchange_is_stale_while_the_producer_still_works",
    "test_self_suspend_interrupted_at_each_step_recovers",
    "test_out_of_memory",
    "test_no_alarm_of_programs_in_order",
    "test_three_frameworks_stop_at_their_caps",
    "test_resume_restores_a_process_whose_controller_was_killed",
    "test_each_round_keeps_the_values_and_leaks_nothing",
    "test_all_six_in_an_order_and_its_reverse",
    "test_a_program_passes_under_the_budget_of_its_own_run",
    "test_numba_cudas_own",
    "test_every_pair_shares_its_pointer_each_dtype_and_nothing_is_lost",
    "test_with_fixed_shares_refusals_of_the_same_schedule_are_avoidable",
    "test_at_its_own_cap",
    "test_unusual_arrays_get_the_documented_answer_without_a_crash",
)
"""Tests, or one case of them, that take from half a minute to two and a half; in an order in which those that hold 20
to 40 GiB are not all at work at once."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="tests/gpu: the full counts and durations of a release")
    parser.addoption(
        "--pycuda-tests", type=Path, default=os.environ.get("MEMGUARD_PYCUDA_TESTS"),
        help="tests/gpu: the folder test/ of PyCUDA's sdist",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "thorough: repeats other cases; runs only with --thorough")
    alone = all(HERE in (path := Path(arg.partition("::")[0]).resolve()).parents or path == HERE for arg in config.args)
    if alone and getattr(config.option, "maxschedchunk", 1) is None:  # pytest-xdist gives out several at once otherwise
        config.option.maxschedchunk = 1
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Teller(), "memguard-gpu-teller")
    elif config.getoption("maxschedchunk", None) == 1:
        config.pluginmanager.register(LongFirst(), "memguard-gpu-order")


class LongFirst:
    @pytest.hookimpl(trylast=True)  # after -m and -k have chosen
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = long_first(items)


class Teller:
    """Tells of each failure as it happens, and of what had not ended: a run that is killed at its limit shows no more.

    With pytest-xdist in the process that gives out the tests.
    """

    def __init__(self) -> None:
        self.began: dict[str, float] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.began[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.began.pop(nodeid, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            if report.when not in ("setup", "call", "teardown"):  # its process died: its end is told by nothing else
                self.began.pop(report.nodeid, None)
            crash = getattr(report.longrepr, "reprcrash", None)
            said = in_short(str(report.longrepr if crash is None else crash.message))
            self._say(f"{report.nodeid}: {report.when} failed after {report.duration:.0f} s: {said}")

    def pytest_sessionfinish(self) -> None:
        for nodeid, began in self.began.items():
            self._say(f"{nodeid}: had not ended after {time.monotonic() - began:.0f} s")

    @staticmethod
    def _say(line: str) -> None:
        print(f"\n{line}", file=sys.stderr, flush=True)


def in_short(message: str) -> str:
    """An error's first line, and the last one before pytest explains the assertion: the end of a child's stderr."""
    lines = [line.strip()[:300] for line in message.splitlines() if line.strip()]
    end = next((max(at, 1) for at, line in enumerate(lines) if line.startswith("assert ")), len(lines))
    return " … ".join(dict.fromkeys((*lines[:1], *lines[:end][-1:])))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    thorough = config.getoption("--thorough", default=False)
    for item in items:
        if HERE in item.path.parents and MISSING:
            item.add_marker(pytest.mark.skip(reason=MISSING))
        elif item.get_closest_marker("thorough") and not thorough:
            item.add_marker(pytest.mark.skip(reason="runs only with --thorough"))
        elif HERE in item.path.parents and thorough:
            item.add_marker(pytest.mark.time_limit(1200))


def long_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """The long tests in turn with the others, as pytest-xdist begins with two neighbours for each process."""
    ranks = {name: number for number, name in enumerate(LONG)}
    rank = {
        item: ranks.get(item.name, ranks.get(getattr(item, "originalname", item.name), len(LONG))) for item in items
    }
    long = sorted((item for item in items if rank[item] < len(LONG)), key=rank.__getitem__)
    rest = [item for item in items if rank[item] == len(LONG)]
    return [item for pair in itertools.zip_longest(long, rest) for item in pair if item is not None]


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
