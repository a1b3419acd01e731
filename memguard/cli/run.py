"""`memguard run`: start a program under a budget without changing it.

The command replaces this process (`exec`), so its exit code and signals are its own. Its environment makes the first
Python activate the budget: see `memguard/_tools/activation`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from memguard.cli.support import complete, exit_codes, options
from memguard.cli.support.exit_codes import InputError

if TYPE_CHECKING:
    from memguard._budget import Budget

_ACTIVATE = Path(__file__).resolve().parents[1] / "_tools" / "activation"
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127  # as in shells
_TIMEOUT = 60.0
"""Seconds for each framework under `--doctor`."""
_FATAL = ("driver-", "cuda-init-failed", "visible-devices-", "container-", "device-files")
"""Errors that no program on a GPU survives: ignoring them would only delay its failure."""


@click.command(
    "run",
    short_help="Start a program under a budget, without changing it.",
    context_settings={"allow_interspersed_args": False},
)
@options.budget(stdin=False)
@options.devices
@options.duration(
    "--when-idle",
    "Notebooks started by COMMAND leave their GPUs after this time without work. Needs no budget.",
    least="1s",
    most="168h",
)
@click.option(
    "--record",
    metavar="FILE",
    type=click.Path(),
    help="Cap nothing: record a timeline for `memguard suggest`, with PID and rank in its name.",
)
@click.option(
    "--mps",
    "mps",
    is_flag=True,
    help="Have CUDA's Multi-Process Service refuse what goes beyond the budget's limit, whichever library asks.",
)
@click.option("--doctor", "examine", is_flag=True, help="Run `memguard doctor` first, and do not start after an error.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=complete.any_file)
def run(
    budget: str | None,
    devices: tuple[str, ...],
    when_idle: float | None,
    record: str | None,
    mps: bool,
    examine: bool,
    command: tuple[str, ...],
) -> None:
    """Start COMMAND under a budget: memguard run -c budget.yaml -- python train.py

    COMMAND replaces memguard, so exit code, signals and standard input are its own. It need not be Python: each
    Python that a shell script starts gets the budget. Processes that those start, such as the workers of torchrun and
    multiprocessing, do not: call memguard.init there. --when-idle is for all of them that are notebooks. --record is
    for all of them that import a framework, and takes no budget.
    """
    from memguard import _budget
    from memguard._runtime import workers
    from memguard.cli.support import budget_file, ignored_environment
    from memguard.cli.support import mps as service

    if command[0].endswith((".yaml", ".yml")) and os.path.isfile(command[0]):
        rest = command[2:] if command[1:2] == ("--",) else command[1:]
        words = shlex.join(rest) if rest else "COMMAND"
        raise click.UsageError(
            f"the budget is an option: memguard run -c {shlex.quote(command[0])} -- {words}"
            if budget is None
            else f"the budget is given twice: as {command[0]} and with -c"
        )
    gpus: Sequence[str] = devices
    if examine and gpus:
        raise click.UsageError("--doctor examines real GPUs and --device names simulated ones: leave one out")
    if mps and when_idle is not None:
        raise click.UsageError("--when-idle suspends processes, which is not possible under MPS: leave one out")
    environ = _with_idle(os.environ, when_idle)
    if record is not None and (budget is not None or gpus or examine or mps):
        raise click.UsageError("--record is without a budget: leave -c, --device, --mps and --doctor out")
    if not gpus and workers.disabled(os.environ):
        click.echo(f"memguard: {workers.DISABLE} is set: {command[0]} runs without a budget", err=True)
        _exec(command, os.environ)
    if record is not None:
        from memguard.cli.support import recording

        recording.check(command)
        environ = recording.environment(environ, record)
        recording.announce(command, environ)
        _exec(command, environ)
    if when_idle is not None and budget is None and not gpus and not examine and budget_file.found() is None:
        _exec(command, environ)
    # The program may change its directory before Python starts.
    path = Path(budget).absolute() if budget is not None else budget_file.nearest("memguard run -c FILE -- COMMAND")
    loaded = _budget.load(path)
    ignored_environment.check(command, service.READ if mps else ())
    if examine:
        _examine(loaded, command)
    if gpus:
        from memguard._devices.simulated import SimulatedHost

        gpus = SimulatedHost(gpus).names  # reports an unknown name before the program starts
        click.echo(f"memguard: simulated GPUs ({', '.join(gpus)}): nothing limits a real one", err=True)
    environ = environment(environ, path, gpus)
    if mps:
        environ, said = service.environment(environ, loaded, gpus)
        click.echo(f"memguard: {said}", err=True)
    _exec(command, environ)


def _examine(budget: Budget, command: Sequence[str]) -> None:
    """Exit if the frameworks that the budget names do not work in the Python of the command."""
    from memguard._tools.doctor import report_on
    from memguard._tools.doctor.collect import gather
    from memguard.cli import doctor
    from memguard.cli.support import program, signals

    started = program.of(command, os.environ)
    if started.python is None:
        click.echo(
            f"memguard: cannot tell which Python `{command[0]}` runs: examined memguard's own, {sys.executable}",
            err=True,
        )
    with signals.unwinding(), doctor.progress() as say:
        facts = gather.facts(
            budget,
            frameworks=None,
            timeout=_TIMEOUT,
            python=None if started.python is None else [started.python],
            environ=started.environ,
            script=started.script,
            say=say,
        )
    doctor.unread(facts)
    report = report_on(facts, budget)
    if not report.healthy:
        doctor.show(report, brief=True, err=True)
    if report.errors:
        names = list(dict.fromkeys(finding.name for finding in report.errors))
        fix = "see above"
        if not any(name.startswith(_FATAL) for name in names):
            fix += f", or leave it out in the budget: doctor: {{ignore: [{', '.join(names)}]}}"
        click.echo(f"\nmemguard: {command[0]} was not started\n    fix: {fix}", err=True)
        raise SystemExit(exit_codes.NO)


def environment(environ: Mapping[str, str], budget: Path, gpus: Sequence[str] = ()) -> dict[str, str]:
    """`environ`, changed so that a Python started with it activates the budget."""
    folder = str(_ACTIVATE)
    if os.pathsep in folder:
        raise InputError(
            f"memguard is installed in {folder}, and PYTHONPATH cannot hold a folder with {os.pathsep!r} in its name",
            fix="install it elsewhere, or call memguard.init('budget.yaml') in the program",
        )
    result = {name: value for name, value in environ.items() if name != "MEMGUARD_SIMULATE"}
    inherited = environ.get("PYTHONPATH")
    result["PYTHONPATH"] = f"{folder}{os.pathsep}{inherited}" if inherited else folder
    result["MEMGUARD_RUN"] = str(budget)
    if gpus:
        result["MEMGUARD_SIMULATE"] = ",".join(gpus)
    return result


def _with_idle(environ: Mapping[str, str], when_idle: float | None) -> Mapping[str, str]:
    """`environ` with the seconds of idleness after which notebooks leave their GPUs."""
    if when_idle is None:
        return environ
    from memguard._budget.values import duration_text

    return {**environ, "MEMGUARD_WHEN_IDLE": duration_text(when_idle)}


def _exec(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    # `sys.stdout` is memguard's stream here, which flushes only if it was written to. What a `sitecustomize` printed is
    # in the buffer of the stream below it, and `exec` would drop it.
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        if stream is not None:  # None if it was closed when we started
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it was closed since
                stream.flush()
    # Python ignores these, and an ignored signal would stay ignored in the command.
    names = [getattr(signal, name) for name in ("SIGPIPE", "SIGXFSZ") if hasattr(signal, name)]  # not on Windows
    before = {number: signal.signal(number, signal.SIG_DFL) for number in names}
    try:
        if sys.platform == "win32":  # exec would return to the shell while the command still runs
            raise SystemExit(subprocess.call(list(command), env=dict(environ)))
        os.execvpe(command[0], list(command), dict(environ))
    except OSError as error:
        click.echo(f"memguard: {command[0]}: {error.strerror}", err=True)
        raise SystemExit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE) from None
    except ValueError as error:  # for example a null byte in an argument
        raise InputError(f"{command[0]}: {error}") from None
    finally:  # there is no command
        for number, handler in before.items():
            signal.signal(number, handler)
