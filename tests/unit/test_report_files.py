"""`memguard report`: which files it writes, what they hold for other tools, and what it refuses."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile_names
import pytest
from recorded import SIX, record
from timelines import START, Clock, plan_of, sample_of

from memguard import cli
from memguard._base.types import Event
from memguard._timeline import files, load_timeline
from memguard._timeline.writer import Writer
from memguard._tools.report import perfetto, texts
from memguard._tools.report.collect import collect
from memguard.cli.support import output


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("recorded"), steps=120)


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main.main(["report", *map(str, arguments)], prog_name="memguard")
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_all_files_are_written_and_have_the_mode_of_a_new_file(timeline: Path, tmp_path: Path) -> None:
    names = ("report.html", "report.md", "run.csv", "run.json")
    before = os.umask(0o027)
    try:
        code = call(timeline, *(word for name in names for word in ("-o", tmp_path / name)))
    finally:
        os.umask(before)
    assert code == 0
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == dict.fromkeys(names, 0o640)
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("form", ["html", "md", "csv", "perfetto"])
def test_a_file_that_exists_stays_unless_force_is_given(
    timeline: Path, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("mine")
    assert call(timeline, "--format", form, "-o", tmp_path / "mine") == 2
    assert (tmp_path / "mine").read_text() == "mine"
    assert "mine: it exists already\n    fix: give another name, or --force to replace it" in capsys.readouterr().err
    assert call(timeline, "--format", form, "-o", tmp_path / "mine", "--force") == 0
    assert (tmp_path / "mine").stat().st_size > 500
    assert os.listdir(tmp_path) == ["mine"]


def test_a_timeline_is_never_overwritten(timeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link.html").symlink_to(timeline)
    before = timeline.read_bytes()
    for path in (timeline, tmp_path / "link.html"):
        assert call(timeline, "--format", "html", "-o", path, "--force") == 2
        assert "it is the timeline that is read" in capsys.readouterr().err
    assert timeline.read_bytes() == before


def test_an_older_part_of_a_timeline_is_never_overwritten(timeline: Path, tmp_path: Path) -> None:
    run, older = tmp_path / "run.jsonl", tmp_path / "run.1.jsonl"
    run.write_bytes(timeline.read_bytes())
    older.write_bytes(timeline.read_bytes())
    assert call(run, "--format", "md", "-o", older, "--force") == 2
    assert older.read_bytes() == timeline.read_bytes()


@pytest.mark.parametrize("command", ["report", "suggest"])
@pytest.mark.parametrize("read", ["run.jsonl", "run.1.jsonl", "link.jsonl", "older.jsonl", "sub/chain.jsonl"])
@pytest.mark.parametrize("written", ["run.jsonl", "run.1.jsonl", "run.2.jsonl", "stored", "link.jsonl", "older.jsonl"])
def test_no_part_of_a_run_is_overwritten_whichever_is_named(
    timeline: Path, tmp_path: Path, command: str, read: str, written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`run.2.jsonl` is a link to `stored`."""
    (tmp_path / "sub").mkdir()
    for name in ("run.jsonl", "run.1.jsonl", "stored"):
        (tmp_path / name).write_bytes(timeline.read_bytes())
    links = {
        "run.2.jsonl": "stored", "link.jsonl": "run.jsonl", "older.jsonl": "run.1.jsonl",
        "sub/chain.jsonl": "../link.jsonl",
    }  # fmt: skip
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    words = [command, str(tmp_path / read), "-o", str(tmp_path / written), "--force"]
    with pytest.raises(SystemExit) as ended:
        cli.main.main(words + ["--format", "md"] * (command == "report"), prog_name="memguard")
    assert ended.value.code == 2 and "it is the timeline that is read" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("newest", ["run", "run.jsonl", "run.1.jsonl", "a.b/run.jsonl", "new\nline.jsonl"])
def test_the_parts_of_a_run_are_found_by_any_of_them(tmp_path: Path, newest: str) -> None:
    base, suffix = os.path.splitext(tmp_path / newest)
    parts = [f"{base}{suffix}", f"{base}.0{suffix}", f"{base}.12{suffix}"]
    for path in (*parts, f"{base}-other{suffix}", f"{base}.x{suffix}", f"{base}.1.md"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).touch()
    for path in parts:
        assert files.parts_of_run(path) == set(map(os.path.realpath, parts))
    os.unlink(parts[0])
    assert files.parts_of_run(parts[1]) == set(map(os.path.realpath, parts[1:]))
    assert files.parts_of_run(parts[0]) == set(map(os.path.realpath, parts))


def test_what_comes_to_exist_meanwhile_stays(tmp_path: Path) -> None:
    def parts() -> Iterator[str]:
        yield "new"
        (tmp_path / "report.html").write_text("somebody's")

    with pytest.raises(output.InputError, match="it exists already"):
        output.write(str(tmp_path / "report.html"), parts(), force=False)
    assert (tmp_path / "report.html").read_text() == "somebody's"
    assert os.listdir(tmp_path) == ["report.html"]


def test_what_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    def parts() -> Iterator[str]:
        yield "half"
        raise KeyboardInterrupt

    (tmp_path / "old").write_text("old")
    for name, force in (("new", False), ("old", True)):
        with pytest.raises(KeyboardInterrupt):
            output.write(str(tmp_path / name), parts(), force)
    assert os.listdir(tmp_path) == ["old"] and (tmp_path / "old").read_text() == "old"


def test_a_fifo_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        output.write(str(tmp_path / "fifo"), ["text"], force=False)
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)


def test_a_pipe_is_written_to_by_the_name_that_was_given(tmp_path: Path) -> None:
    """The real path of /dev/stdout and /dev/fd/63, /proc/PID/fd/pipe:[N], names nothing."""
    reader, writer = os.pipe()
    try:
        output.check([f"/dev/fd/{writer}"], [], force=False)
        output.write(f"/dev/fd/{writer}", ["text"], force=False)
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
        os.close(writer)


def test_a_pipe_is_no_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert call(tmp_path / "fifo", "-o", "-", "--format", "md") == 2
    assert "    fix: a timeline cannot be read from a pipe: save it to a file\n" in capsys.readouterr().err


def test_a_folder_without_permission_is_said_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(tmp_path))  # root may write everywhere
    with pytest.raises(output.InputError, match=r"x\.md: cannot be written: Permission denied"):
        output.check([str(tmp_path / "x.md")], [], force=False)
    output.check([os.devnull], [], force=False)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_that_ends_it_leaves_nothing(tmp_path: Path, name: str) -> None:
    code = (
        "import os, signal\nfrom memguard.cli.support import output\n\n"
        f"def parts():\n    yield 'half'\n    os.kill(os.getpid(), signal.{name})\n    yield 'whole'\n\n"
        f"output.write({str(tmp_path / 'report.html')!r}, parts(), force=False)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 128 + getattr(signal, name), done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["{run}"], 2, "Missing option '-o'"),
        (
            ["{run}", "-o", "-"],
            2,
            "the ending of standard output names no format (.html, .htm, .md, ",
        ),
        (["{run}", "-o", "{new}.txt"], 2, "the ending of {new}.txt names no format"),
        (["{run}", "{run}", "{run}", "-o", "-"], 2, "3 timelines are given: memguard report TIMELINE [OTHER] -o FILE"),
        (
            ["{run}", "-o", "-", "-o", "-", "--format", "md"],
            2,
            "two outputs go to standard output: give each a file of its own",
        ),
        (["{run}", "-o", "{new}.md", "-o", "{new}.md"], 2, "two outputs go to {new}.md: give each a file of its own"),
        (
            ["{run}", "-o", "", "--format", "md"],
            2,
            "the name of an output is empty: give a file, or - for standard output",
        ),
        (["{run}", "-o", "{folder}", "--format", "md"], 2, "{folder}: it is a folder\n    fix: give a file in it"),
        (
            ["{run}", "-o", "{new}/sub/x.md"],
            2,
            "{new}/sub/x.md: cannot be written: No such file or directory\n    fix: ",
        ),
        (["{run}", "-o", ""], 2, "the name of an output is empty: give a file, or - for standard output"),
        (["{run}", "-o", "{folder}"], 2, "{folder}: it is a folder\n    fix: give a file in it"),
        (["{run}", "-o", "{folder}/"], 2, "{folder}/: it is a folder\n    fix: give a file in it"),
        (["{run}", "-o", "{new}/", "--format", "md"], 2, "{new}/: it is a folder\n    fix: give a file in it"),
        (
            ["{run}", "-o", "{new}.md", "-o", "{new}/sub/x.md"],
            2,
            "{new}/sub/x.md: cannot be written: No such file or directory\n    fix: ",
        ),
        (["{run}", "-o", "{run}/x.md"], 2, "{run}/x.md: cannot be written: Not a directory\n    fix: "),
        (["{run}", "{new}.html"], 2, "the output is an option: memguard report {run} -o {new}.html\n"),
        (["{run}", "{run}", "{new} 2.md"], 2, "memguard report {run} {run} -o '{new} 2.md'\n"),
        (["{run}", "{run}"], 2, "Missing option '-o'"),
        (["{run}", "-o", "{new}.html", "--format", "md"], 2, "--format md contradicts the ending of {new}.html (html)"),
        (
            ["-", "-o", "{new}.md"],
            2,
            "    fix: a timeline cannot be read from a pipe: save it to a file",
        ),
        (["{new}", "-o", "{folder}/x.csv"], 2, "{new}: cannot be read: No such file or directory\n    fix: "),
    ],
)
def test_what_cannot_be_is_said_with_its_remedy(
    timeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    names = {"run": timeline, "new": tmp_path / "new", "folder": tmp_path}
    assert call(*(word.format(**names) for word in arguments)) == code
    assert said.format(**names) in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_a_format_of_another_ending_is_for_the_output_without_one(timeline: Path, tmp_path: Path) -> None:
    assert call(timeline, "-o", tmp_path / "a.html", "-o", tmp_path / "b", "--format", "md") == 0
    assert (tmp_path / "b").read_text(encoding="utf-8").startswith("#")


def test_a_dash_is_standard_output(timeline: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert call(timeline, "-o", tmp_path / "page.html") == 0
    assert call(timeline, "-o", "-", "--format", "html") == 0
    assert capfdbinary.readouterr().out == (tmp_path / "page.html").read_bytes()


def test_the_csv_has_every_figure_and_unknown_is_empty(timeline: Path) -> None:
    rows = list(csv.DictReader(io.StringIO("".join(texts.csv([("a", load_timeline(timeline))])))))
    samples = list(load_timeline(timeline).samples())
    assert len({row["time"] for row in rows}) == len(samples)
    assert len(rows) == sum(1 + len(sample.devices[0].frameworks) for sample in samples)
    last = samples[-1].devices[0]
    end = {row["framework"]: row for row in rows[-1 - len(last.frameworks) :]}
    for name, usage in last.frameworks.items():
        for column, value in zip(("held", "in_use", "reclaimable", "cap"), usage, strict=True):
            assert end[name][column] == ("" if value is None else str(value))
    assert end["tensorflow"]["held"] == "" and int(end[""]["process"]) == last.process
    assert float(end[""]["seconds"]) == pytest.approx(samples[-1].time - samples[0].time)


def test_no_cell_is_a_formula(tmp_path: Path) -> None:
    path = hostile_names.record(tmp_path)
    for row in csv.reader(io.StringIO("".join(texts.csv([("=cmd", load_timeline(path))])))):
        assert not [cell for cell in row if cell[:1] in ("=", "+", "@")], row


def test_the_markdown_has_peaks_errors_and_the_budget(timeline: Path) -> None:
    run = collect(load_timeline(timeline), "run.jsonl")
    text = texts.markdown([run])
    assert all(f"\n| {name} | " in text for name in SIX)
    (entry,) = [entry for entry in run.entries if entry.severity == "oom"]
    assert texts.escaped(entry.remedies[0]) in text
    assert "<summary>The suggested budget</summary>" in text and "\n  torch: {limit: " in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    both = texts.markdown([run, run])
    assert "peak held, B − A" in both and "What went wrong in B" in both


def test_hostile_names_are_no_markup(tmp_path: Path) -> None:
    text = texts.markdown([collect(load_timeline(hostile_names.record(tmp_path)), "a|b`c.jsonl")])
    lines = text.splitlines()
    table = [line.replace("\\|", "") for line in lines if line.startswith("|")]
    assert len(table) > len(hostile_names.NAMES) and len({line.count("|") for line in table}) == 1
    plain = text.partition("<details>")[0]
    assert "<" not in plain and "@" not in plain and "://" not in plain and "#12" not in plain.replace("&#35;", "")


PHASES = {
    "M": {"name", "ph", "ts", "pid", "tid", "args"},
    "C": {"name", "cat", "ph", "ts", "pid", "args"},
    "i": {"name", "cat", "ph", "ts", "pid", "tid", "s", "args"},
    "b": {"name", "cat", "ph", "ts", "id", "pid", "tid", "args"},
    "e": {"name", "cat", "ph", "ts", "id", "pid", "tid", "args"},
}
"""The fields of each phase, as Google's "Trace Event Format" describes them."""


def checked(text: str) -> list[dict[str, Any]]:
    """The events, each with the documented fields and types."""
    trace = json.loads(text)
    assert set(trace) == {"traceEvents", "displayTimeUnit"} and trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        assert set(event) == PHASES[event["ph"]], event
        assert all(type(event[key]) is int and event[key] >= 0 for key in ("ts", "pid", "tid") if key in event)
        assert isinstance(event["name"], str) and isinstance(event.get("cat", ""), str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and set(event["args"]) == {"name"}
        elif event["ph"] == "C":
            assert event["args"] and all(type(value) is int for value in event["args"].values())
        elif event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
    found: list[dict[str, Any]] = trace["traceEvents"]
    begun: dict[tuple[str, str], dict[str, Any]] = {}
    for event in found:  # what begins ends once, under the same id, category and name
        if event["ph"] == "b":
            assert begun.setdefault((event["cat"], event["id"]), event) is event and int(event["id"], 16) > 0
        elif event["ph"] == "e":
            first = begun.pop((event["cat"], event["id"]))
            assert event["name"] == first["name"] and event["ts"] >= first["ts"]
    assert not begun
    return found


def spans_of(events: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """Name, begin and end in microseconds."""
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    return [(event["name"], event["ts"], ends[event["id"]]) for event in events if event["ph"] == "b"]


def test_the_trace_has_the_documented_fields_and_every_figure(timeline: Path) -> None:
    events = checked("".join(perfetto.trace([("a", load_timeline(timeline)), ("b", load_timeline(timeline))])))
    assert {event["pid"] for event in events} == {1, 2}
    assert next(event["args"]["name"] for event in events if event["name"] == "process_name").startswith("a (process ")
    samples = list(load_timeline(timeline).samples())
    begin = samples[0].time
    level: dict[str, dict[str, int]] = {}
    counters = iter([event for event in events if event["pid"] == 1 and event["ph"] == "C"])
    coming = next(counters, None)
    for sample in samples:
        while coming is not None and coming["ts"] <= round((sample.time - begin) * 1e6):
            level[coming["name"]] = coming["args"]
            coming = next(counters, None)
        for name, usage in sample.devices[0].frameworks.items():
            shown = level[f"GPU 0 {name}"]
            assert shown["in use"] == usage.in_use
            assert usage.held is None or shown["in use"] + shown["idle"] == max(usage.held, usage.in_use or 0)
    (oom,) = [event for event in events if event["pid"] == 1 and event.get("cat") == "oom"]
    assert "its cap of 14.00 GiB is reached" in oom["args"]["why"] and oom["args"]["to do 1"]
    spans = [(name, end - begin) for name, begin, end in spans_of(events)]
    assert spans == [("validation", 12_000_000), ("suspended", 20_000_000)] * 2


def test_workloads_that_overlap_are_spans_that_may(tmp_path: Path) -> None:
    """Complete events of one thread have to nest, and a viewer drops those that do not."""
    plan = plan_of(torch="4GiB", cupy="4GiB")
    with Writer(tmp_path / "run.jsonl", plan, simulated=True, clock=Clock()) as writer:
        writer.sample(sample_of(plan, START))
        for begin, end, name, framework in ((0, 40, "train", "torch"), (30, 60, "features", "cupy")):
            writer.event(Event(START + end, "workload", name, framework=framework, seconds=float(end - begin)))
    (path,) = tmp_path.iterdir()
    events = checked("".join(perfetto.trace([("run", load_timeline(path))])))
    assert spans_of(events) == [("train", 0, 40_000_000), ("features", 30_000_000, 60_000_000)]
    assert [event["args"] for event in events if event["ph"] == "b"] == [{"framework": "torch"}, {"framework": "cupy"}]


def test_hostile_names_make_a_trace(tmp_path: Path) -> None:
    assert checked("".join(perfetto.trace([("\x1b", load_timeline(hostile_names.record(tmp_path)))])))
