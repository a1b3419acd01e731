"""Suggest the valid key or value for an invalid one, as text to write in its place."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from math import floor
from typing import Any

from memguard._base.units import GIB, GRANULE, KIB, MAX_SIZE, MIB, TIB, short
from memguard._frameworks.specs import SPECS

FIELDS_OF_A_DEVICE = ("limit", "reserve")
_PERCENT = ("%", "percent", "per cent", "pct", "percents")
_UNITS = {
    **dict.fromkeys(("b", "byte", "bytes"), ("B", 1)),
    **dict.fromkeys(("k", "kb", "ki", "kib", "kilobyte", "kilobytes", "kibibyte", "kibibytes"), ("KiB", KIB)),
    **dict.fromkeys(("m", "mb", "mi", "mib", "megabyte", "megabytes", "mebibyte", "mebibytes", "meg"), ("MiB", MIB)),
    **dict.fromkeys(
        ("g", "gb", "gi", "gib", "gigabyte", "gigabytes", "gibibyte", "gibibytes", "gig", "gigs"), ("GiB", GIB)
    ),
    **dict.fromkeys(("t", "tb", "ti", "tib", "terabyte", "terabytes", "tebibyte", "tebibytes"), ("TiB", TIB)),
}
_NUMBER = re.compile(r"([0-9]{1,16}(?:\.[0-9]{1,9})?|\.[0-9]{1,9})\s*([a-z% ]{0,12})", re.ASCII)
_PARTS = "fraction|frac|percent|percentage|pct|ratio|part|portion|proportion|utili[sz]ation|weight|shares?"
_AMOUNTS = f"memory|mem|vram|ram|cap|max|maximum|min|minimum|most|quota|amount|bytes?|size|gi?b|mi?b|limits?|{_PARTS}"
_QUANTITY_KEY = re.compile(rf"(?:.*_)?(?:{_AMOUNTS})(?:_.*)?")
_PART_KEY = re.compile(rf"(?:.*_)?(?:{_PARTS})(?:_.*)?")
_INLINE = re.compile(r"([A-Za-z][\w-]{0,30}) ?[:=]? ?\{ ?([A-Za-z_]{1,30})")
_JOINED = re.compile(r"([A-Za-z][\w-]{0,30})\s*[:= ]\s*(\S.{0,40})")


def plain(text: str) -> str:
    """Replace variants of ASCII characters by ASCII: full-width letters, digits of other alphabets, unusual spaces."""
    wide = unicodedata.normalize("NFKC", text[:200])
    digits = "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in wide)
    return " ".join("".join(c for c in digits if c.isprintable() or c.isspace()).split())


def quantity(value: object, bare: str) -> str | None:
    """Convert a value to the percentage or size that the user probably intended, in a budget's syntax; None if unclear.

    `bare` is the unit to assume for a small number without a unit: `%`, `GiB` or `MiB`.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, Fraction):
        value = float(value)
    if isinstance(value, float):
        value = f"{value:.9f}".rstrip("0") if 0 < value < 1e15 else ""
        value = f"{value}0" if value.endswith(".") else value
    if not isinstance(value, (str, int)):
        return None
    text = plain(str(value) if isinstance(value, str) or abs(value) < 1 << 60 else "").lower()
    if re.fullmatch(r"0x[0-9a-f]{1,13}", text):
        text = str(int(text, 16))
    elif exponent := re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)e\+?([0-9]{1,2})", text):
        text = str(int(Fraction(exponent[1]) * 10 ** int(exponent[2])))
    elif part := re.fullmatch(r"([0-9]{1,3}) ?/ ?([1-9][0-9]{0,2})", text):
        text = f"{float(Fraction(int(part[1]), int(part[2])) * 100):.6g}%"
    text = re.sub(r"(?<=[0-9])_(?=[0-9])", "", text)
    text = re.sub(r"^([0-9]{1,9}),([0-9]{1,2})(?![0-9])", r"\1.\2", text)
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    number, unit = found[1], found[2].strip()
    number = f"0{number}" if number.startswith(".") else number.lstrip("0") or "0"
    number = f"0{number}" if number.startswith(".") else number
    exact = Fraction(number)
    if not unit:
        if "." in number and exact <= 1:
            return _percent(exact * 100)
        if exact == 1 and bare == "%":
            return "100%"
        if exact >= GRANULE:
            return number.partition(".")[0] if exact <= MAX_SIZE else None
        unit = ("GiB" if "." in number and bare != "%" else bare if exact <= 100 else "MiB").lower()
    if unit in _PERCENT:
        return _percent(exact)
    if unit not in _UNITS:
        return None
    name, scale = _UNITS[unit]
    return f"{number}{name}" if GRANULE <= exact * scale <= MAX_SIZE else None


def _percent(percent: Fraction) -> str | None:
    if not 0 < percent <= 100:
        return None
    return f"{float(percent):.9f}".rstrip("0").rstrip(".") + "%"


def sized(value: object, bare: str, at: str) -> str | None:
    """The result of `quantity` with its key: for a framework `share: 50%` or `limit: 4GiB`, for a device `limit`
    in both cases. None if unclear."""
    if (found := quantity(value, bare)) is None:
        return None
    return f"{'share' if at == 'framework' and '%' in found else 'limit'}: {found}"


def flow(value: object) -> str:
    """Format plain data as one line of YAML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {flow(child)}" for key, child in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(flow, value)) + "]"
    if value is None or isinstance(value, bool):
        return "~" if value is None else str(value).lower()
    return short(value) if isinstance(value, int) and abs(value) > MAX_SIZE else str(value)


# Fitting amounts

_HALF = Fraction(1, 2)


def fitting(shares: Mapping[str, Fraction], limits: Mapping[str, int], room: int | None) -> dict[str, Fraction | int]:
    """Lower shares and limits in proportion so that they fit `room` bytes (None if unknown). Returns the changed ones.

    Lowers shares if their sum exceeds 100%, else limits. If lowering one kind is not enough, lowers shares and limits
    to one half of `room` each, or shares to the bytes that the smallest possible limits leave. If `room` is unknown,
    shares leave a tenth of it for limits. The result is empty if no amounts fit, because no limit can be less
    than `GRANULE` and no share is lowered to less than `GRANULE`.
    """
    wanted, sizes, least = sum(shares.values(), Fraction(0)), sum(limits.values()), len(limits) * GRANULE
    bytes_left: int | None
    if room is not None and (room < least or (shares and room == least)):
        return {}
    if not limits or not shares:
        target, bytes_left = Fraction(1), room
    elif room is None:
        target, bytes_left = min(wanted, Fraction(9, 10)), None
    elif wanted < 1 and (1 - wanted) * room >= least:
        target, bytes_left = wanted, floor((1 - wanted) * room)
    elif sizes <= room * _HALF:
        target, bytes_left = 1 - Fraction(sizes, room), sizes
    else:
        bytes_left = max(room // 2, least)
        target = min(_HALF, 1 - Fraction(bytes_left, room))
    found: dict[str, Fraction | int] = {}
    if wanted > target:
        lowered = _lowered(shares, target / wanted)
        if room is not None and any(part * room < GRANULE <= shares[name] * room for name, part in lowered.items()):
            return {}
        found |= lowered
    if bytes_left is not None and sizes > bytes_left:
        for name, size in sorted(limits.items(), key=lambda item: item[1]):  # smallest first: each needs GRANULE
            part = min(max(size * bytes_left // sizes // GRANULE, 1) * GRANULE, size)
            found[name], bytes_left, sizes = part, max(bytes_left - part, 0), max(sizes - size, 1)
    asked = {**shares, **limits}
    return {name: found[name] for name in asked if name in found and found[name] != asked[name]}


def _lowered(shares: Mapping[str, Fraction], scale: Fraction) -> dict[str, Fraction]:
    """Each share times `scale`, rounded down to 0.1%, or more finely if the smallest share would become 0."""
    for digits in (3, 6, 12, 18):
        steps = 10**digits
        found = {name: Fraction(floor(share * scale * steps), steps) for name, share in shares.items()}
        if all(found.values()):
            return found
    return dict(shares)


# Keys


def normal(name: str) -> str:
    """Normalise a key: lower case, `_` for dashes and spaces, ASCII for full-width letters."""
    return re.sub(r"[\s-]+", "_", plain(name).lower()).strip("_")


def at(data: object, loc: Iterable[str | int]) -> Any:
    """The value at a path; None if the path is missing."""
    for part in loc:
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def share_left(data: object) -> str:
    """The share to suggest for one more framework: half of the part that the declared shares leave."""
    shares = Fraction(0)
    entries = at(data, ["frameworks"])
    for entry in entries.values() if isinstance(entries, Mapping) else ():
        least = at(entry, ["share"]) or at(entry, ["min"]) if isinstance(entry, Mapping) else entry
        written = quantity(least, "%")
        shares += Fraction(written.rstrip("%")) / 100 if written and written.endswith("%") else 0
    left = 1 - shares
    return _percent(Fraction(int(left * 1000), 1000) * 50) or "50%" if left > 0 else "50%"


def entry(name: str, value: object, data: object) -> str:
    """The line to write for a framework whose value is not a mapping, derived from this value."""
    if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        merged = {key: child for one in value for key, child in one.items()}
        return f"{name}: {flow(merged)}"
    words = " ".join(map(flow, value)) if isinstance(value, list) and len(value) <= 2 else value
    if isinstance(words, str) and (joined := _JOINED.fullmatch(plain(words))) and joined[1] in ("share", "limit"):
        words = joined[2]
    return f"{name}: {{{sized(words, '%', 'framework') or f'share: {share_left(data)}'}}}"


def is_quantity(name: str) -> bool:
    """True if an unknown key is another word for an amount of memory."""
    return _QUANTITY_KEY.fullmatch(normal(name)) is not None


def bare_unit(name: str) -> str:
    """The unit to assume for a number without a unit below the unknown key `name`."""
    key = normal(name)
    if _PART_KEY.fullmatch(key):
        return "%"
    return "MiB" if re.search(r"(^|_)mi?b(_|$)", key) else "GiB"


def in_one_word(name: str, value: object, known: Callable[[str], str]) -> str | None:
    """The line to write for a key and its value that YAML parsed as one key: `share 60%`, `share=60%`, `torch {share`.

    `known` resolves a word to the valid key of this level by alias or similar spelling, or returns "".
    """
    text = plain(name)
    if isinstance(value, str) and (found := _INLINE.fullmatch(text)) and value.rstrip().endswith("}"):
        if key := known(found[1]):
            return f"{key}: {{{found[2]}: {plain(value).rstrip('} ')}}}"
    elif value is None and (found := _JOINED.fullmatch(text)) and (key := known(found[1])):
        written = found[2].strip()
        if key in SPECS:
            return entry(key, written, None) if quantity(written, "%") else None
        return (key in ("share", "limit") and sized(written, "%", "framework")) or f"{key}: {written}"
    return None


_CUT = 10**15
"""No number before a decimal comma is this large. Python refuses to format an integer of thousands of digits."""


def decimals(name: str, siblings: Mapping[str, Any]) -> tuple[str, str] | None:
    """The key and the complete value, `limit` and `1.5GiB`, if YAML split `{limit: 1,5GiB}` into `limit: 1` and the key
    `5GiB`."""
    if not re.match("[0-9]", name) or siblings.get(name) is not None:
        return None
    before = list(siblings)[: list(siblings).index(name)] if name in siblings else []
    whole = siblings[before[-1]] if before else None
    if type(whole) is not int or not 0 <= whole < _CUT:
        return None
    return before[-1], f"{whole}.{name}"


def looks_like(value: object, fields: Mapping[str, Mapping[str, Any]]) -> str:
    """The top-level key below which the keys of this mapping belong; "" if none."""
    if not isinstance(value, Mapping) or not value:
        return ""
    keys = {normal(str(key)) for key in value}
    frameworks = {*SPECS, *(alias for spec in SPECS.values() for alias in spec.aliases)}
    if keys & frameworks:
        return "frameworks"
    if keys <= set(FIELDS_OF_A_DEVICE):
        return "device"
    if all(isinstance(one, Mapping) and one and set(one) <= set(FIELDS_OF_A_DEVICE) for one in value.values()):
        return "devices"
    return next((level for level in ("monitor", "metrics", "suspend") if keys <= set(fields[level])), "")


def unsized(data: object) -> Iterator[str]:
    """The frameworks in the document that have no share, limit, min or max."""
    entries = at(data, ["frameworks"])
    for name, own in entries.items() if isinstance(entries, Mapping) else ():
        if name in SPECS and (
            own is None or (isinstance(own, Mapping) and not {"share", "limit", "min", "max"} & set(own))
        ):
            yield name


# GPUs

_WHOLE_NAME = re.compile(r"(nvidia|tesla|quadro|geforce|grid|titan|graphics) \S.*|[a-z]\d+x?-(sxm|pcie|pg)\S*|\S+ \(.*")
_MODEL = re.compile(r"rtx|gtx|ti|super|ada|nvl|pcie|sxm[0-9]?|(rtx|gtx|[a-z]{1,2})?[0-9]+(gi?b|[a-z])?")
_EVERY = {"all", "any", "every", "each", "default", "gpu", "gpus", "cuda", "device", "devices", "others", "rest"}
_NUMBERED = re.compile(r"(?:gpu|cuda|device|dev|card|nvidia|ordinal|index|id|no)?[\s:_#/.\[-]*0*([0-9]{1,4})\]?")


def _is_model(word: str) -> bool:
    return _MODEL.fullmatch(word) is not None


def device_key(name: str) -> str:
    """The valid GPU key that the user probably intended by an invalid one; "" if it cannot be inferred."""
    text = plain(name)
    if numbered := _NUMBERED.fullmatch(text.lower()):
        return numbered[1]
    if text.lower() in _EVERY:
        return "*"
    if not text.isascii() or len(text) > 60:
        return ""
    words = re.split("[ _-]+", text.lower())
    if (
        re.search("[*?]", text)
        or _WHOLE_NAME.fullmatch(text.lower())
        or not (len(words) == 1 or all(map(_is_model, words)))
    ):
        return text
    if not re.search("[A-Za-z0-9]", text):
        return ""
    return f"*{re.sub(r'[ _-]+', '*', re.sub(r'(?i)(?<=[rg]tx)(?=[0-9])', '*', text))}*"
