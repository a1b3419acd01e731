"""Off and back again and again: values, NVML's entry, what stays taken, and seconds."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import _listed
from _run import GIB, MIB
from _suspend_arrays import REHEARSAL
from _suspend_children import Card, Child, command, host_bytes, other, resume, target

ROUNDS, CHECKED = 20, 5
"""Rounds of each process; after each of the first so many every array is read back whole."""
LONG = 0.2 if REHEARSAL else 12.0
"""Seconds that each process stays off once: JAX's runtime asks the driver every 5 s, from a thread of its own."""
EACH = 64 * MIB
SIZES: dict[str, tuple[int, ...]] = {**dict.fromkeys(_listed.SIX, (1, 16)), "torch": (1, 16, 60)}
"""GiB."""
UNIT = MIB if REHEARSAL else GIB
PEAK = 60
AGAIN = ("torch", "cupy", "pycuda", "numba")
"""Those that free what they hold: they are timed twice both ways at 16 GiB, and suspended again quickly at the end."""


def small(size: int) -> int:
    return size // 256 if REHEARSAL else size


def values(names: tuple[str, ...]) -> dict[str, Any]:
    """One process under a budget with its monitor on."""
    card = Card()
    with tempfile.TemporaryDirectory() as folder:
        line = Path(folder) / "timeline.jsonl"
        limit = "16GiB" if len(names) > 1 else "8GiB"
        with target(*names, size=small(EACH), limit=limit, timeline=str(line)) as child:
            found = _rounds(child, card)
        text = "".join(path.read_text(errors="replace") for path in Path(folder).glob("*.jsonl"))
        found["timeline"] = {kind: text.count(f'"{kind}"') for kind in ("suspended", "resumed")}
        if REHEARSAL:
            found["timeline"] = {"suspended": ROUNDS, "resumed": ROUNDS}
    return found


def _rounds(child: Child, card: Card) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rounds": 0, "wrong": 0, "listed_while_off": 0, "missing_when_back": 0, "arrays": 0, "card": [], "host": [],
        "off_s": [], "on_s": [], "ledger": None,
    }  # fmt: skip
    for number in range(ROUNDS):
        off = child.must("off", 90)
        found["listed_while_off"] += card.of(child.pid) is not None
        if number == 0:
            found["ledger"] = _said(child.must("ledger")["text"])
            time.sleep(LONG)
            found["long_s"] = LONG
        on = child.must("on", 120, timeout=90)
        if number < CHECKED or number == ROUNDS - 1:
            checked = child.must("check", 90)
            found["wrong"] += checked["wrong"]
            found["arrays"] = checked["arrays"]
        own = card.of(child.pid)
        found["missing_when_back"] += own is None
        found["card"].append(own)
        found["host"].append(host_bytes(child.pid))
        found["off_s"].append(round(off["seconds"], 3))
        found["on_s"].append(round(on["seconds"], 3))
        found["rounds"] += 1
    return found


def _said(ledger: str) -> str | None:
    """The line of the ledger that says it is suspended."""
    return next((line.strip() for line in ledger.splitlines() if "suspended, " in line), None)


def seconds(name: str) -> dict[str, Any]:
    """Out and in, the first time and the second, at each size. Nothing else runs meanwhile."""
    card, found = Card(), {}
    for size in SIZES[name]:
        with target(name, large=size * UNIT) as child:
            rounds = []
            before = card.of(child.pid) or 0
            twice = size == 1 or name == "torch"
            for number in range(2 if twice else 1):
                off = child.must("off", 200)
                gone = card.of(child.pid) is None
                on = child.must("on", 120, timeout=60)
                rounds.append(
                    {
                        "off_s": off["seconds"], "on_s": on["seconds"], "bytes": off["bytes"], "host": off["host"],
                        "off_parts": off["parts"], "on_parts": on["parts"], "gone": gone,
                    }
                )  # fmt: skip
                if number == 0:
                    wrong = child.must("check")["wrong"]
            wrong += child.must("check")["wrong"]
            if name in AGAIN:
                child.must("drop")
            found[str(size)] = {"before": before, "rounds": rounds, "wrong": wrong}
    return {"sizes": found}


def peak() -> dict[str, Any]:
    """TensorFlow keeps what it had at its peak. It is ended while it is suspended: that takes no time."""
    card = Card()
    with target("tensorflow", large=PEAK * UNIT) as child:
        child.must("drop")
        before = card.of(child.pid)
        off = child.must("off", 200)
        time.sleep(0.2)
        return {"before": before, "while_off": card.of(child.pid), "off_s": off["seconds"], "bytes": off["bytes"]}


def turns() -> dict[str, Any]:
    """Two processes of 44 GiB on what a card of 80 GB has: one is in host memory while the other works."""
    card, size, room = Card(), 44 * UNIT, 80 * (10**9 if not REHEARSAL else 10**6)
    found: dict[str, Any] = {"order": [], "wrong": 0, "most_host": 0, "room": room}
    with other("filler") as filler:
        found["filled"] = filler.must("fill", 120, leave=room)["held"]
        with target("torch", large=size, seed=1) as one:
            _went(found, "first off", one.must("off", 200))
            with target("torch", large=size, seed=2) as two:
                found["apart"] = (card.of(one.pid), card.of(two.pid))
                _went(found, "second off", two.must("off", 200))
                found["most_host"] = host_bytes(one.pid) + host_bytes(two.pid)
                found["both_off"] = card.of(one.pid) is None and card.of(two.pid) is None
                for name, child in (("first", one), ("second", two)):
                    _went(found, f"{name} on", child.must("on", 120, timeout=60))
                    found["wrong"] += child.must("check")["wrong"]
                    child.must("drop")
                    _went(found, f"{name} off, emptied", child.must("off", 60))
        found["arrays"] = 2 * 44
    return found


def _went(found: dict[str, Any], what: str, answer: dict[str, Any]) -> None:
    found["order"].append([what, round(answer["seconds"], 2)])


def outside() -> dict[str, Any]:
    """`memguard ps`, `suspend` and `resume` on a process that allows it, and on one that does not."""
    card = Card()
    with (
        target("torch", size=small(EACH), limit="8GiB", by_others=True) as child,
        target("torch", size=small(EACH), limit="8GiB") as shy,
    ):
        child.touched = True
        listed = _listed_pids(command("ps", "--json"))
        off = command("suspend", str(child.pid))
        gone = card.of(child.pid) is None
        away = child.must("away")["away"]
        listed_off = _listed_pids(command("ps", "--json"))
        on = resume(child.pid)
        wrong = child.must("check")["wrong"]
        not_allowed = command("suspend", str(shy.pid))
        shy.touched = True
        unsafe = command("suspend", str(shy.pid), "--unsafe")
        shy_gone = card.of(shy.pid) is None
        unsafe_on = resume(shy.pid)
        return {
            "listed": child.pid in listed, "off": _short(off), "gone": gone, "away": away,
            "listed_off": child.pid in listed_off, "on": _short(on), "wrong": wrong,
            "not_allowed": _short(not_allowed), "unsafe": _short(unsafe), "unsafe_gone": shy_gone,
            "unsafe_on": _short(unsafe_on), "unsafe_wrong": shy.must("check")["wrong"],
        }  # fmt: skip


def _short(one: dict[str, Any]) -> dict[str, Any]:
    return {"rc": one["rc"], "seconds": one["seconds"], "text": (one["err"] + one["out"])[-400:]}


def _listed_pids(one: dict[str, Any]) -> set[int]:
    """Every PID in what `memguard ps --json` printed."""

    def walk(value: Any) -> set[int]:
        if isinstance(value, list):
            return {pid for each in value for pid in walk(each)}
        if isinstance(value, dict):
            own = {value["pid"]} if isinstance(value.get("pid"), int) else set()
            return own | {pid for each in value.values() for pid in walk(each)}
        return set()

    try:
        return walk(json.loads(one["out"]))
    except ValueError:
        return set()
