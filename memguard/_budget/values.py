"""Parse single values of a budget to exact values, and define the JSON Schema of each.

A parser raises InvalidValue, with a fix if the fix depends on the value. Otherwise `problems.py` supplies the fix.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Collection, Mapping
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticKnownError, core_schema

from memguard._base import findings
from memguard._base.advice import InvalidValue
from memguard._base.units import GIB, GRANULE, KIB, MAX_SIZE, MIB, TIB, parse_duration, parse_percent, parse_size, short

T = TypeVar("T")
V = TypeVar("V")

INTERVAL, FORECAST = (0.05, 3600.0), (1.0, 3600.0)
"""The bounds in seconds of the sampling interval and of the forecast horizon (0 turns forecasts off)."""
IDLE = (1.0, 604800.0)
"""The bounds in seconds of the idle time before a suspension."""
WAIT = (1.0, 604800.0)
"""The bounds in seconds of `init`'s wait for a lease (0: no wait)."""
WARN, CRITICAL = "85%", "95%"
"""The default pressure levels of the monitor, as parts of a cap or limit."""
PORTS = 1024, 65535
"""The lowest and the highest port on which an unprivileged process may listen."""
MAX_RANKS = 1024
"""The maximum number of ranks that share a GPU: a larger number is a typing mistake."""
MAX_PATH = 1024
MAX_JOB = 64
"""The maximum length of the name of a job."""
MAX_KEY = 100
"""The maximum length of a GPU's key. NVML's names have at most 95 characters (`NVML_DEVICE_NAME_V2_BUFFER_SIZE`)."""
JOB = "[A-Za-z0-9][A-Za-z0-9._/:@-]{0,63}"
_UUID = "[Gg][Pp][Uu]-[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"
_OCTAL = re.compile(r"\s*0[0-9]+\s*")
_ORDINAL = "([Cc][Uu][Dd][Aa]:)?(0|[1-9][0-9]{0,3})"


def excerpt(value: object) -> str:
    """Format a value for a message, short and in one line."""
    kinds = {type(None): "nothing", list: "a list", dict: "a mapping"}
    return kinds.get(type(value)) or short(value)


# Format values


def size_text(size: int) -> str:
    """Format a size exactly, in the largest whole unit: `40GiB`, `1536MiB`, `2097153B`."""
    for unit, scale in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size and size % scale == 0:
            return f"{size // scale}{unit}"
    return f"{size}B"


def percent_text(fraction: Fraction) -> str:
    """Format a percentage exactly, in a budget's syntax: `12.5%`."""
    with localcontext() as context:
        context.prec = 40
        percent = Decimal(fraction.numerator) * 100 / Decimal(fraction.denominator)
        return f"{percent.normalize():f}%"


def duration_text(seconds: float) -> str:
    """Format a duration exactly, in a budget's syntax: `500ms`, `20s`, `10min`."""
    if seconds == int(seconds):
        size, unit = next(
            (one for one in ((3600, "h"), (60, "min")) if seconds >= one[0] and seconds % one[0] == 0), (1, "s")
        )
        return f"{int(seconds) // size}{unit}"
    milliseconds = round(seconds * 1000)
    return f"{milliseconds}ms" if milliseconds / 1000 == seconds else f"{seconds!r}s"


def text(value: Fraction | int | str | None) -> str | None:
    """Format a size, a percentage or a word in a budget's syntax."""
    if value is None or isinstance(value, str):
        return value
    return percent_text(value) if isinstance(value, Fraction) else size_text(value)


def as_text(parts: Mapping[str, Fraction | int], elastic: Collection[str] = (), between: str = ", ") -> str:
    """Format amounts for messages: `torch 50%, jax 4GiB, cupy.min 5%`. A framework in `elastic` is shown as its min."""
    return between.join(f"{label(name, elastic)} {text(part)}" for name, part in parts.items())


def label(name: str, elastic: Collection[str]) -> str:
    """The name of a framework in messages about amounts: `cupy.min` for an elastic one, else `cupy`."""
    return f"{name}.min" if name in elastic else name


# Parse values. Each parser first parses the value; only after a failure does it look for a suggestion.


def percent(value: object) -> Fraction:
    """Parse text such as `50%`, or a Fraction, to a Fraction above 0 and at most 1."""
    if isinstance(value, Fraction) and 0 < value <= 1:
        if len(percent_text(value)) > 20:  # 1/3 has no exact text, from which a budget must parse back to itself
            raise InvalidValue(f"{value} has no exact percentage", f"write '{float(value * 100):.6g}%'")
        return value
    try:
        return parse_percent(value)
    except InvalidValue as error:
        raise _with_suggestion(error, value, "%", lambda text: "%" in text) from None


def size(value: object, least: int = GRANULE) -> int:
    """Parse a size to bytes. If a number without unit is too small, the error says that the unit is missing."""
    if isinstance(value, str) and _OCTAL.fullmatch(value):
        raise InvalidValue(f"{excerpt(value)} starts with 0: octal to some programs", "write it without the leading 0")
    try:
        size = parse_size(value)
    except InvalidValue as error:
        raise _with_suggestion(error, value, "MiB", lambda text: "%" not in text) from None
    if size < least:
        why = ", the smallest piece that CUDA hands out" if least == GRANULE else ""
        unit = _unit_missing(value, size < MIB and size * MIB >= least, "MiB")
        raise InvalidValue(f"{excerpt(value)} is less than {size_text(least)}{why}", unit)
    return size


def share(value: object) -> Fraction:
    """Parse a framework's share, a fraction of (limit − reserve)."""
    with contextlib.suppress(ValueError):
        return parse_percent(value)
    text = value if isinstance(value, str) and "%" not in value else ""
    if text and (size := _suggestion(text, "%")) and not size.endswith("%"):
        raise InvalidValue(f"a share is a percentage, found the size {excerpt(value)}", f"write 'limit: {size}'")
    return percent(value)  # accepts a Fraction; raises an error for any other type


def limit(value: object) -> int:
    """Parse a framework's limit, in bytes."""
    try:
        return size(value)
    except ValueError:
        if not _is_part(value):
            raise
        part = _suggestion(value, "%")
        instead = f"'share: {part}', or " if part else ""
        fix = f"write {instead}a size such as '4GiB'"
        raise InvalidValue(f"a framework's limit is bytes, found {excerpt(value)}", fix) from None


def device_limit(value: object) -> Fraction | int:
    """Parse a device's limit: a fraction of its usable memory, or bytes."""
    try:
        return _part_or_bytes(value, "40GiB")
    except ValueError:
        if not _is_all(value):
            raise
        raise InvalidValue(f"{excerpt(value)} is no limit", "write '100%' for all that CUDA can give") from None


def least(value: object) -> Fraction | int:
    """Parse the min of an elastic framework's cap: a fraction of (limit − reserve), or bytes."""
    try:
        return _part_or_bytes(value, "4GiB")
    except ValueError:
        if not re.fullmatch(r"0+(\.0*)?\s*(%|[a-z]{1,3})?", excerpt(value).strip("' ").lower()):
            raise
        fix = f"write '{size_text(GRANULE)}', the smallest cap"
        raise InvalidValue(f"a min of {excerpt(value)} guarantees nothing", fix) from None


def most(value: object) -> Fraction | int:
    """Parse the max of an elastic framework's cap: a fraction of (limit − reserve), or bytes."""
    try:
        return _part_or_bytes(value, "4GiB")
    except ValueError:
        if not _is_all(value):
            raise
        raise InvalidValue(f"{excerpt(value)} is no max", "write '100%' for all that others leave") from None


def _part_or_bytes(value: object, example: str) -> Fraction | int:
    if isinstance(value, Fraction) or (isinstance(value, str) and "%" in value):
        return percent(value)
    try:
        return size(value)
    except ValueError:
        if _is_part(value):
            return percent(value)  # raises the error that shows the valid syntax
        bare = excerpt(value).strip("' ")
        if not re.fullmatch("100|[1-9][0-9]?", bare):
            raise
        fix = f"write '{bare}%', or a size such as '{example}'"
        raise InvalidValue(f"{excerpt(value)} has no unit", fix) from None


def _is_part(value: object) -> bool:
    """True if a value is a percentage or resembles one: `50%`, `0.5`, `50 percent`."""
    if isinstance(value, str):
        if "%" in value:
            return True
        with contextlib.suppress(ValueError):
            parse_size(value)
            return False
    return isinstance(value, (str, float)) and (_suggestion(value, "MiB") or "").endswith("%")


def _is_all(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() in ("all", "max", "none", "unlimited", "full")


def _suggestion(value: object, bare: str) -> str | None:
    """Call `suggestions.quantity`, whose module is imported only for an invalid value."""
    from memguard._budget import suggestions

    return suggestions.quantity(value, bare)


def _with_suggestion(error: InvalidValue, value: object, bare: str, fits: Callable[[str], bool]) -> InvalidValue:
    """Replace the fix of `error` by the suggested value; return `error` unchanged if no suggestion fits."""
    text = _suggestion(value, bare)
    said = f"write '{text}'", f"write for example '{text}'"
    if text is None or not fits(text) or error.advice.fix.startswith(said):
        return error
    return InvalidValue(error.advice.reason, said[0])


def reserve(value: object) -> int | Literal["auto"]:
    """Parse a reserve: bytes, or `auto`, which `policy.auto_reserve` computes from measured overheads."""
    if value == "auto":
        return "auto"
    if isinstance(value, str) and "%" in value:
        raise InvalidValue(f"a reserve is 'auto' or bytes, found {excerpt(value)}")
    if value == 0 and not isinstance(value, bool):
        raise InvalidValue("a reserve of 0 cannot hold: every CUDA context takes memory", "write 'auto'")
    if isinstance(value, str) and value.strip().lower() in ("auto", "none", "off", "no", "default", "automatic"):
        raise InvalidValue(f"{excerpt(value)} is not a size", "write 'auto', or a size such as '2GiB'")
    return size(value)


def duration(value: object, least: float, most: float, or_none: str = "") -> float:
    """Parse a duration to seconds from `least` to `most`. 0 is also valid if `or_none`, a phrase of the message, is not
    empty."""
    seconds = parse_duration(value)
    if least <= seconds <= most or (or_none and seconds == 0):
        return seconds
    span = f"between {duration_text(least)} and {duration_text(most)}{or_none}"
    raise InvalidValue(f"{excerpt(value)} is not {span}", _unit_missing(value, least <= seconds / 1000 <= most, "ms"))


def lease_wait(value: object) -> float | None:
    """Parse the time to wait for a lease, in seconds; None for 0."""
    return duration(value, *WAIT, ", or 0 for none") or None


def version(value: object) -> int:
    """Parse the version of the file format."""
    if isinstance(value, bool) or value != 1 or not isinstance(value, int):
        newer = re.fullmatch(r"'?v?([0-9]{1,9})(\.[0-9]+)*'?", excerpt(value))
        if newer and int(newer[1]) > 1 and not isinstance(value, bool):
            reads = f"this memguard reads version 1, found {excerpt(value)}: the file was written for a newer memguard"
            raise InvalidValue(reads, "update memguard, or use a budget of version 1")
        quotes = " without quotes" if value == "1" else ""
        raise InvalidValue(f"this memguard reads version 1, found {excerpt(value)}", f"write 'version: 1'{quotes}")
    return value


def timeline(value: object) -> str:
    """Validate the path of the timeline. `{pid}` and `{rank}` stay in the path, and are replaced when the file is
    opened."""
    if not isinstance(value, str) or not value.strip() or re.search(r"(^|/)\.{0,2}\Z", value):
        none = ", which names none" if isinstance(value, str) else ""
        raise InvalidValue(f"timeline is the path of a file, found {excerpt(value)}{none}")
    if not value.isprintable() or len(value) > MAX_PATH:
        what = f"longer than {MAX_PATH} characters" if value.isprintable() else "not printable"
        raise InvalidValue(f"the path {excerpt(value)} is {what}")
    if value.startswith("~") or "$" in value:
        raise InvalidValue(f"memguard expands neither '~' nor '$' in {excerpt(value)}", "write the path as it is")
    if unknown := set(re.findall(r"[{}][^{}]*[{}]?", value)) - {"{pid}", "{rank}"}:
        name = excerpt(min(unknown))
        raise InvalidValue(f"memguard does not fill in {name} in a path", "write '{pid}' or '{rank}'")
    return value


def port(value: object) -> int:
    """Validate a port on which an unprivileged process may listen."""
    text = value.strip() if isinstance(value, str) else ""
    if isinstance(value, bool) or not isinstance(value, int) or not PORTS[0] <= value <= PORTS[1]:
        own = f"write '{int(text)}' without quotes" if re.fullmatch("[1-9][0-9]{3,4}", text) else ""
        raise InvalidValue(f"{excerpt(value)} is not a port from {PORTS[0]} to {PORTS[1]}", own)
    return value


def job(value: object) -> str:
    """Validate the name of a job, whose characters need no escaping in metrics queries."""
    if not isinstance(value, str) or not re.fullmatch(JOB, value):
        raise InvalidValue(
            f"{excerpt(value)} is not the name of a job: at most {MAX_JOB} letters, digits and . _ / : @ -, "
            "the first a letter or digit"
        )
    return value


def ranks(value: object) -> int | Literal["auto"]:
    """Parse `auto`, or the number of ranks that share each GPU, written as `{per_gpu: 2}`."""
    if value == "auto":
        return "auto"
    if isinstance(value, Mapping) and set(value) == {"per_gpu"}:
        count = value["per_gpu"]
        if isinstance(count, int) and not isinstance(count, bool) and 1 <= count <= MAX_RANKS:
            return count
        text = count.strip() if isinstance(count, str) else ""
        own = f"'{int(text)}' without quotes" if re.fullmatch("[1-9][0-9]{0,2}", text, re.ASCII) else "'{per_gpu: 2}'"
        raise InvalidValue(
            f"per_gpu is how many ranks share a GPU, from 1 to {MAX_RANKS}, found {excerpt(count)}", f"write {own}"
        )
    if isinstance(value, Mapping) and (odd := [key for key in value if key != "per_gpu"]):
        raise InvalidValue(
            f"ranks is 'auto' or '{{per_gpu: 2}}', found a mapping with {excerpt(odd[0])}", "write '{per_gpu: 2}'"
        )
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_RANKS:
        raise InvalidValue(
            f"ranks is no number, found {value}", f"write '{{per_gpu: {value}}}' if so many share each GPU"
        )
    raise InvalidValue(f"ranks is 'auto' or '{{per_gpu: 2}}', found {excerpt(value)}", "write 'auto'")


def ranks_text(value: object) -> object:
    return {"per_gpu": value} if isinstance(value, int) else value


def device_key(value: str) -> str:
    """Normalise the key of a GPU: UUID, CUDA ordinal or name pattern."""
    name = value.strip(" \t") if len(value) <= MAX_KEY else value
    if name.isascii() and re.fullmatch(_UUID, name):
        return "GPU-" + name[4:].lower()
    if name.isascii() and (ordinal := re.fullmatch(_ORDINAL, name)):
        return ordinal[2]
    from memguard._budget import suggestions

    shown = excerpt(value)
    if len(value) > MAX_KEY:
        raise InvalidValue(f"{shown} is longer than {MAX_KEY} characters", _NAME_A_GPU)
    if odd := next((c for c in name if not " " <= c <= "~"), ""):
        # `int` would accept digits of other alphabets, and a letter that only looks like ASCII matches no GPU's name.
        import unicodedata

        what = f"U+{ord(odd):04X} ({unicodedata.name(odd, 'a control character')})"
        instead = suggestions.device_key(value)
        fix = f"name the GPU '{instead}'" if instead else _NAME_A_GPU
        raise InvalidValue(f"{shown} has {what} in it; GPUs' names and numbers are plain ASCII", fix)
    if re.fullmatch(_UUID, name.replace(" ", "")):
        raise InvalidValue(f"{shown} has a space in it", f"name the GPU '{name.replace(' ', '')}'")
    if name.upper().startswith("GPU-") and not re.fullmatch("[Gg][Pp][Uu]-[0-9]{1,4}", name):
        raise InvalidValue(f"{shown} is not a GPU's whole UUID", "copy the one that `nvidia-smi -L` prints")
    if name.upper().startswith("MIG-"):
        raise InvalidValue(f"{shown} is a MIG instance, which this version does not support", "remove this entry")
    instead = suggestions.device_key(name)
    if instead == name:
        return name
    if instead == "*":
        raise InvalidValue(
            f"{shown} names no GPU", "name the GPU '*', which is every GPU, or put its keys below 'device:'"
        )
    if instead.isdecimal():
        raise InvalidValue(f"{shown} names no GPU", f"name the GPU '{instead}': a CUDA ordinal such as 0")
    if not instead or re.fullmatch("[-+.0-9_]*", name) or name.lower().startswith("cuda:"):
        raise InvalidValue(f"{shown} names no GPU", _NAME_A_GPU)
    raise InvalidValue(
        f"{shown} is no GPU's whole name, such as 'NVIDIA H200'", f"name the GPU '{instead}', with the quotes"
    )


_NAME_A_GPU = "write a UUID from `nvidia-smi -L`, a CUDA ordinal such as 0, or a name such as 'NVIDIA A100*'"


def _unit_missing(value: object, likely: bool, unit: str) -> str:
    number = re.sub(r"\.0*$", "", excerpt(value).strip("' "))
    return f"write '{number}{unit}' if you mean that" if likely and re.fullmatch("[0-9]+", number) else ""


# Mappings


class Frozen(dict[str, V]):
    """An immutable, hashable dict in file order."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return Frozen, (dict(self),)  # by default, pickle would call `__setitem__`

    def _refuse(self, *args: object, **more: object) -> Any:
        raise TypeError("a budget cannot be changed")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


def frozen(entries: dict[str, V]) -> Frozen[V]:
    return Frozen(entries)  # a function, because pydantic takes 1 ms to inspect the signature of the class


# Types, each with its JSON Schema


class Value:
    """For `Annotated`: `parse` validates the value, `shown` formats it for a file, and `schemas` are its JSON Schema.

    Replaces PlainValidator, PlainSerializer and WithJsonSchema, which took half of the time to build the models,
    because for each field they look up signatures, return types and the type's own schema. A type that includes None
    marks an optional key. `parse` refuses None, so a key in the file must have a value.
    """

    def __init__(
        self, parse: Callable[[object], object], shown: Callable[[Any], object] | None, *schemas: dict[str, Any]
    ) -> None:
        self._schema = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
        ways = core_schema.plain_serializer_function_ser_schema(shown, when_used="unless-none") if shown else None
        self._core = core_schema.no_info_plain_validator_function(parse, serialization=ways)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return self._core.copy()

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return copy.deepcopy(self._schema)  # copied, because pydantic adds the default to the dict


class _Written:
    """For `Annotated`, on an optional mapping: the field is None if the file omits the key; a null value is refused."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(_not_none, handler(source))


WRITTEN = _Written()


class _Shown:
    """For `Annotated`: serialises the value with the function `shown`."""

    def __init__(self, shown: Callable[[Any], object]) -> None:
        self._shown = shown

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return {**handler(source), "serialization": core_schema.plain_serializer_function_ser_schema(self._shown)}


LISTED = _Shown(list)
"""Serialises a tuple as a list."""
AS_IT_IS = _Shown(lambda value: value)
"""Serialises the value unchanged, without a check of its type: the value may be set to None after validation."""


class _Finding:
    """Validates the name of a finding of `memguard doctor`. Reads the findings' pages only when it validates a name."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(cls._known)

    @staticmethod
    def __get_pydantic_json_schema__(core: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(findings.names()), "type": "string"}

    @staticmethod
    def _known(value: object) -> str:
        if isinstance(value, str) and value in (findings.names() or (value,)):
            return value
        raise PydanticKnownError("literal_error", {"expected": "the name of a finding"})


Finding = Annotated[str, _Finding]


def _not_none(value: object) -> object:
    if value is None:
        raise PydanticKnownError("none_required")
    return value


def _sizes(least: int) -> list[dict[str, Any]]:
    pattern = r"^\s*([0-9]{1,40}(\.[0-9]{1,20})?\s*([Bb]|[KkMmGgTt][Ii][Bb])|[1-9][0-9]{6,15})\s*$"
    return [{"type": "string", "pattern": pattern}, {"type": "integer", "minimum": least, "maximum": MAX_SIZE}]


def _seconds(least: float, most: float) -> list[dict[str, Any]]:
    pattern = r"^\s*[0-9]{1,9}(\.[0-9]{1,20})?\s*([Mm][Ss]|[Ss]|[Mm][Ii][Nn]|[Hh])?\s*$"
    return [{"type": "string", "pattern": pattern}, {"type": "number", "minimum": least, "maximum": most}]


_PART = r"^\s*0*(?!0*(\.0*)?\s*%)(100(\.0{1,20})?|[0-9]{1,2}(\.[0-9]{1,20})?)\s*%\s*$"
_PERCENT: dict[str, Any] = {"type": "string", "pattern": _PART}
_NAMES = r"^(?!~)(?!\s*$)([^$\x00-\x1f{}]|\{(pid|rank)\})*$"
_FOLDER = {"pattern": r"(^|/)\.{0,2}$"}
_PATH: dict[str, Any] = {"type": "string", "maxLength": MAX_PATH, "pattern": _NAMES, "not": _FOLDER}
_NO_NAME = {"pattern": r"^\s*([Gg][Pp][Uu]-|[Mm][Ii][Gg]-|[Cc][Uu][Dd][Aa]:)"}
DEVICE_KEYS: list[Any] = [
    {"pattern": rf"^[ \t]*({_UUID}|{_ORDINAL})[ \t]*$"},
    {"pattern": r"^[ \t]*[ -~]*([*?\[]|[A-Za-z0-9][^A-Za-z0-9])[ -~]*[ \t]*$", "maxLength": MAX_KEY, "not": _NO_NAME},
]
"""The JSON Schemas of the keys below `devices`; a key must match one of them."""

_DEVICE_LIMIT = Value(device_limit, text, _PERCENT, *_sizes(GRANULE))
_RESERVE = Value(reserve, text, {"const": "auto"}, *_sizes(GRANULE))
_FORECAST = partial(duration, least=FORECAST[0], most=FORECAST[1], or_none=", or 0 for none")

Version = Annotated[int, Value(version, None, {"const": 1})]
DeviceLimit = Annotated[Fraction | int, _DEVICE_LIMIT]
Reserve = Annotated[int | Literal["auto"], _RESERVE]
Percent = Annotated[Fraction, Value(percent, text, _PERCENT)]
Interval = Annotated[
    float, Value(partial(duration, least=INTERVAL[0], most=INTERVAL[1]), duration_text, *_seconds(*INTERVAL))
]
Forecast = Annotated[float, Value(_FORECAST, duration_text, *_seconds(*FORECAST), {"const": 0})]
TimelineSize = Annotated[int, Value(partial(size, least=MIB), text, *_sizes(MIB))]

# Types of optional keys

LeaseWait = Annotated[float | None, Value(lease_wait, duration_text, *_seconds(*WAIT), {"const": 0})]
OwnLimit = Annotated[Fraction | int | None, _DEVICE_LIMIT]
OwnReserve = Annotated[int | Literal["auto"] | None, _RESERVE]
Share = Annotated[Fraction | None, Value(share, text, _PERCENT)]
Limit = Annotated[int | None, Value(limit, text, *_sizes(GRANULE))]
Least = Annotated[Fraction | int | None, Value(least, text, _PERCENT, *_sizes(GRANULE))]
Most = Annotated[Fraction | int | None, Value(most, text, _PERCENT, *_sizes(GRANULE))]
Ranks = Annotated[
    int | Literal["auto"] | None,
    Value(
        ranks,
        ranks_text,
        {"const": "auto"},
        {
            "type": "object",
            "properties": {"per_gpu": {"type": "integer", "minimum": 1, "maximum": MAX_RANKS}},
            "required": ["per_gpu"],
            "additionalProperties": False,
        },
    ),
]
WhenIdle = Annotated[
    float | None, Value(partial(duration, least=IDLE[0], most=IDLE[1]), duration_text, *_seconds(*IDLE))
]
Port = Annotated[int | None, Value(port, None, {"type": "integer", "minimum": PORTS[0], "maximum": PORTS[1]})]
Job = Annotated[str | None, Value(job, None, {"type": "string", "pattern": f"^{JOB}$"})]
Timeline = Annotated[str | None, Value(timeline, None, _PATH)]
