"""Outcomes of a test suite with and without memguard: read, compare, and explain each difference. Pure."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.moment import size_of

CRASHED, HUNG = "crashed", "hung"
WANTS_MORE = "it wants more memory than its cap"
FLAKY = "it does not end alike without memguard either"
_RANK = ("passed", "xpassed", "xfailed", "skipped", "failed", "error")
"""A test has a report for its setup, call and teardown. The last of these is its outcome."""


@dataclass
class Outcome:
    """One test's outcome and seconds. `text` and `oom` (memguard's report) belong to its failure."""

    outcome: str
    text: str = ""
    oom: Mapping[str, Any] | None = None
    seconds: float = 0.0


@dataclass
class Read:
    """The output of one pytest process. `active`: whether a budget was active; None if not reported. `killed`: it did
    not exit by itself."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    collected: list[str] = field(default_factory=list)
    not_collected: dict[str, str] = field(default_factory=dict)
    crashed: str | None = None
    active: bool | None = None
    killed: bool = False


def read(lines: Iterable[str]) -> Read:
    """Parse the lines of `outcomes.py`. A test that began and never finished crashed its interpreter."""
    found, going = Read(), None
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:  # cut off by the crash
            continue
        if "start" in line:
            going = line["start"]
        elif "finish" in line:
            going = None
        elif "collected" in line:
            found.collected.append(line["collected"])
        elif "not_collected" in line:
            found.not_collected[line["not_collected"]] = line["text"]
        elif "active" in line:
            found.active = line["active"]
        elif "id" in line:
            before, now = found.outcomes.get(line["id"]), line["outcome"]
            seconds = line.get("seconds", 0.0) + (before.seconds if before is not None else 0.0)
            if before is None or _RANK.index(now) >= _RANK.index(before.outcome):
                before = found.outcomes[line["id"]] = Outcome(now, line.get("text", ""), line.get("oom"))
            before.seconds = seconds
    if going is not None:
        found.crashed = going
        found.outcomes[going] = Outcome(CRASHED)
    return found


def file_of(test: str) -> str:
    return test.partition("::")[0]


def folder_of(test: str) -> str:
    return file_of(test).rpartition("/")[0]


def parts(
    ids: Sequence[str], seconds: Callable[[str], float], most: float, apart: Collection[str] = ()
) -> list[list[str]]:
    """Split the tests into parts of at most about `most` seconds in a fixed order: by folder, the longest part first.

    seconds   approximate seconds of one test
    apart     folders whose files are not merged into parts with others

    A file that takes longer is split, in order. Small files share a part.
    """
    folders: dict[str, dict[str, list[str]]] = {}
    for one in ids:
        folders.setdefault(folder_of(one), {}).setdefault(file_of(one), []).append(one)
    found = []
    for folder, files in folders.items():
        pieces = [piece for tests in files.values() for piece in _split(tests, seconds, most)]
        pieces.sort(key=lambda piece: -sum(map(seconds, piece)))
        bins: list[tuple[float, list[str]]] = []
        for piece in pieces:
            takes = sum(map(seconds, piece))
            at = next((n for n, (has, _) in enumerate(bins) if has + takes <= most and folder not in apart), None)
            if at is None:
                bins.append((takes, piece))
            else:
                bins[at] = (bins[at][0] + takes, bins[at][1] + piece)
        found += [tests for _, tests in sorted(bins, key=lambda one: -one[0])]
    return found


def _split(tests: Sequence[str], seconds: Callable[[str], float], most: float) -> list[list[str]]:
    """Split the tests, in order, into the fewest pieces of similar length that `most` allows."""
    whole = sum(map(seconds, tests))
    count = min(max(math.ceil(whole / most), 1), len(tests))
    pieces: list[list[str]] = [[] for _ in range(count)]
    before = 0.0
    for test in tests:
        pieces[min(int(before * count / whole), count - 1) if whole else 0].append(test)
        before += seconds(test)
    return [piece for piece in pieces if piece]


def differing(plain: Mapping[str, Outcome], under: Mapping[str, Outcome]) -> list[str]:
    """The tests that ran both times and ended differently."""
    return [one for one in plain if one in under and plain[one].outcome != under[one].outcome]


def reason(cap: int, plain: Sequence[Outcome], under: Sequence[Outcome]) -> tuple[str | None, str]:
    """The reason for a test's difference, and the evidence; None if there is no explanation.

    plain, under   its outcomes in all runs, those of the first run first
    cap            the framework's cap in bytes under memguard

    WANTS_MORE if memguard refused it memory in every run, and the refusal's own figures exceed the cap; FLAKY if its
    runs without memguard differ from each other.
    """
    if len({one.outcome for one in plain}) > 1:
        return FLAKY, f"without memguard: {_counted(plain)}"
    over = [_over_cap(one, cap) for one in under]
    if over and all(over):
        return WANTS_MORE, str(over[0])
    evidence = f"without memguard: {_counted(plain)}; under memguard: {_counted(under)}"
    text = next((one.text for one in under if one.text), "")
    return None, f"{evidence}{': ' if text else ''}{text[:300]}"


_REFUSED = re.compile(
    r"asked for ([\d.,]+ \w+)(?: \(takes ([\d.,]+ \w+)\))?, holds ([\d.,]+ \w+) of the ([\d.,]+ \w+) that the memguard"
)


def _over_cap(one: Outcome, cap: int) -> str | None:
    """The figures in memguard's refusal, if the framework's memory plus the request exceed its cap."""
    if one.outcome not in ("failed", "error"):
        return None
    if found := _REFUSED.search(one.text):
        asked, takes, held, its_cap = (None if text is None else size_of(text) for text in found.groups())
        more = takes or asked or 0
        if (held or 0) + more > (its_cap or 0) and its_cap == cap:
            return f"it held {found[3]}, what it asked for takes {found[2] or found[1]}, and its cap is {found[4]}"
        return None
    size = (one.oom or {}).get("requested")
    return f"it asked for {size:,} bytes: its cap is {cap:,}" if size is not None and size > cap else None


def _counted(outcomes: Sequence[Outcome]) -> str:
    counts = Counter(one.outcome for one in outcomes)
    return ", ".join(f"{number} {name}" for name, number in counts.items()) or "not run"
