"""`memguard suggest`: a budget from what was recorded, or a first one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from memguard.cli.support import complete, exit_codes, options

if TYPE_CHECKING:
    from collections.abc import Sequence
    from fractions import Fraction

    from memguard._base.types import Device


def _once(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> str | None:
    """The value of an option that may be given once: click alone would drop all but the last."""
    if len(values) > 1:
        raise click.UsageError("-o is given twice: one budget is written, to one file", context)
    return values[0] if values else None


@click.command("suggest")
@click.argument("timelines", metavar="[TIMELINE]...", nargs=-1, type=click.Path(), shell_complete=complete.timelines)
@click.option(
    "--headroom", default="15%", show_default=True, metavar="PERCENT", help="Kept on top of each need, 0% to 100%."
)
@options.devices
@click.option("--ignore-refused", is_flag=True, help="Leave out what was refused: for programs that try sizes.")
@options.as_json
@click.option(
    "-o",
    "output",
    type=click.Path(),
    multiple=True,
    callback=_once,
    metavar="FILE",
    help="Write to this file, which must not exist; - is stdout.",
)
@options.force
@click.pass_context
def suggest(
    context: click.Context,
    timelines: tuple[str, ...],
    headroom: str,
    devices: tuple[str, ...],
    ignore_refused: bool,
    as_json: bool,
    output: str | None,
    force: bool,
) -> None:
    """Write a budget from the timelines of one run or many: memguard suggest run*.jsonl > budget.yaml

    Each process that was recorded, each rank too, gets the same budget. Its comments hold the evidence. Without a
    timeline it is a first budget, for what is installed and the GPUs here, or those of --device.

    Exit code 0: it fits; 1: nothing fits or was needed; 2: a timeline or the command line is invalid, or the output
    cannot be written; 3: no GPU.
    """
    import json

    percent = _headroom(headroom)
    if force and output is None:
        raise click.UsageError("--force replaces the file of -o, and none is given")
    unused = [] if timelines else _unused(context, "headroom", "ignore_refused")
    if unused:
        verb = "is" if len(unused) == 1 else "are"
        raise click.UsageError(f"{' and '.join(unused)} {verb} for what was recorded: give a timeline, or leave it out")
    if output is not None:
        from memguard._timeline.files import parts_of_run
        from memguard.cli.support import output as outputs

        outputs.check([output], set().union(*map(parts_of_run, timelines)), force)
    chosen = _devices(devices) if devices else None
    if not timelines:
        content = _first(chosen)
        if as_json:
            content = json.dumps({"memguard_suggest": 1, "fits": True, "recorded": False, "yaml": content}, indent=2)
            content += "\n"
        _write(content, output, force)
        return

    from memguard._tools.suggest import decide, recorded, text
    from memguard.cli.support import working
    from memguard.errors import MemguardError

    what = timelines[0] if len(timelines) == 1 else f"{len(timelines)} timelines"
    with working.on(f"reads {what}", len(timelines)) as work:
        runs = recorded.runs(timelines, work.counted)
    if ignore_refused:
        runs = [run.without_refusals() for run in runs]
    found = decide.suggest(runs, percent, chosen)
    if found is None:
        raise MemguardError("no framework held anything in what was recorded", fix="record another run")
    if found.problem is not None and not as_json:
        raise MemguardError(found.problem, fix=found.fix or "")
    content = json.dumps(text.as_dict(found), indent=2) + "\n" if as_json else text.as_yaml(found)
    _write(content, output, force)
    context.exit(exit_codes.YES if found.problem is None else exit_codes.NO)


def _first(devices: Sequence[Device] | None) -> str:
    import sys

    from memguard._tools.suggest import installed
    from memguard._tools.suggest.first import first
    from memguard.errors import DeviceError, MemguardError

    named = devices is not None
    if devices is None:
        from memguard._devices.real import RealHost

        try:
            devices = RealHost().devices()
        except DeviceError as error:
            other = "name the GPU: memguard suggest --device h100; or give a timeline"
            raise DeviceError(error.advice.with_alternatives(other)) from None
    found = installed.frameworks()
    if not found:
        raise MemguardError(
            f"none of the frameworks that a budget may name is installed for {sys.executable}",
            fix="run it with the program's Python (python -m memguard suggest), or give a timeline",
        )
    return first(found, devices, sys.executable, named)


def _unused(context: click.Context, *names: str) -> list[str]:
    """Those of the options that the command line has."""
    from click.core import ParameterSource

    given = [name for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    return [f"--{name.replace('_', '-')}" for name in given]


def _headroom(written: str) -> Fraction:
    """A percentage of 0 or more, as a budget has none. 0 needs no sign."""
    import re
    from fractions import Fraction

    from memguard._base.units import parse_percent, short

    match = re.fullmatch(r"\s*([+-]?\d{1,9}(?:\.\d{1,20})?)\s*(%?)\s*", written, re.ASCII)
    try:
        if match is None or not (match[2] or not Fraction(match[1])):
            return parse_percent(written)  # which says how to write it
        found = Fraction(match[1]) / 100
        if not 0 <= found <= 1:
            raise ValueError(f"it must be from 0% to 100%, found {short(written)}")
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--headroom") from None
    return found


def _devices(names: tuple[str, ...]) -> Sequence[Device]:
    from memguard._devices.simulated import SimulatedHost

    return SimulatedHost(names).devices()


def _write(content: str, output: str | None, force: bool) -> None:
    if output is None:
        click.echo(content, nl=False)
        return
    from memguard.cli.support import output as outputs

    outputs.write(output, [content], force)
