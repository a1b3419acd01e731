"""pydantic's errors and the cross-check's violations as Problems: the place, what is wrong there, and what to do.

pydantic says where a value is wrong; `_ADVICE` says what belongs there, in memguard's words.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memguard._config.checks import Loc, Violation
from memguard._config.document import Document
from memguard._config.values import CRITICAL, FORECAST, INTERVAL, WARN, device_key, duration_text, found
from memguard._findings import nearest
from memguard._specs import SPECS, Option
from memguard._units import short
from memguard.errors import Problem


@dataclass(frozen=True)
class _Advice:
    """What belongs at one place of a budget.

    `what` begins the sentence about a wrong value. `example` is what to write for a key without a value; without one
    such a key gets the same sentence. `meant` finds the word that another one stands for, and `instead` has the fix for
    words that stand for nothing here. `unit` is the one that a bare number most likely lacks.
    """

    what: str
    fix: str
    example: str = ""
    meant: Callable[[str], str | None] = {"": ""}.get
    instead: Mapping[str, str] = field(default_factory=dict)
    unit: str = ""


def _words(**synonyms: str) -> Callable[[str], str | None]:
    """Finds what a word stands for: `_words(warn="warning log")` gives `warn` for both, and for itself."""
    return {word: name for name, words in synonyms.items() for word in (name, *words.split())}.get


_BOOLEANS = _words(true="yes y on 1", false="no n off 0")
_ACTIONS = _words(trim="empty_cache free reclaim", **{"raise": "error exception fail abort stop"})
_ON_BUSY = _words(warn="warning log", **{"raise": "error exception fail abort refuse"})
_NOT_ACTIONS = {
    **dict.fromkeys(("warn", "log", "print"), "remove it: a warning is logged wherever there is a monitor"),
    **dict.fromkeys(("call", "callback", "function", "hook"), "remove it: functions are registered from Python only"),
}
_OFF = ("false", "off", "no", "none", "never")
_SIZE = "a size of at least 2MiB, the smallest piece that CUDA hands out"
_WRITE_SIZE = "write a size such as '512MiB', '4GiB' or plain bytes"
_WRITE_PERCENT = "write a percentage such as '50%'"
_EXAMPLE = "torch: {share: 50%}"
_BETWEEN, _AHEAD = (" to ".join(map(duration_text, span)) for span in (INTERVAL, FORECAST))
_ADVICE = {
    "version": _Advice("this memguard reads version 1", "write 'version: 1'", "", _words(**{"1": ""})),
    "device": _Advice("expected the keys limit and reserve", "write 'device: {limit: 90%}'"),
    "devices": _Advice("expected one line for each GPU", "write for example '0: {limit: 50%}' under devices"),
    "frameworks": _Advice("expected one line for each framework", f"write for example '{_EXAMPLE}' under frameworks"),
    "monitor": _Advice("expected its settings", "write 'monitor: {}' for the defaults, or 'monitor: {interval: 1s}'",
                       instead=dict.fromkeys(_OFF, "remove the key: nothing watches then")),
    "doctor": _Advice("expected its settings", "write 'doctor: {ignore: []}', or remove the key"),
    "device.limit": _Advice(f"a limit is a percentage, or {_SIZE}", f"{_WRITE_SIZE}, or a percentage such as '90%'",
                            "'90%' or '40GiB'", unit="MiB"),
    "device.reserve": _Advice(f"a reserve is 'auto', or {_SIZE}", "write 'auto', or a size such as '2GiB'",
                              "'auto' or '2GiB'", unit="MiB"),
    "framework.share": _Advice("a share is a percentage", _WRITE_PERCENT, "'50%'"),
    "framework.limit": _Advice(f"a limit is {_SIZE}", _WRITE_SIZE, "'4GiB'", unit="MiB"),
    "on_busy": _Advice("on_busy is warn or raise", "write 'warn' to log a warning and go on, or 'raise' to stop",
                       "'warn' or 'raise'", _ON_BUSY),
    "monitor.interval": _Advice(f"interval is a duration from {_BETWEEN}", "write for example '500ms'", "'500ms'",
                                unit="ms"),
    "monitor.warn": _Advice("warn is a percentage", _WRITE_PERCENT, f"'{WARN}'"),
    "monitor.critical": _Advice("critical is a percentage", _WRITE_PERCENT, f"'{CRITICAL}'"),
    "monitor.forecast": _Advice(f"forecast is a duration from {_AHEAD}, or 0 for none",
                                "write for example '20s', or 0 for none", "'20s'",
                                instead=dict.fromkeys(_OFF, "write '0'"), unit="ms"),
    "monitor.timeline": _Advice("timeline is the path of a file", "write a path such as 'memguard.jsonl'",
                                "'memguard.jsonl'"),
    "monitor.timeline_size": _Advice("timeline_size is a size of at least 1MiB", "write a size such as '64MiB'",
                                     "'64MiB'", unit="MiB"),
    "on_pressure": _Advice("on_pressure is a list of trim and raise", "write '[trim]'", "'[trim]'", _ACTIONS),
    "on_pressure[]": _Advice("on_pressure knows trim and raise",
                             "write 'trim' to give idle caches back, or 'raise' to stop at the next checkpoint", "",
                             _ACTIONS, _NOT_ACTIONS),
    "doctor.ignore": _Advice("ignore is a list of findings", "write '[]'", "'[]'", nearest),
    "doctor.ignore[]": _Advice("ignore names findings of memguard doctor",
                               "remove it; `memguard doctor --list` prints the names", "", nearest),
}  # fmt: skip
_ALSO = {
    # other names that people write for a key
    "gpu": "device",
    "gpus": "devices",
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
    **{alias: name for name, spec in SPECS.items() for alias in spec.aliases},
    **{alias: option.name for spec in SPECS.values() for option in spec.options for alias in option.aliases},
}
_OTHERS = ("cudf", "cuml", "numpy")
"""Libraries whose names are close to a framework's and that are not misspelt ones."""


def problems(
    errors: Iterable[Mapping[str, Any]],
    violations: Iterable[Violation],
    document: Document,
    names: Mapping[str, tuple[str, ...]],
) -> list[Problem]:
    """Everything wrong, in file order. `names` gives the keys allowed at "", `device`, `frameworks`, `monitor` and
    `doctor`, and below each framework.
    """
    violations = list(violations)
    named = {violation.loc for violation in violations if violation.alone}
    unnamed = (error for error in errors if tuple(error["loc"]) not in named)
    listed = [*(_violation(error, document.data, names) for error in unnamed), *violations]
    alone = {violation.loc for violation in listed if violation.alone}
    kept = [
        violation
        for violation in dict.fromkeys(listed)
        if not any(violation.loc[:n] in document.bad for n in range(len(violation.loc) + 1))
        and not any(violation.loc[:n] in alone for n in range(len(violation.loc)))
        and (violation.alone or violation.loc not in alone)
    ]
    order = {path: index for index, path in enumerate(document.values)}
    kept.sort(key=lambda violation: order.get(_nearest(violation.loc, order), 0))
    return in_order([*document.problems, *(_problem(violation, document) for violation in kept)])


class Origin:
    """Where a budget was written. All origins are equal, so that equal budgets may come from different files."""

    def __init__(self, document: Document | None = None, source: str = "") -> None:
        """`source` names the text in messages: "" if the budget was made of plain Python values."""
        document = document or Document()
        self.source = source if document.values.get(()) else ""
        parents = {loc[:-1] for loc in document.values}
        # A mapping is marked at its key, a value where it stands itself.
        marks = document.values | {loc: mark for loc, mark in document.keys.items() if loc in parents}
        self._marks = {_canonical(loc): mark for loc, mark in marks.items() if loc and mark}

    def problem(self, loc: Loc, message: str, fix: str) -> Problem:
        """A problem with what is at `loc`. If nothing is written there, its line is that of the nearest key above."""
        line, column = self._marks.get(_nearest(loc, self._marks)) or (None, None)
        return Problem(message, fix, line, column, _path(loc))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin)

    def __hash__(self) -> int:
        return 0


def _canonical(loc: Loc) -> Loc:
    """As the checked budget has it: `cuda:0` is `0` there."""
    return ("devices", device_key(str(loc[1])), *loc[2:]) if len(loc) > 1 and loc[0] == "devices" else loc


def in_order(unordered: Iterable[Problem]) -> list[Problem]:
    """By line and column; in their old order if there is no file."""
    return sorted(unordered, key=lambda problem: (problem.line or 0, problem.column or 0))


def _violation(error: Mapping[str, Any], data: object, names: Mapping[str, tuple[str, ...]]) -> Violation:
    loc, kind = tuple(error["loc"]), error["type"]
    at_key = loc[-1] == "[key]"
    loc = loc[:-1] if at_key else loc
    if kind == "budget":
        return Violation(loc, error["ctx"]["message"], error["ctx"]["fix"], at_key)
    if kind == "missing":
        fixes = {
            "version": "'version: 1' as the first line",
            "frameworks": f"'frameworks:' with '  {_EXAMPLE}' below it",
        }
        return Violation(loc, "is missing; every budget needs it", f"add {fixes[str(loc[0])]}")
    if kind == "extra_forbidden":
        return _unknown(loc, names)
    raw = data
    for part in loc:
        raw = raw[part]  # type: ignore[index]
    advice = _advice(loc, raw)
    if raw is None and advice.example:
        return Violation(loc, "has no value", f"write {advice.example}, or remove the key")
    message, fix = f"{advice.what}, found {found(raw)}", _fix(advice, kind, raw)
    if kind == "value_error" and fix == advice.fix:
        # A parser says in one sentence what is wrong and what to write instead, if that depends on the value.
        message, _, own = str(error["ctx"]["error"]).partition("; write ")
        fix = f"write {own}" if own and "is not a size; " not in str(error["ctx"]["error"]) else fix
    return Violation(loc, message, fix)


def _advice(loc: Loc, raw: object) -> _Advice:
    """What belongs at `loc`, where `raw` stands."""
    first, last = loc[0], loc[-1]
    if isinstance(last, int):
        return _ADVICE[f"{'.'.join(map(str, loc[:-1]))}[]"]
    if len(loc) == 2 and first == "devices":
        return _Advice("expected the keys limit and reserve", f"write '{last}: {{limit: 50%}}'")
    if len(loc) == 2 and first == "frameworks":
        sized = isinstance(raw, str) and re.fullmatch(r"\s*[\d.]+ ?(%|[KMGT]iB)\s*", raw)
        value = str(raw).strip() if sized else "50%"
        key = "share" if "%" in value else "limit"
        return _Advice("expected share or limit", f"write '{last}: {{{key}: {value}}}'")
    if len(loc) == 3 and first == "frameworks" and last not in ("share", "limit"):
        return _of_option(next(option for option in SPECS[str(loc[1])].options if option.name == last))
    group = {"devices": "device.", "frameworks": "framework."}.get(str(first), f"{first}.")
    return _ADVICE[str(last) if len(loc) == 1 else group + str(last)]


def _of_option(option: Option) -> _Advice:
    words = ("true", "false") if option.kind == "flag" else option.words or (str(option.default),)
    what = " or ".join(words) if option.kind != "count" else f"a whole number from 0 to {option.most}"
    example = " or ".join(f"'{word}'" for word in words)
    own = {word: word for word in words} | dict(option.synonyms)
    meant = {"flag": _BOOLEANS, "count": _digits}.get(option.kind, own.get)
    return _Advice(f"{option.name} is {what}", option.advice or f"write {example}", example, meant)


def _digits(word: str) -> str | None:
    return word if re.fullmatch("0|[1-9][0-9]?", word) else None


def _fix(advice: _Advice, kind: str, raw: object) -> str:
    word = found(raw).strip("'").strip().lower()
    if word in advice.instead:
        return advice.instead[word]
    bare = re.fullmatch(r"([0-9]{1,6})(\.0*)?", word)
    if bare and advice.unit and kind == ("less_than_equal" if advice.unit == "ms" else "greater_than_equal"):
        return f"{advice.fix}; did you mean '{bare[1]}{advice.unit}'?"
    if not isinstance(raw, (str, int)) or kind.endswith("_than_equal"):
        return advice.fix
    meant = advice.meant(word)
    if not meant:
        return advice.fix
    if kind == "tuple_type":
        return f"write '[{meant}]'"
    # What looks right already was refused because of its quotes.
    return f"write '{meant}'" if raw != meant else f"write '{meant}' without quotes"


def _unknown(loc: Loc, names: Mapping[str, tuple[str, ...]]) -> Violation:
    name = str(loc[-1])
    level = _level(loc)
    allowed = names[level]
    choice = f"allowed: {', '.join(allowed)}"
    lowered = name.lower()
    if level in SPECS and lowered in ("min", "max"):
        return Violation(loc, f"not supported by this version of memguard ({choice})", "remove it", True, True)
    near = next((also for also in [_ALSO.get(lowered)] if also in allowed), None)
    if near is None and len(name) <= 40 and ":" not in name and lowered not in _OTHERS:
        near = next(iter(difflib.get_close_matches(lowered, allowed, n=1, cutoff=0.6)), None)
    home = None if near else _home(name, names)
    fix = "remove it"
    if near is not None:
        fix = f"did you mean {near!r}?"
    elif home is not None:
        fix = f"move it below {home}"
    elif ":" in name and len(name) <= 40:  # {share:50%}
        fix = "write a space after ':'"
    elif name[:1].isdecimal() and level not in ("", "frameworks"):  # {limit: 1,5GiB}
        fix = "write decimals with a point, as in 1.5GiB"
    elif name in names[""]:
        fix = "align it with 'version:'"
    here = " here" if fix.startswith(("move", "align")) else ""
    thing = "framework" if level == "frameworks" else "key"
    return Violation(loc, f"unknown {thing} {short(name)}{here}; {choice}", fix, True, True)


def _home(name: str, names: Mapping[str, tuple[str, ...]]) -> str | None:
    """Where a key belongs that was found elsewhere, as the fix names it."""
    for level in ("frameworks", "device", "monitor", "doctor", *SPECS):
        if name in names[level]:
            everywhere = level in SPECS and name in ("share", "limit")
            return f"a framework, as in '{_EXAMPLE}'" if everywhere else f"'{level}:'"
    return None


def _level(loc: Loc) -> str:
    if len(loc) == 1:
        return ""
    if loc[0] == "frameworks":
        return "frameworks" if len(loc) == 2 else str(loc[1])
    return str(loc[0]) if loc[0] in ("monitor", "doctor") else "device"


def _problem(violation: Violation, document: Document) -> Problem:
    loc = violation.loc
    marks = document.keys if violation.at_key else document.values
    line, column = marks.get(loc) or document.values.get(_nearest(loc, document.values)) or (None, None)
    return Problem(violation.message, violation.fix, line, column, _path(loc))


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
