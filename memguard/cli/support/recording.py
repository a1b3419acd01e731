"""The environment in which a program is recorded: `memguard run --record FILE`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from memguard._base.text import visible
from memguard.cli.support.exit_codes import InputError
from memguard.errors import TimelineError

_STARTUP = Path(__file__).resolve().parents[2] / "_tools" / "suggest" / "startup"


def check(command: Sequence[str]) -> None:
    """Raise InputError if the command would start a Python that does not record itself."""
    from memguard.cli.support import ignored_environment

    if (found := ignored_environment.refusal(command)) is not None:
        fix = "start it without that, or record it under a budget: monitor: {timeline: run.jsonl}, and memguard.init"
        raise InputError(f"nothing would be recorded: {found[0]}", fix=fix)


def environment(environ: Mapping[str, str], record: str) -> dict[str, str]:
    """`environ`, changed so that each Python records itself.

    Raises TimelineError if the files cannot be written, UsageError if they have no name or a budget would apply.
    """
    if not record:
        raise click.UsageError("--record names no file: write for example --record run.jsonl")
    for name in ("MEMGUARD_CONFIG", "MEMGUARD_SIMULATE"):
        if environ.get(name):
            raise click.UsageError(f"--record is without a budget, and {name} is set: unset it")
    if os.pathsep in str(_STARTUP):
        raise InputError(
            f"memguard is installed in {_STARTUP}, and PYTHONPATH cannot hold a folder with {os.pathsep!r} in it",
            fix="install it elsewhere",
        )
    from memguard._timeline.files import expand

    if not os.path.basename(record) or os.path.isdir(record):
        name = click.format_filename(record)
        raise TimelineError(f"{name} is a folder", fix=f"name a file in it: --record {os.path.join(name, 'run.jsonl')}")
    expand(record, 0, None)  # raises if it names no file
    path = os.path.abspath(record)
    folder = os.path.dirname(path)
    if "{" not in folder and not os.access(folder, os.W_OK | os.X_OK):
        wrong = "cannot be written to" if os.path.isdir(folder) else "does not exist"
        raise TimelineError(f"{click.format_filename(folder)} {wrong}", fix="name a file in another folder")
    stem, suffix = os.path.splitext(path)
    if "{pid}" not in path and "{rank}" not in path:
        path = f"{stem}-{{pid}}-{{rank}}{suffix}"
    inherited = environ.get("PYTHONPATH")
    start = str(_STARTUP)
    return {
        **environ,
        "MEMGUARD_RECORD": path,
        "PYTHONPATH": f"{start}{os.pathsep}{inherited}" if inherited else start,
    }


def announce(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Say on stderr what will be recorded and how to go on. Nothing is said of a program that is not there.

    `environ` is what `environment` returned.
    """
    if shutil.which(command[0], path=environ.get("PATH")) is None:
        return
    shown = environ["MEMGUARD_RECORD"].removeprefix(os.path.join(os.getcwd(), ""))
    files = "*".join(part and shlex.quote(part) for part in re.split(r"\{pid\}|\{rank\}", shown))
    what = "each Python that imports a framework will be recorded, without a budget"
    click.echo(visible(f"memguard: {what}; then: memguard suggest {files}"), err=True)
