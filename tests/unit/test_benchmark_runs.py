"""How the benchmarks measure, and keep what they measured, without a GPU."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long  # no version of what is installed changes what the benchmarks' own code does

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
_run, _independent, _sampler, checks, table = (
    importlib.import_module(name) for name in ("_run", "_independent", "_sampler", "checks", "table")
)
MIB, GIB, PAGE = 1 << 20, 1 << 30, 2 << 20
Result = dict[str, Any]


# The sampler


def test_a_summary_names_the_longest_gap_and_the_most_bytes() -> None:
    found = _sampler.summary([(1.0, 5), (1.05, 9), (1.164, 7), (1.2, 8)], 0.05, failed=2)
    assert found == {
        "samples": 4, "interval_ms": 50.0, "longest_gap_ms": 114.0, "seconds": 0.2, "failed": 2, "max_bytes": 9,
    }  # fmt: skip
    assert _sampler.summary([], 0.05)["longest_gap_ms"] == 0 and _sampler.summary([], 0.05)["samples"] == 0


FAKE = """
import os, time
class Process:
    def __init__(self, pid): self.pid, self.usedGpuMemory = pid, 1000 + os.getpid()
calls = 0
def nvmlInit(): pass
def nvmlDeviceGetHandleByIndex(number): return number
def nvmlDeviceGetComputeRunningProcesses(handle):
    global calls
    calls += 1
    if calls == 3: raise OSError("no answer")
    return [Process(4711), Process(1)]
"""


def test_the_sampler_is_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent holds its GIL meanwhile, which stops a thread of it and not another process."""
    (tmp_path / "pynvml.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    sampler = _run.Sampler(0.02)
    sampler.start(4711)
    until = time.monotonic() + 0.8
    while time.monotonic() < until:
        sum(range(1000))
    seen = sampler.stop()
    assert seen["max_bytes"] > 1000 and seen["max_bytes"] != 1000 + os.getpid()
    assert seen["samples"] >= 8 and seen["failed"] == 1 and 0.1 <= seen["seconds"] <= 5
    assert seen["longest_gap_ms"] >= 20


def test_without_nvml_and_without_a_start_the_sampler_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text("def nvmlInit(): raise OSError('no NVML')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sampler = _run.Sampler()
    sampler.start(1)
    assert sampler.stop()["samples"] == 0
    assert _run.Sampler().stop()["samples"] == 0
    (tmp_path / "pynvml.py").write_text("import os\nos._exit(3)\n")
    sampler = _run.Sampler()
    sampler.start(1)
    assert sampler.stop() == _sampler.summary([], 0.05), "it died, and that is not the benchmark's end"


def test_a_scenario_that_dies_leaves_its_code_and_its_last_words(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(
        "import sys\nprint('RESULT {\"figure\": 1}')\nsys.stdout.flush()\n"
        "if sys.argv[2] != 'lives': sys.exit('the last words')\n"
    )
    lived, ended = (_run.run_scenario(str(script), name) for name in ("lives", "dies"))
    assert lived["figure"] == 1 and lived["returncode"] == 0 and _run.died(lived) is None
    assert "stderr_tail" not in lived and lived["nvml"]["samples"] == 0
    assert ended["figure"] == 1 and _run.died(ended) == "rc 1: the last words"
    script.write_text("import os\nprint('RESULT {\"figure\": ', flush=True)\nos.kill(os.getpid(), 9)\n")
    cut = _run.run_scenario(str(script), "x")
    assert cut["returncode"] == -9 and "figure" not in cut and _run.died(cut) == "rc -9: nothing on its stderr"


# Refusals that are tried, on a driver of this file's own


class Driver:
    """Above 1 MiB whole pages, else pieces of 512 bytes in slabs of a page, the first with room: as CUDA's does."""

    def __init__(self) -> None:
        self.slabs: list[int] = []
        self.large = 0

    def held(self) -> int:
        return self.large + PAGE * sum(1 for used in self.slabs if used)

    def take(self, size: int) -> Callable[[], None]:
        if size > MIB:
            pages = -(-size // PAGE) * PAGE
            self.large += pages
            return lambda: self._give(pages)
        piece = -(-size // 512) * 512
        at = next((n for n, used in enumerate(self.slabs) if used + piece <= PAGE), len(self.slabs))
        if at == len(self.slabs):
            self.slabs.append(0)
        self.slabs[at] += piece

        def give() -> None:
            self.slabs[at] -= piece

        return give

    def _give(self, pages: int) -> None:
        self.large -= pages


class Refused(Exception):
    pass


class Capped:
    """A framework that refuses what would pass its cap, `early` bytes too soon. It frees what Python lets go of."""

    def __init__(self, cap: int, early: int = 0) -> None:
        self.driver, self.cap, self.early = Driver(), cap, early

    def take(self, size: int) -> Any:
        give = self.driver.take(size)
        if self.driver.held() > self.cap - self.early:
            give()
            raise Refused

        class Block:
            def __del__(self) -> None:
                give()

        return Block()

    def resize(self, cap: int) -> None:
        self.cap = cap


def tried(framework: Capped, rounds: int, rng: random.Random) -> Result:
    cap, live, found = framework.cap, [], []
    for number in range(rounds):
        low, high = (1, MIB) if number % 2 else (MIB + 1, 8 * MIB)
        rng.shuffle(live)
        del live[: rng.randint(1, 1 + len(live) // 4)]
        while True:
            size = rng.randint(low, high)
            try:
                live.append(framework.take(size))
            except Refused:
                break
        found.append(_independent.trial(size, cap, framework.driver.held, framework.take, Refused, framework.resize))
        assert framework.cap == cap, "it has its own cap again"
    return {"name": "x", "beside": False, "cap": cap, "tried": found, "foreign": []}


@pytest.mark.parametrize("seed", range(10))
def test_refusals_at_the_cap_are_right_and_a_page_early_is_found(seed: int) -> None:
    """800 refusals: half by an allocator that uses its cap to the last page, half by one that stops a page early."""
    good, figure = _independent.refused_rightly(tried(Capped(64 * MIB), 40, random.Random(seed)))
    assert good and figure.startswith("40 of 40 right"), figure
    found = tried(Capped(64 * MIB, early=PAGE), 40, random.Random(seed))
    good, figure = _independent.refused_rightly(found)
    assert not good and "when granted" in figure
    assert sum(one["would_hold"] <= found["cap"] for one in found["tried"]) >= 10, "not by chance"


def test_a_request_that_no_cap_allows_is_a_wrong_refusal() -> None:
    framework = Capped(64 * MIB, early=1 << 40)
    one = _independent.trial(5, 64 * MIB, framework.driver.held, framework.take, Refused, framework.resize)
    assert one["grown"] == 0 and one["raised_by"] >= 256 * MIB and framework.cap == 64 * MIB
    found = {"name": "x", "beside": False, "cap": 64 * MIB, "tried": [one] * 40, "foreign": []}
    assert not _independent.refused_rightly(found)[0]


def test_only_the_gaps_in_cupys_slabs_may_pass_a_cap() -> None:
    one = {"bytes": 5, "held": GIB + 20 * MIB, "raised_by": PAGE, "grown": PAGE, "would_hold": GIB + 22 * MIB}
    for name, beside, good in (("cupy", False, True), ("cupy", True, False), ("pycuda", False, False)):
        found = {"name": name, "beside": beside, "cap": GIB, "tried": [one] * 40, "foreign": []}
        assert _independent.refused_rightly(found)[0] == good, name
        found["tried"] = [{**one, "held": GIB + 60 * MIB}] * 40
        assert not _independent.refused_rightly(found)[0]


def test_what_is_freed_and_counted_is_compared_with_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    framework = Capped(GIB)
    monkeypatch.setattr(_independent, "bytes_now", lambda: framework.driver.held() + 600 * MIB)
    live: list[int] = []

    def take(size: int) -> Any:
        live.append(size)
        return framework.take(size)

    def row(part: int = 1) -> Result:
        return {"held": framework.driver.held() // part, "in_use": sum(live)}

    found = _independent.counted(take, row, lambda: None)
    for step in ("large", "small", "emptied"):
        good, figure = _independent.agrees(found[step], 0, MIB)
        assert good, (step, figure)
    assert found["emptied"]["nvml"][0] == 600 * MIB and len(live) == 424
    good, figure = _independent.in_use_is_live(found["small"])
    assert good and found["small"]["asked"] == sum(live), figure
    missing = _independent.counted(take, lambda: row(2), lambda: None)
    assert not _independent.agrees(missing["large"], 2 * MIB, MIB)[0]
    block = framework.take(100 * MIB)
    held = framework.driver.held

    def empty() -> None:
        nonlocal block
        block = None

    assert _independent.agrees(_independent.emptied("x", held, empty), 0, 100 * MIB)[0]


# CUPTI's records


def test_what_cupti_saw_is_summed_by_library() -> None:
    """100 random histories against a count by hand: releases come in any order, addresses are taken again."""
    rng = random.Random(3)
    sources = ["/x/libc10_cuda.so", "libtensorflow_cc.so.2", "/y/xla_cuda_plugin.so", "runtime.cpython-312.so",
               "_driver.cpython-312-linux-gnu.so", "cydriver.cpython-312.so", "libcublas.so.13", None]  # fmt: skip
    names = ["torch", "tensorflow", "jax", "cupy", "pycuda", "numba", "libcublas.so.13", "unknown"]
    for _ in range(100):
        records: list[tuple[Any, ...]] = []
        live: dict[int, tuple[str, int]] = {}
        for at in range(200):
            if live and rng.random() < 0.4:
                address = rng.choice(list(live))
                del live[address]
                records.append((at, 2, 3, address, 0, None))
            else:
                number, size, kind = rng.randrange(8), rng.choice([512, MIB, MIB + 1, 20 * MIB]), rng.choice([3, 3, 2])
                address = rng.choice([n for n in range(50) if n not in live])
                records.append((at, 1, kind, address, size, sources[number]))
                if kind == 3:
                    live[address] = names[number], size if size <= MIB else -(-size // PAGE) * PAGE
        rng.shuffle(records)
        expected: dict[str, int] = {}
        for name, size in live.values():
            expected[name] = expected.get(name, 0) + size
        assert _independent.live_bytes(records, 1, 2, 3) == expected


# Reruns


def ended(failing: int, date: str, memguard: str = "abc", command: str = "python benchmarks/light.py") -> Result:
    found: dict[str, Any] = {f"check {n}": [n >= failing, "0 of 1"] for n in range(5)}
    found["later part"] = [False, f"{_run.NOT_STARTED}: loop"]
    return {"about": {"memguard_hash": memguard, "date": date, "command": command}, "checks": found}


def test_a_rerun_of_the_same_code_keeps_what_failed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_run, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    output = tmp_path / "out" / "x.json"
    output.parent.mkdir()
    _run.conclude(ended(3, "1"), output)
    first = json.loads(output.read_text())
    assert "earlier_runs" not in first and table.reruns(first) == ""
    _run.conclude(ended(0, "2"), output)
    second = json.loads(output.read_text())
    assert [run["date"] for run in second["earlier_runs"]] == ["1"]
    assert list(second["earlier_runs"][0]["failed"]) == ["check 0", "check 1", "check 2"], "not what was not started"
    assert table.reruns(second) == " This is run 2 of this code; run 1 had 3 failed."
    # On another machine the output is a new folder: the run before lies where results are committed.
    output.rename(tmp_path / "results" / "x.json")
    _run.conclude(ended(1, "3"), output)
    third = json.loads(output.read_text())
    assert [len(run["failed"]) for run in third["earlier_runs"]] == [3, 0]
    _run.conclude(ended(0, "4"), output)  # both places have the same runs
    assert [run["date"] for run in json.loads(output.read_text())["earlier_runs"]] == ["1", "2", "3"]
    _run.conclude(ended(0, "5", memguard="other"), output)
    assert "earlier_runs" not in json.loads(output.read_text())


def test_a_test_that_passes_when_it_runs_again_has_failed_once() -> None:
    about = {"memguard_hash": "abc", "date": "1", "command": "pytest a", "gpus": 1, "gpu": "H"}
    one = _run.with_earlier_tests(None, about, {"a": "failed", "b": "passed", "c": "failed"})
    assert one["earlier"] == {} and table.outcomes(one) == "1 passed, 2 failed on 1 × H"
    part = _run.with_earlier_tests(one, {**about, "date": "2", "command": "pytest d"}, {"d": "passed"})
    assert part["earlier"] == {} and table.outcomes(part) == "2 passed, 2 failed on 1 × H"
    assert part["about"]["command"] == "pytest a && pytest d"
    again = _run.with_earlier_tests(part, {**about, "date": "3"}, {"a": "passed", "b": "passed", "c": "passed"})
    assert again["earlier"] == {"a": ["failed"], "b": ["passed"], "c": ["failed"]}
    assert [run["failed"] for run in again["runs"]] == [["a", "c"], [], []]
    assert table.outcomes(again) == (
        "4 passed (2 of them failed in an earlier run of the same code), 0 failed on 1 × H"
    )
    worse = _run.with_earlier_tests(again, {**about, "date": "4"}, {"b": "failed"})
    assert worse["earlier"]["b"] == ["passed", "passed"] and worse["results"]["b"] == "failed"
    cut = _run.with_earlier_tests(None, about, {"a": "passed", "b": "not run", "c": "skipped", "d": "not run"})
    assert table.outcomes(cut) == "1 passed, 0 failed, 1 skipped, 2 not run on 1 × H"
    assert cut["runs"][0]["failed"] == ["b", "c", "d"]
    other = _run.with_earlier_tests(worse, {**about, "memguard_hash": "new"}, {"a": "passed"})
    assert other["results"] == {"a": "passed"} and other["earlier"] == {} and len(other["runs"]) == 1


def test_scenarios_of_other_code_are_not_merged(tmp_path: Path) -> None:
    mine = {"about": {"memguard_hash": _run.source_hash()}, "scenarios": {"a": 1}}
    other = {"about": {"memguard_hash": "0"}, "scenarios": {"b": 2}}
    for name, result in (("mine", mine), ("other", other)):
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    assert _run.merged([tmp_path / "mine.json"], "scenarios") == {"scenarios": {"a": 1}}
    with pytest.raises(SystemExit, match=r"other\.json: it was measured on memguard 0, not on this one"):
        _run.merged([tmp_path / "mine.json", tmp_path / "other.json"], "scenarios")


# What the documents say


def test_a_result_that_lacks_checks_says_so_and_does_not_pass_them() -> None:
    found = {"import memguard <= 1.5 x import pydantic, yaml": [True, "1"], "an older one": [True, "2"]}
    about = {"memguard_hash": "0", "date": "2026-11-21T", "command": "python benchmarks/light.py"}
    (line,) = table.origin("x.json", {"about": about, "checks": found})
    assert line.startswith("1 of 4 checks passed") and "It lacks 3 checks of today's list, which count as not" in line
    assert "a plan of 6 frameworks x 8 GPUs <= 1 ms" in line


def test_every_committed_result_counts_against_todays_list() -> None:
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    listed = importlib.import_module("_listed")
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        result = json.loads(path.read_text())
        (row,) = [line for line in text.splitlines() if line.startswith(f"| [{path.name}]")]
        lacks = listed.lacking(result)
        assert (f"lacks {len(lacks)}" in row) == bool(lacks), row
        if listed.list_of(result):
            assert f"of {len(listed.list_of(result))}" in row, row


@pytest.mark.parametrize(
    ("numpy", "numba", "said"),
    [("2.5.2", "0.30.4", True), ("3.0", "0.30.4", True), ("2.4.9", "0.30.4", False), ("2.5.2", None, False)],
)
def test_a_result_says_what_was_put_back_for_numba(numpy: str, numba: str | None, said: bool) -> None:
    versions = {"numpy": numpy, **({"numba-cuda": numba} if numba else {})}
    note = _run.numba_build(versions)
    assert (note is not None) == said
    about = {"versions": versions}
    assert ("np.row_stack put back, without" in table._exchange_tables.about_numba(about)) == said
    assert _run.numba_note({**about, "numba_build": "so"}) == "so"
    for program in table.WITH_NUMBA:
        command = {"command": f"python benchmarks/{program}.py", "date": "2026-11-21T", "memguard_hash": "0"}
        line = table.origin("x.json", {"about": {**about, **command}, "checks": {}, "scenarios": {}})[0]
        assert ("Numba-CUDA 0.30.4 with np.row_stack put back" in line) == said


def test_each_section_with_figures_of_numba_says_what_was_put_back() -> None:
    """For every program that has it put back, by itself or by what it imports."""
    folder = ROOT / "benchmarks"
    source = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    puts = {name for name, text in source.items() if "put_row_stack_back()" in text and name != "_run"}
    assert not [name for name, text in source.items() if "row_stack = " in text and name != "_run"], "one place does it"
    while more := {
        name
        for name, text in source.items()
        if name not in puts and name not in ("_run", "table", "checks", "_listed")
        and any(re.search(rf"^\s*(?:from {one} import|import {one}\b)", text, re.MULTILINE) for one in puts)
    }:  # fmt: skip
        puts |= more
    programs = {
        name for name in puts if not name.startswith("_") and name in importlib.import_module("_listed").BY_COMMAND
    }
    programs -= {"ddp", "ranks", "leases"}  # they take functions of main_job and suspend, and run no Numba
    by_path = {"moment", "their_tests"}  # what they start puts it back
    assert programs | by_path == {"all_frameworks", "their_tests", *table.WITH_NUMBA}, programs


@pytest.mark.long
def test_a_document_that_shows_a_stale_result_as_current_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert table.wrong(release=False) == [], "run python benchmarks/table.py"
    stale = [path.name for path in table.RESULTS.glob("*.json") if table.stale(table.load(path.name))]
    told = table.wrong(release=True)
    assert sum("is stale: measure it again" in line for line in told) == len(stale)
    monkeypatch.setattr(sys, "argv", ["table.py", "--status"])
    assert table.main() == 0
    monkeypatch.setattr(sys, "argv", ["table.py", "--release"])
    assert table.main() == (1 if told else 0)
    # memguard changes, or changes back, and nobody makes the documents anew
    monkeypatch.setattr(table, "stale", lambda result: not result["about"]["memguard_hash"])
    if stale:
        assert any("README.md does not say what the results say" in line for line in table.wrong(release=False))
        monkeypatch.setattr(sys, "argv", ["table.py", "--status"])
        assert table.main() == 1


def test_a_result_that_nobody_measured_is_named_and_fails_a_release(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each result of the list is taken away by itself, and then all: its checks count as not passed."""
    listed = importlib.import_module("_listed")
    for name in listed.FILES:
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    assert table.absent() == {}
    for name, program in listed.FILES.items():
        (tmp_path / name).unlink()
        assert list(table.absent()) == [name]
        (lacks,) = table.absent().values()
        assert bool(lacks) == (program is not None) and set(lacks) <= {
            *listed.names(listed.EXCHANGE_PEERS), *listed.names(listed.BY_COMMAND.get(program, {}))
        }  # fmt: skip
        (tmp_path / name).write_text("{}")
    for path in tmp_path.glob("*.json"):
        path.unlink()
    assert list(table.absent()) == list(listed.FILES)
    assert table.status() == [f"{name}: NOT MEASURED." for name in listed.FILES]
    assert [row for row in table.overview() if "not measured" in row] == table.overview()[2:]
    monkeypatch.setattr(table._figures, "documents", list)
    assert table.wrong(release=True) == [f"{name} is not there: measure it" for name in listed.FILES]
    assert table.wrong(release=False) == []


def test_every_program_says_where_its_result_belongs() -> None:
    """Under another name nothing of it would be shown, and no release would miss it."""
    listed = importlib.import_module("_listed")
    assert set(listed.FILES.values()) - {None} == set(listed.BY_COMMAND)
    for name, program in listed.FILES.items():
        if program is not None:
            text = (ROOT / "benchmarks" / f"{program}.py").read_text(encoding="utf-8")
            assert f"-o benchmarks/results/{name}" in text, name


def test_a_result_of_another_card_is_shown_with_what_it_missed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    about = {"memguard_hash": "0", "date": "2026-11-21T", "gpus": 1, "gpu": "NVIDIA H100", "versions": {},
             "command": "python benchmarks/exchange.py"}  # fmt: skip
    result = {"about": about, "scenarios": {}, "checks": {"1 GiB, idle": [False, "29 of 30"], "lent": [True, "30"]}}
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    assert table.others() == []
    (tmp_path / "h100-exchange.json").write_text(json.dumps(result))
    text = "\n".join(table.others())
    assert "On 1 × NVIDIA H100:" in text and "h100-exchange.json" in text and "- 1 GiB, idle: 29 of 30" in text


def test_tests_that_did_not_pass_on_a_gpu_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    about = {"memguard_hash": "0", "date": "2026-11-21T", "gpus": 1, "gpu": "NVIDIA H200", "command": "pytest"}
    results = {"a": "passed", "b": "failed", "c": "passed", "d": "not run", "e": "skipped", "f": "passed"}
    earlier = {"c": ["failed", "passed"], "b": ["passed"], "f": ["skipped"]}
    (tmp_path / "h200-gpu-tests.json").write_text(json.dumps({"about": about, "results": results, "earlier": earlier}))
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    text = "\n".join(table.gpu_tests())
    assert "3 passed (1 of them failed in an earlier run of the same code), 1 failed, 1 skipped, 1 not run" in text
    for line in ("failed: `b`", "not run: `d`", "failed in an earlier run of the same code: `c`"):
        assert f"    - {line}\n" in f"{text}\n"


# A process's own peak


def test_a_child_does_not_inherit_the_peak_of_its_parent(tmp_path: Path) -> None:
    """A process that has had 400 MiB starts the replay: its child's `ru_maxrss` has them, and what is told has not."""
    code = f"""
import json, resource, subprocess, sys
from pathlib import Path
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "benchmarks")!r}]
big = bytearray(400 << 20)
for at in range(0, len(big), 4096): big[at] = 1
del big
control = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
inherited = int(subprocess.run([sys.executable, "-c", control], capture_output=True, text=True).stdout)
import replay
folder = Path(sys.argv[1])
budget = folder / "budget.yaml"
budget.write_text('{{"version": 1, "frameworks": {{"torch": {{"limit": "3GiB"}}}}}}')
(folder / "runs").mkdir()
run = replay.one_run(folder / "runs", 50, budget)
print(json.dumps([inherited, run["peak_rss_kib"], run["peak_rss_of"]]))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    inherited, own, of = json.loads(done.stdout.splitlines()[-1])
    assert of == "VmHWM" and own < 200 << 10
    assert inherited >= 400 << 10, "the control: this figure is the parent's"


GPU_TESTS = """
import pytest
def test_first(): pass
def test_second(): assert not __import__("os").environ.get("BREAKS")
def test_third(): pass
"""


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["one process", "pytest-xdist"])
def test_a_run_on_a_gpu_that_ends_early_says_what_did_not_run(tmp_path: Path, workers: list[str]) -> None:
    """The plugin of `tests/gpu` over a made-up NVML: a run that is cut short, and the same code once more."""
    here = tmp_path / "tests" / "gpu"
    here.mkdir(parents=True)
    (here / "conftest.py").write_text((ROOT / "tests" / "gpu" / "conftest.py").read_text())
    (here / "test_some.py").write_text(GPU_TESTS)
    (tmp_path / "pynvml.py").write_text("def nvmlInit(): pass\ndef nvmlDeviceGetCount(): return 1\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    report = tmp_path / "report.json"
    paths = [str(tmp_path), str(ROOT / "benchmarks"), str(ROOT)]

    def run(**more: str) -> Result:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "MEMGUARD_GPU_REPORT": str(report), **more}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", "-x", *workers]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
        assert report.exists(), done.stdout + done.stderr
        found: Result = json.loads(report.read_text())
        return {**found, "results": {name.rpartition("::")[2]: how for name, how in found["results"].items()}}

    cut = run(BREAKS="1")
    assert cut["results"] == {"test_first": "passed", "test_second": "failed", "test_third": "not run"}
    assert len(cut["runs"]) == 1 and len(cut["runs"][0]["failed"]) == 2
    whole = run()
    assert set(whole["results"].values()) == {"passed"} and len(whole["runs"]) == 2
    assert sorted(outcomes for outcomes in whole["earlier"].values()) == [["failed"], ["not run"], ["passed"]]
