"""For all tests of the models of frameworks."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_collections(only_own_objects_are_collected: None) -> None:
    """CuPy's pool collects garbage before it refuses, and its model does too: thousands of times."""
