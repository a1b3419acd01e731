"""The questions before something is asked of a process, and the help. Needs textual."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Input, Static

from memguard._base.units import parse_size
from memguard._tools.top import view
from memguard._tools.top.texts import gib

_CSS = """
{name} {{ align: center middle; }}
{name} > Vertical {{ width: 72; max-width: 100%; height: auto; border: round white; padding: 0 1;
                     background: ansi_default; }}
{name} Static {{ height: auto; background: ansi_default; }}
{name} Input {{ border: none; height: 1; padding: 0; margin: 1 0; }}
"""


def _box(ascii_only: bool, *inner: Widget) -> Vertical:
    box = Vertical(*inner)
    if ascii_only:
        box.styles.border = ("ascii", "white")
    return box


class Ask(ModalScreen[bool]):
    """A question: y or enter for yes, n or escape for no."""

    CSS = _CSS.format(name="Ask")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y,enter", "answer(True)", "yes"),
        Binding("n,escape,q", "answer(False)", "no"),
    ]

    def __init__(self, question: str, ascii_only: bool = False) -> None:
        super().__init__()
        self.question, self._ascii = question, ascii_only

    def compose(self) -> ComposeResult:
        yield _box(self._ascii, Static(self.question, markup=False), Static("\ny yes   n no", markup=False))

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)


class AskCap(ModalScreen[int | None]):
    """A new cap in bytes; None for none."""

    CSS = _CSS.format(name="AskCap")
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "leave it")]

    def __init__(self, who: str, cap: int | None, ascii_only: bool = False) -> None:
        super().__init__()
        self.who, self.cap, self._ascii = who, cap, ascii_only

    def compose(self) -> ComposeResult:
        now = "none" if self.cap is None else f"{gib(self.cap)} GiB"
        yield _box(
            self._ascii,
            Static(f"The new cap of {self.who} (now {now}), for example 12GiB:", markup=False),
            Input(),
            Static("enter go on   escape leave it", id="said", markup=False),
        )

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        try:
            self.dismiss(parse_size(event.value))
        except ValueError as error:
            self.query_one("#said", Static).update(f"{error}")

    def action_leave(self) -> None:
        self.dismiss(None)


class Help(ModalScreen[None]):
    """Any of the keys closes it."""

    CSS = _CSS.format(name="Help")
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark,enter,space", "leave", "close")]

    def __init__(self, ascii_only: bool = False) -> None:
        super().__init__()
        self._ascii = ascii_only

    def compose(self) -> ComposeResult:
        yield _box(self._ascii, Static("\n".join(view.help_lines(66, self._ascii)), markup=False))

    def action_leave(self) -> None:
        self.dismiss(None)
