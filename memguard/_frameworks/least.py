"""Selects the idle blocks to return to the driver when a part of them suffices."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from memguard._frameworks.driver_pages import DriverPages


def least(sizes: Sequence[int], needed: int) -> list[int] | None:
    """Positions of blocks with at least `needed` bytes together, without a superfluous one; None if all have fewer.

    It minimises the blocks rather than the bytes, as each block costs time: the largest blocks, and as the last one the
    smallest that suffices. The excess over `needed` is less than the smallest selected block.
    """
    if sum(sizes) < needed:
        return None
    rising = sorted(range(len(sizes)), key=sizes.__getitem__)
    chosen: list[int] = []
    missing = needed
    while missing > 0:
        enough = bisect_left(rising, missing, key=sizes.__getitem__)
        chosen.append(rising.pop(min(enough, len(rising) - 1)))
        missing -= sizes[chosen[-1]]
    return chosen


def addresses(pages: DriverPages, blocks: Sequence[tuple[int, int]], needed: int) -> frozenset[int] | None:
    """The addresses of `blocks` (address and size, all idle) to free so that the driver gets `needed` bytes back.

    None if that takes all. The pieces of a slab are freed together or not at all.
    """
    parts = pages.parts(blocks)
    chosen = least([size for size, _ in parts], needed)
    return None if chosen is None else frozenset(address for one in chosen for address in parts[one][1])
