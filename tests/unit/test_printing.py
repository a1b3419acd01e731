"""Every command with every standard output that there is: no traceback, the right exit code, nothing for a terminal."""

from __future__ import annotations

import errno
import html
import io
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from timelines import START, Clock, plan_of, sample_of

import memguard
from memguard._base.text import fitting, shown, visible
from memguard._base.types import Device, Event, FrameworkSample, Pressure, WorkloadReport
from memguard._base.units import GIB, format_size
from memguard._ledger.types import Ledger, html_ledger
from memguard._oom.report import full_text
from memguard._timeline.reader import Timeline
from memguard._timeline.writer import Writer
from memguard._tools.doctor import report_on
from memguard._tools.doctor.facts import Facts
from memguard.cli import main
from memguard.errors import BudgetExceeded, UnderPressure

EVIL = "\x1b]0;owned\x07\x1b[31m\x9b2J\r\u202e\u00e9\u4e2d\U0001f600\u2212"
"""Title, colour, clear screen in one byte, carriage return, right to left; then what latin-1 and ASCII lack."""
BUDGET = "version: 1\ndevice: {limit: 40GiB}\nframeworks:\n  torch: {share: 50%}\n"
JSON = (
    "check --json",
    "check wrong --json",
    "plan --json",
    "plan hostile --json",
    "suggest --json",
    "suggest hostile --json",
    "replay --json",
    "replay trace --json",
    "replay --smallest --json",
    "doctor --json",
    "doctor --dump-facts",
    "doctor --list --json",
    "doctor --explain --json",
    "check --schema",
)
COMMANDS: dict[str, tuple[list[str], int]] = {
    "check": (["check", "b.yaml"], 0),
    "check wrong": (["check", "wrong.yaml"], 2),
    "check --json": (["check", "b.yaml", "--json"], 0),
    "check wrong --json": (["check", "b.yaml", "wrong.yaml", f"{EVIL}.yaml", "--json"], 2),
    "check several": (["check", "wrong.yaml", f"{EVIL}.yaml", "b.yaml"], 2),
    "check absent": (["check", f"{EVIL}.yaml"], 2),
    "plan": (["plan", "b.yaml", "--device", "h200"], 0),
    "plan --json": (["plan", "b.yaml", "--device", "h200", "--json"], 0),
    "plan hostile": (["plan", "b.yaml", "--device", "gpus.yaml"], 0),
    "plan hostile --json": (["plan", "b.yaml", "--device", "gpus.yaml", "--json"], 0),
    "plan wrong file": (["plan", "b.yaml", "--device", "wrong.yaml"], 2),
    "plan unknown": (["plan", "b.yaml", "--device", EVIL], 2),
    "check --schema": (["check", "--schema"], 0),
    "replay trace": (["replay", "-c", "b.yaml", "run.trace"], 0),
    "replay trace --json": (["replay", "-c", "b.yaml", "run.trace", "--json"], 0),
    "top --once": (["top", "--once", "run.jsonl"], 0),
    "top wrong": (["top", "--once", "wrong.trace"], 2),
    "replay": (["replay", "run.jsonl"], 0),
    "replay --json": (["replay", "run.jsonl", "--json"], 0),
    "replay --smallest": (["replay", "run.jsonl", "--smallest"], 0),
    "replay --smallest --json": (["replay", "run.jsonl", "--smallest", "--json"], 0),
    "replay wrong": (["replay", "wrong.trace"], 2),
    "suggest": (["suggest", "run.jsonl"], 0),
    "suggest --json": (["suggest", "run.jsonl", "--json"], 0),
    "suggest hostile": (["suggest", "run.jsonl", "--device", "gpus.yaml"], 0),
    "suggest hostile --json": (["suggest", "run.jsonl", "--device", "gpus.yaml", "--json"], 0),
    "suggest wrong": (["suggest", "wrong.trace"], 2),
    "suggest absent": (["suggest", f"{EVIL}.jsonl"], 2),
    "suggest unknown": (["suggest", "--device", EVIL], 2),
    "suggest unwritable": (["suggest", "run.jsonl", "-o", f"no/{EVIL}"], 2),
    "doctor": (["doctor", "--facts", "facts.json"], 1),
    "doctor --json": (["doctor", "--facts", "facts.json", "--json"], 1),
    "doctor --dump-facts": (["doctor", "--facts", "facts.json", "--dump-facts"], 0),
    "doctor --list": (["doctor", "--list"], 0),
    "doctor --list --json": (["doctor", "--list", "--json"], 0),
    "doctor --explain --json": (["doctor", "--explain", "unexpected-path", "--json"], 0),
    "doctor --explain": (["doctor", "--explain", "unexpected-path"], 0),
    "doctor unknown": (["doctor", "--ignore", EVIL], 2),
    "run absent": (["run", "-c", f"{EVIL}.yaml", "--", "true"], 2),
    "run not found": (["run", "-c", "b.yaml", "--", f"no-{EVIL}"], 127),
    **{f"{name} absent": ([name, str((1 << 31) - 1)], 2) for name in ("suspend", "resume")},
    **{f"{name} no number": ([name, EVIL], 2) for name in ("suspend", "resume")},
    **{f"{name} --help": ([name, "--help"], 0) for name in ("ps", "suspend", "resume")},
    "help": (["--help"], 0),
    "version": (["--version"], 0),
    **{f"{name} --help": ([name, "--help"], 0) for name in ("check", "doctor", "plan", "replay", "run", "suggest")},
    "unknown command": ([f"chekc{EVIL}"], 2),
    "extra argument": (["plan", "b.yaml", EVIL], 2),
    "unknown option": (["plan", f"--{EVIL}"], 2),
}


class Raw(io.RawIOBase):
    """A file that takes everything, or nothing for this reason."""

    def __init__(self, error: int | None = None) -> None:
        self.error, self.got = error, b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        self.got += bytes(data)
        return len(data)


class Streams:
    """Standard output and error of one call."""

    def __init__(self, encoding: str, out: int | str | None = None, err: int | str | None = None) -> None:
        self.raw = [Raw(how if isinstance(how, int) else None) for how in (out, err)]
        self.text: list[io.TextIOWrapper | None] = [
            io.TextIOWrapper(io.BufferedWriter(raw), encoding=encoding, errors=errors)
            for raw, errors in zip(self.raw, ("strict", "backslashreplace"), strict=True)
        ]
        for index, how in enumerate((out, err)):
            stream = self.text[index]
            assert stream is not None
            if how == "closed":  # by the program itself
                stream.close()
            if how == "none":  # `>&-`
                stream.close()
                self.text[index] = None

    def call(self, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", self.text[0])
            patched.setattr(sys, "stderr", self.text[1])
            with pytest.raises(SystemExit) as ended:
                main.main(arguments, prog_name="memguard")
            assert (sys.stdout, sys.stderr) == tuple(self.text)
        for raw, text in zip(self.raw, self.text, strict=True):
            raw.error = None
            if text is not None and not text.closed:
                text.flush()
        assert isinstance(ended.value.code, int)
        return ended.value.code

    def got(self, encoding: str) -> list[str]:
        return [raw.got.decode(encoding) for raw in self.raw]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A budget, a trace, a timeline and facts, all with hostile names in them."""
    monkeypatch.chdir(tmp_path)
    Path("b.yaml").write_text(BUDGET)
    Path("wrong.yaml").write_text(json.dumps({"version": 1, EVIL: EVIL, "frameworks": {EVIL: EVIL}}))
    Path("gpus.yaml").write_text(yaml.safe_dump({"devices": [{"name": EVIL, "total": "80GiB"}]}))
    device = {"name": f"GPU {EVIL}", "total": 80 * GIB, "reserved": 0, "architecture": EVIL}
    trace = {"memguard_trace": 1, "recorded": "2026-01-01", "devices": [device], "frameworks": {"torch": {}}}
    events = [{"time": 0, "framework": "torch", "op": "alloc", "id": 1, "bytes": 1 << 20}]
    Path("run.trace").write_text("".join(json.dumps(line) + "\n" for line in [trace, *events]))
    wrong = {"time": 0, "framework": EVIL, "op": EVIL}
    Path("wrong.trace").write_text("".join(json.dumps(line) + "\n" for line in [trace, wrong]))
    plan = plan_of("h200", torch="1GiB")
    with Writer("{rank}", plan, clock=Clock()) as writer:
        usage = {"torch": FrameworkSample(GIB, GIB, 0, GIB), f"a{EVIL}": FrameworkSample(GIB, GIB, 0, None)}
        writer.sample(sample_of(plan, START, **usage))
        writer.event(Event(START, "note", EVIL))
    text = Path(writer.path).read_text()
    assert "NVIDIA H200" in text
    Path("run.jsonl").write_text(text.replace("NVIDIA H200", json.dumps(EVIL)[1:-1]))
    Path("facts.json").write_text(facts().to_json())
    return tmp_path


def facts() -> Facts:
    """A framework that dies of a signal with a name of its own, and everything else that is text."""
    probe = {"stages": [{"name": EVIL, "seconds": 1, "error": EVIL, "kind": EVIL}], "signal": EVIL, "said": [EVIL]}
    framework = {"path": EVIL, "version": EVIL, "cuda": EVIL, "folder": "/x", "probe": probe}
    cuda = {"ordinal": 0, "uuid": "GPU-1", "name": EVIL, "capability": [9, 0], "multiprocessors": 1}
    return Facts.model_validate(
        {
            "frameworks": {"torch": framework, "jax": {**framework, "probe": {"exit": 1}}},
            "driver": {"module": EVIL, "cuda": {"version": 13000, "init": EVIL, "devices": [cuda]}},
            "system": {"executable": EVIL},
            "environment": {"CUDA_VISIBLE_DEVICES": EVIL},
            "script": {"path": EVIL, "error": EVIL},
        }
    )


def harmless(text: str) -> bool:
    return all(char.isprintable() or char in "\n\t" for char in text)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii", "cp1252", "cp437", "shift_jis"])
def test_each_command_in_each_encoding(name: str, encoding: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, code = COMMANDS[name]
    streams = Streams(encoding)
    assert streams.call(arguments, monkeypatch) == code
    out, err = streams.got(encoding)
    assert harmless(out) and harmless(err), (out, err)
    assert "Traceback" not in err
    assert out or err
    if name in JSON:
        json.loads(out)


SGR = re.compile(r"\x1b\[[0-9;]*m")
"""Colours and the like, of rich."""


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_on_a_terminal(name: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    arguments, code = COMMANDS[name]
    streams = Streams("utf-8")
    monkeypatch.setattr(Raw, "isatty", lambda raw: True)
    assert streams.call(arguments, monkeypatch) == code
    out, err = streams.got("utf-8")
    assert harmless(SGR.sub("", out)) and harmless(SGR.sub("", err)), (out, err)
    # What comes from outside has no colour of its own: 31 alone, as in EVIL, is none of rich's here.
    assert "\x1b[31m" not in out + err or name.startswith("doctor")
    if name == "doctor":
        assert SGR.search(out)


FULL, GONE = errno.ENOSPC, errno.EPIPE


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("how", [FULL, errno.EDQUOT, errno.EIO, GONE, "none", "closed"], ids=str)
def test_each_command_whose_stdout_takes_nothing(
    name: str, how: int | str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, code = COMMANDS[name]
    plain = Streams("utf-8")
    plain.call(arguments, monkeypatch)
    prints = bool(plain.raw[0].got)
    streams = Streams("utf-8", out=how)
    found = streams.call(arguments, monkeypatch)
    _, err = streams.got("utf-8")
    if not prints:
        assert found == code
    elif how == GONE:
        assert (found, err.replace(plain.got("utf-8")[1], "")) == (141, "")
    else:
        assert found == 2
        said = os.strerror(how) if isinstance(how, int) else "it is closed"
        assert err.endswith(f"memguard: stdout cannot be written: {said}\n")
        assert len(err.splitlines()) - len(plain.got("utf-8")[1].splitlines()) == 1


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("how", [FULL, GONE, "none", "closed"], ids=["full", "pipe", "none", "closed"])
def test_each_command_whose_stderr_takes_nothing(
    name: str, how: int | str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, code = COMMANDS[name]
    plain, streams = Streams("utf-8"), Streams("utf-8", err=how)
    assert plain.call(arguments, monkeypatch) == code == streams.call(arguments, monkeypatch)
    assert streams.raw[0].got == plain.raw[0].got
    both = Streams("utf-8", out=FULL, err=how)
    assert both.call(arguments, monkeypatch) in (code, 1, 2)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_of_a_shell(shell: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for instruction, words in {"source": "", "complete": "memguard pl"}.items():
        monkeypatch.setenv("_MEMGUARD_COMPLETE", f"{shell}_{instruction}")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", "pl" if shell == "fish" else "1")
        streams, full = Streams("ascii"), Streams("ascii", out=FULL)
        assert streams.call([], monkeypatch) == 0
        assert ("memguard" if instruction == "source" else "plan") in streams.got("ascii")[0]
        assert full.call([], monkeypatch) == 2


def process(arguments: list[str], encoding: str | None = None, **more: Any) -> subprocess.CompletedProcess[bytes]:
    environ = {**os.environ, "PYTHONPATH": str(Path(memguard.__file__).parents[1])}
    if encoding is not None:
        environ["PYTHONIOENCODING"] = encoding
    return subprocess.run([sys.executable, "-m", "memguard", *arguments], env=environ, **more)


def test_a_process_whose_stdout_takes_nothing(files: Path) -> None:
    """What only a real process shows: what Python itself writes and says at its end."""
    with open("/dev/full", "wb") as full:
        done = process(["check", "b.yaml"], stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (2, b"memguard: stdout cannot be written: No space left on device\n")
    with open("/dev/full", "wb") as full:
        done = process(["plan", "b.yaml", "--device", "h200"], stdout=full, stderr=full)
    assert done.returncode == 2
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as gone:
        done = process(["check", "--schema"], stdout=gone, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, b"")
    done = process(["check", "b.yaml"], stderr=subprocess.PIPE, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (2, b"memguard: stdout cannot be written: it is closed\n")
    done = process(["check", "absent"], stdout=subprocess.PIPE, preexec_fn=lambda: os.close(2))
    assert (done.returncode, done.stdout) == (2, b"")
    for encoding in ("latin-1", "ascii"):
        done = process(["check", "b.yaml"], encoding, capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"") and b"50% of (limit - reserve)" in done.stdout


def test_a_program_starts_whatever_memguards_stdout_is(files: Path) -> None:
    """`memguard run` prints nothing there: it is the program's."""
    command = ["run", "-c", "b.yaml", "--device", "h200", "--", sys.executable, "-c", "import os; os.write(2, b'on')"]
    with open("/dev/full", "wb") as full:
        done = process(command, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 0 and done.stderr.endswith(b"on")


# What is printed by the program itself


@pytest.fixture
def guard() -> Iterator[memguard.Guard]:
    budget = {"version": 1, "frameworks": {"torch": {"limit": "1GiB"}, "tensorflow": {"limit": "1GiB", "growth": True}}}
    guard = memguard.init(budget, simulate="h200")
    yield guard
    memguard.shutdown()


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii", "cp1252"])
def test_what_users_print(
    guard: memguard.Guard, encoding: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    frameworks: Any = guard.frameworks
    for name in ("torch", "tensorflow"):
        frameworks[name].start_importing()
    frameworks["tensorflow"].allocate(1 << 20)
    with memguard.workload(EVIL, framework="torch") as workload:
        try:
            frameworks["torch"].allocate(2 * GIB)
        except Exception as error:
            error.args = (f"{error.args[0]} {EVIL}",)
            report = memguard._oom.hooks.report_error(error, show=False)
    assert report is not None
    guard.notes.append(f"a note {EVIL}")
    event = Event(START, "pressure", f"torch {EVIL}", Pressure.WARN, "GPU-1", "torch", 3.0, 4)
    things = [memguard.ledger(), guard, report, workload, event, report_on(facts(), None)]
    things += [memguard.reclaimable(), timeline_in(tmp_path, EVIL)]
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    for thing in things:
        print(thing)
        print(repr(thing))
        for how in ("_repr_html_", "to_json"):
            if hasattr(thing, how):
                assert harmless(getattr(thing, how)())
    stream.flush()
    raw = stream.buffer
    assert isinstance(raw, io.BytesIO)
    text = raw.getvalue().decode(encoding)
    assert harmless(text)
    assert ("≥" in text) == (encoding == "utf-8")
    assert (">= " in text) == (encoding != "utf-8")
    assert harmless(report.note)


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii", "cp1252"])
def test_what_travels_has_every_character_whatever_standard_output_lacks(
    guard: memguard.Guard, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors, their pickles and notes, and what is sent as data: they are printed elsewhere, or logged."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    lacked = EVIL[-4:]
    frameworks: Any = guard.frameworks
    frameworks["torch"].start_importing()
    with pytest.raises(RuntimeError) as failed:
        frameworks["torch"].allocate(2 * GIB)
    failed.value.args = (f"{EVIL} {failed.value.args[0]}",)
    oom = memguard._oom.hooks.report_error(failed.value, show=False)
    assert oom is not None
    with pytest.raises(memguard.ConfigError) as wrong:
        memguard.Budget.from_mapping({"version": 1, EVIL: EVIL})
    exceeded = BudgetExceeded("torch", 2, 1, f"{EVIL}: \N{MINUS SIGN}1")
    errors = [wrong.value, exceeded, UnderPressure("torch", None, EVIL), pickle.loads(pickle.dumps(exceeded))]
    for text in (*map(str, errors), full_text(oom), html.unescape(oom._repr_html_())):
        assert lacked in text and harmless(text)


@pytest.mark.parametrize("encoding", [None, 7, "", "rot13", "no such", "a\0b", "base64", ZeroDivisionError])
def test_a_stand_in_for_stdout_with_an_odd_encoding(
    guard: memguard.Guard, encoding: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(io.StringIO):
        @property
        def encoding(self) -> Any:
            if encoding is ZeroDivisionError:
                raise ZeroDivisionError
            return encoding

    monkeypatch.setattr(sys, "stdout", Odd())
    for thing in (memguard.ledger(), guard, memguard.NotActive(EVIL)):
        print(thing)
    monkeypatch.setattr(sys, "stdout", None)
    assert str(memguard.ledger()) and str(guard)


def test_an_ascii_ledger_is_as_wide_as_the_other(guard: memguard.Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    import memguard._ledger.types as types

    one = str(memguard.ledger())
    monkeypatch.setattr(types, "fitting", lambda text: text.replace("─", "-"))
    other = str(memguard.ledger())
    assert one.replace("─", "-") == other and other.isascii()


def test_texts_of_a_device_are_made_visible_where_it_is_made() -> None:
    device = Device(EVIL, EVIL, 0, GIB, 0, EVIL)
    assert all(harmless(text) and "\n" not in text for text in (device.uuid, device.name, device.architecture))


def timeline_in(folder: Path, name: str) -> Timeline:
    """That of a run on a GPU of that name, cut short."""
    plan = plan_of(torch="4GiB", cupy="2GiB")
    with Writer(folder / "run-{rank}.jsonl", plan, rank=1, simulated=True, clock=Clock()) as writer:
        writer.sample(sample_of(plan, START, torch=FrameworkSample(GIB, GIB, 0, GIB)))
    path = folder / "run-1.jsonl"
    path.write_text(path.read_text().replace("NVIDIA H200", json.dumps(name)[1:-1])[:-3])
    return memguard.load_timeline(path)


def test_readings_reports_and_timelines_say_what_they_are(guard: memguard.Guard, tmp_path: Path) -> None:
    """One line at a prompt, with nothing that has to be read to make it."""
    frameworks: Any = guard.frameworks
    frameworks["torch"].start_importing()
    frameworks["torch"].allocate(GIB // 2)
    held = memguard.ledger().devices[0].process
    assert repr(memguard.ledger()) == (
        f"<Ledger NVIDIA H200 (simulated): {format_size(held)} of limit {format_size(guard.plan.devices[0].limit)}>"
    )
    assert repr(memguard.reclaimable()) == "<Reclaimable NVIDIA H200 (simulated): 0 B could come back>"
    with pytest.raises(MemoryError), memguard.workload("w", framework="torch"):
        raise MemoryError("3 GiB")
    report = memguard.last_oom()
    assert report is not None and repr(report) == f"<Report: {report.title}>" and "memory" in report.title
    timeline = timeline_in(tmp_path, "NVIDIA H200")
    path = tmp_path / "run-1.jsonl"
    assert repr(timeline) == f"<Timeline {path}: process {os.getpid()}, rank 1 on NVIDIA H200 (simulated)>"
    first, second, torch, cupy, note = str(timeline).splitlines()
    assert first == f"timeline of process {os.getpid()}, rank 1, begun 2025-11-21T15:00:00.000+00:00"
    assert second.startswith("NVIDIA H200 (simulated) GPU-") and "limit 40.00 GiB, reserve 2.00 GiB" in second
    assert (torch, cupy) == ("  torch          4.00 GiB", "  cupy           2.00 GiB")
    assert note == f"note: {path}: the last line was cut short, and is left out"
    path.unlink()
    assert str(timeline) and timeline._repr_html_(), "the file is not read"
    memguard.shutdown()
    assert repr(Ledger(START, ())) == "<Ledger of no GPU>"


def test_a_notebook_and_ipython_show_each_in_full(guard: memguard.Guard, tmp_path: Path) -> None:
    from IPython.core.formatters import DisplayFormatter

    event = Event(START, "pressure", "torch <b> is near its cap", Pressure.WARN, framework="torch")
    with pytest.raises(MemoryError), memguard.workload("w", framework="torch"):
        raise MemoryError
    timeline = timeline_in(tmp_path, "NVIDIA H200 <b>")
    things = [memguard.ledger(), guard, memguard.last_oom(), event, timeline]
    for thing in things:
        found, _ = DisplayFormatter().format(thing)
        assert set(found) == {"text/plain", "text/html"} and "<b> is" not in found["text/html"]
    for thing in (things[0], things[2], timeline, memguard.reclaimable()):  # at IPython's prompt too
        assert DisplayFormatter().format(thing)[0]["text/plain"] == str(thing)
    assert "NVIDIA H200 &lt;b&gt;" in timeline._repr_html_() and "process" in timeline._repr_html_()
    html = guard._repr_html_()
    assert html.count("<tr>") == 3 and "limit " in html and ">pending<" in html
    assert "warn</b> pressure: torch &lt;b&gt;" in event._repr_html_()
    memguard.shutdown()
    assert ">shut down<" in guard._repr_html_()


def test_an_elastic_cap_says_its_bounds() -> None:
    budget = {"version": 1, "frameworks": {"torch": {"min": "1GiB", "max": "4GiB"}}}
    with memguard.guard(budget, simulate="h200") as guard:
        assert "min 1.00 GiB, max 4.00 GiB" in str(guard) and "min 1.00 GiB, max 4.00 GiB" in guard._repr_html_()


def test_events_workloads_and_guards_say_what_they_are(guard: memguard.Guard) -> None:
    event = Event(START, "pressure", "torch is near its cap", Pressure.WARN, framework="torch")
    assert str(event) == "warn pressure: torch is near its cap"
    assert repr(event) == (
        f"<Event time={START} kind='pressure' text='torch is near its cap' level='warn' framework='torch'>"
    )
    assert str(WorkloadReport("a\nb", "torch")).startswith("a\\u000ab: torch")  # one line, whatever its name
    report = WorkloadReport("embed", "torch", 0, GIB, 2 * GIB)
    assert repr(report) == "<WorkloadReport embed: torch peak 2.00 GiB, 1.00 GiB more in use than before>"
    assert repr(guard) == "<Guard of a mapping: torch, tensorflow on NVIDIA H200 (simulated), active>"
    memguard.shutdown()
    assert repr(guard).endswith(", not active>")


@given(st.text(st.characters(exclude_categories=[])), st.sampled_from(["ascii", "latin-1", "utf-8", "cp437", "koi8-r"]))
def test_any_text_can_be_shown_and_shown_again(text: str, encoding: str) -> None:
    seen = fitting(visible(text), encoding)
    assert harmless(seen) and fitting(visible(seen), encoding) == seen
    assert seen.encode(encoding).decode(encoding) == seen
    if text.isprintable() and text.isascii():
        assert seen == shown(text) == text


def test_html_of_a_ledger_has_no_control_characters(guard: memguard.Guard) -> None:
    from dataclasses import replace

    ledger = replace(memguard.ledger(), notes=(EVIL,))
    assert harmless(html_ledger(ledger))
