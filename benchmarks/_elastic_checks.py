"""The bars of `elastic.py`, each as (passed, figure). Pure; the names are those of `_listed.ELASTIC`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import _listed
from _run import GIB, MIB, Judge, Tell, judge_of, judged

CONTROLS = tuple(f"reclaim {name}, plain" for name in _listed.SIX)
FREE = 2 * GIB + 700 * MIB
"""At most so much of the card may be free when a framework asks for 8 GiB: two, and what no other process can take."""
CACHED = 100 * GIB
"""At least so much of it is the sibling's idle cache."""
SLACK = 64 * MIB
"""What kernels and slabs may change in the process's figure meanwhile."""
MOVES, MOVE_MS = 100, 100.0
GROWN = 256 * MIB
"""What a process may grow by in a move of 8 GiB: what the giver keeps, and what the taker's allocator rounds up."""
TIMES = 200
LIVE = 0.9
"""Of its max, what PyTorch has live at least while CuPy asks for its min."""
PEAKS = 1.05
APART = 0.9
"""Of the sum of all peaks, what caches apart hold at least."""
REQUESTS, REFUSED = 400, 20
"""Of all schedules together, at least: else they asked for nothing much."""
MIX_ROUNDS = 15
MIX_ALIKE = 1.10


def elastic_checks(s: Mapping[str, Any]) -> dict[str, tuple[bool, str]]:
    """Of a run's scenarios, or of a part of them: what did not run has failed."""
    judges: dict[str, Judge] = {}
    for name in _listed.SIX:
        judges[f"reclaim {name}"] = judge_of(_reclaimed, s, f"reclaim {name}", name)
        judges[f"reclaim {name}, plain"] = judge_of(_failed_plain, s, f"reclaim {name}, plain", name)
    judges["moves"] = judge_of(_moves, s, "moves")
    judges["burst"] = judge_of(_burst, s, "burst")
    judges["burst, fixed shares"] = judge_of(_fixed, s, "burst, fixed shares")
    judges["pool"] = judge_of(_pool, s, "pool")
    judges["pool, caps"] = judge_of(_apart, s, "pool, caps")
    judges["mix"] = judge_of(_mix, s, "mix")
    judges["schedule *"] = functools.partial(_schedules, s=s)
    judges["fixed shares, schedule *"] = functools.partial(_schedules_fixed, s=s)
    return judged(_listed.ELASTIC, judges, s)


def _arranged(one: Mapping[str, Any]) -> bool:
    return bool(one["free"] <= FREE and one["cache"] >= CACHED)


def _card(one: Mapping[str, Any]) -> str:
    another = f", another process {one['another'] / GIB:.1f} GiB" if one["another"] else ""
    return (
        f"{one['sibling']}'s idle cache {one['cache'] / GIB:.1f} GiB{another}, {one['free'] / GIB:.2f} GiB free of the "
        "card"
    )


def _reclaimed(check: Tell, one: Mapping[str, Any], name: str) -> None:
    served, arranged, way = _listed.of_reclaim(name)
    took = f"{one['seconds']:.3f} s" if one["error"] is None else one["error"]["text"][:160]
    check(served, _arranged(one) and one["error"] is None, f"{took}; {_card(one)}")
    if one["error"] is not None:
        check(arranged, False, "it was not served")
        check(way, False, "it was not served")
        return
    lacked = one["asked"] - one["free"]
    back = f"{one['given_back'] / GIB:.2f} GiB came back by NVML, {lacked / GIB:.2f} GiB had been missing"
    check(arranged, one["given_back"] >= lacked - SLACK, back)
    check(way, one["right"] is True, "read back at eight places" if one["right"] else "other values were read back")


def _failed_plain(check: Tell, one: Mapping[str, Any], name: str) -> None:
    error = one["error"]
    said = f"{error['exception']}: {error['text'][:120]}" if error else "it was served"
    (control,) = _listed.of_reclaim_plain(name)
    check(control, _arranged(one) and error is not None, f"{said}; after {one['seconds']:.3f} s; {_card(one)}")


def _moves(check: Tell, one: Mapping[str, Any]) -> None:
    for pair in _listed.ELASTIC_PAIRS:
        blocks, pieces = one["blocks"]["pairs"][pair], one["pieces"]["pairs"][pair]
        times = (
            f"p50 {_ms(blocks['p50_ms'])}, p99 {_ms(blocks['p99_ms'])}, at most {_ms(blocks['max_ms'])} in "
            f"{blocks['n']} moves; trimmed by hand before {_ms(blocks['by_hand_p50_ms'])}; pieces of 2 MiB: p50 "
            f"{_ms(pieces['p50_ms'])}, p99 {_ms(pieces['p99_ms'])} in {pieces['n']}"
        )
        good = blocks["n"] >= MOVES and blocks["error"] is None and blocks["p99_ms"] <= MOVE_MS
        check(_listed.of_move(pair), good, str(blocks["error"] or times))
    both = [of["pairs"][pair] for of in (one["blocks"], one["pieces"]) for pair in _listed.ELASTIC_PAIRS]
    wrong, n = sum(of["wrong"] for of in both), sum(of["n"] for of in both)
    failed = [of["error"] for of in both if of["error"] is not None]
    check(
        _listed.MOVES_RIGHT,
        n > 0 and not wrong and not failed,
        f"{wrong} wrong, {n} moves {'; '.join(map(str, failed))}".rstrip(),
    )
    grown = max((of["most_grown"] for of in both if of["most_grown"] is not None), default=None)
    check(
        _listed.MOVES_STAY,
        grown is not None and grown <= GROWN and 0 < one["nvml"]["max_bytes"] <= one["limit"],
        f"by {(grown or 0) / MIB:.0f} MiB at most; {one['nvml']['max_bytes'] / GIB:.2f} of {one['limit'] / GIB:.0f} "
        f"GiB at most in {one['nvml']['samples']} samples",
    )
    least = min(of["n"] for of in one["pieces"]["pairs"].values())
    hands = [of["by_hand_p50_ms"] for of in one["blocks"]["pairs"].values()]
    slowest = _ms(max((ms for ms in hands if ms is not None), default=None))
    check(
        _listed.MOVES_BESIDE,
        least >= 3 and None not in hands,
        f"{least} moves from pieces of each pair or more; by hand at most {slowest}",
    )


def _ms(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1f} ms"


def _burst(check: Tell, one: Mapping[str, Any]) -> None:
    least, most = one["asked_min"], one["asked_max"]
    live = min(one["live"])
    name_min, name_max, name_right, name_limit = _listed.BURST
    check(
        name_min,
        one["alternations"] >= TIMES and least["at_once"] == least["n"] >= TIMES and live >= LIVE * one["max"],
        f"{least['at_once']} of {least['n']} at the first try, at most {_ms(least['max_ms'])}, with "
        f"{live / GIB:.1f} GiB of PyTorch live or more {least['text'] or ''}".rstrip(),
    )
    check(
        name_max,
        most["served"] == most["n"] >= TIMES and most["max_ms"] <= one["tick_ms"],
        f"{most['served']} of {most['n']}, p50 {_ms(most['p50_ms'])}, p99 {_ms(most['p99_ms'])}, at most "
        f"{_ms(most['max_ms'])}, one tick is {one['tick_ms']:.0f} ms {most['text'] or ''}".rstrip(),
    )
    wrong = least["wrong"] + most["wrong"]
    check(name_right, not wrong and least["n"] > 0, f"{wrong} wrong")
    inside = 0 < max(one["most_own"], one["nvml"]["max_bytes"]) <= one["limit"]
    check(name_limit, inside, f"{one['nvml']['max_bytes'] / GIB:.2f} of {one['limit'] / GIB:.0f} GiB")


def _fixed(check: Tell, one: Mapping[str, Any]) -> None:
    least, most = one["asked_min"], one["asked_max"]
    check(
        _listed.BURST_FIXED,
        least["n"] >= 10 and least["served"] == least["n"] and most["served"] == 0,
        f"its share {least['served']} of {least['n']} times, the max {most['served']} of {most['n']}: {most['text']}",
    )


def _peaked(one: Mapping[str, Any]) -> tuple[int, str]:
    """The most that the process held, and its overhead, by NVML."""
    most = max(one["nvml"]["max_bytes"], *(each["at_peak"] for each in one["in_turn"].values()))
    return most, (
        f"{most / GIB:.2f} GiB at most in {one['nvml']['samples']} samples, overhead {one['overhead'] / GIB:.2f} GiB; "
        f"{len(one['in_turn'])} peaks of {one['peak'] / GIB:.0f} GiB"
    )


def _pool(check: Tell, one: Mapping[str, Any]) -> None:
    within, drawing, right = _listed.POOL_PEAKS
    most, said = _peaked(one)
    bar = one["peak"] * PEAKS + one["overhead"]
    enough = len(one["in_turn"]) == 5 and all(of["bytes"] >= one["peak"] for of in one["in_turn"].values())
    check(within, enough and one["peak"] <= most <= bar, said)
    theirs = {name: one["in_turn"][name]["at_peak"] for name in _listed.POOLED}
    figures = ", ".join(f"{name} {size / GIB:.2f}" for name, size in theirs.items())
    check(drawing, enough and one["peak"] <= max(theirs.values()) <= bar, f"GiB at the peak of {figures}")
    wrong = sum(of["wrong"] for of in one["in_turn"].values())
    check(right, enough and not wrong, f"{wrong} arrays wrong")


def _apart(check: Tell, one: Mapping[str, Any]) -> None:
    most, said = _peaked(one)
    bar = APART * len(one["in_turn"]) * one["peak"]
    check(_listed.POOL_APART, len(one["in_turn"]) == 5 and most - one["overhead"] >= bar, said)


def _mix(check: Tell, one: Mapping[str, Any]) -> None:
    for library in _listed.MIX:
        found = one["figures"].get(library, {})
        lacking = [way for way in one["says"].get(library, ()) if found.get(way, {"rounds": 0})["rounds"] < MIX_ROUNDS]
        why = {**one["missing"], **one["failed"]}
        reasons = [f"{key}: {text}" for key, text in why.items() if key.startswith(f"{library}, ")]
        check(
            _listed.of_mix(library),
            {"caps", "pool"} <= set(found) and not lacking,
            "; ".join([*(_way(way, of) for way, of in found.items()), *reasons]) or "not run",
        )
        again = next((of["ratio"] for way, of in found.items() if way.endswith(", again") and "ratio" in of), None)
        check(
            _listed.of_mix_alike(library),
            again is not None and max(again["median"], 1 / again["median"]) <= MIX_ALIKE,
            "not run" if again is None else f"{again['median']:.3f} ({again['low']:.3f} to {again['high']:.3f})",
        )


def _way(way: str, of: Mapping[str, Any]) -> str:
    ratio = of.get("ratio")
    return f"{way} {of['us']:.2f} us" + (
        f" ({ratio['median']:.2f}, {ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else ""
    )


def _schedules(check: Tell, s: Mapping[str, Any]) -> None:
    of = [s[f"schedule {seed}"] for seed in _listed.ELASTIC_SEEDS if f"schedule {seed}" in s]
    avoidable, minima, within, right = _listed.SCHEDULES
    every = len(of) == len(_listed.ELASTIC_SEEDS)

    def total(key: str) -> int:
        return int(sum(one[key] for one in of))

    faults = "; ".join(f"schedule {one['seed']}: {one['faults'][0]}" for one in of if one["faults"])[:600]
    check(
        avoidable,
        every and total("requests") >= REQUESTS and total("refused") >= REFUSED and not total("avoidable"),
        f"{total('avoidable')} avoidable; {total('requests')} requests in {len(of)} schedules, {total('refused')} "
        f"refused: {total('infeasible')} had no room, {total('blocked')} were blocked by fragments {faults}".rstrip(),
    )
    check(minima, every and not total("minima"), f"{total('minima')} times not {faults}".rstrip())
    nearest = max((max(one["most_process"], one["nvml"]["max_bytes"]) / one["limit"] for one in of), default=0.0)
    looks, gap = (
        sum(one["nvml"]["samples"] for one in of),
        max((one["nvml"]["longest_gap_ms"] for one in of), default=0),
    )
    check(
        within,
        every and 0 < nearest <= 1 and looks > 0 and not total("above_limit"),
        f"{nearest:.1%} of it at most in {looks} samples, at most {gap:.0f} ms apart",
    )
    check(right, every and not total("wrong"), f"{total('wrong')} wrong")


def _schedules_fixed(check: Tell, s: Mapping[str, Any]) -> None:
    of = [s[name] for seed in _listed.ELASTIC_CONTROLS if (name := f"fixed shares, schedule {seed}") in s]
    check(
        _listed.SCHEDULES_FIXED,
        len(of) == len(_listed.ELASTIC_CONTROLS) and all(one["avoidable"] > 0 for one in of),
        f"{', '.join(str(one['avoidable']) for one in of)} avoidable of {sum(one['refused'] for one in of)} refused",
    )
