"""pydantic's errors and the cross-check's violations as Problems: the place, what is wrong there, and what to do.

pydantic says where a value is wrong and how; what may be written there instead is read from the models.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_origin

from memguard._config.checks import Loc, Violation
from memguard._config.document import Document
from memguard._config.values import device_key, found
from memguard._specs import SPECS
from memguard._units import short
from memguard.errors import Problem

Fields = Mapping[str, Mapping[str, Any]]
"""The fields of each level by key; the levels are "", `device`, `frameworks`, `monitor`, `doctor`, each framework."""

_EXAMPLE = "torch: {share: 50%}"
_SHAPES = {
    # what belongs below a key, and what to write if it holds something else
    "device": ("the keys limit and reserve", "write 'device: {limit: 90%}'"),
    "devices": ("one line for each GPU", "write for example '0: {limit: 50%}' under devices"),
    "frameworks": ("one line for each framework", f"write for example '{_EXAMPLE}' under frameworks"),
    "monitor": ("its settings", "write 'monitor: {}' for the defaults, or for example 'monitor: {interval: 1s}'"),
    "doctor": ("its settings", "write 'doctor: {ignore: []}', or remove the key"),
}
_OFF = ("false", "off", "no", "none", "never")
_INSTEAD = {
    # what to do about a word that stands for no value of its key
    "monitor": dict.fromkeys(_OFF, "remove the key: nothing watches then"),
    "forecast": dict.fromkeys(_OFF, "write '0'"),
    "on_pressure": {
        **dict.fromkeys(("warn", "log", "print"), "remove it: a warning is logged wherever there is a monitor"),
        **dict.fromkeys(("call", "callback", "function", "hook"), "remove it: functions are registered from Python"),
    },
}


def _instead(**others: str) -> dict[str, str]:
    """Words that people write, each with the one that it stands for."""
    return {word: name for name, words in others.items() for word in words.split()}


_VALUES = _instead(true="yes y on 1", false="no n off 0", warn="warning log", trim="empty_cache free reclaim") | (
    dict.fromkeys(("error", "exception", "fail", "abort", "refuse", "stop"), "raise")
)
_KEYS = {
    **_instead(
        device="gpu", devices="gpus", monitor="watch", interval="period every", warn="warning", critical="error"
    ),
    **_instead(forecast="predict horizon", timeline="file path log", ignore="ignored skip silence"),
    **{alias: name for name, spec in SPECS.items() for alias in spec.aliases},
    **{alias: option.name for spec in SPECS.values() for option in spec.options for alias in option.aliases},
}
_OTHERS = ("cudf", "cuml", "numpy")
"""Libraries whose names are close to a framework's and that are not misspelt ones."""


def problems(
    errors: Iterable[Mapping[str, Any]],
    violations: Iterable[Violation],
    document: Document,
    fields: Fields,
) -> list[Problem]:
    """Everything wrong, in file order."""
    violations = list(violations)
    named = {violation.loc for violation in violations if violation.alone}
    unnamed = (error for error in errors if tuple(error["loc"]) not in named)
    listed = [*(_violation(error, document.data, fields) for error in unnamed), *violations]
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


def _violation(error: Mapping[str, Any], data: Any, fields: Fields) -> Violation:
    loc, kind = tuple(error["loc"]), error["type"]
    if kind == "missing":
        fix = "'version: 1' as the first line" if loc == ("version",) else f"'frameworks:' and below it '  {_EXAMPLE}'"
        return Violation(loc, "is missing; every budget needs it", f"add {fix}")
    if kind == "extra_forbidden":
        return _unknown(loc, fields)
    at_key = loc[-1] == "[key]"
    loc = loc[:-1] if at_key else loc
    raw = data
    for part in loc:
        raw = raw[part]
    *_, key = (part for part in loc if isinstance(part, str))
    info: Any = fields[_level(loc)].get(key)
    entry = len(loc) == 2 and loc[0] in ("devices", "frameworks")
    if kind != "value_error" and (entry or (len(loc) == 1 and key in _SHAPES)):
        what, fix = _entry(loc, raw) if entry else _SHAPES[key]
        message = f"expected {what}, found {found(raw)}"
    elif raw is None and not at_key and loc[-1] == key and not info.is_required():
        message, fix = "has no value", f"write {_examples(info)}, or remove the key"
    elif kind == "value_error":
        # A parser says what is wrong and, if that depends on the value, what to do.
        message, *own = re.split("; (?=write |copy |remove |add )", str(error["ctx"]["error"]))
        fix = own[0] if own and "is not a size" not in message else f"write for example {_examples(info)}"
    else:
        what, fix = _choice(loc, key, kind, raw, info)
        message = f"{what}, found {found(raw)}"
    return Violation(loc, message, _INSTEAD.get(key, {}).get(_word(raw), fix), at_key)


def _entry(loc: Loc, raw: object) -> tuple[str, str]:
    """What belongs below the name of a GPU or a framework, and what to write."""
    if loc[0] == "devices":
        return "the keys limit and reserve", f"write '{loc[1]}: {{limit: 50%}}'"
    sized = isinstance(raw, str) and re.fullmatch(r"\s*[\d.]+ ?(%|[KMGT]iB)\s*", raw)
    value = str(raw).strip() if sized else "50%"
    return "share or limit", f"write '{loc[1]}: {{{'share' if '%' in value else 'limit'}: {value}}}'"


def _choice(loc: Loc, key: str, kind: str, raw: object, info: Any) -> tuple[str, str]:
    """What a word, a flag, a count or a list may be, and what to write."""
    words, word, listed = _words(info), _word(raw), isinstance(loc[-1], int)
    options = SPECS[str(loc[1])].options if loc[0] == "frameworks" else ()
    option = next((option for option in options if option.name == key), None)
    fix = (option.advice if option else "") or f"write {_quoted(words) if listed else _examples(info)}"
    if option is not None and option.kind == "count":
        what = f"a whole number from 0 to {option.most}"
    elif len(words) > 4:
        what = "a finding of memguard doctor" if listed else "a list of findings"
        fix = "remove it; `memguard doctor --list` prints the names" if listed else fix
    else:
        what = f"a list of {' and '.join(words)}" if kind == "tuple_type" else " or ".join(words)
    meant = (dict(option.synonyms) if option else {}).get(word, _VALUES.get(word, word))
    if meant not in words and len(word) <= 40:
        meant = next(iter(difflib.get_close_matches(word.replace("_", "-"), words, 1)), "")
    if kind == "int_type" and re.fullmatch("[0-9]{1,9}", word):
        meant = word
    if isinstance(raw, (str, int)) and (meant in words or meant == word):
        # What looks right already was refused because of its quotes.
        quotes = " without quotes" if raw == meant else ""
        fix = f"write '[{meant}]'" if kind == "tuple_type" else f"write '{meant}'{quotes}"
    return f"each entry of {key} is {what}" if listed else f"{key} is {what}", fix


def _words(info: Any) -> tuple[str, ...]:
    """The words that a field, or each entry of its list, may be."""
    if info.annotation is bool:
        return "true", "false"
    return get_args(get_args(info.annotation)[0] if get_origin(info.annotation) is tuple else info.annotation)


def _examples(info: Any) -> str:
    """What to write for a field: its examples, its words or its default."""
    words = () if get_origin(info.annotation) is tuple else _words(info)
    return _quoted(info.examples or words or [info.default])


def _quoted(values: Iterable[object]) -> str:
    lists = (f"[{', '.join(value)}]" if isinstance(value, (list, tuple)) else value for value in values)
    return " or ".join(f"'{value}'" for value in lists)


def _word(raw: object) -> str:
    return found(raw).strip("'").strip().lower()


def _unknown(loc: Loc, fields: Fields) -> Violation:
    name = str(loc[-1])
    level = _level(loc)
    allowed = fields[level]
    choice = f"allowed: {', '.join(allowed)}"
    lowered = name.lower()
    if level in SPECS and lowered in ("min", "max"):
        return Violation(loc, f"not supported by this version of memguard ({choice})", "remove it", True, True)
    near = next((also for also in [_KEYS.get(lowered)] if also in allowed), None)
    if near is None and len(name) <= 40 and ":" not in name and lowered not in _OTHERS:
        near = next(iter(difflib.get_close_matches(lowered, allowed, n=1, cutoff=0.6)), None)
    home = None if near else _home(name, fields)
    fix = "remove it"
    if near is not None:
        fix = f"did you mean {near!r}?"
    elif home is not None:
        fix = f"move it below {home}"
    elif ":" in name and len(name) <= 40:  # {share:50%}
        fix = "write a space after ':'"
    elif name[:1].isdecimal() and level not in ("", "frameworks"):  # {limit: 1,5GiB}
        fix = "write decimals with a point, as in 1.5GiB"
    elif name in fields[""]:
        fix = "align it with 'version:'"
    here = " here" if fix.startswith(("move", "align")) else ""
    thing = "framework" if level == "frameworks" else "key"
    return Violation(loc, f"unknown {thing} {short(name)}{here}; {choice}", fix, True, True)


def _home(name: str, fields: Fields) -> str | None:
    """Where a key belongs that was found elsewhere, as the fix names it."""
    for level in ("frameworks", "device", "monitor", "doctor", *SPECS):
        if name in fields[level]:
            everywhere = level in SPECS and name in ("share", "limit")
            return f"a framework, as in '{_EXAMPLE}'" if everywhere else f"'{level}:'"
    return None


def _level(loc: Loc) -> str:
    if len(loc) == 1 or isinstance(loc[1], int):
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
