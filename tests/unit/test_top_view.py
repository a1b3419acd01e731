"""What `memguard top` shows, without a terminal: bars, lines, texts."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from top_screens import EVENTS, FOLLOWED, GPU, SHARE, SIX, TARGET, UUID, attached

from memguard._base.units import GIB, MIB
from memguard._node.top.snapshot import Part, Request, Said, Snapshot
from memguard._tools.top import styles
from memguard._tools.top.bars import ASCII, BLOCKS, card_bar, cells, framework_bar
from memguard._tools.top.texts import cell_width, cut, gib, left, right
from memguard._tools.top.view import Key, help_lines, plain, view

SIZES = st.integers(0, 1 << 44)
MAYBE = st.none() | SIZES
TEXTS = st.text(max_size=40)
PARTS = st.builds(Part, TEXTS, MAYBE, MAYBE, MAYBE, MAYBE, MAYBE, st.sampled_from([None, "ok", "warn", "critical"]))


@given(st.lists(SIZES, max_size=12), SIZES, st.integers(0, 200))
def test_cells_never_exceed_the_bar_and_show_what_is_there(sizes: list[int], total: int, width: int) -> None:
    found = cells(sizes, total, width)
    assert sum(found) <= width and min(found, default=0) >= 0
    if total and len(sizes) <= width:
        assert all(bool(count) == (size > 0) for size, count in zip(sizes, found, strict=True))


@given(MAYBE, MAYBE, MAYBE, MAYBE, SIZES, st.integers(4, 120), st.sampled_from([BLOCKS, ASCII]))
def test_a_framework_s_bar_is_as_wide_as_asked_and_has_one_mark(held, in_use, least, cap, scale, width, signs) -> None:  # type: ignore[no-untyped-def]
    pieces = framework_bar(held, in_use, least, cap, scale, width, signs)
    text = "".join(piece.text for piece in pieces)
    assert len(text) == width
    assert text.count(signs.cap) == (1 if cap else 0)
    if held is not None and in_use is not None and (cap or scale):
        assert (signs.used in text) == (min(in_use, held) > 0)
        assert signs.unknown not in text
    if held is None and (cap or scale) and max(least or 0, in_use or 0) < (cap or scale) // 2:
        assert signs.unknown in text  # what it may hold is not shown as room
        assert signs.free not in text


@pytest.mark.parametrize("signs", [BLOCKS, ASCII])
def test_used_cached_room_and_cap_differ_without_colour(signs: tuple[str, ...]) -> None:
    assert len(set(signs[:5])) == 5
    pieces = framework_bar(12 * GIB, 6 * GIB, None, 16 * GIB, None, 17, signs)  # type: ignore[arg-type]
    used, cached, _, free, cap = signs[:5]
    assert "".join(piece.text for piece in pieces) == used * 6 + cached * 6 + free * 4 + cap


def test_what_is_held_above_the_cap_lies_behind_its_mark() -> None:
    text = "".join(piece.text for piece in framework_bar(20 * GIB, 20 * GIB, None, 10 * GIB, None, 21, ASCII))
    assert text == "#" * 10 + "|" + "#" * 10


@given(st.lists(st.tuples(TEXTS, SIZES), max_size=12), SIZES, st.integers(1, 200))
def test_the_card_s_bar_is_as_wide_as_asked(sizes: list[tuple[str, int]], total: int, width: int) -> None:
    assert cell_width("".join(piece.text for piece in card_bar(sizes, total, width, BLOCKS, {}))) == width


@given(TEXTS, st.integers(0, 60))
def test_texts_are_cut_and_filled_to_cells(text: str, width: int) -> None:
    text = "".join(char for char in text if char.isprintable())
    assert cell_width(cut(text, width)) <= width
    assert cell_width(left(text, width)) == cell_width(right(text, width)) == width


@given(st.lists(PARTS, max_size=7), MAYBE, MAYBE, st.integers(-GIB, 1 << 44), st.integers(60, 220), st.booleans())
def test_any_figures_give_lines_that_fit(parts, process, limit, rest, width, ascii_only) -> None:  # type: ignore[no-untyped-def]
    share = replace(SHARE, frameworks=tuple(parts), process=process, limit=limit, unaccounted=rest)
    target = replace(TARGET, shares=(share,))
    found = view(replace(FOLLOWED, targets=(target,)), width, ascii_only=ascii_only)
    for line in (found.head, *found.body, *found.events):
        assert cell_width(line.text) <= width, line.text
        assert line.text.isprintable()
        assert all(isinstance(styles.style(span.style), str) for span in line.spans)
    assert len(found.keys) == 1 + len(parts)


@pytest.mark.parametrize("snapshot", [FOLLOWED, attached()])
@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_each_line_is_as_wide_as_the_screen_at_most(snapshot: Snapshot, width: int) -> None:
    found = view(snapshot, width)
    assert all(cell_width(line.text) <= width for line in (found.head, *found.body, *found.events))


def test_one_gpu_with_six_frameworks_is_complete_on_80_by_24() -> None:
    """A head, a foot, six lines of events: 16 are left."""
    share = replace(SHARE, forecasts=SHARE.forecasts[:1])
    body = view(replace(FOLLOWED, targets=(replace(TARGET, shares=(share,)),)), 80).body
    text = "\n".join(line.text for line in body)
    assert len(body) <= 16
    assert all(part.name in text for part in SIX)
    assert "other processes" in text and "forecast" in text


def test_what_is_unknown_is_said_and_never_0() -> None:
    share = replace(SHARE, process=None, unaccounted=None, overhead=None, frameworks=(Part("torch", None),), level=None)
    gpu = replace(GPU, used=None, free=None, others=None)
    text = "\n".join(plain(view(replace(FOLLOWED, gpus=(gpu,), targets=(replace(TARGET, shares=(share,)),)), 80)))
    assert re.search(r"(?<!\d)0\.00", text) is None
    assert text.count("unknown") >= 8


def test_a_little_is_not_shown_as_nothing() -> None:
    assert [gib(size) for size in (0, 1, 4 * MIB, -1, 6 * MIB, None)] == [
        "0.00",
        "<0.01",
        "<0.01",
        ">-0.01",
        "0.01",
        "unknown",
    ]


def test_texts_of_others_reach_no_terminal() -> None:
    wicked = "\x1b[31m[bold]\u202e\n"
    target = replace(
        TARGET, name=wicked, shares=(replace(SHARE, frameworks=(Part(wicked, GIB),)),), notes=(wicked,),
        events=(Said(1.0, wicked, wicked),),
    )  # fmt: skip
    found = view(replace(FOLLOWED, gpus=(replace(GPU, name=wicked),), targets=(target,)), 120)
    text = "".join(plain(found))
    assert text.isprintable() and "\\u001b[31m[bold]\\u202e" in text


def test_pressure_is_told_without_colour() -> None:
    text = "\n".join(plain(view(FOLLOWED, 80)))
    assert "! warn" in text and "!!critical" in text


def test_a_target_that_says_nothing_keeps_its_figures() -> None:
    for state, said in (("ended", "nobody writes it any more"), ("silent", "its process lives and writes nothing")):
        text = "\n".join(plain(view(replace(FOLLOWED, targets=(replace(TARGET, state=state),)), 80)))  # type: ignore[arg-type]
        assert said in text and "torch" in text and state in text


def test_a_suspended_process_says_what_it_has_in_host_memory() -> None:
    share = replace(SHARE, suspended=12 * GIB)
    lines = plain(view(replace(FOLLOWED, targets=(replace(TARGET, state="suspended", shares=(share,)),)), 80))
    assert any("suspended, 12.00 GiB in host memory" in line for line in lines)
    assert "torch" not in lines[2]  # the card's bar


def test_a_suspended_process_without_bytes_in_host_memory_says_so() -> None:
    share = replace(SHARE, suspended=0)
    text = "\n".join(plain(view(replace(FOLLOWED, targets=(replace(TARGET, state="suspended", shares=(share,)),)), 80)))
    assert "suspended, 0.00 GiB in host memory" in text and "unknown in host memory" not in text


def test_a_suspended_process_is_in_no_bar_though_its_bytes_in_host_memory_are_unknown() -> None:
    """As a timeline of several GPUs tells it: the bytes of all together."""
    second = replace(GPU, uuid="GPU-1", index=1)
    target = replace(TARGET, state="suspended", shares=(SHARE, replace(SHARE, uuid="GPU-1")))
    lines = plain(view(replace(FOLLOWED, gpus=(GPU, second), targets=(target,)), 80))
    bars = [line for line in lines if line.startswith(" [")]
    assert len(bars) == 2 and not any("torch" in bar or "jax" in bar for bar in bars)
    assert sum("suspended, unknown in host memory" in line for line in lines) == 2


def test_others_are_listed_and_the_asked_ones_are_not() -> None:
    lines = plain(view(attached(), 100))
    text = "\n".join(lines)
    assert "PID 52 bob  python serve.py" in text
    assert text.count("PID 4711") == 1
    assert any("suspended for 10 min" in line and "PID 77" in line for line in lines)
    assert any("unknown" in line and "PID 61" in line for line in lines)
    assert any("asked: cap of jax to 8.00 GiB: waiting (at its next memguard.checkpoint())" in line for line in lines)


def test_the_selected_line_is_marked() -> None:
    key = Key(TARGET.key, UUID, "jax")
    found = view(FOLLOWED, 80, selected=key)
    assert [line.key for line in found.body if line.text.startswith("> ")] == [key]


def test_events_come_in_order_with_the_process_that_said_it() -> None:
    other = replace(TARGET, key="b", pid=12, events=(Said(EVENTS[1].time - 0.5, "note", "something"),))
    found = view(replace(FOLLOWED, targets=(TARGET, other)), 80).events
    assert [line.text.split()[1] for line in found] == ["4711", "12", "4711", "4711", "4711"]
    assert "note: something" in found[1].text


def test_json_is_the_snapshot() -> None:
    found = json.loads(json.dumps(attached().as_dict()))
    assert found["memguard_top"] == 1
    assert found["targets"][0]["shares"][0]["frameworks"][1]["held"] is None
    assert found["gpus"][1]["used"] is None


def test_the_answer_to_a_request_is_whole() -> None:
    answer = "cupy: cap not applied: its share is elastic: its cap moves by itself; fix: change frameworks.cupy.min"
    failed = Request(1, "cap of cupy to 1.00 GiB", "failed", answer)
    lines = plain(view(replace(FOLLOWED, targets=(replace(TARGET, requests=(failed,)),)), 80))
    assert f"asked: cap of cupy to 1.00 GiB: failed: {answer}" in " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= 80


def test_what_waits_in_a_process_that_has_ended_is_not_done() -> None:
    waiting = replace(TARGET, file=None, requests=(Request(1, "trim torch", "waiting"),))
    for state, said in (("live", "waiting (at its next"), ("silent", "waiting"), ("ended", "not done: it has ended")):
        found = replace(FOLLOWED, machine=True, targets=(replace(waiting, state=state),))  # type: ignore[arg-type]
        assert f"asked: trim torch: {said}" in "\n".join(plain(view(found, 80)))


def test_the_help_fits() -> None:
    assert all(cell_width(line) <= 66 for line in help_lines(66))


def test_long_notes_are_wrapped_and_bounded() -> None:
    lines = plain(view(replace(FOLLOWED, notes=("word " * 100, "x" * 500)), 80))
    assert sum("word" in line for line in lines) == 3 and sum("xxx" in line for line in lines) <= 2
    assert all(cell_width(line) <= 80 for line in lines)
