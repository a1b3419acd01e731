"""The corpus of out-of-memory texts: its shape, and that it has enough of every kind."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FILES = ("real", "lookalikes")
MEMORY = {"gpu", "pinned", "host", "disk", "none"}
FRAMEWORKS = {"torch", "tensorflow", "jax", "cupy", "pycuda", "numba", "rmm"}
LIBRARIES = {"cublas", "cudnn", "cusolver", "cufft", "nccl", "cuda"}
REQUIRED = {"id", "type", "mro", "text", "source", "expect"}
OPTIONAL = {"attributes", "note"}
SOURCE = re.compile(r"https://\S+|measured on (an H200|a CPU): [^,]+, .+")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def corpus(name: str) -> list[dict[str, Any]]:
    entries = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))
    assert isinstance(entries, list)
    return entries


ENTRIES = [(name, entry) for name in FILES for entry in corpus(name)]


@pytest.mark.parametrize(("name", "entry"), ENTRIES, ids=[entry["id"] for _, entry in ENTRIES])
def test_an_entry_has_its_fields(name: str, entry: dict[str, Any]) -> None:
    assert entry.keys() >= REQUIRED and entry.keys() <= REQUIRED | OPTIONAL
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry["id"])
    assert entry["mro"][0] == entry["type"] and entry["mro"][-1] != "builtins.object"
    assert "builtins.BaseException" in entry["mro"]
    assert all(NAME.fullmatch(base) for base in entry["mro"])
    assert len(entry["text"]) <= 1500
    assert not re.search(r"/(home|Users|tmp)/", entry["text"])
    assert SOURCE.fullmatch(entry["source"])
    assert isinstance(entry.get("attributes", {}), dict) and isinstance(entry.get("note", ""), str)

    expect = entry["expect"]
    assert expect.keys() == {"memory", "requester", "requested", "certain"}
    assert expect["memory"] in MEMORY
    assert (expect["memory"] == "gpu") == (name == "real")
    assert expect["requester"] in FRAMEWORKS | LIBRARIES | {None}
    assert expect["requested"] is None or (type(expect["requested"]) is int and expect["requested"] > 0)
    assert type(expect["certain"]) is bool
    if expect["memory"] == "none":
        assert expect["requester"] is None and expect["requested"] is None


def test_ids_are_unique_and_in_order() -> None:
    ids = Counter(entry["id"] for _, entry in ENTRIES)
    assert [i for i, n in ids.items() if n > 1] == []
    for name in FILES:
        order = [entry["id"] for entry in corpus(name)]
        assert order == sorted(order)


def test_no_text_stands_twice() -> None:
    """One type may share a text with another (an older name of the same class), but not with itself."""
    for name in FILES:
        texts = Counter((entry["type"], entry["text"]) for entry in corpus(name) if entry["text"])
        assert [t for t, n in texts.items() if n > 1] == []


def test_a_text_in_both_files_is_uncertain_in_both() -> None:
    texts = [{entry["text"] for entry in corpus(name)} for name in FILES]
    both = texts[0] & texts[1]
    assert [entry["id"] for _, entry in ENTRIES if entry["text"] in both and entry["expect"]["certain"]] == []


def test_there_is_enough_of_every_kind() -> None:
    real, lookalikes = (corpus(name) for name in FILES)
    assert len(real) >= 75 and len(lookalikes) >= 75
    assert {entry["expect"]["requester"] for entry in real} >= FRAMEWORKS | LIBRARIES
    assert {entry["expect"]["memory"] for entry in lookalikes} == MEMORY - {"gpu"}
    for entries in (real, lookalikes):
        assert {entry["expect"]["certain"] for entry in entries} == {True, False}
        assert sum(entry["source"].startswith("measured") for entry in entries) >= 30
        assert sum(entry["source"].startswith("https://") for entry in entries) >= 30
    assert sum(entry["expect"]["requested"] is not None for entry in real) >= 40
