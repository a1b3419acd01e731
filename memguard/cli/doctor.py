"""`memguard doctor`: why a framework does not work here, and what to do."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from memguard.cli.support import complete, exit_codes, options

if TYPE_CHECKING:
    from memguard._budget import Budget
    from memguard._tools.doctor import DoctorReport
    from memguard._tools.doctor.facts import Facts


@click.command(
    "doctor",
    short_help="Find out why a framework does not work here.",
    context_settings={"allow_extra_args": True},  # refused below, with the right command
)
@options.budget("Examine only the frameworks that this budget names, and whether it fits this machine.", stdin=False)
@options.as_json
@click.option("--dump-facts", is_flag=True, help="Print what was read, as JSON, for --facts or a bug report.")
@click.option(
    "--facts",
    "facts_file",
    type=click.Path(),
    shell_complete=complete.files(".json"),
    metavar="FILE",
    help="Examine facts from --dump-facts; - reads standard input.",
)
@click.option(
    "--script",
    type=click.Path(),
    shell_complete=complete.files(".py"),
    metavar="FILE",
    help="A program whose imports are examined; it is not run.",
)
@click.option(
    "--framework",
    "frameworks",
    multiple=True,
    metavar="NAME",
    shell_complete=complete.frameworks,
    help="Examine only this framework; repeat for several.",
)
@click.option(
    "--ignore",
    multiple=True,
    metavar="NAME",
    shell_complete=complete.findings,
    help="A finding to leave out; repeat for several.",
)
@options.duration("--timeout", "Stop a framework's process after this time.", least="1s", most="24h", default="60s")
@click.option(
    "--explain",
    "explained",
    metavar="NAME",
    shell_complete=complete.findings,
    help="Print the page of a finding.",
)
@click.option("--list", "list_names", is_flag=True, help="Print the names of all findings.")
@click.pass_context
def doctor(
    context: click.Context,
    budget: str | None,
    as_json: bool,
    dump_facts: bool,
    facts_file: str | None,
    script: str | None,
    frameworks: tuple[str, ...],
    ignore: tuple[str, ...],
    timeout: float,
    explained: str | None,
    list_names: bool,
) -> None:
    """Import and use each framework in a process of its own, and say what is wrong and what to do.

    Takes a few seconds, and up to 1.5 GiB of the GPU for each process.

    Exit code 0: healthy, no errors or warnings; 1: errors or warnings, or a framework that was asked for is not
    installed; 2: the command line or a file is invalid; 4: it could not run, or it found nothing wrong and no
    framework. With --dump-facts, 0 if facts were written.
    """
    import json

    from memguard import _budget
    from memguard._base import findings
    from memguard._tools.doctor import report_on
    from memguard._tools.doctor.facts import Facts

    if list_names or explained is not None:
        with _not_run(context, exit_codes.INPUT):
            if explained is not None:
                text = findings.page(explained).text.rstrip()
                plain = {"memguard_finding": 1, **_named(explained), "text": text}
            else:
                text = "\n".join(findings.names())
                plain = {"memguard_findings": 1, "findings": [_named(name) for name in findings.names()]}
        click.echo(json.dumps(plain, indent=2) if as_json else text)
        return
    if words := context.args:
        wrote = words[0].endswith(".json") and dump_facts and not os.path.exists(words[0])
        fix = f"memguard doctor --dump-facts > {words[0]}" if wrote else f"memguard doctor -c {words[0]}"
        context.fail(f"{'--dump-facts writes to stdout' if wrote else 'the budget is an option'}: {fix}")
    if as_json and dump_facts:
        context.fail("--json prints the findings and --dump-facts the facts: choose one")
    given = [context.get_parameter_source(name) for name in ("budget", "script", "frameworks", "timeout")]
    if facts_file is not None and click.core.ParameterSource.COMMANDLINE in given:
        context.fail("--facts FILE reads nothing of this machine: it goes with --json, --dump-facts and --ignore only")
    for name in frameworks:
        if name not in _budget.FRAMEWORKS:
            context.fail(f"no framework has the name {name!r}; there are {', '.join(_budget.FRAMEWORKS)}")
    with _not_run(context, exit_codes.INPUT):
        silent = findings.known(ignore)
    with _not_run(context):
        if facts_file is not None:
            report = report_on(Facts.from_json(_read(facts_file), facts_file), None, silent)
        else:
            loaded = None if budget is None else _budget.load(budget)
            report = report_on(_gather(loaded, frameworks, timeout, script), loaded, silent)
    unread(report.facts)
    if dump_facts:
        click.echo(report.facts.to_json())
    else:
        show(report, as_json)
    context.exit(0 if dump_facts else code(report))


def _named(name: str) -> dict[str, object]:
    return {"name": name, "page": f"docs/doctor/{name}.md"}


def code(report: DoctorReport) -> int:
    """The exit code for this report."""
    if report.healthy:
        return 0
    nothing_tried = not report.facts.frameworks and not report.found
    return exit_codes.UNKNOWN if nothing_tried else exit_codes.NO


@contextlib.contextmanager
def _not_run(context: click.Context, code: int = exit_codes.UNKNOWN) -> Iterator[None]:
    """An error in this block ends with its own exit code, or with `code` instead of 1, which would mean findings."""
    from memguard.errors import MemguardError

    try:
        yield
    except MemguardError as error:
        if error.exit_code == exit_codes.NO:
            error.exit_code = code
        raise
    except Exception:  # a bug, or facts that no machine gave: not a finding
        traceback.print_exc()
        context.exit(exit_codes.UNKNOWN)


def unread(facts: Facts) -> None:
    """Warn if the script could not be read: the findings ignore it."""
    if facts.script is not None and facts.script.error is not None:
        click.echo(f"memguard: {facts.script.path} was not examined: {facts.script.error}", err=True)


def show(report: DoctorReport, as_json: bool = False, *, brief: bool = False, err: bool = False) -> None:
    """Print the report, in colours on a terminal."""
    import json

    from memguard._tools.doctor import render

    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=2))
        return
    from memguard.cli.support import printing

    console = printing.console(err=err)
    if console.is_terminal:
        console.print(render.rich(report, brief=brief), soft_wrap=True)
    else:
        click.echo(render.text(report, brief=brief), err=err)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None] | None]:
    """A function that prints a line when a process ends, and a line that shows the time; None without a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from memguard.cli.support import working

    with working.on("examines each framework in a process of its own") as work:
        yield lambda line: work.say(f"  {line}")


def _gather(budget: Budget | None, frameworks: tuple[str, ...], timeout: float, script: str | None) -> Facts:
    from memguard._tools.doctor.collect import gather
    from memguard.cli.support.signals import unwinding

    if script is not None:
        _program(script)
    with unwinding(), progress() as say:
        return gather.facts(budget, frameworks=frameworks or None, timeout=timeout, script=script, say=say)


def _program(path: str) -> None:
    """Raise FactsError if it is not a regular file, before anything is started."""
    from memguard.errors import FactsError

    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise FactsError(f"{path}: {getattr(error, 'strerror', None) or error}", fix="check the path") from None
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise FactsError(f"{path}: it is {what}", fix="name a Python file: --script train.py")


def _read(path: str) -> bytes:
    from memguard._tools.doctor import bounds
    from memguard.errors import FactsError

    if path == "-" and sys.stdin is None:
        raise FactsError("-: standard input is closed", fix="memguard doctor --facts FILE")
    try:
        if path == "-":
            raw = sys.stdin.buffer.read(bounds.TEXT + 1)
        else:
            # O_NONBLOCK: opening a FIFO that nobody writes must not wait for ever.
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
            with open(handle, "rb") as file:
                if stat.S_ISFIFO(os.fstat(handle).st_mode):
                    raise OSError(0, "it is a pipe, which goes to standard input: memguard doctor --facts -")
                raw = file.read(bounds.TEXT + 1) or b""
    except (OSError, ValueError) as error:
        raise FactsError(f"{path}: {getattr(error, 'strerror', None) or error}", fix="check the path") from None
    if len(raw) > bounds.TEXT:
        raise FactsError(
            f"{path}: it is larger than any facts ({bounds.TEXT >> 20} MiB)",
            fix="give a file that `memguard doctor --dump-facts` wrote",
        )
    return raw
