"""Run programs of `tests/gpu/programs/` as a user would, under a budget: once, and again with the advice followed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.child import Sampler
from support.moment import Arranged, Ran, alarms, follow, got_past, judge, with_call

TESTS = Path(__file__).resolve().parents[1]
PROGRAMS = TESTS / "gpu" / "programs"
STRANGER = """
import sys, cupy
from cupy.cuda import runtime
leave, kept = int(sys.argv[1]), []
cupy.zeros(1)
while (free := runtime.memGetInfo()[0]) > leave + (2 << 20):
    kept.append(runtime.malloc(min(1 << 30, (free - leave) >> 21 << 21)))
print("held", flush=True)
sys.stdin.read()
"""  # Another process that fills the GPU except for this many bytes.


class Folder:
    """A program, its budget, and its output files: one run each."""

    def __init__(self, where: Path, program: str, budget: Mapping[str, Any]) -> None:
        self.where, self.program = where, where / "program.py"
        where.mkdir(parents=True)
        self.program.write_text(program)
        (where / "budget.yaml").write_text(json.dumps(budget))  # JSON is YAML too

    def run(self, environment: Mapping[str, str], limit: float, stranger: int | None = None) -> tuple[Ran, list[Any]]:
        """Run it to its end, or for at most `limit` seconds: then kill all its processes."""
        said = self.where / "said.jsonl"
        paths = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONFAULTHANDLER": "1", "TF_CPP_MIN_LOG_LEVEL": "1", "PYTHONPATH": paths, **environment}
        sampler = Sampler()
        with (self.where / "stdout").open("w") as out, (self.where / "stderr").open("w") as err:
            child = subprocess.Popen(
                [sys.executable, str(TESTS / "support" / "moment_child.py"), str(self.program), str(said)],
                cwd=self.where, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip
            sampler.start(child.pid)
            returncode: int | None = None
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    returncode = child.wait(limit)
            finally:
                with contextlib.suppress(ProcessLookupError):  # including workers that outlived it
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        peak = sampler.stop()["max_bytes"]
        lines = [json.loads(line) for line in said.read_text().splitlines()] if said.exists() else []
        report = next((line["report"] for line in reversed(lines) if line["report"] is not None), None)
        stdout, stderr = ((self.where / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return Ran(returncode, stdout, stderr, report, peak, stranger), lines


def out_of_memory(name: str, arranged: Arranged, root: Path, limit: float, followed: bool = True) -> list[str]:
    """The errors in one program's report and advice. `limit`: seconds for each of its two runs."""
    program = (PROGRAMS / f"{name}.py").read_text()
    with _stranger(arranged.leave) as other:
        pid = other.pid if other else None
        ran, _ = Folder(root / name, program, arranged.budget).run(arranged.environment, limit, pid)
        wrong = [f"{name}: {field}: {figure}" for field, (right, figure) in judge(arranged, ran).items() if not right]
        if wrong:
            return [*wrong, ran.stderr[-3000:]]
        if not followed:
            return []
        deed, skipped = follow(arranged, ran)
        if deed is None:
            return [f"{name}: no advice could be followed: {skipped}"]
        if deed.call is not None:
            changed = with_call(program, "program.py", ran.stderr, deed.call)
            if changed is None:
                return [f"{name}: no line to put {deed.call} before"]
            program = changed
        if deed.end is not None and other is not None:
            _end(other)
        again = Folder(root / f"{name}.again", program, arranged.budget if deed.budget is None else deed.budget)
        after, _ = again.run({**arranged.environment, **(deed.environment or {})}, limit, pid)
    helped, figure = got_past(arranged, ran, after)
    return [] if helped else [f"{name}: followed {deed.text!r}, which did not help: {figure}", after.stderr[-3000:]]


def in_order(name: str, budget: Mapping[str, Any], root: Path, seconds: float) -> list[str]:
    """The errors in a run of a program without a fault, of this duration: its exit status and its alarms."""
    ran, lines = Folder(root / name, (PROGRAMS / f"{name}.py").read_text(), budget).run(
        {"MOMENT_SECONDS": str(seconds)}, seconds + 90
    )
    wrong = alarms([event for line in lines for event in line["events"]])
    if ran.returncode != 0 or not ran.done:
        wrong.append(f"rc {ran.returncode}, last printed {ran.stage[:60]!r}: {ran.stderr[-3000:]}")
    if ran.report is not None:
        wrong.append(f"a report: {ran.report}"[:500])
    return [f"{name}: {one}" for one in wrong]


@contextlib.contextmanager
def _stranger(leave: int | None) -> Iterator[subprocess.Popen[str] | None]:
    """While the block runs, another process fills the GPU except for this many bytes."""
    if leave is None:
        yield None
        return
    command = [sys.executable, "-c", STRANGER, str(leave)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(60, child.kill)
    try:
        timer.start()
        assert child.stdout is not None
        held = child.stdout.readline().strip()
        timer.cancel()
        if held != "held":
            raise RuntimeError("the process that was to fill the card could not")
        yield child
    finally:
        timer.cancel()
        _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()
