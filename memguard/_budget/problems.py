"""Convert pydantic's errors and the violations that `rules` found to `Problem`s: path, message and fix.

pydantic reports the path and the type of an error; the models supply the allowed values.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_origin

from memguard._base import findings
from memguard._base.advice import InvalidValue
from memguard._base.source_map import Document, Loc, in_order, nearest, path
from memguard._base.units import short
from memguard._budget import suggestions
from memguard._budget.rules import SIZES, Violation
from memguard._budget.values import Finding, excerpt
from memguard._frameworks.specs import SPECS
from memguard.errors import Problem

Fields = Mapping[str, Mapping[str, Any]]
"""The model fields of each level of the file, by key. The levels are "" (top), `device`, `frameworks`, `monitor`,
`metrics`, `suspend`, `doctor`, and each framework."""

_EXAMPLE = "torch: {share: 50%}"
_SHAPES = {
    # For each key, the content that it requires, and the example to write if its value has the wrong type.
    "device": ("the keys limit and reserve", "'device: {limit: 90%}'"),
    "devices": ("one line for each GPU", "for example '0: {limit: 50%}' under devices"),
    "frameworks": ("one line for each framework", f"for example '{_EXAMPLE}' under frameworks"),
    "monitor": ("its settings", "'monitor: {}' for the defaults, or for example 'monitor: {interval: 1s}'"),
    "metrics": ("its settings", "for example 'metrics: {prometheus: 9477}'"),
    "suspend": ("its settings", "for example 'suspend: {when_idle: 10min}'"),
    "doctor": ("its settings", "'doctor: {ignore: []}', or remove the key"),
}
_OFF = {
    "monitor": "remove the key: nothing watches then",
    "forecast": "write '0'",
    "metrics": "remove the key: nobody gets metrics then",
    "prometheus": "remove the key: nothing listens then",
    "ranks": "remove the key: each process has the budget whole then",
    "suspend": "remove the key: only the program itself suspends it then",
    "when_idle": "remove the key: it is not suspended by itself then",
    "on_demand": "remove the key: it is not suspended for others' leases then",
}
"""The fix for a word such as `off`, which is no valid value of these keys."""
# Each synonym of a value, with the valid value.
_VALUES = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
_VALUES |= {"warning": "warn", "free": "trim"} | dict.fromkeys(("error", "exception", "fail", "abort"), "raise")
_UNSAFE = {"host_memory": "ignore"}
"""By key, the value that turns off a safety check: never suggested for a value that is only similar."""
_KEYS = {
    **dict.fromkeys(("gpu", "all", "card", "cards"), "device"),
    **dict.fromkeys(("gpus", "overrides", "per_device", "per_gpu"), "devices"),
    **dict.fromkeys(("reserved", "overhead", "headroom", "margin", "slack", "buffer"), "reserve"),
    **dict.fromkeys(("libraries", "libs", "packages", "backends", "engines", "caps", "shares", "limits"), "frameworks"),
    **dict.fromkeys(("watch", "watcher", "sampler", "monitoring", "watching"), "monitor"),
    **dict.fromkeys(("every", "frequency", "period", "poll", "polling", "sample_every", "sampling"), "interval"),
    **dict.fromkeys(("warning", "warn_at", "warn_level", "soft"), "warn"),
    **dict.fromkeys(("crit", "critical_at", "critical_level", "error", "hard"), "critical"),
    **dict.fromkeys(("predict", "prediction", "lookahead", "look_ahead", "horizon"), "forecast"),
    **dict.fromkeys(("file", "path", "log", "logfile", "log_file", "output", "filename", "trace"), "timeline"),
    **dict.fromkeys(("max_size", "size", "file_size", "log_size", "rotate"), "timeline_size"),
    **dict.fromkeys(("live", "screen", "attach", "serve", "watchable", "socket"), "top"),
    **dict.fromkeys(("pressure", "when_critical", "on_critical", "on_memory_pressure"), "on_pressure"),
    **dict.fromkeys(("metric", "exporter", "exporters", "telemetry", "observability"), "metrics"),
    **dict.fromkeys(("port", "prom", "prometheus_port", "listen", "address", "endpoint"), "prometheus"),
    **dict.fromkeys(("otel", "otlp", "open_telemetry"), "opentelemetry"),
    **dict.fromkeys(("job_name", "name", "program", "service", "service_name"), "job"),
    **dict.fromkeys(("busy", "if_busy", "when_busy"), "on_busy"),
    **dict.fromkeys(("rank", "per_rank", "local_ranks", "distributed", "ddp", "torchrun", "mpi", "slurm"), "ranks"),
    **dict.fromkeys(("sleep", "hibernate", "suspension", "suspended", "offload", "swap"), "suspend"),
    **dict.fromkeys(("idle", "if_idle", "on_idle", "idle_after", "after", "idle_timeout", "idle_for"), "when_idle"),
    **dict.fromkeys(("demand", "on_request", "when_asked", "if_asked"), "on_demand"),
    **dict.fromkeys(("others", "from_outside", "outside", "allow_others", "external"), "by_others"),
    **dict.fromkeys(("host", "ram", "host_ram", "system_memory", "host_mem"), "host_memory"),
    **dict.fromkeys(("skip", "ignored", "exclude", "silence"), "ignore"),
    **dict.fromkeys(("leases", "leased", "claim", "exclusive", "reservation", "reservations"), "lease"),
    **dict.fromkeys(("while_waiting", "when_waiting", "on_lease", "waiting"), "on_wait"),
    **dict.fromkeys(("timeout", "patience", "waits", "max_wait", "wait_for", "queue"), "wait"),
    **dict.fromkeys(("ver", "format", "format_version", "schema_version"), "version"),
    **{suggestions.normal(alias): name for name, spec in SPECS.items() for alias in spec.aliases},
    **{alias: option.name for spec in SPECS.values() for option in spec.options for alias in option.aliases},
}
_OTHERS = ("cudf", "cuml", "numpy")
"""Libraries whose names are similar to a framework's, and so must not be taken for a misspelt framework."""


def problems(
    errors: Iterable[Mapping[str, Any]], violations: list[Violation], document: Document, fields: Fields
) -> list[Problem]:
    """All problems to report, in file order, without problems that another problem explains."""
    named = {violation.loc for violation in violations if violation.alone}
    found = [_violation(error, fields, document.data) for error in errors if tuple(error["loc"]) not in named]
    every = [*found, *violations]
    alone = {violation.loc for violation in every if violation.alone}
    explained = document.bad | {loc for violation in every for loc in violation.instead}
    everything = explained | alone

    def reported(violation: Violation) -> bool:
        """True if another problem at or above the violation's path makes this violation redundant."""
        above = {violation.loc[:n] for n in range(len(violation.loc))}
        at = explained if violation.alone else everything
        return violation.loc in at or not above.isdisjoint(everything)

    order = {where: index for index, where in enumerate(document.values)}
    kept = [violation for violation in dict.fromkeys(every) if not reported(violation)]
    kept.sort(key=lambda violation: order.get(nearest(violation.loc, order), 0))
    return in_order([*document.problems, *(_problem(violation, document) for violation in kept)])


def _violation(error: Mapping[str, Any], fields: Fields, data: object) -> Violation:
    loc, kind = tuple(error["loc"]), error["type"]
    if kind == "missing":
        fix = "'version: 1' as the first line" if loc == ("version",) else f"'frameworks:' and below it '  {_EXAMPLE}'"
        return Violation(loc, "is missing; every budget needs it", f"add {fix}")
    if kind == "extra_forbidden":
        return _unknown(loc, fields, data)
    raw, at_key = error["input"], loc[-1] == "[key]"
    loc = loc[:-1] if at_key else loc
    *_, key = (part for part in loc if isinstance(part, str))
    info: Any = fields[_level(loc)].get(key)
    if kind != "value_error" and (shape := _shape(loc, raw, data)):
        message, fix = f"expected {shape[0]}, found {excerpt(raw)}", f"write {shape[1]}"
    elif raw is None and loc[-1] == key and not info.is_required():
        message, fix = "has no value", f"write {_examples(info)}, or remove the key"
    elif kind == "value_error":
        # The parser's error has the message and, if the fix depends on the value, also the fix.
        wrong: InvalidValue = error["ctx"]["error"]
        message, fix = wrong.advice.reason, "" if wrong.general else wrong.advice.fix
        fix = fix or f"write for example {_examples(info)}"
    else:
        what, fix = _choice(loc, key, kind, raw, info)
        message = f"{what}, found {excerpt(raw)}"
    if key in _OFF and _word(raw) in ("false", "off", "no", "none", "never"):
        fix = _OFF[key]
    return Violation(loc, message, fix, at_key)


def _shape(loc: Loc, raw: object, data: object) -> tuple[str, str] | None:
    """The content required below the key, GPU or framework at `loc`, and an example to write; None for other paths."""
    if len(loc) == 1:
        key = str(loc[0])
        shape = _SHAPES.get(key)
        return None if shape is None else (shape[0], _instead(key, raw) or shape[1])
    if len(loc) != 2 or loc[0] not in ("devices", "frameworks"):
        return None
    name = str(loc[1]) if len(str(loc[1])) <= 60 else "..."
    if loc[0] == "devices":
        return "the keys limit and reserve", f"'{name}: {{{suggestions.sized(raw, '%', 'device') or 'limit: 50%'}}}'"
    return "share, limit, or min and max", f"'{suggestions.entry(name, raw, data)}'"


def _instead(key: str, raw: object) -> str:
    """The line to write for a top-level key whose value has another type; "" if only an example fits."""
    if key in ("device", "devices") and (line := suggestions.sized(raw, "%", "device")):
        return f"'device: {{{line}}}'"
    if not isinstance(raw, list) or not 0 < len(raw) <= 20:
        names = [_name(raw)] if key == "frameworks" and isinstance(raw, str) else []
    elif all(isinstance(one, Mapping) for one in raw):
        line = suggestions.flow({name: value for one in raw for name, value in one.items()})
        return f"'{key}: {line}', without the list" if len(line) < 300 else ""
    else:
        names = [_name(one) for one in raw] if key == "frameworks" else []
    if not names or not all(names):
        return ""
    part = f"{{share: {max(100 // len(names), 1) if len(names) > 1 else 50}%}}"
    return f"'frameworks: {suggestions.flow(dict.fromkeys(names, part))}'"


def _name(word: object) -> str:
    """The framework that a word names directly or by an alias; "" if none."""
    normal = suggestions.normal(word) if isinstance(word, str) else ""
    return normal if normal in SPECS else next((n for n, spec in SPECS.items() if normal in spec.aliases), "")


def _choice(loc: Loc, key: str, kind: str, raw: object, info: Any) -> tuple[str, str]:
    """The allowed values of a word, a flag, a count or a list, and the fix."""
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
        if meant and _UNSAFE.get(key) == meant and not word.startswith(meant):
            meant, fix = "", f"write {_quoted(words)}"
    if isinstance(raw, (str, int)) and meant:
        # If `raw` equals `meant`, the value is valid except for its quotes.
        quotes = " without quotes" if raw == meant else ""
        fix = f"write '[{meant}]'" if kind == "tuple_type" else f"write '{meant}'{quotes}"
    return f"each entry of {key} is {what}" if entry else f"{key} is {what}", fix


def _near(word: str, words: Iterable[str]) -> str:
    """The most similar of `words`; "" if none is similar. Does not compare a word of over 40 characters: too slow."""
    return next(iter(difflib.get_close_matches(word, words, 1)), "") if len(word) <= 40 else ""


def _words(info: Any) -> tuple[str, ...]:
    """The words that a field accepts, or that each item of a list may be."""
    if info.annotation is bool:
        return "true", "false"
    kind = get_args(info.annotation)[0] if get_origin(info.annotation) is tuple else info.annotation
    return findings.names() if kind is Finding else get_args(kind)


def _examples(info: Any) -> str:
    """Examples for a field: the declared examples, the accepted words or the default."""
    words = () if get_origin(info.annotation) is tuple else _words(info)
    return _quoted(info.examples or words or [info.default])


def _quoted(values: Iterable[object]) -> str:
    lists = (f"[{', '.join(value)}]" if isinstance(value, (list, tuple)) else value for value in values)
    return " or ".join(f"'{value}'" for value in lists)


def _word(raw: object) -> str:
    return excerpt(raw).strip("'").strip().lower()


def _unknown(loc: Loc, fields: Fields, data: object) -> Violation:
    name, level = str(loc[-1]), _level(loc)
    if loc[0] == "devices":
        if name in fields[level] and name not in suggestions.FIELDS_OF_A_DEVICE:
            return _of_all_gpus(loc, name, data)
        fields = {**fields, level: {key: fields[level][key] for key in suggestions.FIELDS_OF_A_DEVICE}}
    value, allowed = suggestions.at(data, loc), fields[level]
    around = suggestions.at(data, loc[:-1])
    siblings: Mapping[str, Any] = around if isinstance(around, Mapping) else {}
    fix, instead, here = _instead_of(name, level, value, siblings, fields, data)
    thing, where = "framework" if level == "frameworks" else "key", " here" if here else ""
    message = f"unknown {thing} {short(name)}{where}; allowed: {', '.join(allowed)}"
    return Violation(loc, message, fix, True, True, instead)


def _of_all_gpus(loc: Loc, name: str, data: object) -> Violation:
    """The violation for a key below one GPU that is allowed only in `device`, which applies to all GPUs."""
    allowed = f"allowed here: {', '.join(suggestions.FIELDS_OF_A_DEVICE)}"
    there = suggestions.at(data, ("device", name)) is not None
    fix = "remove it: 'device:' has it" if there else "move it to 'device:'"
    return Violation(loc, f"{name} holds for all GPUs of a process; {allowed}", fix, True, True)


def _instead_of(
    name: str, level: str, value: object, siblings: Mapping[str, Any], fields: Fields, data: object
) -> tuple[str, tuple[Loc, ...], bool]:
    """For an unknown key: the fix, the other paths whose problems this key explains, and whether the key is valid at
    another level."""
    own: Loc = () if level == "" else (level,) if level not in SPECS else ("frameworks", level)
    allowed = fields[level]

    def known(word: str) -> str:
        """Resolve `word` to the valid key of this level by alias or similar spelling; "" if there is none."""
        normal = suggestions.normal(word)
        if level == "frameworks" and normal in _OTHERS:
            return ""
        if normal in allowed:
            return normal
        near = alias if (alias := _KEYS.get(normal, "")) in allowed else _near(normal, allowed)
        other = {"min": "max", "max": "min"}.get(near, "")  # `mix` resembles `min` and `max`
        return other if near in siblings and other and other not in siblings and _near(normal, [other]) else near

    if cut := suggestions.decimals(name, siblings):
        fix = f"write '{cut[0]}: {cut[1]}'; write decimals with a point, as in 1.5GiB"
        return fix, ((*own, cut[0]),), False
    if line := suggestions.in_one_word(name, value, known):
        return f"write '{line}', with a space after ':'", (), False
    if ":" in name and len(name) <= 40:  # for example {share:50%}
        return "write a space after ':'", (), False
    if name[:1].isdecimal() and level not in ("", "frameworks", "device"):
        return "write decimals with a point, as in 1.5GiB", (), False
    if level in SPECS and (bound := _bound(name, siblings)):
        return f"did you mean {bound!r}?", ((*own, bound),), False
    amount = (
        suggestions.is_quantity(name)
        and suggestions.normal(name) not in allowed
        and not _exactly_elsewhere(name, fields)
    )
    if amount and level in SPECS and set(SIZES) & set(siblings) and not known(name):
        return "remove it", (), False
    line, fix = _sized(name, value, level, siblings, known(name)) if amount else ("", "")
    if fix and line != f"{known(name)}: {_written(value)}":  # equal if the user only misspelt the key
        return fix, (), level == "" or name == "share"
    if near := known(name):
        explains: tuple[Loc, ...] = ((*own, near),) if near not in siblings else ()
        explains += (("on_pressure",),) if near == "monitor" and level == "" else ()
        if near in siblings:
            return f"did you mean {near!r}? It is there too: keep one of them", (), False
        return f"did you mean {near!r}?", explains, False
    if level == "device" and (elsewhere := _of_device(name, value, siblings, data)):
        return elsewhere, (), False
    if level == "frameworks" and (owner := _too_far_left(name, value, fields, data)):
        return f"write '{owner}: {{{name}: {suggestions.flow(value)}}}'", (("frameworks", owner),), False
    if level == "" and (moved := _top(name, value, siblings, fields, data)):
        return moved
    if home := _home(name, value, fields, data):
        return home, (("on_pressure",),) if name == "monitor" else (), True
    return "remove it", (), False


_BOUNDS = {
    **dict.fromkeys(("minimum", "least", "at_least", "floor", "low", "lower", "guarantee", "guaranteed"), "min"),
    **dict.fromkeys(("maximum", "most", "at_most", "up_to", "ceiling", "high", "upper", "burst"), "max"),
}


def _bound(name: str, siblings: Mapping[str, Any]) -> str:
    """`min` or `max` if `name` is a synonym or misspelling of this key, and the framework has only the other of the two
    keys; else ""."""
    bound = _BOUNDS.get(suggestions.normal(name), "")
    words = [suggestions.normal(key) for key in siblings if key != name]
    others = {_BOUNDS.get(word) or _near(word, ("min", "max")) or word for word in words}
    return bound if bound not in others and {"min", "max"} - {bound} <= others and not others & {*SIZES[:2]} else ""


def _too_far_left(name: str, value: object, fields: Fields, data: object) -> str:
    """The framework to which the key `name` belongs, if the user did not indent the key below the framework; "" if
    unclear."""
    empty = [one for one in suggestions.unsized(data) if suggestions.at(data, ("frameworks", one)) is None]
    if len(empty) != 1 or name not in fields[empty[0]] or isinstance(value, (Mapping, list)):
        return ""
    return empty[0]


def _exactly_elsewhere(name: str, fields: Fields) -> bool:
    """True if `name` is exactly a key of another level. Excludes the keys for amounts, which several levels have."""
    normal = suggestions.normal(name)
    return normal not in SIZES and any(normal in level for level in fields.values())


def _sized(name: str, value: object, level: str, siblings: Mapping[str, Any], near: str) -> tuple[str, str]:
    """The line to write for an amount of memory under an unknown key, and the fix; "" for each if unclear.

    At the top level the amount is taken as the limit of `device`. `near` is a similar key of this level.
    """
    if level not in ("", "device", *SPECS) or ("device" if level == "" else "limit") in siblings:
        return "", ""
    if level == "" and name in SIZES[:2]:
        return "", ""
    line = suggestions.sized(value, suggestions.bare_unit(name), "framework" if level in SPECS else "device")
    below = " (a share is written below a framework)" if name == "share" else ""
    if line:
        return line, f"write 'device: {{{line}}}'" if level == "" else f"write '{line}'{below}"
    if near or level == "":
        return "", ""
    key = "limit" if level == "device" else "share" if suggestions.bare_unit(name) == "%" else "limit"
    return "", f"write for example '{key}: {'50%' if key == 'share' else '4GiB'}'{below}"


def _of_device(name: str, value: object, siblings: Mapping[str, Any], data: object) -> str:
    """The fix for a key below `device` that identifies a GPU, although `device` applies to all; "" for other keys."""
    gpu = re.fullmatch(r"[0-9]{1,4}|(?i:gpu|cuda).*|.*[*].*", name) is not None
    return "move it below 'devices:'" if gpu and isinstance(value, Mapping) else ""


def _top(
    name: str, value: object, siblings: Mapping[str, Any], fields: Fields, data: object
) -> tuple[str, tuple[Loc, ...], bool] | None:
    """The result of `_instead_of` for an unknown top-level key, inferred from its value; None if unclear."""
    if (shape := suggestions.looks_like(value, fields)) and shape not in siblings and name not in SPECS:
        return f"did you mean {shape!r}?", ((shape,),), False
    if isinstance(value, Mapping) and "frameworks" in value and "frameworks" not in siblings:
        fix = "remove this line, and indent what is below it less, so that 'frameworks:' begins its line"
        return fix, (("version",), ("frameworks",)), False
    if name in SPECS and "frameworks" not in siblings:
        return "move it below 'frameworks:'", (("frameworks",),), True
    return None


def _written(value: object) -> str:
    """The value as text; "" if Python refuses to convert it, as for an integer of thousands of digits."""
    try:
        return str(value)
    except ValueError:
        return ""


def _home(name: str, value: object, fields: Fields, data: object) -> str:
    """The fix for a key that is valid at another level; "" if no level has the key."""
    for level in ("frameworks", "device", "monitor", "metrics", "suspend", "doctor", *SPECS):
        if name in fields[level]:
            if level in SPECS and name in SIZES:
                owner = next(suggestions.unsized(data), next(iter(SPECS)))
                short = isinstance(value, (str, int)) and 0 < len(_written(value)) < 20
                written = suggestions.flow(value) if short else "50%"
                return f"move it below a framework, as in '{owner}: {{{name}: {written}}}'"
            return f"move it below '{level}:'" + (
                ", or remove it" if level in SPECS and not suggestions.at(data, ("frameworks", level)) else ""
            )
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
    line, column = marks.get(loc) or document.values.get(nearest(loc, document.values)) or (None, None)
    return Problem(_printable(violation.message), _printable(violation.fix), line, column, path(loc))


def _printable(text: str) -> str:
    """Escape control characters, which a terminal would interpret."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
