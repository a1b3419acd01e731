"""The ledger as HTML: the figures of the text, in rows, escaped."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

from memguard._base.types import Device
from memguard._base.units import GIB, MIB
from memguard._ledger.types import DeviceLedger, Ledger, Row, html_ledger

H200 = Device("GPU-1", "NVIDIA H200", 0, 143_771 * MIB, 615 * MIB, "hopper", 0)
ROWS = (
    Row("framework", "tensorflow", 10 * MIB, 20 * GIB, 5 * MIB, None, None, "enforced", 10 * MIB, None, "held unknown"),
    Row("framework", "torch", 2 * GIB, 30 * GIB, GIB, GIB, 512 * MIB, "enforced"),
    Row("framework", "cupy", 0, GIB, enforcement="pending"),
    Row("overhead", "overhead", 600 * MIB),
    Row("unaccounted", "unaccounted", -3 * MIB),
    Row("other processes", "other processes", None),
    Row("free", "free", 100 * GIB),
)


class Reader(HTMLParser):
    """Cells by row, the styles of their columns, and whether every tag is closed in its place."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.styles: list[list[str]] = []
        self.rest = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "br":
            return
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
            self.styles.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.styles[-1].append(dict(attrs)["style"] or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        else:
            self.rest += data


def ledger(**more: object) -> Ledger:
    return replace(Ledger(0.0, (DeviceLedger(H200, ROWS, 3 * GIB, 40 * GIB),)), **more)


def test_every_row_with_its_figures() -> None:
    found = Reader(html_ledger(ledger()))
    assert found.rows == [
        ["MiB", "held", "cap", "in use", "cached", "trimmable", "cap is"],
        ["tensorflow*", "≥ 10.0", "20,480.0", "5.0", "unknown", "unknown", "enforced"],
        ["torch", "2,048.0", "30,720.0", "1,024.0", "1,024.0", "512.0", "enforced"],
        ["cupy", "0.0", "1,024.0", "", "", "", "pending"],
        ["overhead", "600.0", "", "", "", "", ""],
        ["unaccounted", "-3.0", "", "", "", "", ""],
        ["other processes", "unknown", "", "", "", "", ""],
        ["free", "102,400.0", "", "", "", "", ""],
        ["total", "105,055.0", "", "", "", "", ""],
    ]
    assert "NVIDIA H200 GPU-1" in found.rest and "3.00 GiB of its limit of 40.00 GiB" in found.rest
    assert "* tensorflow: held unknown" in found.rest and "simulated" not in found.rest


def test_its_figures_are_those_of_the_text() -> None:
    text = str(ledger())
    cells = {cell.strip("*≥ ") for row in Reader(html_ledger(ledger())).rows for cell in row}
    assert all(cell in text for cell in cells)


def test_numbers_are_on_the_right() -> None:
    for styles in Reader(html_ledger(ledger())).styles:
        assert styles == ["text-align: left", *["text-align: right"] * 5, "text-align: left"]


def test_nothing_in_it_is_taken_for_html() -> None:
    evil = "<script>alert('&')</script>"
    row = Row("framework", evil, 1, enforcement=evil, note=evil)
    part = DeviceLedger(replace(H200, name=evil, uuid=evil), (row,), None)
    written = html_ledger(ledger(devices=(part,), notes=(evil,)))
    assert "<script" not in written
    found = Reader(written)
    assert found.rows[1][0] == f"{evil}*" and found.rows[1][-1] == evil
    assert found.rest.count(evil) == 5  # name, UUID, the row's name and note, the ledger's note


def test_simulated_gpus_are_marked_and_every_gpu_has_its_table() -> None:
    device = ledger().devices[0]
    written = html_ledger(ledger(devices=(device, device), simulated=True, notes=("one", "two")))
    assert written.count("<table>") == written.count("(simulated)") == 2
    assert "note: one" in written and "note: two" in written


def test_unknown_is_not_nothing() -> None:
    device = DeviceLedger(H200, (), None)
    assert "this process: unknown" in html_ledger(ledger(devices=(device,)))
