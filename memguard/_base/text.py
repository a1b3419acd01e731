"""Make text safe to print: escape control sequences, and replace characters that the encoding cannot represent.

Names and messages come from drivers, frameworks, files and users. Printing them must neither move the cursor nor raise
UnicodeEncodeError. `visible` applies to every text. `fitting` and `shown` apply only to text that is written to a
stream. Errors, notes and records keep characters outside the stream's encoding, because they are logged, pickled and
printed elsewhere.
"""

from __future__ import annotations

import sys

_SIGNS = str.maketrans(
    {
        **dict.fromkeys("\N{MINUS SIGN}\N{EN DASH}\N{EM DASH}\N{HYPHEN}\N{NON-BREAKING HYPHEN}", "-"),
        **dict.fromkeys("\N{LEFT SINGLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}", "'"),
        **dict.fromkeys("\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}", '"'),
        **dict.fromkeys("\N{BOX DRAWINGS LIGHT HORIZONTAL}\N{BOX DRAWINGS HEAVY HORIZONTAL}", "-"),
        **dict.fromkeys("\N{BOX DRAWINGS LIGHT VERTICAL}\N{BOX DRAWINGS HEAVY VERTICAL}", "|"),
        "\N{GREATER-THAN OR EQUAL TO}": ">=",
        "\N{LESS-THAN OR EQUAL TO}": "<=",
        "\N{HORIZONTAL ELLIPSIS}": "...",
        "\N{MULTIPLICATION SIGN}": "x",
        "\N{BULLET}": "*",
    }
)
"""ASCII replacements of the non-ASCII characters in memguard's own texts."""
_SPACES = str.maketrans(dict.fromkeys("\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}\N{THIN SPACE}", " "))


def visible(text: str, keep: str = "\n\t") -> str:
    """Escape control and invisible characters, as in `\\u001b`, except the characters in `keep`."""
    if text.isprintable():
        return text
    text = text.translate(_SPACES)
    return "".join(char if char.isprintable() or char in keep else _escaped(char) for char in text)


def fitting(text: str, encoding: str | None = None) -> str:
    """Replace characters that `encoding`, by default standard output's, cannot represent: by ASCII such as `>=`, or
    else by an escape such as `\\u00e9`. Text that the encoding can represent is returned unchanged.
    """
    encoding = encoding or _of_stdout()
    if _fits(text, encoding):
        return text
    return "".join(char if _fits(char, encoding) else _escaped(char) for char in _with_signs(text, encoding))


def shown(text: str) -> str:
    """Prepare text for `print`: apply `visible`, then `fitting` for standard output."""
    return fitting(visible(text))


def html(text: str) -> str:
    """Escape HTML markup and invisible characters."""
    from html import escape

    return escape(visible(text))


def malformed(error: ValueError) -> str:
    """Why a line is not JSON, in at most 100 characters. Omits Python's line number, which is always 1."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    text, at = getattr(error, "doc", None), getattr(error, "pos", None)
    if text is None or at is None:  # an error without a position, for example for a number with too many digits
        return visible(str(error), keep="")[:100]
    if at >= len(text.rstrip()):
        return "it ends too early"
    return visible(f"{getattr(error, 'msg', '')} at character {at + 1}", keep="")[:100]


def _with_signs(text: str, encoding: str) -> str:
    return "".join(char if _fits(char, encoding) else char.translate(_SIGNS) for char in text)


def _fits(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    except (LookupError, ValueError):  # Python does not know the encoding
        return text.isascii()
    return True


def _of_stdout() -> str:
    try:
        encoding = sys.stdout.encoding
    except Exception:  # stdout is None, or an object that raises
        return "utf-8"
    return encoding if isinstance(encoding, str) else "utf-8"


def _escaped(char: str) -> str:
    """Escape a character as in JSON, so that JSON text stays valid."""
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"
