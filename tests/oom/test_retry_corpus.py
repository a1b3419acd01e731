"""What `memguard.retry` runs again: exactly the real errors of the corpus, raised as exceptions of their types."""

from __future__ import annotations

import builtins
import contextlib
from typing import Any

import pytest
from test_classify import CORPUS, ENTRIES, TWINS

import memguard
from memguard._oom.hooks import facts_of


def kind_of(mro: list[str]) -> type[BaseException]:
    """The class with these bases. What a text says of an exception is its text here, whatever it is made from."""
    module, _, name = mro[0].rpartition(".")
    if module == "builtins" and isinstance(found := getattr(builtins, name, None), type):
        return found
    return type(name, (kind_of(mro[1:]),), {"__module__": module, "__qualname__": name})


def error_of(entry: dict[str, Any]) -> BaseException:
    kind = kind_of(entry["mro"])
    said = type(kind.__name__, (kind,), {"__str__": lambda self: entry["text"]})
    said.__module__, said.__qualname__ = kind.__module__, kind.__qualname__
    error = said.__new__(said)
    for name, value in entry.get("attributes", {}).items():
        with contextlib.suppress(AttributeError, TypeError):
            setattr(error, name, value)
    return error


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry["id"] for entry in ENTRIES])
def test_only_real_errors_are_run_again(entry: dict[str, Any]) -> None:
    errors, raised = [error_of(entry)], list[BaseException]()
    real = entry in CORPUS["real"] or entry["id"] in TWINS

    def step() -> str:
        raised[:] = errors
        if errors:
            raise errors.pop()
        return "fine"

    try:
        found: object = memguard.retry.call(step)
    except BaseException as error:
        found = error
    assert found == "fine" if real else found is raised[0]
    assert real or not getattr(found, "__notes__", [])


def test_they_read_as_the_corpus_has_them() -> None:
    for entry in ENTRIES:
        facts = facts_of(error_of(entry))
        assert facts.text == entry["text"] and facts.type == entry["type"]
        plain = next(at for at, name in enumerate(entry["mro"]) if name.startswith("builtins."))
        assert set(entry["mro"][: plain + 1]) <= set(facts.mro), entry["id"]
