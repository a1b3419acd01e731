"""`memguard top` follows timelines that are being written, and survives what happens to them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path

import pytest
from timelines import START, Clock, busy, plan_of
from top_screens import GPU, TARGET, run, write

from memguard._base.types import Event, Pressure
from memguard._base.units import GIB
from memguard._node.top.snapshot import Snapshot
from memguard._timeline import Writer
from memguard._timeline.writer import MIN_LIMIT
from memguard._tools.top.follow import SILENT, Follower
from memguard._tools.top.sources import Timelines, merged
from memguard._tools.top.view import plain, view
from memguard.errors import MemguardError


@pytest.fixture
def clock() -> Clock:
    return Clock()


opened: list[Follower] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while opened:
        opened.pop().close()


def at(path: str | os.PathLike[str], clock: Clock) -> Follower:
    opened.append(Follower(path, clock))
    return opened[-1]


def figures(follower: Follower) -> list[tuple[int | None, ...]]:
    return [part[1:5] for share in follower.target().shares for part in map(astuple, share.frameworks)]


def path_of(folder: Path) -> Path:
    return folder / "run-{pid}-{rank}.jsonl"


def follow(writer: Writer, clock: Clock) -> Follower:
    follower = at(writer.path, clock)
    follower.read()
    return follower


def test_what_is_written_is_seen(tmp_path: Path, clock: Clock) -> None:
    plan = plan_of()
    writer = run(path_of(tmp_path), clock, plan)
    follower = follow(writer, clock)
    target = follower.target()
    assert (target.state, target.pid, target.simulated) == ("live", os.getpid(), True)
    (share,) = target.shares
    assert {part.name for part in share.frameworks} == set(plan.devices[0].caps)
    levels = {part.name: part.level for part in share.frameworks}
    assert levels["torch"] == "warn" and levels["cupy"] == "ok"
    assert [forecast.framework for forecast in share.forecasts] == ["torch"]
    assert [said.kind for said in target.events] == ["pressure", "forecast"]
    uuid = plan.devices[0].device.uuid
    writer.event(Event(clock(), "pressure", "pressure ok: torch", Pressure.OK, uuid, "torch"))
    follower.read()
    (share,) = follower.target().shares
    assert share.frameworks[0].level == "ok" and share.forecasts == ()
    clock.now += 1
    writer.close()


def test_half_a_line_waits_for_its_end(tmp_path: Path, clock: Clock) -> None:
    writer = run(path_of(tmp_path), clock)
    whole = Path(writer.path).read_bytes()
    writer.close()
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(whole[: len(whole) // 3])  # within the header
    follower = at(copy, clock)
    for end in range(len(whole) // 3, len(whole) + 40, 40):
        copy.write_bytes(whole[:end])  # the same file, longer
        follower.read()
    direct = follow(writer, clock)
    assert follower.target().events == direct.target().events
    assert follower.target().shares == direct.target().shares
    assert follower.target().notes == ()


def test_parts_that_begin_meanwhile_are_followed(tmp_path: Path, clock: Clock) -> None:
    """Seven parts between two readings, and a first reading of a run that has many."""
    plan = plan_of()
    writer = Writer(path_of(tmp_path), plan, clock=clock, limit_bytes=MIN_LIMIT)
    follower = at(writer.path, clock)
    for seed in range(12):
        follower.read()
        for _ in range(40):
            write(writer, plan, clock, seed=seed)
    follower.read()
    assert len(list(tmp_path.iterdir())) > 4
    late = follow(writer, clock)
    assert figures(follower) == figures(late)
    assert follower.target().events == late.target().events
    levels = {part.name: part.level for part in late.target().shares[0].frameworks}
    assert levels["torch"] == "warn" and levels["cupy"] is None  # the oldest events are gone
    assert len(late.target().events) == 50
    assert not [note for note in follower.target().notes if "left out" in note]
    writer.close()


def test_a_reader_that_is_too_late_says_that_events_may_be_missing(tmp_path: Path, clock: Clock) -> None:
    plan = plan_of()
    writer = Writer(path_of(tmp_path), plan, clock=clock, limit_bytes=MIN_LIMIT)
    write(writer, plan, clock)
    follower = follow(writer, clock)
    for _ in range(500):
        write(writer, plan, clock)
    for path in tmp_path.glob("*.[0-9]*.jsonl"):
        path.unlink()
    follower.read()
    target = follower.target()
    assert any("events may be missing" in note for note in target.notes)
    assert target.shares[0].level is None  # never told since: unknown
    assert follow(writer, clock).target().shares[0].level is None
    writer.close()


def test_a_file_that_is_not_there_yet_is_waited_for(tmp_path: Path, clock: Clock) -> None:
    follower = at(tmp_path / f"run-{os.getpid()}-0.jsonl", clock)
    follower.read()
    target = follower.target()
    assert target.state == "missing" and "is not there yet" in target.notes[0] and target.shares == ()
    writer = run(path_of(tmp_path), clock)
    follower.read()
    assert follower.target().state == "live" and follower.target().notes == () and follower.target().shares
    writer.close()


def test_the_name_without_pid_names_the_file_that_has_one(tmp_path: Path, clock: Clock) -> None:
    writer = run(tmp_path / "run.jsonl", clock)
    follower = at(tmp_path / "run.jsonl", clock)
    follower.read()
    assert writer.path in follower.target().notes[0]
    writer.close()


def test_a_writer_is_alive_if_its_timeline_is_named_by_a_link(tmp_path: Path, clock: Clock) -> None:
    writer = run(path_of(tmp_path), clock)
    (tmp_path / "link.jsonl").symlink_to(writer.path)
    follower = at(tmp_path / "link.jsonl", clock)
    follower.read()
    clock.now += SILENT + 1
    follower.read()
    assert follower.target().state == "silent"  # it holds its lock
    writer.close()
    clock.now += SILENT + 1
    follower.read()
    assert follower.target().state == "ended"


def test_a_writer_that_ends_is_said_and_the_figures_stay(tmp_path: Path, clock: Clock) -> None:
    writer = run(path_of(tmp_path), clock)
    follower = follow(writer, clock)
    before = follower.target().shares
    clock.now += SILENT + 1
    follower.read()
    assert follower.target().state == "silent"  # it holds its lock
    writer.close()
    clock.now += SILENT
    follower.read()
    target = follower.target()
    assert target.state == "ended" and [s.frameworks for s in target.shares] == [s.frameworks for s in before]
    os.unlink(writer.path)
    clock.now += SILENT
    follower.read()
    assert follower.target().state == "ended"


def test_a_run_of_yesterday_has_ended_at_once(tmp_path: Path, clock: Clock) -> None:
    run(path_of(tmp_path), clock).close()
    clock.now += 86_400
    (path,) = tmp_path.iterdir()
    follower = at(path, clock)
    follower.read()
    assert follower.target().state == "ended"
    assert follower.target().shares[0].forecasts == ()


def test_a_new_run_in_the_same_file_begins_anew(tmp_path: Path, clock: Clock) -> None:
    writer = run(path_of(tmp_path), clock)
    follower = follow(writer, clock)
    writer.close()
    second = Writer(path_of(tmp_path), plan_of(), clock=clock)
    second.event(Event(clock(), "note", "second"))
    follower.read()
    target = follower.target()
    assert [said.text for said in target.events] == ["second"] and target.shares == ()
    assert any("a new run" in note for note in target.notes)
    second.close()


def test_a_damaged_line_is_left_out_and_the_rest_is_shown(tmp_path: Path, clock: Clock) -> None:
    writer = run(path_of(tmp_path), clock)
    follower = follow(writer, clock)
    with open(writer.path, "ab") as file:
        file.write(b'{"t": 1}\n\xff\xfe\n' + b"x" * (1 << 20) + b"yy\n")
    with open(writer.path, "ab") as file:
        file.write(b'{"t":%.1f,"event":{"kind":"note","text":"after"}}\n' % clock())
    for _ in range(3):
        follower.read()
    target = follower.target()
    assert target.events[-1].text == "after"
    assert any("left out" in note for note in target.notes)
    writer.close()


@pytest.mark.parametrize("content", [b"", b"not a timeline\n", b'{"memguard_trace":1}\n', b'{"memguard_timeline":9}\n'])
def test_what_is_no_timeline_is_said(tmp_path: Path, clock: Clock, content: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    follower = at(path, clock)
    follower.read()
    target = follower.target()
    assert target.state == ("unreadable" if content else "missing") and target.notes
    path.write_bytes(b"")
    path.unlink()
    writer = run(path_of(tmp_path), clock)
    os.rename(writer.path, path)
    follower.read()
    assert follower.target().state == "live" and follower.target().notes == ()
    writer.close()


def test_a_folder_and_a_fifo_are_refused_and_not_waited_for(tmp_path: Path, clock: Clock) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo"):
        follower = at(path, clock)
        follower.read()
        assert follower.target().state == "unreadable"


def test_a_suspended_process_is_shown_as_one(tmp_path: Path, clock: Clock) -> None:
    plan = plan_of()
    writer = run(path_of(tmp_path), clock, plan)
    writer.event(Event(clock(), "suspended", "suspended", seconds=1.0, bytes=7 << 30))
    follower = follow(writer, clock)
    assert follower.target().state == "suspended" and follower.target().shares[0].suspended == 7 << 30
    writer.event(Event(clock(), "resumed", "resumed", seconds=1.0))
    follower.read()
    assert follower.target().state == "live" and follower.target().shares[0].suspended is None
    writer.close()


def test_a_suspended_process_of_several_gpus_is_in_no_bar(tmp_path: Path, clock: Clock) -> None:
    writer = run(path_of(tmp_path), clock, plan_of("h200", "h200"))
    source = Timelines([writer.path], clock)

    def bar() -> str:
        (found,) = [line for line in plain(view(source.read(), 100)) if line.startswith(" [")]
        return found

    assert "█" in bar()
    writer.event(Event(clock(), "suspended", "suspended", seconds=1.0, bytes=7 << 30))
    assert "█" not in bar(), "the event has the bytes of both together"
    source.close()
    writer.close()


def test_several_timelines_share_their_gpus(tmp_path: Path, clock: Clock) -> None:
    plan = plan_of()
    writers = [run(tmp_path / f"{name}.{{pid}}.jsonl", clock, plan) for name in "ab"]
    source = Timelines([writer.path for writer in writers], clock)
    found = source.read()
    assert len(found.gpus) == 1 and len(found.targets) == 2
    assert found.gpus[0].others == 0  # what the one holds is not the other's "other processes"
    writers[0].close()
    clock.now += SILENT + 1
    writers[1].sample(busy(plan, clock(), random.Random(3)))
    found = source.read()
    assert [target.state for target in found.targets] == ["ended", "live"]
    for ask in (lambda: source.trim(writers[0].path, None), lambda: source.resize(writers[0].path, "torch", 1)):
        with pytest.raises(MemguardError, match="only read"):
            ask()
    writers[1].close()
    source.close()


def test_what_an_ended_process_held_is_others_again() -> None:
    other = replace(TARGET, key="b", state="ended", read=START - 60)
    read = [(TARGET, (GPU,)), (other, (GPU,))]
    assert merged(read)[0].others == 5 * GIB
    assert merged([(TARGET, (GPU,)), (replace(TARGET, key="b"), (GPU,))])[0].others == 0
    assert merged([(TARGET, (GPU,)), (replace(other, state="live"), (replace(GPU, used=3),))])[0].others == 0
    assert merged([(replace(TARGET, state="ended"), (replace(GPU, used=None),)), (TARGET, (GPU,))])[0].others == 0
    assert merged([]) == ()


def test_runs_of_different_times_do_not_share_a_bar() -> None:
    """The newest run's own reading counts with what it held; the one before was gone by then."""
    before = replace(TARGET, key="before", name="before.jsonl", state="ended", read=START - 600)
    after = replace(TARGET, key="after", name="after.jsonl", state="ended")
    past, now = replace(GPU, used=80 * GIB, free=60 * GIB, others=55 * GIB), replace(GPU, others=3 * GIB)
    for read in ([(before, (past,)), (after, (now,))], [(after, (now,)), (before, (past,))]):
        assert merged(read) == (now,)
        both = Snapshot(START, False, merged(read), tuple(target for target, _ in read))
        alone = replace(both, targets=(after,))
        assert plain(view(both, 100))[2] == plain(view(alone, 100))[2]  # the card's bar
        said = " ".join(" ".join(plain(view(both, 100))).split())
        assert "other processes 3.00 GiB" in said and said.count("not in the GPU's bar") == 1
    live = [(replace(TARGET, state="live"), (GPU,)), (replace(after, read=START - 1), (GPU,))]
    assert merged(live)[0].others == 0  # it ended a moment ago: both were there
