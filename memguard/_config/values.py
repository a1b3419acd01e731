"""The single values of a budget file: text and numbers in, exact values out.

Every function raises what `wrong` builds: a message (what was found, what is allowed) and a fix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Literal, TypeVar, cast

from pydantic_core import PydanticCustomError

from memguard._findings import NAMES, Name, nearest
from memguard._units import GIB, GRANULE, KIB, MIB, TIB, parse_duration, parse_percent, parse_size, short

T = TypeVar("T")

_A_PERCENTAGE = "write a percentage such as '50%'"
_A_SIZE = "write a size such as '512MiB', '4GiB' or plain bytes"
_ORDINAL = re.compile(r"(?:cuda:)?(0|[1-9][0-9]{0,3})", re.IGNORECASE | re.ASCII)
_NUMBER = re.compile(r"[-+.0-9_]+")
_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE | re.ASCII)
_YES_NO = {
    **dict.fromkeys(("yes", "y", "on", "1"), "true"),
    **dict.fromkeys(("no", "n", "off", "0"), "false"),
}
_ON_BUSY = {
    **dict.fromkeys(("warn", "warning", "log"), "warn"),
    **dict.fromkeys(("raise", "error", "exception", "fail", "abort", "refuse"), "raise"),
}
_CONTEXT = {"shared": "primary", "main": "primary", "private": "own", "second": "own", "separate": "own"}
MAX_NCCL = 64
"""Communicators on one GPU: more are a typing mistake, as 64 of them would take 31 GiB."""
INTERVAL = 0.05, 3600.0
"""Seconds between two samples of the monitor: the least and the most."""
FORECAST = 1.0, 3600.0
"""Seconds before a cap is reached at which that is said: the least and the most; 0 never says it."""
TIMELINE_SIZE = MIB
"""The least that a timeline may take on disk."""
MAX_PATH = 1024
_ON_PRESSURE = {
    "empty_cache": "trim",
    "free": "trim",
    "reclaim": "trim",
    **dict.fromkeys(("error", "exception", "fail", "abort", "stop"), "raise"),
}


def wrong(message: str, fix: str) -> PydanticCustomError:
    """A value that is not allowed, as pydantic carries it from a validator to the list of problems."""
    return PydanticCustomError("budget", "{message}", {"message": message, "fix": fix})


def found(value: object) -> str:
    """A value as a message names it: short and in one line."""
    if value is None:
        return "nothing"
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "a mapping"
    return short(value)


def size_text(size: int) -> str:
    """A size exactly, in the largest unit that is whole: `40GiB`, `1536MiB`, `2097153B`."""
    for unit, scale in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size and size % scale == 0:
            return f"{size // scale}{unit}"
    return f"{size}B"


def percent_text(fraction: Fraction) -> str:
    """A percentage exactly, as a budget file takes it: `12.5%`."""
    with localcontext() as context:
        context.prec = 40
        percent = Decimal(fraction.numerator) * 100 / Decimal(fraction.denominator)
        return f"{percent.normalize():f}%"


def duration_text(seconds: float) -> str:
    """A duration exactly, as a budget file takes it: `500ms`, `20s`."""
    milliseconds = round(seconds * 1000)
    if milliseconds % 1000 and milliseconds / 1000 == seconds:
        return f"{milliseconds}ms"
    return f"{int(seconds) if seconds == int(seconds) else seconds!r}s"


def text(value: Fraction | int | str | None) -> str | None:
    """A value as a budget file takes it."""
    if value is None or isinstance(value, str):
        return value
    return percent_text(value) if isinstance(value, Fraction) else size_text(value)


def version(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        if value == 1:
            return 1
        raise wrong(f"this memguard reads version 1, found {found(value)}", "write 'version: 1'")
    quoted = ", without quotes" if value == "1" else ""
    raise wrong(f"the version is the number 1, found {found(value)}", f"write 'version: 1'{quoted}")


def device_limit(value: object) -> Fraction | int:
    """A part of what CUDA can give, or bytes."""
    _given(value, "'90%' or '40GiB'")
    if isinstance(value, Fraction) or (isinstance(value, str) and "%" in value):
        return _fraction(value)
    bare = found(value).strip("' ")
    if re.fullmatch("100|[1-9][0-9]?", bare):
        raise wrong(f"{found(value)} has no unit", f"write '{bare}%', or a size such as '40GiB'")
    return _size(value, f"{_A_SIZE}, or a percentage such as '90%'")


def reserve(value: object) -> int | Literal["auto"]:
    """Bytes, or what the table of measured overheads says."""
    if isinstance(value, str) and value == "auto":
        return "auto"
    _given(value, "'auto' or '2GiB'")
    if isinstance(value, str) and "%" in value:
        raise wrong(f"a reserve is 'auto' or bytes, found {found(value)}", "write 'auto', or a size such as '2GiB'")
    if isinstance(value, int) and not isinstance(value, bool) and value == 0:
        raise wrong("a reserve of 0 cannot hold: every CUDA context takes memory", "write 'auto'")
    return _size(value, "write 'auto', or a size such as '2GiB'")


def share(value: object) -> Fraction:
    """A part of (limit − reserve)."""
    _given(value, "'50%'")
    if isinstance(value, str) and re.search("[A-Za-z]", value) and _is_size(value):
        raise wrong(f"a share is a percentage, found the size {found(value)}", f"write 'limit: {value.strip()}'")
    return _fraction(value)


def limit(value: object) -> int:
    """Bytes."""
    _given(value, "'4GiB'")
    if isinstance(value, str) and "%" in value:
        fix = f"write 'share: {value.strip()}', or a size such as '4GiB'" if len(value) < 12 else _A_SIZE
        raise wrong(f"a framework's limit is bytes, found {found(value)}", fix)
    return _size(value, _A_SIZE)


def growth(value: object) -> bool:
    if isinstance(value, bool):
        return value
    word = found(value).strip("'").lower()
    if word in ("true", "false"):
        raise wrong(f"growth is true or false, found the text {found(value)}", f"write '{word}' without quotes")
    fix = f"write '{_YES_NO[word]}'" if word in _YES_NO else "write 'true' or 'false'"
    raise wrong(f"growth is true or false, found {found(value)}", fix)


def nccl(value: object) -> int:
    """How many NCCL communicators torch.distributed keeps on each GPU."""
    _given(value, "'1'")
    if isinstance(value, int) and not isinstance(value, bool):
        if 0 <= value <= MAX_NCCL:
            return value
        fix = "write how many process groups communicate on one GPU: 1 for plain data parallel training"
        raise wrong(f"nccl is a whole number from 0 to {MAX_NCCL}, found {found(value)}", fix)
    if isinstance(value, str) and re.fullmatch("0|[1-9][0-9]?", value.strip()):
        fix = f"write '{value.strip()}' without quotes"
        raise wrong(f"nccl is a whole number, found the text {found(value)}", fix)
    fix = "write how many process groups communicate on one GPU, for example '1', or '0' for none"
    raise wrong(f"nccl is a whole number from 0 to {MAX_NCCL}, found {found(value)}", fix)


def context(value: object) -> Literal["primary", "own"]:
    """Which CUDA context PyCUDA's `make_context` and `pycuda.autoinit` give."""
    otherwise = "write 'primary' for the one that all share, or 'own' for a second one"
    return cast('Literal["primary", "own"]', _word("context", value, ("primary", "own"), _CONTEXT, otherwise))


def on_busy(value: object) -> Literal["warn", "raise"]:
    """What init does where others hold so much of a GPU that the limit cannot be had."""
    otherwise = "write 'warn' to be told and go on, or 'raise' to stop"
    return cast('Literal["warn", "raise"]', _word("on_busy", value, ("warn", "raise"), _ON_BUSY, otherwise))


def _word(key: str, value: object, words: tuple[str, str], like: Mapping[str, str], otherwise: str) -> str:
    """One of two words; `like` are others that mean one of them."""
    _given(value, " or ".join(f"'{word}'" for word in words))
    if isinstance(value, str) and value in words:
        return value
    lowered = value.strip().lower() if isinstance(value, str) else ""
    meant = lowered if lowered in words else like.get(lowered)
    fix = f"write '{meant}'" if meant else otherwise
    raise wrong(f"{key} is {' or '.join(words)}, found {found(value)}", fix)


def monitor(value: object) -> object:
    """The settings of the monitor; the single keys are judged one by one."""
    if isinstance(value, dict):
        return value
    fix = "write 'monitor: {}' for the defaults, or for example 'monitor: {interval: 1s}'"
    off = value is False or found(value).strip("'").lower() in ("off", "no", "none", "never")
    raise wrong(f"expected its settings, found {found(value)}", "remove the key: nothing watches then" if off else fix)


def interval(value: object) -> float:
    """Seconds between two samples of the monitor."""
    return _duration("interval", value, "500ms", INTERVAL)


def forecast(value: object) -> float:
    """Seconds before a cap or limit is reached at which that is said; 0: never."""
    word = found(value).strip("'").lower()
    if value is False or word in ("off", "no", "none", "never"):
        raise wrong(f"forecast is a duration, or 0 for none, found {found(value)}", "write '0'")
    return _duration("forecast", value, "20s", FORECAST, ", or 0 for none")


def warn(value: object) -> Fraction:
    """The part of a cap or limit from which on the pressure is `warn`."""
    _given(value, "'85%'")
    return _fraction(value)


def critical(value: object) -> Fraction:
    """The part of a cap or limit from which on the pressure is `critical`."""
    _given(value, "'95%'")
    return _fraction(value)


def timeline(value: object) -> str:
    """The path of a file, as it is written: nothing in it is expanded but {pid} and {rank}, and those later."""
    example = "write a path such as 'memguard.jsonl'"
    _given(value, "'memguard.jsonl'")
    if not isinstance(value, str):
        raise wrong(f"timeline is the path of a file, found {found(value)}", example)
    if not value.strip() or value.endswith(("/", "/.", "/..")) or value in (".", ".."):
        raise wrong(f"timeline is the path of a file, found {found(value)}, which names none", example)
    if not value.isprintable() or len(value) > MAX_PATH:
        what = f"longer than {MAX_PATH} characters" if value.isprintable() else "not printable"
        raise wrong(f"the path {found(value)} is {what}", example)
    if value.startswith("~") or "$" in value:
        raise wrong(f"memguard expands neither '~' nor '$' in {found(value)}", "write the path as it is")
    unknown = [name for name in re.findall(r"[{}][^{}]*[{}]?", value) if name not in ("{pid}", "{rank}")]
    if unknown:
        raise wrong(f"{found(unknown[0])} is no part of a path that memguard fills in", "write '{pid}' or '{rank}'")
    return value


def timeline_size(value: object) -> int:
    """The most that a timeline may take on disk, in bytes."""
    _given(value, "'64MiB'")
    size = _parsed(parse_size, value, "write a size such as '64MiB'")
    if size < TIMELINE_SIZE:
        unitless = not re.search("[A-Za-z]", found(value))
        hint = f"; did you mean '{size}MiB'?" if unitless and size < KIB * KIB else ""
        raise wrong(f"{found(value)} is less than 1MiB, the least a timeline may take", f"write '64MiB'{hint}")
    return size


def pressures(value: object) -> list[object]:
    """What is done under pressure; the single entries are `pressure`'s to judge."""
    _given(value, "'[trim]'")
    if isinstance(value, (list, tuple)):
        return list(value)
    name = value.strip().lower() if isinstance(value, str) else ""
    fix = f"write '[{_ON_PRESSURE.get(name, name)}]'" if name in ("trim", "raise", *_ON_PRESSURE) else "write '[trim]'"
    raise wrong(f"on_pressure is a list of trim and raise, found {found(value)}", fix)


def pressure(value: object) -> Literal["trim", "raise"]:
    """One thing that is done where the pressure becomes critical."""
    if value == "trim":
        return "trim"
    if value == "raise":
        return "raise"
    name = value.strip().lower() if isinstance(value, str) else ""
    fix = "write 'trim' to give idle caches back, or 'raise' to stop at the next checkpoint"
    if name in ("trim", "raise", *_ON_PRESSURE):
        fix = f"write '{_ON_PRESSURE.get(name, name)}'"
    elif name in ("warn", "log", "print"):
        fix = "remove it: a warning is logged wherever there is a monitor"
    elif name in ("call", "callback", "function", "hook"):
        fix = "remove it: functions are registered from Python, never named in a budget"
    raise wrong(f"on_pressure knows trim and raise, found {found(value)}", fix)


def doctor(value: object) -> object:
    """What `memguard doctor` is told; the single keys are judged one by one."""
    if isinstance(value, dict):
        return value
    raise wrong(f"expected its settings, found {found(value)}", "write 'doctor: {ignore: []}', or remove the key")


def findings(value: object) -> list[object]:
    """Names of findings; the single ones are `finding`'s to judge."""
    _given(value, "'[]'")
    if isinstance(value, (list, tuple)):
        return list(value)
    name = _meant(value)
    raise wrong(f"ignore is a list of findings, found {found(value)}", f"write '[{name}]'" if name else "write '[]'")


def finding(value: object) -> Name:
    """The name of something that `memguard doctor` may find."""
    if isinstance(value, str) and value in NAMES:
        return cast("Name", value)
    name = _meant(value)
    fix = f"did you mean {name!r}?" if name else "remove it; `memguard doctor --list` prints the names"
    raise wrong(f"{found(value)} is no finding of memguard doctor", fix)


def in_order(names: tuple[Name, ...]) -> tuple[Name, ...]:
    """In the order of the list, so that budgets that mean the same are equal."""
    return tuple(sorted(names, key=NAMES.index))


def _meant(value: object) -> str | None:
    return nearest(value.strip().lower().replace("_", "-")) if isinstance(value, str) and len(value) <= 40 else None


def device_key(value: object) -> str:
    """A GPU by UUID, CUDA ordinal or name pattern, in one spelling each."""
    name = value.strip() if isinstance(value, str) else ""
    if _UUID.fullmatch(name):
        return "GPU-" + name[4:].lower()
    if name.upper().startswith("GPU-"):
        fix = "copy the UUID that `nvidia-smi -L` prints, whole"
        raise wrong(f"{found(value)} is not a GPU's UUID (GPU- and 8-4-4-4-12 hexadecimal digits)", fix)
    if name.upper().startswith("MIG-"):
        raise wrong(f"{found(value)} is a MIG instance, which this version does not support", "remove this entry")
    if ordinal := _ORDINAL.fullmatch(name):
        return ordinal[1]
    if not name or _NUMBER.fullmatch(name) or name.lower().startswith("cuda:"):
        fix = "write a UUID from `nvidia-smi -L`, a CUDA ordinal such as 0, or a name such as 'NVIDIA A100*'"
        raise wrong(f"{found(value)} names no GPU", fix)
    return name


def _given(value: object, example: str) -> None:
    if value is None:
        raise wrong("has no value", f"write {example}, or remove the key")


def _fraction(value: object) -> Fraction:
    if isinstance(value, Fraction) and 0 < value <= 1:
        written = percent_text(value)
        if len(written) > 20:  # a third, say: a budget must be the same read back from its own text
            raise wrong(f"{value} has no exact percentage", f"write '{float(value * 100):.6g}%'")
        return value
    return _parsed(parse_percent, value, _A_PERCENTAGE)


def _size(value: object, allowed: str) -> int:
    """Bytes, at least one granule: anything smaller is a missing unit."""
    if isinstance(value, str):
        bare = value.strip()
        if re.fullmatch("0[0-9]+", bare):
            raise wrong(
                f"{found(value)} starts with 0, which some programs read as octal", "write it without the leading 0"
            )
        if re.fullmatch("[0-9]+(_+[0-9]+)+", bare):
            raise wrong(f"{found(value)} is not a size: no underscores", f"write '{bare.replace('_', '')[:40]}'")
    size = _parsed(parse_size, value, allowed)
    if size < GRANULE:
        unitless = size < MIB and not re.search("[A-Za-z]", found(value))
        hint = f"; did you mean '{size}MiB'?" if unitless else ""
        shown = f"{size} byte{'s' if size > 1 else ''}" if unitless else f"{found(value)} ({size} bytes)"
        raise wrong(f"{shown}: less than 2MiB, the smallest piece that CUDA hands out", allowed + hint)
    return size


def _duration(key: str, value: object, example: str, allowed: tuple[float, float], more: str = "") -> float:
    least, most = allowed
    _given(value, f"'{example}'")
    seconds = _parsed(parse_duration, value, f"write a duration such as '{example}'{more}")
    if least <= seconds <= most or (more and seconds == 0):
        return seconds
    between = f"from {duration_text(least)} to {duration_text(most)}{more}"
    bare = re.sub(r"\.0*$", "", found(value).strip("' "))
    meant = bare.isdecimal() and least <= int(bare[:9]) / 1000 <= most
    hint = f"; did you mean '{bare}ms'?" if meant else ""
    raise wrong(f"{key} is a duration {between}, found {found(value)}", f"write for example '{example}'{hint}")


def _parsed(parse: Callable[[object], T], value: object, allowed: str) -> T:
    try:
        return parse(value)
    except ValueError as error:
        # units.py says in one sentence what is wrong and what to write instead: that half is the fix, where it
        # is about this very value.
        message, _, fix = str(error).partition("; write ")
        raise wrong(message, f"write {fix}" if fix and "is not a size" not in message else allowed) from None


def _is_size(value: str) -> bool:
    try:
        return parse_size(value) > 0
    except ValueError:
        return False
