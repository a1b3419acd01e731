"""What the driver's memory pools give back when they are trimmed. Measured on an H200."""

from __future__ import annotations

from memguard._base.units import MIB

PIECE = 32 * MIB
"""The driver's pools grow in such steps (measured), in bytes."""


def returned_by_trim(reserved: int, used: int) -> int | None:
    """What trimming a driver pool that holds `reserved` bytes, `used` of them in live blocks, gives back to the driver.

    Whole pieces come back, those with a live block stay, and the driver tells nobody which pieces those are. So it is
    known where nothing is live, and where what idles is less than a piece; else None.
    """
    idle = reserved - used
    if used == 0:
        return reserved
    return 0 if idle < PIECE else None
