"""CuPy, JAX and Numba in each circumstance, in processes of their own; all six together are the benchmark's."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).resolve().parents[2] / "benchmarks" / "all_frameworks.py")


@pytest.mark.parametrize("when", ["later", "imported", "live"])
@pytest.mark.parametrize("framework", ["cupy", "jax", "numba"])
def test_circumstance(framework: str, when: str) -> None:
    import all_frameworks
    from _listed import ALL_FRAMEWORKS
    from checks import all_frameworks_checks

    name = f"{framework}, {when}"
    outcome = all_frameworks.run_scenario(SCRIPT, name)
    log = outcome.pop("_stderr")
    found = all_frameworks_checks({name: outcome})
    failed = {check: found[check][1] for check in ALL_FRAMEWORKS[name] if not found[check][0]}
    assert not failed, (failed, outcome, log[-3000:])
