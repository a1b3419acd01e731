"""The site: every page is in a table of contents, every public name and command in the reference, links lead out of it.

`scripts/docs` builds it and fails on a warning; what is here needs no Sphinx.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import memguard

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "extension"))
import site_markup as markup  # noqa: E402
import site_names  # noqa: E402

pytestmark = pytest.mark.long  # no version of what is installed changes what the documents say


def listed() -> list[str]:
    """The pages of the tables of contents in docs/index.md."""
    found: list[str] = []
    for block in re.findall(r"^```\{toctree\}\n(.*?)^```", (DOCS / "index.md").read_text(), re.DOTALL | re.MULTILINE):
        lines = [line for line in block.splitlines() if line and not line.startswith(":")]
        found += [re.sub(r"^.* <(.*)>$", r"\1", line) for line in lines]
    return [page for page in found if not page.startswith("https:")]


def test_every_page_is_in_one_table_of_contents() -> None:
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md") if "_build" not in path.parts}
    below = {page for page in pages if page.startswith(("doctor/", "results/"))} - {"doctor/README", "results/index"}
    assert sorted(listed()) == sorted(pages - below - {"index"}), "put it into docs/index.md"


def test_the_kinds_of_pages_are_those_of_diataxis() -> None:
    captions = re.findall(r"^:caption: (.+)$", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert captions == ["Tutorial", "How-to", "Reference", "Explanation", "Results"]


def test_every_public_name_has_an_entry() -> None:
    text = "\n".join(path.read_text() for path in sorted(DOCS.glob("reference/*.md")))
    entries = set(re.findall(r"^\.\. auto(?:function|class|exception|module):: (\S+)$", text, re.MULTILINE))
    # `:members:` alone takes all that the module defines; with names, those.
    whole = set(re.findall(r"^\.\. automodule:: (\S+)\n   :members:$", text, re.MULTILINE))
    for module, members in re.findall(r"^\.\. automodule:: (\S+)\n   :members: (.+)$", text, re.MULTILINE):
        entries |= {f"{module}.{name}" for name in members.split(", ")}
    names = list(site_names.names())
    assert len(names) > len(memguard.__all__) + 20
    lacking = [n[0] for n in names if not any(name in entries or name.rpartition(".")[0] in whole for name in n)]
    assert lacking == [], "give it a place in docs/reference"


def test_the_commands_come_from_click() -> None:
    text = (DOCS / "reference" / "commands.md").read_text()
    assert ".. click:: memguard.cli:main" in text and ":nested: full" in text


def test_the_script_says_what_it_takes() -> None:
    told = subprocess.run(["bash", str(ROOT / "scripts" / "docs"), "--help"], capture_output=True, text=True)
    assert told.returncode == 0 and "docs/_build" in told.stdout and "set -" not in told.stdout
    wrong = subprocess.run(["bash", str(ROOT / "scripts" / "docs"), "--html"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "--html" in wrong.stderr


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("`init` first", "``init`` first"),
        ("the `Guard`s", "the ``Guard``\\ s"),
        ("(`spawn`, `forkserver`)", "(``spawn``, ``forkserver``)"),
        ("**It runs twice.**", "**It runs twice.**"),
        ("before an *allocation* would", "before an *allocation* would"),
        ("2 * 3 | 4", "2 \\* 3 \\| 4"),
        ("*args and name_ here", "\\*args and name\\_ here"),
        ("a_name stays", "a_name stays"),
        ("``is one``", "``is one``"),
        ("Raises ConfigError.", "Raises :py:exc:`~memguard.errors.ConfigError`."),
        ("memguard.ConfigErrors", "memguard.ConfigErrors"),
        ("(JSONL, `docs/trace.md`), docs/oom.md.", "(JSONL, :doc:`/trace`), :doc:`/oom`."),
        ("of `async\ndef` and\nmore", "of ``async def`` and\nmore"),
    ],
)
def test_a_paragraph_of_a_docstring(line: str, expected: str) -> None:
    assert markup.prose(line) == expected


def test_code_and_fields_of_a_docstring() -> None:
    code, fields = "    y = `x`\n\n    z = y", "times     how often\nshrink    the name, that\n          is halved"
    text = f"Shown so:\n\n{code}\n\n{fields}\n\nEnd."
    assert markup.to_rst(text.split("\n")) == [
        *["Shown so:", "", "::", "", "    y = `x`", "", "    z = y", ""],
        *[":times: how often", ":shrink: the name, that", "    is halved", "", "End.", ""],
    ]


def test_a_docstring_that_says_itself_what_is_code() -> None:
    tree = ["All.", "", "::", "", "    Error", "    ├── Other", "", "The end."]
    assert markup.to_rst(tree) == [*tree, ""]


def test_a_page_loses_comments_and_links_out_of_the_documents() -> None:
    text = "9 ms<!-- a --> [here](oom.md#x) [one](../examples/demo.py#L3)\n<!-- b -->\n```\n<!-- c -->\n```\n"
    shown = "9 ms [here](oom.md#x) one (`examples/demo.py`)\n\n```\n<!-- c -->\n```\n"
    assert markup.page(text, "docs") == shown
    assert markup.page("[a](../oom.md) [b](../../configs)", "docs/doctor") == "[a](../oom.md) b (`configs`)"
    assert markup.page("[`a/b.py`](../a/b.py) [x](oom.md)", "docs") == "`a/b.py` [x](oom.md)"
    assert markup.page("in [oom.md](oom.md#x)", "docs") == "in [](oom.md#x)"


def test_the_program_reads_every_variable_that_the_documents_name() -> None:
    code = "\n".join(path.read_text() for path in Path(memguard.__file__).parent.rglob("*.py"))
    texts = [
        path.read_text() for kind in ("md", "yaml") for path in DOCS.rglob(f"*.{kind}") if "_build" not in path.parts
    ]
    named = {
        name for text in [*texts, (ROOT / "README.md").read_text()] for name in re.findall(r"\bMEMGUARD_[A-Z_]+", text)
    }
    assert not {name for name in named if not re.search(rf"\b{name}\b", code)}
