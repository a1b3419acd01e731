"""The screen of `memguard top`, with textual. It draws `view`, and of that only the lines that changed."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.geometry import Region, Size
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from memguard._base.logs import text_of
from memguard._base.text import fitting
from memguard._node.top.snapshot import Snapshot, Target
from memguard._tools.top import styles
from memguard._tools.top.bars import BLOCKS
from memguard._tools.top.dialogs import Ask, AskCap, Help
from memguard._tools.top.sources import Source
from memguard._tools.top.texts import clean, cut, gib, in_ascii, left, wrapped
from memguard._tools.top.view import Key, Line, Span, View, view
from memguard.errors import MemguardError

KEYS = "q quit  ? help  t trim  c cap  p pause  up/down select"
_SAID = 8
"""Lines of what is said in the foot."""
_TOGETHER = 2.0
"""Seconds that the end waits for a reading that is under way."""


@functools.lru_cache(maxsize=200)
def _style(name: str, colour: bool) -> Style:
    return Style.parse(styles.style(name, colour))


class Lines(Widget):
    """Lines, from line `top` and column `shift` on. Only those that changed are drawn again."""

    def __init__(self, colour: bool, id: str) -> None:  # noqa: A002 (textual's name)
        super().__init__(id=id)
        self._colour, self._lines = colour, tuple[Line, ...]()
        self.top = self.shift = 0

    def show(self, lines: Sequence[Line]) -> None:
        before, self._lines = self._lines, tuple(lines)
        if len(before) != len(self._lines):
            self.scroll_by(0)
            self.refresh()
            return
        for number, (old, new) in enumerate(zip(before, self._lines, strict=True)):
            if old != new and self.top <= number < self.top + self.size.height:
                self.refresh(Region(0, number - self.top, self.size.width, 1))

    def render_line(self, y: int) -> Strip:
        width, number = self.size.width, y + self.top
        if number >= len(self._lines):
            return Strip.blank(width)
        segments = [Segment(span.text, _style(span.style, self._colour)) for span in self._lines[number].spans]
        return Strip(segments).adjust_cell_length(self.shift + width).crop(self.shift, self.shift + width)

    @property
    def below(self) -> int:
        """Lines that are hidden below."""
        return max(len(self._lines) - self.top - self.size.height, 0)

    def scroll_by(self, lines: int, columns: int = 0) -> None:
        widest = max((len(line.text) for line in self._lines), default=0)
        top = max(min(self.top + lines, len(self._lines) - self.size.height), 0)
        shift = max(min(self.shift + columns, widest - self.size.width), 0)
        if (top, shift) != (self.top, self.shift):
            self.top, self.shift = top, shift
            self.refresh()

    def reveal(self, number: int) -> None:
        """Scroll as little as shows the line."""
        self.scroll_by(min(number - self.top, 0) + max(number - self.top - self.size.height + 1, 0))


class Read(Message):
    """A new snapshot came."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot


class Answered(Message):
    """What became of something that was asked."""

    def __init__(self, text: str, wrong: bool) -> None:
        super().__init__()
        self.text, self.wrong = text, wrong


class Reader(threading.Thread):
    """Reads the source again and again, and posts what it finds. The screen never waits for it."""

    def __init__(self, app: Top, source: Source, seconds: float) -> None:
        super().__init__(name="memguard-top", daemon=True)
        self._app, self._source, self._seconds = app, source, seconds
        self._over, self.paused = threading.Event(), False

    def run(self) -> None:
        while not self._over.is_set():
            if not self.paused:
                try:
                    self._app.post_message(Read(self._source.read()))
                except Exception as error:  # the screen stays, with the figures that it has
                    self._app.post_message(Answered(f"cannot be read: {text_of(error)}", True))
            self._over.wait(self._seconds)

    def end(self) -> None:
        self._over.set()
        self.join(_TOGETHER)


class Top(App[None]):
    """Head, board, events, foot."""

    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    ModalScreen { background: transparent; }
    Lines { background: ansi_default; color: ansi_default; }
    #head, #foot { height: 1; }
    #board { height: 1fr; }
    #events { height: 6; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "quit", priority=False),
        Binding("question_mark,h", "help", "help"),
        Binding("t", "trim", "trim"),
        Binding("c", "cap", "cap"),
        Binding("p", "pause", "pause"),
        Binding("up,k", "select(-1)", "up"),
        Binding("down,j", "select(1)", "down"),
        Binding("pageup", "page(-1)", "page up"),
        Binding("pagedown,space", "page(1)", "page down"),
        Binding("left", "sideways(-8)", "left"),
        Binding("right", "sideways(8)", "right"),
    ]

    def __init__(self, source: Source, seconds: float, *, colour: bool = True, ascii_only: bool = False) -> None:
        super().__init__(ansi_color=True)
        self._source, self._colour, self._ascii = source, colour, ascii_only
        self._reader = Reader(self, source, seconds)
        self.snapshot: Snapshot | None = None
        self.selected: Key | None = None
        self.said: tuple[str, bool] | None = None
        self._view: View | None = None
        self._head, self._board = Lines(colour, "head"), Lines(colour, "board")
        self._events, self._footer = Lines(colour, "events"), Lines(colour, "foot")

    def compose(self) -> ComposeResult:
        yield from (self._head, self._board, self._events, self._footer)

    def on_mount(self) -> None:
        self._draw()
        self._reader.start()

    def on_unmount(self) -> None:
        self._reader.end()

    def on_read(self, message: Read) -> None:
        if not self._reader.paused:
            self.snapshot = message.snapshot
            self._draw()

    def on_answered(self, message: Answered) -> None:
        self._say(message.text, message.wrong)

    def on_resize(self, event: Resize) -> None:
        self._draw(event.size)

    # drawing

    def _draw(self, size: Size | None = None) -> None:
        width, height = size or self.size
        room = 6 if height < 30 else min(2 + height // 4, 20)
        if not self._board.is_attached:  # the end has begun
            return
        events = self._events
        if events.styles.height is None or events.styles.height.value != room:
            events.styles.height = room
        self._foot(width)
        if self.snapshot is None:
            self._head.show([Line((Span(left("memguard top  reading", width), "title"),))])
            return
        found = view(self.snapshot, width, ascii_only=self._ascii, selected=self.selected)
        if self.selected not in found.keys:
            self.selected = found.keys[0] if found.keys else None
            found = view(self.snapshot, width, ascii_only=self._ascii, selected=self.selected)
        self._view = found
        self._head.show([found.head])
        self._board.show(found.body)
        self._board.scroll_by(0)  # the screen may have grown
        rule = "-" if self._ascii else BLOCKS.rule
        below = f"{self._board.below} more lines below {rule * 2}" if self._board.below else ""
        title = Line((Span(f"{rule * 2} events {rule * max(width - 10 - len(below) - 1, 0)} {below}", "rule"),))
        events.show([title, *found.events[-(room - 1) :]])

    def _foot(self, width: int) -> None:
        text, style = KEYS, "foot"
        if self._reader.paused:
            text = f"PAUSED  {KEYS}"
        if self.said is not None:
            text, style = self.said[0], "wrong" if self.said[1] else "answer"
        text = in_ascii(text) if self._ascii else text
        # The keys are cut, what is said is not: a reason without its remedy helps nobody.
        lines = [cut(text, width)] if self.said is None else wrapped(text, width, _SAID) or [""]
        height = self._footer.styles.height
        if height is None or height.value != len(lines):
            self._footer.styles.height = len(lines)
        self._footer.show([Line((Span(left(line, width), style),)) for line in lines])

    def _say(self, text: str, wrong: bool = False) -> None:
        """In the foot, until the next key."""
        self.said = clean(text), wrong
        self._foot(self.size.width)

    # keys

    def on_key(self) -> None:
        if self.said is not None:
            self.said = None
            self._foot(self.size.width)

    def action_help(self) -> None:
        self.push_screen(Help(self._ascii))

    def action_pause(self) -> None:
        self._reader.paused = not self._reader.paused
        self._foot(self.size.width)

    def action_select(self, step: int) -> None:
        if self._view is None or not self._view.keys:
            return
        keys = self._view.keys
        at = keys.index(self.selected) if self.selected in keys else 0
        if not 0 <= at + step < len(keys):
            self._scroll(step)
            return
        self.selected = keys[at + step]
        self._board.reveal(next(n for n, line in enumerate(self._view.body) if line.key == self.selected))
        self._draw()

    def action_page(self, step: int) -> None:
        self._scroll(step * max(self._board.size.height - 1, 1))

    def action_sideways(self, step: int) -> None:
        self._scroll(0, step)

    def on_mouse_scroll_down(self) -> None:
        self._scroll(3)

    def on_mouse_scroll_up(self) -> None:
        self._scroll(-3)

    def _scroll(self, lines: int, columns: int = 0) -> None:
        self._board.scroll_by(lines, columns)
        self._draw()

    def action_trim(self) -> None:
        found = self._chosen()
        if found is None:
            return
        key, target = found
        what = key.framework or "all frameworks"
        question = f"Trim {clean(what)} of {_who(target)}?\n\n{_WHEN}"
        self._ask(question, lambda: self._source.trim(key.target, key.framework))

    def action_cap(self) -> None:
        found = self._chosen()
        if found is None:
            return
        key, target = found
        if key.framework is None:
            self._say("select a framework first: a process has no cap of its own", True)
            return
        name = key.framework
        now = next((part.cap for share in target.shares for part in share.frameworks
                    if (share.uuid, part.name) == (key.uuid, name)), None)  # fmt: skip

        def ask(cap: int | None) -> None:
            if cap is not None:
                question = f"Change the cap of {clean(name)} of {_who(target)} to {gib(cap)} GiB?\n\n{_WHEN}"
                self._ask(question, lambda: self._source.resize(key.target, name, cap))

        self.push_screen(AskCap(f"{clean(name)} of {_who(target)}", now, self._ascii), ask)

    def _chosen(self) -> tuple[Key, Target] | None:
        """What the keys are about; says why not if nothing can be asked of it."""
        target = None
        if self.snapshot is not None and self.selected is not None:
            target = self.snapshot.target(self.selected.target)
        if target is None or self.selected is None:
            self._say("nothing is selected: no process here tells memguard top of itself", True)
            return None
        try:
            self._source.check(target.key)
        except MemguardError as error:
            self._say(error.advice.line(), True)
            return None
        return self.selected, target

    def _ask(self, question: str, do: object) -> None:
        def answered(yes: bool | None) -> None:
            if yes:
                threading.Thread(target=self._do, args=(do,), daemon=True).start()

        self.push_screen(Ask(question, self._ascii), answered)

    def _do(self, do: object) -> None:
        assert callable(do)
        try:
            self.post_message(Answered(do(), False))
        except MemguardError as error:
            self.post_message(Answered(error.advice.line(), True))


_WHEN = "The process does it at its next memguard.checkpoint(), on its own thread."


def _who(target: Target) -> str:
    name = clean(target.name) if target.pid is None else f"PID {target.pid} ({clean(target.name)})"
    return f"{name} on each of its GPUs" if len(target.shares) > 1 else name


def run(source: Source, seconds: float) -> None:
    """Show it until somebody quits."""
    ascii_only = fitting("".join(BLOCKS)) != "".join(BLOCKS)
    Top(source, seconds, colour="NO_COLOR" not in os.environ, ascii_only=ascii_only).run()
