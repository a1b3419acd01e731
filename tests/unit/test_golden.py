"""What users see, and the order of the driver's calls: transcripts in tests/golden, run again and compared.

`UPDATE_GOLDEN=1 pytest tests/unit/test_golden.py` writes them anew; `git diff` then shows what changes for users.
A new line of a transcript is written without its output, which the update adds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import flows

pytestmark = [pytest.mark.long, pytest.mark.time_limit(300)]


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return flows.build(tmp_path_factory.mktemp("stubs"))


@pytest.mark.parametrize("name", flows.NAMES)
def test_users_see_what_they_saw(name: str, stubs: Path, tmp_path: Path) -> None:
    golden = flows.GOLDEN / f"{name}.txt"
    written = flows.produce(name, tmp_path, stubs)
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(written, encoding="utf-8")
    assert written == golden.read_text(encoding="utf-8")


@pytest.fixture
def logger() -> Iterator[None]:
    """A transcript listens to memguard's log; afterwards the logger is as it was."""
    log = logging.getLogger("memguard")
    handlers, level = [*log.handlers], log.level
    yield
    log.handlers[:] = handlers
    log.setLevel(level)


@pytest.mark.usefixtures("logger")
def test_what_looks_like_a_statement_is_escaped() -> None:
    text = "About it.\n\n>>> print('$ memguard ps')\nold output\n>>> for _ in 'ab':\n...     print(1)\n...\n"
    shown = (
        "About it.\n\n>>> print('$ memguard ps')\n| $ memguard ps\n\n>>> for _ in 'ab':\n...     print(1)\n...\n1\n1\n"
    )
    assert flows.Transcript().run(text) == shown
    assert flows.Transcript().run(shown) == shown
