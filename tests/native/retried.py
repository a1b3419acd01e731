"""For programs of these tests: what of a failed run is alive when the next one begins."""

from __future__ import annotations

import gc
import weakref
from typing import Any

known: list[weakref.ref[Any]] = []
left: list[int] = []
"""How many of the arrays that the runs before have made are alive, at the beginning of each run."""


def begin() -> bool:
    """Whether this is the first run. From now on nothing is collected: only references count."""
    if not left:
        gc.collect()
        gc.disable()
        gc.collect = lambda *generation: 0  # type: ignore[assignment]
    left.append(sum(one() is not None for one in known))
    return len(left) == 1


def know(array: Any) -> Any:
    known.append(weakref.ref(array))
    return array
