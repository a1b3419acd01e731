"""The part of docs/results.md on `suggest.py`."""

from __future__ import annotations

from typing import Any

from _listed import SUGGEST_PROGRAMS
from _run import died
from _suggest_checks import smallest, waste

MIB = 1 << 20


def whole(scenarios: dict[str, Any]) -> list[str]:
    rows = [_row(name, scenarios.get(name)) for name in SUGGEST_PROGRAMS]
    return [
        "## A budget from a run",
        "",
        "Each program ran once under a wide budget, then under the budgets that `memguard suggest` wrote from that",
        "run. A run passes if the program ends well and nothing was refused. Headrooms below 0 % are less than what",
        "was needed.",
        "",
        "| program | smallest headroom from which on all pass | passes with the default | the default takes more by | "
        "from a run without a budget |",
        "| --- | --- | --- | --- | --- |",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def _row(name: str, one: dict[str, Any] | None) -> list[str]:
    if (end := died(one)) is not None or one is None:
        return [f"`{name}`", f"did not run: {end}", "", "", ""]
    least, over, runs = smallest(one), waste(one), one["default"]["runs"]
    tried = ", ".join(str(row["headroom"]) for row in one["tried"])
    figure = "none" if least is None else f"{least['headroom']} % ({least['limit'] / MIB:,.0f} MiB)"
    again = (one["record"].get("again") or {}).get("passed")
    return [
        f"`{name}`",
        f"{figure}, of {tried} and 15",
        f"{sum(run['passed'] for run in runs)} of {len(runs)}",
        "unknown" if over is None else f"{over:.1%}".replace("%", " %"),
        "passes" if again else "does not pass",
    ]
