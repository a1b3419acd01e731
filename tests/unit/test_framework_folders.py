"""All that is true of one framework is in its folder, and what reads the folders finds them by discovery."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import memguard
from memguard._base import specs
from memguard._base.specs import SPECS

PACKAGE = Path(memguard.__file__).parent
FOLDERS = PACKAGE / "_frameworks"


def test_each_row_is_in_the_folder_of_its_name() -> None:
    assert {name: Path(path).parent.name for name, path in specs.files("spec").items()} == {n: n for n in SPECS}
    assert [module.SPEC for module in specs.modules("spec")] == list(SPECS.values())


def test_the_rows_are_in_one_order_that_no_folder_can_upset() -> None:
    places = [row.place for row in SPECS.values()]
    assert places == sorted(set(places)), "no two rows have one place"


@pytest.mark.parametrize("name", SPECS)
def test_a_row_is_data_alone(name: str) -> None:
    """The table of rows is in `_base`, below `_frameworks`: so a row imports nothing above `_base`."""
    tree = ast.parse((FOLDERS / name / "spec.py").read_text(encoding="utf-8"))
    imported = [one.module or "" for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)]
    imported += [alias.name for one in ast.walk(tree) if isinstance(one, ast.Import) for alias in one.names]
    assert {one for one in imported if one.startswith("memguard")} <= {
        "memguard._base.framework_spec",
        "memguard._base.units",
    }
    assert ast.parse((FOLDERS / name / "__init__.py").read_text(encoding="utf-8")).body[1:] == [], "a docstring only"
