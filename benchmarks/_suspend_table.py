"""The section of docs/results.md, and the row of README, that `suspend.py` fills. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from _exchange_tables import PLAIN
from _listed import BREAKS, SIX, SUSPEND_STEPS

MIB, GIB = 1 << 20, 1 << 30
BEGINS = (
    "A process leaves its GPU, context and all, and comes back: each of six frameworks alone, and all in one process"
)


def whole(scenarios: Mapping[str, Any]) -> list[str]:
    """Each table whose scenarios were measured to their end."""
    found = ["## A process steps off the card"]
    for part in (_rounds, _seconds, _calls, _breaks, _room):
        try:
            lines = part(scenarios)
        except KeyError:  # not measured, or it died: what it lacks stands with the checks
            lines = []
        found += ["", *lines] if lines else []
    return found


def row(scenarios: Mapping[str, Any]) -> tuple[str, str]:
    """What README says of it: rounds with right values, and what 16 GiB take."""
    rounds = [one for name in (*SIX, "six") if "rounds" in (one := scenarios.get(f"rounds {name}", {}))]
    said = (
        f"{sum(one['rounds'] for one in rounds)} rounds in {len(rounds)} processes, "
        f"{sum(one['wrong'] for one in rounds)} arrays with other values"
    )
    large = scenarios.get("seconds torch", {}).get("sizes", {}).get("16")
    if large:
        first = large["rounds"][0]
        said += f"; 16 GiB of PyTorch out in {first['off_s']:.1f} s, in in {first['on_s']:.1f} s"
    return BEGINS, said


def _rounds(scenarios: Mapping[str, Any]) -> list[str]:
    rows = []
    for name in (*SIX, "six"):
        one = scenarios.get(f"rounds {name}", {})
        if "card" not in one:
            continue
        card, host = one["card"][-1] - one["card"][0], one["host"][-1] - one["host"][0]
        rows.append(
            f"| {PLAIN.get(name, 'all six in one process')} | {one['rounds']} | {one['wrong']} | "
            f"{one['listed_while_off']} | {card / MIB:+.1f} | {host / MIB:+.1f} | "
            f"{statistics.median(one['off_s']):.2f} / {statistics.median(one['on_s']):.2f} |"
        )
    if not rows:
        return []
    return [
        "Off and back under a budget whose monitor looks every 100 ms, with some hundred MiB in each. Seconds are",
        "medians of processes that ran at the same time:",
        "",
        "| | rounds | arrays with other values | listed by NVML while off | MiB more on the card after the last round "
        "than after the first | of host memory | s out / in |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *rows,
    ]


def _seconds(scenarios: Mapping[str, Any]) -> list[str]:
    rows = []
    for name in SIX:
        for size, of in scenarios.get(f"seconds {name}", {}).get("sizes", {}).items():
            if len(of["rounds"]) < 2:
                continue  # its check says so
            cells = [_each(one) for one in of["rounds"][:2]]
            rows.append(f"| {PLAIN[name]} | {size} | {of['rounds'][0]['bytes'] / GIB:.2f} | {' | '.join(cells)} |")
    if not rows:
        return []
    return [
        "One at a time, while the others sit idle; GiB are what left the card. Out / in, and seconds for each GiB:",
        "",
        "| | GiB of arrays | GiB | first time | second time |",
        "| --- | --- | --- | --- | --- |",
        *rows,
        *_large(scenarios),
    ]


def _each(one: Mapping[str, Any]) -> str:
    gib = one["bytes"] / GIB
    out, back = one["off_s"], one["on_s"]
    return f"{out:.2f} / {back:.2f} s ({out / gib:.2f} / {back / gib:.2f})"


def _large(scenarios: Mapping[str, Any]) -> list[str]:
    lines = []
    peak, turns = scenarios.get("peak", {}), scenarios.get("turns", {})
    if "while_off" in peak:
        left = "nothing" if peak["while_off"] is None else f"{peak['while_off']} bytes"
        lines += [
            "",
            f"TensorFlow after a peak of 60 GiB held {(peak['before'] or 0) / GIB:.1f} GiB; while suspended NVML "
            f"listed {left}.",
        ]
    if "order" in turns:
        order = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in turns["order"])
        lines += [
            "",
            f"Two processes of 44 GiB on 80 GB: {order}. Together they had {turns['most_host'] / GIB:.1f} GiB in host",
            "memory.",
        ]
    return lines


def _calls(scenarios: Mapping[str, Any]) -> list[str]:
    rows = []
    for name in SIX:
        one = scenarios.get(f"calls {name}", {})
        if "ends" not in one:
            continue
        counted: dict[str, int] = {}
        for ends in one["ends"].values():
            for end, times in ends.items():
                key = end if end in ("waited", "refused", "went on") else "else"
                counted[key] = counted.get(key, 0) + times
        cells = [str(counted.get(key, 0)) for key in ("waited", "refused", "went on", "else")]
        rows.append(
            f"| {PLAIN[name]} | {len(one['kinds'])} | {one['rounds']} | {' | '.join(cells)} | {len(one['crashed'])} |"
        )
    if not rows:
        return []
    control = scenarios.get("control", {})
    last = [f"Without gates the process ended with rc {control['rc']}."] if "rc" in control else []
    return [
        "Calls of other threads while the process is off its GPU, every kind at once in each round:",
        "",
        "| | kinds | rounds | waited | refused | went on | else | processes that died |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *rows,
        *(["", *last] if last else []),
    ]


def _breaks(scenarios: Mapping[str, Any]) -> list[str]:
    rows, whole = [], 0
    for what in BREAKS:
        for way in SUSPEND_STEPS:
            one = scenarios.get(f"{what}, {way}", {})
            rounds = one.get("rounds")
            if not rounds:
                rows += [f"| {what}, {way} | did not run to its end | | |"] if one else []
                continue
            whole += 1
            back = sum(one["wrong"] == 0 and not one.get("away_at_last") for one in rounds)
            by_resume = sum(one["back"].startswith("by memguard resume") for one in rounds)
            rows.append(f"| {what}, {way} | {len(rounds)} | {back} | {by_resume} |")
    if not whole:
        return []
    return [
        "Broken at each step, five times each:",
        "",
        "| | rounds | back with right values | of them by `memguard resume` |",
        "| --- | --- | --- | --- |",
        *rows,
    ]


def _room(scenarios: Mapping[str, Any]) -> list[str]:
    lines = []
    stranger = scenarios.get("stranger", {})
    if "lost" in stranger:
        lines.append(
            f"- Beside a process that grabs memory at random: {stranger['lost']} of {stranger['rounds']} lost, "
            f"{stranger['late']} found no room in 20 s{' at first' if stranger['late'] else ''}."
        )
        lines += [
            f"  - lost in round {one['round']}: {' '.join(one['why'].split())[:200]}" for one in stranger["losses"]
        ]
    for which in ("stays", "goes"):
        one = scenarios.get(f"window, context {which}", {})
        if "sampled" not in one:
            continue
        gaps = [of["ms"] for of in one["sampled"] if of["ms"] is not None]
        seen = f"{min(gaps):.1f} to {max(gaps):.1f} ms" if gaps else "not seen"
        lines.append(
            f"- Between the end of the placeholder, whose context {which}, and the restore's taking: {seen} by NVML; "
            f"a process that tried to allocate in a tight loop got in {one['got_in']} times of {one['robbed']}, and "
            f"{one['lost']} processes were lost."
        )
    return lines
