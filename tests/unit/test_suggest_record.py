"""A program is recorded without a budget: nothing of it changes, and the timeline has what the allocators say."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import click
import click_runner
import pytest

import memguard
from memguard import cli
from memguard._base.units import GIB, MIB
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.simulated.adapter import SimulatedFramework
from memguard._frameworks.specs import SPECS
from memguard._tools.suggest import decide, record, recorded, text
from memguard.cli.support import recording
from memguard.errors import TimelineError

HOME = Path(memguard.__file__).parents[1]


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[record.Recorder]:
    """A recording of a program that has imported torch, of which the test takes each sample. `stop` after use."""
    for name in SPECS:
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delitem(sys.modules, SPECS[name].hook, raising=False)
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.setenv("RANK", "3")
    made = record.Recorder(str(tmp_path / "run.jsonl"), SimulatedHost(["h100"]), interval=3600.0)
    made._writer.begin()
    yield made
    made.stop()


def torch_of(recorder: record.Recorder) -> SimulatedFramework:
    found = recorder.reader.unnamed()["torch"]
    assert isinstance(found, SimulatedFramework)
    return found


def test_what_is_recorded_makes_a_budget(recorder: record.Recorder, tmp_path: Path) -> None:
    torch = torch_of(recorder)
    kept = torch.allocate(2 * GIB)
    recorder.record(recorder.take(), [])
    torch.free(torch.allocate(3 * GIB))  # between two samples
    recorder.record(recorder.take(), [])
    torch.free(kept)
    recorder.record(recorder.take(), [])
    recorder.stop()
    recorder.stop()
    (path,) = tmp_path.glob("run-*-3.jsonl")
    (run,) = recorded.runs([str(path)])
    assert run.rank == 3 and run.samples == 4 and run.declared == (), "and one at its end"
    (need,) = run.needs.values()
    assert (need.sampled, need.peak, need.cap) == (2 * GIB, 5 * GIB, None) and not need.refusals
    found = decide.suggest([run], Fraction(0))
    assert found is not None and found.figures[0].limit == 5 * GIB
    assert found.reserve.source == "measured" and 500 * MIB < found.reserve.bytes < 2 * GIB
    written = " ".join(text.as_yaml(found).replace("#", "").split())
    assert "its allocator's own peak" in written and "recorded without a budget" in written


def test_a_peak_is_written_again_only_if_it_has_grown(recorder: record.Recorder, tmp_path: Path) -> None:
    torch = torch_of(recorder)
    for size in (100 * MIB, 100 * MIB + 512, 80 * MIB, 120 * MIB):
        torch.free(torch.allocate(size))
        recorder.record(recorder.take(), [])
    recorder.stop()
    (path,) = tmp_path.glob("run-*.jsonl")
    peaks = [event.bytes for event in memguard.load_timeline(path).events() if event.kind == "peak"]
    assert peaks == [100 * MIB, 120 * MIB]


def test_what_counts_nothing_without_a_budget_is_named(
    recorder: record.Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_of(recorder).allocate(MIB)
    recorder.record(recorder.take(), [])
    monkeypatch.setitem(sys.modules, "pycuda.driver", types.ModuleType("pycuda.driver"))
    for _ in range(2):
        recorder.record(recorder.take(), [])
    recorder.stop()
    (path,) = tmp_path.glob("run-*.jsonl")
    assert [event.framework for event in memguard.load_timeline(path).events() if event.kind == "uncounted"] == [
        "pycuda"
    ]
    (run,) = recorded.runs([str(path)])
    (note,) = run.notes
    assert note.startswith("pycuda was imported, and counts nothing without a budget")


def test_the_imports_that_begin_it_are_the_hooks_of_the_rows() -> None:
    assert set(record.MODULES) == {spec.hook for spec in SPECS.values()}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `memguard run --record r.jsonl -- python -c CODE` where torch is an empty module."""
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").touch()

    def call(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MEMGUARD_")}
        path = os.pathsep.join([str(tmp_path / "site"), str(HOME)])
        command = [sys.executable, "-m", "memguard", "run", "--record", str(tmp_path / "r.jsonl"), "--"]
        return subprocess.run(
            [*command, sys.executable, "-c", code],
            env={**clean, "PYTHONPATH": path, **environ},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return call


def test_a_program_without_a_framework_gets_no_thread_and_no_file(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    code = "import sys, threading; assert threading.active_count() == 1; print(*sys.path); sys.exit(7)"
    done = run(code)
    assert done.returncode == 7 and "startup" not in done.stdout and "memguard suggest" in done.stderr
    assert not list(tmp_path.glob("r*.jsonl"))


def test_a_program_goes_on_where_nothing_can_be_recorded(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    code = (
        "import sys, time, threading, torch\n"
        "recorder = [t for t in threading.enumerate() if t.name == 'memguard-recorder']\n"
        "for thread in recorder: thread.join(30)\nprint('went on'); sys.exit(5)"
    )
    done = run(code, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (5, "went on\n"), done.stderr
    assert done.stderr.count("memguard: nothing is recorded: ") == 1 and "Traceback" not in done.stderr


def test_a_program_that_ends_at_once_says_why_nothing_was_recorded(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    forked = "import os, sys, torch; child = os.fork(); child and os.waitpid(child, 0); sys.exit(5)"
    for code in ("import sys, torch; sys.exit(5)", forked):
        done = run(code, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 5 and "Traceback" not in done.stderr
        assert done.stderr.count("memguard: nothing is recorded: ") == 1, done.stderr
    absent = run("import importlib.util; importlib.util.find_spec('torch')", CUDA_VISIBLE_DEVICES="")
    assert absent.returncode == 0 and "nothing is recorded" not in absent.stderr, "it was looked for, not imported"


def test_a_program_that_ends_before_the_first_sample_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from memguard._devices import real

    monkeypatch.setattr(real, "RealHost", lambda: SimulatedHost(["h100"]))
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    beginning = record._Beginning(str(tmp_path / "run.jsonl"))
    beginning._ending.set()
    beginning.begin()
    assert capsys.readouterr().err == "memguard: nothing is recorded: the program ended before the first sample\n"
    assert not list(tmp_path.iterdir())


def test_a_program_that_is_not_there_gets_no_word_of_a_recording(tmp_path: Path) -> None:
    done = click_runner.apart().invoke(
        cli.main, ["run", "--record", str(tmp_path / "r.jsonl"), "--", "no-such-program"]
    )
    assert done.exit_code == 127 and done.stderr == "memguard: no-such-program: No such file or directory\n"


def test_the_sitecustomize_of_the_environment_runs_and_children_are_armed(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "site" / "sitecustomize.py").write_text("print('mine')")
    code = (
        "import subprocess, sys\n"
        'see = \'import sys; print(any(type(f).__module__ == "memguard._tools.suggest.record" '
        "for f in sys.meta_path))'\n"
        "exec(see); sys.stdout.flush(); subprocess.run([sys.executable, '-c', see])"
    )
    done = run(code)
    # The first line is of the Python that runs `memguard run` itself.
    assert done.stdout.split() == ["mine", "mine", "True", "mine", "True"], done.stderr


def test_where_memguard_is_disabled_the_program_runs_as_it_is(
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run("import os, torch; print('MEMGUARD_RECORD' in os.environ)", MEMGUARD_DISABLE="1")
    assert (done.returncode, done.stdout) == (0, "False\n") and "MEMGUARD_DISABLE is set" in done.stderr


def test_a_python_that_would_not_record_itself_is_refused() -> None:
    done = click_runner.apart().invoke(cli.main, ["run", "--record", "run.jsonl", "--", "python3", "-I", "train.py"])
    assert done.exit_code == 2 and "nothing would be recorded: " in done.stderr and "fix: " in done.stderr
    assert "budget would" not in done.stderr


@pytest.mark.parametrize("more", [["-c", "b.yaml"], ["--device", "h200"], ["--doctor"]])
def test_a_budget_and_a_recording_without_one_exclude_each_other(more: list[str]) -> None:
    done = click_runner.apart().invoke(cli.main, ["run", "--record", "run.jsonl", *more, "--", "true"])
    assert done.exit_code == 2 and "--record is without a budget" in done.stderr


def test_it_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    for given, shown in (("run.jsonl", "run-*-*.jsonl"), ("a b/r{pid}.jsonl", "'a b/r'*.jsonl"), ("{rank}", "*")):
        recording.announce(["ls"], recording.environment({}, given))
        said = capsys.readouterr().err
        assert said.endswith(f"then: memguard suggest {shown}\n") and "will be recorded" in said


def test_what_it_is_not_for_is_refused(tmp_path: Path) -> None:
    for name in ("MEMGUARD_CONFIG", "MEMGUARD_SIMULATE"):
        with pytest.raises(click.UsageError, match=name):
            recording.environment({name: "x"}, str(tmp_path / "run.jsonl"))
    with pytest.raises(TimelineError, match="does not exist"):
        recording.environment({}, str(tmp_path / "no" / "run.jsonl"))
    for folder in (f"{tmp_path}/", f"{tmp_path}", f"{tmp_path}/new/"):
        with pytest.raises(TimelineError, match=r"is a folder\n    fix: name a file in it: --record .*/run\.jsonl$"):
            recording.environment({}, folder)
    with pytest.raises(click.UsageError, match=r"--record names no file: write for example --record run\.jsonl"):
        recording.environment({}, "")
    found = recording.environment({"PYTHONPATH": "/mine"}, str(tmp_path / "run-{pid}.jsonl"))
    assert found["MEMGUARD_RECORD"] == str(tmp_path / "run-{pid}.jsonl")
    assert found["PYTHONPATH"].endswith(f"startup{os.pathsep}/mine")
