"""The section of docs/results.md, and the row of README, that `elastic.py` fills. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from _exchange_tables import PLAIN
from _listed import ELASTIC_CONTROLS, ELASTIC_PAIRS, ELASTIC_SEEDS, MIX, SIX

MIB, GIB = 1 << 20, 1 << 30
BEGINS = "A sibling's idle cache has all but 2 GiB of the card, each of six asks for 8 GiB"


def whole(scenarios: Mapping[str, Any]) -> list[str]:
    """Each table whose scenarios were measured to their end."""
    parts = (_reclaim, _moves, _burst, _pool, _mix, _schedules)
    found = ["## No avoidable out-of-memory error"]
    for part in parts:
        try:
            lines = part(scenarios)
        except KeyError:  # not measured, or it died: what it lacks stands with the checks
            lines = []
        found += ["", *lines] if lines else []
    return found


def row(scenarios: Mapping[str, Any]) -> tuple[str, str]:
    """What README says of it: requests that were served, and the slowest p99 of the moves."""
    with_it = [one for name in SIX if "seconds" in (one := scenarios.get(f"reclaim {name}", {}))]
    plain = [one for name in SIX if "seconds" in (one := scenarios.get(f"reclaim {name}, plain", {}))]
    served = [one for one in with_it if one["error"] is None]
    said = (
        f"{sum(one['error'] is not None for one in plain)} of {len(plain)} fail without memguard; {len(served)} of "
        f"{len(with_it)} are served with it"
    )
    slowest = [pair["p99_ms"] for pair in scenarios.get("moves", {}).get("blocks", {}).get("pairs", {}).values()]
    if slowest and None not in slowest:
        said += f"; 8 GiB go from one framework's cache to another's array in at most {max(slowest):.0f} ms (p99)"
    return BEGINS, said


def _reclaim(scenarios: Mapping[str, Any]) -> list[str]:
    rows = []
    for name in SIX:
        one, plain = scenarios.get(f"reclaim {name}", {}), scenarios.get(f"reclaim {name}, plain", {})
        if "seconds" not in one and "seconds" not in plain:
            continue
        without = "–"
        if "seconds" in plain:
            failed = plain["error"]
            without = f"`{failed['exception'].rpartition('.')[2]}`" if failed else "served"
            without += f" after {plain['seconds']:.1f} s"
        with_it, back = "–", "–"
        if "seconds" in one:
            with_it = f"**refused** after {one['seconds']:.1f} s" if one["error"] else f"{one['seconds']:.3f} s"
            back = "–" if one["error"] else f"{one['given_back'] / GIB:.1f} GiB"
        rows.append(f"| {PLAIN[name]} | {without} | {with_it} | {back} |")
    if not rows:
        return []
    return [
        "A sibling's idle cache holds all but 2 GiB of the card (CuPy's for PyTorch, PyTorch's for the others), and",
        "each asks for 8 GiB: CuPy, PyCUDA and Numba by an allocation, the others through `memguard.retry`. The limits",
        "of TensorFlow and JAX never move: with memguard another process holds what those keep from PyTorch's cache:",
        "",
        "| asks for 8 GiB | without memguard | with memguard | came back, by NVML |",
        "| --- | --- | --- | --- |",
        *rows,
    ]


def _moves(scenarios: Mapping[str, Any]) -> list[str]:
    one = scenarios["moves"]
    rows = []
    for pair in ELASTIC_PAIRS:
        blocks, pieces = one["blocks"]["pairs"][pair], one["pieces"]["pairs"][pair]
        giver, _, taker = pair.partition(" > ")
        rows.append(
            f"| {PLAIN[giver]} to {PLAIN[taker]} | {_percentiles(blocks)} | {_one(blocks['by_hand_p50_ms'])} | "
            f"{_percentiles(pieces)} |"
        )
    return [
        "8 GiB from one framework's idle cache to another's array, in one allocation, p50 / p99 in ms. By hand: the",
        "giver is trimmed first, so that it is what the driver itself takes; the median of fewer moves:",
        "",
        "| | from blocks of 64 MiB | by hand | from pieces of 2 MiB |",
        "| --- | --- | --- | --- |",
        *rows,
    ]


def _percentiles(one: Mapping[str, Any]) -> str:
    if not one["n"]:
        return f"failed: {one['error']}"
    return f"{one['p50_ms']:.1f} / {one['p99_ms']:.1f} ({one['n']} moves)"


def _one(ms: float | None) -> str:
    return "–" if ms is None else f"{ms:.1f}"


def _burst(scenarios: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, label in (("burst", "elastic shares"), ("burst, fixed shares", "fixed shares")):
        if "asked_min" in (one := scenarios.get(name, {})):
            least, most = one["asked_min"], one["asked_max"]
            rows.append(f"| {label} | {_asked(least)} | {_asked(most)} |")
    if not rows:
        return []
    of = scenarios["burst"] if "asked_min" in scenarios.get("burst", {}) else scenarios["burst, fixed shares"]
    return [
        f"PyTorch's bytes are live and idle in turn. CuPy asks for its min of {of['min'] / GIB:.0f} GiB while they are "
        f"live, and for its max of",
        f"{of['max'] / GIB:.0f} GiB when they are idle (one tick: {of['tick_ms']:.0f} ms):",
        "",
        "| | its min | its max |",
        "| --- | --- | --- |",
        *rows,
    ]


def _asked(one: Mapping[str, Any]) -> str:
    served = f"{one['served']} of {one['n']}, {one['at_once']} at the first try"
    return served if one["p50_ms"] is None else f"{served}; p50 {one['p50_ms']:.1f}, p99 {one['p99_ms']:.1f} ms"


def _pool(scenarios: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, label in (("pool", "`strategy: pool`"), ("pool, caps", "`strategy: caps`")):
        if "in_turn" in (one := scenarios.get(name, {})):
            cells = [f"{each['at_peak'] / GIB:.1f}" for each in one["in_turn"].values()]
            rows.append(
                f"| {label} | {', '.join(cells)} | {one['nvml']['max_bytes'] / GIB:.2f} | {one['overhead'] / GIB:.2f} |"
            )
            names = [PLAIN[each] for each in one["in_turn"]]
    if not rows:
        return []
    return [
        "Five frameworks take 8 GiB each and free them, one after the other. GiB of the process, by NVML:",
        "",
        f"| | at the peak of {', '.join(names)} | at most | of it overhead |",
        "| --- | --- | --- | --- |",
        *rows,
    ]


def _mix(scenarios: Mapping[str, Any]) -> list[str]:
    one = scenarios["mix"]
    rows = []
    for library in MIX:
        for way, of in one["figures"].get(library, {}).items():
            ratio = of.get("ratio")
            spread = f"{ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})" if ratio else "–"
            rows.append(f"| {PLAIN[library]}, {way}: {one['says'][library][way]} | {of['us']:.2f} | {spread} |")
    lacking = [f"- {key}: {text}" for key, text in {**one["missing"], **one["failed"]}.items()]
    return [
        f"A mix of allocations from 1 KiB to 64 MiB, {one['live']} live at a time, each with the end of another: "
        "medians with",
        "their 95 % intervals. Ratios are to the first row of the library:",
        "",
        "| | µs | ratio |",
        "| --- | --- | --- |",
        *rows,
        *(["", *lacking] if lacking else []),
    ]


def _schedules(scenarios: Mapping[str, Any]) -> list[str]:
    rows = []
    for label, begins, seeds in (
        ("elastic shares", "schedule", ELASTIC_SEEDS),
        ("fixed shares", "fixed shares, schedule", ELASTIC_CONTROLS),
    ):
        of = [scenarios.get(f"{begins} {seed}", {}) for seed in seeds]
        of = [one for one in of if "avoidable" in one]
        keys = ("requests", "refused", "infeasible", "blocked", "avoidable", "wrong")
        if of:
            rows.append(f"| {label}, {len(of)} | {' | '.join(str(sum(one[key] for one in of)) for key in keys)} |")
    if not rows:
        return []
    return [
        "Seeded schedules of six frameworks whose caps add up to twice the limit, judged afterwards by an oracle that",
        "knows what was live, and nothing of memguard:",
        "",
        "| schedules | requests | refused | had no room | blocked by fragments | avoidable | wrong values |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *rows,
    ]
