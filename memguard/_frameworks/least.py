"""Which idle blocks go back to the driver, where not all of them have to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from memguard._frameworks.driver_pages import DriverPages


def least(sizes: Sequence[int], needed: int) -> list[int] | None:
    """Positions of blocks that have `needed` bytes together, and none that could stay; None if all have fewer.

    Few blocks rather than the very fewest bytes: giving back costs by the block. So the largest go, and last the
    smallest one that is enough. What is given beyond `needed` is less than the smallest of them.
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
    kept = []
    for one in chosen:  # the largest first
        if sizes[one] <= -missing:
            missing += sizes[one]
        else:
            kept.append(one)
    return kept


def addresses(pages: DriverPages, blocks: Sequence[tuple[int, int]], needed: int) -> frozenset[int] | None:
    """Those of `blocks` (address and size, all idle) that have to go so that `needed` bytes go back to the driver.

    None if all have to. A slab goes with all pieces in it or not at all.
    """
    parts = pages.parts(blocks)
    chosen = least([size for size, _ in parts], needed)
    return None if chosen is None else frozenset(address for one in chosen for address in parts[one][1])
