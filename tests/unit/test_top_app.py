"""The screen of `memguard top`: snapshots at three sizes, keys, resizing, and sources that misbehave.

A snapshot is an SVG in `top_svgs`: look at it in a browser. `MEMGUARD_UPDATE_SVGS=1` writes them anew. What they
show is compared: ids and fonts change with textual's version.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from textual.pilot import Pilot
from textual.widgets import Input
from top_screens import FOLLOWED, SHARE, TARGET, attached

from memguard._base.units import GIB
from memguard._node.top.snapshot import Part, Snapshot
from memguard._tools.top.app import Top
from memguard._tools.top.dialogs import Ask, AskCap, Help
from memguard._tools.top.sources import followed
from memguard.errors import MemguardError

SVGS = Path(__file__).parent / "top_svgs"
SIZES = [(80, 24), (120, 40), (200, 60)]
NS = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("NO_COLOR", raising=False)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


class Fixed:
    """Always the same, and it remembers what it was asked."""

    def __init__(self, snapshot: Snapshot, wrong: MemguardError | None = None) -> None:
        self.snapshot, self.wrong, self.asked, self.reads = snapshot, wrong, list[tuple[object, ...]](), 0

    def read(self) -> Snapshot:
        self.reads += 1
        return self.snapshot

    def close(self) -> None:
        pass

    def check(self, key: str) -> None:
        if self.wrong is not None:
            raise self.wrong

    def trim(self, key: str, framework: str | None) -> str:
        self.asked.append(("trim", key, framework))
        return "asked to trim"

    def resize(self, key: str, framework: str, cap: int) -> str:
        self.asked.append(("resize", key, framework, cap))
        raise MemguardError("process 4711 does not answer")


def screen(
    source: Fixed, size: tuple[int, int], do: Callable[[Pilot[None], Top], Awaitable[None]], **more: bool
) -> None:
    async def run() -> None:
        app = Top(source, 0.05, **more)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app.snapshot is not None)
            await do(pilot, app)

    asyncio.run(run())


async def until(pilot: Pilot[None], true: Callable[[], bool]) -> None:
    for _ in range(3000):
        await pilot.pause()
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come")


def rows(svg: str) -> dict[int, str]:
    """The text of each line, by its place from the top."""
    found: dict[float, list[tuple[float, str]]] = {}
    for text in ElementTree.fromstring(svg).iter(f"{NS}text"):
        if "clip-path" in text.attrib:
            found.setdefault(float(text.attrib["y"]), []).append((float(text.attrib["x"]), text.text or ""))
    lines = {}
    for y, parts in found.items():
        line = ""
        for x, text in sorted(parts):
            line = line.ljust(round(x / 12.2)) + text
        lines[round((y - 20) / 24.4)] = line.replace("\xa0", " ").rstrip()
    return {number: line for number, line in sorted(lines.items()) if line}


def colours(svg: str) -> dict[str, set[str]]:
    """The words that stand in each style, whatever its class is called."""
    styles = dict(re.findall(r"\.[\w-]+-(r\d+) *\{([^}]*)\}", svg))
    found: dict[str, set[str]] = {}
    for text in ElementTree.fromstring(svg).iter(f"{NS}text"):
        name = text.attrib.get("class", "").rpartition("-")[2]
        if name in styles:
            style = re.sub(r"\s", "", styles[name])
            found.setdefault(style, set()).update((text.text or "").replace("\xa0", " ").split())
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["followed", "attached"])
def test_the_screen_is_as_recorded(name: str, size: tuple[int, int]) -> None:
    source = Fixed(FOLLOWED if name == "followed" else attached())
    shots: list[str] = []

    async def shoot(pilot: Pilot[None], app: Top) -> None:
        await pilot.pause()
        shots.append(app.export_screenshot(title="memguard top"))

    screen(source, size, shoot)
    path = SVGS / f"{name}-{size[0]}x{size[1]}.svg"
    if os.environ.get("MEMGUARD_UPDATE_SVGS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(re.sub(r"terminal-\d+", "terminal", shots[0]), encoding="utf-8")
    recorded = path.read_text(encoding="utf-8")
    assert rows(shots[0]) == rows(recorded)
    together = [sorted(words) for words in colours(shots[0]).values()]
    assert sorted(together) == sorted(sorted(words) for words in colours(recorded).values())


def text_of(app: Top) -> str:
    lines = [*app._head._lines, *app._board._lines, *app._events._lines, *app._footer._lines]
    return "\n".join(line.text for line in lines)


def test_nothing_is_hidden_on_80_by_24() -> None:
    share = replace(SHARE, forecasts=SHARE.forecasts[:1])
    source = Fixed(replace(FOLLOWED, targets=(replace(TARGET, shares=(share,)),)))

    async def look(pilot: Pilot[None], app: Top) -> None:
        board = app._board
        assert len(board._lines) <= board.size.height and board.below == 0

    screen(source, (80, 24), look)


def test_keys_select_scroll_pause_help_and_quit() -> None:
    many = tuple(Part(f"f{number}", GIB, GIB, 0, 2 * GIB, level="ok") for number in range(16))
    source = Fixed(replace(FOLLOWED, targets=(replace(TARGET, shares=(replace(SHARE, frameworks=many),)),)))

    async def press(pilot: Pilot[None], app: Top) -> None:
        board = app._board
        assert app.selected is not None and app.selected.framework is None
        for _ in range(16):
            await pilot.press("down")
        assert app.selected.framework == "f15"
        top = board.top
        assert f"{board.below} more lines below" in text_of(app)
        assert any("> f15" in line.text for line in board._lines[top : top + board.size.height])
        await pilot.press("pageup", "pageup")
        assert board.top == 0
        await pilot.press("up")
        assert app.selected.framework == "f14"
        await pilot.press("question_mark")
        assert isinstance(app.screen, Help)
        await pilot.press("escape")
        assert not isinstance(app.screen, Help)
        await pilot.press("p")
        assert "PAUSED" in text_of(app)
        await asyncio.sleep(0.1)
        reads = source.reads
        await asyncio.sleep(0.2)
        assert source.reads == reads
        await pilot.press("p")
        await until(pilot, lambda: source.reads > reads)
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running)

    screen(source, (80, 24), press)


def test_a_trim_is_asked_for_once_it_is_confirmed() -> None:
    source = Fixed(attached())

    async def press(pilot: Pilot[None], app: Top) -> None:
        await pilot.press("down", "t")
        assert isinstance(app.screen, Ask) and "Trim torch of PID 4711" in app.screen.question
        await pilot.press("n")
        assert source.asked == []
        await pilot.press("t", "y")
        await until(pilot, lambda: bool(source.asked))
        assert source.asked == [("trim", "4711-1", "torch")]
        await until(pilot, lambda: "asked to trim" in text_of(app))
        await pilot.press("up", "t", "enter")
        await until(pilot, lambda: len(source.asked) == 2)
        assert source.asked[1] == ("trim", "4711-1", None)

    screen(source, (80, 24), press)


def test_a_cap_is_changed_once_it_is_confirmed_and_its_error_is_shown() -> None:
    source = Fixed(attached())

    async def press(pilot: Pilot[None], app: Top) -> None:
        await pilot.press("c")
        assert "a process has no cap" in text_of(app)
        await pilot.press("down", "c")
        assert isinstance(app.screen, AskCap) and "16.00 GiB" in str(
            app.screen.cap and f"{app.screen.cap / GIB:.2f} GiB"
        )
        await pilot.press(*"12GB", "enter")
        assert isinstance(app.screen, AskCap)  # GB is refused
        app.screen.query_one(Input).value = ""
        await pilot.press(*"12GiB", "enter")
        assert isinstance(app.screen, Ask) and "to 12.00 GiB" in app.screen.question
        await pilot.press("y")
        await until(pilot, lambda: "process 4711 does not answer" in text_of(app))
        assert source.asked == [("resize", "4711-1", "torch", 12 * GIB)]
        await pilot.press("c", "escape")
        assert len(app.screen_stack) == 1 and "does not answer" not in text_of(app)

    screen(source, (80, 24), press)


def test_a_timeline_can_be_asked_nothing() -> None:
    source = Fixed(FOLLOWED, followed())

    async def press(pilot: Pilot[None], app: Top) -> None:
        for key in ("t", "c"):
            await pilot.press("down", key)
            assert len(app.screen_stack) == 1 and "a timeline is only read" in text_of(app)
            assert "on the machine where the process runs" in " ".join(text_of(app).split())  # the remedy, whole
            await pilot.press("down")
            assert app._footer.size.height == 1

    screen(source, (80, 24), press)


def test_nothing_selected_is_said() -> None:
    source = Fixed(Snapshot(0.0, True))

    async def press(pilot: Pilot[None], app: Top) -> None:
        await pilot.press("t", "down", "up", "pagedown")
        await pilot.press("c")
        assert "nothing is selected" in text_of(app)

    screen(source, (80, 24), press)


def test_the_screen_may_change_its_size_and_its_content_at_any_time() -> None:
    source = Fixed(attached())

    async def change(pilot: Pilot[None], app: Top) -> None:
        for size in ((200, 60), (20, 5), (80, 24)):
            await pilot.resize_terminal(*size)
            for snapshot in (FOLLOWED, attached(), Snapshot(0.0, False), replace(FOLLOWED, targets=())):
                source.snapshot = snapshot
                await until(pilot, lambda snapshot=snapshot: app.snapshot is snapshot)  # type: ignore[misc]
                await pilot.press("down")
        head = app._head
        assert head.size.width == 80 and app.export_screenshot()

    screen(source, (80, 24), change)


def test_a_source_that_hangs_does_not_hold_the_keys() -> None:
    go = threading.Event()

    class Hanging(Fixed):
        def read(self) -> Snapshot:
            if self.reads:
                go.wait(20)
            return super().read()

    source = Hanging(FOLLOWED)

    async def press(pilot: Pilot[None], app: Top) -> None:
        await pilot.press("down", "down")
        assert app.selected is not None and app.selected.framework == "tensorflow"
        go.set()

    screen(source, (80, 24), press)


def test_a_source_that_fails_leaves_the_screen() -> None:
    class Failing(Fixed):
        def read(self) -> Snapshot:
            if self.reads:
                raise ValueError("broken")
            return super().read()

    async def look(pilot: Pilot[None], app: Top) -> None:
        await until(pilot, lambda: "cannot be read: " in text_of(app) and "broken" in text_of(app))
        assert "torch" in text_of(app)

    screen(Failing(FOLLOWED), (80, 24), look)


def test_without_colour_nothing_is_coloured() -> None:
    shots: list[str] = []

    async def shoot(pilot: Pilot[None], app: Top) -> None:
        shots.append(app.export_screenshot())

    screen(Fixed(FOLLOWED), (80, 24), shoot, colour=False)
    fills = set(re.findall(r"-r\d+ *\{ *fill: *#(\w{6})", shots[0]))
    assert fills
    for fill in fills:
        parts = bytes.fromhex(fill)
        assert max(parts) - min(parts) < 8, fill  # a grey


def test_ascii_alone_is_enough() -> None:
    async def look(pilot: Pilot[None], app: Top) -> None:
        assert text_of(app).isascii()
        for keys in (["question_mark"], ["down", "t"], ["c"]):
            await pilot.press(*keys)
            assert len(app.screen_stack) == 2
            found = rows(app.export_screenshot())
            assert all(line.isascii() for line in found.values()), found
            assert any("torch" in line and "16.00" in line for line in found.values())  # the board stays in sight
            await pilot.press("escape")

    screen(Fixed(attached()), (80, 24), look, ascii_only=True)
