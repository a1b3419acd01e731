"""`memguard top`: who holds each GPU's memory, live."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from typing import TYPE_CHECKING

import click

from memguard._base.advice import Advice
from memguard.cli.support import complete, exit_codes, options

if TYPE_CHECKING:
    from memguard._tools.top.sources import Source


@click.command("top")
@click.argument("timelines", metavar="[TIMELINE]...", nargs=-1, type=click.Path(), shell_complete=complete.timelines)
@click.option("--once", is_flag=True, help="Print it once, as text, with what each framework could give back, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print it once, as JSON; sizes in bytes.")
@options.duration("--interval", "The time between two readings.", least="100ms", most="1h", default="500ms")
def top(timelines: tuple[str, ...], once: bool, as_json: bool, interval: float) -> None:
    """Watch each GPU: frameworks against their caps, other processes, pressure, forecasts, the last events.

    With one TIMELINE or several it follows what they say, while they are written and after. Without, it shows this
    machine's GPUs and their processes. `?` lists the keys. The screen needs textual (pip
    install textual). --once and --json do not.

    Exit code 0: it was shown; 2: the command line or a timeline is invalid; 3: no NVIDIA driver or GPU.
    """
    source = _source(timelines, live=not (once or as_json))
    try:
        if once or as_json:
            _print(source, as_json)
        else:
            _show(source, interval)
    finally:
        source.close()


def _source(timelines: tuple[str, ...], live: bool) -> Source:
    """Raises DeviceError if there is nothing to show."""
    if timelines:
        from memguard._tools.top.sources import Timelines

        return Timelines(timelines)
    from memguard._tools.top.machine import Machine

    machine = Machine(live)
    try:
        machine.begin()
    except BaseException:
        machine.close()
        raise
    return machine


def _print(source: Source, as_json: bool) -> None:
    from memguard._base.text import fitting
    from memguard._tools.top import view
    from memguard._tools.top.bars import BLOCKS
    from memguard.errors import TimelineError

    found = source.read()
    wrong = [target for target in found.targets if not target.shares and target.state in ("missing", "unreadable")]
    if wrong and len(wrong) == len(found.targets):
        raise TimelineError("\n".join(note for target in wrong for note in target.notes))
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
        return
    width = shutil.get_terminal_size().columns
    ascii_only = fitting("".join(BLOCKS)) != "".join(BLOCKS)
    for line in view.plain(view.view(found, width, ascii_only=ascii_only, reclaimable=True)):
        click.echo(line)


def _show(source: Source, seconds: float) -> None:
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown", "") or not _terminal():
        raise click.UsageError(
            "this is no terminal with a screen (TERM, or a redirected standard output)\n    fix: memguard top --once"
        )
    try:
        from memguard._tools.top import app
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        raise exit_codes.InputError(missing()) from None
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # The screen ends with its terminal: textual would read the end of its input again and again, on a whole core.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    app.run(source, seconds)


def _terminal() -> bool:
    """Whether keys come from a terminal and the screen goes to one. textual writes to standard error."""
    streams = (sys.__stdin__, sys.__stdout__, sys.__stderr__)
    return all(stream is not None and stream.isatty() for stream in streams)


def missing() -> Advice:
    """What to do where textual is not installed."""
    return Advice(
        "the screen of memguard top needs textual, which is not installed",
        "pip install 'textual>=1.0'",
        ("memguard top --once, or --json, which need nothing more",),
    )
