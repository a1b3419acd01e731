"""Cross-checks between the values of a budget.

The rules read the validated budget. If a value is invalid, no budget exists, and the rules check the valid values of
the document, so that their violations are reported together with the invalid values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from fractions import Fraction
from typing import Any, Literal, NamedTuple, TypeVar

from memguard._base.framework_spec import CONTEXT, OVERHEADS, SECOND_CONTEXT, SLACK
from memguard._base.source_map import Loc
from memguard._base.units import MIB
from memguard._budget import values
from memguard._budget.values import percent_text, size_text
from memguard._frameworks.specs import SPECS

Checked = Any
"""A `Budget`; not imported, because the module of `Budget` imports this one. Each value of `frameworks` has the fields
of `Amount`."""
T = TypeVar("T")

SIZES = ("share", "limit", "min", "max")
"""The keys that set a framework's amount of memory."""
_SIZES, _SHARE, _LIMIT, _BOUNDS = {*SIZES}, {"share"}, {"limit"}, {"min", "max"}


class Amount(NamedTuple):
    """A framework's amount of memory. Missing keys and invalid values are None."""

    share: Fraction | None = None
    limit: int | None = None
    min: Fraction | int | None = None
    max: Fraction | int | None = None


class Scope(NamedTuple):
    """Limit and reserve of all GPUs, or of the GPUs that one key of `devices` matches; None if invalid.

    `written` is the mapping in the file at `loc`; values for its missing keys come from `device`.
    """

    loc: Loc
    written: Mapping[str, Any]
    limit: Fraction | int | None
    reserve: int | Literal["auto"] | None


class Guaranteed(NamedTuple):
    """The frameworks' guaranteed amounts, in file order: `shares` are fractions of (limit − reserve), `limits` bytes.

    The guaranteed amount of a framework in `elastic` is its min.
    """

    shares: Mapping[str, Fraction]
    limits: Mapping[str, int]
    elastic: tuple[str, ...]


class Violation(NamedTuple):
    """A problem without a line number.

    `at_key` is True if the problem is reported at the key rather than at the value. If `alone` is True, no other
    violation at or below `loc` is reported. Violations at or below the paths in `instead` are not reported either,
    because this violation explains them.
    """

    loc: Loc
    message: str
    fix: str
    at_key: bool = False
    alone: bool = False
    instead: tuple[Loc, ...] = ()


def check(data: Mapping[str, Any], budget: Checked | None) -> list[Violation]:
    """All violations in `data`, a document as plain values, and in the budget parsed from it (None if a value is
    invalid). Skips unknown frameworks.
    """
    written = _mapping(data.get("frameworks"))
    frameworks = {name: entry for name, entry in written.items() if name in SPECS and isinstance(entry, Mapping)}
    device, devices, monitor = _mapping(data.get("device")), _mapping(data.get("devices")), data.get("monitor")
    if budget is not None and len(budget.devices) < len(devices):
        budget = None  # two keys identify the same GPU, and the budget has only one of the two values
    parts: Mapping[str, Amount]
    if budget is not None:
        parts, scopes = budget.frameworks, _scopes(device, devices, budget)
    else:
        parts = {name: _amount(entry) for name, entry in frameworks.items()}
        scopes = _readable_scopes(device, devices)
    violations: list[Violation] = []
    for name, entry in frameworks.items():
        given = entry.keys() & _SIZES
        if given == _BOUNDS:
            violations += _bounds(name, parts[name])
        elif given != _SHARE and given != _LIMIT:
            violations += _exactly_one(name, entry, data)
    violations += _amounts(frameworks, parts, scopes)
    if data.get("strategy") == "pool":
        violations += _pool(frameworks)
    if budget is None:  # parsing has already done these checks for a valid budget
        violations += _of_others(frameworks)
        violations += _misplaced(data)
        violations += _same_device(devices)
    if isinstance(monitor, Mapping):
        violations += _levels(monitor, budget)
    if (pressure := data.get("on_pressure")) and isinstance(pressure, list):
        if "monitor" not in data:
            message = "nothing watches the pressure: on_pressure needs a monitor"
            violations.append(Violation(("on_pressure",), message, "add 'monitor: {}', which takes the defaults", True))
        violations += _repeated(("on_pressure",), pressure)
    if isinstance(doctor := data.get("doctor"), Mapping) and isinstance(ignored := doctor.get("ignore"), list):
        violations += _repeated(("doctor", "ignore"), ignored)
    if isinstance(metrics := data.get("metrics"), Mapping):
        violations += _metrics(metrics)
    if device:
        violations += _lease(device)
    return violations


def _amount(entry: Mapping[str, Any]) -> Amount:
    share, limit = _read(values.share, entry.get("share")), _read(values.limit, entry.get("limit"))
    return Amount(share, limit, _read(values.least, entry.get("min")), _read(values.most, entry.get("max")))


def _scopes(device: Mapping[str, Any], devices: Mapping[str, Any], budget: Checked) -> list[Scope]:
    every = budget.device
    scopes = [Scope(("device",), device, every.limit, every.reserve)]
    for key, own in zip(devices, budget.devices.values(), strict=True):  # the budget normalises `cuda:0` to `0`
        limit = every.limit if own.limit is None else own.limit
        reserve = every.reserve if own.reserve is None else own.reserve
        scopes.append(Scope(("devices", key), devices[key], limit, reserve))
    return scopes


def _readable_scopes(device: Mapping[str, Any], devices: Mapping[str, Any]) -> list[Scope]:
    scopes = []
    for loc, own in [(("device",), device), *((("devices", key), _mapping(own)) for key, own in devices.items())]:
        limit = _read(values.device_limit, own.get("limit", device.get("limit")))
        reserve = _read(values.reserve, own.get("reserve", device.get("reserve")))
        scopes.append(Scope(loc, own, limit, reserve))
    return scopes


def _amounts(
    frameworks: Mapping[str, Mapping[str, Any]], parts: Mapping[str, Amount], scopes: list[Scope]
) -> Iterator[Violation]:
    """Compare the frameworks' amounts with limit − reserve."""
    guaranteed = _guaranteed(frameworks, parts)
    in_bytes = [scope for scope in scopes if isinstance(scope.limit, int)]
    least = min(map(_declared_room, in_bytes), default=None)
    left, needed = 1 - sum(guaranteed.shares.values(), Fraction(0)), sum(guaranteed.limits.values())
    if (left > 0 or (left == 0 and not needed)) and (least is None or (least > 0 and needed <= left * least)):
        return  # the amounts fit; the code below only reports misfits
    auto = _auto_reserve(frameworks) if in_bytes else 0
    rooms = [room for scope in in_bytes if (room := _room(scope, auto)) > 0]
    yield from _shares(guaranteed, rooms)
    for scope in in_bytes:
        yield from _fits(scope, guaranteed, rooms, auto)


def _guaranteed(frameworks: Mapping[str, Mapping[str, Any]], parts: Mapping[str, Amount]) -> Guaranteed:
    shares: dict[str, Fraction] = {}
    limits: dict[str, int] = {}
    elastic = []
    for name, entry in frameworks.items():
        part = parts[name]
        if part.share:
            shares[name] = part.share
        if part.limit:
            limits[name] = part.limit
        if part.min and "share" not in entry and "limit" not in entry:
            elastic.append(name)
            if isinstance(part.min, Fraction):
                shares[name] = part.min
            else:
                limits[name] = part.min
    return Guaranteed(shares, limits, tuple(elastic))


def _of_others(frameworks: Mapping[str, Mapping[str, Any]]) -> Iterator[Violation]:
    """Refuse options below a framework that does not have them."""
    for name, entry in frameworks.items():
        own = {option.name for option in SPECS[name].options}
        for owner, option in ((owner, option) for owner, spec in SPECS.items() for option in spec.options):
            if option.name in entry and option.name not in own:
                message = f"{option.name} is a setting of {owner}; {option.elsewhere.format(name=name)}"
                yield Violation(("frameworks", name, option.name), message, option.fix, True, True)


def _bounds(name: str, part: Amount) -> Iterator[Violation]:
    """Check that min ≤ max if both are percentages or both bytes. The plan compares a percentage with bytes, on each
    GPU."""
    least, most = part.min, part.max
    if least is not None and most is not None and type(least) is type(most) and most < least:
        low, high = values.text(least), values.text(most)
        yield Violation(
            ("frameworks", name, "max"), f"the max of {high} is less than the min of {low}", f"write '{low}' or more"
        )


def _exactly_one(name: str, entry: Mapping[str, Any], data: Mapping[str, Any]) -> Iterator[Violation]:
    """Check that a framework has exactly one of share, limit, and min with max."""
    from memguard._budget import suggestions

    loc: Loc = ("frameworks", name)
    fixed, bounds = [key for key in entry if key in SIZES[:2]], [key for key in entry if key in SIZES[2:]]
    options = {option.name for spec in SPECS.values() for option in spec.options}
    known = set(entry) <= options | set(SIZES)  # pydantic reports an unknown key, perhaps a misspelt amount
    kept = suggestions.flow(
        {key: value for key, value in entry.items() if key in {o.name for o in SPECS[name].options}}
    )
    rest = f", {kept[1:-1]}" if 2 < len(kept) < 60 else ""
    if len(fixed) == 2:
        both = " or ".join(f"'{key}: {suggestions.flow(entry[key])}'" for key in SIZES[:2])
        fix = f"remove one of them{f': {both}' if len(both) < 60 else ''}"
        yield Violation((*loc, fixed[1]), "has both share and limit: exactly one is allowed", fix, True)
    elif fixed and len(bounds) == 2:
        message = f"has {fixed[0]} beside min and max: exactly one is allowed"
        yield Violation((*loc, fixed[0]), message, "remove it, or remove min and max", True)
    elif fixed and bounds:
        message = f"has {bounds[0]} beside {fixed[0]}: share, or limit, or min with max is allowed"
        if other := _other_bound(entry, bounds[0], fixed[0]):
            yield Violation((*loc, fixed[0]), message, f"did you mean '{other}'?", True, True)
        else:
            yield Violation((*loc, bounds[0]), message, "remove it", True, True)
    elif bounds == ["max"] and known:
        line = suggestions.sized(entry["max"], "GiB", "framework") or "limit: 4GiB"
        fix = f"write '{line}' for a cap that stays, or add a min, for example 'min: 5%'"
        yield Violation((*loc, "max"), "has max without min: an elastic share has both", fix, True, True)
    elif bounds and known:
        least = suggestions.quantity(entry["min"], "%") or "5%"
        fix = f"write '{name}: {{min: {least}, max: 100%{rest}}}', or another max"
        yield Violation(loc, "has min without max: an elastic share has both", fix, True, True)
    elif not bounds and known:
        message, left = (
            "has neither share nor limit, nor min and max: exactly one is needed",
            suggestions.share_left(data),
        )
        yield Violation(
            loc, message, f"write '{name}: {{share: {left}{rest}}}' or '{name}: {{limit: 4GiB{rest}}}'", True
        )


def _other_bound(entry: Mapping[str, Any], bound: str, fixed: str) -> str:
    """The bound (min or max) to write in place of the key `fixed` (share or limit), given the other `bound`.

    "" if the value of `fixed` would be a min above the max, or a max below the min.
    """
    here, there = _read(values.least, entry[bound]), _read(values.least, entry[fixed])
    if here is None or there is None:
        return ""
    if type(here) is type(there) and (here > there if bound == "min" else here < there):
        return ""
    return "max" if bound == "min" else "min"


def _shares(guaranteed: Guaranteed, rooms: list[int]) -> Iterator[Violation]:
    shares, limits, elastic = guaranteed
    total = sum(shares.values(), Fraction(0))
    if total < 1:
        return

    numbers = values.as_text(_lowered(shares, limits, rooms), elastic)
    if total > 1:
        what = "shares and minima" if set(shares) & set(elastic) else "shares"
        message = f"the {what} add up to {percent_text(total)} ({_sum(shares, elastic)}); at most 100% can be given out"
        fix = f"lower them by {percent_text(total - 1)} together, for example to {numbers}"
        yield Violation(_place(list(shares)[-1], "share", elastic), message, fix)
    elif total == 1 and limits:
        size, names = size_text(sum(limits.values())), [values.label(name, elastic) for name in shares]
        message = f"the shares take 100%, so nothing is left for the {size} of {' and '.join(limits)}"
        fix = f"lower the share of {' and '.join(names)}, for example to {numbers}"
        yield Violation(_place(list(limits)[-1], "limit", elastic), message, fix)


def _place(name: str, key: str, elastic: Collection[str]) -> Loc:
    return ("frameworks", name, "min" if name in elastic else key)


def _lowered(shares: Mapping[str, Fraction], limits: Mapping[str, int], rooms: list[int]) -> dict[str, Fraction | int]:
    """The lower shares to suggest if the shares add up to 100% or more, which no larger limit can correct."""
    from memguard._budget import suggestions

    return suggestions.fitting(shares, limits, min(rooms, default=None)) or suggestions.fitting(shares, limits, None)


def _declared_room(scope: Scope) -> int:
    """Limit − reserve in bytes. A reserve of `auto` counts as 0, because its size depends on the GPU."""
    assert isinstance(scope.limit, int)
    return scope.limit - (scope.reserve if isinstance(scope.reserve, int) else 0)


def _room(scope: Scope, auto: int) -> int:
    """Limit − reserve for suggested amounts. A reserve of `auto` counts as `auto` bytes, or as 0 if these would
    leave nothing."""
    room = _declared_room(scope)
    return room - auto if not isinstance(scope.reserve, int) and room > auto else room


def _auto_reserve(frameworks: Mapping[str, Mapping[str, Any]]) -> int:
    """An upper bound of `reserve: auto` on any GPU, for suggested amounts. `policy.auto_reserve` computes the exact
    size for one GPU."""
    communicators = max([n for e in frameworks.values() if type(n := e.get("nccl")) is int and 0 < n < 100], default=0)
    size = CONTEXT + SLACK + sum(SPECS[name].workspace for name in frameworks)
    if communicators:
        size += OVERHEADS["nccl 1"].workspace + (communicators - 1) * OVERHEADS["nccl"].workspace
    if any(entry.get("context") == "own" for entry in frameworks.values()):
        size += OVERHEADS[SECOND_CONTEXT].workspace
    return -(-size // (128 * MIB)) * 128 * MIB


def _fits(scope: Scope, guaranteed: Guaranteed, rooms: list[int], auto: int) -> Iterator[Violation]:
    """Compare amounts in bytes with a limit in bytes. The plan finds misfits that depend on the GPU."""
    loc, own, limit, written_reserve = scope
    at = next((key for key in ("limit", "reserve") if key in own), None)
    if at is None or not isinstance(limit, int):
        return
    shares, limits, elastic = guaranteed
    declared = written_reserve if isinstance(written_reserve, int) else None  # the size of `auto` depends on the GPU
    reserve, keep = declared or 0, auto if declared is None else declared
    total = sum(shares.values(), Fraction(0))
    needed, left = sum(limits.values()), 1 - total
    # Shares whose sum exceeds 100% must be lowered in any case.
    after = {**shares, **limits, **(_lowered(shares, limits, rooms) if total >= 1 else {})}
    spare = 1 - sum((after[name] for name in shares), Fraction(0))
    wanted = math.ceil(sum(after[name] for name in limits) / spare) if spare > 0 else 0
    if reserve >= limit:
        message = f"the reserve of {size_text(reserve)} leaves nothing of the limit of {size_text(limit)}"
        fix = f"lower the reserve or raise the limit to {_about(max(wanted, reserve) + reserve)}"
        yield Violation((*loc, "reserve" if "reserve" in own else at), message, fix)
        return
    if total >= 1:  # `_shares` reports the shares; report only that the sizes do not fit
        if limit - reserve < wanted:
            message = f"this limit of {size_text(limit)} leaves no room for {_sum(limits, elastic)} beside shares"
            yield Violation((*loc, at), message, f"raise the limit to {_about(wanted + keep)}")
        return
    over = math.ceil(needed - left * (limit - reserve))
    if over > 0:
        from memguard._budget import suggestions

        kept = f" − reserve {size_text(reserve)}" if reserve else ""
        message = (
            f"{_sum({**limits, **shares}, elastic)} is {_about(over)} more than this limit of {size_text(limit)}{kept}"
        )
        fix = f"raise the limit to {_about(math.ceil(needed / left) + keep)}"
        fix += ", with room for the reserve" if declared is None else ""
        numbers = values.as_text(suggestions.fitting(shares, limits, min(rooms, default=None)), elastic)
        if limit > keep and numbers:
            over = math.ceil(needed - left * (limit - keep))
            fix += f", or lower the frameworks by {_about(over)}, for example to {numbers}"
        yield Violation((*loc, at), message, fix)


def _pool(frameworks: Mapping[str, Mapping[str, Any]]) -> Iterator[Violation]:
    """Refuse frameworks and keys that `strategy: pool` does not allow."""
    for name, entry in frameworks.items():
        for key in ("min", "max"):
            if key in entry and _joins(name, entry):
                message = (
                    f"{key} has no meaning under 'strategy: pool': the pool is shared already, and each may use all"
                )
                fix = "write one share or limit, or 'strategy: caps'"
                yield Violation(("frameworks", name, key), message, fix, True, True)
                break
    if frameworks and not any(_joins(name, entry) for name, entry in frameworks.items()):
        able = " or ".join(name for name, spec in SPECS.items() if spec.pooled)
        message = f"no framework of this budget can draw from one pool: {', '.join(frameworks)}"
        yield Violation(("strategy",), message, f"name {able}, or write 'strategy: caps'")


def _joins(name: str, entry: Mapping[str, Any]) -> bool:
    """True if the framework uses the shared pool. A framework with its own CUDA context cannot use it."""
    return bool(SPECS[name].pooled) and entry.get("context") != "own"


def _misplaced(data: Mapping[str, Any]) -> Iterator[Violation]:
    """Find `device` written in place of `devices`, or the reverse, by the nested keys."""
    device, devices = data.get("device"), data.get("devices")
    own = {"limit", "reserve"}
    if isinstance(devices, Mapping) and (keys := own & set(devices)):
        message = "names single GPUs, by UUID, number or name"
        if keys == set(devices) and "device" not in data:
            yield Violation(
                ("devices",), f"{message}; what holds for all is in device", "did you mean 'device'?", True, True
            )
        else:
            for key in sorted(keys, key=list(devices).index):
                yield Violation(("devices", key), f"{key} is no GPU", "move it below 'device:'", True, True)
    if isinstance(device, Mapping) and device and not own & set(device) and "devices" not in data:
        gpus = all(isinstance(entry, Mapping) and set(entry) <= own for entry in device.values())
        if gpus and all(_read(values.device_key, key) is not None for key in device):
            message = "holds for all GPUs; what differs on single ones is in devices"
            yield Violation(("device",), message, "did you mean 'devices'?", True, True)


def _same_device(devices: Mapping[str, Any]) -> Iterator[Violation]:
    seen: dict[str, object] = {}
    for key in devices:
        same = _read(values.device_key, key)
        if same is not None and same in seen:
            message = f"the same GPU as {values.excerpt(seen[same])} above"
            yield Violation(("devices", key), message, "keep one of them", True)
        elif same is not None:
            seen[same] = key


def _levels(monitor: Mapping[str, Any], budget: Checked | None) -> Iterator[Violation]:
    if budget is not None and budget.monitor is not None:
        levels: tuple[Fraction | None, Fraction | None] = budget.monitor.warn, budget.monitor.critical
    else:
        written = (monitor.get("warn", values.WARN), monitor.get("critical", values.CRITICAL))
        levels = _read(values.percent, written[0]), _read(values.percent, written[1])
    warn, critical = levels
    if warn is None or critical is None or warn < critical:
        return
    at = [key for key in monitor if key in ("warn", "critical")][-1]
    first, second = (
        f"{name} at {percent_text(part)}{'' if name in monitor else ' by default'}"
        for name, part in (("warn", warn), ("critical", critical))
    )
    lower = Fraction(85, 100) if critical > Fraction(85, 100) else critical * 9 / 10
    higher = Fraction(95, 100) if warn < Fraction(95, 100) else (warn + 1) / 2
    if at == "warn" or warn == 1:
        fix = f"write a warn below {percent_text(critical)}, for example 'warn: {percent_text(lower)}'"
    else:
        fix = f"raise critical, or lower warn, for example 'critical: {percent_text(higher)}'"
    yield Violation(("monitor", at), f"{first} must come before {second}", fix)


def _metrics(metrics: Mapping[str, Any]) -> Iterator[Violation]:
    """Check that `metrics` has an exporter, unless it has an unknown key: pydantic reports this key, which may be a
    misspelt exporter."""
    exporters = {key: value for key, value in metrics.items() if key != "opentelemetry" or value is not False}
    if set(exporters) <= {"job"}:
        from memguard._budget import suggestions

        both = {"prometheus": 9477, **exporters}
        fix = f"write 'metrics: {suggestions.flow(both)}' or 'metrics: {{opentelemetry: true}}'"
        yield Violation(("metrics",), "nobody gets them: it names neither prometheus nor opentelemetry", fix, True)


def _lease(device: Mapping[str, Any]) -> Iterator[Violation]:
    """Check that `wait` comes with a lease, unless `device` has an unknown key: pydantic reports this key, which may be
    a misspelt `lease`."""
    waits = [key for key in ("wait", "on_wait") if key in device and device[key] != "wait"]
    if not waits or not set(device) <= {"limit", "reserve", "lease", "wait", "on_wait"}:
        return
    more: dict[str, Any]
    if device.get("lease", False) is False:
        text, more = f"{waits[0]} is for a lease, and this budget asks for none", {"lease": True}
    elif "on_wait" in waits and "wait" not in device:
        text, more = "nobody is suspended for a lease that is not waited for", {"wait": "10min"}
    else:
        return
    from memguard._budget import suggestions

    fix = f"write 'device: {suggestions.flow({**device, **more})}', or remove {' and '.join(waits)}"
    yield Violation(("device",), text, fix, True)


def _repeated(loc: Loc, names: list[object]) -> Iterator[Violation]:
    for index, name in enumerate(names):
        if isinstance(name, str) and name in names[:index]:
            yield Violation((*loc, index), f"{values.excerpt(name)} is named twice", "keep one of them")


def _sum(parts: Mapping[str, Fraction | int], elastic: Collection[str]) -> str:

    return values.as_text(parts, elastic, " + ")


def _about(size: int) -> str:
    exact = size_text(size)
    return exact if exact.endswith(("MiB", "GiB", "TiB")) else f"{-(-size // 2**20)}MiB"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _read(read: Callable[[Any], T], value: object) -> T | None:
    try:
        return None if value is None else read(value)
    except ValueError:  # includes pydantic's ValidationError
        return None
