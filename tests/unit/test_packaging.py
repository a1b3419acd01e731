"""What is promised about the package as a whole, and about the rules its tests run under."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import inner_pytest
import pytest

import memguard

PACKAGE = Path(memguard.__file__).parent
ROOT = Path(__file__).parents[2]
THEIRS = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]),
}
"""An environment in which a copy of tests/conftest.py finds what it imports."""


def python(code: str) -> subprocess.CompletedProcess[str]:
    environ = dict(os.environ)
    if PACKAGE.parent.name != "site-packages":
        environ["PYTHONPATH"] = str(PACKAGE.parent)
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)


def test_all_is_the_sorted_public_names() -> None:
    assert memguard.__all__ == sorted(memguard.__all__)
    public = [name for name in dir(memguard) if not name.startswith("_")]
    assert public == sorted([*memguard.__all__, "errors", "types"])  # not of `import *`: see test_public.py


def test_every_public_name_can_be_had() -> None:
    for name in memguard.__all__:
        found = getattr(memguard, name)
        assert found.__name__ == "memguard.exchange" if name == "exchange" else callable(found), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        _ = memguard.initialise


def test_every_error_that_a_program_may_have_to_catch_is_public() -> None:
    """The others are in memguard.errors: of tools, which read their files, and of `memguard.exchange`."""
    from memguard import errors

    found = [value for value in vars(errors).values() if isinstance(value, type)]
    raised = {e.__name__ for e in found if issubclass(e, errors.MemguardError) and not e.__subclasses__()}
    assert len(raised) > 5
    elsewhere = {"CannotShare", "FactsError", "TimelineError", "TraceError"}  # of `exchange`, and of tools
    assert raised - elsewhere | {"MemguardError"} <= set(memguard.__all__) and elsewhere <= raised


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in project["project"]["dynamic"] and "version" not in project["project"]
    assert project["tool"]["hatch"]["version"] == {"path": "memguard/__init__.py"}
    found = re.findall(r'^__version__ = "(.+)"$', (PACKAGE / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert found == [memguard.__version__]


def test_every_locked_version_is_a_version_and_nothing_else() -> None:
    """No address or path, which would be true of one machine; each group of pyproject.toml is locked."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lines = (ROOT / "requirements" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[\w.]+( ; .+)?", line)] == []
    locked = {line.partition("==")[0] for line in lines}
    for name, group in {**project["dependency-groups"], "": project["project"]["dependencies"]}.items():
        asked = {re.split(r"[\[<>=]", one)[0].lower().replace("_", "-") for one in group if isinstance(one, str)}
        assert asked <= locked, (name, "run scripts/lock")


def test_the_installed_version_is_the_packages() -> None:
    """Nothing to compare where the checkout is used without being installed."""
    installed = {d.version for d in importlib.metadata.distributions(name="memguard-gpu")}
    assert installed <= {memguard.__version__}


def test_the_installed_readme_has_no_link_into_the_repository_and_no_picture() -> None:
    """What a package index shows. Nothing to look at where the checkout is used without being installed."""
    for found in importlib.metadata.distributions(name="memguard-gpu"):
        if not str(found.locate_file("")).startswith(sys.prefix):  # made by another test
            continue
        readme = str(found.metadata.get_payload())  # type: ignore[attr-defined]
        assert "memguard" in readme
        links = re.findall(r"\]\(([^)\s]+)|(?:src|href)=[\"']([^\"']+)", readme)
        assert [link for pair in links for link in pair if link and not link.startswith("https://")] == []
        assert "![" not in readme and "<img" not in readme


def test_importing_memguard_is_cheap_and_changes_nothing() -> None:
    done = python(
        "import os, sys, threading\nbefore = dict(os.environ), list(sys.path), list(sys.meta_path)\n"
        "import memguard\n"
        "assert before == (dict(os.environ), list(sys.path), list(sys.meta_path))\n"
        "assert threading.active_count() == 1\n"
        "found = {name.partition('.')[0] for name in sys.modules}\n"
        "heavy = {'torch', 'tensorflow', 'pycuda', 'cuda', 'pynvml', 'numpy', 'rich', 'click', 'pydantic', 'yaml'}\n"
        "assert not heavy & found, heavy & found\n"
    )
    assert done.returncode == 0, done.stderr


def test_every_module_can_be_imported_without_a_framework() -> None:
    names = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in sorted(PACKAGE.rglob("*.py"))
        if "activation" not in path.parts and path.name != "__main__.py"
    ]
    done = python(
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name.removesuffix('.__init__'))\n"
        "frameworks = {'torch', 'tensorflow', 'pycuda', 'cuda', 'pynvml'} & set(sys.modules)\n"
        "if 'distributed' in sys.modules: frameworks -= {'pynvml'}\n"  # Dask's own, where its engine is installed
        "assert not frameworks, frameworks\n"
    )
    assert done.returncode == 0, done.stderr


def test_the_package_carries_what_it_needs_beside_code() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert (PACKAGE / "_tools/activation" / "sitecustomize.py").is_file()


def test_the_pages_of_the_doctor_come_with_the_package(tmp_path: Path) -> None:
    from memguard._base.findings import names, page

    files = {path.stem: path for path in (ROOT / "docs" / "doctor").glob("*.md") if path.stem != "README"}
    assert set(names()) == set(files)
    assert (PACKAGE / "_tools/doctor" / "pages").is_dir()
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    forced = project.partition("[tool.hatch.build.targets.wheel.force-include]")[2].partition("\n[")[0]
    # An editable installation copies what is forced: a folder memguard in site-packages would be one without a module.
    assert [line for line in forced.splitlines() if "=" in line] == [
        '"memguard/_tools/activation/memguard.pth" = "memguard.pth"',
        '"memguard/_tools/activation/memguard.start" = "memguard.start" # in place of it from Python 3.15 on (PEP 829)',
        '"memguard/_tools/activation/_memguard_start.py" = "_memguard_start.py"',
    ]
    if importlib.util.find_spec("hatchling") is None:  # it comes with the group dev
        return
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    code = "from memguard.cli import main; main(['doctor', '--explain', 'mig'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        encoding="utf-8",
    )
    assert (done.returncode, done.stdout.rstrip()) == (0, page("mig").text.rstrip()), done.stderr


@pytest.mark.long  # so are the next two: the rules under which these tests run
@pytest.mark.parametrize(
    ("options", "folder", "code"),
    [([], "unit", 0), (["--no-skips"], "unit", 1), (["--no-skips"], "gpu", 0)],
    ids=["allowed", "refused", "gpu"],
)
@pytest.mark.parametrize("whole", [False, True], ids=["test", "module"])
def test_no_skips(tmp_path: Path, options: list[str], folder: str, code: int, whole: bool) -> None:
    """A test that runs in no job is as good as none, so CI refuses skips; only tests/gpu may."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / folder).mkdir()
    skip = "pytest.skip('why', allow_module_level=True)\n" if whole else ""
    (tmp_path / folder / "test_skipped.py").write_text(
        f"import pytest\n{skip}def test_runs(): pass\ndef test_skips(): pytest.skip('why')\n"
        "@pytest.mark.xfail\ndef test_known(): assert False\n"
    )
    (tmp_path / folder / "test_other.py").write_text("def test_runs(): pass\n")
    done = inner_pytest.run(tmp_path, *options, ".", env=THEIRS)
    assert (done.returncode != 0) == bool(code), done.stdout
    assert ("--no-skips forbids: " in done.stdout) == bool(code)
    assert ("passed" in done.stdout) == (not (code and whole)), done.stdout


PROPERTIES = """
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
seen = {"plain": 0, "own": 0, "machine": 0}
@given(st.integers())
def test_plain(number): seen["plain"] += 1
@settings(max_examples=40)
@given(st.integers())
def test_own(number): seen["own"] += 1
class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        seen["machine"] += 1
    @rule(number=st.integers())
    def step(self, number): pass
TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40)
def test_counts():
    with open("seen", "w") as file:
        print(*seen.values(), file=file)
"""


@pytest.mark.long
def test_the_edges_have_ten_examples_of_each_property_and_state_machine(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_some.py").write_text(PROPERTIES)
    done = inner_pytest.run(tmp_path, "--hypothesis-profile=edges", ".", env=THEIRS)
    assert done.returncode == 0, done.stdout
    plain, own, machine = map(int, (tmp_path / "seen").read_text().split())
    assert plain == own == 10 and 10 <= machine <= 12


CASES = """
import pytest
@pytest.mark.parametrize("b", "vwxyz")
@pytest.mark.parametrize("a", "klm")
def test_product(a, b): pass
@pytest.mark.parametrize(("a", "b"), [("k", "v"), ("l", "w"), ("k", "w")])
def test_rows(a, b): pass
@pytest.mark.one_case
@pytest.mark.parametrize("a", "klm")
def test_arithmetic(a): pass
"""


@pytest.mark.long
def test_the_edges_have_each_row_of_each_parametrize(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_some.py").write_text(CASES)

    def ran(*more: str) -> list[str]:
        done = inner_pytest.run(tmp_path, "-vv", *more, ".", env=THEIRS)
        assert done.returncode == 0, done.stdout
        return sorted(re.findall(r"::test_(\S+) PASSED", done.stdout))

    product = [f"product[{a}-{v}]" for a, v in ("kv", "ky", "kz", "lw", "mx")]
    rows = ["rows[k-v]", "rows[k-w]", "rows[l-w]"]
    assert ran("--hypothesis-profile=edges") == ["arithmetic[k]", *product, *rows]
    chosen = [*(f"product[l-{b}]" for b in "vwxyz"), "rows[l-w]"]
    assert ran("--hypothesis-profile=edges", "-k", "l-") == chosen, "of what -k has chosen"
    assert len(ran()) == 3 + 15 + 3


def test_the_scripts_let_interpreters_keep_what_they_compiled() -> None:
    code = '. scripts/lib.sh; echo "${PYTHONDONTWRITEBYTECODE-may}"'
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(["bash", "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout == "may\n", done.stderr


def test_each_framework_is_installed_as_its_extra_says() -> None:
    from memguard._frameworks.specs import SPECS

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    first = {name: extras[name][0].partition(">=")[0] for name in SPECS}  # others are bounds for what it needs
    assert {name: row.install for name, row in SPECS.items()} == first


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by their name alone: the second one would fail wherever both tiers run together."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        found.setdefault(path.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}
