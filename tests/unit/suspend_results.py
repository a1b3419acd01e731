"""A run of `benchmarks/suspend.py` as it should be, made up: for the tests of its checks and of its tables."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
_listed = importlib.import_module("_listed")
MIB, GIB = 1 << 20, 1 << 30
STEPS: dict[str, tuple[str, ...]] = _listed.SUSPEND_STEPS


def rounds() -> dict[str, Any]:
    return {
        "rounds": 20, "long_s": 12.0, "wrong": 0, "arrays": 4, "listed_while_off": 0, "missing_when_back": 0,
        "card": [600 * MIB] * 20,
        "host": [GIB + n * MIB for n in range(20)], "off_s": [0.9] * 20, "on_s": [0.4] * 20,
        "ledger": "suspended, 600.0 MiB in host memory", "timeline": {"suspended": 20, "resumed": 20},
    }  # fmt: skip


def calls() -> dict[str, Any]:
    ends: dict[str, Any] = {"synchronize": {"waited": 30}, "copy to host": {"waited": 28, "refused": 2}}
    return {
        "rounds": 30, "ends": ends, "crashed": [], "broken": {}, "wrong": 0, "hung": [], "kinds": sorted(ends),
    }  # fmt: skip


def inside(way: str) -> dict[str, Any]:
    one = {"struck": True, "raised": None, "away": False, "seconds": 1.0, "delay": 0.0, "wrong": 0}
    return {
        "rounds": [
            {**one, "step": step, "back": "by itself", "away_at_last": False} for step in STEPS[way] for _ in range(5)
        ]
    }


def controlled(way: str) -> dict[str, Any]:
    one = {"delay": 0.0, "back": "by memguard resume", "resume_s": 1.2, "wrong": 0}
    return {"rounds": [{**one, "step": step, "reached": step} for step in STEPS[way] for _ in range(5)]}


def refused(codes: tuple[str, ...]) -> dict[str, Any]:
    text = "cannot suspend: it was provoked\n    fix: calm it"
    return {
        "refused": True, "codes": [*codes, "another"], "text": text, "seconds": 0.2, "on_card": True, "wrong": 0,
        "after": None, "wrong_after": 0,
    }  # fmt: skip


def seconds(name: str) -> dict[str, Any]:
    sizes = {}
    for size in (1, 16, *((60,) if name == "torch" else ())):
        one = {
            "off_s": 0.6 * size,
            "on_s": 0.25 * size,
            "bytes": size * GIB + 500 * MIB,
            "host": size * GIB,
            "gone": True,
        }
        count = 2 if size == 1 or name == "torch" else 1
        sizes[str(size)] = {"before": one["bytes"], "rounds": [dict(one) for _ in range(count)], "wrong": 0}
    return {"sizes": sizes}


def window() -> dict[str, Any]:
    gap = {"rise_ms": 1.0, "fall_ms": 13.5, "ms": 12.5, "looks": 9000, "longest_ms": 1.0, "free": [1, 9, 1]}
    return {
        "sampled": [dict(gap) for _ in range(5)], "robbed": 10, "got_in": 1, "lost": 1, "late": 0, "wrong": 0,
        "at": [0.16], "tries": 99, "size": 2 * GIB,
    }  # fmt: skip


def whole() -> dict[str, Any]:
    done = {"rc": 0, "seconds": 1.1, "text": ""}
    right = {"status": "ok", "text": "RIGHT\nFalse\n"}
    off, on = ["x off", 26.0], ["x on", 9.0]
    s: dict[str, Any] = {
        **{f"rounds {name}": rounds() for name in (*_listed.SIX, "six")},
        **{f"calls {name}": calls() for name in _listed.SIX},
        "control": {"rc": -11, "call": "call: device synchronize"},
        **{f"{what}, {way}": inside(way) for what in ("helper killed", "SIGINT") for way in STEPS},
        **{f"controller killed, {way}": controlled(way) for way in STEPS},
        **{f"refused {what}": refused(codes) for what, codes in _listed.REFUSED.items()},
        "outside": {
            "listed": True, "off": dict(done), "gone": True, "away": True, "listed_off": True, "on": dict(done),
            "wrong": 0, "not_allowed": {**done, "rc": 1}, "unsafe": dict(done), "unsafe_gone": True,
            "unsafe_on": dict(done), "unsafe_wrong": 0,
        },
        "peak": {"before": 61 * GIB, "while_off": None, "off_s": 35.0, "bytes": 61 * GIB},
        **{f"seconds {name}": seconds(name) for name in _listed.SIX},
        "turns": {
            "order": [off, off, on, off, on, off], "wrong": 0, "most_host": 93 * GIB, "room": 80 * 10**9,
            "apart": [None, 45 * GIB], "both_off": True, "filled": 60 * GIB, "arrays": 88,
        },
        "no room": {
            "size": 3 * GIB, "free": GIB, "refused": {"text": "GPU has 1 GiB free\n3 GiB python (PID 7)"},
            "lost": False, "waits": 12, "names": True, "away": True, "after_s": 0.9, "on": None, "wrong": 0,
        },
        "stranger": {
            "rounds": 20, "lost": 0, "late": 1, "wrong": 0, "texts": [], "on_s": [0.9, 3.1],
            "grabbed": {"times": 200, "most": 4 * GIB},
        },
        **{f"window, context {which}": window() for which in ("stays", "goes")},
        "notebook": {
            "begun": dict(right), "before": 900 * MIB, "off_s": 4.0, "filled": {"held": 138 * GIB, "free": GIB},
            "left": 0.3, "next": dict(right), "next_s": 2.0, "off_again_s": 4.0, "still_off": True,
            "refused": {"status": "error", "text": "KeyboardInterrupt: "}, "off_after_interrupt": True,
            "last": dict(right),
        },
    }  # fmt: skip
    return {name: {"returncode": 0, "wall_s": 1.0, **one} for name, one in s.items()}
