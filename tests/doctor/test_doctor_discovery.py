"""A check takes one function and one page; what the facts imply is computed once, however many checks ask."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from doctor_facts import load, plain

import memguard
from memguard._tools.doctor import cuda_libraries, derived
from memguard._tools.doctor.examine import every, examine
from memguard._tools.doctor.facts import Facts, System

CHECK = '''"""A toy: the kernel has a name."""

from collections.abc import Iterator

from memguard._tools.doctor.facts import Facts
from memguard._tools.doctor.finding import Found, check


@check("toy-kernel")
def kernel(facts: Facts) -> Iterator[Found]:
    if facts.system.kernel:
        yield Found("this machine has a kernel", [f"kernel: {facts.system.kernel}", ""], "nothing to do", "the kernel")
'''
PAGE = """---
title: "Toys: the kernel has a name"
severity: warning, info
section: Toys
order: 9000
---

# toy-kernel

## What to do

Nothing.
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package with one more check: its module and its page, and no other file."""
    package = Path(memguard.__file__).parent
    shutil.copytree(package, tmp_path / "memguard", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "memguard/_tools/doctor/checks/toys.py").write_text(CHECK, encoding="utf-8")
    (tmp_path / "memguard/_tools/doctor/pages/toy-kernel.md").write_text(PAGE, encoding="utf-8")
    (tmp_path / "facts.json").write_text(json.dumps(plain("healthy-h200.json")), encoding="utf-8")
    return tmp_path


def doctor(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from memguard.cli import main; main(prog_name='memguard')"
    environ = {**os.environ, "PYTHONPATH": str(copy)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=copy, env=environ, capture_output=True, text=True
    )


def test_a_check_is_one_function_and_one_page(copy: Path) -> None:
    done = doctor(copy, "doctor", "--facts", "facts.json", "--json")
    assert done.returncode == 1, done.stderr
    found = [one for one in json.loads(done.stdout)["findings"] if one["name"] == "toy-kernel"]
    kernel = plain("healthy-h200.json")["system"]["kernel"]
    assert found == [
        {
            "name": "toy-kernel",
            "severity": "warning",
            "subject": "the kernel",
            "cause": "this machine has a kernel",
            "evidence": [f"kernel: {kernel}"],
            "remedy": "nothing to do",
            "page": "docs/doctor/toy-kernel.md",
        }
    ]
    assert doctor(copy, "doctor", "--list").stdout.splitlines()[-1] == "toy-kernel"
    explained = "# toy-kernel\n\n**Toys: the kernel has a name.** Warning.\n\n## What to do\n\nNothing.\n"
    assert doctor(copy, "doctor", "--explain", "toy-kernel").stdout == explained
    ignored = "version: 1\nframeworks: {torch: {limit: 1GiB}}\ndoctor: {ignore: [toy-kernel, mig]}\n"
    (copy / "budget.yaml").write_text(ignored, encoding="utf-8")
    assert doctor(copy, "check", "budget.yaml").returncode == 0
    assert doctor(copy, "doctor", "--facts", "facts.json", "--ignore", "toy-kernel").returncode == 0


def test_checks_run_in_the_order_of_their_numbers() -> None:
    orders = [check.order for check in every()]
    assert orders == sorted(set(orders)), "each number once"


def test_the_messages_of_a_framework_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: Counter[tuple[str, ...]] = Counter()

    def count(texts: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
        searched[texts] += 1
        return not_opened(texts)

    not_opened = cuda_libraries.not_opened
    monkeypatch.setattr(cuda_libraries, "not_opened", count)
    value = plain("h200-all-six.json")
    error = {"name": "import", "seconds": 1.0, "error": "libcudart.so.13: cannot open shared object file"}
    for name, found in value["frameworks"].items():
        found["probe"] = {**found["probe"], "stages": [error], "said": [f"{name} says so"], "exit": 1}
    findings = examine(Facts.from_json(json.dumps(value)))
    assert [finding.name for finding in findings].count("library-missing") == 6
    assert len(searched) == 6 and set(searched.values()) == {1}


def test_an_edited_copy_of_facts_keeps_nothing_that_followed_from_the_others() -> None:
    facts = load("wsl.json")
    examine(facts)
    assert derived.blocked_by(facts) is None and facts.derived
    assert facts == load("wsl.json") and facts.to_json() == load("wsl.json").to_json()
    linux = facts.model_copy(update={"system": System()})
    assert not linux.derived and "wsl" not in {finding.name for finding in examine(linux)}


def test_without_pages_a_budget_is_read_and_the_doctor_says_what_to_install(copy: Path) -> None:
    """As in a program frozen without its data files: `init` has to work there too."""
    shutil.rmtree(copy / "memguard/_tools/doctor/pages")
    (copy / "budget.yaml").write_text(
        "version: 1\nframeworks: {torch: {limit: 1GiB}}\ndoctor: {ignore: [wsl, mig]}\n", encoding="utf-8"
    )
    assert doctor(copy, "check", "budget.yaml").returncode == 0
    done = doctor(copy, "doctor", "--facts", "facts.json")
    assert done.returncode == 4 and "is not installed\n    fix: pip install" in done.stderr
