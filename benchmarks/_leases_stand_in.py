"""A card for the rehearsal of `leases.py`: which process has how many bytes, in one file.

It measures nothing: it is there to try the benchmark's own code without a GPU.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from _run import GIB, MIB

TOTAL = 139 * GIB
CONTEXT = 600 * MIB


class Card:
    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / "card.json"

    def take(self, size: int) -> int:
        """MemoryError if the card has not so much left."""
        own = str(os.getpid())
        with open(self._path, "a+", encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            found = self._living(json.loads(file.read() or "{}"))
            found[own] = found.get(own, CONTEXT) + size
            if sum(found.values()) > TOTAL:
                raise MemoryError("out of memory (a stand-in)")
            file.truncate(0)
            file.write(json.dumps(found))
        return size

    def listed(self) -> dict[int, int]:
        """Bytes by PID, as NVML lists them."""
        with open(self._path, "a+", encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            file.seek(0)
            return {int(pid): size for pid, size in self._living(json.loads(file.read() or "{}")).items()}

    @staticmethod
    def _living(found: dict[str, int]) -> dict[str, int]:
        return {pid: size for pid, size in found.items() if Path(f"/proc/{pid}/stat").exists() and not _ended(pid)}


def leased(folder: Path) -> dict[int, int]:
    """Bytes by PID of those that hold a lease: in a rehearsal of the turns they are the ones on the card."""
    from memguard._leases.store import Store

    claims = Store(str(folder / "memguard")).claims()
    return {one.pid: sum(part.bytes for part in one.parts.values()) for one in claims if one.state == "held"}


def _ended(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
