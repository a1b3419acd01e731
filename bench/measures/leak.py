"""A leak under a monitor: how long before its out-of-memory error memguard announces it."""

from __future__ import annotations

import time
from typing import Any

from bench.child import main
from bench.measure import Failed, Run, Values, measure
from bench.programs.six import GIB, MIB

RATE = GIB  # Bytes a second.
STEP = 64 * MIB


@measure(
    "leak", unit={"before": "s", "forecast": "times"}, bar={"before": ">= 5", "forecast": "<= 2"}, seconds=40,
    needs=("torch",), beside=True,
)  # fmt: skip
def leak(run: Run) -> dict[str, Values | Failed]:
    """A leak of 1 GiB/s: seconds from its announcement to the out-of-memory error, and how far off the forecast was."""
    found = run.program("leak", 40 if not run.quick else 6, 20 if not run.quick else 3, timeout=100)
    before, said = found["before"], found["forecast"]
    if before is None:
        return {"before": [0.0], "forecast": Failed("nothing was announced")}
    off = [max(said / before, before / said)] if said and before else Failed(f"it said in {said} s, {before} s before")
    return {"before": [before], "forecast": off}


def program_leak(cap_gib: str, below_gib: str) -> dict[str, Any]:
    """Grow by `RATE`, from `below_gib` below the cap on, in steps of 64 MiB until torch refuses."""
    import memguard

    cap, below = int(cap_gib) * GIB, int(below_gib) * GIB
    device, frameworks = {"limit": f"{int(cap_gib) + 8}GiB"}, {"torch": {"limit": f"{cap_gib}GiB"}}
    memguard.init({"version": 1, "device": device, "frameworks": frameworks, "monitor": {"interval": "100ms"}})
    forecasts: list[tuple[float, float | None]] = []

    def event(event: Any) -> None:
        if event.kind == "forecast":
            forecasts.append((time.monotonic(), event.seconds))

    memguard.on_event(event)
    import torch

    live = [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range((cap - below) // GIB)]
    time.sleep(3)
    started = time.monotonic()
    count = 0
    while True:
        try:
            live.append(torch.empty(STEP, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            refused = time.monotonic()
            break
        count += 1
        time.sleep(max(started + count * STEP / RATE - time.monotonic(), 0))
    first = forecasts[0] if forecasts else None
    return {"before": refused - first[0] if first else None, "forecast": first[1] if first else None}


if __name__ == "__main__":
    main({"leak": program_leak})
