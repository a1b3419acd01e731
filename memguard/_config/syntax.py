"""PyYAML's syntax errors as plain sentences, with the place where the mistake is rather than where it was noticed."""

from __future__ import annotations

import re

import yaml

from memguard.errors import Problem

_SENTENCES: tuple[tuple[str, str, str, bool], ...] = (
    # what PyYAML says, what it means, what to do, whether the mistake stands where PyYAML began (its context)
    (
        r"found character '\\t'",
        "a tab, where YAML allows only spaces",
        "replace the tab by spaces",
        False,
    ),
    (
        r"found character '%'",
        "a value cannot start with '%'",
        "write the number first, as in 50%",
        False,
    ),
    (
        r"found character '(.)'",
        "a value cannot start with {0!r}",
        "put the text in quotes",
        False,
    ),
    (
        "mapping values are not allowed",
        "a ':' where no key can stand",
        "see that the line above is 'key: value', align this key with those beside it, or put text with ': ' in quotes",
        False,
    ),
    (
        "could not find expected ':'",
        "this line is not 'key: value'",
        "write 'key: value' with a space after the colon",
        True,
    ),
    (
        r"expected <block end>, but found ':'",
        "a key is missing before this ':'",
        "write 'key: value'",
        False,
    ),
    (
        r"expected <block end>, but found '([,\]}?-])'",
        "this {0!r} belongs to nothing before it",
        "remove it, or align the line with the keys beside it",
        False,
    ),
    (
        r"expected <block end>, but found '<scalar>'",
        "this text belongs to nothing before it",
        "align it with the keys beside it, or remove what follows a closing quote or bracket",
        False,
    ),
    (
        r"expected <block end>",
        "this line does not fit the indentation of the lines above it",
        "align it with the keys beside it",
        False,
    ),
    (
        r"expected ',' or '([\]}])'",
        "a ',' or the closing {0!r} is missing before this",
        "separate the entries with ',' and close what begins in line {line}",
        False,
    ),
    (
        "found unexpected end of stream",
        "this quote is never closed",
        "add the closing quote",
        True,
    ),
    (
        "found unknown escape|expected escape sequence",
        "an unknown escape after a backslash",
        "use single quotes, or write the backslash twice",
        False,
    ),
    (
        "(sequence|block sequence) entries are not allowed",
        "a '- ' where no list can stand",
        "remove the '- ': a budget has no lists",
        False,
    ),
    (
        "expected alphabetic or numeric character",
        "'*' and '&' have a meaning of their own in YAML",
        "put a name pattern that begins with * in quotes",
        False,
    ),
    (
        "expected '<document start>'|expected <document start>",
        "this stands outside the budget's keys",
        "align it with the keys above, or remove it",
        False,
    ),
    (
        "expected the node content, but found '<stream end>'",
        "the file ends inside '[' or '{{'",
        "add the closing ']' or '}}'",
        False,
    ),
    (
        "expected the node content",
        "a key or a value is missing before this",
        "write what is missing, or remove this character",
        False,
    ),
)


def explain(error: yaml.YAMLError) -> Problem:
    """One Problem for a syntax error, with line and column."""
    said = str(getattr(error, "problem", None) or error)
    at = getattr(error, "problem_mark", None)
    began = getattr(error, "context_mark", None)
    for pattern, meaning, fix, at_start in _SENTENCES:
        if match := re.match(pattern, said):
            mark = began if at_start and began is not None else at or began
            words = match.groups()
            line = began.line + 1 if began is not None else "?"
            return _problem(meaning.format(*words), fix.format(*words, line=line), mark)
    said = said if len(said) <= 120 else said[:117] + "..."
    return _problem(f"this is not valid YAML: {said}", "correct the line", at or began)


def _problem(message: str, fix: str, mark: yaml.Mark | None) -> Problem:
    if mark is None:
        return Problem(message, fix, 1, 1)
    return Problem(message, fix, mark.line + 1, mark.column + 1)
