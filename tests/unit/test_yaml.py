"""YAML as plain values with positions: what it takes, what it refuses, and the place of each problem."""

from __future__ import annotations

import pytest

from memguard._base.yaml import MAX_BYTES, Unreadable, decode, read


def problems(text: str) -> list[tuple[int | None, int | None, str]]:
    return [(p.line, p.column, p.message) for p in read(text).problems]


def test_values_and_positions() -> None:
    document = read("a: 1\nb:\n  c: [x, 'y']\n  ? d\n  : {e: true}\n")
    assert document.data == {"a": 1, "b": {"c": ["x", "y"], "d": {"e": True}}}
    assert document.problems == []
    assert document.keys == {
        ("a",): (1, 1),
        ("b",): (2, 1),
        ("b", "c"): (3, 3),
        ("b", "d"): (4, 5),
        ("b", "d", "e"): (5, 6),
    }
    assert document.values[()] == (1, 1)
    assert document.values[("b", "c", 1)] == (3, 10)
    assert document.values[("b", "d", "e")] == (5, 9)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True), ("False", False), ("null", None), ("~", None), ("", None), ("12", 12), ("-3", -3), ("0", 0),
        ("yes", "yes"), ("on", "on"), ("No", "No"), ("1:30", "1:30"), ("1_000", "1_000"), ("017", "017"),
        ("0o17", "0o17"), ("0x1F", "0x1F"), ("1.5", "1.5"), (".inf", ".inf"), (".nan", ".nan"), ("1e9", "1e9"),
        ("2024-01-01", "2024-01-01"), ("'12'", "12"), ('"true"', "true"), ("''", ""), ("50%", "50%"),
        ("9" * 30, "9" * 30), ("1" * 5000, "1" * 5000),
    ],
)  # fmt: skip
def test_plain_scalars_mean_what_they_look_like(text: str, value: object) -> None:
    data = read(f"k: {text}").data
    assert data == {"k": value}
    assert type(data["k"]) is type(value)


def test_keys_are_text_as_written() -> None:
    assert read("0: a\non: b\n1.5: c\n'x y': d").data == {"0": "a", "on": "b", "1.5": "c", "x y": "d"}


def test_no_document_at_all_is_nothing() -> None:
    assert [read(text).data for text in ("", "# only a comment\n", "---\n", "\ufeff")] == [None] * 4


def test_a_byte_order_mark_moves_no_column() -> None:
    assert read("\ufeffa: 1").keys == {("a",): (1, 1)}


@pytest.mark.parametrize(
    ("text", "line", "column", "fix", "cause"),
    [
        ("a: 1\n\tb: 2", 2, 1, "replace the tab by spaces", "a tab, where YAML allows only spaces"),
        ("a: %50", 1, 4, "the number first, as in 50%", "cannot start with '%'"),
        ("a: @x", 1, 4, "in quotes", "cannot start with '@'"),
        ("a: b: c", 1, 5, "put text with ': ' in quotes", "a ':' where no key can stand"),
        ("a: 1\nfoo\nb: 2", 2, 1, "'key: value' with a space after the colon", "this line is not 'key: value'"),
        ("a: 1\nfoo:1\nb: 2", 2, 1, "'key: value' with a space after the colon", "this line is not 'key: value'"),
        ("a: 1\nfoo", 2, 1, "'key: value' with a space after the colon", "this line is not 'key: value'"),
        ("a:\n   b: 1\n  c: 2", 3, 3, "align this line", "does not fit the lines above it"),
        ("a: {b: 1\nc: 2", 2, 2, "close the '{' of line 1", "the end of the '{' of line 1 is missing"),
        ("a: [1, 2", 1, 9, "close the '[' of line 1", "the end of the '[' of line 1 is missing"),
        ("a: 1\nb: 'x\nc: 1", 2, 4, "add the closing quote", "this quote is never closed"),
        ('a: "\\q"', 1, 6, "write each backslash twice", "unknown escape"),
        ('a: "\\xZZ"', 1, 7, "write each backslash twice", "unknown escape"),
        ("a: - b", 1, 4, "remove what does not belong", "this is not valid YAML: "),
        ("a: 1\n]", 2, 1, "remove what does not belong", "this is not valid YAML: "),
        ("'a'b: 1", 1, 4, "remove what does not belong", "this is not valid YAML: "),
        (": 1\n: 2", 1, 1, "write 'key: value'", "a ':' where no key can stand"),
        ("*A100*: x", 1, 6, "in quotes", "text cannot start with '*'"),
        ("a: ,", 1, 4, "remove what does not belong", "this is not valid YAML: "),
        ("a: b\n...\nc: d", 3, 1, "align this line with the keys beside it", "this is not valid YAML: "),
        ("{: 1}", 1, 2, "write 'key: value'", "a ':' where no key can stand"),
        ("%YAML 2.0\n---\na: 1", 1, 1, "remove what does not belong", "this is not valid YAML: "),
    ],
)
def test_broken_yaml_has_its_place_its_cause_and_a_fix(text: str, line: int, column: int, fix: str, cause: str) -> None:
    (problem,) = read(text).problems
    assert (problem.line, problem.column) == (line, column)
    assert cause in problem.message and fix in problem.fix


@pytest.mark.parametrize(
    ("text", "line", "column", "cause"),
    [
        ("%YAML 1." + "9" * 5000 + "\n---\na: 1", 1, 9, "this is not valid YAML (ValueError"),
        ('a: "\\UFFFFFFFF"', 1, 7, "this is not valid YAML ("),
        ("a: 1\nb: \x00", 2, 4, "U+0000 is not allowed"),
        ("a: \x1b[31m", 1, 4, "U+001B is not allowed"),
        ("a: \ud800", 1, 4, "U+D800 is not allowed"),
        ('a: "\\ud800"', 1, 4, "half a character"),
        ("a: !!python/object/apply:os.system [x]", 1, 4, "the YAML tag '!!python/object/apply:os.system'"),
        ("a: !foo 1", 1, 4, "the YAML tag '!foo'"),
        ("a: !!binary aGk=", 1, 4, "the YAML tag '!!binary'"),
        ("a: !!timestamp 2024-01-01", 1, 4, "the YAML tag '!!timestamp'"),
        ("a: ! x", 1, 4, "the YAML tag '!'"),
        ("!!set {a: 1}", 1, 1, "the YAML tag '!!set'"),
        ("a: 1\n---\nb: 2", 2, 1, "a second YAML document"),
        ("a: 1\nb: 2\na: 3", 3, 1, "'a' is given twice: in line 1 and here"),
        ("{a: 1, a: 2}", 1, 8, "'a' is given twice in this line"),
        ("a: &x 1\nb: {<<: *x}", 2, 5, "merge keys"),
        ("? [a]\n: 1", 1, 3, "a key must be one word, found a list"),
        ("{a: 1}: 1", 1, 1, "a key must be one word, found a mapping"),
        ("a: 1\n? ''\n: 1", 2, 3, "a key is missing before ':'"),
        ("a: *x", 1, 4, "which is nowhere above"),
        ("a: &x [*x]", 1, 8, "contains itself"),
        ("[" * 40, 1, 17, "nested deeper than 16"),
        ("- " * 3000, 1, 33, "nested deeper than 16"),
    ],
)
def test_what_is_refused_and_where(text: str, line: int, column: int, cause: str) -> None:
    found = problems(text)
    assert found[0][:2] == (line, column)
    assert cause in found[0][2]
    assert len(found) == 1


def test_problems_of_form_are_found_together() -> None:
    assert [p[:2] for p in problems("a: !x 1\nb: {c: 1, c: 2}\n<<: 1\nb: 3")] == [(1, 4), (2, 11), (3, 1), (4, 1)]


def test_a_name_may_be_given_to_another_value() -> None:
    assert read("a: &x 1\nb: *x\nc: &x 2\nd: *x").data == {"a": 1, "b": 1, "c": 2, "d": 2}


def test_an_alias_stands_for_its_anchor_and_its_place() -> None:
    document = read("a: &x {b: 1}\nc: *x")
    assert document.data == {"a": {"b": 1}, "c": {"b": 1}}
    assert document.values[("c", "b")] == (1, 11)
    assert problems("a: &x {b: 1, b: 2}\nc: *x") == [(1, 14, "'b' is given twice in this line")]


def test_alias_bombs_stop_early() -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)]
    (problem,) = problems("\n".join(lines))
    assert problem[:2] == (5, 8)
    assert "more than 10,000 values" in problem[2]


def test_a_chain_of_aliases_is_as_deep_as_what_it_repeats() -> None:
    chain = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 40)]
    (problem,) = problems("\n".join(chain))
    assert "nested deeper than 16" in problem[2]


@pytest.mark.parametrize("unit", ["[a,", "{", "? ", "- ", "&a ", "a: b\n", "-\n", "!", "'a\n", "#", '"\\x41"'])
def test_a_large_text_ends_in_a_problem_or_a_value(unit: str) -> None:
    document = read(unit * (50_000 // len(unit)))
    assert document.problems or document.data is None


def test_more_than_the_cap_is_not_read() -> None:
    assert "larger than 1 MiB" in problems("#" * (MAX_BYTES + 1))[0][2]
    with pytest.raises(Unreadable, match="larger than 1 MiB"):
        decode(b"#" * (MAX_BYTES + 1))
    assert read("#" * MAX_BYTES).problems == []


@pytest.mark.parametrize(
    ("raw", "line", "column", "cause"),
    [
        (b"a: 1\nb: \xe4", 2, 4, "not UTF-8 text (found the byte 0xe4)"),
        ("a: 1".encode("utf-16"), 1, 1, "not UTF-8 text (UTF-16)"),
    ],
)
def test_bytes_that_are_not_utf_8(raw: bytes, line: int, column: int, cause: str) -> None:
    with pytest.raises(Unreadable) as raised:
        decode(raw)
    problem = raised.value.problem
    assert (problem.line, problem.column, problem.message) == (line, column, cause)
    assert decode(b"\xef\xbb\xbfa: \xc3\xa4") == "a: ä"
