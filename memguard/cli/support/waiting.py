"""Shows a wait for room, and makes Ctrl-C end it: for `suspend` and `resume`."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import click

from memguard._base.text import visible
from memguard._base.units import format_size
from memguard._node.suspend.types import Progress, Wait
from memguard.cli.support import exit_codes

if TYPE_CHECKING:
    from memguard._node.suspend.remote_suspend import Result, Stop

T = TypeVar("T")
_LOOK = 0.1
_AGAIN = 30.0
"""Seconds after which a plain line is written again if nothing has changed."""


def lines(wait: Wait) -> list[str]:
    """What a process waits for, and who holds it. Pure."""
    if wait.free < wait.needs:
        head = f"{wait.uuid}: {format_size(wait.free)} free, {format_size(wait.needs)} needed"
    else:
        head = f"{wait.uuid}: {format_size(wait.free)} free, enough"
    if wait.ahead:
        head += f"; {wait.ahead} came before it"
    return [head, *(f"    {line}" for line in wait.holders)]


class _Plain:
    """A line when something changes."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[list[str], float]] = {}

    def __call__(self, wait: Wait) -> None:
        text, now = lines(wait), time.monotonic()
        before = self._said.get(wait.uuid)
        if before is not None and before[0] == text and now - before[1] < _AGAIN:
            return
        self._said[wait.uuid] = text, now
        click.echo("\n".join(["waits for room on " + text[0], *text[1:]]), err=True)


class _Drawn:
    """A bar for each GPU, with who holds it beneath."""

    def __init__(self, live: object) -> None:
        self._live, self._waits = live, dict[str, Wait]()

    def __call__(self, wait: Wait) -> None:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        self._waits[wait.uuid] = wait
        rows = Table.grid()
        rows.add_row(Text(f"waits for room, {wait.seconds:,.0f} s; Ctrl-C leaves it suspended"))
        for one in self._waits.values():
            rows.add_row(ProgressBar(total=one.needs, completed=min(one.free, one.needs), width=40))
            for line in lines(one):
                rows.add_row(Text(visible(line)))
        self._live.update(rows)  # type: ignore[attr-defined]


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """Bars where a terminal is, else lines, on standard error."""
    if not sys.stderr.isatty():
        yield _Plain()
        return
    from rich.live import Live

    from memguard.cli.support import printing

    with Live(console=printing.console(err=True), transient=True, refresh_per_second=4) as live:
        yield _Drawn(live)


def interruptible(call: Callable[[], T], stop: Stop, says: str) -> tuple[T, bool]:
    """What `call` returns, and whether Ctrl-C came meanwhile. It runs on a thread of its own.

    The first Ctrl-C sets `stop.once` and says `says`, the second sets `stop.twice`; the call ends by itself then.
    """
    over, found, wrong = threading.Event(), list[T](), list[BaseException]()
    came: list[int] = []
    """Ctrl-C. It raises nothing: an exception at any place would end the command within what it does."""

    def work() -> None:
        try:
            found.append(call())
        except BaseException as error:
            wrong.append(error)
        finally:
            over.set()

    with _counted(came):
        threading.Thread(target=work, daemon=True).start()
        said = False
        while not over.wait(_LOOK):
            if came:
                stop.once.set()
            if len(came) > 1:
                stop.twice.set()
            if came and not said:
                said = True
                click.echo(says, err=True)
    if wrong:
        raise wrong[0]
    return found[0], bool(came)


def exit_code(results: Sequence[Result], interrupted: bool) -> int:
    """The worst result's; NO_GPU if the driver did not answer because there is no GPU."""
    code = max(one.code for one in results)
    if code == exit_codes.UNKNOWN and not exit_codes.gpu_here():
        code = exit_codes.NO_GPU
    return exit_codes.INTERRUPTED if interrupted and code else code


@contextlib.contextmanager
def _counted(came: list[int]) -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    try:
        if before not in (signal.SIG_IGN, None):  # ignored, as of `nohup ... &`: it stays so
            signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    except ValueError:  # only the main thread can
        before = None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
