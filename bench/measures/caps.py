"""Caps of six frameworks in one process: NVML's figure of the process, and what each framework held at its refusals."""

from __future__ import annotations

import time
from typing import Any

from bench.child import Sampler, main
from bench.measure import Failed, Run, measure
from bench.programs.six import GIB, MIB, NAMES, RETURNING

LIMIT = 40 * GIB
SEED = 20261121
AT_CAP = 16
"""MiB by which the ledger and the driver may differ over a framework at its cap: its small arrays lie in slabs."""
INTERVAL = 0.02
"""Seconds between two samples: with 0.05 they were up to 109 ms apart on a busy machine."""
EMPTIED = [f"emptied.{name}" for name in RETURNING]


@measure(
    "caps",
    unit={
        "process": "GiB", "sum": "GiB", "gap": "ms", "samples": "samples", "least": "% of cap", "unaccounted": "MiB",
        **dict.fromkeys(NAMES, "% of cap"), **dict.fromkeys(EMPTIED, "MiB"),
    },
    bar={
        "process": "<= 40", "sum": ">= 36", "gap": "<= 100", "samples": ">= 1000", "least": ">= 95",
        "unaccounted": "<= 64", **dict.fromkeys(NAMES, "<= 100"), **dict.fromkeys(EMPTIED, f"<= {AT_CAP}"),
    },
    seconds=95, beside=True,
)  # fmt: skip
def caps(run: Run) -> dict[str, list[float]]:
    """Memory of six frameworks under one budget of 40 GiB, each driven to its refusal while the others are full."""
    sampler = Sampler(INTERVAL)
    try:
        child = run.start("caps", *(["quick"] if run.quick else []), timeout=190)
        sampler.start(child.pid)
        out = child.end()
    finally:
        nvml = sampler.stop()
    if not nvml["max_bytes"]:
        raise Failed("the sampler saw no memory of the process")
    held = {name: 100 * out["most"][name] / out["caps"][name] for name in NAMES}
    return {
        "process": [nvml["max_bytes"] / GIB],
        "sum": [sum(out["caps"].values()) / GIB],
        "gap": [nvml["longest_gap_ms"]],
        "samples": [nvml["samples"]],
        **{name: [share] for name, share in held.items()},
        "least": [min(held.values())],  # an allocator that refuses early holds little
        "unaccounted": [out["unaccounted"] / MIB],
        **{f"emptied.{name}": [out["emptied"][name] / MIB] for name in RETURNING},
    }


def program_caps(quick: str = "") -> dict[str, Any]:
    """Each framework filled in turn, then each emptied and driven to its refusals while the other five are full.

    Quick: with 8 GiB, and without the refusals that take ten seconds.
    """
    import memguard
    from bench.programs import six

    guard, readings = six.all_live(six.budget(8 * GIB if quick else LIMIT))
    limits = dict(guard.plan.devices[0].caps)
    driven = {name: six.Driven(name, limits[name], SEED + number) for number, name in enumerate(NAMES)}

    def fill(one: six.Driven, *kinds: tuple[int, int]) -> None:
        for low, high in kinds:
            if quick and one.name in six.SLOW:
                one.add(low, high)
            else:
                one.until_refused(low, high)
        readings.append(six.reading())

    large, small = (1 * MIB, 300 * MIB), (1, 1 * MIB)
    for one in driven.values():
        fill(one, large)
    for one in driven.values():
        one.live.clear()
        fill(one, large, small)
    time.sleep(1)  # all six full: at least ten samples see it
    emptied = {name: _emptied(driven[name]) for name in RETURNING}
    for one in driven.values():
        one.live.clear()
    memguard.trim()
    readings.append(six.reading())
    most = {name: one.most for name, one in driven.items()}
    return {"caps": limits, "most": most, "unaccounted": six.worst(readings), "emptied": emptied}


def _emptied(one: Any) -> int:
    """Bytes by which the ledger and the driver differ over what the framework held: its row before and after.

    Small pieces of several frameworks share slabs, and a slab goes back with its last piece. The ledger has what is
    free in slabs in `overhead`, of which nothing else goes back meanwhile.
    """
    import memguard
    from bench.programs import six

    def figures() -> tuple[int, int]:
        part = six.reading()
        return part["frameworks"][one.name]["held"] + part["overhead"], six.bytes_now()

    before = figures()
    one.live.clear()
    memguard.trim(one.name)
    after = figures()
    if before[1] - after[1] < one.most * 9 // 10:
        raise AssertionError(f"{one.name}: freed {one.most} bytes, and the driver got {before[1] - after[1]} back")
    return abs(before[0] - after[0] - (before[1] - after[1]))


if __name__ == "__main__":
    main({"caps": program_caps})
