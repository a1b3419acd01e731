"""Timelines: what the monitor saw of one process, as JSON lines on disk. The format is in `docs/timeline.md`.

`Writer` writes one, bounded and crash-safe; `load_timeline` reads one in memory that does not depend on its length.
"""

from __future__ import annotations

from memguard._timeline.format import Dropped as Dropped
from memguard._timeline.format import Header as Header
from memguard._timeline.format import Oom as Oom
from memguard._timeline.reader import Timeline as Timeline
from memguard._timeline.reader import load_timeline as load_timeline
from memguard._timeline.writer import Writer as Writer
from memguard._timeline.writer import rank_of as rank_of
