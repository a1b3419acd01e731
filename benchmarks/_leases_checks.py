"""What must hold in the result of `leases.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import _listed
from _leases_job import LEASE
from _leases_turns import COUNT, NAMES, WAIT
from _leases_turns import LEASE as TURN
from _run import GIB, Judge, Tell, judge_of, judged

WAITS = 5.0
"""Seconds for which the fifth is watched while it waits, once it runs."""
STARTS = 1.0
"""Seconds after the end of one within which the fifth must have its lease."""
EIGHTY = 80 * GIB
LONGEST = 150.0
"""Seconds for which one may wait for its turn: two copies out, one in, and another's work."""
FILLED = 0.85
"""Of a lease, at least: the rest is the context, the reserve, and what allocators round."""
KEPT = 2 * GIB
"""Of host memory that may be in use after the end, and was not before."""


def lease_checks(result: Mapping[str, Any]) -> dict[str, tuple[bool, str]]:
    """The bars, of the scenarios that ran."""

    def run(check: Tell) -> None:
        one = result["together"]
        names = _listed.LEASES["together"]
        filled, most, fifth = one["filled"], one["most"], one["fifth"]
        said = ", ".join(f"{name} {size / GIB:.1f}" for name, size in filled.items() if name != "the fifth")
        check(names[0], len(filled) == 5 and all(size > 0.85 * LEASE for size in filled.values()), f"{said} GiB")
        said = ", ".join(f"{name} {size / GIB:.2f}" for name, size in most.items())
        seen = one["looks"] >= 20 and len(most) == 5
        check(names[1], seen and all(0 < size <= LEASE for size in most.values()), f"{said} GiB at most")
        check(names[2], len(one["right"]) == 4 and all(one["right"].values()), f"{one['right']}")
        had = f"{fifth['meanwhile']:,} bytes while it waited {fifth['waited']:.1f} s"
        check(names[3], not fifth["early"] and fifth["meanwhile"] == 0 and fifth["waited"] > WAITS, had)
        after = f"{fifth['after_end_s']:.3f} s after its end, {fifth['after_told_s']:.3f} s after it was told to end"
        check(names[4], fifth["after_end_s"] <= STARTS and fifth["after_told_s"] > 0, after)
        check(names[5], len(one["right_after"]) == 4 and all(one["right_after"].values()), f"{one['right_after']}")

    def without(check: Tell) -> None:
        one = result["control"]
        said = "; ".join(f"{name}: {why}" for name, why in one["died"].items()) or "nobody died"
        check(_listed.LEASES["control"][0], bool(one["died"]), f"{one['full']} of 5 filled their caps; {said}")

    judges: dict[str, Judge] = {
        "together": run, "control": without, "turns": judge_of(_turns, result, "turns"),
        "without suspend-idle": judge_of(_alone, result, "without suspend-idle"),
    }  # fmt: skip
    return judged(_listed.LEASES, judges, {name: result[name] for name in judges if name in result})


def _turns(check: Tell, one: Mapping[str, Any]) -> None:
    taken, soon, right, apart, sums, host, last = _listed.LEASES["turns"]
    each = [(turn["served"], name, turn) for name in NAMES for turn in one["turns"][name]]
    order = [name for _, name, _ in sorted(each, key=lambda entry: entry[0])]
    full = len(one["filled"]) == 2 and all(size > FILLED * TURN for size in one["filled"].values())
    said = ", ".join(f"{size / GIB:.1f}" for size in one["filled"].values())
    figure = f"{said} GiB on {one['room'] / GIB:.1f} GiB: {', '.join(order)}"
    check(taken, full and one["room"] <= EIGHTY and order == [*NAMES] * COUNT, figure)
    waits = [turn["served"] - turn["asked"] for _, _, turn in each]
    check(soon, len(waits) == 2 * COUNT and max(waits) <= LONGEST, f"{max(waits):.0f} s at most")
    wrong, rounds = sum(turn["wrong"] for _, _, turn in each), min(turn["rounds"] for _, _, turn in each)
    moved = min(len(turn["back"]) for name in NAMES for turn in one["turns"][name][-1:])
    figure = f"{wrong} wrong pieces of 512 MiB, {rounds} rounds of work and more, each {moved} times back"
    check(right, wrong == 0 and rounds > 0 and moved >= COUNT - 1, figure)
    nvml = one["nvml"]
    most = [nvml["most"][name] for name in NAMES]
    good = (
        nvml["looks"] >= 100 and not nvml["both"] and not nvml["over"] and all(FILLED * TURN < m <= TURN for m in most)
    )
    said = ", ".join(f"{size / GIB:.2f}" for size in most)
    check(apart, good, f"{said} GiB at most; both in {nvml['both']} of {nvml['looks']} looks")
    seen = one["leases"]
    good = seen["looks"] >= 20 and not seen["wrong_sums"] and not seen["both"] and not seen["failed"]
    figure = f"{seen['looks']} looks, {seen['wrong_sums']} wrong, {seen['both']} with both, failed: {seen['failed']}"
    check(sums, good, figure)
    whole = sum(one["filled"].values())
    check(host, one["most_host"] >= whole, f"{one['most_host'] / GIB:.1f} GiB at once")
    alone, left = one["alone"], one["left"]
    kept = one["available"] - one["available_after"]
    good = alone["wrong"] == 0 and not left["listed"] and not left["claims"] and kept <= KEPT
    figure = f"{alone['wrong']} wrong; left: {left['listed'] or 'nobody'} on the card, {left['claims']} leases, "
    check(last, good, figure + f"{max(kept, 0) / GIB:.1f} GiB of host memory")


def _alone(check: Tell, one: Mapping[str, Any]) -> None:
    text = one["refused"] or "it was not refused"
    named = str(one["first"]) in text and WAIT <= (one["waited"] or 0.0) <= WAIT + 10
    stays = one["wrong"] == 0 and not one["out"] and one["listed"] == [True, False]
    (name,) = _listed.LEASES["without suspend-idle"]
    check(name, bool(one["refused"]) and named and stays, f"after {one['waited'] or 0:.1f} s: {text[:160]}")
