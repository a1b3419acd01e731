"""The tables of gates of every framework that has one, those included that have no budget."""

from __future__ import annotations

from memguard._frameworks import specs
from memguard._frameworks.optional_modules import Gates


def tables() -> list[Gates]:
    """Each table: the `GATES` of each `gates.py` in a folder of `_frameworks/`. They are data."""
    return [table for module in [*specs.modules("gates")] for table in module.GATES]
