"""Each framework, in each circumstance, in a process of its own: capped as declared, undone where it can be."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "benchmarks" / "main_job.py")
NAMES = [f"{f}-{w}" for f in ("torch", "tensorflow", "pycuda") for w in ("later", "imported", "live")]
NAMES += ["order_cured", "order_cured_tensorflow_first", "order_control", "torch_expandable", "torch_async"]
NAMES += ["tensorflow-undone", "torch_and_pycuda"]


# There TensorFlow has no limit, on purpose or after `shutdown`, and takes the card.
UNLIMITED = ("order_control", "tensorflow-live", "tensorflow-undone")
SCENARIOS = [pytest.param(n, marks=pytest.mark.whole_card) if n in UNLIMITED else n for n in NAMES]


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_of_the_main_job(name: str) -> None:
    import main_job
    from _listed import MAIN_JOB
    from checks import main_job_checks

    outcome = main_job.run_scenario(SCRIPT, name, env=main_job.ENVIRONMENTS.get(name))
    log = outcome.pop("_stderr")
    found = main_job_checks({name: outcome})
    failed = {check: found[check][1] for check in MAIN_JOB[name] if not found[check][0]}
    assert not failed, (failed, outcome, log[-3000:])
