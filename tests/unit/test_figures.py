"""Every figure with a unit in the documents is generated, has a source that says the same, or names one in words."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import memguard
from memguard import exchange
from memguard._devices import simulated

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import _figures  # noqa: E402

pytestmark = pytest.mark.long  # no version of what is installed changes what the documents say

DOCUMENTS = _figures.documents()
NUMBER = r"\d[\d,]*(?:\.\d+)?"
WORD = r"(?:two|three|four|five|six|seven|eight|nine|ten|twelve|fifteen|twenty|thirty|sixty|hundred)"
UNIT = r"(?:ns|µs|us|ms|s|seconds?|minutes?|min|hours?|h|days?|[KMGT]iB|[KMGT]B|[KMG]i?B/s|B|bytes?|%|x|×|times)"
MARK = r"(?:<!-- [^>]+ -->)?"
FIGURE = re.compile(
    rf"(?<![\w.,])(?:{NUMBER}{MARK}\s?(?:to|or|and|–|-)\s?)?(?:{NUMBER}{MARK}[\s-]?|{WORD}\s){UNIT}(?![\w/-]){MARK}"
)
"""A number with a unit, or two of which the second has it."""
SAID = re.compile(r"\bH[12]00\b.*\bdriver \d{3}\b|\]\(https?://|`(?P<file>(?:tests|benchmarks)/[\w/]+\.py)`", re.DOTALL)
"""A source in words: a machine with its driver, a link to who says it, or the test that holds it."""

ALLOWED = {
    "docs/activation.md": {"a setting": ["at most a minute, or five seconds within an import"]},
    "docs/budget.md": {"a rule": ["Shares add up to at most 100%"]},
    "docs/configs.md": {
        "what a card is sold as": [
            "have 16 GB", "a GPU of 48 GB", "On one of 80 GB", "on one of 141 GB", "a GPU of 16 GB", "a GPU of 8 GB",
            "A GPU of 24 GB", "One of 16 GB",
        ],
        "what the lines of the file come to; test_configs.py compares each `about` with the plan": [
            "The other 10 % are for a display", "the other 10 % are left over", "its defaults hold: 90 % of each GPU",
            "The shares add up to 100 %", "what 14 GiB are divided among", "13.44 GiB. With PyCUDA's 0.5 GiB",
            "97 % would be an error", "about 39 GiB are left", "nearly 2 GiB: each", "about 15 GiB, for training",
            "about 7.6 GiB to decode", "about 3.8 GiB, the limit", "The last 10 %, less these 2 GiB", "default of 90 %",
            "Not 100 %: a rank", "come out of the 5 %", "is left out: 90 % of each GPU", "Not more than 90 %",
            "the other 10 % belong", "has about 22 GiB to give", "the 7 GiB after a reserve of about 1.2 GiB",
            "about 4 GiB: inference", "about 1.7 GiB to prepare", "if less than 7 GiB are free", "takes the whole 20 %",
            "10 % are left for",
        ],
        "JAX's default; doctor/preallocation.md has the source": ["JAX would take 75 % of the GPU"],
    },
    "docs/doctor/README.md": {"a default": ["(60 seconds; twice that"]},
    "docs/doctor/probe-hung.md": {"a default": [", 60 s by default"]},
    "docs/doctor/unified-memory.md": {"a setting": ["is 90 % of the machine's memory"]},
    "docs/ledger.md": {"a setting": ["is 90 % of it"]},
    "docs/kubernetes.md": {
        "test_kubernetes.py works them out": [
            "551 MiB on an H100", "is 34,265 MiB there", "40,779 MiB on an H100 with two",
        ],
    },
    "docs/metrics.md": {"test_metrics.py counts them": ["GPUs × (9 × frameworks + 11) + 15 of them"]},
    "docs/mps.md": {"of the example above it": ["would take it above 34 GiB"]},
    "docs/notebooks.md": {"of the example above it": ["cannot get 4 GiB more"]},
    "docs/simulation.md": {
        "the models, written after the frameworks' sources": [
            "| rounding | 512 B | 256 B | 256 B |", "regions from 2 MiB on", "if half or 128 MiB would be wasted",
            "up to 1 MiB: 2 MiB segments; below 10 MiB: 20 MiB; else rounded up to 2 MiB",
            "512 B; under a cap memguard asks for whole 2 MiB, from 128 KiB to 1 MiB for an even part",
        ],
        "a bar": ["should stay below 2 %"],
    },
    "docs/suspend.md": {
        "a setting": ["there are 100 ms in which"],
        "XLA's own pace; the section about JAX's thread says where it was read": ["waits up to 5 s for XLA's thread"],
    },
    "docs/tutorial.md": {"what it takes to read": ["takes about ten minutes"]},
    "docs/timeline.md": {"a number too large": ["2⁶⁴-1 bytes"]},
}  # fmt: skip
"""Figures that were not measured: settings, rules, examples. By document and reason, the words that they stand in."""


def prose(text: str) -> str:
    """What a person wrote: without what is generated, without blocks of code, and with other code made unreadable."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", "", found[0])

    def code(found: re.Match[str]) -> str:
        return found[0] if SAID.fullmatch(found[0]) else re.sub(r"[^\n]", "`", found[0])

    text = re.sub(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", blank, text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", blank, text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`", code, text)
    return re.sub(r"\]\((?!https?://)[^)]*\)", "]()", text)


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Paragraphs, entries of lists and rows of tables, each with the sentence that introduces it."""
    said = ""
    for paragraph in re.split(r"\n\s*\n", text):
        parts = re.split(r"\n(?=\s*(?:[-*|]|\d+\.) ?)", paragraph)
        yield from ((part, said if part.lstrip().startswith("|") else "") for part in parts)
        said = paragraph if paragraph.rstrip().endswith(":") else ""


def unsourced(text: str, allowed: list[str]) -> list[str]:
    """The figures without a source, each with the words around it."""
    found = []
    for block, introduced in blocks(prose(text)):
        if SAID.search(introduced) or SAID.search(block):
            continue
        line = " ".join(block.split())
        kept = [at.span() for words in allowed for at in re.finditer(re.escape(words), line)]
        for figure in FIGURE.finditer(line):
            numbers = re.findall(NUMBER, re.sub(r"<!--.*?-->", "", figure[0]))
            sources = re.findall(r"<!-- [^>]+ -->", figure[0])
            inside = any(first <= figure.start() and figure.end() <= last for first, last in kept)
            if len(sources) < max(len(numbers), 1) and not inside:
                found.append(line[max(figure.start() - 60, 0) : figure.end() + 30])
    return found


def allowed(document: str) -> list[str]:
    return [words for group in ALLOWED.get(document, {}).values() for words in group]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_figure_has_a_source(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    assert unsourced(text, allowed(document)) == [], "name its source (benchmarks/_figures.py), or take it out"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_figure_is_what_its_source_says(document: str) -> None:
    import table

    text = (ROOT / document).read_text(encoding="utf-8")
    assert table.generated(document, text) == text, "run python benchmarks/table.py"
    named = re.findall(r"<!-- = ([^>]+?) -->", text)
    assert len(named) == len(_figures.MARKED.findall(text)), "a name without a figure before it"


def test_no_source_and_no_exception_is_left_over() -> None:
    texts = {document: (ROOT / document).read_text(encoding="utf-8") for document in DOCUMENTS}
    named = {name for text in texts.values() for name in re.findall(r"<!-- = ([^>]+?) -->", text)}
    assert named == set(_figures.SOURCES)
    for document in ALLOWED:
        lines = [" ".join(block.split()) for block, _ in blocks(prose(texts[document]))]
        for words in allowed(document):
            assert any(words in line for line in lines), (document, words)
            assert unsourced(words, []), (words, "has no figure")
            without = [other for other in allowed(document) if other != words]
            assert unsourced(texts[document], without), (words, "is not needed")


def test_the_tests_that_are_named_as_a_source_are_there() -> None:
    named = {
        found["file"]
        for document in DOCUMENTS
        for found in SAID.finditer((ROOT / document).read_text(encoding="utf-8"))
        if found["file"]
    }
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


SENTENCES = [
    "It takes 3.3 seconds.", "It took 1.5 ms, then 62 µs more.", "| a row | 0.2 µs |", "- 11,274 MiB under it",
    "It is 1.7x as fast.", "It lasts ten seconds.", "Between 10 and 20 ms.", "5–7 GiB", "At 57 GB/s.", "50 % more",
    "It was 12 times as long.", "| 4,262 MiB | 4,096 MiB<!-- = page --> |", "10 to 20 MiB<!-- = page -->",
    "A file of 25\ns.", "**1.5 ms**", "(0.4 s)", "*2 KiB*", "30 days",
]  # fmt: skip


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_new_figure_without_a_source_is_found_anywhere(document: str) -> None:
    paragraphs = re.split(r"\n\s*\n", (ROOT / document).read_text(encoding="utf-8"))
    for number, sentence in enumerate(SENTENCES):
        place = number * len(paragraphs) // len(SENTENCES)
        planted = "\n\n".join([*paragraphs[:place], sentence, *paragraphs[place:]])
        before = planted[: planted.index(sentence)]
        inside = before.count("```") % 2 or before.count(": begin -->") > before.count(": end -->")
        assert inside or unsourced(planted, allowed(document)), sentence
    for sentence in SENTENCES:
        assert unsourced("\n\n".join([*paragraphs, sentence]), allowed(document)), sentence


def test_a_wrong_figure_is_found_at_every_place() -> None:
    """Each named figure of each document, with each of its digits changed."""
    changed = 0
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        for found in _figures.MARKED.finditer(text):
            for place, digit in enumerate(found["number"]):
                if digit.isdigit():
                    number = f"{found['number'][:place]}{(int(digit) + 1) % 10}{found['number'][place + 1 :]}"
                    wrong = number + found[0][len(number) :]
                    assert _figures.filled(wrong) == found[0], (document, wrong)
                    changed += 1
    assert changed > 150


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("0 MiB<!-- = second context -->", "518 MiB<!-- = second context -->"),
        ("0.0 GiB<!-- = second context -->", "0.5 GiB<!-- = second context -->"),
        ("0 KiB<!-- = second context -->", "530,432 KiB<!-- = second context -->"),
        ("0<!-- = samples of a rise -->", "6<!-- = samples of a rise -->"),
        ("0.00 s<!-- = start, with -->", "0.00 s<!-- = start, with -->"),
        ("0%<!-- = hysteresis -->", "5%<!-- = hysteresis -->"),
        ("a comment <!-- results: begin --> stays, and 5 MiB too", None),
    ],
)
def test_a_figure_keeps_its_unit_and_its_decimals(text: str, filled: str | None) -> None:
    assert _figures.filled(text) == (text if filled is None else filled)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("h200-watch.json: scenarios.nothing", "leads to 0 values"),
        ("h200-watch.json: scenarios.*.seconds", "leads to"),
        ("h200-watch.json: about.gpu", "which is no number"),
        ("memguard._specs: OVERHEADS.nothing.modules", "leads to 0 values"),
        ("memguard._monitor.pressure: EVIDENCE.7", "leads to 0 values"),
    ],
)
def test_a_path_that_leads_nowhere_is_an_error(monkeypatch: pytest.MonkeyPatch, source: str, said: str) -> None:
    monkeypatch.setitem(_figures.SOURCES, "page", source)
    with pytest.raises(LookupError, match=said):
        _figures.filled("2 MiB<!-- = page -->")
    with pytest.raises(LookupError, match="no source of 'pagee'"):
        _figures.filled("2 MiB<!-- = pagee -->")


def test_the_host_is_the_sum_of_both_ways() -> None:
    """Read from the JSON here, and not by what wrote the sentence."""
    exchange = json.loads((ROOT / "benchmarks/results/h200-exchange.json").read_text(encoding="utf-8"))
    speed = exchange["scenarios"]["speed"]
    to, back = speed["host"]["to_host_ms"], speed["host"]["from_host_ms"]
    ways = [to[pair.split(" > ")[0]] + back[pair.split(" > ")[1]] for pair in speed["speed"]]
    page = (ROOT / "docs" / "exchange.md").read_text(encoding="utf-8")
    said = re.sub(r"<!--.*?-->", "", page.split("Nothing is copied: ")[1].split(". Every")[0])
    most = max(one["memguard"]["median_us"] for one in speed["speed"].values())
    assert " ".join(said.split()) == (
        f"on an H200 1 GiB takes at most {most:.0f} µs, and through the host {min(ways):.0f} to {max(ways):,.0f} ms"
    )


def messages() -> Iterator[str]:
    """The texts in memguard that are no docstrings."""
    for path in sorted(Path(memguard.__file__).parent.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield node.value


def test_measured_figures_in_messages_are_those_of_their_sources() -> None:
    h200 = simulated.CATALOGUE["h200"]
    known = {
        _figures.figure("second context", "MiB"),
        _figures.figure("TensorFlow alone", "MiB") // 1,
        (h200.total - h200.reserved) / (1 << 20),
    }
    said = [text for text in messages() if re.search(r"\d MiB", text) and ("measured" in text or "about" in text)]
    found = [float(one.replace(",", "")) for text in said for one in re.findall(r"(?<!\w)\d[\d,]{2,}", text)]
    assert len(said) >= 3 and set(found) == known


def test_figures_in_the_docstrings_of_public_things_are_those_of_the_code() -> None:
    public = [getattr(memguard, name) for name in memguard.__all__] + [getattr(exchange, n) for n in exchange.__all__]
    members = [member for one in public if isinstance(one, type) for member in vars(one).values()]
    texts = [prose(inspect.getdoc(one) or "") for one in (memguard, exchange, *public, *members)]
    found = {figure[0] for text in texts for figure in FIGURE.finditer(text)}
    known = {f"{_figures.figure(name, unit):,.{decimals}f} {unit}" for name, unit, decimals in (
        ("probe's room", "GiB", 1), ("page", "MiB", 0),
    )}  # fmt: skip
    assert found == known, "name its source"
