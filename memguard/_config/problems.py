"""pydantic's errors and our own findings as Problems: plain sentences, the nearest valid name, line and column."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from memguard._config.checks import Finding, Loc
from memguard._config.document import Document
from memguard._config.values import device_key, found
from memguard._specs import SPECS
from memguard._units import short
from memguard.errors import Problem

_PLANNED = {
    "framework": ("min", "max"),
    "torch": ("min", "max"),
    "tensorflow": ("min", "max"),
    "pycuda": ("min", "max"),
}
_ALSO = {
    **{alias: row.name for row in SPECS.values() for alias in row.aliases},
    "gpu": "device",
    "gpus": "devices",
    "communicators": "nccl",
    "ctx": "context",
    "period": "interval",
    "every": "interval",
    "warning": "warn",
    "error": "critical",
    "predict": "forecast",
    "horizon": "forecast",
    "file": "timeline",
    "path": "timeline",
    "log": "timeline",
    "watch": "monitor",
    "ignored": "ignore",
    "skip": "ignore",
    "silence": "ignore",
}
_OTHERS = ("cudf", "cuml", "numpy")
"""Libraries whose names are close to a framework's and that are not misspelt ones."""
_HOMES = {
    # where a key belongs that was found elsewhere, as the fix names it
    "frameworks": "'frameworks:'",
    "device": "'device:'",
    "monitor": "'monitor:'",
    "doctor": "'doctor:'",
    "framework": "a framework, as in 'torch: {share: 50%}'",
    "torch": "'torch:'",
    "tensorflow": "'tensorflow:'",
    "pycuda": "'pycuda:'",
}
_SHAPES = {
    "device": ("the keys limit and reserve", "write 'device: {limit: 90%}'"),
    "devices": ("one line for each GPU", "write for example '0: {limit: 50%}' under devices"),
    "frameworks": ("one line for each framework", "write for example 'torch: {share: 50%}' under frameworks"),
}


def problems(
    errors: Iterable[Mapping[str, Any]],
    findings: Iterable[Finding],
    document: Document,
    names: Mapping[str, tuple[str, ...]],
) -> list[Problem]:
    """Everything wrong, in file order. `names` gives the keys allowed at '', 'device', 'frameworks', 'framework',
    'monitor', 'doctor', and at each framework with settings of its own.
    """
    listed = [*(_finding(error, names) for error in errors), *findings]
    alone = {finding.loc for finding in listed if finding.alone}
    kept = [
        finding
        for finding in dict.fromkeys(listed)
        if not any(finding.loc[:n] in document.bad for n in range(len(finding.loc) + 1))
        and not any(finding.loc[:n] in alone for n in range(len(finding.loc)))
        and (finding.alone or finding.loc not in alone)
    ]
    order = {path: index for index, path in enumerate(document.values)}
    kept.sort(key=lambda finding: order.get(_nearest(finding.loc, order), 0))
    return in_order([*document.problems, *(_problem(finding, document) for finding in kept)])


class Origin:
    """Where a budget was written. All are equal, so that budgets are which mean the same wherever they stand."""

    def __init__(self, document: Document | None = None, source: str = "") -> None:
        """`source` names the text in messages: "" where there is none, but plain Python values."""
        document = document or Document()
        self.source = source if document.values.get(()) else ""
        parents = {loc[:-1] for loc in document.values}
        # A mapping is marked at its key, a value where it stands itself.
        marks = document.values | {loc: mark for loc, mark in document.keys.items() if loc in parents}
        self._marks = {_canonical(loc): mark for loc, mark in marks.items() if loc and mark}

    def problem(self, loc: Loc, message: str, fix: str) -> Problem:
        """A problem with what is at `loc`, or would be: then its line is that of the nearest key above."""
        line, column = self._marks.get(_nearest(loc, self._marks)) or (None, None)
        return Problem(message, fix, line, column, _path(loc))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin)

    def __hash__(self) -> int:
        return 0


def _canonical(loc: Loc) -> Loc:
    """As the checked budget has it: `cuda:0` is `0` there."""
    return ("devices", device_key(loc[1]), *loc[2:]) if len(loc) > 1 and loc[0] == "devices" else loc


def in_order(unordered: Iterable[Problem]) -> list[Problem]:
    """By line and column; as they were where there is no file."""
    return sorted(unordered, key=lambda problem: (problem.line or 0, problem.column or 0))


def _finding(error: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]) -> Finding:
    loc, kind = tuple(error["loc"]), error["type"]
    at_key = len(loc) == 3 and loc[2] == "[key]"
    loc = loc[:2] if at_key else loc
    if kind == "budget":
        return Finding(loc, error["ctx"]["message"], error["ctx"]["fix"], at_key)
    if kind == "missing":
        fix = (
            "add 'version: 1' as the first line"
            if loc == ("version",)
            else "add 'frameworks:' with a line such as '  torch: {share: 50%}'"
        )
        return Finding(loc, "is missing; every budget needs it", fix)
    if kind in ("extra_forbidden", "unknown_framework"):
        return _unknown(loc, names)
    what, fix = _shape(loc, error.get("input"))
    return Finding(loc, f"expected {what}, found {found(error.get('input'))}", fix)


def _unknown(loc: Loc, names: Mapping[str, tuple[str, ...]]) -> Finding:
    name = str(loc[-1])
    level = _level(loc)
    allowed = names[level]
    thing = "framework" if level == "frameworks" else "key"
    choice = f"allowed: {', '.join(allowed)}"
    if name.lower() in _PLANNED.get(level, ()):
        return Finding(loc, f"not supported by this version of memguard ({choice})", "remove it", True, True)
    lowered = name.lower()
    near = _ALSO.get(lowered) if _ALSO.get(lowered) in allowed else None
    matches = (
        difflib.get_close_matches(lowered, allowed, n=1, cutoff=0.6)
        if len(name) <= 40 and ":" not in name and near is None and lowered not in _OTHERS
        else []
    )
    near = near or (matches[0] if matches else None)
    if near is not None:
        return Finding(loc, f"unknown {thing} {short(name)}; {choice}", f"did you mean {near!r}?", True, True)
    home = next((home for home in _HOMES if name in names[home]), None)
    if home is not None and level != home:
        fix = f"move it below {_HOMES[home]}"
        return Finding(loc, f"unknown {thing} {short(name)} here; {choice}", fix, True, True)
    if ":" in name and len(name) <= 40:  # {share:50%}
        return Finding(loc, f"unknown {thing} {short(name)}; {choice}", "write a space after ':'", True, True)
    if name[:1].isdecimal() and level not in ("", "frameworks"):  # {limit: 1,5GiB}
        fix = "write decimals with a point, as in 1.5GiB"
        return Finding(loc, f"unknown {thing} {short(name)}; {choice}", fix, True, True)
    if name in names[""]:
        return Finding(loc, f"unknown {thing} {short(name)} here; {choice}", "align it with 'version:'", True, True)
    return Finding(loc, f"unknown {thing} {short(name)}; {choice}", "remove it", True, True)


def _level(loc: Loc) -> str:
    if len(loc) == 1:
        return ""
    if loc[0] == "frameworks":
        return "frameworks" if len(loc) == 2 else str(loc[1]) if loc[1] in _PLANNED else "framework"
    return str(loc[0]) if loc[0] in ("monitor", "doctor") else "device"


def _shape(loc: Loc, value: object) -> tuple[str, str]:
    if len(loc) == 1:
        return _SHAPES[str(loc[0])]
    if loc[0] == "devices":
        return "the keys limit and reserve", f"write '{loc[1]}: {{limit: 50%}}'"
    meant = value.strip() if isinstance(value, str) and re.fullmatch(r"\s*[\d.]+ ?(%|[KMGT]iB)\s*", value) else "50%"
    return "share or limit", f"write '{loc[1]}: {{{'share' if '%' in meant else 'limit'}: {meant}}}'"


def _problem(finding: Finding, document: Document) -> Problem:
    marks = document.keys if finding.at_key else document.values
    line, column = marks.get(finding.loc) or document.values.get(_nearest(finding.loc, document.values)) or (None, None)
    return Problem(finding.message, finding.fix, line, column, _path(finding.loc))


def _nearest(loc: Loc, marks: Mapping[Loc, object]) -> Loc:
    while loc and loc not in marks:
        loc = loc[:-1]
    return loc


def _path(loc: Loc) -> str:
    text = ""
    for part in loc:
        plain = isinstance(part, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,39}", part)
        text += (f".{part}" if text else str(part)) if plain else f"[{short(part)}]"
    return text
