"""The README and the documents say what is there: links, modules, budgets, examples."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # no version of what is installed changes what the documents say

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MIB, GIB = 1 << 20, 1 << 30
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_modules_that_are_named_are_there(document: str) -> None:
    import memguard

    package = Path(memguard.__file__).parent
    text = (ROOT / document).read_text(encoding="utf-8")
    for path in re.findall(r"\bmemguard/[\w/]+\.(?:py|pth)\b", text):
        top = package.parent / Path(path).name  # where the wheel has memguard.pth
        assert (package.parent / path).exists() or (path.endswith(".pth") and top.exists()), path
    for dotted in re.findall(r"\bmemguard(?:\._\w+)+", text):
        parts = package.parent.joinpath(*dotted.split("."))
        assert parts.is_dir() or parts.with_suffix(".py").exists(), dotted


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_that_is_shown_compiles(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        compile(block, document, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


def test_the_sentence_below_the_figures_is_that_of_their_release() -> None:
    measured = README.partition("\n## Measured\n")[2].partition("\n## ")[0]
    (version,) = re.findall(r"^\| memguard (\S+) on ", measured, re.MULTILINE)
    page = (ROOT / "docs" / "results" / f"{version}.md").read_text(encoding="utf-8")
    (missed,) = re.findall(r"\*\*(\d+ of \d+ bars are not reached)", page)
    (driver,) = re.findall(r"^Measured on .*?, driver ([\d.]+),", page, re.MULTILINE)
    assert f" {missed}" in measured and f"\nDriver {driver}." in measured


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_of_the_repository_that_are_named_are_there(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for path in re.findall(r"`((?:bench|examples|scripts|tests)/[\w./-]+\w)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("gpu", ["t4", "rtx4090", "a100-40gb", "h200"])
def test_the_first_budget_of_the_readme_fits_any_card(gpu: str) -> None:
    from memguard import _budget
    from memguard._budget import policy
    from memguard._devices.simulated import SimulatedHost

    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    plan = policy.plan(_budget.parse(text), SimulatedHost([gpu]).devices())
    caps = [plan.caps(name) for name in ("tensorflow", "torch")]
    assert all(cap > 4 * GIB for by_device in caps for cap in by_device.values())


def test_the_recorded_trace_replays_to_what_was_recorded_within_two_percent() -> None:
    from memguard import _budget
    from memguard._budget import policy
    from memguard._tools.simulate import replay, trace

    recorded = trace.read(ROOT / "examples/traces/mixed-h200.jsonl")
    assert not recorded.header.simulated
    host = replay.host_of(recorded.header)
    plan = policy.plan(_budget.load(ROOT / "examples/mixed.yaml"), host.devices())
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
    (jax,) = [row for row in outcome.frameworks if row.framework == "jax"]
    page = " ".join((ROOT / "docs" / "simulation.md").read_text(encoding="utf-8").split())
    assert f"JAX held {most['jax']['held'] // MIB} MiB, and {jax.peak_held // MIB} MiB in its replay" in page


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    return CONTRIBUTING.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_every_path_that_contributing_names_is_there() -> None:
    import memguard

    package = Path(memguard.__file__).parent
    named = set(re.findall(r"`((?:memguard|bench|docs|scripts|tests|\.ci)/[\w./<>-]*)`", CONTRIBUTING))
    assert len(named) > 15
    for path in sorted(named):
        if "<name>" in path:
            path = path.rpartition("/")[0]
        place = package.parent if path.startswith("memguard/") else ROOT
        if path != ".ci/run":  # the tests also run in a tree without it
            assert (place / path).exists(), path


def test_contributing_says_what_to_open_in_at_most_ten_rows() -> None:
    lines = [line for line in section("Where to start").splitlines() if line.startswith("| ")][2:]
    assert 1 <= len(lines) <= 10
    assert all("`" in line.split(" | ")[1] for line in lines)


def test_the_rooms_of_contributing_are_the_layers_that_are_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = next(one["layers"] for one in project["tool"]["importlinter"]["contracts"] if one["id"] == "layers")
    checked = [layer.split(" | ") for layer in layers]
    lines = [line for line in section("The rooms").splitlines() if line.startswith("| `")]
    told = [re.findall(r"`(\w+)(?:/|\.py)`", line.split(" | ")[0]) for line in lines]
    assert len(checked) > 10
    assert told == checked
