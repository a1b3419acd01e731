"""Timelines: the monitor's samples, events and out-of-memory reports of one process, as JSON lines on disk."""

from __future__ import annotations

from memguard._timeline.format import Dropped as Dropped
from memguard._timeline.format import Header as Header
from memguard._timeline.format import Oom as Oom
from memguard._timeline.reader import Timeline as Timeline
from memguard._timeline.reader import load_timeline as load_timeline
from memguard._timeline.writer import Writer as Writer
from memguard._timeline.writer import rank_of as rank_of
