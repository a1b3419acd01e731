"""The README and the documents say what is there: figures of the committed results, links, commands, examples."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
sys.path.insert(0, str(ROOT / "benchmarks"))


def test_the_tables_are_those_of_the_committed_results() -> None:
    import table

    shown = README.split(table.BEGIN)[1].split(table.END)[0].strip("\n")
    assert shown == table.tables(), "run python benchmarks/table.py --write"


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
)
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


def test_the_budget_of_the_readme_is_valid() -> None:
    from memguard import _config

    found = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert found
    for text in found:
        _config.parse(text)


def test_the_committed_results_pass_their_own_checks_again() -> None:
    import json

    from checks import main_job_checks

    result = json.loads((ROOT / "benchmarks/results/h200-main-job.json").read_text())
    again = main_job_checks(result["scenarios"])
    assert {name: passed for name, (passed, _) in again.items()} == {n: c[0] for n, c in result["checks"].items()}


def test_the_recorded_trace_replays_to_what_was_recorded_within_two_percent() -> None:
    from memguard import _config, _policy
    from memguard._simulation import replay, trace

    recorded = trace.read(ROOT / "examples/traces/mixed-h200.jsonl")
    assert not recorded.header.simulated
    host = replay.host_of(recorded.header)
    plan = _policy.plan(_config.load(ROOT / "examples/mixed.yaml"), host.devices())
    caps = {name: plan.caps(name) for name in plan.devices[0].caps}
    outcome = replay.simulate(recorded, host, caps, plan.options)
    most = recorded.header.extra["most"]
    single = {event.framework for event in recorded.events if event.op == "alloc"}
    assert {"torch", "pycuda"} <= single
    compared = 0
    for row in outcome.frameworks:
        # The others are sampled: what is in use is known, and how their allocators came to hold what they hold is not.
        figures = [("in_use", row.peak_in_use, row.in_use_deviation)]
        if row.framework in single or row.framework in ("cupy", "numba"):
            figures.append(("held", row.peak_held, row.held_deviation))
        for what, figure, deviation in figures:
            # TensorFlow's peak between two samples may be missing; PyCUDA's in use counts whole bins.
            unclear = what == "in_use" and row.framework in ("tensorflow", "pycuda")
            if what in most[row.framework] and not unclear:
                assert figure == pytest.approx(most[row.framework][what], rel=0.02), (row.framework, what)
                compared += 1
            assert deviation is None or deviation <= 0.02, (row.framework, what)
    assert compared >= 7
    assert outcome.refused == 0
