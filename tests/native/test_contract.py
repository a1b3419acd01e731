"""The contract suite over the real torch and TensorFlow; `tests/contract` runs it over models of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from real_subjects import CASES, SUBJECTS

Run = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("module", SUBJECTS)
def test_the_contract(module: str, case: str, request: pytest.FixtureRequest) -> None:
    beside: Run = request.getfixturevalue(f"with_{module}")
    assert beside(f"from real_subjects import check\ncheck({module!r}, {case!r})") == {}
