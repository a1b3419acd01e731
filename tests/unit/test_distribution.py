"""What messages name for `pip install`: where this copy came from, and never `memguard`, which is another project."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from memguard._base import distribution

ROOT = Path(__file__).parents[2]
URL = "https://example.org/memguard.git"
COMMIT = "0123456789abcdef"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation with a `memguard-gpu` and nothing else on the path."""
    found = tmp_path / "site-packages"
    (found / "memguard_gpu-0.1.0.dist-info").mkdir(parents=True)
    (found / "memguard_gpu-0.1.0.dist-info" / "METADATA").write_text("Name: memguard-gpu\nVersion: 0.1.0\n")
    monkeypatch.setattr(distribution, "_ROOT", str(found))
    monkeypatch.setattr(sys, "path", [str(found)])
    return found


def came_from(site: Path, origin: object) -> None:
    text = origin if isinstance(origin, str) else json.dumps(origin)
    (site / "memguard_gpu-0.1.0.dist-info" / "direct_url.json").write_text(text)


def test_from_an_index_it_is_the_name(site: Path) -> None:
    assert distribution.requirement() == "memguard-gpu"


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ({"url": URL, "vcs_info": {"vcs": "git", "commit_id": COMMIT}}, f"'memguard-gpu @ git+{URL}@{COMMIT}'"),
        (
            {"url": URL, "vcs_info": {"vcs": "git", "commit_id": COMMIT}, "subdirectory": "lib"},
            f"'memguard-gpu @ git+{URL}@{COMMIT}#subdirectory=lib'",
        ),
        ({"url": "https://example.org/m.whl", "archive_info": {}}, "'memguard-gpu @ https://example.org/m.whl'"),
        ({"url": "file:///nowhere/m.whl", "archive_info": {}}, "memguard-gpu"),
        ("not JSON", "memguard-gpu"),
        ("[]", "memguard-gpu"),
        ({"url": URL, "vcs_info": {}}, "memguard-gpu"),
    ],
    ids=["git", "subdirectory", "url", "deleted wheel", "no JSON", "no object", "no commit"],
)
def test_from_somewhere_else_it_is_that_place(site: Path, origin: object, expected: str) -> None:
    came_from(site, origin)
    assert distribution.requirement() == expected


def test_a_folder_and_a_wheel_are_paths_quoted_for_a_shell(site: Path, tmp_path: Path) -> None:
    source = tmp_path / "my memguard"
    source.mkdir()
    came_from(site, {"url": source.as_uri(), "dir_info": {}})
    assert distribution.requirement() == f"'{source}'"
    wheel = tmp_path / "memguard_gpu-0.1.0-py3-none-any.whl"
    wheel.touch()
    came_from(site, {"url": wheel.as_uri(), "archive_info": {}})
    assert distribution.requirement() == str(wheel)


def test_an_editable_installation_is_installed_so_again(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    came_from(site, {"url": source.as_uri(), "dir_info": {"editable": True}})
    monkeypatch.setattr(distribution, "_ROOT", str(source))
    assert distribution.requirement() == f"-e {source}"


def test_another_copy_that_is_installed_does_not_count(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came_from(site, {"url": URL, "vcs_info": {"vcs": "git", "commit_id": COMMIT}})
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    monkeypatch.setattr(distribution, "_ROOT", str(checkout))
    assert distribution.requirement() == "memguard-gpu"
    (checkout / "pyproject.toml").touch()
    assert distribution.requirement() == str(checkout)


def test_the_name_is_the_projects() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^name = "(.+?)"', project, re.MULTILINE)[1] == distribution.NAME  # type: ignore[index]


def test_nothing_tells_anybody_to_install_the_other_project() -> None:
    """In messages, documents and scripts; a name that only begins so is another one."""
    texts = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "scripts").iterdir()]
    texts += [*Path(distribution.__file__).parent.rglob("*.py"), *(ROOT / "examples").iterdir()]
    found = [
        f"{path}: {line}"
        for path in texts
        if path.is_file()
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if re.search(r"\bpip\d? install\b.*['\"` ]memguard(?![\w.-])(\[|[=<>~!]=|['\"`]|\s*$)", line)
    ]
    assert found == []
