"""Whether this process is off its GPUs now: what every layer asks before it calls CUDA or NVML.

While a process is suspended, NVML's calls wait, a synchronize or an event query ends the process (SIGSEGV; driver
580.159, H200), and CUDA's allocations wait. So nothing of memguard's may call them then. `_suspend` sets this; the
ledger, the monitor, trims and exit hooks read it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Off:
    """Off the GPUs since `since` (Unix time). `bytes` left each GPU (UUID). While `moving`, it leaves or comes back."""

    bytes: dict[str, int]
    since: float
    moving: bool = False


now: Off | None = None
"""Set before the first gate closes, None again after the last one opened. One assignment each: readers take no lock."""
