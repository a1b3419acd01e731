"""All that is true of one framework is in its folder, and what reads the folders finds them by discovery."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import memguard
from memguard._frameworks import specs
from memguard._frameworks.specs import SPECS

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


ALLOWED = {
    "_base/framework_spec.py": "`FrameworkName`: type checkers read no rows; tests/contract compares the two",
    "_tools/activation/_memguard_environment.py": "runs before memguard can be imported; a test compares its list",
    "_tools/suggest/record.py": "runs in Pythons that import no framework, and reads no rows there; a test compares",
    "_tools/doctor/checks/": "each check names the framework whose fault it knows, as its page in docs/doctor does",
    "_tools/doctor/derived.py": "what several checks ask about one framework: which is a build for CPUs, for example",
    "_tools/doctor/wording.py": "the commands that install one framework or another",
    "_tools/doctor/collect/gather.py": "the pair of frameworks whose order of import the doctor tries",
    "_oom/classify.py": "RMM has no row: a budget does not name it, and its errors are among those of libraries",
    "_devices/nvml.py": "a PyTorch for ROCm is a reason why there is no NVIDIA GPU",
    "exchange/pycuda_context.py": "a public function about PyCUDA's contexts alone",
    "cli/support/program.py": "the launchers that come with PyTorch",
    "integrations/torchrun.py": "the launcher that comes with PyTorch",
}
"""The modules outside the folders that name a framework, and why."""


def named(path: Path) -> set[str]:
    """The strings of a module that are a framework's name, or that of one of its modules. Docstrings are none."""
    names = {*SPECS, "rmm"}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = {id(one.body[0].value) for one in ast.walk(tree) if isinstance(one, documented) and one.body
             and isinstance(one.body[0], ast.Expr)}  # fmt: skip
    return {
        one.value
        for one in ast.walk(tree)
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in texts
        if one.value.partition(".")[0] in names
    }


def test_no_module_outside_its_folder_knows_a_framework_by_name() -> None:
    folders = [FOLDERS / name for name in (*SPECS, "rmm", "simulated")]
    modules = [path for path in PACKAGE.rglob("*.py") if not any(path.is_relative_to(folder) for folder in folders)]
    assert len(modules) > 300
    found = {path.relative_to(PACKAGE).as_posix() for path in modules if named(path)}
    assert sorted(one for one in found if not one.startswith(tuple(ALLOWED))) == []
    assert [one for one in ALLOWED if not any(path.startswith(one) for path in found)] == [], "no longer needed"


def test_names_are_found_in_code_alone(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text('"""torch"""\nx = {"jax": 1, "torch.cuda": 2, "torchvision": 3, "no torch": 4}\n')
    assert named(tmp_path / "one.py") == {"jax", "torch.cuda"}
