"""Timelines: what the monitor saw of one process, as JSON lines on disk. The format is in `docs/timeline.md`.

`Writer` writes one, bounded and crash-safe; `load_timeline` reads one in memory that does not depend on its length.
"""

from __future__ import annotations

from memguard.timeline._reader import Timeline as Timeline
from memguard.timeline._reader import load_timeline as load_timeline
from memguard.timeline._records import Dropped as Dropped
from memguard.timeline._records import Header as Header
from memguard.timeline._records import Oom as Oom
from memguard.timeline._writer import Writer as Writer
from memguard.timeline._writer import rank_of as rank_of
