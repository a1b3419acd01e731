"""A result of `benchmarks/leases.py` that passes every check, made up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from _leases_job import JOBS

GIB = 1 << 30


def whole() -> dict[str, Any]:
    """Of each scenario."""
    filled = {**dict.fromkeys(JOBS, 31 * GIB), "the fifth": 31 * GIB}
    fifth = {"early": False, "meanwhile": 0, "waited": 9.0, "after_told_s": 1.5, "after_end_s": 0.12}
    right = dict.fromkeys("abcd", True)
    most = {name: size + GIB for name, size in filled.items()}
    together = {"filled": filled, "most": most, "looks": 90, "right": right, "right_after": dict(right), "fifth": fifth}
    return {
        "together": {"returncode": 0, **together},
        "control": {"returncode": 0, "full": 4, "died": {"jax 3": "rc 1: out of memory"}},
        "turns": in_turn(),
        "without suspend-idle": {
            "returncode": 0, "refused": "no room for 44.00 GiB: process 42 holds it", "waited": 10.1, "first": 42,
            "wrong": 0, "out": 0, "listed": [True, False],
        },
    }  # fmt: skip


def in_turn() -> dict[str, Any]:
    def turn(number: int, at: float) -> dict[str, Any]:
        spans = [[at - 40, at - 10]] * number
        return {"turn": number, "asked": at - 50, "served": at, "wrong": 0, "rounds": 90, "out": spans, "back": spans}

    return {
        "returncode": 0, "room": 79 * GIB, "placeholder": 60 * GIB,
        "available": 120 * GIB, "available_after": 119 * GIB,
        "turns": {
            "first": [turn(number, 100.0 * number) for number in range(3)],
            "second": [turn(number, 50 + 100.0 * number) for number in range(3)],
        },
        "filled": {"first": 40 * GIB, "second": 40 * GIB}, "most_host": 88 * GIB,
        "nvml": {"looks": 4000, "both": 0, "over": 0, "most": {"first": 42 * GIB, "second": 42 * GIB}},
        "leases": {"looks": 200, "wrong_sums": 0, "both": 0, "failed": []},
        "alone": {"wrong": 0, "out": [], "back": []}, "left": {"listed": [], "claims": 0},
    }  # fmt: skip
