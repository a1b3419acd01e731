"""The bars of `suspend.py`, each as (passed, figure). Pure; the names are those of `_listed.SUSPEND`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from typing import Any

import _listed
from _run import GIB, MIB, Judge, Tell, judge_of, judged

ROUNDS, CHECKED = 20, 5
CARD, HOST = 2 * MIB, 64 * MIB
"""What 20 rounds may leave: a page of the card, and what allocators and threads of the host keep."""
CALLS = 30
MUST = (
    "synchronize", "query", "done", "copy", "item", "elapsed", "numpy", "ready", "read", "replay", "print",
)  # fmt: skip
"""A call with one of these words asks the driver each time. Others may be served from what the framework has."""
EACH = 5
"""Rounds of each step that breaks."""
SEGFAULT = (-11, 139)
WINDOWS, ROBBED = 5, 5
EIGHTY = 80 * 10**9


def suspend_checks(s: Mapping[str, Any]) -> dict[str, tuple[bool, str]]:
    """Of a run's scenarios, or of a part of them: what did not run has failed."""
    judges: dict[str, Judge] = {}
    for name in _listed.SIX:
        judges[f"rounds {name}"] = judge_of(_rounds, s, f"rounds {name}", name)
        judges[f"calls {name}"] = judge_of(_calls, s, f"calls {name}", name)
        judges[f"seconds {name}"] = judge_of(_seconds, s, f"seconds {name}", name)
    judges["rounds six"] = judge_of(_rounds, s, "rounds six", "all six")
    judges["control"] = judge_of(_control, s, "control")
    for what in _listed.BREAKS:
        for way in _listed.SUSPEND_STEPS:
            judges[f"{what}, {way}"] = judge_of(_broken, s, f"{what}, {way}", what, way)
    for what in _listed.REFUSED:
        judges[f"refused {what}"] = judge_of(_refused, s, f"refused {what}", what)
    judges["outside"] = judge_of(_outside, s, "outside")
    judges["peak"] = judge_of(_peak, s, "peak")
    judges["turns"] = judge_of(_turns, s, "turns")
    judges["no room"] = judge_of(_no_room, s, "no room")
    judges["stranger"] = judge_of(_stranger, s, "stranger")
    for which in ("stays", "goes"):
        judges[f"window, context {which}"] = judge_of(_window, s, f"window, context {which}", f"context {which}")
    judges["notebook"] = judge_of(_notebook, s, "notebook")
    return judged(_listed.SUSPEND, judges, s)


def _rounds(check: Tell, one: Mapping[str, Any], who: str) -> None:
    same, gone, stays, told = _listed.of_rounds(who)
    whole = one["rounds"] >= ROUNDS
    kept = f"{one['wrong']} wrong in {one['rounds']} rounds, one of them {one['long_s']:.0f} s long"
    check(same, whole and one["wrong"] == 0 and one["arrays"] > 0, kept)
    seen = (
        f"listed {one['listed_while_off']} times in {one['rounds']} rounds; {one['missing_when_back']} times not back"
    )
    check(gone, whole and not one["listed_while_off"] and not one["missing_when_back"], seen)
    card, host = one["card"][-1] - one["card"][0], one["host"][-1] - one["host"][0]
    check(
        stays,
        whole and card <= CARD and host <= HOST,
        f"card {card / MIB:+.1f} MiB of {one['card'][0] / MIB:.0f}, host {host / MIB:+.1f} MiB of "
        f"{one['host'][0] / MIB:.0f}",
    )
    line = one["timeline"]
    good = bool(one["ledger"]) and min(line["suspended"], line["resumed"]) >= ROUNDS
    check(told, good, f"{one['ledger']}; timeline: {line['suspended']} suspended, {line['resumed']} resumed")


def _calls(check: Tell, one: Mapping[str, Any], name: str) -> None:
    waits, lives = _listed.of_calls(name)
    bad: dict[str, dict[str, int]] = {}
    on = set()
    for kind, ends in one["ends"].items():
        harmless = ("waited", "refused", *(() if any(word in kind for word in MUST) else ("went on",)))
        if other := {end: times for end, times in ends.items() if end not in harmless}:
            bad[kind] = other
        elif "went on" in ends:
            on.add(kind)
    counted = min((sum(ends.values()) for ends in one["ends"].values()), default=0)
    said = f"{len(one['kinds'])} kinds, {one['rounds']} rounds"
    said += f"; did not wait: {bad}" if bad else ""
    said += f"; asked the driver nothing: {', '.join(sorted(on))}" if on else ""
    said += f"; not possible here at all: {', '.join(one['broken'])}" if one["broken"] else ""
    whole = one["rounds"] >= CALLS and counted >= CALLS and len(one["kinds"]) > len(one["broken"])
    check(waits, whole and not bad, said)
    crashed = [f"{each['call'] or 'unknown'} (rc {each['rc']})" for each in one["crashed"]]
    ends = f"{one['wrong']} wrong" + (f"; died in {', '.join(crashed)}" if crashed else "")
    ends += f"; hung {len(one['hung'])} times" if one["hung"] else ""
    check(lives, one["rounds"] >= CALLS and not crashed and not one["hung"] and one["wrong"] == 0, ends)


def _control(check: Tell, one: Mapping[str, Any]) -> None:
    said = "it lived" if one["rc"] is None else f"rc {one['rc']} in {one['call'] or 'a call'}"
    check(_listed.CONTROL[0], one["rc"] in SEGFAULT, said)


def _broken(check: Tell, one: Mapping[str, Any], what: str, way: str) -> None:
    (name,) = _listed.of_break(what, way)
    rounds, steps = one["rounds"], _listed.SUSPEND_STEPS[way]
    each = {step: sum(of["step"] == step for of in rounds) for step in steps}
    back = [of for of in rounds if of["wrong"] == 0 and not of.get("away_at_last")]
    struck = sum(bool(of.get("struck", of.get("reached") is not None)) for of in rounds)
    by_resume = sum(of["back"].startswith("by memguard resume") for of in rounds)
    bad = [f"{of['step']} after {of['delay']} s: {of['back']}, {of['wrong']} wrong" for of in rounds if of not in back]
    said = f"{len(back)} of {len(rounds)}, {by_resume} by memguard resume, {struck} struck"
    check(
        name,
        min(each.values()) >= EACH and len(back) == len(rounds) and struck == len(rounds),
        "; ".join([said, *bad])[:600],
    )


def _refused(check: Tell, one: Mapping[str, Any], what: str) -> None:
    (name,) = _listed.of_refused(what)
    wanted = _listed.REFUSED[what]
    # The driver may keep the mapping of managed memory until the process ends; torch's profiler keeps CUPTI.
    stays = what.startswith("managed memory") or (what == "torch.profiler" and "error 801" in str(one["after"]))
    good = (
        one["refused"]
        and set(wanted) <= set(one["codes"])
        and "fix:" in one["text"]
        and one["on_card"]
        and one["wrong"] == 0
        and (one["after"] is None or stays)
        and one["wrong_after"] == 0
    )
    said = one["text"].replace("\n", " ")[:200] if one["refused"] else "it was not refused"
    then = "" if one["after"] is None else f"; and afterwards, without it: {one['after'][:160]}"
    check(name, bool(good), f"{', '.join(one['codes'])} in {one['seconds']:.1f} s: {said}{then}")


def _outside(check: Tell, one: Mapping[str, Any]) -> None:
    lists, moves, unsafe = _listed.OUTSIDE
    check(lists, one["listed"] and one["listed_off"], f"running {one['listed']}, suspended {one['listed_off']}")
    good = one["off"]["rc"] == 0 and one["gone"] and one["on"]["rc"] == 0 and one["wrong"] == 0
    said = f"suspend {one['off']['seconds']} s, resume {one['on']['seconds']} s, {one['wrong']} wrong"
    check(
        moves, good and one["away"], said if good else f"{said}: {one['off']['text'][-150:]} {one['on']['text'][-150:]}"
    )
    allowed = one["not_allowed"]["rc"] != 0
    taken = one["unsafe"]["rc"] == 0 and one["unsafe_gone"] and one["unsafe_on"]["rc"] == 0 and one["unsafe_wrong"] == 0
    check(unsafe, allowed and taken, f"rc {one['not_allowed']['rc']}, with --unsafe {one['unsafe']['rc']}")


def _seconds(check: Tell, one: Mapping[str, Any], name: str) -> None:
    (bar,) = _listed.of_seconds(name)
    sizes = {"1", "16", "60"} if name == "torch" else {"1", "16"}
    said, good = [], set(one["sizes"]) == sizes
    for size, of in one["sizes"].items():
        out, back = (", then ".join(f"{each[way]:.2f}" for each in of["rounds"]) for way in ("off_s", "on_s"))
        said.append(f"{size} GiB: out {out} s, in {back} s")
        gib = min((each["bytes"] for each in of["rounds"]), default=0) / GIB
        good &= len(of["rounds"]) >= 2 and of["wrong"] == 0 and gib >= int(size)
        good &= all(each["gone"] for each in of["rounds"])
    check(bar, good, "; ".join(said))


def _peak(check: Tell, one: Mapping[str, Any]) -> None:
    held = (one["before"] or 0) / GIB
    left = "nothing" if one["while_off"] is None else f"{one['while_off']} bytes"
    check(
        _listed.PEAK[0],
        held >= 60 and one["while_off"] is None,
        f"{held:.1f} GiB before, {left} while suspended, out in {one['off_s']:.1f} s",
    )


def _turns(check: Tell, one: Mapping[str, Any]) -> None:
    takes, right = _listed.TURNS
    order = ", ".join(f"{what} {seconds} s" for what, seconds in one["order"])
    alone = one["apart"][0] is None and (one["apart"][1] or 0) >= 44 * GIB and one["room"] <= EIGHTY
    check(takes, alone and len(one["order"]) == 6, order)
    held = one["most_host"] / GIB
    check(
        right,
        held >= 88 and one["both_off"] and one["wrong"] == 0,
        f"{held:.1f} GiB in host memory, {one['wrong']} wrong{_leave(one)}",
    )


def _leave(one: Mapping[str, Any]) -> str:
    """Where memguard refused for too little host memory, and the override was used."""
    before = dict(one["available"])
    each = ", ".join(f"{what} with {before[what] / GIB:.0f} GiB available" for what, _ in one["ignored"])
    return f"; by host_memory='ignore': {each}" if each else ""


def _no_room(check: Tell, one: Mapping[str, Any]) -> None:
    waits, back = _listed.NO_ROOM
    text = (one["refused"] or {}).get("text", "it was not refused")
    good = one["refused"] is not None and not one["lost"] and one["names"] and one["waits"] > 0 and one["away"]
    check(waits, bool(good and one["free"] < one["size"]), f"{one['waits']} looks: {text[:200]!r}")
    said = f"{one['after_s']} s after there was room, {one['wrong']} wrong"
    check(back, one["on"] is None and one["wrong"] == 0, said if one["on"] is None else one["on"]["text"][:200])


def _stranger(check: Tell, one: Mapping[str, Any]) -> None:
    said = f"lost {one['lost']} of {one['rounds']}, {one['late']} without room in time, {one['wrong']} wrong"
    said += (
        f"; the stranger took memory {one['grabbed']['times']} times; back in at most {max(one['on_s'], default=0)} s"
    )
    said += "".join(f"; lost in round {each['round']}: {_line(each['why'])}" for each in one["losses"])
    told = len(one["losses"]) == one["lost"] and all(each["why"].strip() for each in one["losses"])
    good = one["rounds"] >= ROUNDS and told and not one["wrong"] and one["grabbed"]["times"] >= ROUNDS
    broke = f"; {one['broke'][:200]}" if "broke" in one else ""
    check(_listed.STRANGER[0], good and not broke and one["late"] <= ROUNDS // 4, (said + broke)[:900])


def _line(text: str) -> str:
    return " ".join(text.split())[:160]


def _window(check: Tell, one: Mapping[str, Any], which: str) -> None:
    (name,) = _listed.of_window(which)
    gaps = [of["ms"] for of in one["sampled"] if of["ms"] is not None]
    open_for = f"{statistics.median(gaps):.1f} ms, at most {max(gaps):.1f}" if gaps else "not seen"
    said = f"open {open_for} ({len(gaps)} rounds); a stranger in a tight loop got in {one['got_in']} times of "
    said += f"{one['robbed']}, {one['lost']} processes were lost"
    said += (
        f"; {one['invalid']} rounds do not count: he got in before, or no restore was begun" if one["invalid"] else ""
    )
    said += f"; e.g. {_line(one['texts'][0]['why'])}" if one["texts"] else ""
    good = len(gaps) >= WINDOWS - 1 and one["robbed"] >= ROBBED and one["tries"] > 0 and not one["wrong"]
    check(name, good and "broke" not in one, said + (f"; {one['broke'][:200]}" if "broke" in one else ""))


def _notebook(check: Tell, one: Mapping[str, Any]) -> None:
    leaves, back, refused = _listed.NOTEBOOK
    off = one["off_s"] is not None and one["before"] is not None
    held, total = one["filled"]["held"], one["total"]
    filled = f"another process had {held / GIB:.0f} of {total / GIB:.0f} GiB" if off else "nothing was off"
    whole_card = held >= 0.95 * total and one["left"] is not None
    check(leaves, bool(off and one["begun"]["status"] == "ok" and whole_card), f"off after {one['off_s']} s; {filled}")
    right = one["next"]["status"] == "ok" and "RIGHT" in one["next"]["text"]
    check(back, right, f"in {one['next_s']} s: {one['next']['text'][-200:]!r}")
    whole = one["last"]["status"] == "ok" and "RIGHT" in one["last"]["text"] and "False" in one["last"]["text"]
    kept = one["still_off"] and one["off_after_interrupt"] and one["refused"]["status"] == "error"
    ran = "it ran" in one["refused"]["text"]
    names = bool(re.search(rf"\(PID {one['holder']}\b", one["refused"]["text"]))
    said = f"{one['refused']['status']}, {'names' if names else 'does not name'} who holds the card: "
    check(refused, bool(whole and kept and names and not ran), f"{said}{one['refused']['text'][-300:]!r}")
