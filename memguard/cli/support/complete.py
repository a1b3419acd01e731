"""What a shell offers for a word at the press of TAB: names and files. Reads nothing but names of files.

click runs these in a process of its own for each press, so what is heavy must not be imported here. Each has click's
signature for `shell_complete`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

_YAML = (".yaml", ".yml")
_PLAIN = re.compile(r"[\w./~+@%,-]+")
"""Names that mean themselves in every shell. bash puts what click gives into the line as it is, without quotes."""


def gpus(context: click.Context, parameter: click.Parameter, word: str) -> list[CompletionItem]:
    """Simulated GPUs; the slices of a card once its name is begun; files of devices."""
    from memguard._devices.catalog import CATALOGUE, SLICES

    known = {**CATALOGUE, **SLICES} if word else CATALOGUE
    found = _items(((name, model.name) for name, model in known.items()), word.lower())
    return found or _files(word, _YAML)


def findings(context: click.Context, parameter: click.Parameter, word: str) -> list[CompletionItem]:
    """The names of the doctor's findings."""
    from memguard._base.findings import names

    return _items(((name, None) for name in names()), word)


def frameworks(context: click.Context, parameter: click.Parameter, word: str) -> list[CompletionItem]:
    """The frameworks that a budget can name."""
    from memguard._frameworks.specs import SPECS

    return _items(((name, None) for name in SPECS), word)


def files(*suffixes: str) -> Complete:
    """Files with these suffixes, and the folders on the way to them."""
    return lambda context, parameter, word: _files(word, suffixes)


budgets = files(*_YAML)
timelines = recordings = files(".jsonl")


def any_file(context: click.Context, parameter: click.Parameter, word: str) -> list[CompletionItem]:
    """Whatever the shell itself would offer."""
    return [_left_to_the_shell(word, "file")]


def _items(names: Iterable[tuple[str, str | None]], word: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(name, help=about) for name, about in names if name.startswith(word)]


def _left_to_the_shell(word: str, kind: str) -> CompletionItem:
    from click.shell_completion import CompletionItem

    return CompletionItem(word, type=kind)


def _files(word: str, suffixes: tuple[str, ...]) -> list[CompletionItem]:
    """The shell itself completes where it does better: the only match is a folder, after which it puts no space; a name
    needs quotes; nothing matches, so that a file with an unusual name can still be named."""
    folders, found = [], []
    for name, folder in _entries(word):
        if folder:
            folders.append(name)
        elif name.lower().endswith(suffixes):
            found.append(name)
    if len(folders) == 1 and not found:
        return [_left_to_the_shell(word, "dir")]
    names = sorted(found) + sorted(folders)
    if not names or not all(_PLAIN.fullmatch(name) for name in names):
        return [_left_to_the_shell(word, "file")]
    return _items(((name, None) for name in names), word)


def _entries(word: str) -> Iterator[tuple[str, bool]]:
    """What the word may become, and whether that is a folder. Hidden files only if its own name begins with a dot."""
    head, name = os.path.split(word)
    head = word[: len(word) - len(name)]  # as it was written, with its slash
    try:
        with os.scandir(os.path.expanduser(head) or ".") as entries:
            for entry in entries:
                if entry.name.startswith(name or "") and (name.startswith(".") or not entry.name.startswith(".")):
                    folder = entry.is_dir()
                    yield head + entry.name + ("/" if folder else ""), folder
    except (OSError, ValueError):
        return
