"""Timelines: what is written is read back, the files keep their bound and their owner, wrong ones are refused."""

from __future__ import annotations

import codecs
import copy
import errno
import itertools
import json
import os
import random
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timelines import START, Clock, busy, plan_of, sample_of, total

from memguard._base.types import DeviceSample, Event, FrameworkSample, Pressure, Sample
from memguard._base.units import GIB, KIB, MAX_SIZE, MIB
from memguard._budget.ranks import rank_of
from memguard._timeline import Dropped, Oom, Writer, files, load_timeline, writer
from memguard._timeline.format import MAX_LINE, MAX_SECONDS
from memguard.errors import TimelineError

PLAN = plan_of()
SMALL = 512 * KIB


@pytest.mark.parametrize("path", [None, 3, b"run.jsonl"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(TimelineError, match="is loaded by its path, not by"):
        load_timeline(path)


def test_a_run_is_read_back(tmp_path: Path) -> None:
    event = Event(START + 1, "pressure", "torch is at 86 %", Pressure.WARN, "GPU-1", "torch", 3.5, GIB)
    usage = FrameworkSample(3 * GIB, 2 * GIB, None, PLAN.devices[0].caps["torch"])
    samples = [sample_of(PLAN, START + t, torch=usage._replace(in_use=t)) for t in range(5)]
    with Writer(tmp_path / "run.jsonl", PLAN, clock=Clock(), rank=3, frameworks={"torch": {"version": "2.11"}}) as out:
        assert out.path == str(tmp_path / f"run-{os.getpid()}-3.jsonl")
        for sample in samples:
            out.sample(sample)
        out.event(event)
        out.event(Event(START + 2, "note", "nothing else"))
        out.oom({"time": START + 3, "requested": GIB, "processes": {7: None}, "remedies": ({"bytes": 1},)})
    timeline = load_timeline(out.path)
    assert list(timeline.samples()) == samples
    assert list(timeline.events()) == [event, Event(START + 2, "note", "nothing else")]
    report = {"time": START + 3, "requested": GIB, "processes": {"7": None}, "remedies": [{"bytes": 1}]}
    assert list(timeline.ooms()) == [Oom(START + 3, report)]
    assert [type(record) for record in timeline.records()] == [Sample] * 5 + [Event] * 2 + [Oom]
    assert timeline.plan == PLAN and timeline.notes == () and not timeline.dropped
    header = timeline.header
    assert (header.pid, header.rank, header.simulated, header.part) == (os.getpid(), 3, True, 1)
    assert header.frameworks == {"torch": {"version": "2.11"}} and header.recorded == "2025-11-21T15:00:00.000+00:00"
    assert stat.S_IMODE(os.stat(out.path).st_mode) == 0o600
    out.sample(samples[0])
    assert len(list(timeline.samples())) == 5, "nothing is written after close"


def test_frameworks_that_share_a_cap_are_in_the_header(tmp_path: Path) -> None:
    (part,) = PLAN.devices
    joined = replace(PLAN, devices=(replace(part, joined=("torch", "cupy")),))
    with Writer(tmp_path / "run.jsonl", joined, clock=Clock()) as out:
        pass
    assert load_timeline(out.path).plan == joined
    older = Path(out.path).read_text().replace(',"joined":["torch","cupy"]', "")
    Path(out.path).write_text(older)
    assert load_timeline(out.path).plan == PLAN, "a file of a version that did not write it"


sizes = st.integers(0, MAX_SIZE)
maybe = st.none() | sizes
usages = st.builds(FrameworkSample, maybe, maybe, maybe, maybe)
devices = st.builds(
    DeviceSample, st.sampled_from(["GPU-a", "GPU-b", PLAN.devices[0].device.uuid]), sizes, sizes, sizes, maybe, maybe,
    sizes, st.none() | st.integers(-MAX_SIZE, MAX_SIZE),
    st.dictionaries(st.sampled_from(["torch", "jax", "rmm", 'a"b', "None"]), usages),
)  # fmt: skip
times = st.integers(0, 4 * 10**12).map(lambda ms: ms / 1000)
samples_ = st.builds(Sample, times, st.lists(devices, max_size=3, unique_by=lambda d: d.uuid).map(tuple))
events_ = st.builds(
    Event, times, st.text(max_size=20), st.text(max_size=400), st.none() | st.sampled_from(Pressure),
    st.none() | st.text(max_size=50), st.none() | st.text(max_size=50),
    st.none() | st.floats(-MAX_SECONDS, MAX_SECONDS), maybe, maybe, maybe, maybe, maybe, maybe, maybe,
)  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 62), 1 << 62) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
ooms_ = st.builds(
    Oom, times, st.dictionaries(st.text(max_size=8).filter(lambda key: key != "time"), values, max_size=4)
)


@given(st.lists(samples_ | events_ | ooms_, max_size=30), st.none() | st.integers(0, 10**6))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, records: Any, rank: int | None) -> None:
    said: list[str] = []
    with Writer(tmp_path_factory.mktemp("run") / "run.jsonl", PLAN, rank=rank, say=said.append) as out:
        for record in records:
            if isinstance(record, Sample):
                out.sample(record)
            elif isinstance(record, Event):
                out.event(record)
            else:
                out.oom({**record.report, "time": record.time})
    expected = [Oom(r.time, {**r.report, "time": r.time}) if isinstance(r, Oom) else r for r in records]
    timeline = load_timeline(out.path)
    assert list(timeline.records()) == expected and said == []
    assert list(timeline.events()) == [record for record in expected if isinstance(record, Event)]
    assert timeline.header.rank == rank


weird = st.recursive(
    st.none() | st.floats() | st.integers() | st.binary(max_size=4) | st.builds(object) | st.text(max_size=9)
    | st.builds(pow, st.just(10), st.just(5000)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=2)
    | st.sets(st.integers(), max_size=2),
    max_leaves=5,
)  # fmt: skip


@given(st.dictionaries(st.text(max_size=5), weird, max_size=4))
def test_a_report_of_anything_leaves_a_timeline_that_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, report: dict[str, Any]
) -> None:
    with Writer(tmp_path_factory.mktemp("run") / "run.jsonl", PLAN, clock=Clock()) as out:
        out.oom(report)
        out.sample(sample_of(PLAN, START))
    assert [type(record) for record in load_timeline(out.path).records()] == [Oom, Sample]


def test_numbers_that_json_does_not_have_are_unknown(tmp_path: Path) -> None:
    inf = float("inf")
    with Writer(tmp_path / "run.jsonl", PLAN, clock=Clock()) as out:
        out.oom({"time": 10**400})
        out.event(Event(inf, "forecast", "\ud800 None", seconds=inf, bytes=1 << 70))
        out.event(Event(inf, "forecast", "\ud800 None", seconds=1e300, bytes=-(1 << 70)))
        out.oom({"time": float("nan"), "seconds": -inf})
    timeline = load_timeline(out.path)
    assert list(timeline.events()) == [Event(0.0, "forecast", "\ud800 None")] * 2
    assert list(timeline.ooms()) == [Oom(START, {"time": None}), Oom(START, {"time": None, "seconds": None})]


def test_long_texts_are_cut_and_reports_lose_what_is_largest(tmp_path: Path) -> None:
    with Writer(tmp_path / "run.jsonl", PLAN, limit_bytes=SMALL, clock=Clock()) as out:
        out.event(Event(START, "k" * 100, "\U0001f600" * 9999, framework="f" * 9999, uuid="u" * 9999))
        out.oom({"samples": ["x" * 100] * 9999, "more": "y" * 99999, "requested": GIB})
    timeline = load_timeline(out.path)
    (event,), (oom,) = timeline.events(), timeline.ooms()
    assert event.text == "\U0001f600" * 500 and event.framework == "f" * 100
    assert oom.report == {"requested": GIB, "cut": ["samples", "more"]}


def test_a_sample_of_six_frameworks_is_short(tmp_path: Path) -> None:
    rng = random.Random(1)
    with Writer(tmp_path / "run.jsonl", PLAN) as out:
        before = os.path.getsize(out.path)
        for at in range(100):
            out.sample(busy(PLAN, START + at / 2, rng))
    assert (os.path.getsize(out.path) - before) / 100 <= 300


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("run.jsonl", "run-7-2.jsonl"), ("run", "run-7-2"), ("a.b.jsonl", "a.b-7-2.jsonl"),
        ("{pid}.jsonl", "7.jsonl"), ("r{rank}", "r2"), ("{pid}-{rank}-{pid}.x", "7-2-7.x"), ("{x}", "{x}-7-2"),
        (".hidden", ".hidden-7-2"),
    ],
)  # fmt: skip
def test_the_name(tmp_path: Path, pattern: str, name: str) -> None:
    assert files.expand(tmp_path / pattern, 7, 2) == str(tmp_path / name)


def test_the_rank_in_the_folder_is_enough() -> None:
    assert files.expand("/x/{rank}/run.jsonl", 7, None) == "/x/0/run.jsonl"


def test_ranks() -> None:
    assert rank_of({}) is None and rank_of({"RANK": "", "SLURM_PROCID": "x"}) is None
    assert rank_of({"RANK": " 3 ", "SLURM_PROCID": "4"}) == 3
    assert rank_of({"SLURM_PROCID": "4"}) == 4 and rank_of({"OMPI_COMM_WORLD_RANK": "0"}) == 0


def test_what_is_in_the_way_is_refused_and_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = tmp_path / "0.jsonl"

    def refused(message: str, fix: str = "name another file") -> None:
        with pytest.raises(TimelineError, match=message) as caught:
            Writer(tmp_path / "{rank}.jsonl", PLAN)
        assert str(caught.value).startswith(str(path)) and f"\n    fix: {fix}" in str(caught.value)

    path.symlink_to(victim)
    refused("is a symbolic link, which is not followed")
    path.unlink()
    path.symlink_to(tmp_path / "absent")
    refused("is a symbolic link")
    path.unlink()
    path.mkdir()
    refused("is a folder")
    path.rmdir()
    os.mkfifo(path)
    refused("is not a regular file")
    path.unlink()
    os.link(victim, path)
    refused("exists already and is not a timeline")
    path.unlink()
    path.write_text('{"memguard_trace": 1}\n')
    refused("exists already and is not a timeline")
    path.unlink()
    Writer(tmp_path / "{rank}.jsonl", PLAN).close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        refused("belongs to another user")
    with Writer(tmp_path / "{rank}.jsonl", PLAN):
        refused("is writing it", "put {pid} and {rank} into its name")
    assert victim.read_text() == "precious" and not (tmp_path / "absent").exists()


def test_where_it_cannot_be_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TimelineError, match=r"No such file or directory\n    fix: make the folder"):
        Writer(tmp_path / "no" / "run.jsonl", PLAN)
    for name in ("", "\0", "folder/"):
        with pytest.raises(TimelineError, match=r"does not name a file\n    fix: "):
            Writer(name, PLAN)
    with pytest.raises(TimelineError, match=r"511\.0 KiB is too small .*\n    fix: .*512\.0 KiB"):
        Writer(tmp_path / "run.jsonl", PLAN, limit_bytes=511 * KIB)
    many = plan_of(*["h200"] * 30)
    with pytest.raises(TimelineError, match="too small for a timeline of this plan"):
        Writer(tmp_path / "run.jsonl", many, limit_bytes=SMALL)
    monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(TimelineError, match="No space left"):
        Writer(tmp_path / "run.jsonl", PLAN)
    monkeypatch.undo()
    Writer(tmp_path / "run.jsonl", PLAN).close()  # the empty file that was left is its own
    assert len(list(tmp_path.iterdir())) == 1


def fill(out: Writer, count: int, begin: float = START, seed: int = 5) -> list[Sample]:
    rng = random.Random(seed)
    samples = [busy(PLAN, begin + at / 2, rng) for at in range(count)]
    for sample in samples:
        out.sample(sample)
    return samples


def test_rotation_keeps_everything_while_there_is_room(tmp_path: Path) -> None:
    with Writer(tmp_path / "{pid}.jsonl", PLAN, limit_bytes=SMALL) as out:
        samples = fill(out, 500)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert f"{os.getpid()}.jsonl" in names and f"{os.getpid()}.1.jsonl" in names and len(names) > 5
    timeline = load_timeline(out.path)
    assert list(timeline.samples()) == samples and timeline.notes == ()
    assert timeline.header.part == len(names)
    alone = load_timeline(tmp_path / f"{os.getpid()}.2.jsonl")
    assert alone.plan == PLAN and alone.header.part == 2
    part = list(alone.samples())
    assert part == samples[samples.index(part[0]) :][: len(part)], "each file can be read alone"


@pytest.mark.long
def test_a_day_stays_within_its_bound(tmp_path: Path) -> None:
    """24 hours of six frameworks at 500 ms, in 8 MiB: reports, events, peaks and an overview of the whole are left."""
    limit, rng, clock = 8 * MIB, random.Random(20261121), Clock()
    out = Writer(tmp_path / "run.jsonl", PLAN, limit_bytes=limit, clock=clock)
    some = [busy(PLAN, 0, rng) for _ in range(997)]
    largest, peaks = 0, {}
    for at in range(24 * 3600 * 2):
        clock.now = START + at / 2
        sample = some[at % len(some)]._replace(time=clock.now)
        if at in (50, 20_000, 100_001):  # peaks of a single sample, when everything else has long been thinned out
            name = {50: "torch", 20_000: "jax", 100_001: "tensorflow"}[at]
            usage = FrameworkSample(None if name == "tensorflow" else 30 * GIB, 29 * GIB, 0, 40 * GIB)
            sample = peaks[name] = sample_of(PLAN, clock.now, **{name: usage})
        out.sample(sample)
        if at % 3600 == 7:
            out.event(Event(clock.now, "pressure", f"event {at}", Pressure.WARN))
        if at in (12, 90_000):
            out.oom({"time": clock.now, "requested": at})
        if at % 500 == 0 or (at % 97 == 0 and at < 40_000):
            largest = max(largest, total(tmp_path))
    out.close()
    largest = max(largest, total(tmp_path))
    assert limit * 0.7 < largest <= limit
    timeline = load_timeline(out.path)
    read = list(timeline.samples())
    assert [s.time for s in read] == sorted(s.time for s in read)
    assert all(s in read for s in peaks.values())
    assert [e.text for e in timeline.events()] == [f"event {at}" for at in range(7, 24 * 7200, 3600)]
    assert [oom.report["requested"] for oom in timeline.ooms()] == [12, 90_000]
    assert timeline.dropped == Dropped(24 * 7200 - len(read)), "what was dropped is counted"
    gaps = [later.time - earlier.time for earlier, later in itertools.pairwise(read)]
    assert max(gaps) < 130, "no hole in the overview"
    (note,) = timeline.notes
    assert note.startswith("no longer in the files, or never written: 1") and note.endswith(" s, and the peaks")
    newest = [s for s in read if s.time >= START + 21 * 3600]
    assert len(newest) == 3 * 7200, "the last hours are whole"


def test_events_beyond_the_bound_go_last(tmp_path: Path) -> None:
    """A storm of events may not crowd the reports out, nor grow the files."""
    with Writer(tmp_path / "run.jsonl", PLAN, limit_bytes=SMALL, clock=Clock()) as out:
        out.oom({"requested": 1})
        for at in range(4000):
            out.event(Event(START + at, "note", "x" * 200))
            assert at % 50 or total(tmp_path) <= SMALL
        samples = fill(out, 300)
    timeline = load_timeline(out.path)
    assert len(list(timeline.ooms())) == 1
    events = list(timeline.events())
    assert timeline.dropped.events == 4000 - len(events) > 1000 and events[-1].time == START + 3999
    assert list(timeline.samples())[-300:] == samples


def test_columns_that_change_survive_thinning(tmp_path: Path) -> None:
    """A cap that is resized now and then: every sample that is left has the cap of its time."""
    written = {}
    with Writer(tmp_path / "run.jsonl", PLAN, limit_bytes=SMALL) as out:
        for at in range(6000):
            cap = GIB + (at // 100) * MIB
            sample = sample_of(PLAN, START + at, torch=FrameworkSample(at, at % 77, 0, cap))
            written[sample.time] = sample
            out.sample(sample)
            assert at % 100 or total(tmp_path) <= SMALL
    timeline = load_timeline(out.path)
    read = list(timeline.samples())
    assert all(written[sample.time] == sample for sample in read)
    assert timeline.dropped.samples == 6000 - len(read) > 0


def test_an_earlier_run_of_the_same_name_is_set_aside(tmp_path: Path) -> None:
    """A container's program has the same PID each time: its timeline from before the restart is worth most."""
    with Writer(tmp_path / "{rank}.jsonl", PLAN, limit_bytes=SMALL) as out:
        first = fill(out, 40)
        out.oom({"requested": 1})
    with Writer(tmp_path / "{rank}.jsonl", PLAN, limit_bytes=SMALL) as out:
        second = fill(out, 40, seed=6)
    timeline = load_timeline(out.path)
    assert list(timeline.samples()) == second and not list(timeline.ooms())
    old = tmp_path / "0.1.jsonl"
    assert timeline.notes == (f"left out, as they belong to an earlier run: {old}; each can be read alone",)
    assert list(load_timeline(old).samples()) == first
    with Writer(tmp_path / "{rank}.jsonl", PLAN, limit_bytes=SMALL) as out:
        fill(out, 3000)
        assert total(tmp_path) <= SMALL
    assert load_timeline(out.path).notes[0].startswith("no longer in the files"), "earlier runs go first"
    assert not any("earlier run" in note for note in load_timeline(out.path).notes)


def test_nothing_but_its_own_files_is_ever_removed(tmp_path: Path) -> None:
    (tmp_path / "0.3.jsonl").write_text("precious")
    (tmp_path / "0.0.jsonl").write_text("kept by somebody")
    (tmp_path / "0.tmp.jsonl").symlink_to(tmp_path / "0.3.jsonl")
    with Writer(tmp_path / "{rank}.jsonl", PLAN, limit_bytes=SMALL) as out:
        fill(out, 3000)
    assert (tmp_path / "0.3.jsonl").read_text() == "precious"
    assert (tmp_path / "0.0.jsonl").read_text() == "kept by somebody" and (tmp_path / "0.tmp.jsonl").is_symlink()
    timeline = load_timeline(out.path)
    assert len(list(timeline.samples())) + timeline.dropped.samples == 3000
    assert len([note for note in timeline.notes if note.startswith("left out: ")]) == 2


def test_a_file_that_takes_a_parts_name_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    with Writer(tmp_path / "{rank}.jsonl", PLAN, limit_bytes=SMALL) as out:
        (tmp_path / "0.1.jsonl").write_text("precious")
        samples = fill(out, 200)
    assert (tmp_path / "0.1.jsonl").read_text() == "precious"
    assert list(load_timeline(out.path).samples()) == samples


def test_a_part_that_was_thinned_out_and_not_removed_is_not_read_twice(tmp_path: Path) -> None:
    with Writer(tmp_path / "{rank}.jsonl", PLAN, limit_bytes=SMALL) as out:
        fill(out, 100)
        saved = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        fill(out, 2400, START + 1000)
    oldest = min(number for number, _ in files.numbered(out.path) if number)
    (tmp_path / "0.1.jsonl").write_bytes(saved["0.1.jsonl"])  # as if killed between the two steps
    timeline = load_timeline(out.path)
    times = [sample.time for sample in timeline.samples()]
    assert oldest > 1 and len(times) == len(set(times))


def test_a_damaged_part_is_dropped_whole(tmp_path: Path) -> None:
    with Writer(tmp_path / "{rank}.jsonl", PLAN, limit_bytes=SMALL) as out:
        fill(out, 100)
        part = tmp_path / "0.1.jsonl"
        part.write_bytes(part.read_bytes().replace(b'"sample":[[0', b'"sample":[["x"'))
        fill(out, 2900, START + 1000)
    timeline = load_timeline(out.path)
    assert len(list(timeline.samples())) + timeline.dropped.samples == 3000


def test_a_full_disk_is_said_once_and_again_when_it_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    clock = Clock()
    out = Writer(tmp_path / "run.jsonl", PLAN, clock=clock, say=said.append)
    before = fill(out, 5)
    usage = FrameworkSample(GIB, GIB, 0, 7 * GIB)  # with another cap: columns that do not get to the disk
    real, full, attempts = os.write, True, 0

    def write(handle: int, data: bytes) -> int:
        nonlocal attempts
        attempts += 1
        if full and attempts % 2:
            return real(handle, data[: len(data) // 2])
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data)

    monkeypatch.setattr(os, "write", write)
    for at in range(100):
        clock.now = START + at / 2
        out.sample(sample_of(PLAN, clock.now, torch=usage))
    assert attempts < 15, "it is not tried at every sample"
    out.event(Event(clock.now, "note", "lost"))
    full = False
    assert len(said) == 1 and "cannot be written: No space left on device" in said[0]
    clock.now += 60
    out.sample(sample_of(PLAN, clock.now, torch=usage))
    assert len(said) == 2 and "is written again; left out: 1 event, 100 samples" in said[1]
    out.close()
    timeline = load_timeline(out.path)
    assert list(timeline.samples()) == [*before, sample_of(PLAN, clock.now, torch=usage)]
    (event,) = timeline.events()
    assert event.kind == "note" and "left out: 1 event, 100 samples" in event.text


def test_a_disk_that_is_full_when_a_file_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    clock = Clock()
    out = Writer(tmp_path / "{rank}.jsonl", PLAN, limit_bytes=SMALL, clock=clock, say=said.append)
    written = len(fill(out, 700))
    real, lost = os.write, 0

    def write(handle: int, data: bytes) -> int:
        if os.fstat(handle).st_size == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        while not said:
            fill(out, 1)
            lost += 1
    clock.now += 60
    fill(out, 10)
    out.close()
    assert len(said) == 2
    timeline = load_timeline(out.path)
    assert len(list(timeline.samples())) + timeline.dropped.samples in (written + lost + 10, written + lost + 9)
    assert total(tmp_path) <= SMALL


def test_a_folder_that_goes_and_comes_back(tmp_path: Path) -> None:
    folder, said, clock = tmp_path / "x", [], Clock()
    folder.mkdir()
    out = Writer(folder / "run.jsonl", PLAN, clock=clock, say=said.append)
    fill(out, 3)
    os.unlink(out.path)
    folder.rmdir()
    for _ in range(5):
        clock.now += 10
        fill(out, 1)
    out.oom({"requested": 1})
    assert len(said) == 1 and "No such file or directory" in said[0]
    folder.mkdir()
    fill(out, 1)
    clock.now += 10
    samples = fill(out, 2)
    assert len(said) == 2
    out.close()
    assert list(load_timeline(out.path).samples()) == samples


def test_a_file_that_was_removed_is_begun_anew(tmp_path: Path) -> None:
    with Writer(tmp_path / "run.jsonl", PLAN) as out:
        fill(out, 3)
        os.unlink(out.path)
        samples = fill(out, 2)
    assert list(load_timeline(out.path).samples()) == samples


def test_a_file_that_somebody_cut(tmp_path: Path) -> None:
    """As logrotate's copytruncate does: what follows gets a header again."""
    with Writer(tmp_path / "{rank}.jsonl", PLAN) as out:
        fill(out, 3)
        os.truncate(out.path, 0)
        samples = fill(out, 2)
    timeline = load_timeline(out.path)
    assert list(timeline.samples()) == samples
    assert timeline.notes == (f"left out: {tmp_path / '0.1.jsonl'}: it has no complete line",)


def test_half_a_line_that_cannot_be_taken_back_ends_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    out = Writer(tmp_path / "{rank}.jsonl", PLAN, clock=clock)
    before = fill(out, 3)
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda handle, data: real(handle, data[:30]))
        patch.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        fill(out, 1)
    clock.now += 60
    after = fill(out, 2, START + 60)
    out.close()
    timeline = load_timeline(out.path)
    assert list(timeline.samples()) == [*before, *after]
    assert f"{tmp_path / '0.1.jsonl'}: the last line was cut short, and is left out" in timeline.notes
    assert timeline.dropped == Dropped(samples=1)


def test_a_working_directory_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: (_ for _ in ()).throw(FileNotFoundError()))
    with pytest.raises(TimelineError, match=r"the working directory is gone\n    fix: "):
        Writer("run.jsonl", PLAN)


def test_a_file_that_somebody_moved_or_replaced(tmp_path: Path) -> None:
    said: list[str] = []
    with Writer(tmp_path / "run.jsonl", PLAN, limit_bytes=SMALL, say=said.append) as out:
        fill(out, 10)
        os.rename(out.path, tmp_path / "moved")
        Path(out.path).write_text("precious")
        fill(out, 100)
        assert Path(out.path).read_text() == "precious"
        assert len(said) == 1 and "File exists" in said[0]


def test_a_callback_that_fails_or_writes_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def say(text: str) -> None:
        out.event(Event(START, "note", text))
        raise RuntimeError

    out = Writer(tmp_path / "run.jsonl", PLAN, say=say)
    monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    fill(out, 3)
    monkeypatch.undo()
    out.event(Event(START, "note", "again"))
    out.close()
    assert "again" in [event.text for event in load_timeline(out.path).events()]


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    with Writer(tmp_path / "run.jsonl", PLAN, limit_bytes=4 * MIB) as out:
        threads = [threading.Thread(target=fill, args=(out, 200), kwargs={"seed": n}) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(list(load_timeline(out.path).samples())) == 1200


def test_a_disk_that_hangs_does_not_hang_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_LOCK_TIMEOUT", 0.05)
    out = Writer(tmp_path / "run.jsonl", PLAN)
    with out._locked._lock:
        thread = threading.Thread(target=out.event, args=(Event(START, "note", "lost"),))
        thread.start()
        thread.join()
    fill(out, 1)
    assert out._unreported == Dropped(events=1)
    out.close()


def written(tmp_path: Path) -> Path:
    with Writer(tmp_path / "{rank}.jsonl", PLAN, clock=Clock()) as out:
        fill(out, 2)
    return Path(out.path)


def in_parts(tmp_path: Path, samples: int = 300) -> Path:
    """A timeline of several files; one of 3,000 samples is thinned too."""
    with Writer(tmp_path / "{rank}.jsonl", PLAN, limit_bytes=SMALL) as out:
        fill(out, samples)
    return Path(out.path)


def change_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    first, _, rest = path.read_text().partition("\n")
    header = json.loads(first)
    change(header)
    path.write_text(json.dumps(header, separators=(",", ":")) + "\n" + rest)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "malformed JSON: it ends too early\n"),
        ("{'a': 1}", "malformed JSON: .* at character 2\n"),
        ("", "malformed JSON: it ends too early\n"),
        ("\xff", "malformed JSON: it is not UTF-8\n"),
        ("[" * 100_000, "malformed JSON: nested too deeply"),
        ("[]", "not a JSON object"),
        ('{"t":NaN,"sample":[]}', "malformed JSON: NaN is not a number\n"),
        ('{"t":"1","sample":[]}', "t: '1' is not a time"),
        ('{"sample":[]}', "t: None is not a time"),
        ('{"t":true,"sample":[]}', "t: True is not a time"),
        ('{"t":1e99,"sample":[]}', "is not a time"),
        ('{"t":1}', "not a time and one record"),
        ('{"t":1,"sample":[],"event":{}}', "not a time and one record"),
        ('{"t":1,"new":[]}', "'new' is not a record of version 1"),
        ('{"t":1,"sample":5}', "the sample is damaged: 5 is not a list of rows\n"),
        ('{"t":1,"sample":[[0]]}', "the sample is damaged: a value is missing, or is not of its type\n"),
        ('{"t":1,"sample":[[9,1,1,1,1,1]]}', "more columns than were named"),
        ('{"t":1,"sample":[[-1,1,1,1,1,1]]}', "more columns than were named"),
        ('{"t":1,"sample":[[0,1,1,1,1,1,0,0,0,0,0,0,0]]}', "more columns than were named"),
        ('{"t":1,"sample":[[0,1,1.5,1,1,1]]}', "1.5 is not a whole number"),
        ('{"t":1,"sample":[[0,1,1,"x",1,1]]}', "'x' is neither a whole number in range nor null"),
        ('{"t":1,"sample":[[0,1,1,1,1,1,[1,true,1]]]}', "True is neither"),
        ('{"t":1,"sample":[[0,1,1,1,1,1,[1,2]]]}', "the sample is damaged"),
        ('{"t":1,"sample":[[0,1,1,1,1,1,[1,2,9999999999999999999]]]}', "is neither a whole number in range"),
        ('{"t":1,"event":[]}', "the event is damaged"),
        ('{"t":1,"event":{"kind":"note"}}', "the event is damaged: a value is missing"),
        ('{"t":1,"event":{"kind":"note","text":5}}', "text is 5"),
        ('{"t":1,"event":{"kind":"note","text":"","new":5}}', "the event is damaged: new is 5\n"),
        ('{"t":1,"event":{"kind":"note","text":"","level":"high"}}', "the event is damaged: level is 'high'\n"),
        ('{"t":1,"oom":[]}', "the oom is damaged"),
        ('{"t":1,"columns":{}}', "the columns is damaged"),
        ('{"t":1,"columns":{"devices":[["a",1,null]],"frameworks":["x"],"caps":[[]]}}', "caps do not match"),
    ],
)  # fmt: skip
def test_wrong_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path)
    lines = path.read_bytes().split(b"\n")
    lines.insert(2, line.encode("latin-1"))
    path.write_bytes(b"\n".join(lines))
    timeline = load_timeline(path)
    with pytest.raises(TimelineError, match=message) as caught:
        list(timeline.records())
    assert str(caught.value).startswith(f"{path}:3: ") and "\n    fix: " in str(caught.value)
    assert len(next(iter(timeline.samples())).devices) == 1, "what stands before it is read"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memguard_timeline": 2}, "timeline version 2; this memguard reads 1"),
        ({"memguard_timeline": True}, "timeline version True"),
        ({"memguard_timeline": None}, "timeline version None"),
        ({"recorded": "yesterday"}, "the header is damaged: .*yesterday"),
        ({"pid": "7"}, "pid is '7'"),
        ({"rank": 1.5}, "rank is 1.5"),
        ({"dropped": {"samples": -1}}, "-1 is not a whole number"),
        ({"dropped": {"other": 1}}, "the header is damaged"),
        ({"plan": {}}, "the header is damaged: 'devices' is missing\n"),
        ({"plan": None}, "the header is damaged: a value is missing, or is not of its type\n"),
        ({"pid": "\x1b"}, r"the header is damaged: pid is '\\x1b'"),
        ({"frameworks": []}, "the header is damaged"),
        ({"columns": []}, "the header is damaged"),
        ({"every": "often"}, "every is 'often'"),
        ({"part": 0}, "part must be .*, found 0"),
        ({"part": -1}, "part must be .*, found -1"),
        ({"part": 10**9}, "part must be .*, found 1000000000"),
        ({"part": 10**40}, "part must be .*, found 1"),
        ({"part": True}, "part is True"),
        ({"part": 1.0}, "part is 1.0"),
        ({"part": "1"}, "part is '1'"),
        ({"part": None}, "part is None"),
        ({"part": 1, "through": 5}, "through must be .*, found 5"),
        ({"part": 1, "every": 2.0, "through": 5}, "part must be .*, found 1"),
        ({"part": 0, "every": 2.0}, "through must be .*, found 0"),
        ({"part": 0, "every": 2.0, "through": 0}, "through must be .*, found 0"),
        ({"part": 0, "every": 2.0, "through": True}, "through is True"),
        ({"part": 0, "every": 0, "through": 1}, "every is 0"),
        ({"part": 0, "every": -1.0, "through": 1}, "every is -1.0"),
        ({"part": 0, "every": False, "through": 1}, "every is False"),
        ({"pid": -1}, "pid must be .*, found -1"),
        ({"rank": -1}, "rank must be .*, found -1"),
    ],
)  # fmt: skip
def test_wrong_headers_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = written(tmp_path)
    change_header(path, lambda header: header.update(change))
    with pytest.raises(TimelineError, match=message) as caught:
        load_timeline(path)
    assert str(caught.value).startswith(f"{path}:1: ") and "\n    fix: " in str(caught.value)


def test_bounds_of_elastic_shares_are_read_back_and_older_files_have_none(tmp_path: Path) -> None:
    moving = {"torch": (2 * GIB, 8 * GIB), "cupy": (GIB, 4 * GIB)}
    plan = replace(PLAN, devices=(replace(PLAN.devices[0], elastic=moving),))
    with Writer(tmp_path / "0.jsonl", plan, clock=Clock()) as out:
        pass
    assert load_timeline(out.path).plan == plan
    change_header(Path(out.path), lambda header: header["plan"]["devices"][0].pop("elastic"))
    assert load_timeline(out.path).plan == PLAN


HUGE = pytest.mark.parametrize("huge", [10**400, -(10**400), 1 << 63], ids=["huge", "negative", "64 bits"])


def places(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """The path of each number in a JSON value, and of each null, in whose place a number may stand."""
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, *path, key)
    elif value is None or type(value) in (int, float):
        yield path


def put(value: Any, path: tuple[Any, ...], number: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = number


@HUGE
def test_a_number_out_of_range_is_refused_in_every_place_of_a_header(tmp_path: Path, huge: int) -> None:
    moving = {"torch": (2 * GIB, 8 * GIB)}
    plan = replace(
        PLAN, devices=(replace(PLAN.devices[0], elastic=moving),), options={"torch": {"split": [1, {"at": 2}]}}
    )
    with Writer(tmp_path / "{rank}.jsonl", plan, limit_bytes=SMALL, frameworks={"torch": {"streams": 3}}) as out:
        fill(out, 3000)
    thinned = tmp_path / "0.0.jsonl"
    whole = thinned.read_text()
    found = list(places(json.loads(whole.partition("\n")[0])))
    assert {path[-1] for path in found} >= {"reserved", "every", "at", "streams"}
    for path in found:
        thinned.write_text(whole)
        change_header(thinned, lambda header, path=path: put(header, path, huge))  # type: ignore[misc]
        with pytest.raises(TimelineError, match=r"0\.0\.jsonl:1: .*\n    fix: "):
            load_timeline(thinned)


EVENT = {
    "kind": "refused", "text": "", "seconds": 1.5, "bytes": 1, "times": 1, "held": 1, "in_use": 1, "reclaimable": 1,
    "cap": 1, "free": 1,
}  # fmt: skip


@HUGE
@pytest.mark.parametrize(
    "record",
    [
        {"sample": [[0, 1, 1, 1, 1, 1, [1, 1, 1]]]},
        {"event": EVENT},
        {"oom": {"requested": 1, "moment": {"held": 1, "parts": [1]}}},
        {"columns": {"devices": [["a", 1, 1]], "frameworks": ["torch"], "caps": [[1]]}},
    ],
    ids=lambda record: next(iter(record)),
)
def test_a_number_out_of_range_is_refused_in_every_place_of_a_record(
    tmp_path: Path, record: dict[str, Any], huge: int
) -> None:
    path = written(tmp_path)
    header = path.read_text().partition("\n")[0]
    record = {"t": START, **record}
    path.write_text(f"{header}\n{json.dumps(record)}\n")
    assert len(list(load_timeline(path).records())) == ("columns" not in record)
    for place in places(record):
        damaged = copy.deepcopy(record)
        put(damaged, place, huge)
        path.write_text(f"{header}\n{json.dumps(damaged)}\n")
        with pytest.raises(TimelineError, match=r"0\.jsonl:2: .*\n    fix: "):
            list(load_timeline(path).records())


@pytest.mark.parametrize(
    ("key", "value"), [("seconds", 1e300), ("seconds", -1e11), ("bytes", MAX_SIZE + 1), ("seconds", True)]
)
def test_an_event_with_a_number_out_of_range_names_it(tmp_path: Path, key: str, value: Any) -> None:
    path = written(tmp_path)
    with path.open("a") as file:
        file.write(json.dumps({"t": START, "event": {**EVENT, key: value}}) + "\n")
    with pytest.raises(TimelineError, match=rf":\d+: the event is damaged: {key} .*\n    fix: remove the line"):
        list(load_timeline(path).records())


@pytest.mark.parametrize("bounds", [[1], [1, 2, 3], 7, None, [-1, 2], ["1", 2], {"min": 1}])
def test_damaged_bounds_of_an_elastic_share_are_refused(tmp_path: Path, bounds: Any) -> None:
    path = written(tmp_path)
    change_header(path, lambda header: header["plan"]["devices"][0].update(elastic={"torch": bounds}))
    with pytest.raises(TimelineError, match=r":1: the header is damaged: .*\n    fix: "):
        load_timeline(path)


@pytest.mark.parametrize(
    "key", ["recorded", "run", "pid", "rank", "simulated", "part", "plan", "frameworks", "dropped"]
)
def test_a_header_without_one_of_its_keys_is_refused(tmp_path: Path, key: str) -> None:
    path = written(tmp_path)
    change_header(path, lambda header: header.pop(key))
    with pytest.raises(TimelineError, match=rf":1: the header is damaged: .*{key}.*\n    fix: "):
        load_timeline(path)


def test_an_older_part_with_a_damaged_number_is_left_out(tmp_path: Path) -> None:
    path = in_parts(tmp_path)
    whole = list(load_timeline(path).samples())
    first = len(list(load_timeline(tmp_path / "0.1.jsonl").samples()))
    change_header(tmp_path / "0.1.jsonl", lambda header: header.update(part=0))
    timeline = load_timeline(path)
    assert list(timeline.samples()) == whole[first:]
    assert [note for note in timeline.notes if "0.1.jsonl:1: the header is damaged: " in note and "found 0" in note]


def test_a_part_that_is_there_twice_is_read_once(tmp_path: Path) -> None:
    path = in_parts(tmp_path)
    whole = list(load_timeline(path).samples())
    shutil.copy(tmp_path / "0.1.jsonl", tmp_path / "0.77.jsonl")
    timeline = load_timeline(path)
    assert list(timeline.samples()) == whole
    assert timeline.notes == (f"left out: {tmp_path}/0.77.jsonl: it is part 1, as {tmp_path}/0.1.jsonl is",)


def test_parts_are_read_by_their_numbers_and_not_by_their_names(tmp_path: Path) -> None:
    path = in_parts(tmp_path)
    whole = list(load_timeline(path).samples())
    os.rename(tmp_path / "0.1.jsonl", tmp_path / "0.77.jsonl")
    assert list(load_timeline(path).samples()) == whole


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = in_parts(tmp_path)
    whole = list(load_timeline(path).samples())
    for part in tmp_path.glob("*.jsonl"):
        part.write_bytes(codecs.BOM_UTF8 + part.read_bytes())
    timeline = load_timeline(path)
    assert list(timeline.samples()) == whole and timeline.notes == ()
    path.write_bytes(path.read_bytes()[:40])
    (note,) = [note for note in load_timeline(path).notes if "header" in note]
    assert note.startswith(f"{path}: the header was cut short")


@pytest.mark.parametrize("folder", [".", "links"])
def test_a_link_to_a_timeline_is_read_with_the_older_parts(tmp_path: Path, folder: str) -> None:
    path = in_parts(tmp_path)
    whole = list(load_timeline(path).samples())
    (tmp_path / folder).mkdir(exist_ok=True)
    link = tmp_path / folder / "link.jsonl"
    link.symlink_to(path)
    (tmp_path / folder / "again.jsonl").symlink_to(link)
    for name in (link, link.with_name("again.jsonl")):
        timeline = load_timeline(name)
        assert list(timeline.samples()) == whole and timeline.notes == ()


def test_parts_that_are_links_into_a_store_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    path = in_parts(tmp_path)
    whole = list(load_timeline(path).samples())
    for number, part in enumerate(sorted(tmp_path.glob("*.jsonl"))):
        os.rename(part, tmp_path / "store" / f"{number:08x}")
        part.symlink_to(tmp_path / "store" / f"{number:08x}")
    timeline = load_timeline(path)
    assert list(timeline.samples()) == whole and timeline.notes == ()


def test_a_link_to_a_timeline_that_is_rotated_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "link.jsonl"
    with Writer(tmp_path / "{rank}.jsonl", PLAN, limit_bytes=SMALL) as out:
        samples = fill(out, 5)
        link.symlink_to(out.path)
        timeline = load_timeline(link)
        fill(out, 60, START + 100)
        assert list(timeline.samples())[:5] == samples and timeline.notes == ()


def test_a_thinned_part_that_replaces_the_newest_is_refused(tmp_path: Path) -> None:
    """One of the two headers is damaged, and no one can say which."""
    path = in_parts(tmp_path, 3000)
    thinned = tmp_path / "0.0.jsonl"
    number = load_timeline(path).header.part
    change_header(thinned, lambda header: header.update(through=number))
    with pytest.raises(TimelineError, match=rf"part {number} .*0\.0\.jsonl.*\n    fix: "):
        load_timeline(path)
    os.unlink(thinned)
    assert list(load_timeline(path).samples())


def test_a_file_that_was_moved_away_leaves_its_number_to_no_other(tmp_path: Path) -> None:
    with Writer(tmp_path / "{rank}.jsonl", PLAN, limit_bytes=SMALL) as out:
        samples = fill(out, 5)
        os.rename(out.path, tmp_path / "0.9.jsonl")
        samples += fill(out, 60, START + 100)
    assert list(load_timeline(out.path).samples()) == samples


@given(st.data())
@settings(max_examples=150)
def test_a_damaged_header_is_a_timeline_error_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = written(tmp_path_factory.mktemp("run"))
    first, _, rest = path.read_text().partition("\n")
    header = json.loads(first)
    here: Any = header
    while True:
        key = data.draw(st.sampled_from(sorted(here) if isinstance(here, dict) else range(len(here))))
        if not here[key] or not isinstance(here[key], (dict, list)) or data.draw(st.booleans()):
            break
        here = here[key]
    here[key] = data.draw(values)
    path.write_text(json.dumps(header) + "\n" + rest)
    try:
        list(load_timeline(path).records())
    except TimelineError as error:
        assert "\n    fix: " in str(error)


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        timeline = load_timeline(path)
        left = whole[:cut].count(b"\n") - 1
        assert len(list(timeline.samples())) == left
        torn = not whole[:cut].endswith(b"\n")
        assert timeline.notes == ((f"{path}: the last line was cut short, and is left out",) if torn else ())
    for cut in (0, 1, first - 2):
        path.write_bytes(whole[:cut])
        with pytest.raises(TimelineError, match=r"it has no complete line\n    fix: "):
            load_timeline(path)


def test_a_process_that_was_killed_while_it_began_a_file(tmp_path: Path) -> None:
    with Writer(tmp_path / "{rank}.jsonl", PLAN, limit_bytes=SMALL) as out:
        samples = fill(out, 200)
    path = Path(out.path)
    rest = len(list(load_timeline(path).samples()))
    os.rename(path, tmp_path / "aside")
    before = list(load_timeline(path).samples())
    assert samples[: len(before)] == before and 0 < len(before) < rest
    assert load_timeline(path).notes == (f"{path} does not exist: only its older parts do",)
    path.write_bytes(b'{"memguard_time')
    assert list(load_timeline(path).samples()) == before
    assert "the header was cut short" in load_timeline(path).notes[0]


def test_a_line_of_more_than_a_mebibyte_is_not_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    with open(path, "ab") as file:
        file.write(b'{"t":1,"oom":{"x":"' + b"y" * MAX_LINE)
    with pytest.raises(TimelineError, match=r":4: longer than 1048576 bytes"):
        list(load_timeline(path).records())
    path.write_bytes(b"y" * (MAX_LINE + 5))
    with pytest.raises(TimelineError, match=r":1: longer than"):
        load_timeline(path)


def test_what_is_no_timeline_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(TimelineError, match=r"cannot be read: No such file or directory\n    fix: "):
        load_timeline(tmp_path / "absent.jsonl")
    with pytest.raises(TimelineError, match="not a regular file"):
        load_timeline(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(TimelineError, match="not a regular file"):
        load_timeline(tmp_path / "fifo")
    (tmp_path / "trace.jsonl").write_text('{"memguard_trace": 1}\n')
    with pytest.raises(TimelineError, match=":1: the first line is not the header of a timeline"):
        load_timeline(tmp_path / "trace.jsonl")
    for text in ("version: 1\nframeworks: {}\n", "{version: 1}", "# a budget\n", "[]\n"):
        (tmp_path / "budget.yaml").write_text(text)
        with pytest.raises(
            TimelineError, match=r":1: .*\n    fix: this is not a timeline: name a file that memguard's mon"
        ):
            load_timeline(tmp_path / "budget.yaml")
    (tmp_path / "damaged.jsonl").write_text('{"memguard_timeline":1,x}\n')
    with pytest.raises(TimelineError, match=r":1: malformed JSON.*\n    fix: read the other parts of the timeline"):
        load_timeline(tmp_path / "damaged.jsonl")
    with pytest.raises(TimelineError, match="cannot be read"):
        load_timeline("a\0b")


def test_a_timeline_that_is_read_while_it_is_written(tmp_path: Path) -> None:
    with Writer(tmp_path / "{rank}.jsonl", PLAN, limit_bytes=SMALL) as out:
        before = fill(out, 300)
        timeline = load_timeline(out.path)
        reading = timeline.samples()
        read = [next(reading) for _ in range(5)]
        fill(out, 60, START + 1000)  # the newest file becomes a part, and another takes its place
        read += reading
        assert read[:300] == before
        reading = timeline.samples()
        read = [next(reading) for _ in range(5)]
        fill(out, 3000, START + 2000)  # and here its files go
        read += reading
        assert read[:30] == before[:30] and any(
            "was removed while the timeline was read" in note for note in timeline.notes
        )


class Hostile:
    def __index__(self) -> int:
        raise RuntimeError

    __str__ = __index__  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "Hostile()"


anything = st.one_of(
    st.sampled_from([None, True, 2**64 - 1, 2**63, -1, -(2**64), MAX_SIZE, MAX_SIZE + 1, 0, 1.5, float("nan"),
                     float("inf"), "", "None", "1", b"1", (), Hostile(), 10**5000]),
    st.integers(), st.floats(),
)  # fmt: skip
odd_usages = st.builds(FrameworkSample, anything, anything, anything, anything)
odd_devices = st.builds(
    DeviceSample, st.sampled_from(["GPU-a", "GPU-b", PLAN.devices[0].device.uuid]), anything | sizes, anything | sizes,
    anything | sizes, anything, anything, anything | sizes, anything,
    st.dictionaries(st.sampled_from(["torch", "jax", "None"]), odd_usages | usages),
)  # fmt: skip
odd_samples = st.builds(Sample, times | anything, st.lists(odd_devices | devices, max_size=3).map(tuple))
odd_events = st.builds(
    Event, times | anything, anything, anything, st.none() | st.sampled_from(Pressure), anything, anything, anything,
    anything, anything,
)  # fmt: skip


@given(st.lists(odd_samples | odd_events, max_size=10))
def test_figures_that_cannot_be_true_are_unknown_and_never_make_a_file_that_cannot_be_read(
    tmp_path_factory: pytest.TempPathFactory, records: Any
) -> None:
    with Writer(tmp_path_factory.mktemp("run") / "run.jsonl", PLAN, clock=Clock()) as out:
        for record in records:
            (out.sample if isinstance(record, Sample) else out.event)(record)
        out.sample(sample_of(PLAN, START))
    found = list(load_timeline(out.path).records())
    assert found[-1] == sample_of(PLAN, START)
    for sample in found:
        for device in sample.devices if isinstance(sample, Sample) else ():
            assert all(abs(figure) <= MAX_SIZE for figure in device if isinstance(figure, int))


def test_the_name_in_the_budget_leads_to_the_files_it_gave(tmp_path: Path) -> None:
    """`timeline: run.jsonl` is written as `run-PID-RANK.jsonl`."""
    named = tmp_path / "run.jsonl"
    for name in ("run-x-0.jsonl", "other-1-0.jsonl", "run-1-0.txt", "run-1-0.1.jsonl", "run-\u0661-0.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(TimelineError, match="give the path of a timeline"):
        load_timeline(named)
    for number, pid in enumerate((4711, 12, 99)):
        (written := tmp_path / f"run-{pid}-0.jsonl").touch()
        os.utime(written, (1000 + number, 1000 + number))
        with pytest.raises(TimelineError) as raised:
            load_timeline(named)
        count = f" (the newest of {number + 1})" if number else ""
        assert str(raised.value).endswith(f"fix: its name has PID and rank: {written}{count}")
