"""Damaged and hostile timelines and traces: only the documented error, and soon."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timelines import START, plan_of, sample_of

from memguard._base.types import Event, FrameworkSample, Pressure
from memguard._base.units import GIB
from memguard._timeline import Writer, load_timeline
from memguard._tools.simulate import trace
from memguard.errors import TimelineError, TraceError

pytestmark = pytest.mark.one_case  # no version of what is installed changes it: all of it is our own code

ROOT = Path(__file__).parents[2]
WEIRD = [
    None, True, False, -1, 0, 1, 2**31, 2**53, 2**63, 2**64, 10**400, -(10**30), 0.5, -0.0, 1e308, "", "0", "1", "x",
    "٠", "\x00", "\x1b[2J", "\ud800", "x" * 10_000, [], [1], [[]], [[[]]] * 3, {}, {"": 0}, {"a": {}}, [None] * 5,
    {"torch": []}, {"torch": {"x": 1}}, [{"uuid": 1}], "2025-01-31T12:00:00+00:00", "GPU-a",
]  # fmt: skip


def read_timeline(path: Path) -> None:
    for _ in load_timeline(path).records():
        pass


def read_trace(path: Path) -> None:
    trace.read(path)


def real_timeline(folder: Path) -> bytes:
    plan = plan_of()
    with Writer(folder / "run.jsonl", plan, frameworks={"torch": {"version": "2.11"}}) as out:
        for at in range(5):
            out.sample(sample_of(plan, START + at, torch=FrameworkSample(GIB, None, 0, 7 * GIB)))
        out.event(Event(START + 5, "pressure", "text", Pressure.WARN, "GPU-a", "torch", 1.5, 1024))
        out.oom({"requested": 1, "device": {"uuid": "GPU-a"}})
        out.sample(sample_of(plan, START + 6, jax=FrameworkSample(GIB, 1, 0, None)))
    return Path(out.path).read_bytes()


def real_trace(folder: Path) -> bytes:
    lines = (ROOT / "examples" / "traces" / "mixed-h200.jsonl").read_bytes().splitlines(keepends=True)
    return b"".join(lines[:20])


KINDS = [
    pytest.param(real_timeline, read_timeline, TimelineError, id="timeline"),
    pytest.param(real_trace, read_trace, TraceError, id="trace"),
]


def outcome(path: Path, raw: bytes, read: Callable[[Path], None], error: type[Exception]) -> bool:
    """Whether it was read. Anything but the documented error, with a fix, is raised."""
    path.write_bytes(raw)
    begun = time.monotonic()
    try:
        read(path)
    except error as refusal:
        assert "\n    fix: " in str(refusal) and len(str(refusal)) < 2000, str(refusal)
        return False
    finally:
        assert time.monotonic() - begun < 5
    return True


def nodes(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The place of each value in it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in items for place in nodes(inner, (*path, key)))]


@pytest.mark.long
@pytest.mark.parametrize(("make", "read", "error"), KINDS)
def test_each_value_replaced_removed_or_said_twice(
    tmp_path: Path, make: Callable[[Path], bytes], read: Callable[[Path], None], error: type[Exception]
) -> None:
    lines = make(tmp_path).splitlines()
    path, tried = tmp_path / "hostile.jsonl", 0
    for number, line in {0: lines[0], 1: lines[1], len(lines) - 3: lines[-3], len(lines) - 2: lines[-2]}.items():
        found = nodes(json.loads(line))
        for place in found[: 1 + 2400 // len(WEIRD)]:
            for weird in WEIRD:
                record = json.loads(line)
                holder = record
                for key in place[:-1]:
                    holder = holder[key]
                if place:
                    holder[place[-1]] = weird
                else:
                    record = weird
                text = json.dumps(record).encode()
                outcome(path, b"\n".join([*lines[:number], text, *lines[number + 1 :], b""]), read, error)
                tried += 1
        record = json.loads(line)
        for key in record:
            less = {other: value for other, value in record.items() if other != key}
            twice = f"{line.decode()[:-1]},{json.dumps(key)}:{json.dumps(record[key])}}}".encode()
            outcome(
                path, b"\n".join([*lines[:number], json.dumps(less).encode(), *lines[number + 1 :], b""]), read, error
            )
            assert not outcome(path, b"\n".join([*lines[:number], twice, *lines[number + 1 :], b""]), read, error)
            tried += 2
    assert tried > 2500


@pytest.mark.parametrize(("make", "read", "error"), KINDS)
def test_lines_of_every_odd_kind(
    tmp_path: Path, make: Callable[[Path], bytes], read: Callable[[Path], None], error: type[Exception]
) -> None:
    raw, path = make(tmp_path), tmp_path / "hostile.jsonl"
    lines = raw.splitlines(keepends=True)
    odd = [
        b"x" * (1 << 20), b'{"t":1,"x":"' + b"y" * (1 << 20) + b'"}', b"[" * 100_000, b'{"a":' * 100_000,
        b"\x00" * 5000, bytes(range(256)) * 10, b"\xff\xfe{}", b"NaN", b'{"t":NaN,"sample":[]}',
        b'{"t":Infinity,"sample":[]}', b'{"t":1e999,"sample":[]}', b'{"time":1e999}',
        b'{"t":1,"event":{"kind":"x","text":"y","seconds":1e999}}', b'{"t":1,"t":1,"sample":[]}', b"9" * 60_000,
        b'{"t":' + b"9" * 60_000 + b"}", b"null", b"[]", b'""', b"{}", b'{"t":-1,"sample":[]}',
        b'{"t":"1","sample":[]}', b'{"t":1,"sample":{}}', b'{"t":1,"sample":[[]]}', b'{"t":1,"columns":[]}',
        b'{"t":1,"columns":{}}', b'{"t":1,"oom":[]}', b'{"t":1,"event":[]}', b'{"t":true,"oom":{}}',
    ]  # fmt: skip
    for line in odd:
        for at in (0, 1, len(lines) // 2):
            assert not outcome(path, b"".join([*lines[:at], line, b"\n", *lines[at:]]), read, error), line[:50]
    for cut in range(0, len(raw), 7):
        outcome(path, raw[:cut], read, error)


@pytest.mark.parametrize(("make", "read", "error"), KINDS)
def test_any_bytes_changed_in_a_real_file(
    tmp_path_factory: pytest.TempPathFactory,
    make: Callable[[Path], bytes],
    read: Callable[[Path], None],
    error: type[Exception],
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    raw, path = make(folder), folder / "hostile.jsonl"
    bits = st.binary(max_size=6) | st.sampled_from(
        [b"\n", b'"', b"{", b"}", b"[", b"]", b"-", b"9", b"null", b"e9", b"\\u"]
    )

    @given(st.lists(st.tuples(st.integers(0, len(raw)), st.integers(0, 8), bits), min_size=1, max_size=5))
    def change(changes: list[tuple[int, int, bytes]]) -> None:
        made = raw
        for at, length, put in changes:
            made = made[:at] + put + made[at + length :]
        outcome(path, made, read, error)

    change()
