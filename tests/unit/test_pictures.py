"""README's pictures are of the recording that lies in the tree."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.long  # no version of what is installed changes what the documents say

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"


def test_they_are_of_the_recording() -> None:
    made_of = json.loads((PICTURES / "made-of.json").read_text())
    recording = PICTURES / made_of["recording"]
    assert hashlib.sha256(recording.read_bytes()).hexdigest() == made_of["sha256"], "draw them anew: scripts/pictures"


def test_readme_shows_each_and_says_what_it_is() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("top.svg", "report.png"):
        said = readme.partition(f"](docs/pictures/{name})")[0].rpartition("![")[2]
        assert len(said.split()) >= 10, "for who cannot see it"
    assert "docs/pictures/recording.jsonl" in readme


def test_the_screen_shows_every_framework_and_the_error() -> None:
    texts = " ".join(part.text or "" for part in ElementTree.parse(PICTURES / "top.svg").getroot().iter())
    assert all(word in texts.replace("\xa0", " ") for word in ("torch", "jax", "cupy", "NVIDIA H200", "out of memory"))
    assert (PICTURES / "report.png").read_bytes().startswith(b"\x89PNG")
