"""A framework whose memory lies in sessions, each with an arena and a limit of its own, as ONNX Runtime's do.

An arena keeps what is freed until `shrink`. Nothing limits the sessions together.
"""

from __future__ import annotations

from collections.abc import Callable


class Full(Exception):
    """A session's limit is reached."""


class Session:
    """`limit` in bytes; None: none."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.held, self.used = limit, 0, 0

    def run(self, size: int) -> Buffer:
        grow = max(self.used + size - self.held, 0)
        if self.limit is not None and self.held + grow > self.limit:
            raise Full(f"session is full: {size} bytes do not fit into its arena")
        driver(grow)
        self.held += grow
        self.used += size
        return Buffer(self, size)

    def shrink(self) -> None:
        driver(self.used - self.held)
        self.held = self.used

    def close(self) -> None:
        self.used = 0
        self.shrink()


class Buffer:
    def __init__(self, session: Session, size: int) -> None:
        self.session, self.size = session, size

    def __del__(self) -> None:
        self.session.used = max(self.session.used - self.size, 0)


def _nothing(size: int) -> None:
    """Replaced by the test."""


driver: Callable[[int], None] = _nothing
