"""Which shares and limits would fit, where those of a budget do not: what an error tells the user to write. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import floor

from memguard._units import GRANULE

HALF = Fraction(1, 2)


def fitting(shares: Mapping[str, Fraction], limits: Mapping[str, int], room: int | None) -> dict[str, Fraction | int]:
    """The parts that fit `room` bytes (None: unknown), in proportion to those that were asked for; only what changes.

    Shares are lowered where they are too large by themselves, else limits; both to one half where one alone would not
    do. With an unknown room, shares leave a tenth for limits.
    """
    wanted, sizes = sum(shares.values(), Fraction(0)), sum(limits.values())
    if not limits or not shares:
        target, bytes_left = Fraction(1), room
    elif room is None:
        target, bytes_left = min(wanted, Fraction(9, 10)), None
    elif wanted < 1 and (1 - wanted) * room >= len(limits) * GRANULE:
        target, bytes_left = wanted, floor((1 - wanted) * room)
    elif sizes <= room * HALF:
        target, bytes_left = 1 - Fraction(sizes, room), sizes
    else:
        target, bytes_left = HALF, room // 2
    found: dict[str, Fraction | int] = {}
    if wanted > target:
        found |= _parts(shares, target / wanted)
    if bytes_left is not None and sizes > bytes_left:
        for name, size in sorted(limits.items(), key=lambda item: item[1]):  # the smallest need their least first
            lowered = max(size * bytes_left // sizes // GRANULE, 1) * GRANULE
            found[name], bytes_left, sizes = lowered, max(bytes_left - lowered, 0), max(sizes - size, 1)
    return {name: found[name] for name in (*shares, *limits) if name in found}


def _parts(shares: Mapping[str, Fraction], scale: Fraction) -> dict[str, Fraction]:
    """Each share times `scale`, rounded down to tenths of a per cent, or as finely as the smallest needs."""
    for digits in (3, 6, 12, 18):
        steps = 10**digits
        found = {name: Fraction(floor(share * scale * steps), steps) for name, share in shares.items()}
        if all(found.values()):
            return found
    return dict(shares)


def as_text(parts: Mapping[str, Fraction | int]) -> str:
    """`torch 50%, jax 4GiB`, as a message names them."""
    from memguard._config.values import text

    return ", ".join(f"{name} {text(part)}" for name, part in parts.items())
