"""Run, suggest, run again under it: what `memguard suggest` is worth on a real GPU.

    python benchmarks/suggest.py -o benchmarks/results/h200-suggest.json --recording run.jsonl

For each of three programs of `suggest_programs/`, each run in a process of its own under `memguard run`:

wide       once under a budget with room for everything, with a timeline: what the suggestions are made from
tried      twice under the budget that `suggest --headroom` writes for each of several headrooms, and with less than was
           needed: the smallest from which on all pass
default    ten times under the budget of the default headroom, and what that wastes over the smallest that passes
record     once without a budget (`memguard run --record`), and then under the budget that comes of that. Other runs
           share the card, so TensorFlow and JAX are told not to take all of it then

A run passes if the program ends well and nothing was refused, whether or not the program caught it.

`recording` is a run with twenty seconds of work in PyTorch, JAX and CuPy, whose budget becomes tight and which catches
two out-of-memory errors: `--recording PATH` keeps its timeline. At most five processes run at once. `--only` takes
names, separated by semicolons, and `--merge` takes from another run's JSON what is not named, or all that is whole
there. The result is written after each program. SIGINT and SIGTERM end the runs at once, and what was measured by then
is written, as `stopped`. It takes some 290 s.

With MEMGUARD_SUGGEST_REHEARSAL set, stand-ins on simulated GPUs run in place of the programs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from fractions import Fraction
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _listed import SUGGEST
from _run import MIB, ROOT, Kept, attempt, conclude, header, merged
from _suggest_checks import SUGGEST_TRIED, suggest_checks

PROGRAMS = Path(__file__).resolve().parent / "suggest_programs"
STAND_IN = Path(__file__).resolve().parent / "_suggest_stand_in.py"
FRAMEWORKS = {
    "tensorflow_pycuda": ("tensorflow", "pycuda"),  # the slowest to start comes first
    "jax_cupy": ("jax", "cupy"),
    "torch_training": ("torch",),
}
REHEARSED = bool(os.environ.get("MEMGUARD_SUGGEST_REHEARSAL"))
AT_ONCE = 2 if REHEARSED else 5
"""Processes at once: each takes a few GiB of the card and three cores while it starts."""
TIMEOUT = 180.0
TWICE, TEN = 2, 10
GRANULE = 2 * MIB
WIDE = "24GiB"
"""The cap of each framework in the budget with room for everything."""
MONITOR = "monitor: {interval: 50ms, timeline: %s, warn: 98%%, critical: 99%%}\n"
RECORDED = """\
version: 1
device: {limit: 14GiB}
frameworks:
  torch: {limit: 5GiB}
  jax: {limit: 3GiB}
  cupy: {limit: 2GiB}
monitor: {interval: 100ms, timeline: %s}
"""
"""The budget of the recording."""
_together = threading.Semaphore(AT_ONCE)
_stopped = threading.Event()
_running: set[subprocess.Popen[str]] = set()
"""The programs that run, each the leader of a session of its own: a signal to this process group is not theirs too."""


def stop(*_: object) -> None:
    """On SIGINT: end what runs, and start no more, so that the result is written. `timeout -s INT` sends it twice."""
    _stopped.set()
    for child in list(_running):
        _kill(child)


def _kill(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def environment(**more: str) -> dict[str, str]:
    """As this process's, with memguard of this tree and nothing of a budget."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MEMGUARD_")}
    clean["PYTHONPATH"] = f"{ROOT}{os.pathsep}{clean.get('PYTHONPATH', '')}"
    return {**clean, "TF_CPP_MIN_LOG_LEVEL": "1", "PYTHONFAULTHANDLER": "1", **more}


def ended(command: Sequence[object], **environ: str) -> tuple[int, float, str]:
    """The exit code of one of the programs, the seconds that it took, and the end of what it said."""
    with _together:
        started = time.monotonic()
        if _stopped.is_set():
            return -2, 0.0, "not started: stopped by SIGINT"
        child = subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=environment(**environ), text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        _running.add(child)
        try:
            if _stopped.is_set():  # it came before this one was known
                _kill(child)
            said, complained = child.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            _kill(child)
            child.communicate()
            return -9, time.monotonic() - started, f"killed after {TIMEOUT:.0f} s"
        finally:
            _running.discard(child)
        return child.returncode, time.monotonic() - started, (said + complained)[-1500:]


def refused(folder: Path, name: str) -> int:
    """How many requests were refused in that run, by its timelines."""
    import memguard

    timelines = [memguard.load_timeline(path) for path in folder.glob(f"{name}-*.jsonl")]
    return sum(event.times or 1 for one in timelines for event in one.events() if event.kind == "refused")


def run(program: str, folder: Path, name: str, budget: str | None) -> dict[str, Any]:
    """One run, under a budget or recorded without one. Its timeline is `name-PID-RANK.jsonl`."""
    path, timeline = folder / f"{name}.yaml", folder / f"{name}.jsonl"
    alone: dict[str, str] = {}
    if budget is None:
        way: list[object] = ["--record", timeline]
        alone = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    else:
        path.write_text(budget + MONITOR % json.dumps(str(timeline)))
        way = ["-c", path]
    if REHEARSED:
        code, seconds, said = ended([STAND_IN, *way, ",".join(FRAMEWORKS[program])])
    else:
        words = ["-m", "memguard", "run", *way, "--", sys.executable, PROGRAMS / f"{program}.py"]
        code, seconds, said = ended(words, **alone)
    count = refused(folder, name)
    found = {"passed": code == 0 and not count, "returncode": code, "refused": count, "seconds": round(seconds, 1)}
    return found if found["passed"] else {**found, "said": said}


def suggested(folder: Path, name: str, *words: str) -> dict[str, Any]:
    """What `memguard suggest --json` says of the timelines of that run."""
    timelines = sorted(map(str, folder.glob(f"{name}-*.jsonl")))
    done = subprocess.run(
        [sys.executable, "-m", "memguard", "suggest", *timelines, "--json", *words],
        env=environment(), capture_output=True, text=True, check=True, start_new_session=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def offered(folder: Path, headroom: int) -> dict[str, Any]:
    """The budget of a headroom in percent, and its limit. Below 0 each cap is smaller than what was needed by that."""
    found = suggested(folder, "wide", "--headroom", f"{max(headroom, 0)}%")
    if headroom >= 0:
        return {"yaml": found["yaml"], "limit": found["limit"]}
    part = Fraction(100 + headroom, 100)
    caps = {one["framework"]: int(one["limit"] * part) // GRANULE * GRANULE for one in found["frameworks"]}
    limit = found["reserve"]["bytes"] + sum(caps.values())
    text = re.sub(r"(?m)^  limit: \d+MiB", f"  limit: {limit // MIB}MiB", found["yaml"])
    for name, cap in caps.items():
        text = re.sub(rf"(?m)^(  {name}: {{limit: )\d+MiB", rf"\g<1>{cap // MIB}MiB", text)
    return {"yaml": text, "limit": limit}


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a suggestion: in bytes."""
    keys = ("framework", "limit", "needed", "source", "in_use", "held", "peak")
    frameworks = [{key: one[key] for key in keys} for one in found["frameworks"]]
    return {"limit": found["limit"], "reserve": found["reserve"]["bytes"], "frameworks": frameworks}


def chain(program: str) -> dict[str, Any]:
    """Everything of one program. Its runs wait for their turn among those of the others."""
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(AT_ONCE) as threads:
        folder = Path(made)
        recorded = threads.submit(run, program, folder, "record", None)
        parts = "".join(f"  {name}: {{limit: {WIDE}}}\n" for name in FRAMEWORKS[program])
        wide = run(program, folder, "wide", f"version: 1\nframeworks:\n{parts}")
        if not wide["passed"]:
            return {"returncode": 1, "wide": wide, "stderr_tail": f"the run under the wide budget: {wide.get('said')}"}
        default = suggested(folder, "wide")
        offers = {headroom: offered(folder, headroom) for headroom in SUGGEST_TRIED}
        ten = [threads.submit(run, program, folder, f"default-{at}", default["yaml"]) for at in range(TEN)]
        waiting: dict[int, list[Future[dict[str, Any]]]] = {
            headroom: [
                threads.submit(run, program, folder, f"tried-{headroom}-{at}", offer["yaml"]) for at in range(TWICE)
            ]
            for headroom, offer in offers.items()
        }
        found: dict[str, Any] = {
            "returncode": 0,
            "wide": wide,
            "tried": [
                {"headroom": headroom, "limit": offers[headroom]["limit"], "runs": [one.result() for one in runs]}
                for headroom, runs in waiting.items()
            ],
            "default": {**figures(default), "yaml": default["yaml"], "runs": [one.result() for one in ten]},
            "record": {"run": recorded.result()},
        }
        found["record"].update(attempt(lambda: _from_record(program, folder)))
        return found


def _from_record(program: str, folder: Path) -> dict[str, Any]:
    offer = suggested(folder, "record")
    return {
        **figures(offer),
        "notes": offer["notes"],
        "again": run(program, folder, "from-record", offer["yaml"]),
    }


def recording(keep: Path | None) -> dict[str, Any]:
    """The run that a report is shown on, and what its timeline has."""
    import memguard

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "budget.yaml").write_text(RECORDED % json.dumps(str(folder / "run.jsonl")))
        program = [STAND_IN, "--tight"] if REHEARSED else [PROGRAMS / "recording.py"]
        code, seconds, said = ended([*program, folder / "budget.yaml"])
        paths = sorted(folder.glob("run-*.jsonl"))
        if code or len(paths) != 1:
            return {"returncode": code or 1, "stderr_tail": said, "files": len(paths)}
        (path,) = paths
        # The program's folder is nobody's business.
        text = path.read_text().replace(f"{ROOT}{os.sep}", "").replace(f"{folder}{os.sep}", "")
        path.write_text(text)
        timeline = memguard.load_timeline(path)
        samples, events, ooms = list(timeline.samples()), list(timeline.events()), list(timeline.ooms())
        if keep is not None:
            keep.write_text(text)
    kinds = {event.kind for event in events}
    seen = [row for sample in samples for device in sample.devices for row in device.frameworks.items()]
    return {
        "returncode": 0,
        "wall_s": round(seconds, 1),
        "seconds": round(samples[-1].time - samples[0].time, 1),
        "samples": len(samples),
        "bytes": len(text),
        "frameworks": sorted({name for name, usage in seen if usage.held}),
        "events": {kind: sum(event.kind == kind for event in events) for kind in sorted(kinds)},
        "refused": sorted({event.framework for event in events if event.kind == "refused" and event.framework}),
        "workloads": sorted({event.text for event in events if event.kind == "workload"}),
        "ooms": [oom.report.get("requester") for oom in ooms],
    }


def scenarios(
    names: Sequence[str], keep: Path | None, tell: Callable[[str, dict[str, Any]], None] = lambda *_: None
) -> dict[str, dict[str, Any]]:
    """Each program's outcome. `tell` gets it as soon as it is there."""

    def one(name: str) -> tuple[str, dict[str, Any]]:
        started = time.monotonic()
        found = attempt(lambda: recording(keep) if name == "recording" else chain(name))
        found.setdefault("wall_s", round(time.monotonic() - started, 1))
        print(f"{name}: rc {found.get('returncode')}, {found['wall_s']} s", file=sys.stderr, flush=True)
        return name, found

    ended = {}
    with ThreadPoolExecutor(max(1, len(names))) as threads:
        for done in as_completed([threads.submit(one, name) for name in names]):
            name, outcome = done.result()
            ended[name] = outcome
            tell(name, outcome)
    return {name: ended[name] for name in names}


def whole(found: dict[str, dict[str, Any]]) -> list[str]:
    """Those of which every check passed: they need not run again."""
    checks = suggest_checks(found)
    return [name for name in found if all(checks[check][0] for check in SUGGEST[name])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", help="names of programs, or recording, separated by semicolons")
    parser.add_argument("--merge", type=Path, action="append", default=[], help="programs from another run's JSON")
    parser.add_argument("--recording", type=Path, metavar="PATH", help="where to keep the timeline of the recording")
    arguments = parser.parse_args()
    known = [*FRAMEWORKS, "recording"]
    before = merged(arguments.merge, "scenarios")["scenarios"]
    names = arguments.only.split(";") if arguments.only else [name for name in known if name not in whole(before)]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no such program: {', '.join(unknown)}; there are: {'; '.join(known)}")
    sys.path.insert(0, str(ROOT))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    about, started = header("python benchmarks/suggest.py", "_suggest", "cli"), time.monotonic()

    def made(scenarios: dict[str, Any]) -> dict[str, Any]:
        return {
            "about": about,
            "rehearsed": REHEARSED,
            **({"stopped": True} if _stopped.is_set() else {}),
            "seconds": round(time.monotonic() - started, 1),
            "scenarios": scenarios,
            "checks": suggest_checks(scenarios),
        }

    result = Kept(arguments.output, before, known, made, arguments.merge if set(names) & set(before) else ())
    scenarios(names, arguments.recording, result.add)
    last = result.whole()
    conclude(last, arguments.output)
    for number in (signal.SIGINT, signal.SIGTERM):  # a second one does not make it another end
        signal.signal(number, signal.SIG_IGN)
    if not all(passed for passed, _ in last["checks"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
