"""What a shell offers at the press of TAB, and what that costs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

import memguard
from memguard._base.findings import names
from memguard._devices.catalog import CATALOGUE, SLICES
from memguard._frameworks.specs import SPECS
from memguard.cli import main

HOME = Path(memguard.__file__).parents[1]
HEAVY = ("pydantic", "yaml", "rich", "pynvml", "numpy", "torch", "tensorflow", "jax", "cupy", "numba", "pycuda", "cuda")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: budgets, recordings, and what is neither."""
    for name in ("budget.yaml", "other.YML", "run-1-0.jsonl", "facts.json", "train.py", "notes.txt", ".hidden.yaml"):
        (tmp_path / name).touch()
    for name in ("configs/a.yaml", "configs/b.yaml", "runs/run-2-0.jsonl", "odd/a b.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def offered(*words: str) -> list[str]:
    """What is offered for the last word; what the shell itself completes as `<file>` or `<dir>`."""
    *args, word = words
    items = ShellComplete(main, {}, "memguard", "_MEMGUARD_COMPLETE").get_completions(list(args), word)
    return [item.value if item.type == "plain" else f"<{item.type}>" for item in items]


FOLDERS = ["configs/", "odd/", "runs/"]


@pytest.mark.parametrize(
    "before",
    ["check", "check budget.yaml", "check -c", "plan", "plan -c", "doctor -c", "doctor --config", "run -c",
     "replay -c"],
)  # fmt: skip
def test_budgets(before: str) -> None:
    assert offered(*before.split(), "") == ["budget.yaml", "other.YML", *FOLDERS]
    assert offered(*before.split(), "bu") == ["budget.yaml"]


def test_recordings() -> None:
    assert offered("replay", "") == ["run-1-0.jsonl", *FOLDERS]
    assert offered("replay", "-c", "budget.yaml", "r") == ["run-1-0.jsonl", "runs/"]


def test_other_files() -> None:
    assert offered("doctor", "--facts", "f") == ["facts.json"]
    assert offered("doctor", "--script", "t") == ["train.py"]
    assert offered("run", "--", "python", "t") == ["<file>"]


def test_files_in_folders(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert offered("check", "configs/") == ["configs/a.yaml", "configs/b.yaml"]
    assert offered("check", "./configs/a") == ["./configs/a.yaml"]
    assert offered("check", f"{folder}/b") == [f"{folder}/budget.yaml"]
    monkeypatch.setenv("HOME", str(folder))
    assert offered("check", "~/b") == ["~/budget.yaml"]
    assert offered("check", ".h") == [".hidden.yaml"]


def test_what_the_shell_does_better_is_left_to_it() -> None:
    assert offered("check", "conf") == ["<dir>"], "after a folder it puts no space"
    assert offered("check", "odd/") == ["<file>"], "it quotes"
    assert offered("check", "no") == ["<file>"], "a budget may have any name"
    assert offered("check", "absent/") == ["<file>"]
    assert offered("check", "a\0b") == ["<file>"]


@pytest.mark.parametrize("before", ["plan --device", "replay --device", "run --device", "suggest --device"])
def test_gpus(before: str) -> None:
    assert offered(*before.split(), "") == list(CATALOGUE)
    assert offered(*before.split(), "h200-1") == [name for name in SLICES if name.startswith("h200-1")] != []
    assert offered(*before.split(), "RTX40") == [name for name in CATALOGUE if name.startswith("rtx40")] != []
    assert offered(*before.split(), "oth") == ["other.YML"]


def test_findings_and_frameworks() -> None:
    for option in ("--explain", "--ignore"):
        assert offered("doctor", option, "") == list(names())
        assert offered("doctor", option, "driver-t") == ["driver-too-old"]
    assert offered("doctor", "--framework", "") == list(SPECS)
    assert offered("doctor", "--framework", "cu") == ["cupy"]


def test_commands_and_options() -> None:
    assert offered("re") == [name for name in main.list_commands(None) if name.startswith("re")]  # type: ignore[arg-type]
    assert "--json" in offered("check", "--")


@pytest.mark.parametrize(
    "words", ["plan --device h", "doctor --explain d", "doctor --framework t", "check b", "replay r", "run -c b"]
)
def test_a_shell_gets_it_quickly(words: str) -> None:
    """In a real process, which imports nothing heavy."""
    code = (
        "import sys\nfrom memguard.cli import main\n"
        "try: main([], prog_name='memguard')\n"
        f"finally: print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    environ = {
        **os.environ, "PYTHONPATH": str(HOME), "_MEMGUARD_COMPLETE": "bash_complete",
        "COMP_WORDS": f"memguard {words}".replace(" ", "\n"), "COMP_CWORD": str(len(words.split())),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert done.stdout.splitlines() == [f"plain,{name}" for name in offered(*words.split())]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_in_bash(tmp_path: Path) -> None:
    """What docs/quickstart.md says to switch on: its function fills in a word."""
    tool = tmp_path / "memguard"
    tool.write_text(f'#!/bin/sh\nPYTHONPATH="{HOME}" exec "{sys.executable}" -m memguard "$@"\n')
    tool.chmod(0o755)
    script = (
        'eval "$(_MEMGUARD_COMPLETE=bash_source memguard)" 2>&1\n'
        "COMP_WORDS=(memguard doctor --explain driver-t); COMP_CWORD=3; _memguard_completion memguard\n"
        'echo "${COMPREPLY[@]}"'
    )
    environ = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["driver-too-old"], (done.stdout, done.stderr)
