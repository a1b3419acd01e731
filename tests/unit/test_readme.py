"""The README and the documents say what is there: figures of the committed results, links, commands, examples."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long  # no version of what is installed changes what the documents say

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"
MIB, GIB = 1 << 20, 1 << 30
SIX = ("tensorflow", "torch", "jax", "cupy", "pycuda", "numba")
sys.path.insert(0, str(ROOT / "benchmarks"))


def between(document: str, name: str) -> str:
    """The generated part of a document, as it is committed."""
    text = (ROOT / document).read_text(encoding="utf-8")
    assert text.count(f"<!-- {name}: begin -->") == text.count(f"<!-- {name}: end -->") == 1
    return text.split(f"<!-- {name}: begin -->\n")[1].split(f"\n<!-- {name}: end -->")[0]


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def stale(name: str) -> bool:
    import _run

    return _run.is_stale(result(name)["about"])


@pytest.mark.parametrize("document", ["README.md", "docs/results.md", "docs/exchange.md", "docs/ledger.md"])
def test_generated_parts_are_made_of_the_committed_results(document: str) -> None:
    import table

    text = (ROOT / document).read_text(encoding="utf-8")
    assert table.generated(document, text) == text, "run python benchmarks/table.py"


def test_the_ledger_of_the_readme_is_the_one_that_was_recorded() -> None:
    (shown,) = re.findall(r"```\n(.*?)\n```", between("README.md", "ledger"), re.DOTALL)
    printed = [line.rstrip() for line in result("h200-main-job.json")["mixed_workload"]["ledger"].splitlines()]
    assert len(shown.splitlines()) > 15
    assert shown.splitlines() == printed[: len(shown.splitlines())]
    assert "tensorflow*" in shown and "total" in shown


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150
    assert "pip install memguard" not in README


def rows() -> list[tuple[str, str, list[str]]]:
    """README's measured rows: what was measured, the figures, and the files that they are said to come from."""
    found = []
    for line in between("README.md", "results").splitlines()[2:]:
        if line.startswith("|"):
            what, measured, source = line.strip("| ").split(" | ")
            found.append((what, measured, re.findall(r"\(benchmarks/results/([\w.-]+\.json)\)", source)))
    return found


def test_the_readme_has_at_most_twelve_measured_rows_and_says_which_are_stale() -> None:
    lines = [line for line in between("README.md", "results").splitlines()[2:] if line.startswith("|")]
    assert 8 <= len(lines) <= 12
    for line, (_, _, names) in zip(lines, rows(), strict=True):
        assert names
        assert line.endswith("STALE |") == any(stale(name) for name in names), line


def test_the_readme_has_at_most_twelve_rows_once_everything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest table: with what older results lack."""
    import table

    whole = {path.name: result(path.name) for path in RESULTS.glob("*.json")}
    together = whole["h200-main-job.json"]["scenarios"]["together"]
    together["raw"] = [{"bytes": 16 * MIB, "unaccounted": [0, 16 * MIB, 0]}]
    together["emptied"] = {"torch": {"held": [GIB, 0], "nvml": [GIB, 0]}}
    loop = {"allocated": 9876, "refused": {"torch": 54, "jax": 3}, "unaccounted_drift": 2 * MIB}
    whole["h200-all-frameworks.json"]["scenarios"]["loop"] = loop
    whole["h200-init.json"] = {**whole["h200-light.json"], "ways": {"init": {"without_nvml_init": {"median_ms": 41.0}}}}
    monkeypatch.setattr(table, "load", whole.__getitem__)
    monkeypatch.setattr(table, "measured", whole.__contains__)
    lines = [line for line in table.readme_table().splitlines()[2:] if line.startswith("|")]
    assert len(lines) <= 12
    for said in ("9,876 allocations, 57 refusals, and unaccounted memory drifts by 2 MiB", "| 41 ms |", "16 MiB taken"):
        assert sum(said in line for line in lines) == 1, said


def test_every_figure_of_the_readme_is_in_the_result_that_its_row_names() -> None:
    """Read from the JSON here, and not by what wrote the table."""
    job, six, watch, exchange, light = (
        result(f"h200-{name}.json") for name in ("main-job", "all-frameworks", "watch", "exchange", "light")
    )
    alone, driven = job["scenarios"]["without_memguard"], job["scenarios"]["together"]["driven"]
    together, loop = six["scenarios"]["together"], six["scenarios"].get("loop")
    ops, speed = watch["scenarios"]["small ops"]["ratio"], exchange["scenarios"]["speed"]
    host = [
        speed["host"]["to_host_ms"][pair.split(" > ")[0]] + speed["host"]["from_host_ms"][pair.split(" > ")[1]]
        for pair in speed["speed"]
    ]
    begun = light["init"]["init_s"]["median"] * 1e3
    if (RESULTS / "h200-init.json").exists():
        begun = result("h200-init.json")["ways"]["init"]["without_nvml_init"]["median_ms"]
    tests = [list(result(path.name)["results"].values()) for path in sorted(RESULTS.glob("*gpu-tests.json"))]
    expected = {
        "Without memguard": [alone["tensorflow_took"] / MIB],
        "With a limit": [
            *(driven[name][key] / MIB for name in ("tensorflow", "torch", "pycuda") for key in ("most_held", "cap")),
            job["scenarios"]["together"]["nvml"]["max_bytes"] / GIB,
            job["scenarios"]["together"]["nvml"]["samples"],
            job["scenarios"]["together"]["nvml"]["longest_gap_ms"],
        ],
        "All six": [
            together["nvml"][figure] / per
            for figure, per in (
                ("max_bytes", GIB),
                ("samples", 1),
                ("longest_gap_ms", 1),
            )
        ],
        "A leak": [watch["scenarios"]["leak"]["announced_before_oom_s"]],
        "Small PyTorch": [ops["median"], 95, ops["low"], ops["high"]],
        "1 GiB to another": [
            max(one["memguard"]["median_us"] for one in speed["speed"].values()),
            min(host),
            max(host),
        ],
        "`memguard.init`": [begun],
        "The tests": [
            count
            for one in tests
            for outcome in ("passed", "failed", "skipped", "not run")
            if (count := one.count(outcome)) or outcome in ("passed", "failed")
        ],
    }
    if "raw" in job["scenarios"]["together"]:
        raw, emptied = job["scenarios"]["together"]["raw"], job["scenarios"]["together"]["emptied"]
        expected["The ledger against"] = [
            *(one["bytes"] / MIB for one in raw),
            max(abs(one["unaccounted"][1] - one["unaccounted"][0] - one["bytes"]) for one in raw) / MIB,
            max(abs(one["held"][0] - one["held"][1] - one["nvml"][0] + one["nvml"][1]) for one in emptied.values())
            / MIB,
        ]
    if loop:
        expected["All six"] += [loop["allocated"], sum(loop["refused"].values()), loop["unaccounted_drift"] / MIB]
    if (RESULTS / "h200-moment.json").exists():
        moment = result("h200-moment.json")
        programs, quiet = list(moment["programs"].values()), list(moment["quiet"].values())
        tried = [one["followed"]["helped"] for one in programs if one["followed"]["tried"]]
        right = sum(all(right for right, _ in one["fields"].values()) for one in programs)
        alarms = sum(len(one["alarms"]) for one in quiet)
        expected["Reports on ordinary"] = [right, len(programs), tried.count(True), len(tried), alarms, len(quiet)]
    if (RESULTS / "h200-elastic.json").exists():
        done = result("h200-elastic.json")["scenarios"]
        guarded = [done[f"reclaim {name}"]["error"] for name in SIX if f"reclaim {name}" in done]
        plain = [done[f"reclaim {name}, plain"]["error"] for name in SIX if f"reclaim {name}, plain" in done]
        moves = [pair["p99_ms"] for pair in done["moves"]["blocks"]["pairs"].values()]
        failed = len(plain) - plain.count(None)
        expected["A sibling's idle"] = [failed, len(plain), guarded.count(None), len(guarded), 8, max(moves)]
    if (RESULTS / "h200-suspend.json").exists():
        done = result("h200-suspend.json")["scenarios"]
        rounds = [done[name] for name in (*(f"rounds {one}" for one in SIX), "rounds six") if "rounds" in done[name]]
        figures = [sum(one["rounds"] for one in rounds), len(rounds), sum(one["wrong"] for one in rounds)]
        if "seconds torch" in done:
            first = done["seconds torch"]["sizes"]["16"]["rounds"][0]
            figures += [16, first["off_s"], first["on_s"]]
        expected["A process leaves"] = figures
    assert len(rows()) == len(expected)
    for what, measured, _ in rows():
        (figures,) = [figures for begin, figures in expected.items() if what.startswith(begin)]
        text = re.sub(r"on \d+ × NVIDIA \w+( \w+)*", "", measured)  # how many GPUs, and their names
        numbers = re.findall(r"(?<![\w`])[\d,]+(?:\.\d+)?", text)
        assert len(numbers) == len(figures), (what, numbers)
        for number, figure in zip(numbers, figures, strict=True):
            digits = len(number.partition(".")[2])
            assert float(number.replace(",", "")) == pytest.approx(figure, abs=0.51 * 10**-digits), (what, number)


def test_the_readme_counts_the_checks_that_were_missed() -> None:
    checks = [check for path in RESULTS.glob("*.json") for check in result(path.name).get("checks", {}).values()]
    missed = sum(not passed for passed, _ in checks)
    assert f"the {missed} checks that were missed" in between("README.md", "results")


def test_every_result_is_listed_with_its_age_and_its_missed_checks() -> None:
    text = between("docs/results.md", "results")
    for path in RESULTS.glob("*.json"):
        (row,) = [line for line in text.splitlines() if line.startswith(f"| [{path.name}]")]
        assert row.endswith("| STALE |") == stale(path.name), row
        mentions = [line for line in text.splitlines() if f"({'../benchmarks/results/' + path.name})" in line]
        assert len(mentions) >= 2, f"{path.name} is listed, but nothing of it is shown"
        assert all(("STALE" in line) == stale(path.name) for line in mentions)
        for check, (passed, figure) in result(path.name).get("checks", {}).items():
            assert passed or f"- {check}: {figure}" in text


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


def test_the_budget_of_the_readme_is_that_of_its_ledger() -> None:
    from memguard import _config

    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert _config.parse(text) == _config.load(ROOT / "examples" / "mixed.yaml")


def test_the_committed_results_pass_their_own_checks_again() -> None:
    """Those that are still in the list: a check whose bar has changed has another name."""
    import checks

    judges: dict[str, Callable[[Any], dict[str, tuple[bool, str]]]] = {
        "main-job": lambda r: checks.main_job_checks({**r["scenarios"], "mixed_workload": r["mixed_workload"]}),
        "all-frameworks": lambda r: checks.all_frameworks_checks(r["scenarios"]),
        "watch": lambda r: checks.watch_checks(r["scenarios"]),
        "doctor": checks.doctor_checks,
        "moment": checks.moment_checks,
        "their-tests": checks.their_tests_checks,
        "x2-ddp": lambda r: checks.ddp_checks(r["ranks"]),
        "light": checks.light_checks,
    }
    for name, judge in judges.items():
        committed = result(f"h200-{name}.json")
        again = judge(committed)
        told = [check for check in committed["checks"] if check in again]
        assert len(told) >= 4, name
        for check in told:
            assert again[check][0] == committed["checks"][check][0], (name, check, again[check])


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
    (jax,) = [row for row in outcome.frameworks if row.framework == "jax"]
    page = " ".join((ROOT / "docs" / "simulation.md").read_text(encoding="utf-8").split())
    assert f"JAX held {most['jax']['held'] // MIB} MiB, and {jax.peak_held // MIB} MiB in its replay" in page


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    return CONTRIBUTING.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_every_path_that_contributing_names_is_there() -> None:
    import memguard

    package = Path(memguard.__file__).parent
    named = set(re.findall(r"`((?:memguard|benchmarks|docs|scripts|tests|\.ci)/[\w./<>-]*)`", CONTRIBUTING))
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
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    layers = re.findall(
        r'^    "(memguard\..*)",$', project.partition("\nlayers = [")[2].partition("]")[0], re.MULTILINE
    )
    checked = [re.findall(r"memguard\.(\w+)", layer) for layer in layers]
    lines = [line for line in section("The rooms").splitlines() if line.startswith("| `")]
    told = [re.findall(r"`(\w+)(?:/|\.py)`", line.split(" | ")[0]) for line in lines]
    assert len(checked) > 10
    assert told == checked
