"""PyCUDA's and numba-cuda's own tests on a real GPU, without memguard and under `memguard run`: outcome by outcome.

    python benchmarks/their_tests.py --pycuda-tests pycuda-2026.1/test -o benchmarks/results/h200-their-tests.json

PyCUDA's tests are in its sdist, in `test/`; they have to be of the version that is installed. numba-cuda's are in its
wheel; they need the package filecheck. Both ways the tests run in parts of about the same length, the longest first,
several at once, each part in a process of its own: a crash ends one test. A test that ends differently runs three times
more each way, alone. Only tests that want more memory than the cap may differ; that is read from memguard's refusal,
not from a list.

What the time limit leaves is listed as not run: PyCUDA and numba-cuda's cudadrv come first. `--merge` takes what
another run has, and runs the rest, with the tests that differed there without a reason. `--durations` takes from
another run how long the tests of each file take.
`--simulate h200` tries the machinery without a GPU: its outcomes mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _run import GIB, ROOT, conclude, header, merged
from _their_tests import CRASHED, HUNG, Outcome, Read, differing, file_of, parts, read, reason, summary, times

CAP, LIMIT = 16 * GIB, 20 * GIB
"""Of the framework, and of the GPU. Several processes at once have them: a cap is no reservation."""
PART_SECONDS = 40.0
"""About what one part takes. A process takes about 6 s before its first test."""
AGAIN = 3
"""Further runs of a test that differs, each way."""
AGAIN_SECONDS = 75
"""What those may take beyond the time limit."""
MOST_AGAIN = 40
"""Tests that are run again; more of them mean that something else is wrong."""
ASIDE = 6
"""Processes for them, beside the pool's."""
GRACE = 10
"""Seconds that a process may take beyond the time limit."""
INI = "[pytest]\nconsider_namespace_packages = true\n"
"""As numba-cuda's own: its modules lie in a namespace package."""


class Suite:
    """One framework's tests: where they are, which of its folders need a process for each file, and their budget."""

    def __init__(self, name: str, root: Path, paths: Sequence[str], apart: Sequence[str] = ()) -> None:
        self.name, self.root, self.paths, self.apart = name, root, tuple(paths), tuple(apart)
        self.budget = {"version": 1, "device": {"limit": LIMIT}, "frameworks": {name: {"limit": CAP}}}

    def parts(self, tests: Sequence[str], known: Mapping[str, Sequence[float]]) -> list[list[str]]:
        """The tests in parts. `known`: the files of another run, as in its JSON."""
        each = {name: max(plain, under) / count for name, (count, plain, under) in known.items() if count}
        for name in {file_of(test) for test in tests} - set(each):
            path = self.root / name
            text = path.read_text(errors="replace") if path.is_file() else ""
            each[name] = 4.0 if re.search(r"\b(subprocess|multiprocessing)\b", text) else 1.0  # it starts processes
        return parts(tests, lambda test: max(each[file_of(test)], 0.02), PART_SECONDS, self.apart)


class Runner:
    """Runs tests in processes of their own, until the time is over. `timeout`: seconds without any news of one."""

    def __init__(self, where: Path, until: float, timeout: float, simulate: str | None) -> None:
        self.where, self.until, self.timeout, self.simulate = where, until, timeout, simulate
        self.inactive: list[str] = []
        """The first test of each process that ended under `memguard run` without an active budget."""

    def left(self) -> float:
        return self.until - time.monotonic()

    def pytest(self, suite: Suite, tests: Sequence[str], under: bool, *options: str) -> Read:
        """One process of pytest, and what it left behind; one that hangs is killed with all that it started."""
        folder = Path(tempfile.mkdtemp(prefix=f"{suite.name}-", dir=self.where))
        (folder / "pytest.ini").write_text(INI)
        (folder / "budget.yaml").write_text(json.dumps(suite.budget))
        command = [
            sys.executable, "-m", "pytest", "-q", "--tb=short", "-c", str(folder / "pytest.ini"),
            "--rootdir", str(suite.root), "-p", "_outcomes", "-p", "memguard.pytest_plugin",
            "-p", "no:cacheprovider", *options,
            *(str(suite.root / test) for test in tests),
        ]  # fmt: skip
        if under:
            simulate = ["--simulate", self.simulate] if self.simulate else []
            run = [sys.executable, "-m", "memguard", "run", *simulate, "-c", str(folder / "budget.yaml"), "--"]
            command = run + command
        paths = [str(ROOT), str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONFAULTHANDLER": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # memguard's own is named: it may not be installed, only on the path
            "OUTCOMES": str(folder / "outcomes.jsonl"),
            # PyCUDA keeps what it compiles: each way has its own, so that neither waits for the other's.
            "XDG_CACHE_HOME": str(self.where / ("cache-under" if under else "cache-plain")),
        }
        with (folder / "output").open("w") as out:
            child = subprocess.Popen(
                command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
            hung, late = self._wait(child, folder / "outcomes.jsonl")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        lines = (folder / "outcomes.jsonl").read_text().splitlines() if (folder / "outcomes.jsonl").exists() else []
        found = read(lines)
        found.killed = hung or late
        if hung and found.crashed is not None:
            found.outcomes[found.crashed] = Outcome(HUNG)
        elif late and found.crashed is not None:  # nobody knows how that test would have ended
            del found.outcomes[found.crashed]
        if not lines:
            found.not_collected["pytest"] = (folder / "output").read_text(errors="replace")[-1500:]
        return found

    def _wait(self, child: subprocess.Popen[bytes], outcomes: Path) -> tuple[bool, bool]:
        """Until it ends, leaves no line for too long, or the time is over: whether it hangs, whether it is late."""
        until = max(self.until, time.monotonic()) + GRACE
        size, since = -1, time.monotonic()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.2)
                return False, False
            now = time.monotonic()
            grown = outcomes.stat().st_size if outcomes.exists() else 0
            if grown != size:
                size, since = grown, now
            if now - since >= self.timeout:
                return True, False
            if now >= until:
                return False, True

    def collect(self, suite: Suite) -> Read:
        return self.pytest(suite, suite.paths, False, "--collect-only")

    def part(self, suite: Suite, tests: Sequence[str], under: bool) -> dict[str, Outcome]:
        """The outcomes of one part. After a crash the tests behind the one that crashed run in a new process."""
        outcomes: dict[str, Outcome] = {}
        left = list(tests)
        while left and self.left() > 0:
            found = self.pytest(suite, left, under)
            outcomes.update(found.outcomes)
            if under and found.outcomes and found.crashed is None and not found.killed and not found.active:
                self.inactive.append(left[0])
            if not found.outcomes and self.left() > 0:  # nothing was even collected
                why = next(iter(found.not_collected.values()), "no outcome")
                outcomes.update({test: Outcome(CRASHED, why[-300:]) for test in left})
                break
            missing = [test for test in left if test not in outcomes]
            if found.crashed is None or len(missing) == len(left):
                break
            left = missing
        return outcomes


def run_suite(
    suite: Suite,
    runner: Runner,
    pool: ThreadPoolExecutor,
    merged: Mapping[str, Any],
    known: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, Any]:
    """Every test of a suite both ways, each part's two ways beside each other.

    merged   the suite in another run's JSON: its tests are not run again, but for those that differ without a reason
    known    how long the tests of each file take, by another run
    """
    began = time.monotonic()
    collected = runner.collect(suite)
    explained = [one for one in merged.get("differences", ()) if one["reason"] is not None]
    open_ones = {one["test"] for one in merged.get("differences", ()) if one["reason"] is None}
    done = (set(merged.get("passed", ())) | set(merged.get("others", {}))) - open_ones
    todo = suite.parts([test for test in collected.collected if test not in done], known or merged.get("files", {}))
    say(f"{suite.name}: {len(collected.collected)} tests in {len(todo)} parts, {len(done)} from before")
    going = [(under, pool.submit(runner.part, suite, tests, under)) for tests in todo for under in (False, True)]
    plain: dict[str, Outcome] = {
        test: Outcome(two[0]) for test, two in merged.get("others", {}).items() if test in done
    }
    under_it: dict[str, Outcome] = {
        test: Outcome(two[1]) for test, two in merged.get("others", {}).items() if test in done
    }
    for test in merged.get("passed", ()):
        plain[test] = under_it[test] = Outcome("passed")
    for under, one in going:
        (under_it if under else plain).update(one.result())
    result = summary(collected.collected, plain, under_it)
    runner.until = max(runner.until, time.monotonic() + AGAIN_SECONDS)
    say(f"{suite.name}: {result['run']} run both ways, {time.monotonic() - began:.0f} s")
    different = [test for test in differing(plain, under_it) if test not in done]
    result["differences"] = [*explained, *again(suite, runner, different, plain, under_it)]
    result["not_collected"] = {name: text[-300:] for name, text in collected.not_collected.items()}
    result["inactive"] = [test for test in runner.inactive if test in under_it]
    result["files"] = times(plain, under_it, merged.get("files", {}))
    result["budget"] = suite.budget
    result["seconds"] = round(time.monotonic() - began, 1)
    return result


def again(
    suite: Suite,
    runner: Runner,
    different: Sequence[str],
    plain: Mapping[str, Outcome],
    under: Mapping[str, Outcome],
) -> list[dict[str, Any]]:
    """Each test that differs: run again, alone in its process, and explained.

    Its runs come one after the other: a test that takes much of the card would fail beside itself. They do not wait
    for what the pool has to do.
    """

    def repeat(test: str) -> list[tuple[bool, Outcome]]:
        ways = [way for _ in range(AGAIN) for way in (True, False)]
        return [(way, one) for way in ways for one in runner.part(suite, [test], way).values()]

    with ThreadPoolExecutor(ASIDE) as aside:
        runs = {test: aside.submit(repeat, test) for test in different[:MOST_AGAIN]}
    found = []
    for test in different:
        seen = {False: [plain[test]], True: [under[test]]}
        for way, one in runs[test].result() if test in runs else ():
            seen[way].append(one)
        why, evidence = reason(CAP, seen[False], seen[True])
        found.append(
            {
                "test": test,
                "plain": [one.outcome for one in seen[False]],
                "under": [one.outcome for one in seen[True]],
                "reason": why,
                "evidence": evidence.replace(f"{ROOT}{os.sep}", ""),
            }
        )
        say(f"  {test}: {why or 'NO REASON'}: {evidence[:300]}")
    return found


def suites(pycuda_tests: Path | None, only: Sequence[str]) -> list[Suite]:
    found = []
    if pycuda_tests is not None and "pycuda" in only:
        names = sorted(path.name for path in pycuda_tests.glob("test_*.py"))
        found.append(Suite("pycuda", pycuda_tests.resolve(), names))
    spec = importlib.util.find_spec("numba_cuda")
    if spec is not None and spec.submodule_search_locations and "numba" in only:
        root = Path(next(iter(spec.submodule_search_locations))) / "numba" / "cuda" / "tests"
        # cudadrv resets devices and sets memory managers: no file of it runs in another's process.
        found.append(Suite("numba", root, ("cudadrv", "cudapy"), apart=["cudadrv"]))
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pycuda-tests", type=Path, help="the folder test/ of PyCUDA's sdist")
    parser.add_argument("--only", default="pycuda,numba", help="names of suites, separated by commas")
    parser.add_argument("--pool", type=int, default=os.cpu_count() or 4, help="processes at once")
    parser.add_argument("--time-limit", type=float, default=320, help="seconds; what has not begun then is not run")
    parser.add_argument("--timeout", type=float, default=90, help="seconds for one test: then it hangs")
    parser.add_argument("--simulate", metavar="GPU", help="under memguard on a simulated GPU, to try the machinery")
    parser.add_argument("--merge", type=Path, help="another run's JSON: only what it has not run is run")
    parser.add_argument("--durations", type=Path, help="another run's JSON: how long the tests of each file take")
    parser.add_argument("-o", "--output", "--out", type=Path)
    arguments = parser.parse_args()
    if arguments.pycuda_tests is not None and not list(arguments.pycuda_tests.glob("test_*.py")):
        parser.error(f"{arguments.pycuda_tests} has no test_*.py: it has to be the folder test/ of PyCUDA's sdist")
    before = merged([arguments.merge], "suites")["suites"] if arguments.merge else {}
    known = json.loads(arguments.durations.read_text())["suites"] if arguments.durations else {}
    began = time.monotonic()
    chosen = suites(arguments.pycuda_tests, arguments.only.split(","))
    with tempfile.TemporaryDirectory(prefix="their", ignore_cleanup_errors=True) as folder:
        runner = Runner(Path(folder), began + arguments.time_limit, arguments.timeout, arguments.simulate)
        with ThreadPoolExecutor(max(len(chosen), 1)) as each, ThreadPoolExecutor(arguments.pool) as pool:
            going = {
                s.name: each.submit(
                    run_suite, s, runner, pool, before.get(s.name, {}), known.get(s.name, {}).get("files")
                )
                for s in chosen
            }
            found = {name: one.result() for name, one in going.items()}
    from checks import their_tests_checks

    result: dict[str, Any] = {
        "about": header("python benchmarks/their_tests.py"),
        "seconds": round(time.monotonic() - began, 1),
        "cap": CAP,
        "simulated": arguments.simulate,
        "suites": {**before, **found},
    }
    result["checks"] = their_tests_checks(result)
    conclude(result, arguments.output)


if __name__ == "__main__":
    main()
