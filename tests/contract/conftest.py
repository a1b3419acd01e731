"""For all tests of the models of frameworks."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def only_their_own_objects_are_collected() -> Iterator[None]:
    """CuPy's pool collects garbage before it refuses, and its model does too: thousands of times. Where tests before
    these have imported the real frameworks into the process, each collection would look at their million objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
