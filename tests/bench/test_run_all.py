"""A full run over measurements of the tests: what is measured, what is skipped, and what stays in the file."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_tree import Tree, gone, started

SLEEPER = """
import subprocess, sys
from bench.child import main
from bench.measure import measure
@measure("alpha", unit="s", seconds=1)
def alpha(run):
    return [run.program("child", timeout=TIMEOUT)["x"]]
def child():
    words = [sys.executable, "-c", "import time; time.sleep(90)", "WORD"]
    subprocess.Popen(words, start_new_session=True)
    subprocess.Popen(words)
    import time
    time.sleep(90)
if __name__ == "__main__":
    main({"child": child})
"""


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "tree")


def test_the_whole_of_a_run(tree: Tree) -> None:
    said = tree.all()
    assert "skipped pair: it needs 2 GPUs" in said
    assert list(tree.rows) == ["alpha", "beta.a", "beta.b", "card"]  # what needs the whole card last
    assert tree.runs() == ["quick", "timed"]
    alpha, beta = tree.rows["alpha"], tree.rows["beta.a"]
    assert (alpha["median"], alpha["low"], alpha["high"], alpha["n"]) == (4, 4, 4, 3)
    assert (alpha["unit"], alpha["bar"], alpha["ok"], alpha["commit"]) == ("s", "<= 5", True, "abc")
    assert (beta["median"], beta["low"], beta["high"], beta["n"], beta["ok"]) == (2, 1, 9, 3, True)
    assert tree.rows["card"]["ok"] is None
    whole = json.loads(tree.out.read_text())
    assert (whole["version"], whole["dirty"]) == ("0.2.0", False)
    assert whole["measures"]["alpha"]["title"] == "Seconds of alpha"
    assert ".part" in whole["modules"]  # imported by a child that ended with os._exit
    assert ".other" not in whole["modules"]


def test_resume_measures_only_what_changed(tree: Tree) -> None:
    tree.all()
    first = tree.rows
    tree.runs()
    tree.all("--resume")
    assert tree.rows == first
    assert tree.runs() == []
    assert "nothing to measure again" not in tree("status", str(tree.out), code=1)  # pair was never measured
    tree.write("memguard/other.py", "X = 2\n")
    assert "alpha: measured" in tree("status", str(tree.out), code=1)
    tree.write("memguard/part.py", "X = 2\n")
    said = tree("status", str(tree.out), code=1)
    assert "alpha: changed: the code that ran at abc" in said
    assert "beta: measured" in said
    tree.all("--resume")
    assert tree.runs() == ["quick", "timed"]
    assert tree.rows["alpha"]["covers"] != first["alpha"]["covers"]
    assert tree.rows["alpha"]["attempts"] == []  # of other code
    assert tree.rows["beta.a"] == first["beta.a"]
    tree.write("bench/measures/fake.py", (tree.folder / "bench/measures/fake.py").read_text() + "\n# changed\n")
    assert "alpha: changed: the measurement at abc" in tree("status", str(tree.out), code=1)


def test_a_missed_bar_stays_and_a_second_attempt_shows_the_first(tree: Tree) -> None:
    tree.write("alpha", "6")
    assert "MISSED  alpha: 6 s" in tree.all(code=1)
    tree.write("alpha", "3")
    tree.all("--resume", code=1)
    assert tree.rows["alpha"]["median"] == 6
    tree("run", "alpha", "--commit", "def", "-o", str(tree.out))
    row = tree.rows["alpha"]
    assert (row["median"], row["ok"], row["attempts"], row["commit"]) == (3, True, [6], "def")
    assert list(tree.rows) == ["alpha", "beta.a", "beta.b", "card"]


def test_a_failure_is_a_row_and_is_tried_again(tree: Tree) -> None:
    tree.write("broken", "")
    assert "FAILED  beta: beta is broken" in tree.all(code=1)
    assert tree.rows["beta"]["median"] is None
    assert tree.rows["beta"]["ok"] is False
    (tree.folder / "broken").unlink()
    tree.all("--resume")
    assert "beta" not in tree.rows
    assert tree.rows["beta.b"]["attempts"] == [None]  # that it failed stays visible
    tree.write("broken", "")
    tree("run", "beta", "--commit", "abc", "-o", str(tree.out), code=1)
    assert tree.rows["beta.b"]["attempts"] == [None, 7]
    assert tree.rows["beta.b"]["error"] == "beta is broken"


def test_an_untimed_pass_that_fails_gives_no_figure(tree: Tree) -> None:
    (tree.folder / "alpha").unlink()
    said = tree.all(code=1)
    assert "its untimed pass failed" in said
    assert "FileNotFoundError" in tree.rows["alpha"]["error"]
    assert tree.runs() == ["quick", "quick"]  # once more alone, and never timed


def test_until_starts_nothing_that_would_end_too_late(tree: Tree) -> None:
    said = tree.all("--until", "1.5", code=3)
    assert "`python -m bench run-all --resume …` continues" in said
    assert tree.rows == {}
    tree.all("--resume", "--until", "80")
    assert len(tree.rows) == 4


def test_a_released_version_is_frozen(tree: Tree) -> None:
    tree.all()
    before = tree.out.read_bytes()
    tree.write("memguard/__init__.py", '__version__ = "0.3.0.dev0"\n')
    assert "its figures are frozen" in tree.all("--resume", code=1)
    assert tree.out.read_bytes() == before


def test_where_there_is_no_repository_the_commit_must_be_named(tree: Tree) -> None:
    assert "--commit SHA" in tree("run-all", "-o", str(tree.out), code=1)


def test_quick_writes_nothing(tree: Tree) -> None:
    assert "ok      alpha: 4 s" in tree("run", "alpha", "--quick")
    assert not tree.out.exists()


def test_what_a_measurement_starts_ends_with_it(tree: Tree) -> None:
    word = f"left-{tree.folder.parent.name}"
    tree.write("bench/measures/fake.py", SLEEPER.replace("WORD", word).replace("TIMEOUT", "1.5"))
    said = tree("run", "alpha", "--quick", code=1)
    assert "child: killed: it took longer than 2 s" in said
    assert gone(word)


def test_what_a_measurement_started_ends_with_a_run_that_is_ended(tree: Tree) -> None:
    word = f"ended-{tree.folder.parent.name}"
    tree.write("bench/measures/fake.py", SLEEPER.replace("WORD", word).replace("TIMEOUT", "90"))
    words = [sys.executable, "-m", "bench", "run-all", "--commit", "abc", "-o", str(tree.out)]
    with subprocess.Popen(words, cwd=tree.folder, env=tree.environ, start_new_session=True) as run:
        end = time.monotonic() + 60
        while not started(word) and time.monotonic() < end:
            time.sleep(0.1)
        assert started(word)
        run.terminate()
        assert run.wait(60) == 143
    assert gone(word)
