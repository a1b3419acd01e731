"""What a command will run: which Python, which script, under which environment. Looks at names and first lines only."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memguard.cli.support.ignored_environment import PYTHON, shebang

_LAUNCHERS = {"torchrun": (), "accelerate": ("launch",)}
"""Programs that start a script in the same Python, with the words that come first."""
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")


@dataclass(frozen=True)
class Program:
    """`python` is None where the command is not known to be a Python; `script` where it runs no file of Python."""

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
    """The script that a launcher starts."""
    name, *rest = words
    first = _LAUNCHERS.get(os.path.basename(name))
    if first is None or tuple(rest[: len(first)]) != first:
        return None
    return _after(rest[len(first) :])


def _after(arguments: Sequence[str]) -> str | None:
    """The script behind a launcher's own options: which of them take a value is not known, but its name is."""
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
