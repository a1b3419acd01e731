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
    from memguard import config

    found = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert found
    for text in found:
        config.parse(text)


def test_the_committed_results_pass_their_own_checks_again() -> None:
    import json

    from checks import main_job_checks

    result = json.loads((ROOT / "benchmarks/results/h200-main-job.json").read_text())
    again = main_job_checks(result["scenarios"])
    assert {name: passed for name, (passed, _) in again.items()} == {n: c[0] for n, c in result["checks"].items()}


def test_the_recorded_trace_replays_to_what_was_recorded_within_two_percent() -> None:
    from memguard import config, policy, simulate, trace

    recorded = trace.read(ROOT / "examples/traces/mixed-h200.jsonl")
    assert not recorded.header.simulated
    host = simulate.host_of(recorded.header)
    plan = policy.plan(config.load(ROOT / "examples/mixed.yaml"), host.devices())
    caps = {name: plan.caps(name) for name in plan.devices[0].caps}
    outcome = simulate.replay(recorded, host, caps, plan.options)
    most = recorded.header.extra["most"]
    compared = 0
    for row in outcome.frameworks:
        for what, figure in (("held", row.peak_held), ("in_use", row.peak_in_use)):
            # TensorFlow is sampled, so its peak between two samples may be missing; PyCUDA's in use counts whole bins.
            if what in most[row.framework] and (row.framework == "torch" or what == "held"):
                assert figure == pytest.approx(most[row.framework][what], rel=0.02), (row.framework, what)
                compared += 1
        for deviation in (row.held_deviation, row.in_use_deviation):
            assert deviation is None or deviation <= 0.02
    assert compared >= 3
    assert outcome.refused == 0
