"""Which tests of `tests/gpu` come first under pytest-xdist, and what is told of one that fails."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.long  # no version of what is installed changes what only developers run

GPU = Path(__file__).parents[1] / "gpu"


@pytest.fixture(scope="module")
def conftest() -> ModuleType:
    sys.path.append(str(GPU))
    try:
        spec = importlib.util.spec_from_file_location("conftest_of_gpu", GPU / "conftest.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(GPU))


class Item:
    def __init__(self, name: str) -> None:
        self.name, self.originalname = name, name.partition("[")[0]


def test_each_long_test_is_there(conftest: ModuleType) -> None:
    text = "".join(path.read_text() for path in GPU.glob("test_*.py"))
    there = set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))
    assert {name.partition("[")[0] for name in conftest.LONG} <= there


def test_the_long_ones_take_turns_with_the_others_and_none_is_lost(conftest: ModuleType) -> None:
    names = ["test_a", "test_b", "test_out_of_memory[x]", "test_c", "test_out_of_memory[generate]", "test_d"]
    names.append("test_six_frameworks_stop_at_their_caps_while_the_others_are_full")
    found = [one.name for one in conftest.long_first([Item(name) for name in names])]
    assert found == [names[6], "test_a", names[4], "test_b", names[2], "test_c", "test_d"]


@pytest.mark.parametrize(
    ("message", "short"),
    [
        ("", ""), ("RuntimeError: one", "RuntimeError: one"), ("assert [1] == [2]\n  At index 0", "assert [1] == [2]"),
        ("Error: rc 1\nout\n  File x\nTypeError: it\nassert 1 == 0\n + where", "Error: rc 1 … TypeError: it"),
    ],
)  # fmt: skip
def test_an_error_in_short(conftest: ModuleType, message: str, short: str) -> None:
    assert conftest.in_short(message) == short
