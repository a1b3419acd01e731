"""`memguard doctor`: why a framework does not work here, and what to do."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from memguard.checkup import Checkup
    from memguard.checkup.facts import Facts
    from memguard.config import Budget

_FINDINGS = 1
_NOT_RUN = 2


@click.command("doctor", short_help="Find out why a framework does not work here.")
@click.argument("budget", required=False, type=click.Path())
@click.option("-c", "--config", "config_file", type=click.Path(), help="The budget file, as the argument BUDGET.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--dump-facts", is_flag=True, help="Print what was read, as JSON, for --facts and for others to look at.")
@click.option(
    "--facts",
    "facts_file",
    type=click.Path(),
    metavar="FILE",
    help="Look at facts that were dumped; - reads standard input.",
)
@click.option(
    "--script", type=click.Path(), metavar="FILE", help="A program whose imports are looked at; it is not run."
)
@click.option(
    "--framework", "frameworks", multiple=True, metavar="NAME", help="Only this framework; again for several."
)
@click.option("--ignore", multiple=True, metavar="NAME", help="A finding to leave out; again for several.")
@click.option(
    "--timeout",
    type=click.FloatRange(1, 86400),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="When a framework's process is stopped.",
)
@click.option("--list", "list_names", is_flag=True, help="Print the names of everything that may be found.")
@click.pass_context
def doctor(
    context: click.Context,
    budget: str | None,
    config_file: str | None,
    as_json: bool,
    dump_facts: bool,
    facts_file: str | None,
    script: str | None,
    frameworks: tuple[str, ...],
    ignore: tuple[str, ...],
    timeout: float,
    list_names: bool,
) -> None:
    """Import and use each framework in a process of its own, and say what is wrong and what to do.

    With BUDGET only the frameworks that it names, and whether it fits here. Takes some seconds, and meanwhile up to
    1.5 GiB of the GPU for each process.

    Exit code 0: healthy, nothing above info; 1: warnings or errors; 2: it could not run.
    """
    from memguard import config, findings
    from memguard.checkup.facts import Facts
    from memguard.errors import MemguardError

    if list_names:
        click.echo("\n".join(findings.NAMES))
        return
    if budget is not None and config_file is not None:
        context.fail("the budget is given twice: as BUDGET and with --config")
    if as_json and dump_facts:
        context.fail("--json prints the findings and --dump-facts the facts: choose one")
    given = [
        context.get_parameter_source(name) for name in ("budget", "config_file", "script", "frameworks", "timeout")
    ]
    if facts_file is not None and click.core.ParameterSource.COMMANDLINE in given:
        context.fail("--facts FILE reads nothing of this machine: it goes with --json, --dump-facts and --ignore only")
    for name in frameworks:
        if name not in config.FRAMEWORKS:
            context.fail(f"no framework has the name {name!r}; there are {', '.join(config.FRAMEWORKS)}")
    try:
        silent = findings.known(ignore)
        if facts_file is not None:
            checkup = examined(Facts.from_json(_read(facts_file), facts_file), None, silent)
        else:
            path = budget if budget is not None else config_file
            loaded = None if path is None else config.load(path)
            checkup = examined(_gather(loaded, frameworks, timeout, script), loaded, silent)
    except MemguardError as error:
        error.exit_code = _NOT_RUN  # 1 would say that something was found
        raise
    except Exception:  # a mistake of ours, or facts that no machine gave: neither is a finding
        traceback.print_exc()
        context.exit(_NOT_RUN)
    if dump_facts:
        click.echo(checkup.facts.to_json())
    else:
        show(checkup, as_json)
    context.exit(0 if checkup.healthy else _FINDINGS)


def examined(facts: Facts, budget: Budget | None, ignore: frozenset[str]) -> Checkup:
    """The facts with what they amount to, less what is ignored by name or by the budget."""
    from memguard.checkup import Checkup
    from memguard.checkup.examine import examine

    silent = ignore | set(budget.doctor.ignore if budget is not None and budget.doctor is not None else ())
    return Checkup(facts, examine(facts, silent), tuple(sorted(silent)))


def show(checkup: Checkup, as_json: bool = False, *, brief: bool = False, err: bool = False) -> None:
    """Print it: in colours where that is a terminal."""
    import json

    from memguard.checkup import render

    if as_json:
        click.echo(json.dumps(checkup.as_dict(), indent=2))
        return
    from rich.console import Console

    console = Console(stderr=err, highlight=False, markup=False)
    if console.is_terminal:
        console.print(render.rich(checkup, brief=brief), soft_wrap=True)
    else:
        click.echo(render.text(checkup, brief=brief), err=err)


def progress() -> Callable[[str], None] | None:
    """What tells of each process as it ends; None where nobody looks on."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    return lambda line: click.echo(f"  {line}", err=True)


def _gather(budget: Budget | None, frameworks: tuple[str, ...], timeout: float, script: str | None) -> Facts:
    from memguard.checkup import gather

    return gather.facts(
        budget, frameworks=frameworks or None, timeout=timeout, here=False, script=script, say=progress()
    )


def _read(path: str) -> bytes:
    from memguard.errors import FactsError

    try:
        with click.open_file(path, "rb") as file:
            raw: bytes = file.read()
            return raw
    except OSError as error:
        raise FactsError(f"{path}: {error.strerror}\n    fix: check the path") from None
