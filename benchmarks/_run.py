"""What the benchmarks share: scenarios in processes of their own, NVML sampling from outside, one JSON."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fnmatch
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _sampler

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MIB = 1 << 20
GIB = 1 << 30
SIX = {"tensorflow": "20%", "torch": "25%", "jax": "20%", "cupy": "15%", "pycuda": "10%", "numba": "10%"}
"""All six frameworks, with their shares of `SIX_LIMIT`."""
SIX_LIMIT = 40 * GIB
APART = ("_doctor", "_leases", "_metrics", "_processes", "_report", "_suggest", "_suspend", "_testing", "_top", "cli")
"""Packages of memguard that a measured program loads only if they are what is measured."""
_PACKAGES = (
    "torch", "tensorflow", "pycuda", "cupy-cuda13x", "cupy-cuda12x", "jax", "jaxlib", "numba", "numba-cuda", "rmm-cu13",
    "cuda-core", "ml-dtypes", "nvidia-ml-py", "cuda-bindings", "pydantic", "PyYAML", "numpy", "keras",
)  # fmt: skip


def budget_of_six(**tensorflow: Any) -> dict[str, Any]:
    """Every framework under 40 GiB, with more settings for TensorFlow (`growth=False`: then it says what it holds)."""
    frameworks: dict[str, dict[str, Any]] = {name: {"share": share} for name, share in SIX.items()}
    frameworks["tensorflow"].update(tensorflow)
    return {"version": 1, "device": {"limit": "40GiB"}, "frameworks": frameworks}


def package() -> Path:
    """The folder `memguard/`: of this tree, or the installed one, if the tree is tested against a wheel."""
    here = ROOT / "memguard"
    if here.is_dir():
        return here
    spec = importlib.util.find_spec("memguard")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def source_hash(rooms: Collection[str] = ()) -> str:
    """A hash of `memguard/`: results measured with another one are stale.

    Of those `APART` only the `rooms` that are measured: a program under a budget loads nothing of the others until it
    asks, so they change no figure of it. tests/unit/test_measured_source.py holds that.
    """
    digest, folder = hashlib.sha256(), package()
    for path in sorted(folder.rglob("*.py")):
        room = path.relative_to(folder).parts[0]
        if room in APART and room not in rooms:
            continue
        digest.update(str(path.relative_to(folder.parent)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def put_row_stack_back() -> None:
    """numba-cuda 0.30 compiles with a name that NumPy 2.5 took away. Results say so: `numba_build`."""
    import numpy as np

    if not hasattr(np, "row_stack"):
        np.row_stack = np.vstack


def numba_build(versions: Mapping[str, str]) -> str | None:
    """What was put back for Numba in a run with these versions; None if nothing was."""
    numpy = re.match(r"(\d+)\.(\d+)", versions.get("numpy", ""))
    if "numba-cuda" not in versions or numpy is None or (int(numpy[1]), int(numpy[2])) < (2, 5):
        return None
    return f"with np.row_stack put back, without which it compiles nothing with NumPy {versions['numpy']}"


def numba_note(about: Mapping[str, Any]) -> str | None:
    """What was put back for Numba in a result. Older ones do not say it themselves; their versions do."""
    return about.get("numba_build") or numba_build(about["versions"])


def is_stale(about: Mapping[str, Any]) -> bool:
    """Whether memguard has changed since the result that begins so was measured."""
    return bool(about["memguard_hash"] != source_hash(about.get("rooms", ())))


def header(command: str, *rooms: str) -> dict[str, Any]:
    """What a result begins with. `rooms`: those of `APART` that are measured."""
    about = {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "memguard_hash": source_hash(rooms),
        **({"rooms": list(rooms)} if rooms else {}),
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
    if (note := numba_build(about["versions"])) is not None:
        about["numba_build"] = note
    if "tensorflow" in about["versions"]:
        about["tensorflow_build"] = os.environ.get("MEMGUARD_TF_BUILD", "as it is installed")
    return about


class Sampler:
    """NVML's figure for one PID at a fixed rate, by `_sampler.py` in a process of its own: no other GIL can slow it."""

    def __init__(self, interval: float = 0.05) -> None:
        self.interval = interval
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("_sampler.py")), str(interval)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it looks from the process's first moment on

    def start(self, pid: int) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: `stop` says that it saw nothing
            self._process.stdin.write(f"{pid}\n")
            self._process.stdin.flush()

    def stop(self) -> dict[str, Any]:
        """What it saw; `_sampler.summary` names the figures."""
        out, _ = self._process.communicate()
        try:
            found: dict[str, Any] = json.loads(out)
        except ValueError:
            return _sampler.summary([], self.interval)
        return found


def run_scenario(
    script: str, name: str, *, env: dict[str, str] | None = None, timeout: float = 240, interval: float = 0.05
) -> dict[str, Any]:
    """One scenario in a process of its own: what it printed as RESULT, how it ended, and NVML's view of it.

    interval   seconds between two looks at NVML
    """
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1", "TF_CPP_MIN_LOG_LEVEL": "0", **(env or {})}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    sampler = Sampler(interval)
    started = time.monotonic()
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
    try:
        outcome.update(json.loads(results[-1]))
    except (IndexError, ValueError):  # it died before it had printed one, or within the line
        outcome["stdout_tail"], outcome["stderr_tail"] = out[-800:], err[-1500:]
    if child.returncode:
        outcome["stderr_tail"] = err[-1500:]
    outcome["_stderr"] = err
    return outcome


def emit(result: dict[str, Any]) -> None:
    """Print a scenario's result for its parent."""
    print("RESULT " + json.dumps(result), flush=True)


Check = tuple[bool, str]
Tell = Callable[[str, bool, str], None]
"""`tell(name, passed, figure)` of one bar."""
Judge = Callable[[Tell], None]
NOT_STARTED = "not started"


def died(one: Mapping[str, Any] | None) -> str | None:
    """What ended a scenario: its exit code and the last line of its stderr. None if it ran to its end."""
    if one is None:
        return NOT_STARTED
    if not one.get("returncode", 0):
        return None
    lines = [line.strip() for line in str(one.get("stderr_tail") or "").splitlines()]
    said = [line for line in lines if line and not line.startswith("Extension modules:")]  # faulthandler's last line
    return f"rc {one['returncode']}: {said[-1][:200] if said else 'nothing on its stderr'}"


def judge_of(judge: Callable[..., None], scenarios: Mapping[str, Any], key: str, *more: Any) -> Judge:
    """`judge(tell, scenarios[key], *more)`; the scenario is looked up when it is judged: it may not have run."""

    def found(tell: Tell) -> None:
        judge(tell, scenarios[key], *more)

    return found


def judged(
    listed: Mapping[str, Sequence[str]],
    judges: Mapping[str, Judge],
    scenarios: Mapping[str, Mapping[str, Any]],
    dies: Sequence[str] = (),
) -> dict[str, Check]:
    """Every check of a benchmark's written list, in its order, as (passed, figure). One that did not run has failed.

    listed      the names of the checks that each scenario gives; a scenario may be a pattern, as `order from *`
    judges      by the same names, what tells each check: name, passed, figure. It may fail where its scenario died
    scenarios   their outcomes, with `returncode`, and `stderr_tail` if that is not 0
    dies        scenarios that have to die: their judges look at the code

    A scenario that died fails all its checks, also if it had printed its result. So does a check that is told twice. A
    check that is not in the list fails under its own name.
    """
    told: dict[str, dict[str, Check]] = {key: {} for key in listed}
    broke: dict[str, str] = {}
    for key, judge in judges.items():
        found = told.setdefault(key, {})

        def check(name: str, passed: bool, figure: str, found: dict[str, Check] = found) -> None:
            found[name] = (False, f"told twice: {figure}") if name in found else (bool(passed), figure)

        try:
            judge(check)
        except Exception as error:
            broke[key] = f"its result cannot be judged: {type(error).__name__}: {error}"
    checks: dict[str, Check] = {}
    for key, names in listed.items():
        of = {name: scenarios.get(name) for name in _matching(key, scenarios)}
        ends = {
            name: end
            for name, one in of.items()
            if not (one is not None and name in dies) and (end := died(one)) is not None
        }
        why = "; ".join(f"{name}: {end}" for name, end in ends.items())
        found = told[key]
        for name in names:
            if set(ends.values()) == {NOT_STARTED}:
                checks[name] = (False, f"{NOT_STARTED}: {', '.join(ends)}")
            elif name not in found:
                checks[name] = (False, f"did not run: {why or broke.get(key, 'nothing told it')}")
            elif why:
                checks[name] = (False, f"{why} (it had told: {found[name][1]})")
            else:
                checks[name] = found[name]
    for key, found in told.items():
        for name, (_, figure) in found.items():
            if name not in listed.get(key, ()):
                checks[name] = (False, f"not in the list of checks: {figure}")
    return checks


def _matching(key: str, scenarios: Mapping[str, Any]) -> list[str]:
    """The scenarios that a key of a list means; the key itself if none is there."""
    return [name for name in scenarios if fnmatch.fnmatchcase(name, key)] or [key]


def attempt(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """One part of a benchmark that runs in its parent. If it fails, that is told as for a process that died."""
    try:
        return call()
    except Exception as error:
        text = getattr(error, "stderr", None) or ""
        return {"returncode": 1, "stderr_tail": f"{text}\n{type(error).__name__}: {error}"[-1500:]}


def conclude(result: dict[str, Any], output: Path | None) -> None:
    """Write the result where that was asked for, with the earlier runs of the same code, and print its checks."""
    if output:
        for path in dict.fromkeys((output.resolve(), RESULTS / output.name)):
            if path.exists():
                keep_runs(json.loads(path.read_text()), result)
        write(result, output)
    for name, (passed, figure) in result["checks"].items():
        print(f"{'pass' if passed else 'FAIL'}  {name}: {figure}")


def write(result: Mapping[str, Any], path: Path) -> None:
    """Whole or not at all. Where this checkout lies is nobody's business: paths in texts begin at its root."""
    place = json.dumps(f"{ROOT}{os.sep}")[1:-1]
    new = path.with_suffix(".part")
    new.write_text(json.dumps(result, indent=1).replace(place, "") + "\n")
    new.replace(path)


class Kept:
    """A result in the making. It is written each time that a scenario was added: what ends the run does not lose it.

    `make` makes a result of the scenarios, which it gets in the order of `names`. What stood in the file before is kept
    as a run, and so are the results `again`, of which something runs once more: that does not make a failure undone.
    """

    def __init__(
        self,
        output: Path | None,
        before: Mapping[str, Any],
        names: Collection[str],
        make: Callable[[dict[str, Any]], dict[str, Any]],
        again: Sequence[Path] = (),
    ) -> None:
        self._output, self._scenarios, self._names, self._make = output, dict(before), names, make
        self._lock = threading.Lock()
        paths = dict.fromkeys((output.resolve(), RESULTS / output.name)) if output else {}
        self._earlier = [json.loads(path.read_text()) for path in (*filter(Path.exists, paths), *again)]

    def add(self, name: str, outcome: dict[str, Any]) -> None:
        with self._lock:
            self._scenarios[name] = outcome
            if self._output is not None:
                write(self.whole(), self._output)

    def whole(self) -> dict[str, Any]:
        result = self._make({name: self._scenarios[name] for name in self._names if name in self._scenarios})
        for one in self._earlier:
            keep_runs(one, result)
        return result


def keep_runs(before: dict[str, Any], result: dict[str, Any]) -> None:
    """Note in a result what an earlier run of the same code came to: a rerun does not make a failure undone."""
    if before["about"]["memguard_hash"] != result["about"]["memguard_hash"]:
        return
    ended = [*before.get("earlier_runs", ()), run_of(before)]
    known = result.setdefault("earlier_runs", [])
    known += [run for run in ended if run not in known and run["date"] != result["about"]["date"]]
    known.sort(key=lambda run: run["date"])


def run_of(result: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run: when, by which command, how many of its checks passed, and which failed."""
    checks = result["checks"]
    return {
        "date": result["about"]["date"],
        "command": result["about"]["command"],
        "passed": sum(1 for passed, _ in checks.values() if passed),
        "failed": {
            name: figure
            for name, (passed, figure) in checks.items()
            if not passed and not figure.startswith(NOT_STARTED)  # of another part of the benchmark
        },
    }


def with_earlier_tests(
    before: dict[str, Any] | None, about: dict[str, Any], results: Mapping[str, str]
) -> dict[str, Any]:
    """The report of `tests/gpu`: this run's outcomes, and what earlier runs of the same code came to.

    before    the report that is there: of other parts, or of an earlier run of these tests; None if there is none
    results   outcomes of this run, by test

    `results` has the last outcome of each test, `earlier` those before it, and `runs` every run with what did not pass.
    """
    failed = sorted(name for name, outcome in results.items() if outcome != "passed")
    run = {
        "date": about["date"],
        "command": about["command"],
        "passed": len(results) - len(failed),
        "failed": failed,
    }
    if before is None or before["about"]["memguard_hash"] != about["memguard_hash"]:
        return {"about": about, "results": dict(sorted(results.items())), "earlier": {}, "runs": [run]}
    earlier = {name: list(outcomes) for name, outcomes in before.get("earlier", {}).items()}
    for name in results:
        if name in before["results"]:
            earlier.setdefault(name, []).append(before["results"][name])
    commands = dict.fromkeys([*before["about"]["command"].split(" && "), about["command"]])
    return {
        "about": {**about, "command": " && ".join(commands)},
        "results": dict(sorted({**before["results"], **results}.items())),
        "earlier": earlier,
        "runs": [*before.get("runs", ()), run],
    }


def merged(paths: Sequence[Path], *keys: str) -> dict[str, dict[str, Any]]:
    """What other runs have under these keys, put together. Exits if one was measured on other code than this."""
    found: dict[str, dict[str, Any]] = {key: {} for key in keys}
    for path in paths:
        before = json.loads(path.read_text())
        if is_stale(before["about"]):
            raise SystemExit(f"{path}: it was measured on memguard {before['about']['memguard_hash']}, not on this one")
        for key in keys:
            found[key].update(before[key])
    return found


def main(script: str, scenarios: dict[str, Callable[[], dict[str, Any]]], parent: Callable[[Path], None]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scenario", choices=sorted(scenarios))
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if arguments.scenario:
        emit(scenarios[arguments.scenario]())
    else:
        parent(arguments.output)
