"""Whatever comes in, a budget or a ConfigError comes out, and problems of a text have a place in it."""

from __future__ import annotations

import pickle
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from memguard._base.findings import names
from memguard._base.units import GIB, GRANULE, MIB
from memguard._base.yaml import read
from memguard._budget import FRAMEWORKS, Budget, from_mapping, json_schema, parse
from memguard.errors import ConfigError

SAMPLE = (Path(__file__).parents[2] / "configs" / "budget.yaml").read_text()
SCHEMA = Draft202012Validator(json_schema())
more = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def outcome(text: str | bytes) -> Budget | ConfigError:
    """What came out; every problem of a text must have a place in it."""
    try:
        budget = parse(text)
    except ConfigError as error:
        complete(error, len(text.splitlines()) + 1)
        return error
    invariants(budget)
    return budget


def complete(error: ConfigError, lines: int) -> None:
    places = [(p.line or 0, p.column or 0) for p in error.problems]
    assert places
    assert places == sorted(places), "not in file order"
    assert all(1 <= line <= lines and column >= 1 for line, column in places), places
    assert all(p.message and p.fix for p in error.problems)
    str(error).encode()


def invariants(budget: Budget) -> None:
    """What the plan relies on."""
    assert budget.frameworks
    assert set(budget.frameworks) <= set(FRAMEWORKS)
    parts = [framework.guaranteed for framework in budget.frameworks.values()]
    assert sum(part for part in parts if isinstance(part, Fraction)) <= 1
    for name, framework in budget.frameworks.items():
        assert [framework.share, framework.limit, framework.min].count(None) == 2
        assert (framework.min is None) == (framework.max is None)
        if framework.min is not None and framework.max is not None and type(framework.min) is type(framework.max):
            assert framework.min <= framework.max
        assert not isinstance(framework.min, int) or framework.min >= GRANULE
        assert framework.limit is None or framework.limit >= GRANULE
        assert (framework.growth is None) == (name != "tensorflow")
        assert (framework.nccl is None) == (name != "torch")
        assert (framework.context is None) == (name != "pycuda")
        assert framework.nccl is None or (type(framework.nccl) is int and 0 <= framework.nccl <= 64)
    assert budget.on_busy in ("warn", "raise")
    assert len(set(budget.on_pressure)) == len(budget.on_pressure)
    assert set(budget.on_pressure) <= {"trim", "raise"}
    assert not budget.on_pressure or budget.monitor is not None
    assert budget.doctor is None or budget.doctor.ignore
    if budget.metrics is not None:
        assert budget.monitor is not None and (budget.metrics.prometheus or budget.metrics.opentelemetry)
        assert budget.metrics.prometheus is None or 1024 <= budget.metrics.prometheus <= 65535
    ignored = budget.doctor.ignore if budget.doctor is not None else ()
    assert [name for name in names() if name in ignored] == list(ignored)
    if budget.monitor is not None:
        assert 0.05 <= budget.monitor.interval <= 3600
        assert 0 < budget.monitor.warn < budget.monitor.critical <= 1
        assert budget.monitor.forecast == 0 or 1 <= budget.monitor.forecast <= 3600
        assert budget.monitor.timeline is None or budget.monitor.timeline.strip()
        assert budget.monitor.timeline_size >= MIB
    limit, reserve = budget.device.limit, budget.device.reserve
    assert limit <= 1 if isinstance(limit, Fraction) else limit >= GRANULE
    if not isinstance(limit, Fraction):
        kept = limit - (0 if reserve == "auto" else reserve)
        assert sum(part * kept if isinstance(part, Fraction) else part for part in parts) <= kept
    again = from_mapping(budget.model_dump(exclude_none=True))
    assert again == budget == pickle.loads(pickle.dumps(budget))
    assert hash(again) == hash(budget)


@more
@given(st.binary(max_size=200))
def test_any_bytes(raw: bytes) -> None:
    outcome(raw)


@more
@given(st.text(max_size=200))
def test_any_text(text: str) -> None:
    outcome(text)


WORDS = [
    "version", "device", "devices", "frameworks", "on_busy", "torch", "tensorflow", "cupy", "jax", "pycuda", "numba",
    "monitor", "on_pressure", "interval", "warn", "critical", "forecast", "timeline", "timeline_size", "trim", "500ms",
    "top", "doctor", "ignore", "metrics", "prometheus", "opentelemetry", "job", "9477",
    "limit", "share", "reserve", "growth", "nccl", "min", "1", "2", "0", "auto", "warn", "raise", "50%", "25%", "90%",
    "context", "primary", "own", "max",
    "0%", "1GiB", "512MiB", "5GB", "true", "yes", "~", "mig", "second-context",
    "1:30", "GPU-1", "A*", "&a", "*a", "!x", "<<", "---", "...", "- ", "? ", ": ", ":", ", ", "{", "}", "[", "]", "'",
    '"', "\\x", "#", "|", ">", "%", "@", "\n", "\n  ", "\n    ", "\t", " ", "\r\n", "\ufeff", "\x85", "\u2028", "é",
]  # fmt: skip


@more
@given(st.lists(st.sampled_from(WORDS), max_size=40).map("".join))
def test_any_text_that_looks_like_yaml(text: str) -> None:
    outcome(text)


@more
@given(st.lists(st.sampled_from(WORDS), max_size=12).map("".join))
def test_any_end_of_a_budget(text: str) -> None:
    outcome("version: 1\nframeworks: {torch: {share: 50%}}\n" + text)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=4), st.fractions(),
    st.sampled_from(["50%", "100%", "25 %", "1GiB", "512MiB", "auto", "yes", "warn", "raise"]),
    st.sampled_from([1, 2, GIB, GRANULE, Fraction(1, 2)]),
    st.just(5000).map(lambda digits: 10**digits),
)  # fmt: skip
KEYS = st.one_of(st.sampled_from(WORDS[:30]), st.text(max_size=5), st.integers(-1, 3), st.booleans(), st.none())
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4) | st.tuples(inner),
    max_leaves=12,
)


def outcome_of(mapping: Any) -> Budget | None:
    try:
        budget = from_mapping(mapping)
    except ConfigError as error:
        str(error).encode()
        return None
    invariants(budget)
    return budget


@more
@example({"version": 10**5000, "500ms": None})
@given(ANYTHING)
def test_any_value(value: Any) -> None:
    outcome_of(value)


def entries(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={name: value | SCALARS for name, value in values.items()})


SIZES = st.sampled_from(["512MiB", "1GiB", "4GiB", "40GiB", 3 * GIB])
PERCENTS = st.sampled_from(["10%", "25%", "33.3%", "50%", "100%"])
DURATIONS = st.sampled_from(["500ms", "2s", "1.5 s", "1min", "0", "1h"]) | st.floats(0.04, 3601) | st.integers(0, 3601)
PATHS = st.sampled_from(["a.jsonl", "/x/{pid}-{rank}", "a/", "{x}"]) | st.text(max_size=6)
AMOUNTS = PERCENTS | SIZES
ENTRY = st.one_of(
    entries(share=PERCENTS),
    entries(min=AMOUNTS, max=AMOUNTS),
    entries(min=AMOUNTS, max=AMOUNTS, share=PERCENTS, limit=SIZES),
    entries(limit=SIZES),
    entries(share=PERCENTS, limit=SIZES, growth=st.booleans(), nccl=st.integers(-1, 65)),
    entries(share=PERCENTS, context=st.sampled_from(["primary", "own"]) | SCALARS),
)
BUDGETS = st.fixed_dictionaries(
    {
        "version": st.just(1) | SCALARS,
        "frameworks": st.dictionaries(st.sampled_from(FRAMEWORKS), ENTRY, max_size=4) | ANYTHING,
    },
    optional={
        "on_busy": st.sampled_from(["warn", "raise"]) | SCALARS,
        "monitor": entries(
            interval=DURATIONS,
            warn=PERCENTS,
            critical=PERCENTS,
            forecast=DURATIONS,
            timeline=PATHS,
            timeline_size=SIZES,
            top=st.booleans() | SCALARS,
        )
        | ANYTHING,
        "on_pressure": st.lists(st.sampled_from(["trim", "raise"]) | SCALARS, max_size=3) | ANYTHING,
        "metrics": entries(prometheus=st.integers(1000, 70000), opentelemetry=st.booleans(), job=st.text(max_size=4))
        | ANYTHING,
        "doctor": entries(ignore=st.lists(st.sampled_from(names()) | SCALARS, max_size=3)) | ANYTHING,
        "device": entries(
            limit=SIZES | PERCENTS,
            reserve=SIZES | st.just("auto"),
            lease=st.booleans() | SCALARS,
            wait=st.sampled_from(["0", "10min"]) | SCALARS,
            on_wait=st.sampled_from(["wait", "suspend-idle"]) | SCALARS,
        )
        | ANYTHING,
        "devices": st.dictionaries(
            st.sampled_from(["0", "1", "cuda:1", "cuda:", "A100*"]) | KEYS,
            entries(limit=SIZES, reserve=SIZES),
            max_size=2,
        ),
    },
)


@more
@given(BUDGETS)
@example({"version": 1, "frameworks": {"version": 10**5000, 0: None}})
def test_any_mapping_like_a_budget(mapping: dict[str, Any]) -> None:
    outcome_of(mapping)


OWN: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "torch": {"nccl": st.integers(0, 64)},
    "tensorflow": {"growth": st.booleans()},
    "pycuda": {"context": st.sampled_from(["primary", "own"])},
}


def defined(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """What a framework may be given, its own setting with it or not."""
    sizes: list[dict[str, st.SearchStrategy[Any]]] = [
        {"share": PERCENTS}, {"limit": SIZES}, {"min": AMOUNTS, "max": AMOUNTS},
    ]  # fmt: skip
    return st.one_of(st.fixed_dictionaries(size, optional=OWN.get(name, {})) for size in sizes)


DEFINED = st.fixed_dictionaries(
    {
        "version": st.just(1),
        "frameworks": st.sets(st.sampled_from(FRAMEWORKS), min_size=1).flatmap(
            lambda names: st.fixed_dictionaries({name: defined(name) for name in sorted(names)})
        ),
    },
    optional={
        "on_busy": st.sampled_from(["warn", "raise"]),
        "monitor": st.fixed_dictionaries(
            {},
            optional={
                "interval": st.floats(0.05, 3600) | st.integers(1, 3600) | st.sampled_from(["50ms", "1.5 s", "1H"]),
                "warn": PERCENTS,
                "critical": PERCENTS,
                "forecast": st.floats(1, 3600) | st.sampled_from([0, 0.0, "0", "20s", "1 min"]),
                "timeline": st.sampled_from(["a.jsonl", "/x/{pid}-{rank}.jsonl", " a b", ".hidden", "a..", "…/ä"]),
                "timeline_size": SIZES | st.just("1MiB"),
                "top": st.booleans(),
            },
        ),
        "on_pressure": st.lists(st.sampled_from(["trim", "raise"]), unique=True),
        "metrics": st.fixed_dictionaries(
            {"prometheus": st.integers(1024, 65535)},
            optional={
                "opentelemetry": st.booleans(),
                "job": st.from_regex("[A-Za-z0-9][A-Za-z0-9._/:@-]{0,63}", fullmatch=True),
            },
        ),
        "doctor": st.fixed_dictionaries({}, optional={"ignore": st.lists(st.sampled_from(names()), unique=True)}),
        "device": st.fixed_dictionaries({}, optional={"limit": SIZES | PERCENTS, "reserve": SIZES}),
        "devices": st.dictionaries(
            st.sampled_from(["0", "7", "cuda:1", "A100*"]),
            st.fixed_dictionaries({}, optional={"limit": SIZES | PERCENTS}),
            max_size=2,
        ),
    },
)


@more
@given(DEFINED)
def test_what_is_a_budget_passes_the_schema_and_only_sums_can_fail(mapping: dict[str, Any]) -> None:
    if not mapping.get("on_pressure") or "monitor" in mapping:
        SCHEMA.validate(mapping)
    try:
        invariants(from_mapping(mapping))
    except ConfigError as error:
        for problem in error.problems:
            assert any(
                word in problem.message
                for word in (
                    "add up to",
                    "is less than the min of",
                    "take 100%",
                    "more than this limit",
                    "leaves nothing",
                    "must come before",
                    "needs a monitor",
                )
            )


def mutated(text: str, rng: random.Random) -> str:
    lines = text.split("\n")
    kind = rng.randrange(8)
    at, other = rng.randrange(len(text)), rng.randrange(len(text))
    row, second = rng.randrange(len(lines)), rng.randrange(len(lines))
    if kind == 0:
        return text[:at] + text[at + rng.randrange(1, 5) :]
    if kind == 1:
        return text[:at] + text[at] + text[at:]
    if kind == 2:
        swapped = list(text)
        swapped[at], swapped[other] = swapped[other], swapped[at]
        return "".join(swapped)
    if kind == 3:
        return text[:at] + rng.choice(WORDS) + text[at:]
    if kind == 4:
        del lines[row]
    elif kind == 5:
        lines.insert(second, lines[row])
    elif kind == 6:
        lines[row], lines[second] = lines[second], lines[row]
    else:
        words = [i for i, line in enumerate(lines) if ":" in line.split("#")[0]]
        row = rng.choice(words)
        key, _, value = lines[row].partition(":")
        new = rng.choice(WORDS)
        lines[row] = f"{key}: {new}" if rng.random() < 0.5 else f"{key[: len(key) - len(key.lstrip())]}{new}:{value}"
    return "\n".join(lines)


def test_mutations_of_the_sample_are_budgets_or_have_a_line() -> None:
    rng = random.Random(20240607)
    kinds = {"budget": 0, "error": 0}
    for number in range(500):
        text = SAMPLE
        for _ in range(1 + number % 3):
            text = mutated(text, rng)
        kinds["budget" if isinstance(outcome(text), Budget) else "error"] += 1
    assert min(kinds.values()) > 50, kinds  # both ways are really tried


def test_mutations_that_parse_pass_the_schema() -> None:
    rng = random.Random(7)
    for _ in range(500):
        text = mutated(SAMPLE, rng)
        if isinstance(outcome(text), Budget):
            SCHEMA.validate(read(text).data)


LESS, MORE = ("2MiB", "1GiB", "5%", "10%"), ("2GiB", "40GiB", "50%", "100%")
AMOUNT_KEYS = ("share", "limit", "min", "max")
RIGHT = ({"share"}, {"limit"}, {"min", "max"})


@more
@given(
    st.sampled_from(FRAMEWORKS),
    st.permutations(AMOUNT_KEYS).flatmap(lambda keys: st.integers(0, 4).map(lambda count: keys[:count])),
    st.sampled_from(LESS),
    st.sampled_from(MORE),
)
def test_each_set_of_amounts_is_a_budget_or_has_a_line_and_a_fix(
    name: str, keys: list[str], less: str, more: str
) -> None:
    """And the schema says the same."""
    values = {"share": "20%", "limit": "3GiB", "min": less, "max": more}
    text = f"version: 1\nframeworks:\n  {name}: {{{', '.join(f'{key}: {values[key]}' for key in keys)}}}\n"
    found = outcome(text)
    assert isinstance(found, Budget) is (set(keys) in RIGHT) is SCHEMA.is_valid(read(text).data)
    if isinstance(found, ConfigError):
        (problem,) = found.problems
        assert problem.line == 3 and problem.path.startswith(f"frameworks.{name}")
