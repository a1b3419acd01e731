"""A browser for the tests of what it shows: Debian's chromium, headless, without a network."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # the recorded runs

from browser import Browser


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    browser = Browser()
    try:
        yield browser
    finally:
        browser.quit()


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    chromium.reset()
    return chromium
