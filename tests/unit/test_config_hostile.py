"""Budgets that were made to do harm or only look like others: refused, in bounded time and memory.

Digits of other alphabets, letters that look alike, spaces that nobody sees, and what is too long or too deep.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import time
import tracemalloc
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memguard._budget import from_mapping, of, parse, policy
from memguard._devices.simulated import SimulatedHost
from memguard.errors import ConfigError, PlanError

UUID = "GPU-887439f1-ef81-1c16-9a75-0558dcbf6b53"
DEVICES = SimulatedHost(["h200", "t4"]).devices()
GOOD = {"version": 1, "frameworks": {"torch": {"share": "50%"}}}
DIGITS = [c for c in map(chr, range(128, sys.maxunicode + 1)) if c.isdecimal()]
UNSEEN = [c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) in ("Cc", "Cf", "Zs", "Zl", "Zp")]
"""Control characters, joiners, bidi marks, byte order marks, and all spaces."""


def refused(data: Any) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        of(data)  # as `memguard.init` takes it
    assert str(raised.value).replace("\n", "").isprintable()
    assert all(problem.fix for problem in raised.value.problems)
    return raised.value


def devices(key: str) -> dict[str, Any]:
    return {**GOOD, "devices": {key: {"limit": "50%"}}}


@pytest.mark.parametrize("level", ["", "frameworks", "device", "monitor", "torch"])
def test_a_number_that_python_does_not_write_is_refused_wherever_it_stands(level: str) -> None:
    """`str` of an integer of more than 4,300 digits raises; the keys are those of all levels, and unknown ones."""
    keys = (
        "share",
        "limit",
        "min",
        "max",
        "growth",
        "reserve",
        "interval",
        "warn",
        "timeline",
        "nccl",
        "shares",
        "10x",
        "x",
    )
    for key in keys:
        data = copy.deepcopy({**GOOD, "device": {"limit": "50%"}, "monitor": {"interval": "1s"}})
        at: Any = data["frameworks"]["torch"] if level == "torch" else data[level] if level else data
        at[key] = 10**5000
        refused(data)


def test_digits_of_other_alphabets_are_no_digits() -> None:
    """Each of the several hundred, as a GPU's number, in a UUID, in a size, a percentage and a duration."""
    assert len(DIGITS) > 600
    for digit in DIGITS:
        meant = unicodedata.decimal(digit)
        (problem,) = refused(devices(digit)).problems
        assert f"name the GPU '{meant}'" in problem.fix and f"U+{ord(digit):04X}" in problem.message
        assert f"name the GPU '{meant}'" in refused(devices(f"cuda:{digit}")).problems[0].fix
        refused(devices(UUID.replace("8", digit, 1)))
        refused(devices(f"NVIDIA A{digit}*"))
        for wrong, right in (({"limit": f"{digit}GiB"}, f"{meant}GiB"), ({"share": f"{digit}%"}, f"{meant}%")):
            (problem,) = refused({**GOOD, "frameworks": {"torch": wrong}}).problems
            assert not meant or problem.fix == f"write '{right}'"
        refused({**GOOD, "monitor": {"interval": f"{digit}s"}})
        refused({**GOOD, "version": digit})


def test_what_nobody_sees_is_refused_or_means_nothing() -> None:
    """Each control character, joiner, bidi mark and space, before, within and after whatever has a meaning."""
    texts = [
        (devices, "0"), (devices, UUID), (devices, "NVIDIA A100*"), (devices, "cuda:0"),
        (lambda text: {**GOOD, "frameworks": {"torch": {"share": text}}}, "50%"),
        (lambda text: {**GOOD, "frameworks": {"torch": {"limit": text}}}, "4GiB"),
        (lambda text: {**GOOD, "frameworks": {text: {"share": "50%"}}}, "torch"),
        (lambda text: {**GOOD, "monitor": {"interval": text}}, "500ms"),
    ]  # fmt: skip
    assert len(UNSEEN) > 200
    for build, text in texts:
        plain = from_mapping(build(text))
        for c in UNSEEN:
            for odd in (c + text, text[:2] + c + text[2:], text + c):
                try:
                    found = from_mapping(build(odd))
                except ConfigError as error:
                    assert str(error).replace("\n", "").isprintable()
                else:  # plain spaces around it, and no other name
                    assert c in " \t\n\r\f\v\x1c\x1d\x1e\x1f" and (found == plain or "A100" in text or c == " ")


LOOK_ALIKES = [
    "tоrch",
    "ｔｏｒｃｈ",
    "torсh",
    "𝐭𝐨𝐫𝐜𝐡",
    "TORCH",
    "tor\u0441h",
    "tor\u200dch",
    "ｊａｘ",
    "јах",
    "сuрy",
    "ⅽupy",
]


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_letters_that_look_alike_name_no_framework(name: str) -> None:
    assert "unknown framework" in str(refused({**GOOD, "frameworks": {name: {"share": "50%"}}}))


@pytest.mark.parametrize(
    "key", ["А100*", "NVIDIA А100*", "ＮＶＩＤＩＡ *", "NVIDIA\u00a0A100*", "NVIDIA A100\u200b*", "*\u202eH200*"]
)
def test_letters_that_look_alike_name_no_gpu(key: str) -> None:
    assert "plain ASCII" in str(refused(devices(key)))


# Too long, too many, too deep

MEGABYTE = 1 << 20
LONG: list[tuple[str, Any]] = [
    ("a key of a GPU", lambda text: devices(text)),
    ("a key", lambda text: {**GOOD, text: 1}),
    ("a framework", lambda text: {**GOOD, "frameworks": {text: {"share": "50%"}}}),
    ("a key of a framework", lambda text: {**GOOD, "frameworks": {"torch": {text: "50%"}}}),
    ("a share", lambda text: {**GOOD, "frameworks": {"torch": {"share": text}}}),
    ("a limit", lambda text: {**GOOD, "device": {"limit": text}}),
    ("a reserve", lambda text: {**GOOD, "device": {"reserve": text}}),
    ("a word", lambda text: {**GOOD, "on_busy": text}),
    ("an entry", lambda text: {**GOOD, "monitor": {}, "on_pressure": [text]}),
    ("a duration", lambda text: {**GOOD, "monitor": {"interval": text}}),
    ("a path", lambda text: {**GOOD, "monitor": {"timeline": text}}),
    ("a version", lambda text: {**GOOD, "version": text}),
    ("a whole section", lambda text: {**GOOD, "frameworks": text}),
]
UNITS = ["9", "a", " ", "*a", "[", "?", "%", "٠", "é", "\u202e", "\0", "0.", "GPU-", "{", "9_"]


@pytest.mark.parametrize("unit", UNITS)
def test_a_megabyte_anywhere_is_refused_at_once(unit: str) -> None:
    """13 places for each of 15 texts of 1 and 4 MB: a few milliseconds each, and no copies of the text."""
    for what, build in LONG:
        for size in (MEGABYTE, 4 * MEGABYTE):
            data = build(unit * (size // len(unit)))
            tracemalloc.start()
            begun = time.perf_counter()
            error = refused(data)
            took, peak = time.perf_counter() - begun, tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert took < 3 and peak < MEGABYTE, (what, unit, took, peak)
            assert len(str(error)) < 2000
            assert len(error.problems) <= 3


def texts(size: int) -> Iterator[str]:
    """YAML that keeps a reader busy, of about so many bytes."""
    head = "version: 1\nframeworks: {torch: {share: 50%}}\n"
    for unit in ["a", "[", "{", "- ", "? ", ": ", "!", "!a ", "&a ", "*", "%", "'", '"', "#", "\n", "|\n", "{}", "[],",
                 "a: 1\n", "a: {\n", "<<: \n", "---\n",
                 "\\", "@", "`", "\t", "\r", "\x85", "\ufeff", "é", "٠"]:  # fmt: skip
        yield unit * (size // len(unit))
        yield head + unit * (size // len(unit))
        yield head + "device: {limit: " + unit * (size // len(unit)) + "}\n"
    for opened, unit, closed in [
        ("devices: {'", "*a", "': {limit: 5%}}"), ('device: {limit: "', "\\x41", '"}'),
        ("device: '", "a\n\n", "'"),
        ("device: |\n", "  a\n", ""), ("monitor: {timeline: '", "{x}", "'}"), ("device: [", "trim, ", "]"),
        ("doctor: {ignore: [", "mig, ", "]}"), ("devices: {", "gpu0: {limit: 5GB}, ", "}"), ("a: [", "&a 1, ", "]"),
        ("device: {", "memory: 1, ", "}"), ("frameworks: {", "a: {share: 1%}, ", "}"),
        ("a: &", "a", " 1"), ("a: *", "a", ""),
    ]:  # fmt: skip
        yield head + opened + unit * (size // len(unit)) + closed
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)]
    yield "\n".join(lines)
    yield "\n".join([*lines, head])
    yield head + "".join(f"key{n}: 1\n" for n in range(min(size // 12, 9900)))
    yield head + "devices:\n" + "".join(f"  gpu{n}: {{limit: 5GB}}\n" for n in range(min(size // 24, 3300)))


def test_a_text_keeps_nobody_busy() -> None:
    """110 texts of 32 KiB: each is done in a fraction of a second (a whole MiB took 3 s at most)."""
    tried = 0
    for text in texts(1 << 15):
        begun = time.perf_counter()
        with contextlib.suppress(ConfigError):
            parse(text)
        assert time.perf_counter() - begun < 3, text[:100]
        tried += 1
    assert tried == 110


def test_mappings_that_never_end_or_nest_without_end() -> None:
    class Endless(Mapping[str, Any]):
        def __init__(self, key: Any) -> None:
            self.key = key

        def __getitem__(self, key: str) -> Any:
            return 1

        def __iter__(self) -> Iterator[str]:
            n = 0
            while True:
                yield self.key(n)
                n += 1

        def __len__(self) -> int:
            return 1

    circle: dict[str, Any] = {**GOOD}
    circle["device"] = circle
    deep: Any = 1
    for _ in range(10_000):
        deep = {"device": deep}
    twice: list[Any] = []
    for _ in range(40):
        twice = [twice, twice]
    for data in (
        Endless(str), Endless(lambda n: n), Endless(lambda n: "a"), Endless(lambda n: None), circle, deep,
        {**GOOD, "device": deep}, {**GOOD, "on_pressure": twice}, {**GOOD, "version": 10**100_000},
        {**GOOD, "device": {"limit": Fraction(10**100_000, 3)}},
        {**GOOD, "device": {"limit": Fraction(1, 10**100_000)}},
        {**GOOD, "device": {"limit": 10**40_000}}, {**GOOD, "x" * 50: {"y" * 50: "z"} } ,
    ):  # fmt: skip
        begun = time.perf_counter()
        refused(data)
        assert time.perf_counter() - begun < 3


# Fuzz: a plan, a ConfigError or a PlanError, soon

ODD = st.sampled_from([*"٠०０５％．，\u200b\u202e\u00a0\ufeff\x00\x1b\n\t", "К", "ｔ", "é"]) | st.characters(
    exclude_categories=["Cs"]
)
MEANT = [
    "0", "1", "cuda:0", "NVIDIA H200", "*h200*", "gpu0", "all", UUID, "50%", "100%", "0.5", "1GiB", "40GB", "2MiB",
    "auto", "torch", "jax", "tf", "limit", "share", "reserve", "device", "devices", "frameworks", "monitor", "version",
    "memory", "share 60%", "torch {share", "60%}", "1,5GiB", "trim", "warn",
]  # fmt: skip
TEXTS = st.tuples(st.sampled_from(MEANT), st.integers(0, 12), st.text(ODD, max_size=2)).map(
    lambda given: given[0][: given[1]] + given[2] + given[0][given[1] :]
) | st.sampled_from(MEANT)
VALUES = st.recursive(
    TEXTS | st.integers(-2, 1 << 41) | st.floats() | st.booleans() | st.none() | st.fractions(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.integers(-1, 9), inner, max_size=4),
    max_leaves=10,
)
SIZED = st.sampled_from(["10%", "60%", "100%", "1GiB", "30GiB", "200GiB", 1 << 31, "2MiB"])
MAPPINGS = st.fixed_dictionaries(
    {
        "version": st.just(1) | VALUES,
        "frameworks": st.dictionaries(
            st.sampled_from(["torch", "jax", "cupy"]) | TEXTS,
            st.dictionaries(st.sampled_from(["share", "limit"]) | TEXTS, SIZED | VALUES, min_size=1, max_size=2),
            max_size=3,
        )
        | VALUES,
    },
    optional={
        "device": st.dictionaries(st.sampled_from(["limit", "reserve"]) | TEXTS, SIZED | VALUES, max_size=2) | VALUES,
        "devices": st.dictionaries(
            st.sampled_from(["0", "1", "*H200*"]) | TEXTS,
            st.dictionaries(st.sampled_from(["limit", "reserve"]), SIZED, max_size=2) | VALUES,
            max_size=3,
        ),
        "monitor": VALUES,
        "on_pressure": VALUES,
        "doctor": VALUES,
        "memory": VALUES,
    },
)


@settings(max_examples=400, deadline=3000, suppress_health_check=[HealthCheck.too_slow])
@given(MAPPINGS)
def test_a_mapping_is_planned_or_refused(data: dict[str, Any]) -> None:
    before = copy.deepcopy(data)
    try:
        plan = policy.plan(from_mapping(data), DEVICES)
    except (ConfigError, PlanError) as error:
        assert all(problem.message and problem.fix for problem in error.problems)
        assert str(error).replace("\n", "").isprintable()
    else:
        assert all(sum(part.caps.values()) + part.reserve <= part.limit for part in plan.devices)
    assert str(before) == str(data), "what was given is not changed"


PLACES: list[Callable[[Any], dict[str, Any]]] = [
    lambda v: {"frameworks": {"torch": v}}, lambda v: {"frameworks": {"torch": [v]}},
    lambda v: {"frameworks": {"torch": [v, v]}}, lambda v: {"frameworks": {"torch": {"share": v}}},
    lambda v: {"frameworks": {"torch": [{"share": v}]}}, lambda v: {"frameworks": v}, lambda v: {"frameworks": [v]},
    lambda v: {"device": v}, lambda v: {"device": [v]}, lambda v: {"device": [{"limit": v}]},
    lambda v: {"devices": {"0": v}}, lambda v: {"devices": [v]}, lambda v: {"monitor": [v]},
    lambda v: {"anything": [v]}, lambda v: {"on_pressure": [v]}, lambda v: {"version": v},
]  # fmt: skip


@pytest.mark.parametrize("value", [10**5000, -(10**5000), 1e400, float("nan")], ids=["huge", "low", "inf", "nan"])
def test_a_number_that_nobody_can_print_is_a_problem_at_every_place(value: float) -> None:
    for place in PLACES:
        with pytest.raises(ConfigError) as raised:
            from_mapping({"version": 1, "frameworks": {"torch": {"share": "50%"}}, **place(value)})
        assert len(str(raised.value)) < 2000
