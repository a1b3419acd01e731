"""The bars of `suggest.py`. Pure, so that they can be checked again on a committed JSON."""

from __future__ import annotations

from typing import Any

import _listed
from _run import Judge, Tell, judged

MIB, GIB = 1 << 20, 1 << 30
SUGGEST_TRIED = (-10, -5, 0, 5, 10)
"""The headrooms that are tried below the default, in percent; below 0 it is less than was needed."""
WASTE = 0.2
SILENT = ("cupy",)
"""Those whose allocators do not say their own peak."""
TEN, TWICE = 10, 2


def smallest(one: dict[str, Any]) -> dict[str, Any] | None:
    """The smallest headroom with which every run passed, and with every larger one. The default is the largest."""
    found: dict[str, Any] | None = None
    default = {"headroom": 15, "limit": one["default"]["limit"], "runs": one["default"]["runs"]}
    for tried in sorted([*one["tried"], default], key=lambda tried: -tried["headroom"]):
        if not tried["runs"] or not all(run["passed"] for run in tried["runs"]):
            break
        found = tried
    return found


def waste(one: dict[str, Any]) -> float | None:
    """What the default takes beyond the smallest budget that passes, as a part of that."""
    least = smallest(one)
    return None if least is None else one["default"]["limit"] / least["limit"] - 1


def suggest_checks(scenarios: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """The bars of `suggest.py`."""
    judges: dict[str, Judge] = {name: _chain(scenarios, name) for name in _listed.SUGGEST_PROGRAMS}
    judges["recording"] = lambda tell: _recording(tell, scenarios["recording"])
    return judged(_listed.SUGGEST, judges, scenarios)


def _chain(scenarios: dict[str, Any], name: str) -> Judge:
    def judge(tell: Tell) -> None:
        one = scenarios[name]
        default, least = one["default"], smallest(one)
        tried = [(row["headroom"], [run["passed"] for run in row["runs"]]) for row in one["tried"]]
        whole = [at for at, _ in tried] == list(SUGGEST_TRIED) and all(len(runs) == TWICE for _, runs in tried)
        said = ", ".join(f"{at} %: {sum(runs)} of {len(runs)}" for at, runs in tried)
        figure = "none passes" if least is None else f"{least['headroom']} % ({least['limit'] / MIB:,.0f} MiB)"
        tell(f"{name}: the smallest headroom that passes is measured", whole and least is not None, f"{figure}; {said}")
        passed = [run["passed"] for run in default["runs"]]
        ten = len(passed) == TEN and all(passed)
        tell(f"{name}: the default headroom passes in 10 of 10 runs", ten, f"{sum(passed)} of {len(passed)}")
        over = waste(one)
        figure = "nothing to compare with" if over is None else f"{over:.1%}: {default['limit'] / MIB:,.0f} MiB"
        small = over is not None and 0 <= over <= WASTE
        tell(f"{name}: the default wastes at most 20 % over the smallest that passes", small, figure)
        silent = [row["framework"] for row in default["frameworks"] if not row["peak"]]
        names = tuple(row["framework"] for row in default["frameworks"])
        right = set(silent) <= set(SILENT) and sorted(names) == sorted(_listed.SUGGEST_PROGRAMS[name])
        tell(f"{name}: the timeline has the allocators' own peaks", right, f"{', '.join(silent) or 'none'} without one")
        record = one["record"]
        again = record.get("again") or {"passed": False}
        ends = record["run"]["passed"] and again["passed"]
        of = (
            ", ".join(row["framework"] for row in record.get("frameworks", ())) or str(record.get("stderr_tail"))[-200:]
        )
        tell(f"{name}: a budget from a run without one passes", ends, f"of {of}")

    return judge


def _recording(tell: Tell, one: dict[str, Any]) -> None:
    wanted = {"torch", "jax", "cupy"}
    kinds = {"peak", "refused", "workload"}
    tell(
        "recording: 20 s at 10 Hz of PyTorch, JAX and CuPy",
        set(one["frameworks"]) >= wanted and one["seconds"] >= 19 and one["samples"] >= 150,
        f"{', '.join(one['frameworks'])}; {one['samples']} samples in {one['seconds']} s, {one['bytes'] >> 10} KiB",
    )
    tell(
        "recording: caught out-of-memory errors of PyTorch and CuPy, workloads, peaks",
        {"torch", "cupy"} <= set(one["ooms"]) and kinds <= set(one["events"]) and len(one["workloads"]) >= 4,
        f"errors of {', '.join(map(str, one['ooms']))}; events {one['events']}",
    )
