"""A run of `benchmarks/elastic.py` as it should be, made up: for the tests of its checks and of its tables."""

from __future__ import annotations

from typing import Any

MIB, GIB = 1 << 20, 1 << 30
SIX = ("tensorflow", "torch", "jax", "cupy", "pycuda", "numba")
MIX = {
    "torch": ("plain", "plain, again", "caps", "pool", "rmm"),
    "cupy": ("plain", "plain, again", "caps", "pool", "rmm"),
    "pycuda": ("own pool", "own pool, again", "plain", "caps", "pool"),
    "numba": ("plain", "plain, again", "caps", "pool", "rmm"),
}


def whole() -> dict[str, Any]:
    """Every scenario, with figures that pass every bar."""
    made: dict[str, Any] = {}
    for name in SIX:
        made[f"reclaim {name}"] = _reclaim(name, None)
        text = {"exception": f"{name}.OutOfMemoryError", "text": "out of memory"}
        made[f"reclaim {name}, plain"] = _reclaim(name, text)
    made["moves"] = {
        "returncode": 0, "bytes": 8 * GIB, "limit": 14 * GIB, "nvml": nvml(13 * GIB), "wall_s": 110.0,
        "blocks": _moved(64 * MIB, 100, 21.5), "pieces": _moved(2 * MIB, 12, 260.0),
    }  # fmt: skip
    made["burst"] = _burst(200, True)
    made["burst, fixed shares"] = _burst(10, False)
    made["pool"] = _pool("pool", [9.2] * 5)
    made["pool, caps"] = _pool("caps", [9.2, 17.2, 25.2, 33.2, 41.2])
    made["mix"] = _mix()
    made |= {f"schedule {seed}": _schedule(seed, 0) for seed in range(1, 21)}
    made |= {f"fixed shares, schedule {seed}": _schedule(seed, 7) for seed in (1, 2)}
    return made


def nvml(most: int) -> dict[str, Any]:
    return {
        "samples": 500,
        "interval_ms": 20.0,
        "longest_gap_ms": 30.0,
        "seconds": 10.0,
        "failed": 0,
        "max_bytes": most,
    }


def _reclaim(name: str, error: dict[str, str] | None) -> dict[str, Any]:
    sibling = "cupy" if name == "torch" else "torch"
    fixed = name in ("tensorflow", "jax") and error is None
    one: dict[str, Any] = {
        "returncode": 0, "sibling": sibling, "cache": (126 if fixed else 136) * GIB, "sibling_refused": None,
        "another": 10 * GIB if fixed else 0, "free": 2 * GIB + 3 * MIB, "asked": 8 * GIB, "seconds": 0.12,
        "error": error, "nvml": nvml(138 * GIB), "wall_s": 12.0,
    }  # fmt: skip
    if error is None:
        one |= {"given_back": 6 * GIB, "right": True, "free_after": 2 * GIB}
    return one


def _moved(piece: int, n: int, ms: float) -> dict[str, Any]:
    givers, takers = ("torch", "cupy", "numba", "pycuda"), ("cupy", "pycuda", "numba")
    pair = {
        "ms": [ms] * n, "by_hand_ms": [ms - 1] * 5, "wrong": 0, "error": None, "n": n, "p50_ms": ms, "p99_ms": ms + 3,
        "max_ms": ms + 4, "by_hand_p50_ms": ms - 1, "most_grown": 2 * MIB,
    }  # fmt: skip
    pairs = {f"{giver} > {taker}": dict(pair) for giver in givers for taker in takers if giver != taker}
    return {"piece": piece, "seconds": 60.0, "pairs": pairs}


def _burst(times: int, elastic: bool) -> dict[str, Any]:
    served = {"n": times, "served": times, "at_once": times, "p50_ms": 3.0, "p99_ms": 9.0, "max_ms": 12.0, "wrong": 0}
    never = {"n": times, "served": 0, "at_once": 0, "p50_ms": None, "p99_ms": None, "max_ms": None, "wrong": 0}
    return {
        "returncode": 0, "alternations": times, "live": [12 * GIB - 64 * MIB] * times, "most_own": 17 * GIB,
        "min": 4 * GIB, "max": 12 * GIB, "tick_ms": 100.0, "limit": 19 * GIB, "nvml": nvml(17 * GIB), "wall_s": 20.0,
        "asked_min": {**served, "text": None},
        "asked_max": {**served, "text": None} if elastic else {**never, "text": "Out of memory allocating"},
    }  # fmt: skip


def _pool(strategy: str, at_peaks: list[float]) -> dict[str, Any]:
    names = ("torch", "cupy", "pycuda", "numba", "jax")
    in_turn = {
        name: {"bytes": 8 * GIB, "at_peak": int(peak * GIB), "freed": GIB, "wrong": 0}
        for name, peak in zip(names, at_peaks, strict=True)
    }
    return {
        "returncode": 0, "strategy": strategy, "peak": 8 * GIB, "overhead": int(1.1 * GIB), "in_turn": in_turn,
        "trimmed": GIB, "enforcement": {}, "notes": [], "nvml": nvml(int(max(at_peaks) * GIB)), "wall_s": 20.0,
    }  # fmt: skip


def _mix() -> dict[str, Any]:
    spread = {"n": 25, "median": 1.05, "low": 1.01, "high": 1.08, "min": 1.0, "max": 1.1}
    figures = {
        library: {
            way: {"us": 2.5, "rounds": 25, **({} if way in ("plain", "own pool") and way == ways[0] else
                                              {"ratio": dict(spread)})}
            for way in ways
        }
        for library, ways in MIX.items()
    }  # fmt: skip
    says = {library: dict.fromkeys(ways, "as it says") for library, ways in MIX.items()}
    return {
        "returncode": 0, "cap": 6 * GIB, "live": 32, "sizes": [1024, 64 * MIB], "steps": 400, "missing": {},
        "failed": {}, "us": {}, "figures": figures, "seconds": 40.0, "says": says, "wall_s": 60.0,
    }  # fmt: skip


def _schedule(seed: int, avoidable: int) -> dict[str, Any]:
    return {
        "returncode": 0, "seed": seed, "limit": 12 * GIB, "steps": 60, "requests": 70, "refused": 12 + avoidable,
        "infeasible": 9, "blocked": 3, "fragments": {"torch": 3}, "avoidable": avoidable, "above_limit": 0,
        "minima": 0, "wrong": 0, "faults": ["step 3: torch was refused"] if avoidable else [],
        "most_process": 11 * GIB, "by_framework": {}, "nvml": nvml(11 * GIB), "wall_s": 60.0,
    }  # fmt: skip
