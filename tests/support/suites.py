"""Run a third-party test suite without memguard and under `memguard run`, in parts, each in its own process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

from support.their_tests import CRASHED, HUNG, Outcome, Read, differing, file_of, parts, read, reason

TESTS = Path(__file__).resolve().parents[1]
CAP, LIMIT = 16 << 30, 20 << 30
"""The framework's cap, and the GPU's limit. Parallel processes share them: a cap reserves no memory."""
PART_SECONDS = 20.0  # Approximate seconds of one part. A process takes about 6 s before its first test.
SILENT = 90  # Seconds without a finished test, after which the process counts as hung.
AGAIN = 3  # Extra runs of a differing test, with and without memguard.
INI = "[pytest]\nconsider_namespace_packages = true\n"  # numba-cuda's own option: its tests are a namespace package.


OF_THIS_RUN = {"PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST"}


class Suite:
    """One framework's tests; each of their processes has its own folder."""

    def __init__(self, name: str, root: Path, folder: Path, simulate: str | None = None) -> None:
        self.name, self.root, self.folder, self._number = name, root, folder, count()
        self.simulate = [] if simulate is None else ["--device", simulate]
        self.inactive: list[str] = []
        """The first test of each process that ended under `memguard run` without an active budget."""

    def process(self, tests: Sequence[str], under: bool, *options: str) -> Read:
        """One pytest process and its output files. If it hangs, it is killed with all processes that it started."""
        folder = self.folder / f"{self.name}-{next(self._number)}"
        folder.mkdir()
        (folder / "pytest.ini").write_text(INI)
        budget = {"version": 1, "device": {"limit": LIMIT}, "frameworks": {self.name: {"limit": CAP}}}
        (folder / "budget.yaml").write_text(json.dumps(budget))
        command = [
            sys.executable, "-m", "pytest", "-q", "--tb=short", "-c", str(folder / "pytest.ini"), "--rootdir",
            str(self.root), "-p", "support.outcomes", "-p", "memguard.pytest_plugin", "-p", "no:cacheprovider",
            *options, *(str(self.root / test) for test in tests),
        ]  # fmt: skip
        if under:
            run = [sys.executable, "-m", "memguard", "run", *self.simulate, "-c", str(folder / "budget.yaml"), "--"]
            command = run + command
        lines = folder / "outcomes.jsonl"
        paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
        env = {
            **{name: value for name, value in os.environ.items() if name not in OF_THIS_RUN},
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONFAULTHANDLER": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # an explicit path: memguard's plugin may not be installed
            "OUTCOMES": str(lines),
            # PyCUDA caches compiled code: separate caches, so that the two runs do not wait for each other.
            "XDG_CACHE_HOME": str(self.folder / ("cache-under" if under else "cache-plain")),
        }
        with (folder / "output").open("w") as out:
            child = subprocess.Popen(
                command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
            try:
                hung = _wait(child, lines)
            finally:
                _kill(child)
        found = read(lines.read_text().splitlines() if lines.exists() else [])
        found.killed = hung
        if hung and found.crashed is not None:
            found.outcomes[found.crashed] = Outcome(HUNG)
        if not lines.exists():
            found.not_collected["pytest"] = (folder / "output").read_text(errors="replace")[-1500:]
        return found

    def part(self, tests: Sequence[str], under: bool) -> dict[str, Outcome]:
        """The outcomes of one part. After a crash, a new process runs the tests behind the crashed one."""
        outcomes: dict[str, Outcome] = {}
        left = list(tests)
        while left:
            found = self.process(left, under)
            outcomes.update(found.outcomes)
            if under and found.outcomes and found.crashed is None and not found.killed and not found.active:
                self.inactive.append(left[0])
            if not found.outcomes:  # pytest collected no test
                why = next(iter(found.not_collected.values()), "no outcome")
                outcomes.update({test: Outcome(CRASHED, why[-300:]) for test in left})
            missing = [test for test in left if test not in outcomes]
            if found.crashed is None or len(missing) == len(left):
                break
            left = missing
        return outcomes

    def seconds(self, test: str) -> float:
        """Its approximate seconds: a file that starts processes takes longer."""
        path = self.root / file_of(test)
        text = path.read_text(errors="replace") if path.is_file() else ""
        return 4.0 if re.search(r"\b(subprocess|multiprocessing)\b", text) else 0.5

    def ends_alike(self, paths: Sequence[str], at_once: int) -> dict[str, tuple[str, str]]:
        """Each test's outcome without memguard and under it. AssertionError if a test did not run both times, no budget
        was active under memguard, or a test differs without a reason."""
        collected = self.process(paths, False, "--collect-only")
        assert collected.collected and not collected.not_collected, collected.not_collected
        # cudadrv resets devices and sets memory managers: each of its files runs in its own process.
        todo = parts(collected.collected, self.seconds, PART_SECONDS, apart=["cudadrv"])
        with ThreadPoolExecutor(at_once) as pool:
            ways = {under: [pool.submit(self.part, tests, under) for tests in todo] for under in (False, True)}
            plain, under = ({k: v for one in ways[way] for k, v in one.result().items()} for way in (False, True))
        left = [test for test in collected.collected if test not in plain or test not in under]
        assert not left and not self.inactive, (left[:5], self.inactive[:5])
        differ = differing(plain, under)
        assert len(differ) <= 40, differ
        explained = [self.explained(test, plain[test], under[test]) for test in differ]
        print(f"{self.name}: {len(plain)} tests both ways; {explained}")
        unexplained = [one for one in explained if one[1] is None]
        assert not unexplained, unexplained
        return {test: (plain[test].outcome, under[test].outcome) for test in plain}

    def explained(self, test: str, plain: Outcome, under: Outcome) -> tuple[str, str | None, str]:
        """The reason for a difference, and the evidence, after extra runs one at a time: it may need much of the
        GPU."""
        seen = {False: [plain], True: [under]}
        for way in (True, False) * AGAIN:
            seen[way] += self.part([test], way).values()
        return (test, *reason(CAP, seen[False], seen[True]))


def _wait(child: subprocess.Popen[bytes], lines: Path) -> bool:
    """Wait until it ends or outputs nothing for too long. Return whether it hangs."""
    size, since = -1, time.monotonic()
    while time.monotonic() - since < SILENT:
        try:
            child.wait(0.2)
            return False
        except subprocess.TimeoutExpired:
            grown = lines.stat().st_size if lines.exists() else 0
            if grown != size:
                size, since = grown, time.monotonic()
    return True


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
