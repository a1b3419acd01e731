"""How many bytes left each GPU: from what NVML said before and after. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from memguard._base.units import GIB, MIB
from memguard._node.suspend.driver.channel import Card

_UNLISTED = GIB
"""The most that a process may have beside what NVML lists for it."""
_NOISE = 16 * MIB
"""Where NVML does not list the process: a smaller change of a GPU's used bytes is another's."""


def left(pid: int, before: Mapping[str, Card] | None, after: Mapping[str, Card] | None) -> dict[str, int] | None:
    """Bytes by GPU (UUID) that the process needs to come back; None if nobody knows.

    What the GPU's used bytes fell by counts, less what other processes gave back meanwhile: a process has a little more
    than NVML lists for it. Never less than what is listed.
    """
    if before is None:
        return None
    listed = any(pid in card.processes for card in before.values())
    found: dict[str, int] = {}
    for uuid, card in before.items():
        fell = _fell(pid, card, (after or {}).get(uuid))
        own = card.processes.get(pid, 0 if listed else None)
        if own is not None:
            size = max(own, min(fell or 0, own + _UNLISTED)) if own else 0
        elif fell is None:
            return None
        else:
            size = fell if pid in card.processes or fell >= _NOISE else 0
        if size > 0:
            found[uuid] = size
    return found


def _fell(pid: int, before: Card, after: Card | None) -> int | None:
    if after is None or before.used is None or after.used is None:
        return None
    others = _others(pid, before) - _others(pid, after)
    return before.used - after.used - others


def _others(pid: int, card: Card) -> int:
    return sum(size or 0 for other, size in card.processes.items() if other != pid)
