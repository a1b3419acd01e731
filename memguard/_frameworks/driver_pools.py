"""The bytes that a trim of the driver's memory pools returns, as measured on an H200."""

from __future__ import annotations

from memguard._base.units import MIB

PIECE = 32 * MIB
"""Bytes by which the driver's pools grow (measured)."""


def returned_by_trim(reserved: int, used: int) -> int | None:
    """The bytes that a trim returns from a driver pool with `reserved` bytes, `used` of them in live blocks.

    The driver returns whole pieces without a live block, and does not report which pieces those are. So the result is
    known only if no block is live, or if the idle bytes are less than a piece; else None.
    """
    idle = reserved - used
    if used == 0:
        return reserved
    return 0 if idle < PIECE else None
