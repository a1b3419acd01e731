"""A whole result of `benchmarks/suggest.py`, made up."""

from __future__ import annotations

from typing import Any

MIB = 1 << 20


def _run(passed: bool = True) -> dict[str, Any]:
    return {"passed": passed, "returncode": 0 if passed else 1, "refused": 0 if passed else 1, "seconds": 9.1}


def _figures(frameworks: tuple[str, ...], limit: int) -> dict[str, Any]:
    rows = [
        {
            "framework": name, "limit": limit // 2, "needed": limit // 3, "source": "allocator", "in_use": limit // 4,
            "held": limit // 2, "peak": None if name == "cupy" else limit // 3,
        }
        for name in frameworks
    ]  # fmt: skip
    return {"limit": limit, "reserve": 800 * MIB, "frameworks": rows}


def chain(*frameworks: str) -> dict[str, Any]:
    """One program, for which 5 % is enough."""
    limits = {-10: 3600, -5: 3800, 0: 4000, 5: 4160, 10: 4320}
    return {
        "returncode": 0,
        "wide": _run(),
        "tried": [
            {"headroom": headroom, "limit": limit * MIB, "runs": [_run(headroom >= 5), _run(headroom >= 5)]}
            for headroom, limit in limits.items()
        ],
        "default": {**_figures(frameworks, 4480 * MIB), "yaml": "version: 1\n", "runs": [_run() for _ in range(10)]},
        "record": {"run": _run(), **_figures(frameworks[:1], 4400 * MIB), "notes": [], "again": _run()},
        "wall_s": 180.0,
    }


def whole() -> dict[str, Any]:
    return {
        "torch_training": chain("torch"),
        "jax_cupy": chain("jax", "cupy"),
        "tensorflow_pycuda": chain("tensorflow", "pycuda"),
        "recording": {
            "returncode": 0, "wall_s": 31.0, "seconds": 20.4, "samples": 204, "bytes": 90 << 10,
            "frameworks": ["cupy", "jax", "torch"], "events": {"peak": 9, "refused": 2, "workload": 60},
            "refused": ["cupy", "torch"], "workloads": ["features", "join", "score", "train", "validate"],
            "ooms": ["torch", "cupy"],
        },
    }  # fmt: skip
