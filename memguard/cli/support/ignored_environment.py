"""Commands whose Python would not see the budget. `memguard run` refuses these instead of running without a cap."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence

from memguard.cli.support.exit_codes import InputError

PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*t?)?")
_OURS = {"PYTHONPATH", "MEMGUARD_RUN", "MEMGUARD_SIMULATE"}
_FLAGS = {
    "I": "isolated: it ignores PYTHONPATH",
    "E": "without environment variables such as PYTHONPATH",
    "S": "without `site`",
}
_IN_CODE = "call memguard.init('budget.yaml') in the program and start it without memguard run"

Refusal = tuple[str, str]  # why, and what to do


def check(command: Sequence[str], also: Collection[str] = ()) -> None:
    """Raise InputError if the command would start a Python that cannot activate the budget.

    `also` names variables that a command may not replace with `env` either.
    """
    if (found := refusal(command, also)) is not None:
        why, fix = found
        raise InputError(f"the budget would not be applied: {why}", fix=fix)


def refusal(command: Sequence[str], also: Collection[str] = ()) -> Refusal | None:
    """Why the command would start a Python that is not ours, and what to do; None if nothing speaks for that."""
    ours = {*_OURS, *also}
    return _refusal(command, ours) or _refusal(shebang(command[0]), ours)


def _refusal(command: Sequence[str], ours: Collection[str]) -> Refusal | None:
    if command and os.path.basename(command[0]) in {"sudo", "doas"}:
        name = os.path.basename(command[0])
        return f"{name} gives its command another environment", f"put {name} first: {name} memguard run ..."
    for position, word in enumerate(command):
        name = os.path.basename(word)
        if PYTHON.fullmatch(name):
            return _flags(name, command[position + 1 :])
        if name == "env" and (refusal := _env(command[position + 1 :], ours)):
            return refusal
    return None


def _flags(python: str, arguments: Sequence[str]) -> Refusal | None:
    """Checks Python's options, single or combined as in -IB, up to the program."""
    words = iter(arguments)
    for word in words:
        if word == "--check-hash-based-pycs":
            next(words, None)
        if word == "--" or not re.match("-.", word):
            return None
        if word.startswith("--"):
            continue
        for letter in word[1:]:
            if letter in _FLAGS:
                return f"{python} -{letter} runs {_FLAGS[letter]}", f"leave -{letter} out, or {_IN_CODE}"
            if letter in "cm":
                return None
            if letter in "WX":
                if word.endswith(letter):
                    next(words, None)
                break
    return None


def _env(arguments: Sequence[str], ours: Collection[str]) -> Refusal | None:
    """Checks what `env` removes or replaces before it starts its command."""
    words = _split(arguments)
    for word in words:
        if word in {"-", "--ignore-environment"} or re.fullmatch(r"-[0v]*i.*", word):
            return f"env {word} starts its command with an empty environment", f"leave it out, or {_IN_CODE}"
        if word in {"-u", "--unset"}:
            name = next(words, "")
        elif word.startswith(("--unset=", "-u")):
            name = word.removeprefix("--unset=").removeprefix("-u")
        elif not word.startswith("-") and "=" in word:
            name = word.partition("=")[0]
        elif word.startswith("-"):
            continue
        else:
            return None
        if name in ours:
            return (
                f"env replaces {name}, which memguard {'sets' if name in _OURS else 'has read'}",
                f"leave it out, or set {name} before memguard run",
            )
    return None


def _split(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments of `env`, with those of -S split into words."""
    for word in arguments:
        yield from word.removeprefix("-S").split() if "-S" in arguments or word.startswith("-S") else [word]


def shebang(program: str) -> list[str]:
    """The interpreter line of a script such as `jupyter` or `torchrun`; empty for anything else."""
    found = shutil.which(program)
    if found is None or not os.path.isfile(found):  # opening a FIFO would wait
        return []
    try:
        with open(found, "rb") as file:
            line = file.readline(512)
    except OSError:
        return []
    return line[2:].decode(errors="replace").split() if line.startswith(b"#!") else []
