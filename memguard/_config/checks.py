"""What must hold between the values of a budget. Lenient: it checks what can be read and skips the rest, so that these
problems are reported together with those of single values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

from memguard._config import values
from memguard._config.document import Loc
from memguard._config.values import percent_text, size_text
from memguard._specs import SPECS

T = TypeVar("T")


@dataclass(frozen=True)
class Violation:
    """A problem that has not been given its line yet.

    `at_key` marks the key rather than the value; `alone` drops every other violation at or below its place.
    """

    loc: Loc
    message: str
    fix: str
    at_key: bool = False
    alone: bool = False


def check(data: Mapping[str, Any]) -> list[Violation]:
    """Every violation in raw data. Frameworks that memguard does not know are left out."""
    written = _mapping(data.get("frameworks"))
    frameworks = {name: entry for name, entry in written.items() if name in SPECS and isinstance(entry, Mapping)}
    shares = {name: s for name, entry in frameworks.items() if (s := _read(values.share, entry.get("share")))}
    limits = {name: b for name, entry in frameworks.items() if (b := _read(values.limit, entry.get("limit")))}
    device, devices, pressure = _mapping(data.get("device")), _mapping(data.get("devices")), data.get("on_pressure")
    violations = [violation for name, entry in frameworks.items() for violation in _framework(name, entry)]
    violations += _shares(shares, limits)
    if sum(shares.values()) < 1:
        violations += _fits(("device",), device, {}, shares, limits)
        for key, override in devices.items():
            violations += _fits(("devices", key), _mapping(override), device, shares, limits)
    violations += _same_device(devices)
    violations += _levels(_mapping(data.get("monitor")))
    if "monitor" not in data and isinstance(pressure, list) and pressure:
        message = "nothing watches the pressure: on_pressure needs a monitor"
        violations.append(Violation(("on_pressure",), message, "add 'monitor: {}', which takes the defaults", True))
    violations += _repeated(("on_pressure",), pressure)
    violations += _repeated(("doctor", "ignore"), _mapping(data.get("doctor")).get("ignore"))
    return violations


def _framework(name: str, entry: Mapping[str, Any]) -> Iterator[Violation]:
    loc: Loc = ("frameworks", name)
    options = {option.name: (owner, option) for owner, spec in SPECS.items() for option in spec.options}
    if "share" in entry and "limit" in entry:
        later = [key for key in entry if key in ("share", "limit")][-1]
        yield Violation((*loc, later), "has both share and limit: exactly one is allowed", "remove one of them", True)
    elif not {"share", "limit"} & set(entry) and set(entry) <= set(options):
        message = "has neither share nor limit: exactly one is needed"
        yield Violation(loc, message, f"write '{name}: {{share: 50%}}' or '{name}: {{limit: 4GiB}}'", True)
    own = {option.name for option in SPECS[name].options}
    for key, (owner, option) in options.items():
        if key in entry and key not in own:
            message = f"{key} is a setting of {owner}; {option.elsewhere.format(name=name)}"
            yield Violation((*loc, key), message, option.fix, True, True)


def _shares(shares: Mapping[str, Fraction], limits: Mapping[str, int]) -> Iterator[Violation]:
    total = sum(shares.values(), Fraction(0))
    if total > 1:
        message = f"the shares add up to {percent_text(total)} ({_sum(shares)}); at most 100% can be given out"
        fix = f"lower them by {percent_text(total - 1)} together"
        yield Violation(("frameworks", list(shares)[-1], "share"), message, fix)
    elif total == 1 and limits:
        size = size_text(sum(limits.values()))
        message = f"the shares take 100%, so nothing is left for the {size} of {' and '.join(limits)}"
        fix = f"lower the share of {' and '.join(shares)}"
        yield Violation(("frameworks", list(limits)[-1], "limit"), message, fix)


def _fits(
    loc: Loc,
    own: Mapping[str, Any],
    inherited: Mapping[str, Any],
    shares: Mapping[str, Fraction],
    limits: Mapping[str, int],
) -> Iterator[Violation]:
    """Bytes against bytes. The plan finds what fits only on some GPUs."""
    at = next((key for key in ("limit", "reserve") if key in own), None)
    limit = _read(values.device_limit, own.get("limit", inherited.get("limit")))
    if at is None or not isinstance(limit, int):
        return
    declared = _read(values.reserve, own.get("reserve", inherited.get("reserve")))
    reserve = declared if isinstance(declared, int) else 0
    if reserve >= limit:
        message = f"the reserve of {size_text(reserve)} leaves nothing of the limit of {size_text(limit)}"
        yield Violation((*loc, "reserve" if "reserve" in own else at), message, "lower the reserve or raise the limit")
        return
    needed, left = sum(limits.values()), 1 - sum(shares.values(), Fraction(0))
    over = math.ceil(needed - left * (limit - reserve))
    if over > 0:
        kept = f" − reserve {size_text(reserve)}" if reserve else ""
        message = f"{_sum({**limits, **shares})} is {_about(over)} more than this limit of {size_text(limit)}{kept}"
        least = _about(math.ceil(needed / left) + reserve)
        yield Violation((*loc, at), message, f"raise the limit to {least}, or lower the frameworks by {_about(over)}")


def _same_device(devices: Mapping[str, Any]) -> Iterator[Violation]:
    seen: dict[str, object] = {}
    for key in devices:
        same = _read(values.device_key, key)
        if same is not None and same in seen:
            message = f"the same GPU as {values.found(seen[same])} above"
            yield Violation(("devices", key), message, "keep one of them", True)
        elif same is not None:
            seen[same] = key


def _levels(monitor: Mapping[str, Any]) -> Iterator[Violation]:
    warn = _read(values.percent, monitor.get("warn", values.WARN))
    critical = _read(values.percent, monitor.get("critical", values.CRITICAL))
    if warn is None or critical is None or warn < critical:
        return
    at = [key for key in monitor if key in ("warn", "critical")][-1]
    first, second = (
        f"{name} at {percent_text(part)}{'' if name in monitor else ' by default'}"
        for name, part in (("warn", warn), ("critical", critical))
    )
    fix = f"write a warn below {percent_text(critical)}" if at == "warn" else "raise critical, or lower warn"
    yield Violation(("monitor", at), f"{first} must come before {second}", fix)


def _repeated(loc: Loc, listed: object) -> Iterator[Violation]:
    names = listed if isinstance(listed, list) else []
    for index, name in enumerate(names):
        if isinstance(name, str) and name in names[:index]:
            yield Violation((*loc, index), f"{values.found(name)} is named twice", "keep one of them")


def _sum(parts: Mapping[str, Fraction | int]) -> str:
    return " + ".join(f"{name} {values.text(part)}" for name, part in parts.items())


def _about(size: int) -> str:
    exact = size_text(size)
    return exact if exact.endswith(("MiB", "GiB", "TiB")) else f"{-(-size // 2**20)}MiB"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _read(read: Callable[[Any], T], value: object) -> T | None:
    try:
        return None if value is None else read(value)
    except ValueError:  # pydantic's own errors are ValueErrors
        return None
