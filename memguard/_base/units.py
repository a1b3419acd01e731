"""Parse and format sizes, percentages and durations.

Sizes are bytes in base 1024 (`KiB`, `MiB`, `GiB`, `TiB`), as NVML, CUDA and PyTorch print them.
`GB` is refused because it is ambiguous: 10⁹ or 2³⁰.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import TypeGuard

from memguard._base.advice import InvalidValue

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
GRANULE = 2 * MIB
"""The page size in which CUDA allocates device memory (measured). Caps are whole multiples of it."""
MAX_SIZE = 1 << 50
"""1 PiB: larger than any device; a larger number is a typing mistake."""

_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_BY_LOWER_CASE = {name.lower(): name for name in _UNITS}
_AMBIGUOUS = {"K": "KiB", "KB": "KiB", "M": "MiB", "MB": "MiB", "G": "GiB", "GB": "GiB", "T": "TiB", "TB": "TiB"}
_SECONDS = {"ms": Fraction(1, 1000), "s": Fraction(1), "min": Fraction(60), "h": Fraction(3600)}
_DURATION = re.compile(r"\s*(\d{1,9}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*", re.ASCII)
_SIZE = re.compile(r"\s*(\d{1,40}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*", re.ASCII)
_PERCENT = re.compile(r"\s*(\d{1,6}(?:\.\d{1,20})?)\s*%\s*", re.ASCII)


def parse_size(value: object) -> int:
    """Convert `"512MiB"`, `"1.5GiB"` or a plain whole number of bytes to bytes.

    Drops fractions of a byte. Raises ValueError, whose message gives the allowed values.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        number, unit = match.groups()
        if not unit:
            if "." in number:
                raise InvalidValue(f"{short(value)} has no unit", f"write for example '{number}GiB'")
            unit = "B"
        elif unit.lower() in _BY_LOWER_CASE:
            unit = _BY_LOWER_CASE[unit.lower()]
        elif unit.upper() in _AMBIGUOUS:
            meant = _AMBIGUOUS[unit.upper()]
            raise InvalidValue(f"the unit {unit!r} is ambiguous", f"write '{number}{meant}' (base 1024) or plain bytes")
        else:
            raise InvalidValue(f"unknown unit {short(unit)}; allowed: B, KiB, MiB, GiB, TiB")
        size = int(Fraction(number) * _UNITS[unit])
    else:
        raise InvalidValue(f"{short(value)} is not a size", "write '512MiB', '1.5GiB' or plain bytes", general=True)
    if size <= 0:
        raise InvalidValue(f"a size must be above 0, found {short(value)}")
    if size > MAX_SIZE:
        raise InvalidValue(f"{short(value)} is larger than any GPU (the most allowed is 1 PiB)")
    return size


def parse_percent(value: object) -> Fraction:
    """Convert `"50%"` to a fraction above 0 and at most 1. Raises ValueError with a message for the user."""
    if not (isinstance(value, str) and (match := _PERCENT.fullmatch(value))):
        raise InvalidValue(f"{short(value)} is not a percentage", f"write for example '{_percent_hint(value)}'")
    fraction = Fraction(match[1]) / 100
    if not 0 < fraction <= 1:
        raise InvalidValue(f"a percentage must be above 0% and at most 100%, found {short(value)}")
    return fraction


def parse_duration(value: object) -> float:
    """Convert `"500ms"`, `"2s"`, `"5min"`, `"1h"` or a plain number of seconds to seconds; 0 or more.

    Raises ValueError, whose message gives the allowed values.
    """
    if isinstance(value, (int, float, Fraction)) and not isinstance(value, bool) and 0 <= value < 1e9:
        return float(value)
    if not (isinstance(value, str) and (match := _DURATION.fullmatch(value))):
        raise InvalidValue(f"{short(value)} is not a duration", "write '500ms', '2s' or a plain number of seconds")
    number, unit = match.groups()
    if unit.lower() in ("m", "minute", "minutes"):
        raise InvalidValue(f"unknown unit {short(unit)}", f"write '{number}min'")
    if unit.lower() not in ("", *_SECONDS):
        raise InvalidValue(f"unknown unit {short(unit)}; allowed: {', '.join(_SECONDS)}")
    return float(Fraction(number) * _SECONDS[unit.lower() or "s"])


def format_size(size: int | None) -> str:
    """Format bytes: `4.00 GiB`, `512.0 MiB`, `-1.5 MiB`; `unknown` for None."""
    if size is None:
        return "unknown"
    for unit, scale, digits in (("TiB", TIB, 2), ("GiB", GIB, 2), ("MiB", MIB, 1), ("KiB", KIB, 1)):
        if abs(size) >= scale:
            return f"{size / scale:.{digits}f} {unit}"
    return f"{size} B"


def format_duration(seconds: float) -> str:
    """Format seconds: `0.8 s`, `45 s`, `10 min`, `2 h 5 min`, `3 d 4 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    for unit, scale, part, size in (("min", 60, "s", 1), ("h", 3600, "min", 60), ("d", 86400, "h", 3600)):
        whole, rest = divmod(round(seconds / size), scale // size)
        if unit == "d" or whole < {"min": 60, "h": 24}[unit]:
            return f"{whole} {unit} {rest} {part}" if rest else f"{whole} {unit}"
    raise AssertionError(seconds)


def round_down(size: int, granule: int = GRANULE) -> int:
    """The largest multiple of `granule` that is not above `size`."""
    return size // granule * granule


def round_up(size: int, granule: int = GRANULE) -> int:
    """The smallest multiple of `granule` that is not below `size`."""
    return -(-size // granule) * granule


def gpu_uuid(raw: bytes) -> str:
    """Format CUDA's 16-byte device UUID as NVML and `nvidia-smi -L` do."""
    digits = bytes(raw).hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:32]))


def _percent_hint(value: object) -> str:
    """The percentage, for a fix, that the user most likely intended by a value such as 50, 0.5 or '50'."""
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,3}(\.\d{1,6})?\s*", value, re.ASCII):
        value = float(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 100:
        return f"{float(value * 100 if value < 1 else value):g}%"
    return "50%"


def is_whole(value: object) -> TypeGuard[int]:
    """True if the value is an int from 0 to 1 PiB."""
    return type(value) is int and 0 <= value <= MAX_SIZE


def short(value: object) -> str:
    """The repr of a value for a message, at most 60 characters; never raises."""
    try:
        text = repr(value)
    except Exception:  # for example an int of more than 4,300 digits, or a list nested too deep
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 60 else text[:57] + "..."
