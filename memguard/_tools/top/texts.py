"""Texts for the screen: sizes in GiB, times, and words cut or filled to a width in cells. Pure."""

from __future__ import annotations

import time
import unicodedata

from memguard._base.text import visible
from memguard._base.units import GIB, format_duration

UNKNOWN = "unknown"


def gib(size: int | None) -> str:
    """`12.00`; `<0.01` for a little, and `unknown`."""
    if size is None:
        return UNKNOWN
    if size and abs(size) < GIB // 200:
        return "<0.01" if size > 0 else ">-0.01"
    return f"{size / GIB:.2f}"


def clock(when: float | None) -> str:
    """The local time of day."""
    return "--:--:--" if when is None else time.strftime("%H:%M:%S", time.localtime(when))


def ago(seconds: float) -> str:
    return format_duration(max(seconds, 0.0))


def clean(text: str) -> str:
    """One line that a terminal does not obey: what cannot be seen is written out."""
    return visible(text, keep="").strip()


def in_ascii(text: str) -> str:
    """As wide as the text: `~` where something was cut, `?` for what ASCII lacks."""
    if text.isascii():
        return text
    return "".join(char if char.isascii() else "~" if char == "…" else "?" * cell_width(char) for char in text)


def cell_width(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF") for char in text)


def cut(text: str, width: int, more: str = "…") -> str:
    """At most `width` cells."""
    if cell_width(text) <= width:
        return text
    found, room = "", width - len(more)
    for char in text:
        room -= cell_width(char)
        if room < 0:
            break
        found += char
    return found + more if width > 0 else ""


def left(text: str, width: int, more: str = "…") -> str:
    """Exactly `width` cells, the text at the left."""
    text = cut(text, width, more)
    return text + " " * (width - cell_width(text))


def right(text: str, width: int, more: str = "…") -> str:
    text = cut(text, width, more)
    return " " * (width - cell_width(text)) + text


def wrapped(text: str, width: int, most: int) -> list[str]:
    """At most `most` lines of words; the last one is cut."""
    lines: list[str] = []
    for word in text.split():
        if lines and cell_width(lines[-1]) + 1 + cell_width(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    if len(lines) > most:
        lines = [*lines[: most - 1], " ".join(lines[most - 1 :])]
    return [cut(line, width) for line in lines]
