"""The report of the moment on a real GPU: ordinary programs that run out of memory, and what memguard says of each.

    python benchmarks/moment.py -o benchmarks/results/h200-moment.json

Each program of `moment_programs/` runs in a process of its own, several at once, those that fill the card alone at the
end. What memguard said is judged against what was arranged (`_moment.py`); the first advice that can be followed
without a person is followed, and the program runs again. Beside them four programs that are in order run for
`--quiet-seconds` each, under a monitor with its defaults: no alarm is right.

`--only` takes names, separated by commas. `--merge` takes the programs that are missing from another run's JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _moment import ARRANGED, QUIET, Arranged, Ran, alarms, follow, got_past, judge, verdict, with_call
from _run import ROOT, Sampler, conclude, header, merged

PROGRAMS = Path(__file__).resolve().parent / "moment_programs"
CHILD = Path(__file__).resolve().parent / "_moment_child.py"
KEPT = 6_000
"""Characters of a program's output that are kept, of its end."""
STRANGER = """
import sys, cupy
from cupy.cuda import runtime
leave, kept = int(sys.argv[1]), []
cupy.zeros(1)
while (free := runtime.memGetInfo()[0]) > leave + (2 << 20):
    kept.append(runtime.malloc(min(1 << 30, (free - leave) >> 21 << 21)))
print("held", flush=True)
sys.stdin.read()
"""
"""Another process that takes the card but for so many bytes."""


class Folder:
    """A program, its budget, and what it left behind: one run each."""

    def __init__(self, where: Path, program: str, budget: Mapping[str, Any]) -> None:
        self.where, self.program = where, where / "program.py"
        where.mkdir(parents=True)
        self.program.write_text(program)
        (where / "budget.yaml").write_text(json.dumps(budget))  # YAML too

    def run(self, environment: Mapping[str, str], limit: float, stranger: int | None = None) -> tuple[Ran, list[Any]]:
        """Run it to its end, or to the time limit: then every process of it is killed."""
        said = self.where / "said.jsonl"
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONFAULTHANDLER": "1", "TF_CPP_MIN_LOG_LEVEL": "1", "PYTHONPATH": paths, **environment}
        sampler = Sampler()
        with (self.where / "stdout").open("w") as out, (self.where / "stderr").open("w") as err:
            child = subprocess.Popen(
                [sys.executable, str(CHILD), str(self.program), str(said)],
                cwd=self.where, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip
            sampler.start(child.pid)
            returncode: int | None = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                returncode = child.wait(limit)
            with contextlib.suppress(ProcessLookupError):  # also the workers that it left behind
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        peak = sampler.stop()["max_bytes"]
        lines = [json.loads(line) for line in said.read_text().splitlines()] if said.exists() else []
        report = next((line["report"] for line in reversed(lines) if line["report"] is not None), None)
        stdout, stderr = (self.printed(name) for name in ("stdout", "stderr"))
        return Ran(returncode, stdout, stderr, report, peak, stranger), lines

    def printed(self, name: str) -> str:
        """What it printed, without the paths of this machine."""
        text = (self.where / name).read_text(errors="replace")
        return text.replace(f"{ROOT}{os.sep}", "").replace(f"{self.where}{os.sep}", "")


def run_one(name: str, arranged: Arranged, root: Path, limit: float) -> dict[str, Any]:
    """One program: run, judged, its advice followed, run again."""
    began = time.monotonic()
    program = (PROGRAMS / f"{name}.py").read_text()
    with stranger(arranged.leave) as other:
        folder = Folder(root / name, program, arranged.budget)
        ran, lines = folder.run(arranged.environment, limit, other.pid if other else None)
        fields = judge(arranged, ran)
        result = {
            "returncode": ran.returncode,
            "fields": fields,
            "report": None if ran.report is None else {k: v for k, v in ran.report.items() if k != "ledger"},
            "printed": next((line["printed"] for line in reversed(lines) if line["printed"]), None),
            "budget": arranged.budget,
            "last_printed": ran.stage[:200],
            "nvml_peak": ran.peak,
            "stderr_tail": ran.stderr[-KEPT:],
        }
        deed, skipped = follow(arranged, ran)
        followed: dict[str, Any] = {"tried": deed is not None, "skipped": skipped}
        if deed is not None:
            followed["advice"] = deed.text
            budget = arranged.budget if deed.budget is None else deed.budget
            if deed.call is not None:
                changed = with_call(program, "program.py", ran.stderr, deed.call)
                program = changed if changed is not None else program
                followed["call"] = deed.call if changed is not None else f"{deed.call}: no line to put it before"
            if deed.end is not None and other is not None:
                end(other)
            again = Folder(root / f"{name}.again", program, budget)
            environment = {**arranged.environment, **(deed.environment or {})}
            after, _ = again.run(environment, limit, other.pid if other else None)
            followed["helped"], followed["figure"] = got_past(arranged, ran, after)
            followed["budget"] = deed.budget
            if not followed["helped"]:
                followed["stderr_tail"] = after.stderr[-KEPT:]
    result["followed"] = followed
    result["seconds"] = round(time.monotonic() - began, 1)
    wrong = list(verdict(result))
    helped = followed.get("helped", "not tried")
    say(f"{name}: {result['seconds']} s, {'; '.join(wrong) if wrong else 'all right'}; followed advice: {helped}")
    return result


def run_quiet(name: str, budget: Mapping[str, Any], root: Path, seconds: float) -> dict[str, Any]:
    """One program that is in order, under a monitor: its alarms."""
    began = time.monotonic()
    folder = Folder(root / name, (PROGRAMS / f"{name}.py").read_text(), budget)
    ran, lines = folder.run({"MOMENT_SECONDS": str(seconds)}, seconds + 90)
    events = [event for line in lines for event in line["events"]]
    result = {
        "returncode": ran.returncode,
        "done": ran.done,
        "asked_seconds": seconds,
        "seconds": round(time.monotonic() - began, 1),
        "printed": ran.stdout[-400:],
        "alarms": alarms(events),
        "events": events[:200],
        "report": ran.report is not None,
        "nvml_peak": ran.peak,
        "budget": budget,
        "stderr_tail": ran.stderr[-KEPT:],
    }
    say(f"{name}: {result['seconds']} s, rc {ran.returncode}, {len(result['alarms'])} alarms")
    return result


@contextlib.contextmanager
def stranger(leave: int | None) -> Iterator[subprocess.Popen[str] | None]:
    """Another process that holds the card, while the block runs."""
    if leave is None:
        yield None
        return
    command = [sys.executable, "-c", STRANGER, str(leave)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        timer = threading.Timer(60, child.kill)
        timer.start()
        assert child.stdout is not None
        held = child.stdout.readline().strip()
        timer.cancel()
        if held != "held":
            raise RuntimeError("the process that was to fill the card could not")
        yield child
    finally:
        end(child)


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def safely(call: Any, *arguments: Any) -> dict[str, Any]:
    """Its result; a failure of the benchmark itself is a wrong result and no end of the run."""
    try:
        found: dict[str, Any] = call(*arguments)
        return found
    except Exception as error:
        say(f"{arguments[0]}: {type(error).__name__}: {error}")
        text = f"{type(error).__name__}: {error}"
        return {"failed": text, "fields": {"ran": (False, text)}, "followed": {"tried": False, "skipped": []}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of programs, separated by commas; else all")
    parser.add_argument("--quiet-seconds", type=float, default=120, help="how long each program in order runs")
    parser.add_argument("--no-quiet", action="store_true", help="leave out the programs that are in order")
    parser.add_argument("--pool", type=int, default=8, help="programs that run at once")
    parser.add_argument("--timeout", type=float, default=90, help="seconds for one run of one program")
    parser.add_argument("--merge", type=Path, action="append", default=[], help="what another run's JSON has")
    parser.add_argument("-o", "--output", "--out", type=Path)
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else [*ARRANGED, *QUIET]
    unknown = sorted(set(names) - set(ARRANGED) - set(QUIET))
    if unknown:
        parser.error(f"there is no program {', '.join(unknown)}; there are {', '.join([*ARRANGED, *QUIET])}")
    began = time.monotonic()
    before = merged(arguments.merge, "programs", "quiet")
    programs, quiet = before["programs"], before["quiet"]
    beside = [name for name in names if name in ARRANGED and not ARRANGED[name].alone]
    alone = [name for name in names if name in ARRANGED and ARRANGED[name].alone]
    watched = [] if arguments.no_quiet else [name for name in names if name in QUIET]
    with tempfile.TemporaryDirectory(prefix="moment") as folder:
        root = Path(folder)
        with ThreadPoolExecutor(max(len(watched), 1)) as longer, ThreadPoolExecutor(arguments.pool) as pool:
            held = {
                name: longer.submit(safely, run_quiet, name, QUIET[name], root, arguments.quiet_seconds)
                for name in watched
            }
            going = {
                name: pool.submit(safely, run_one, name, ARRANGED[name], root, arguments.timeout) for name in beside
            }
            programs.update({name: one.result() for name, one in going.items()})
            quiet.update({name: one.result() for name, one in held.items()})
        for name in alone:
            programs[name] = safely(run_one, name, ARRANGED[name], root, arguments.timeout)
    from checks import moment_checks

    result: dict[str, Any] = {
        "about": header("python benchmarks/moment.py"),
        "seconds": round(time.monotonic() - began, 1),
        "programs": {name: programs[name] for name in ARRANGED if name in programs},
        "quiet": {name: quiet[name] for name in QUIET if name in quiet},
    }
    result["checks"] = moment_checks(result)
    conclude(result, arguments.output)


if __name__ == "__main__":
    main()
