"""Run, suggest, run again under it: what the budget of `memguard suggest` takes beyond the smallest that passes.

A run passes if the program ends well and nothing was refused, whether or not the program caught it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

from bench.child import environment
from bench.measure import Failed, Run, measure
from bench.programs.patterned import MIB

FRAMEWORKS = {
    "torch_training": ("torch",),
}  # Programs of `bench/programs`, and the frameworks of each.
TRIED = (-10, -5, 0, 5, 10)
"""Headrooms below the default, in percent; below 0 each cap is smaller than what was needed."""
DEFAULT, TIMES = 15, 2  # Percent, and how often it is run. The others run once.
AT_ONCE = 6  # Processes: each takes a few GiB of the card and three cores while it starts.
TIMEOUT = 90.0
GRANULE = 2 * MIB
WIDE = "24GiB"  # The cap of each framework in the budget with room for everything.
MONITOR = "monitor: {interval: 50ms, timeline: %s, warn: 98%%, critical: 99%%}\n"


@measure(
    "suggest", unit="%", bar=dict.fromkeys(FRAMEWORKS, "<= 20"), seconds=70, beside=True,
    needs=("torch",),
)  # fmt: skip
def suggest(run: Run) -> dict[str, list[float] | Failed]:
    """What the suggested budget takes beyond the smallest that passes, in percent of that.

    `headroom` of a program: the smallest headroom with which its runs pass, and with every larger one that was tried.
    """
    found: dict[str, list[float] | Failed] = {}
    together = threading.Semaphore(AT_ONCE)
    with ThreadPoolExecutor(len(FRAMEWORKS)) as threads:
        chains = {name: threads.submit(chain, run, together, name) for name in FRAMEWORKS}
        for name, one in chains.items():
            try:
                waste, headroom = one.result()
                found[name], found[f"{name}_headroom"] = [waste], [headroom]
            except Failed as error:
                found[name] = found[f"{name}_headroom"] = error
    return found


def chain(run: Run, together: threading.Semaphore, program: str) -> tuple[float, float]:
    """All runs of one program: its waste and its smallest headroom, in percent."""
    folder = run.folder / program
    folder.mkdir()

    def ran(name: str, budget: str) -> str | None:
        """Why a run under a budget did not pass; None if it did. Its timeline is `name-PID-RANK.jsonl`."""
        path, timeline = folder / f"{name}.yaml", folder / f"{name}.jsonl"
        path.write_text(budget + MONITOR % json.dumps(str(timeline)))
        with together:
            words = ["-c", path, "--", sys.executable, "-m", f"bench.programs.{program}"]
            child = run.start("memguard:run", *words, timeout=TIMEOUT)
            code = child.close()
        count = refused(folder, name)
        return f"rc {code}, {count} requests refused: {child.stderr()}" if code or count else None

    caps = "".join(f"  {name}: {{limit: {WIDE}}}\n" for name in FRAMEWORKS[program])
    why = ran("wide", f"version: 1\nframeworks:\n{caps}")
    if why is not None:
        raise Failed(f"{program} under the wide budget: {why}")
    default = suggested(folder)
    offers = {headroom: offered(folder, headroom) for headroom in (TRIED[1:2] if run.quick else TRIED)}
    with ThreadPoolExecutor(AT_ONCE) as threads:
        passed = {
            **{at: [threads.submit(ran, f"tried{at}", yaml)] for at, (yaml, _) in offers.items()},
            DEFAULT: [threads.submit(ran, f"default-{at}", default["yaml"]) for at in range(run.rounds(TIMES, 1))],
        }
        ends = {at: [one.result() for one in runs] for at, runs in passed.items()}
    limits = {**{at: limit for at, (_, limit) in offers.items()}, DEFAULT: default["limit"]}
    least = None
    for at in sorted(ends, reverse=True):
        if any(why is not None for why in ends[at]):
            break
        least = at
    if least is None:
        raise Failed(f"{program} does not pass under the suggested budget: {ends[DEFAULT]}")
    return (default["limit"] / limits[least] - 1) * 100, least


def refused(folder: Path, name: str) -> int:
    """How many requests were refused in that run, by its timelines."""
    import memguard

    timelines = [memguard.load_timeline(path) for path in folder.glob(f"{name}-*.jsonl")]
    return sum(event.times or 1 for one in timelines for event in one.events() if event.kind == "refused")


def suggested(folder: Path, *words: str) -> dict[str, Any]:
    """What `memguard suggest --json` says of the timelines of the wide run."""
    timelines = sorted(map(str, folder.glob("wide-*.jsonl")))
    command = [sys.executable, "-m", "memguard", "suggest", *timelines, "--json", *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise Failed(f"memguard suggest: rc {done.returncode}: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def offered(folder: Path, headroom: int) -> tuple[str, int]:
    """The budget of a headroom in percent, and its limit. Below 0 each cap is smaller than what was needed by that."""
    found = suggested(folder, "--headroom", f"{max(headroom, 0)}%")
    if headroom >= 0:
        return found["yaml"], found["limit"]
    part = Fraction(100 + headroom, 100)
    caps = {one["framework"]: int(one["limit"] * part) // GRANULE * GRANULE for one in found["frameworks"]}
    limit = found["reserve"]["bytes"] + sum(caps.values())
    text = re.sub(r"(?m)^  limit: \d+MiB", f"  limit: {limit // MIB}MiB", found["yaml"])
    for name, cap in caps.items():
        text = re.sub(rf"(?m)^(  {name}: {{limit: )\d+MiB", rf"\g<1>{cap // MIB}MiB", text)
    return text, limit
