"""Every block of code in README.md and docs/ is run, read by what reads its format, or type-checked (doc_blocks.py)."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import doc_blocks
import pytest
import yaml
from doc_blocks import FILES, ROOT, RUN, SHOWN, TYPED, Block

import memguard
from memguard import _budget
from memguard.cli import main
from memguard.errors import ConfigError

EVERY = doc_blocks.every()
VOLATILE = ((r"\b\d+(?:\.\d+)? ?s\b", "N s"), (r"\b\d+ samples\b", "N samples"))
"""What differs from run to run: how long something took."""


def of(kind: str) -> Any:
    found = [block for block in EVERY if block.kind == kind]
    assert found, kind
    return pytest.mark.parametrize("block", found, ids=map(str, found))


def test_every_block_is_of_a_known_kind_and_no_page_is_listed_in_vain() -> None:
    kinds = {
        document: {block.kind for block in EVERY if block.document == document} for document in doc_blocks.DOCUMENTS
    }
    assert [page for page in RUN if "run" not in kinds[page]] == []
    assert [page for page in TYPED if "typed" not in kinds[page]] == []
    assert [page for page in SHOWN if "shown" not in kinds[page]] == []
    assert not set(RUN) & set(TYPED)
    said = " ".join([*SHOWN.values(), *(reason for reason, _ in TYPED.values())])
    for name in re.findall(r"[\w/]*\w+\.py", said):
        assert (ROOT / name).exists() or (ROOT / "tests" / "unit" / name).exists(), name
    with pytest.raises(AssertionError, match="what holds this block"):
        _ = Block("docs/words.md", 1, "rust", "fn main() {}").kind


def test_a_python_file_of_a_page_is_run_by_a_command_of_it() -> None:
    for block in EVERY:
        if block.kind == "file":
            commands = [one.text for one in EVERY if one.document == block.document and one.kind == "console"]
            assert any(re.search(rf"^\$ .*\b{re.escape(str(block.file))}\b", text, re.MULTILINE) for text in commands)


@of("typed")
def test_python_that_needs_a_gpu_compiles(block: Block) -> None:
    """What it means is mypy's: `python tests/unit/doc_blocks.py`, a step of .ci/run."""
    compile(block.text, str(block), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


# What is written in a format is read by what reads that format.


def errors_of(text: str) -> str:
    try:
        _budget.parse(text, "budget.yaml")
    except ConfigError as error:
        return f"{error}\n"
    return ""


def workflow(found: dict[str, Any]) -> None:
    for job in found["jobs"].values():
        for step in job["steps"]:
            assert set(step) & {"uses", "run"}
            if "run" in step:
                shell(step["run"])


def manifest(found: dict[str, Any]) -> None:
    assert {"apiVersion", "kind", "metadata"} <= set(found)
    for name, text in found.get("data", {}).items():
        assert name.endswith(".yaml") and errors_of(text) == ""
    for container in found.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
        command([str(word) for word in container["command"]])


@of("yaml")
def test_yaml_is_what_it_is_for(block: Block, tmp_path: Path) -> None:
    if block.file and (ROOT / "docs" / block.file).is_file():  # a part of a file beside the page
        assert block.text.partition("\n")[2] in (ROOT / "docs" / block.file).read_text()
        return
    found = yaml.safe_load(block.text) if "torch: {share: 50%\n" not in block.text else {"version": 1}
    if "jobs" in found:
        workflow(found)
    elif "apiVersion" in found:
        manifest(found)
    elif "scrape_configs" in found:
        (one,) = found["scrape_configs"]
        assert set(one) == {"job_name", "static_configs"} and set(one["static_configs"][0]) == {"targets"}
    elif list(found) == ["devices"]:
        from memguard._devices.simulated import SimulatedHost

        (tmp_path / "gpus.yaml").write_text(block.text)
        assert len(SimulatedHost(str(tmp_path / "gpus.yaml")).devices()) > 1
    elif "version" not in found:  # a section of a budget
        assert errors_of(f"version: 1\nframeworks: {{torch: {{share: 50%}}}}\n{block.text}") == ""
    else:
        after = EVERY[EVERY.index(block) + 1 :][:1]
        shown = [one.text for one in after if one.text.startswith("budget.yaml:") and one.document == block.document]
        assert errors_of(block.text) == (shown[0] if shown else "")


@of("json")
def test_json_is_json(block: Block) -> None:
    assert [json.loads(line) for line in block.text.splitlines()]


def command(words: list[str]) -> None:
    """A call of memguard is one that its command line takes. Nothing is run."""
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    if words[:1] != ["memguard"]:
        return
    found = main.get_command(click.Context(main), words[1])
    assert found is not None, words
    found.make_context(words[1], words[2:], parent=click.Context(main, info_name="memguard"))


def shell(text: str) -> None:
    done = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"\s(?:\||\|\||&&|;|>)\s", line):
            words = shlex.split(part, comments=True)
            if words[:1] == ["docker"] and "memguard" in words:
                words = words[words.index("memguard") :]
            command(words)


@of("shell")
def test_commands_are_ones_that_there_are(block: Block) -> None:
    shell(block.text)


def test_a_wrong_command_would_be_found() -> None:
    for wrong in ("memguard plam x", "memguard plan --devices h200", "docker run x memguard plan --devices h200"):
        with pytest.raises((AssertionError, click.ClickException)):
            shell(wrong)
    with pytest.raises(AssertionError):
        shell("for x in y; do")


@of("dockerfile")
def test_a_dockerfile_has_known_instructions(block: Block) -> None:
    instructions = {"FROM", "COPY", "RUN", "ENV", "WORKDIR", "CMD"}
    for line in block.text.replace("\\\n", " ").splitlines():
        word, _, rest = line.partition(" ")
        assert word in instructions
        if word == "RUN":
            shell(rest)
        elif word == "CMD":
            command(json.loads(rest))
        elif word == "ENV":
            assert all(re.fullmatch(r"[A-Z_]+=\S+", one) for one in rest.split())


@of("magic")
def test_magics_are_ones_that_there_are(block: Block) -> None:
    from memguard import notebook

    first, _, cell = block.text.partition("\n")
    name, _, rest = first.partition(" ")
    if name == "%%memguard":
        assert notebook._cell_options(rest).framework == "torch"
        compile(cell, str(block), "exec")
    elif name == "%memguard":
        assert rest.split()[0] in re.findall(r"\w+", notebook._LINE)
    else:
        assert first == "%load_ext memguard"


# What can run here does, in the order of its page.


def environment(folder: Path) -> dict[str, str]:
    """That of a user: `python` and `memguard` are these, and nothing of this test's own."""
    tools = folder / ".bin"
    tools.mkdir()
    for name, what in (("python", ""), ("memguard", " -m memguard")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{what} "$@"\n')
        (tools / name).chmod(0o755)
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    more = {"PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
    home = Path(memguard.__file__).parents[1]
    if home.name != "site-packages":
        more["PYTHONPATH"] = str(home)
    return {**kept, "PATH": path, **more}


def matches(shown: str, printed: str) -> bool:
    """Line by line but for spaces at their ends; `…` is anything, alone in a line any number of lines."""
    pattern = ""
    for line in shown.rstrip("\n").split("\n"):
        if line.strip() == "…":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*".join(re.escape(part) for part in line.rstrip().split("…")) + r"\n"
    lines = "".join(f"{line.rstrip()}\n" for line in printed.rstrip().split("\n"))
    return re.fullmatch(pattern, lines) is not None


def steady(text: str) -> str:
    for volatile, instead in VOLATILE:
        text = re.sub(volatile, instead, text)
    return text


PAGES = [
    page for page in doc_blocks.DOCUMENTS if any(b.document == page and b.kind in ("run", "console") for b in EVERY)
]


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_runs_does_what_it_says(page: str, tmp_path: Path) -> None:
    environ = environment(tmp_path)
    (tmp_path / "budget.yaml").write_text((ROOT / "examples" / "mixed.yaml").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # else one above the temporary folder would count
    blocks = [block for block in EVERY if block.document == page]
    files = {block.file: block.text for block in blocks if block.file and block.kind != "run"}
    for name, (document, language) in FILES.get(page, {}).items():
        (files[name],) = [block.text for block in EVERY if (block.document, block.language) == (document, language)]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for block in blocks:
        if block.kind == "run":
            program = f"{RUN[page]}\n{block.text}"
            done = subprocess.run(
                [sys.executable, "-c", program],
                cwd=tmp_path, env={**environ, "MEMGUARD_SIMULATE": "h200"}, capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert done.returncode == 0, f"{block}: {done.stderr}"
        elif block.kind == "console":
            for call, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE):
                done = subprocess.run(
                    ["bash", "-c", call],
                    cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60,
                )  # fmt: skip
                assert matches(steady(shown), steady(done.stdout)), f"{block}: $ {call}\n{done.stdout}"


def test_what_is_printed_is_compared() -> None:
    assert matches("a …\n", "a b c\n") and matches("a\n…\nd\n", "a\nb\nc\nd  \n\n") and matches("a\n…\nd\n", "a\nd\n")
    assert not matches("a\n", "a\nb\n") and not matches("a …\n", "a b\nc\n") and not matches("a\n…\nd\n", "a\ne\n")
    assert steady("in 0.12s, 3 samples over 1.500 s; 100ms") == "in N s, N samples over N s; 100ms"
