"""Which shares and limits would fit, where those of a budget do not: what an error tells the user to write. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fractions import Fraction
from math import floor

from memguard._units import GRANULE

HALF = Fraction(1, 2)


def fitting(shares: Mapping[str, Fraction], limits: Mapping[str, int], room: int | None) -> dict[str, Fraction | int]:
    """The parts that fit `room` bytes (None: unknown), in proportion to those that were asked for; only what changes.

    Shares are lowered where they are too large by themselves, else limits; both to one half where one alone would not
    do, or to what the smallest limits leave. With an unknown room, shares leave a tenth for limits. Empty if nothing
    fits: no limit can be less than `GRANULE`, and no share is lowered to less than that.
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
    elif sizes <= room * HALF:
        target, bytes_left = 1 - Fraction(sizes, room), sizes
    else:
        bytes_left = max(room // 2, least)
        target = min(HALF, 1 - Fraction(bytes_left, room))
    found: dict[str, Fraction | int] = {}
    if wanted > target:
        lowered = _parts(shares, target / wanted)
        if room is not None and any(part * room < GRANULE <= shares[name] * room for name, part in lowered.items()):
            return {}
        found |= lowered
    if bytes_left is not None and sizes > bytes_left:
        for name, size in sorted(limits.items(), key=lambda item: item[1]):  # the smallest need their least first
            part = min(max(size * bytes_left // sizes // GRANULE, 1) * GRANULE, size)
            found[name], bytes_left, sizes = part, max(bytes_left - part, 0), max(sizes - size, 1)
    asked = {**shares, **limits}
    return {name: found[name] for name in asked if name in found and found[name] != asked[name]}


def _parts(shares: Mapping[str, Fraction], scale: Fraction) -> dict[str, Fraction]:
    """Each share times `scale`, rounded down to tenths of a per cent, or as finely as the smallest needs."""
    for digits in (3, 6, 12, 18):
        steps = 10**digits
        found = {name: Fraction(floor(share * scale * steps), steps) for name, share in shares.items()}
        if all(found.values()):
            return found
    return dict(shares)


def as_text(parts: Mapping[str, Fraction | int], elastic: Collection[str] = (), between: str = ", ") -> str:
    """`torch 50%, jax 4GiB, cupy.min 5%`, as a message names them: of those in `elastic` the part is their min."""
    from memguard._config.values import text

    return between.join(f"{label(name, elastic)} {text(part)}" for name, part in parts.items())


def label(name: str, elastic: Collection[str]) -> str:
    """A framework whose share, limit or min is meant."""
    return f"{name}.min" if name in elastic else name
