"""From memguard's own markup to what Sphinx reads. Pure text to text, so that tests need no Sphinx.

Docstrings and help texts are plain text with Markdown's backticks. Sphinx takes them as reStructuredText, in which a
single backtick is a reference, a `*` or `|` may begin something, and an indented block is a quotation.
"""

from __future__ import annotations

import re

from memguard import errors

_CODE = re.compile(r"^```.*?^```[ ]*$", re.DOTALL | re.MULTILINE)
_LITERAL = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_EMPHASIS = re.compile(r"(?<![*\w])(\*\*[^\s*](?:[^*]*[^\s*])?\*\*|\*[^\s*](?:[^*]*[^\s*])?\*)(?![*\w])")
_PAGE = re.compile(r"docs/([\w/-]+)\.md")
_ERRORS = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
_ERROR = re.compile(rf"(?<![.\w])({'|'.join(_ERRORS)})\b")
_ENTRY = re.compile(r"(\w+) {3,}(\S.*)")


def to_rst(lines: list[str]) -> list[str]:
    """A docstring's lines as reStructuredText: literals, indented blocks as code, `name    meaning` as fields."""
    text = "\n".join(lines).replace("\t", "    ").strip("\n")
    result: list[str] = []
    for paragraph in re.split(r"\n[ ]*\n", text):
        if not paragraph.strip():
            continue
        body = paragraph.split("\n")
        if result[-2:-1] == ["::"]:  # the docstring says so itself
            result += [*body, ""]
        elif all(line.startswith("    ") for line in body):
            # One block of code may have empty lines in it.
            opened = bool(result) and result[-2].startswith("    ") and _is_code(result)
            result += [*([] if opened else ["::", ""]), *body, ""]
        elif _ENTRY.fullmatch(body[0]):
            result += [*_fields(body), ""]
        elif paragraph.strip() == "::":
            result += ["::", ""]
        else:
            result += [*prose(paragraph).split("\n"), ""]
    return result


def _is_code(result: list[str]) -> bool:
    for line in reversed(result):
        if line and not line.startswith("    "):
            return line == "::"
    return False


def _fields(body: list[str]) -> list[str]:
    found = []
    for line in body:
        entry = _ENTRY.fullmatch(line)
        found.append(f":{entry[1]}: {prose(entry[2])}" if entry else f"    {prose(line.strip())}")
    return found


def prose(text: str) -> str:
    """A paragraph: `code` becomes a literal, **bold** and *italic* stay, other marks are escaped.

    The names of memguard's errors and of pages (`docs/trace.md`) become links.
    """
    result = ""
    for place, part in enumerate(_LITERAL.split(text)):
        if place % 2:
            page = _PAGE.fullmatch(part)
            result += f":doc:`/{page[1]}`" if page else f"``{' '.join(part.split())}``"
            continue
        # A literal ends only before a space or punctuation.
        result += "\\ " if place and re.match(r"\w", part) else ""
        for number, bit in enumerate(_EMPHASIS.split(part)):
            if number % 2:
                result += bit
            else:
                escaped = re.sub(r"(?<=\w)_(?!\w)", r"\\_", re.sub(r"([*|\\])", r"\\\1", bit))
                linked = _ERROR.sub(r":py:exc:`~memguard.errors.\1`", escaped)
                result += _PAGE.sub(r":doc:`/\1`", linked)
    return result


def page(text: str, folder: str) -> str:
    """A page's Markdown for the site: without comments, and in place of each link out of `docs/` its text and the path.

    `folder`: where the page lies, relative to the repository: `docs` or `docs/doctor`.
    """

    def shown(part: str) -> str:
        part = re.sub(r"<!--.*?-->", lambda found: "\n" * found[0].count("\n"), part, flags=re.DOTALL)
        part = re.sub(r"\[[\w/-]+\.md\]\((?!\.\./)", "[](", part)  # the title says more than the file's name
        return re.sub(r"\[([^\]]*)\]\(((?:\.\./)+)([^)\s]*)\)", outside, part)

    def outside(link: re.Match[str]) -> str:
        if link[2].count("../") < len(folder.split("/")):
            return link[0]
        target = link[3].partition("#")[0]
        return link[1] if target in link[1] else f"{link[1]} (`{target}`)"

    result, end = [], 0
    for block in _CODE.finditer(text):
        result += [shown(text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*result, shown(text[end:])])
