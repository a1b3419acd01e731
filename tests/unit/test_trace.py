"""Traces: what is written is read back, and every wrong file is refused with line and fix."""

from __future__ import annotations

import json
import os
import stat
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard._base.types import TraceEvent
from memguard._base.units import MAX_SIZE
from memguard._tools.simulate.trace import MAX_LINE, Trace, TraceDevice, TraceHeader, read, write
from memguard.errors import TraceError

HEAD: dict[str, Any] = {
    "memguard_trace": 1,
    "recorded": "2025-01-31T12:00:00+00:00",
    "devices": [
        {"name": "NVIDIA H200", "total": 1000, "reserved": 10, "architecture": "hopper"},
        {"name": "NVIDIA L4", "total": 500},
    ],
    "frameworks": {"torch": {"version": "2.11.0", "allocator": "native"}, "tensorflow": {}},
    "simulated": False,
    "note": "kept",
}
ALLOC = {"time": 1, "framework": "torch", "op": "alloc", "id": 1, "bytes": 512}


def file(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_gpu_with_unified_memory_is_told_apart_and_older_files_are_read(tmp_path: Path) -> None:
    for written, meant in ((True, True), (False, False), (None, False)):
        device = {"name": "NVIDIA GB10", "total": 1000} | ({} if written is None else {"unified": written})
        path = file(tmp_path, HEAD | {"devices": [device]})
        assert read(path).header.devices[0].unified is meant
        write(path, read(path).header, ())
        assert read(path).header.devices[0].unified is meant
    for wrong in (1, 0, "true", None, [], {}):
        with pytest.raises(TraceError, match=r"devices: unified: .* is neither true nor false"):
            read(file(tmp_path, HEAD | {"devices": [{"name": "NVIDIA GB10", "total": 1000, "unified": wrong}]}))


def test_reading(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        HEAD,
        ALLOC,
        "",
        {"time": 1, "framework": "tensorflow", "op": "in_use", "in_use": 0, "device": 1},
        {"time": 1.5, "framework": "torch", "op": "free", "id": 1},
        {"time": 2, "framework": "torch", "op": "alloc", "id": 1, "bytes": MAX_SIZE},
        {"time": 2, "framework": "torch", "op": "trim"},
        {"time": 2, "framework": "torch", "op": "mark", "held": 5, "in_use": 4},
        {"time": 2, "framework": "torch", "op": "mark", "in_use": 4, "held": None},
    )
    trace = read(path)
    assert trace.header.devices == (TraceDevice("NVIDIA H200", 1000, 10, "hopper"), TraceDevice("NVIDIA L4", 500))
    assert trace.header.frameworks == HEAD["frameworks"] and trace.header.extra == {"note": "kept"}
    assert trace.events[:3] == (
        TraceEvent(1.0, "torch", "alloc", 1, 512),
        TraceEvent(1.0, "tensorflow", "in_use", in_use=0, device=1),
        TraceEvent(1.5, "torch", "free", 1),
    )
    assert trace.events[-2:] == (
        TraceEvent(2.0, "torch", "mark", held=5, in_use=4),
        TraceEvent(2.0, "torch", "mark", in_use=4),
    )


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in HEAD.items() if k != key}


DEVICE = HEAD["devices"][0]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (without("memguard_trace"), "not a trace header"),
        (HEAD | {"memguard_trace": 2}, "trace version 2; this memguard reads 1"),
        (HEAD | {"memguard_trace": True}, "trace version True"),
        (HEAD | {"memguard_trace": "1"}, "trace version '1'"),
        (without("recorded"), "recorded: None is not a date"),
        (HEAD | {"recorded": "yesterday"}, "'yesterday' is not a date"),
        (HEAD | {"devices": []}, "devices: at least one"),
        (HEAD | {"devices": [1]}, "devices: 1 is not a mapping"),
        (HEAD | {"devices": [DEVICE | {"name": 5}]}, "are texts"),
        (HEAD | {"devices": [DEVICE | {"total": 0}]}, "total: 0 is out of range"),
        (HEAD | {"devices": [DEVICE | {"total": MAX_SIZE + 1}]}, "out of range"),
        (HEAD | {"devices": [DEVICE | {"reserved": 1000}]}, "reserved: 1000 is out of range"),
        (HEAD | {"devices": [DEVICE | {"total": 1.5}]}, "1.5 is not a whole number"),
        (HEAD | {"frameworks": []}, "frameworks: not a mapping"),
        (HEAD | {"frameworks": {"torch": "2.11"}}, "frameworks: not a mapping"),
        (HEAD | {"simulated": 1}, "neither true nor false"),
        ("[1]", "not a JSON object"),
        ("{", "malformed JSON: it ends too early\n"),
        ("{'a': 1}", "malformed JSON: .* at character 2\n"),
        ("", "malformed JSON: it ends too early\n"),
        ("[" * 20_000, "nested too deeply|malformed JSON"),
        ('{"memguard_trace": 1, "memguard_trace": 1}', "twice"),
    ],
)
def test_wrong_headers(tmp_path: Path, header: object, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        read(file(tmp_path, header))
    assert "trace.jsonl:1: " in str(caught.value) and "\n    fix: " in str(caught.value)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (ALLOC | {"op": "aloc"}, "unknown op 'aloc'; did you mean 'alloc'"),
        (ALLOC | {"op": ["alloc"]}, "unknown op"),
        (ALLOC | {"framework": "tourch"}, "unknown framework 'tourch'; did you mean 'torch'"),
        (ALLOC | {"framework": "cupy"}, "unknown framework 'cupy'\n    fix: use one of torch, tensorflow"),
        (ALLOC | {"device": 2}, "device: 2 is out of range"),
        (ALLOC | {"device": -1}, "device: -1 is out of range"),
        (ALLOC | {"device": True}, "device: True is not a whole number"),
        (ALLOC | {"bytes": 0}, "bytes: 0 is out of range"),
        (ALLOC | {"bytes": -5}, "bytes: -5 is out of range"),
        (ALLOC | {"bytes": MAX_SIZE + 1}, "out of range"),
        (ALLOC | {"bytes": 10**4000}, "a number of more than 19 digits is out of range"),
        (ALLOC | {"bytes": 512.0}, "512.0 is not a whole number"),
        (ALLOC | {"bytes": "512"}, "'512' is not a whole number"),
        (ALLOC | {"bytes": None}, "'alloc' without bytes"),
        (ALLOC | {"id": 1 << 65}, "id: .* is out of range"),
        ({k: v for k, v in ALLOC.items() if k != "id"}, "'alloc' without id"),
        (ALLOC | {"byte": 5}, "'byte' does not belong to 'alloc'; did you mean 'bytes'"),
        (ALLOC | {"held": 5}, "'held' does not belong to 'alloc'"),
        (ALLOC | {"time": 0.5}, "time goes back from 1 s to 0.5 s"),
        (ALLOC | {"time": -1}, "-1 is not a number of seconds"),
        (ALLOC | {"time": "now"}, "'now' is not a number"),
        (ALLOC | {"time": True}, "True is not a number"),
        (json.dumps(ALLOC).replace('"time": 1', '"time": NaN'), "NaN is not a number"),
        (json.dumps(ALLOC).replace('"time": 1', '"time": Infinity'), "Infinity is not a number"),
        (json.dumps(ALLOC).replace('"time": 1', '"time": 1e999'), "inf is not a number"),
        (json.dumps(ALLOC).replace("512", "9" * 5000), "malformed JSON"),
        ({"time": 1, "framework": "torch", "op": "free", "id": 9}, "free of torch's id 9, which is not live"),
        ({"time": 1, "framework": "tensorflow", "op": "free", "id": 7}, "free of tensorflow's id 7"),
        ({"time": 1, "framework": "torch", "op": "free", "id": 7, "device": 1}, "allocated on 0"),
        (ALLOC | {"id": 7}, "alloc of torch's id 7, which is live"),
        ({"time": 1, "framework": "torch", "op": "mark"}, "without held and in_use"),
        ({"time": 1, "framework": "tensorflow", "op": "in_use"}, "'in_use' without in_use"),
        ({"time": 1, "framework": "tensorflow", "op": "in_use", "in_use": -1}, "in_use: -1 is out of range"),
        ('{"time": 1, "framework": "torch", "op": "al', "malformed JSON.*\n.*cut off"),
        (json.dumps(ALLOC) + " " * MAX_LINE, f"longer than {MAX_LINE} bytes"),
        ("null", "not a JSON object"),
    ],
)
def test_wrong_events(tmp_path: Path, event: object, message: str) -> None:
    text = event if isinstance(event, str) else json.dumps(event)
    with pytest.raises(TraceError, match=message) as caught:
        read(file(tmp_path, HEAD, ALLOC | {"id": 7}, "", text))
    assert "trace.jsonl:4: " in str(caught.value) and "\n    fix: " in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_files_that_are_none(tmp_path: Path) -> None:
    empty, binary, fifo = tmp_path / "empty", tmp_path / "binary", tmp_path / "fifo"
    empty.touch()
    binary.write_bytes(json.dumps(HEAD).encode() + b"\n\xff\xfe\n")
    os.mkfifo(fifo)
    for path, message in (
        (empty, "is empty"),
        (tmp_path / "absent", "No such file"),
        (tmp_path, "not a regular file"),
        (fifo, "not a regular file"),
        (binary, ":2: not UTF-8 text"),
    ):
        with pytest.raises(TraceError, match=message) as caught:
            read(path)
        assert str(path) in str(caught.value) and "\n    fix: " in str(caught.value)
    with pytest.raises(TraceError, match="cannot be read"):
        read("with\0zero")


HEADER = TraceHeader("2025-01-31", (TraceDevice("NVIDIA H200", 1000),) * 2, {"torch": {"growth": True}, "ünï": {}})


@given(
    steps=st.lists(
        st.tuples(st.floats(0, 5), st.sampled_from(["torch", "ünï"]), st.integers(0, 1), st.integers(1, MAX_SIZE))
    )
)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Any, ...]]) -> None:
    path = tmp_path_factory.mktemp("t") / "trace"
    now, events = 0.0, []
    for number, (pause, name, device, size) in enumerate(steps):
        now += pause
        events.append(TraceEvent(now, name, "alloc", number, size, device=device))
        if size % 2:
            events.append(TraceEvent(now, name, "free", number, device=device))
        if size % 3 == 0:
            events.append(TraceEvent(now, name, "mark", held=size, device=device))
    write(path, HEADER, events)
    assert read(path) == Trace(HEADER, tuple(events))


def test_writing_is_private_atomic_and_follows_no_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("mine")
    link.symlink_to(target)
    write(link, HEADER, [])
    assert target.read_text() == "mine" and not link.is_symlink()
    assert stat.S_IMODE(link.stat().st_mode) == 0o600
    assert read(link) == Trace(HEADER, ())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "target"]


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write(path, HEADER, [])
    before = path.read_bytes()
    wrong = [TraceEvent(2, "torch", "trim"), TraceEvent(1, "torch", "trim")]
    with pytest.raises(TraceError, match=":3: time goes back"):
        write(path, HEADER, wrong)
    with pytest.raises(TraceError, match="unknown framework"):
        write(path, HEADER, [TraceEvent(1, "jax", "trim")])
    with pytest.raises(TraceError, match=":1: cannot be written as JSON"):
        write(path, TraceHeader("2025-01-31", HEADER.devices, {"torch": {"x": object()}}), [])
    with pytest.raises(TraceError, match=r":1: .*not a date"):
        write(path, TraceHeader("", HEADER.devices, {}), [])
    with pytest.raises(TraceError, match="cannot be written"):
        write(tmp_path / "no" / "folder", HEADER, [])

    def interrupted() -> Any:
        yield TraceEvent(1, "torch", "trim")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(path, HEADER, interrupted())
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["trace"]


def test_the_documented_example_is_a_trace(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "trace.md").read_text()
    path = tmp_path / "trace"
    path.write_text(text.split("```json\n")[1].split("```")[0])
    assert [event.op for event in read(path).events] == ["alloc", "in_use", "free", "mark"]


def test_an_event_takes_few_bytes(tmp_path: Path) -> None:
    """142 MB, two million events, took 1.9 GB: an event of 300 bytes or more is one that keeps a dict or its texts."""
    number = 8_000
    events = (
        json.dumps({"time": n / 7, "framework": "torch", "op": op, "id": (1 << 40) + n, **more})
        for n in range(number)
        for op, more in (("alloc", {"bytes": (1 << 30) + n}), ("free", {}))
    )
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([json.dumps(HEAD), *events]))
    tracemalloc.start()
    try:
        trace = read(path)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(trace.events) == 2 * number
    assert kept < 2 * number * 230 and most < 2 * number * 260, (kept / number / 2, most / number / 2)
