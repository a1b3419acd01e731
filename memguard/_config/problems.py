"""pydantic's errors and the cross-check's violations as Problems: the place, what is wrong there, and what to do.

pydantic says where a value is wrong and how; what may be written there instead is read from the models.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from memguard._config.checks import Violation
from memguard._config.document import Document, Loc, Mark
from memguard._config.values import device_key, found
from memguard._specs import SPECS
from memguard._units import short
from memguard.errors import Problem

Fields = Mapping[str, Mapping[str, Any]]
"""The fields of each level by key; the levels are "", `device`, `frameworks`, `monitor`, `doctor`, each framework."""

_EXAMPLE = "torch: {share: 50%}"
_SHAPES = {
    # what belongs below a key, and what to write if it holds something else
    "device": ("the keys limit and reserve", "'device: {limit: 90%}'"),
    "devices": ("one line for each GPU", "for example '0: {limit: 50%}' under devices"),
    "frameworks": ("one line for each framework", f"for example '{_EXAMPLE}' under frameworks"),
    "monitor": ("its settings", "'monitor: {}' for the defaults, or for example 'monitor: {interval: 1s}'"),
    "doctor": ("its settings", "'doctor: {ignore: []}', or remove the key"),
}
_OFF = {"monitor": "remove the key: nothing watches then", "forecast": "write '0'"}
"""What to do about a word such as `off`, which stands for no value of these keys."""
# Words that people write, each with the one that it stands for.
_VALUES = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
_VALUES |= {"warning": "warn", "free": "trim"} | dict.fromkeys(("error", "exception", "fail", "abort"), "raise")
_KEYS = {"gpu": "device", "gpus": "devices", "every": "interval", "file": "timeline", "path": "timeline"}
_KEYS |= {"skip": "ignore"} | {alias: name for name, spec in SPECS.items() for alias in spec.aliases}
_KEYS |= {alias: option.name for spec in SPECS.values() for option in spec.options for alias in option.aliases}
_OTHERS = ("cudf", "cuml", "numpy")
"""Libraries whose names are close to a framework's and that are not misspelt ones."""


def problems(
    errors: Iterable[Mapping[str, Any]], violations: list[Violation], document: Document, fields: Fields
) -> list[Problem]:
    """Everything wrong, in file order."""
    named = {violation.loc for violation in violations if violation.alone}
    every = [*(_violation(error, fields) for error in errors if tuple(error["loc"]) not in named), *violations]
    alone = {violation.loc for violation in every if violation.alone}

    def reported(violation: Violation) -> bool:
        """Whether something at or above its place was reported already, or is the only thing to report."""
        above = {violation.loc[:n] for n in range(len(violation.loc))}
        at = document.bad if violation.alone else document.bad | alone
        return violation.loc in at or not above.isdisjoint(document.bad | alone)

    order = {path: index for index, path in enumerate(document.values)}
    kept = [violation for violation in dict.fromkeys(every) if not reported(violation)]
    kept.sort(key=lambda violation: order.get(_nearest(violation.loc, order), 0))
    return in_order([*document.problems, *(_problem(violation, document) for violation in kept)])


@dataclass(frozen=True)
class Origin:
    """Where a budget was written. All origins are equal, so that equal budgets may come from different files.

    `source` names the text in messages, and is "" if the budget was made of plain Python values.
    """

    source: str = field(default="", compare=False)
    marks: Mapping[Loc, Mark] = field(default_factory=dict, compare=False)

    def problem(self, loc: Loc, message: str, fix: str) -> Problem:
        """A problem with what is at `loc`. If nothing is written there, its line is that of the nearest key above."""
        line, column = self.marks.get(_nearest(loc, self.marks)) or (None, None)
        return Problem(message, fix, line, column, _path(loc))


def origin(document: Document, source: str) -> Origin:
    """Where a checked budget was written: a mapping at its key, a value where it stands itself."""
    parents = {loc[:-1] for loc in document.values}
    marks = document.values | {loc: mark for loc, mark in document.keys.items() if loc in parents}
    written = source if document.values.get(()) else ""
    return Origin(written, {_canonical(loc): mark for loc, mark in marks.items() if loc and mark})


def _canonical(loc: Loc) -> Loc:
    """As the checked budget has it: `cuda:0` is `0` there."""
    return ("devices", device_key(str(loc[1])), *loc[2:]) if len(loc) > 1 and loc[0] == "devices" else loc


def in_order(unordered: Iterable[Problem]) -> list[Problem]:
    """By line and column; in their old order if there is no file."""
    return sorted(unordered, key=lambda problem: (problem.line or 0, problem.column or 0))


def _violation(error: Mapping[str, Any], fields: Fields) -> Violation:
    loc, kind = tuple(error["loc"]), error["type"]
    if kind == "missing":
        fix = "'version: 1' as the first line" if loc == ("version",) else f"'frameworks:' and below it '  {_EXAMPLE}'"
        return Violation(loc, "is missing; every budget needs it", f"add {fix}")
    if kind == "extra_forbidden":
        return _unknown(loc, fields)
    raw, at_key = error["input"], loc[-1] == "[key]"
    loc = loc[:-1] if at_key else loc
    *_, key = (part for part in loc if isinstance(part, str))
    info: Any = fields[_level(loc)].get(key)
    if kind != "value_error" and (shape := _shape(loc, raw)):
        message, fix = f"expected {shape[0]}, found {found(raw)}", f"write {shape[1]}"
    elif raw is None and loc[-1] == key and not info.is_required():
        message, fix = "has no value", f"write {_examples(info)}, or remove the key"
    elif kind == "value_error":
        # A parser says what is wrong and, if that depends on the value, what to do.
        message, *own = re.split("; (?=write |copy |remove |add )", str(error["ctx"]["error"]))
        fix = own[0] if own and "is not a size" not in message else f"write for example {_examples(info)}"
    else:
        what, fix = _choice(loc, key, kind, raw, info)
        message = f"{what}, found {found(raw)}"
    if key in _OFF and _word(raw) in ("false", "off", "no", "none", "never"):
        fix = _OFF[key]
    return Violation(loc, message, fix, at_key)


def _shape(loc: Loc, raw: object) -> tuple[str, str] | None:
    """What belongs below a key, the name of a GPU or a framework, and what to write there."""
    if len(loc) == 1:
        return _SHAPES.get(str(loc[0]))
    if len(loc) != 2 or loc[0] not in ("devices", "frameworks"):
        return None
    if loc[0] == "devices":
        return "the keys limit and reserve", f"'{loc[1]}: {{limit: 50%}}'"
    sized = isinstance(raw, str) and re.fullmatch(r"\s*[\d.]+ ?(%|[KMGT]iB)\s*", raw)
    value = str(raw).strip() if sized else "50%"
    return "share or limit", f"'{loc[1]}: {{{'share' if '%' in value else 'limit'}: {value}}}'"


def _choice(loc: Loc, key: str, kind: str, raw: object, info: Any) -> tuple[str, str]:
    """What a word, a flag, a count or a list may be, and what to write."""
    words, word, entry = _words(info), _word(raw), isinstance(loc[-1], int)
    options = SPECS[str(loc[1])].options if loc[0] == "frameworks" else ()
    option = next((option for option in options if option.name == key), None)
    what = f"a list of {' and '.join(words)}" if kind == "tuple_type" else " or ".join(words)
    fix = f"write {_quoted(words)}, or remove it" if entry else f"write {_examples(info)}"
    if option is not None:
        what = f"a whole number from 0 to {option.most}" if option.kind == "count" else what
        fix = option.advice or fix
    elif len(words) > 4:
        what = "a finding of memguard doctor" if entry else "a list of findings"
        fix = "remove it; `memguard doctor --list` prints the names" if entry else fix
    meant = (dict(option.synonyms) if option else {}).get(word, _VALUES.get(word, word))
    if kind == "int_type" and re.fullmatch("[0-9]{1,9}", word):
        meant = word
    elif meant not in words:
        meant = _near(word.replace("_", "-"), words)
    if isinstance(raw, (str, int)) and meant:
        # What looks right already was refused because of its quotes.
        quotes = " without quotes" if raw == meant else ""
        fix = f"write '[{meant}]'" if kind == "tuple_type" else f"write '{meant}'{quotes}"
    return f"each entry of {key} is {what}" if entry else f"{key} is {what}", fix


def _near(word: str, words: Iterable[str]) -> str:
    """The word that is probably meant; "" for none. Long text is not compared: that takes long."""
    return next(iter(difflib.get_close_matches(word, words, 1)), "") if len(word) <= 40 else ""


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
    name, level = str(loc[-1]), _level(loc)
    allowed, lowered = fields[level], name.lower()
    near = _KEYS.get(lowered, "")
    if near not in allowed:
        near = "" if ":" in name or lowered in _OTHERS else _near(lowered, allowed)
    home = "" if near else _home(name, fields)
    fix = f"did you mean {near!r}?" if near else home or "remove it"
    if not near and ":" in name and len(name) <= 40:  # {share:50%}
        fix = "write a space after ':'"
    elif not near and name[:1].isdecimal() and level not in ("", "frameworks"):  # {limit: 1,5GiB}
        fix = "write decimals with a point, as in 1.5GiB"
    thing, here = "framework" if level == "frameworks" else "key", " here" if home else ""
    return Violation(loc, f"unknown {thing} {short(name)}{here}; allowed: {', '.join(allowed)}", fix, True, True)


def _home(name: str, fields: Fields) -> str:
    """What to do with a key that belongs elsewhere; "" if it belongs nowhere."""
    for level in ("frameworks", "device", "monitor", "doctor", *SPECS):
        if name in fields[level]:
            anywhere = level in SPECS and name in ("share", "limit")
            return "move it below " + (f"a framework, as in '{_EXAMPLE}'" if anywhere else f"'{level}:'")
    return "align it with 'version:'" if name in fields[""] else ""


def _level(loc: Loc) -> str:
    if len(loc) == 1 or isinstance(loc[1], int):
        return ""
    if loc[0] == "devices":
        return "device"
    return str(loc[1] if loc[0] == "frameworks" and len(loc) > 2 else loc[0])


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
