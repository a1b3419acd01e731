"""Caps of six frameworks in one process: NVML's figure of the process, and what each framework held at its refusals."""

from __future__ import annotations

import time
from typing import Any

from bench.child import main
from bench.measure import Failed, Run, measure
from bench.programs import six
from bench.programs.six import GIB, MIB, NAMES

LIMIT = 40 * GIB
SEED = 20261121
INTERVAL = 0.02  # Seconds between two samples: with 0.05 they were up to 109 ms apart on a busy machine.


@measure(
    "caps",
    unit={
        "process": "GiB", "sum": "GiB", "gap": "ms", "samples": "samples", "least": "% of cap", "unaccounted": "MiB",
        **dict.fromkeys(NAMES, "% of cap"),
    },
    bar={
        "process": "<= 40", "sum": ">= 36", "gap": "<= 100", "samples": ">= 1000", "least": ">= 95",
        "unaccounted": "<= 64", **dict.fromkeys(NAMES, "<= 100"),
    },
    seconds=95, beside=True,
)  # fmt: skip
def caps(run: Run) -> dict[str, list[float]]:
    """Memory of six frameworks under one budget of 40 GiB, each driven to its refusal while the others are full."""
    out = run.program("caps", *(["quick"] if run.quick else []), timeout=190, sampled=INTERVAL)
    nvml = out["nvml"]
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
    }


def program_caps(quick: str = "") -> dict[str, Any]:
    """Each framework filled in turn, then each emptied and driven to its refusals while the other five are full.
    Quick: with 8 GiB, and without the refusals that take ten seconds."""
    import memguard

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
    for one in driven.values():
        one.live.clear()
    memguard.trim()
    readings.append(six.reading())
    most = {name: one.most for name, one in driven.items()}
    return {"caps": limits, "most": most, "unaccounted": six.worst(readings)}


if __name__ == "__main__":
    main({"caps": program_caps})
