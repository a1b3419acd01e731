"""Bars of characters. Which part is which can be told without colour. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memguard._tools.top.texts import cell_width, cut


class Signs(NamedTuple):
    """One character each. `unknown` fills what may be held or not."""

    used: str
    cached: str
    unknown: str
    free: str
    cap: str
    rule: str


BLOCKS = Signs("█", "▒", "?", "·", "│", "─")
ASCII = Signs("#", "=", "?", ".", "|", "-")


def cells(sizes: Sequence[int], total: int, width: int) -> list[int]:
    """How many of `width` cells each size gets, of a whole of `total`. What is above 0 gets one, while there are cells.

    The sum is at most `width`.
    """
    if total <= 0 or width <= 0:
        return [0] * len(sizes)
    wanted = [0 if size <= 0 else max(1, min(round(size * width / total), width)) for size in sizes]
    while sum(wanted) > width:  # taken from the widest: the narrow ones would vanish
        wanted[wanted.index(max(wanted))] -= 1
    return wanted


class Piece(NamedTuple):
    """Some cells of a bar. `role`: used, cached, unknown, free, cap, or for the card's bar the name of what it is."""

    text: str
    role: str


def framework_bar(
    held: int | None, in_use: int | None, at_least: int | None, cap: int | None, scale: int | None, width: int,
    signs: Signs,
) -> list[Piece]:  # fmt: skip
    """One framework against its cap: live arrays, what is cached, the room that is left, and the cap's mark at its end.

    Without a cap the bar goes up to `scale` and has no mark. What is held above the cap lies behind the mark.
    """
    top = cap or scale
    if not top or width < 2:
        return (
            [Piece(signs.unknown * max(width, 0), "unknown")] if top is None else [Piece(" " * max(width, 0), "free")]
        )
    room = width - 1 if cap else width
    known = held if held is not None else max(at_least or 0, in_use or 0)
    whole = max(top, known)
    used, cached = _parts(held, in_use, at_least)
    if held is None and not used + cached and in_use is None:
        return _marked([Piece(signs.unknown * room, "unknown")], room, signs, cap)
    first, second = cells([used, cached], whole, room)
    rest = room - first - second
    mid = signs.unknown if held is not None and in_use is None else signs.cached
    pieces = [
        Piece(signs.used * first, "used"),
        Piece(mid * second, "unknown" if mid == signs.unknown else "cached"),
        Piece(signs.unknown * rest, "unknown") if held is None else Piece(signs.free * rest, "free"),
    ]
    at = room if known <= top else max(1, round(top * room / whole))
    return _marked(pieces, at, signs, cap)


def _parts(held: int | None, in_use: int | None, at_least: int | None) -> tuple[int, int]:
    """What live arrays occupy, and what is held beside that."""
    if held is None:
        return in_use or 0, max((at_least or 0) - (in_use or 0), 0)
    if in_use is None:
        return 0, held
    return min(in_use, held), max(held - in_use, 0)


def _marked(pieces: Sequence[Piece], at: int, signs: Signs, cap: int | None) -> list[Piece]:
    """With the cap's mark before cell `at`."""
    if not cap:
        return [piece for piece in pieces if piece.text]
    found: list[Piece] = []
    for piece in pieces:
        found += [Piece(piece.text[: max(at, 0)], piece.role)]
        if 0 <= at < len(piece.text):
            found += [Piece(signs.cap, "cap"), Piece(piece.text[at:], piece.role)]
            at = -1
        elif at >= 0:
            at -= len(piece.text)
        else:
            found[-1] = piece
    if at >= 0:
        found.append(Piece(signs.cap, "cap"))
    return [piece for piece in found if piece.text]


def card_bar(
    sizes: Sequence[tuple[str, int]], total: int, width: int, signs: Signs, fills: Mapping[str, str], rest: str = "free"
) -> list[Piece]:
    """A whole card: each part with its name in it, as far as there is room.

    `fills`: other characters than `used`. `rest`, the role of what is left: `free`, or `unknown`.
    """
    counts = cells([size for _, size in sizes], total, width)
    pieces = []
    for (name, _), count in zip(sizes, counts, strict=True):
        if count:
            label = cut(name, count - 1 if count > 3 else name not in fills, "")
            pieces.append(Piece(label + fills.get(name, signs.used) * (count - cell_width(label)), name))
    left = width - sum(counts)
    sign = signs.unknown if rest == "unknown" else signs.free
    return [*pieces, Piece(sign * left, rest)] if left else pieces
