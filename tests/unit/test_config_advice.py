"""Every fix that an error of a budget suggests is followed, as text, and leads to a budget that does what was meant.

`follow` is a user who does what the fix says and nothing else. A wrong budget is written down with what was meant by
it; one round of fixes must lead there, and two where one mistake hides another.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memguard._base.types import Device
from memguard._base.units import GRANULE
from memguard._base.yaml import read
from memguard._budget import FRAMEWORKS, Budget, from_mapping, parse
from memguard._budget.policy import plan
from memguard._budget.suggestions import fitting
from memguard._frameworks.specs import SPECS
from memguard.errors import ConfigError, PlanError, Problem

# A user who follows fixes


def keys_of(path: str) -> list[str | int]:
    """`frameworks.torch.share`, `devices['0']`, `on_pressure[1]` as keys and indexes."""
    found: list[str | int] = []
    for word, quoted, index in re.findall(r"([^\W\d]\w*)|\[('(?:[^'\\]|\\.)*'|\"[^\"]*\")\]|\[(\d+)\]", path):
        found.append(word or (yaml.safe_load(quoted) if quoted else int(index)))
    return found


def text_value(text: str) -> Any:
    document = read(text)
    assert document.problems == [], (text, document.problems)
    return document.data


def put(parent: Any, key: str | int, value: Any, instead_of: str | int) -> None:
    """Set a key where another stood, in its place."""
    if isinstance(parent, list):
        parent[int(instead_of)] = value
        return
    entries = [(key if k == instead_of else k, value if k == instead_of else v) for k, v in parent.items()]
    entries = [(k, v) for k, v in entries if not (k == key and v is not value)]
    parent.clear()
    parent.update(entries if any(k == key for k, _ in entries) else [*entries, (key, value)])


def follow(data: dict[str, Any], problem: Problem) -> None:
    """Change the data as the fix says. Fails if the fix does not say what to write."""
    fix, path = problem.fix, keys_of(problem.path)
    parent: Any = data
    for part in path[:-1]:
        parent = parent.get(part) if isinstance(parent, dict) else parent[part]
        if parent is None:
            return  # a fix before this one replaced it
    last = path[-1] if path else ""
    if found := re.match(r"did you mean '(\w+)'\? It is there too", fix):
        parent.pop(last, None)
    elif found := re.match(r"did you mean '([\w-]+)'", fix):
        put(parent, found[1], parent[last], last)
    elif found := re.search(r"raise the limit to (\w+(?:\.\d+)?)", fix):
        parent["limit"] = found[1]
    elif found := re.search(r"raise critical.*'critical: (.*)'|'warn: (.*)'", fix):
        parent["critical" if found[1] else "warn"] = found[1] or found[2]
    elif found := re.search(r"for example to (.+)$", fix):
        lower(data, found[1])
    elif found := re.match(r"move it below '(\w+):'", fix):
        home = data.setdefault("frameworks", {}) if found[1] in SPECS else data
        if found[1] in SPECS and found[1] not in home:
            assert "or remove it" in fix
            parent.pop(last)
            return
        value = parent.pop(last)
        home[found[1]] = {**(home.get(found[1]) or {}), last: value}
    elif found := re.match(r"move it below torch, or remove it", fix):
        value = parent.pop(last)
        if "torch" in data["frameworks"]:
            data["frameworks"]["torch"][last] = value
    elif found := re.match(r"move it below a framework, as in '(\w+): (\{.*\})'", fix):
        parent.pop(last)
        entries = data.setdefault("frameworks", {})
        entries[found[1]] = {**(entries.get(found[1]) or {}), **text_value(found[2])}
    elif fix.startswith("align it with 'version:'"):
        data[str(last)] = parent.pop(last)
    elif found := re.match(r"name the GPU '(.*?)'(?=,|:|$)", fix):
        put(parent, found[1], parent[last], last)
    elif found := re.match(r"write (?:for example )?'(.*?)'(?= without|,| \(|;| or| for| if|:|$)", fix):
        value = text_value(found[1])
        if isinstance(value, dict) and ":" in found[1] and not found[1].startswith("{"):
            ((key, value),) = value.items()
            put(parent, key, value, last)
        else:
            put(parent, last, value, last)
    elif found := re.match(r"add '(.*?)'(?: and below it '(.*)')?", fix):
        data.update(text_value("\n".join(part for part in found.groups() if part)))
    elif fix.startswith(("remove", "keep one of them")):
        parent.pop(last)
    else:
        raise AssertionError(f"nobody can follow this: {fix!r} for {problem.path}: {problem.message}")


def lower(data: dict[str, Any], numbers: str) -> None:
    """Write the numbers that a fix names: `torch 50%, cupy.min 5%`."""
    for one, part in (one.split() for one in numbers.split(", ")):
        name, _, key = one.partition(".")
        kind = key or ("share" if part.endswith("%") else "limit")
        assert kind in data["frameworks"][name], "a share stays a share, a size a size"
        assert ("%" in str(data["frameworks"][name][kind])) is part.endswith("%")
        data["frameworks"][name][kind] = part


def errors_of(data: dict[str, Any]) -> tuple[Problem, ...]:
    try:
        from_mapping(data)
    except ConfigError as error:
        return error.problems
    return ()


def mended(data: dict[str, Any], rounds: int, in_text: bool = True) -> tuple[Budget, dict[str, Any]]:
    """The budget after at most so many rounds of fixes, and its data."""
    said = []
    for _ in range(rounds):
        problems = errors_of(data)
        if not problems:
            break
        said += [f"{p.path}: {p.message} -> {p.fix}" for p in problems]
        assert not in_text or same_as_text(data, problems)
        for problem in problems:
            follow(data, problem)
    try:
        return from_mapping(data), data
    except ConfigError as error:
        raise AssertionError("\n".join([*said, "then", str(error), str(data)])) from None


def same_as_text(data: dict[str, Any], problems: tuple[Problem, ...]) -> bool:
    """Whether the file says the same, with lines and columns."""
    text = yaml.safe_dump(data, sort_keys=False)
    if text_value(text) != data:
        return True  # a number or a date that YAML writes in another way
    with pytest.raises(ConfigError) as raised:
        parse(text)
    assert all(problem.line and problem.column for problem in raised.value.problems)
    return sorted((p.path, p.fix) for p in raised.value.problems) == sorted((p.path, p.fix) for p in problems)


# What goes wrong, with what was meant

WHOLE: dict[str, Any] = {
    "version": 1,
    "device": {"limit": "80%", "reserve": "2GiB", "lease": True, "wait": "10min", "on_wait": "suspend-idle"},
    "devices": {"0": {"limit": "40GiB"}, "NVIDIA A100*": {"reserve": "3GiB"}},
    "frameworks": {
        "torch": {"share": "40%", "nccl": 1},
        "tensorflow": {"share": "20%", "growth": False},
        "cupy": {"limit": "1GiB"},
        "pycuda": {"limit": "512MiB", "context": "own"},
        "numba": {"min": "5%", "max": "15%"},
    },
    "on_busy": "raise",
    "ranks": "auto",
    "monitor": {
        "interval": "1s", "warn": "70%", "critical": "90%", "forecast": "30s", "timeline": "a.jsonl",
        "timeline_size": "32MiB", "top": True,
    },
    "on_pressure": ["trim"],
    "metrics": {"prometheus": 9477, "opentelemetry": True, "job": "train"},
    "suspend": {"when_idle": "10min", "by_others": True, "host_memory": "ignore"},
    "doctor": {"ignore": ["mig"]},
}  # fmt: skip
LEVELS: list[tuple[str, ...]] = [
    (), ("device",), ("devices", "0"), ("frameworks",), *(("frameworks", name) for name in WHOLE["frameworks"]),
    ("monitor",), ("metrics",), ("suspend",), ("doctor",),
]  # fmt: skip


def at(data: Any, loc: tuple[str, ...]) -> Any:
    for part in loc:
        data = data[part]
    return data


def misspelt(word: str) -> Iterator[str]:
    """A letter left out, doubled, swapped or wrong; capitals, dashes, spaces, the plural, the singular."""
    for n in range(len(word)):
        yield word[:n] + word[n + 1 :]
        yield word[:n] + word[n] + word[n:]
        if n + 1 < len(word) and word[n] != word[n + 1]:
            yield word[:n] + word[n + 1] + word[n] + word[n + 2 :]
        yield word[:n] + "x" + word[n + 1 :]
    yield from (word.upper(), word.title(), word.replace("_", "-"), word.replace("_", " "), word.replace("_", ""))
    yield from (f"{word}s", word.rstrip("s"), f" {word}", f"{word} ")


KNOWN = {"", *FRAMEWORKS, *(key for level in LEVELS for key in at(WHOLE, level))}
MISSPELT = sorted(
    {
        (level, key, wrong)
        for level in LEVELS
        for key in at(WHOLE, level)
        for wrong in misspelt(key)
        if wrong not in KNOWN and len(wrong.strip()) > 2
    }
)


@pytest.mark.long
def test_every_key_misspelt() -> None:
    """Two of them are one letter from another key of the same level, and are taken for that."""
    others = []
    for level, key, wrong in MISSPELT:
        data = copy.deepcopy(WHOLE)
        put(at(data, level), wrong, at(data, level)[key], key)
        problems = errors_of(data)
        assert len(problems) == 1, (level, key, wrong, problems)
        try:
            assert mended(data, 1, in_text=False)[0] == from_mapping(WHOLE)
        except AssertionError:
            others.append((level, key, wrong, problems[0].fix))
    assert len(MISSPELT) > 500 and len(others) <= 0.04 * len(MISSPELT), others


TWO_KEYS = [
    (first, second) for n, first in enumerate(LEVELS) for second in LEVELS[n:] if at(WHOLE, first) and at(WHOLE, second)
]


def test_two_keys_misspelt_are_two_errors_of_one_round() -> None:
    for first, second in TWO_KEYS:
        data = copy.deepcopy(WHOLE)
        keys = [(level, max(at(WHOLE, level), key=len)) for level in (second, first)]
        if len(set(keys)) == 1 or first == second[: len(first)]:
            continue
        for level, key in keys:
            if level == ("frameworks",) or key == "NVIDIA A100*":
                continue
            put(at(data, level), f"{key}q", at(data, level)[key], key)
        assert mended(data, 1)[0] == from_mapping(WHOLE), (first, second)


HOMES = {
    key: level
    for level in LEVELS
    for key in at(WHOLE, level)
    if level not in ((), ("devices", "0"), ("frameworks",)) and key not in ("limit", "share", "min", "max")
}


@pytest.mark.long
def test_every_key_one_level_up_or_down_or_beside() -> None:
    """Each key of each level, below each other level: it is told where it belongs."""
    tried = 0
    for key, home in HOMES.items():
        for level in LEVELS:
            if level == home or key in at(WHOLE, level) or (level == ("devices", "0") and home == ("device",)):
                continue
            data = copy.deepcopy(WHOLE)
            at(data, level)[key] = at(data, home).pop(key)
            budget, _ = mended(data, 2)
            if key == "growth" or (
                home[0] == "frameworks" and level[:1] == ("frameworks",) and level != ("frameworks",)
            ):
                continue  # a setting of one framework below another: told that it is one, and may be removed
            assert budget == from_mapping(WHOLE), (key, home, level)
            tried += 1
    for key in ("on_busy", "on_pressure", "monitor", "suspend", "doctor", "device", "devices", "frameworks"):
        for level in LEVELS[1:]:
            if key == level[0]:
                continue
            data = copy.deepcopy(WHOLE)
            at(data, level)[key] = data.pop(key)
            assert mended(data, 2)[0] == from_mapping(WHOLE), (key, level)
            tried += 1
    assert tried > 130


def budget(**parts: Any) -> dict[str, Any]:
    return {"version": 1, "frameworks": {"torch": {"share": "50%"}}, **parts}


def torch(entry: Any) -> dict[str, Any]:
    return {"version": 1, "frameworks": {"torch": entry}}


LIMIT = budget(device={"limit": "40GiB"})
PART = budget(device={"limit": "90%"})
SHARE, SIZE = torch({"share": "60%"}), torch({"limit": "4GiB"})
PERCENTS = [
    "60 %", "60", 60, "0.6", 0.6, ".6", "60 percent", "60percent", "60pct", "60.0%", "６０%", "60％", "٦٠%", "3/5",
    " 60% ", "60,0%", "60 per cent", "0.60",
]  # fmt: skip
SIZES = [
    "4GB", "4gb", "4G", "4g", "4Gi", "4 gib", "4 gigabytes", "4 gigs", "4096MB", "4096M", "4194304KB", "4294967296",
    4 << 30, "4_294_967_296", "0x100000000", "4,0GiB", "４GiB", "4\u00a0GiB", "4ＧｉＢ", "٤GiB", "4 GB", "4096 mib",
]  # fmt: skip
WORDS = [
    "memory", "max_memory", "memory_limit", "mem", "mem_limit", "gpu_memory", "gpu_memory_limit", "vram", "cap", "max",
    "maximum", "quota", "amount", "gpu-memory", "Memory", "memory_cap", "max_mem", "size",
]  # fmt: skip
PARTS = [
    "fraction", "percent", "percentage", "pct", "ratio", "memory_fraction", "gpu_memory_fraction", "portion",
    "per_process_gpu_memory_fraction", "gpu_memory_utilization", "proportion", "Fraction",
]  # fmt: skip
WRONG: list[tuple[Any, dict[str, Any]]] = [
    *((torch({"share": one}), SHARE) for one in PERCENTS),
    *((torch({"limit": one}), SIZE) for one in SIZES),
    *((torch({"share": one}), SIZE) for one in SIZES if not isinstance(one, int) and not one.isdigit()),
    *((torch({"limit": one}), SHARE) for one in PERCENTS if one not in ("60", 60)),
    *((budget(device={"limit": one}), LIMIT) for one in ("40GB", "40G", "40 gb", "40Gi", "40960MB", "４０GiB")),
    *((budget(device={"limit": one}), PART) for one in ("90", 90, "0.9", 0.9, "90 percent", "９０%", ".9")),
    *((torch({word: "4GiB"}), SIZE) for word in WORDS),
    *((torch({word: "4GB"}), SIZE) for word in WORDS),
    *((torch({word: 4 << 30}), SIZE) for word in WORDS),
    *((torch({word: "60%"}), SHARE) for word in (*WORDS, *PARTS)),
    *((torch({word: one}), SHARE) for word in PARTS for one in (0.6, "0.6", 60, "60", "60 %")),
    *((budget(device={word: "40GiB"}), LIMIT) for word in (*WORDS, "total", "usable", "budget") if word != "budget"
      and word not in ("total", "usable")),
    *((budget(device={word: "40GB"}), LIMIT) for word in WORDS),
    *((budget(device={word: "90%"}), PART) for word in (*WORDS, *PARTS)),
    *((budget(device={word: one}), PART) for word in PARTS for one in (0.9, "0.9", 90)),
    *((budget(devices={"0": {word: "40GiB"}}), budget(devices={"0": {"limit": "40GiB"}})) for word in WORDS),
    *((budget(**{word: "40GiB"}), LIMIT) for word in WORDS if word not in ("cap", "max_mem_")),
    *((budget(**{word: "90%"}), PART) for word in PARTS),
    (budget(device={"limit_gb": 40}), LIMIT),
    (budget(device={"memory_mb": 40960}), LIMIT),
    (budget(device={"memory": 40}), LIMIT),
    (torch({"limit_mb": 4096}), SIZE),
    (torch({"memory_gb": 4}), SIZE),
    (budget(device={"share": "90%"}), PART),
    # a mapping in another shape
    (budget(devices={"limit": "90%"}), PART),
    (budget(devices={"limit": "90%", "reserve": "2GiB"}), budget(device={"limit": "90%", "reserve": "2GiB"})),
    (budget(devices={"0": {"limit": "40GiB"}, "limit": "90%"}),
     budget(device={"limit": "90%"}, devices={"0": {"limit": "40GiB"}})),
    (budget(device={"reserve": "2GiB"}, devices={"limit": "90%"}), budget(device={"limit": "90%", "reserve": "2GiB"})),
    (budget(device={"0": {"limit": "40GiB"}}), budget(devices={"0": {"limit": "40GiB"}})),
    (budget(device={"limit": "90%", "0": {"limit": "40GiB"}}),
     budget(device={"limit": "90%"}, devices={"0": {"limit": "40GiB"}})),
    (budget(device={"NVIDIA A100*": {"limit": "40GiB"}}), budget(devices={"NVIDIA A100*": {"limit": "40GiB"}})),
    (budget(device="40GiB"), LIMIT),
    (budget(device="40GB"), LIMIT),
    (budget(device="90%"), PART),
    (budget(device=0.9), PART),
    (budget(devices="90%"), PART),
    (budget(device=["90%"]), PART),
    (budget(device=[{"limit": "40GiB"}]), LIMIT),
    (budget(device=[{"limit": "40GiB"}, {"reserve": "2GiB"}]), budget(device={"limit": "40GiB", "reserve": "2GiB"})),
    (budget(devices=[{"0": {"limit": "40GiB"}}]), budget(devices={"0": {"limit": "40GiB"}})),
    (budget(devices={"0": "40GiB"}), budget(devices={"0": {"limit": "40GiB"}})),
    (budget(devices={"0": "40%"}), budget(devices={"0": {"limit": "40%"}})),
    (budget(devices={"0": "40GB"}), budget(devices={"0": {"limit": "40GiB"}})),
    (budget(devices={"0": 0.4}), budget(devices={"0": {"limit": "40%"}})),
    (torch("60%"), SHARE), (torch("60"), SHARE), (torch(60), SHARE), (torch(0.6), SHARE), (torch("60 percent"), SHARE),
    (torch("4GiB"), SIZE), (torch("4GB"), SIZE), (torch("4 gigs"), SIZE), (torch(4 << 30), SIZE),
    (torch("share 60%"), SHARE), (torch("share: 60%"), SHARE), (torch("share=60%"), SHARE), (torch("limit 4GiB"), SIZE),
    (torch(["share", "60%"]), SHARE), (torch([{"share": "60%"}]), SHARE), (torch(["60%"]), SHARE),
    (torch([{"limit": "4GiB"}, {"nccl": 1}]), torch({"limit": "4GiB", "nccl": 1})),
    (torch({"share 60%": None}), SHARE), (torch({"share:60%": None}), SHARE), (torch({"share=60%": None}), SHARE),
    (torch({"share 60": None}), SHARE), (torch({"limit 4GiB": None}), SIZE), (torch({"limit 4GB": None}), SIZE),
    (torch({"shar 60%": None}), SHARE), (torch({"share : 60%": None}), SHARE),
    ({"version": 1, "frameworks": {"torch {share": "60%}"}}, SHARE),
    ({"version": 1, "frameworks": {"torch{share": "60%}"}}, SHARE),
    ({"version": 1, "frameworks": {"torch:{share": "60%}"}}, SHARE),
    ({"version": 1, "frameworks": {"torch = {share": "60%}"}}, SHARE),
    ({"version": 1, "frameworks": {"pytorch {limit": "4GiB}"}}, SIZE),
    ({"version": 1, "frameworks": {"torch 60%": None}}, SHARE),
    ({"version": 1, "frameworks": {"torch: 60%": None}}, SHARE),
    ({"version": 1, "frameworks": {"torch": None, "share": "60%"}}, SHARE),
    ({"version": 1, "frameworks": {"torch": None, "limit": "4GiB"}}, SIZE),
    ({"version": 1, "frameworks": [{"torch": {"share": "60%"}}]}, SHARE),
    ({"version": 1, "frameworks": [{"torch": {"share": "60%"}}, {"jax": {"limit": "4GiB"}}]},
     {"version": 1, "frameworks": {"torch": {"share": "60%"}, "jax": {"limit": "4GiB"}}}),
    ({"version": 1, "frameworks": ["torch", "jax"]},
     {"version": 1, "frameworks": {"torch": {"share": "50%"}, "jax": {"share": "50%"}}}),
    ({"version": 1, "frameworks": "pytorch"}, budget()),
    ({"version": 1, "frameworks": {"torch": {"share": "80%"}, "jax": None}},
     {"version": 1, "frameworks": {"torch": {"share": "80%"}, "jax": {"share": "10%"}}}),
    ({"version": 1, "frameworks": {"torch": {"share": "80%"}, "jax": {}}},
     {"version": 1, "frameworks": {"torch": {"share": "80%"}, "jax": {"share": "10%"}}}),
    (torch({"limit": 1, "5GiB": None}), torch({"limit": "1.5GiB"})),
    (torch({"share": 33, "3%": None}), torch({"share": "33.3%"})),
    (torch({"limit": "1,5GiB"}), torch({"limit": "1.5GiB"})),
    (torch({"limit": "1.5"}), torch({"limit": "1.5GiB"})),
    # the top level
    ({"version": 1, "framworks": {"torch": {"share": "60%"}}}, SHARE),
    ({"version": 1, "framework": {"torch": {"share": "60%"}}}, SHARE),
    ({"version": 1, "libraries": {"torch": {"share": "60%"}}}, SHARE),
    ({"version": 1, "budget": {"torch": {"share": "60%"}}}, SHARE),
    ({"version": 1, "memory": {"torch": {"share": "60%"}}}, SHARE),
    ({"version": 1, "torch": {"share": "60%"}}, SHARE),
    ({"version": 1, "torch": {"share": "60%"}, "jax": {"limit": "4GiB"}},
     {"version": 1, "frameworks": {"torch": {"share": "60%"}, "jax": {"limit": "4GiB"}}}),
    ({"verison": 1, **torch({"share": "60%"})} | {"version": None}, SHARE),
    ({"verison": 1, "framworks": {"torch": {"share": "60%"}}}, SHARE),
    ({"frameworks": {"torch": {"share": "60%"}}}, SHARE),
    ({"version": 1}, budget()),
    ({"version": "1", "frameworks": {"torch": {"share": "60%"}}}, SHARE),
    *(({"version": one, "frameworks": {"torch": {"share": "60%"}}}, SHARE)
      for one in ("1.0", 1.0, "v1", True, None, 0)),
    (budget(gpu={"limit": "40GiB"}), LIMIT), (budget(gpus={"0": {"limit": "40GiB"}}),
                                             budget(devices={"0": {"limit": "40GiB"}})),
    (budget(card={"limit": "40GiB"}), LIMIT), (budget(whatever={"limit": "40GiB"}), LIMIT),
    (budget(per_gpu={"0": {"limit": "40GiB"}}), budget(devices={"0": {"limit": "40GiB"}})),
    (budget(whatever={"interval": "1s"}), budget(monitor={"interval": "1s"})),
    (budget(limit="90%"), PART), (budget(reserve="2GiB"), budget(device={"reserve": "2GiB"})),
    ({"version": 1, "frameworks": {"torch": None}, "share": "60%"}, SHARE),
    # single values
    (budget(device={"reserve": "none"}), budget(device={"reserve": "auto"})),
    (budget(device={"reserve": 0}), budget()), (budget(device={"reserve": "5%"}), budget()),
    (budget(device={"reserve": "2GB"}), budget(device={"reserve": "2GiB"})),
    (budget(device={"reserve": 2048}), budget(device={"reserve": "2048MiB"})),
    (budget(device={"overhead": "2GiB"}), budget(device={"reserve": "2GiB"})),
    (budget(device={"reserved": "2GiB"}), budget(device={"reserve": "2GiB"})),
    (budget(device={"headroom": "2GiB"}), budget(device={"reserve": "2GiB"})),
    (budget(device={"limit": "max"}), budget(device={"limit": "100%"})),
    (budget(device={"limit": None}), budget()),
    (budget(monitor=True), budget(monitor={})), (budget(monitor="on"), budget(monitor={})),
    (budget(monitor=None), budget(monitor={})), (budget(monitor="off"), budget()),
    (budget(monitor={"warn": 70}), budget(monitor={"warn": "70%"})),
    (budget(monitor={"warn": 0.7}), budget(monitor={"warn": "70%"})),
    (budget(monitor={"warn": "70 percent"}), budget(monitor={"warn": "70%"})),
    (budget(monitor={"interval": "5m"}), budget(monitor={"interval": "5min"})),
    (budget(monitor={"interval": 5000}), budget(monitor={"interval": "5000ms"})),
    (budget(monitor={"forecast": "off"}), budget(monitor={"forecast": 0})),
    (budget(monitor={"timeline_size": 64}), budget(monitor={"timeline_size": "64MiB"})),
    (budget(monitor={"timeline_size": "64MB"}), budget(monitor={"timeline_size": "64MiB"})),
    (budget(monitor={"top": "yes"}), budget(monitor={"top": True})),
    (budget(monitor={"log_file": "a.jsonl"}), budget(monitor={"timeline": "a.jsonl"})),
    (budget(monitor={"frequency": "2s"}), budget(monitor={"interval": "2s"})),
    (budget(on_busy="error"), budget(on_busy="raise")), (budget(on_busy="Warning"), budget(on_busy="warn")),
    (budget(suspend=True), budget(suspend={"when_idle": "10min"})), (budget(suspend="off"), budget()),
    (budget(suspend={"when_idle": "5m"}), budget(suspend={"when_idle": "5min"})),
    (budget(suspend={"when_idle": "never"}), budget()),
    (budget(suspend={"when_idle": 0}), budget(suspend={"when_idle": "10min"})),
    (budget(suspend={"idle": "1h"}), budget(suspend={"when_idle": "1h"})),
    (budget(suspend={"by_others": "yes"}), budget(suspend={"by_others": True})),
    (budget(suspend={"host_memory": "ignored"}), budget(suspend={"host_memory": "ignore"})),
    (budget(when_idle="10min"), budget(suspend={"when_idle": "10min"})),
    (budget(whatever={"by_others": True}), budget(suspend={"by_others": True})),
    (budget(monitor={}, on_pressure="trim"), budget(monitor={}, on_pressure=["trim"])),
    (budget(monitor={}, on_pressure=["free"]), budget(monitor={}, on_pressure=["trim"])),
    (budget(monitor={}, on_pressure=["trim", "trim"]), budget(monitor={}, on_pressure=["trim"])),
    (budget(on_pressure=["trim"]), budget(monitor={}, on_pressure=["trim"])),
    (budget(doctor={"ignore": "mig"}), budget(doctor={"ignore": ["mig"]})),
    (budget(doctor={"skip": ["mig"]}), budget(doctor={"ignore": ["mig"]})),
    (torch({"share": "60%", "nccl": "1"}), torch({"share": "60%", "nccl": 1})),
    (torch({"share": "60%", "communicators": 1}), torch({"share": "60%", "nccl": 1})),
    (torch({"share": "60%", "memory": "4GiB"}), SHARE),
    (torch({"share": "60%", "growth": True}), SHARE),
    *(({"version": 1, "frameworks": {"tensorflow": {"share": "60%", "growth": word}}},
       {"version": 1, "frameworks": {"tensorflow": {"share": "60%", "growth": True}}})
      for word in ("yes", "on", "true", "True", "1")),
    ({"version": 1, "frameworks": {"tensorflow": {"growth": False}}},
     {"version": 1, "frameworks": {"tensorflow": {"share": "50%", "growth": False}}}),
    ({"version": 1, "frameworks": {"pycuda": {"context": "own"}}},
     {"version": 1, "frameworks": {"pycuda": {"share": "50%", "context": "own"}}}),
    *(({"version": 1, "frameworks": {alias: {"share": "60%"}}}, {"version": 1, "frameworks": {name: {"share": "60%"}}})
      for name, spec in SPECS.items() for alias in (*spec.aliases, name.upper(), name.title(), f" {name}", f"{name}s")),
]  # fmt: skip
BOTH = torch({"min": "5%", "max": "15%"})
WRONG += [
    *((torch({low: "5%", high: "15%"}), BOTH) for low in ("min", "Min", "minimum", "at_least", "floor", "mins", " min")
      for high in ("max", "MAX", "maximum", "at-most", "up to", "ceiling", "maxx")),
    *((torch({low: "5%", high: "15%"}), BOTH) for low, high in
      (("minn", "max"), ("min", "mx"), ("mn", "max"), ("mix", "max"), ("min", "mix"), ("min", "share"))),
    *((torch({"min": one, "max": "15%"}), BOTH) for one in ("5", 5, 0.05, "0.05", "5 %", "5 percent")),
    *((torch({"min": "5%", "max": one}), BOTH) for one in ("15", 15, 0.15, "15pct", "１５%")),
    *((torch({"min": "1GiB", "max": one}), torch({"min": "1GiB", "max": "4GiB"})) for one in SIZES),
    *((torch({"min": one, "max": "100%"}), torch({"min": "4GiB", "max": "100%"})) for one in SIZES),
    *((torch({"min": "5%", "max": one}), torch({"min": "5%", "max": "100%"})) for one in ("all", "full", "unlimited")),
    *((torch({"min": one, "max": "15%"}), torch({"min": "2MiB", "max": "15%"})) for one in (0, "0", "0%", "0GiB")),
    *((torch({"min": one}), torch({"min": "5%", "max": "100%"})) for one in ("5%", 5, "5", 0.05)),
    (torch({"min": "5%", "nccl": 1}), torch({"min": "5%", "max": "100%", "nccl": 1})),
    (torch({"max": "4GiB", "nccl": 1}), torch({"limit": "4GiB", "nccl": 1})),
    (torch({"min": "1GiB", "limit": "4GiB"}), torch({"min": "1GiB", "max": "4GiB"})),
    (torch({"limit": "1GiB", "max": "4GiB"}), torch({"min": "1GiB", "max": "4GiB"})),
    (torch({"share": "60%", "max": "4GiB"}), torch({"min": "60%", "max": "4GiB"})),
    (torch({"share": "60%", "max": "40%"}), SHARE), (torch({"limit": "4GiB", "min": "5GiB"}), SIZE),
    (torch({"min": "5%", "max": "15%", "share": "60%"}), BOTH),
    (torch({"min": "15%", "max": "5%"}), torch({"min": "15%", "max": "15%"})),
    (torch({"min 5%": None, "max 15%": None}), BOTH),
    (torch([{"min": "5%"}, {"max": "15%"}]), BOTH),
    ({"version": 1, "frameworks": {"torch": {"min": "80%", "max": "90%"}, "jax": {}}},
     {"version": 1, "frameworks": {"torch": {"min": "80%", "max": "90%"}, "jax": {"share": "10%"}}}),
]  # fmt: skip
GPUS = {
    "0": ["gpu0", "GPU0", "gpu:0", "gpu 0", "GPU-0", "gpu_0", "device0", "cuda 0", "cuda0", "00", "card0", "０", "٠",
          "०", "nvidia0", "#0", "index 0", "cuda:００", "gpu[0]", "GPU[00]"],
    "7": ["gpu7", "007", "cuda:007", "７", "٧", "device 7"],
    "*h200*": ["h200"], "*H200*": ["H200"], "*a100*80gb*": ["a100-80gb", "a100_80gb", "a100 80gb"],
    "*rtx*4090*": ["rtx4090", "rtx 4090", "rtx-4090"], "*NVIDIA*": ["NVIDIA"],
    "*": ["all", "any", "gpu", "default", "ALL"],
    "*a100*": ["ａ100"],
}  # fmt: skip
WRONG += [
    (budget(devices={key: {"limit": "40GiB"}}), budget(devices={meant: {"limit": "40GiB"}}))
    for meant, keys in GPUS.items()
    for key in keys
]


@pytest.mark.parametrize(("wrong", "meant"), WRONG, ids=[str(n) for n in range(len(WRONG))])
def test_one_round_of_fixes_does_what_was_meant(wrong: dict[str, Any], meant: dict[str, Any]) -> None:
    data = copy.deepcopy(wrong)
    if data.get("version", 1) is None and "verison" in data:
        del data["version"]
    assert mended(data, 1)[0] == from_mapping(meant)


HIDDEN = [
    ({"version": 1, "memory": {"pytorch": {"share": "60%"}}}, SHARE),
    (budget(sleep={"idle_after": "10min"}), budget(suspend={"when_idle": "10min"})),
    (budget(watch={"every": "1s"}), budget(monitor={"interval": "1s"})),
    ({"version": 1, "framworks": {"pytorch": {"shar": "60%"}}}, SHARE),
    (budget(devcie={"limt": "40GB"}), LIMIT),
    (torch({"shares": 60, "limits": "4GB"}), SHARE),
]


@pytest.mark.parametrize(("wrong", "meant"), HIDDEN, ids=[str(n) for n in range(len(HIDDEN))])
def test_a_mistake_below_another_takes_one_round_each(wrong: dict[str, Any], meant: dict[str, Any]) -> None:
    assert mended(copy.deepcopy(wrong), 3)[0] == from_mapping(meant)


def test_a_file_of_a_newer_version_is_not_told_to_write_1() -> None:
    for version in (2, 3, "2", "v2", "2.0", 10**8):
        (problem,) = errors_of({"version": version, "frameworks": {"torch": {"share": "50%"}}})
        assert "newer memguard" in problem.message and problem.fix.startswith("update memguard")
        assert "version: 1'" not in problem.fix


# Sums

SHARES = st.integers(1, 999).map(lambda tenths: f"{tenths / 10:g}%")
BYTES = (st.integers(2, 40_000) | st.integers(2, 30)).map(lambda mib: f"{mib}MiB")
"""Small ones too, for which no limit can be lowered below its smallest size."""
ROOMS = st.fixed_dictionaries({"limit": BYTES}, optional={"reserve": BYTES})
SUMS = st.fixed_dictionaries(
    {
        "version": st.just(1),
        "frameworks": st.dictionaries(
            st.sampled_from(FRAMEWORKS),
            SHARES.map(lambda share: {"share": share})
            | BYTES.map(lambda size: {"limit": size})
            | (SHARES | BYTES).map(lambda least: {"min": least, "max": least}),
            min_size=1,
        ),
    },
    optional={"device": ROOMS, "devices": st.dictionaries(st.sampled_from(["0", "1", "NVIDIA H*"]), ROOMS, max_size=2)},
)


@settings(max_examples=300, deadline=None)
@given(SUMS)
def test_sums_that_do_not_fit_take_one_round(data: dict[str, Any]) -> None:
    wrong = copy.deepcopy(data)
    problems = errors_of(wrong)
    budget, _ = mended(wrong, 1)
    for name, entry in budget.frameworks.items():
        asked = data["frameworks"][name]
        assert (entry.share is None) == ("share" not in asked), "a share stays a share, a size a size"
        before = from_mapping({"version": 1, "frameworks": {name: asked}}).frameworks[name]
        assert type(entry.guaranteed) is type(before.guaranteed) and entry.guaranteed <= before.guaranteed
        assert entry.max == before.max
    if not problems:
        assert wrong == data


@settings(max_examples=200, deadline=None)
@given(SUMS)
@example(
    {
        "version": 1,
        "frameworks": {"torch": {"share": "33.4%"}, "tensorflow": {"limit": "2MiB"}, "cupy": {"limit": "2MiB"}},
        "device": {"limit": "6MiB"},
    }
)
def test_lowering_the_frameworks_fits_as_well_as_raising_the_limit(data: dict[str, Any]) -> None:
    """The other half of 'raise the limit to …, or lower the frameworks …, for example to …'."""
    for problem in errors_of(data):
        if "raise the limit to" in problem.fix and "for example to" in problem.fix:
            lowered = copy.deepcopy(data)
            lower(lowered, problem.fix.partition("for example to ")[2])
            assert lowered != data
            left = [p for p in errors_of(lowered) if "leaves nothing" not in p.message]
            assert left == [], (problem.fix, left)


LARGE = st.integers(1500, 40_000).map(lambda mib: f"{mib}MiB")
EXTRAS = st.fixed_dictionaries({}, optional={"nccl": st.integers(1, 3)})


@settings(max_examples=200, deadline=None)
@given(
    LARGE,
    st.dictionaries(
        st.sampled_from(FRAMEWORKS),
        st.tuples(
            SHARES.map(lambda share: {"share": share})
            | LARGE.map(lambda size: {"limit": size})
            | SHARES.map(lambda share: {"min": share, "max": "100%"}),
            EXTRAS,
        ),
        min_size=1,
    ),
)
def test_with_the_default_reserve_a_sum_takes_one_round_of_check_and_plan(
    limit: str, parts: dict[str, tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    """What is suggested leaves room for `reserve: auto` on every kind of GPU. Both ways on are followed."""
    frameworks = {name: {**part, **(more if name == "torch" else {})} for name, (part, more) in parts.items()}
    data = {"version": 1, "device": {"limit": limit}, "frameworks": frameworks}
    for problem in errors_of(data):
        if "more than this limit" not in problem.message:
            continue
        ways = [copy.deepcopy(data)]
        follow(ways[0], problem)
        if "for example to" in problem.fix:
            ways.append(copy.deepcopy(data))
            lower(ways[1], problem.fix.partition("for example to ")[2])
        for way in ways:
            found = from_mapping(way)
            for architecture in ("turing", "hopper", "unknown"):
                gpu = Device("GPU-0", "A large GPU", 0, 1 << 50, 0, architecture, ordinal=0)
                try:
                    plan(found, [gpu])
                except PlanError as error:  # a share of a small limit
                    assert "the smallest cap" in str(error), (problem.fix, str(error))


SIZES = st.integers(GRANULE, 60 * 2**20) | st.integers(1, 30).map(lambda pages: pages * GRANULE)


@settings(max_examples=500, deadline=None)
@given(
    st.dictionaries(st.sampled_from(FRAMEWORKS[:3]), st.fractions(Fraction(1, 1000), 1, max_denominator=1000)),
    st.dictionaries(st.sampled_from(FRAMEWORKS[3:]), SIZES),
    SIZES,
)
@example({"torch": Fraction(334, 1000)}, {"tensorflow": GRANULE, "cupy": GRANULE}, 3 * GRANULE)
@example({}, dict(zip(FRAMEWORKS, [3 * 2**20] * 4 + [400 * 2**20], strict=False)), 412 * 2**20 - 1)
def test_parts_that_fit_do(shares: dict[str, Fraction], limits: dict[str, int], room: int) -> None:
    """They fit, none is raised, none is lowered to less than the smallest cap; if there are none, nothing would do."""
    if sum(shares.values()) * room + sum(limits.values()) <= room:
        return
    found = fitting(shares, limits, room)
    after = {**shares, **limits, **found}
    assert all(found[name] < {**shares, **limits}[name] for name in found)
    if found:
        assert sum(after[n] for n in shares) * room + sum(after[n] for n in limits) <= room
        assert all(found[n] >= GRANULE for n in limits if n in found)
        assert all(found[n] * room >= GRANULE for n in shares if n in found and shares[n] * room >= GRANULE)
    else:
        half, total = room / 2 if limits else room, sum(shares.values())
        assert room <= 2 * len(limits) * GRANULE or any(s / total * half < 2 * GRANULE for s in shares.values())


def test_the_corpus_is_large() -> None:
    assert len(WRONG) > 400
