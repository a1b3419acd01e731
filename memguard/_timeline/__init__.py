"""Timelines: the monitor's samples, events and out-of-memory reports of one process, as JSON lines on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memguard._timeline.format import Dropped as Dropped
from memguard._timeline.format import Header as Header
from memguard._timeline.format import Oom as Oom
from memguard._timeline.writer import Writer as Writer

if TYPE_CHECKING:
    from memguard._timeline.reader import Timeline as Timeline
    from memguard._timeline.reader import load_timeline as load_timeline
else:  # import the reader on first use, because a program that only writes a timeline does not need it

    def __getattr__(name: str) -> object:
        if name not in ("Timeline", "load_timeline"):
            raise AttributeError(f"module 'memguard._timeline' has no attribute {name!r}")
        from memguard._timeline import reader

        return getattr(reader, name)
