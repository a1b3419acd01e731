"""A process leaves its GPU, whatever frameworks it uses, and comes back as it was: on a real GPU.

    python benchmarks/suspend.py -o benchmarks/results/h200-suspend.json

a  rounds     each of the six alone, and all six in one process, 20 times off and back under a budget with its monitor
b  calls      every kind of call of other threads while the process is off, 30 rounds. Control: without gates
c  breaks     the helper, or the program that suspends another one, killed at each step; Ctrl-C at each step
d  refusals   each reason not to suspend that one card can provoke; `memguard ps`, `suspend` and `resume`
f  peak       TensorFlow after a peak of 60 GiB
e  seconds    out and in at 1 and 16 GiB, PyTorch at 60 GiB too; the first time and the second at each size
g  turns      two processes of 44 GiB on 80 GB
h  room       no room; a stranger that grabs memory; the window between the placeholder's end and the restore
i  notebook   a Jupyter kernel that goes off when it is idle

Parts a, b, c, d and f run at the same time, at most 290 s on 16 cores that had other work too. The others run one
after the other, as they take times or fill the card: e 260 s, g 70, h 110, i 22. `--part abcdf` runs parts, `--only`
scenarios by name, separated by semicolons, and `--merge` takes what ran from another run's JSON. What is named and
failed there runs again. The whole in calls of at most ten minutes:

    python benchmarks/suspend.py --part abcdf -o 1.json
    python benchmarks/suspend.py --part e --merge 1.json -o 2.json
    python benchmarks/suspend.py --part ghi --merge 2.json -o benchmarks/results/h200-suspend.json

The result is written after each scenario, so that what ends the run does not lose what was measured.

The card needs to be this program's alone, and the machine 110 GiB of free host memory. Part i needs jupyter_client and
ipykernel. A process that was restored is suspended again before it is killed.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _suspend_breaks
import _suspend_notebook
import _suspend_refused
import _suspend_room
import _suspend_rounds
from _listed import BREAKS, REFUSED, SIX, SUSPEND, SUSPEND_STEPS
from _run import Kept, attempt, conclude, header, merged
from _suspend_checks import suspend_checks
from _suspend_children import apart, harsh

Scenario = Callable[[], dict[str, Any]]
_BREAKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "helper killed": functools.partial(_suspend_breaks.inside, "helper"),
    "SIGINT": functools.partial(_suspend_breaks.inside, "sigint"),
    "controller killed": _suspend_breaks.controller,
}
TIMED = sorted(SIX, key=lambda name: name not in _suspend_rounds.AGAIN)
"""Those that keep what they had come last: there must be room for 60 GiB of PyTorch's."""
PARTS: dict[str, dict[str, Scenario]] = {
    "a": {
        "rounds six": functools.partial(_suspend_rounds.values, SIX),
        **{f"rounds {name}": functools.partial(_suspend_rounds.values, (name,)) for name in SIX},
    },
    "b": {
        **{f"calls {name}": functools.partial(_suspend_breaks.calls, name) for name in SIX},
        "control": _suspend_breaks.control,
    },
    "c": {f"{what}, {way}": functools.partial(_BREAKS[what], way) for what in BREAKS for way in SUSPEND_STEPS},
    "d": {
        **{f"refused {what}": functools.partial(_suspend_refused.refused, what) for what in REFUSED},
        "outside": _suspend_rounds.outside,
    },
    "f": {"peak": _suspend_rounds.peak},
    "e": {f"seconds {name}": functools.partial(_suspend_rounds.seconds, name) for name in TIMED},
    "g": {"turns": _suspend_rounds.turns},
    "h": {
        "no room": _suspend_room.no_room,
        "stranger": _suspend_room.stranger,
        "window, context stays": functools.partial(_suspend_room.window, True),
        "window, context goes": functools.partial(_suspend_room.window, False),
    },
    "i": {"notebook": _suspend_notebook.notebook},
}
SCENARIOS: dict[str, Scenario] = {name: do for of in PARTS.values() for name, do in of.items()}
TOGETHER = "bfcad"
"""The longest first. The queue for room is each scenario's own (`apart`)."""
AT_ONCE = 14
"""Processes and their helpers, on 16 cores. Where times count it is one."""


def run(name: str) -> tuple[str, dict[str, Any]]:
    started = time.monotonic()
    with apart():
        outcome = attempt(SCENARIOS[name])
    outcome.setdefault("returncode", 0)
    outcome["wall_s"] = round(time.monotonic() - started, 1)
    print(f"{name}: rc {outcome['returncode']}, {outcome['wall_s']} s", file=sys.stderr, flush=True)
    if outcome["returncode"]:
        print(str(outcome.get("stderr_tail", ""))[-1200:], file=sys.stderr, flush=True)
    return name, outcome


def ran(names: Sequence[str], tell: Callable[[str, dict[str, Any]], None]) -> None:
    """These scenarios, and each outcome as soon as it is there."""
    together = [name for part in TOGETHER for name in PARTS[part] if name in names]
    threads = ThreadPoolExecutor(AT_ONCE)
    try:
        for done in as_completed([threads.submit(run, name) for name in together]):
            tell(*done.result())
    finally:  # Ctrl-C does not wait for those that are under way
        threads.shutdown(wait=False, cancel_futures=True)
    with _suspend_rounds.together([name for name in TIMED if f"seconds {name}" in names]):
        for name in PARTS["e"]:
            if name in names:
                tell(*run(name))
    for name in names:
        if name not in together and name not in PARTS["e"]:
            tell(*run(name))


def chosen(parts: str | None, only: str | None) -> list[str]:
    """The scenarios that are asked for; all if nothing is. SystemExit for a name that is none."""
    if parts is None and only is None:
        return list(SCENARIOS)
    wanted = [name for part in parts or "" for name in PARTS.get(part, (f"part {part}",))]
    wanted += only.split(";") if only else []
    if unknown := [name for name in wanted if name not in SCENARIOS]:
        raise SystemExit(f"no such scenario: {', '.join(unknown)}; there are: {'; '.join(SCENARIOS)}")
    return [name for name in SCENARIOS if name in wanted]


def to_run(names: Sequence[str], before: dict[str, Any], named: bool) -> list[str]:
    """Those that did not run before; if they are asked for by name, also those that failed, or of which a check did."""
    checks = suspend_checks(before) if named else {}
    failed = [name for name in checks and names if not all(checks[check][0] for check in SUSPEND[name])]
    return [name for name in names if name not in before or name in failed]


def kept(output: Path | None, before: Mapping[str, Any], again: Sequence[Path] = ()) -> Kept:
    """The result, as it is until something is added."""
    about, started = header("python benchmarks/suspend.py", "_processes", "_suspend", "cli"), time.monotonic()

    def whole(scenarios: dict[str, Any]) -> dict[str, Any]:
        told = {"about": about, "seconds": round(time.monotonic() - started, 1), "harsh": list(harsh)}
        return {**told, "scenarios": scenarios, "checks": suspend_checks(scenarios)}

    return Kept(output, before, SCENARIOS, whole, again)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", help="letters of parts, as abcd")
    parser.add_argument("--only", help="names of scenarios, separated by semicolons")
    parser.add_argument("--merge", type=Path, action="append", default=[], help="scenarios from another run's JSON")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    before = merged(arguments.merge, "scenarios")["scenarios"]
    names = to_run(chosen(arguments.part, arguments.only), before, bool(arguments.part or arguments.only))
    if again := [name for name in names if name in before]:
        print(f"failed, and runs again: {'; '.join(again)}", file=sys.stderr, flush=True)
    result = kept(arguments.output, before, arguments.merge if again else ())
    try:
        ran(names, result.add)
    except KeyboardInterrupt:
        print("interrupted: the result has what had ended by then", file=sys.stderr, flush=True)
        os._exit(130)  # the processes see the end of their stdin: they leave the card, and end
    if harsh:
        print(f"killed although they were restored: {'; '.join(harsh)}", file=sys.stderr)
    conclude(result.whole(), arguments.output)


if __name__ == "__main__":
    main()
