"""What a command will run: which Python, script and environment. Reads only names and first lines of files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memguard.cli.support.ignored_environment import PYTHON, shebang

_LAUNCHERS = {"torchrun": (), "accelerate": ("launch",)}
"""Programs that start a script in the same Python, with the words before their options."""
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")


@dataclass(frozen=True)
class Program:
    """`python` is None if the command is not known to be Python, `script` if it runs no Python file."""

    python: str | None
    script: str | None
    environ: Mapping[str, str]


def of(command: Sequence[str], environ: Mapping[str, str]) -> Program:
    """The program of a command such as `python train.py`, `env CUDA_VISIBLE_DEVICES=1 python train.py`, `jupyter`."""
    words, own = list(command), dict(environ)
    if os.path.basename(words[0]) == "env":
        words = words[1:]
        while words and "=" in words[0] and not words[0].startswith("-"):
            name, _, value = words.pop(0).partition("=")
            own[name] = value
        if not words or words[0].startswith("-"):
            return Program(None, None, dict(environ))
    found = shutil.which(words[0], path=own.get("PATH"))
    if PYTHON.fullmatch(os.path.basename(words[0])):
        return Program(found, _script(words[1:]), own)
    line = shebang(found) if found is not None else []  # jupyter, torchrun, ./train.py
    if line and os.path.basename(line[0]) == "env":
        line = [word for word in line[1:] if word != "-S"]
    if line and PYTHON.fullmatch(os.path.basename(line[0])):
        return Program(shutil.which(line[0], path=own.get("PATH")), _launched(words) or found, own)
    return Program(None, None, own)


def _launched(words: Sequence[str]) -> str | None:
    """The script that a launcher starts; None if there is none."""
    name, *rest = words
    first = _LAUNCHERS.get(os.path.basename(name))
    if first is None or tuple(rest[: len(first)]) != first:
        return None
    return _after(rest[len(first) :])


def _after(arguments: Sequence[str]) -> str | None:
    """The script after a launcher's options. Which options take a value is unknown, so it is found by its suffix."""
    for word in arguments:
        if word in ("-m", "--module", "--no-python", "--no_python"):
            return None
        if word.endswith(".py") and not word.startswith("-"):
            return word
    return None


def _script(arguments: Sequence[str]) -> str | None:
    """The file among Python's arguments; None for code, most modules and standard input."""
    words = iter(arguments)
    for word in words:
        if word == "--":
            return next(words, None)
        if not word.startswith("-"):
            return word
        if word == "-m" or (not word.startswith("--") and word.endswith("m") and "c" not in word):
            return _after(list(words)) if next(words, "") in _MODULES else None
        if word == "-" or (not word.startswith("--") and any(letter in word[1:] for letter in "cm")):
            return None
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            next(words, None)
    return None
