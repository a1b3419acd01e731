"""The checks of the benchmarks without a GPU: each scenario killed in turn, broken memguards, reruns, and the lists."""

from __future__ import annotations

import copy
import importlib
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import elastic_results
import lease_results
import pytest
import rank_results
import suggest_results
import suspend_results

pytestmark = pytest.mark.long  # no version of what is installed changes what the benchmarks' own code does

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
(
    _run,
    _listed,
    _independent,
    _sampler,
    checks,
    table,
    _moment,
    replay,
    elastic,
    suspend,
    _suggest_checks,
    top,
    leases,
    ranks,
) = (
    importlib.import_module(name)
    for name in (
        "_run",
        "_listed",
        "_independent",
        "_sampler",
        "checks",
        "table",
        "_moment",
        "replay",
        "elastic",
        "suspend",
        "_suggest_checks",
        "top",
        "leases",
        "ranks",
    )
)
RESULTS = ROOT / "benchmarks" / "results"
MIB, GIB, PAGE = 1 << 20, 1 << 30, 2 << 20
Result = dict[str, Any]


def committed(name: str) -> Result:
    found: Result = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


# Whole results: what was measured, and what is measured since, made up


def emptied(cap: int) -> Result:
    return {"name": "x", "held": [cap, 0], "nvml": [cap + 600 * MIB, 600 * MIB]}


def raw() -> list[Result]:
    return [
        {"bytes": size, "unaccounted": [5 * MIB, 5 * MIB + size, 5 * MIB], "nvml": [GIB, GIB + size, GIB]}
        for size in (16 * MIB, 100 * MIB, 300 * MIB)
    ]


def refusals() -> Result:
    one = {"bytes": 5000, "held": GIB, "raised_by": PAGE, "grown": PAGE, "would_hold": GIB + PAGE}
    tried = [dict(one) for _ in range(40)]
    return {"returncode": 0, "name": "x", "beside": False, "cap": GIB, "tried": tried, "foreign": []}


def main_job() -> Result:
    result = committed("h200-main-job.json")
    s = {**result["scenarios"], "refusals of pycuda": refusals(), "mixed_workload": result["mixed_workload"]}
    s["together"]["emptied"] = {name: emptied(s["together"]["caps"][name]) for name in ("torch", "pycuda")}
    s["together"]["raw"] = raw()
    return s


def all_frameworks() -> Result:
    s: Result = committed("h200-all-frameworks.json")["scenarios"]
    one = s["together"]
    one["emptied"] = {name: emptied(one["caps"][name]) for name in _listed.COUNTED}
    one["raw"] = raw()
    one["nvml"]["longest_gap_ms"] = 60.0
    steps = {
        "large": {"held": [800 * MIB, 0], "nvml": [800 * MIB, 0]},
        "small": {
            "held": [1000 * MIB, 800 * MIB],
            "nvml": [1004 * MIB, 800 * MIB],
            "in_use": 980 * MIB,
            "asked": 970 * MIB,
        },
        "emptied": {"held": [1000 * MIB, 0], "nvml": [1004 * MIB, 0]},
    }
    s["counted"] = {"returncode": 0, **{name: copy.deepcopy(steps) for name in _listed.COUNTED}}
    held = dict.fromkeys(_listed.SIX, 500 * MIB)
    s["counted by CUPTI"] = {
        "returncode": 0,
        "held": held,
        "cupti": {**held, "libcublas.so.13": 32 * MIB},
        "pool": {"held": [1018 * MIB, 500 * MIB], "nvml": [30 * GIB + 518 * MIB, 30 * GIB]},
    }
    for name in _listed.COUNTED:
        s[f"refusals of {name}"], s[f"refusals of {name} beside others"] = refusals(), refusals()
    s["loop"] = {
        "returncode": 0, "wall_s": 330.0, "seconds_run": 300.1, "allocated": 9000, "readings": 300,
        "unaccounted_drift": 0, "outside_drift": 2 * MIB, "sum_minus_total": 0,
        "refused": dict.fromkeys(_listed.SIX, 9), "not_native": {name: [] for name in _listed.SIX},
        "would_have_fitted": {"jax": 0}, "driven": {name: {"most_held": GIB, "cap": GIB} for name in _listed.SIX},
        "nvml": {"samples": 6000, "interval_ms": 50.0, "longest_gap_ms": 60.0, "max_bytes": 39 * GIB},
    }  # fmt: skip
    return s


def watch() -> Result:
    s: Result = committed("h200-watch.json")["scenarios"]
    for name, one in s.items():
        if one.get("report"):
            one["idle"] = GIB if name.endswith("own cap") else 50 * GIB
            for holder in one["report"]["holders"]:
                if holder["kind"] == "framework" and holder["name"] != one["sibling"] and holder["reclaimable"]:
                    holder["reclaimable"] = 0  # the async pools of that day are told below
            one["by_driver"] = dict(one["returned"])
    s["tick"]["at_work"] = {
        "cpu_us": {"median": 100, "p90": 140, "n": 390}, "wall_us": {"median": 130, "p90": 182, "n": 390},
        "idle": {"cpu_us": {"median": 90}}, "back_to_back_us": {"median": 60}, "events": {"pressure": 8},
        "samples_written": 1500,
    }  # fmt: skip
    return s


def doctor() -> Result:
    result = committed("h200-doctor.json")
    result["scenarios"]["as shipped"]["findings"] = []
    for finding in result["scenarios"]["TensorFlow before PyTorch"]["findings"]:
        finding[3] = "it dies" if finding[0] == "import-order" else finding[3]
    return result


def exchange() -> Result:
    s: Result = committed("h200-exchange.json")["scenarios"]
    for name, one in s.items():
        for pair in one.get("order", {}).values() if name.startswith("order from") else ():
            pair["running_before"] = 1000
    for pair in s["speed"]["speed"].values():
        pair["extra_us"] = min(pair["extra_us"], 50)
    return s


def light() -> Result:
    result = committed("h200-light.json")
    for key in ("init_s", "import_and_init_s"):
        result["init"][key]["p95"] = 0.049
    return result


def replayed() -> Result:
    result = committed("replay.json")
    for run in result["runs"]:
        run["peak_rss_of"] = "VmHWM"
    return result


def ddp() -> Result:
    result = committed("h200-x2-ddp.json")
    for rank in result["ranks"]:
        for reading in rank["readings"]:
            reading["nvml"] = 2 * GIB + reading["held"] if reading["held"] is not None else 0
    return result


def screens() -> Result:
    one = {"returncode": 0, "shares": [0.012, 0.011], "drawn": 2.0}
    attached = {**one, "target": "real", "watched": [0.006, 0.005], "beside": [0.001, 0.001]}
    return {"textual": "8.2.8", "follows": dict(one), "attached": attached, "control": dict(one)}


Whole = tuple[Callable[[], Result], Callable[[Result], Result], Callable[[Result], Result]]
"""A whole result, what judges it, and where its scenarios lie in it."""
WHOLE: dict[str, Whole] = {
    "main_job": (main_job, checks.main_job_checks, lambda s: s),
    "all_frameworks": (all_frameworks, checks.all_frameworks_checks, lambda s: s),
    "watch": (watch, checks.watch_checks, lambda s: s),
    "doctor": (doctor, checks.doctor_checks, lambda r: r["scenarios"]),
    "exchange": (exchange, checks.exchange_checks, lambda s: s),
    "moment": (lambda: committed("h200-moment.json"), checks.moment_checks, lambda r: r["programs"]),
    "their_tests": (lambda: committed("h200-their-tests.json"), checks.their_tests_checks, lambda r: r["suites"]),
    "light": (light, checks.light_checks, lambda r: r),
    "startup": (lambda: committed("startup.json"), checks.startup_checks, lambda r: r),
    "replay": (replayed, checks.replay_checks, lambda r: r),
    "ddp": (ddp, lambda r: checks.ddp_checks(r["ranks"]), lambda r: r),
    "elastic": (elastic_results.whole, elastic.elastic_checks, lambda s: s),
    "suspend": (suspend_results.whole, suspend.suspend_checks, lambda s: s),
    "suggest": (suggest_results.whole, _suggest_checks.suggest_checks, lambda s: s),
    "top": (screens, top.top_checks, lambda r: r),
    "leases": (lease_results.whole, leases.lease_checks, lambda r: r),
    "ranks": (rank_results.whole, ranks.ranks_checks, lambda s: s),
}


def failed(found: Result) -> list[str]:
    return [name for name, (passed, _) in found.items() if not passed]


@pytest.mark.parametrize("benchmark", WHOLE)
def test_a_whole_result_tells_the_written_list_and_passes(benchmark: str) -> None:
    make, judge, _ = WHOLE[benchmark]
    found = judge(make())
    assert failed(found) == []
    assert list(found) == _listed.names(_listed.BY_COMMAND[benchmark])
    assert len(found) == len(set(found))


def killed(benchmark: str) -> list[tuple[str, str, str]]:
    return [
        (benchmark, key, how)
        for key in _listed.BY_COMMAND[benchmark]
        for how in ("is missing", "died", "died after its result", "says nothing")
    ]


SCENARIOS = [
    case
    for name in (
        "main_job", "all_frameworks", "watch", "exchange", "elastic", "suspend", "suggest", "top", "leases", "ranks",
    )
    for case in killed(name)
    if case[1] != "nothing stays lent"  # of all scenarios
]  # fmt: skip


@pytest.mark.parametrize(("benchmark", "key", "how"), SCENARIOS)
def test_a_scenario_that_is_killed_fails_its_checks_and_no_others(benchmark: str, key: str, how: str) -> None:
    make, judge, _ = WHOLE[benchmark]
    s = make()
    name = _run._matching(key, s)[0]
    death = {
        "returncode": -6,
        "stderr_tail": "Traceback\nFatal Python error: Aborted\n\nExtension modules: numpy (1)\n",
    }
    if how == "is missing":
        del s[name]
    elif how == "died":
        s[name] = death
    elif how == "died after its result":
        s[name] = {**s[name], **death}
    else:
        s[name] = {"returncode": 0, "stdout_tail": "", "stderr_tail": ""}
    found = judge(s)
    expected = list(_listed.BY_COMMAND[benchmark][key])
    if name.startswith("control:") and how.startswith("died"):
        expected = []  # it is to die
    assert failed(found) == expected
    assert list(found) == _listed.names(_listed.BY_COMMAND[benchmark]), "the list stays as long as it is written"
    if how == "is missing" and "*" not in key:
        assert all(name in found[check][1] for check in expected)
    if how.startswith("died") and expected and name != "order_control":
        assert all("rc -6: Fatal Python error: Aborted" in found[check][1] for check in expected), found


@pytest.mark.parametrize("key", ["import", "init", "plan"])
def test_a_part_of_the_start_that_fails_fails_its_checks(key: str) -> None:
    result = light()
    result[key] = _run.attempt(lambda: 1 / 0)
    found = checks.light_checks(result)
    assert failed(found) == list(_listed.LIGHT[key]) and "ZeroDivisionError" in found[failed(found)[0]][1]


def test_other_benchmarks_lose_their_checks_with_their_parts() -> None:
    found = checks.startup_checks(committed("startup.json"), _run.attempt(lambda: 1 / 0))
    assert failed(found) == list(_listed.STARTUP["start"])
    result = replayed()
    result["runs"][1] = _run.attempt(lambda: 1 / 0)
    assert failed(checks.replay_checks(result)) == _listed.names(_listed.REPLAY)
    ranks = ddp()["ranks"]
    assert failed(checks.ddp_checks([ranks[0], {"rank": 1, "returncode": -9, "stderr": "NCCL\nkilled"}])) == list(
        _listed.DDP["rank 1"]
    )
    for name in _listed.PROGRAMS:
        moment = committed("h200-moment.json")
        del moment["programs"][name]
        assert failed(checks.moment_checks(moment)) == list(_listed.MOMENT[name])
    for name in ("as shipped", "a full card"):
        facts = doctor()
        facts["scenarios"][name] = {"error": "Traceback\nOSError: no", "rc": 2}
        told = checks.doctor_checks(facts)
        assert failed(told) == list(_listed.DOCTOR[name]) and "rc 2: OSError: no" in told[failed(told)[0]][1]


def test_the_list_is_of_the_scenarios_that_the_programs_have() -> None:
    names = {}
    for module in ("main_job", "all_frameworks", "watch", "exchange"):
        names[module] = set(importlib.import_module(module).SCENARIOS)
    assert set(_listed.MAIN_JOB) == names["main_job"] | {"mixed_workload"}
    pairs = {name for name in names["all_frameworks"] if name.count("-") == 1 and "refusals" not in name}
    assert len(pairs) == 30 and set(_listed.ALL_FRAMEWORKS) - {"*-*"} == names["all_frameworks"] - pairs
    assert set(_listed.WATCH) | {"cupy async, own cap"} == names["watch"]
    parts = {
        name: _run._matching(name, [one for of in elastic.PARTS.values() for one in of]) for name in _listed.ELASTIC
    }
    assert [name for of in parts.values() for name in of] == [name for of in elastic.PARTS.values() for name in of]
    kept = {key for key in _listed.EXCHANGE if "*" not in key} | {"peers"}
    starred = {name for name in names["exchange"] if name.startswith(("edges from ", "order from "))}
    assert names["exchange"] - starred == kept
    assert list(_listed.PROGRAMS) == list(_moment.ARRANGED) and list(_listed.QUIET) == list(_moment.QUIET)
    for listed in _listed.BY_COMMAND.values():
        every = _listed.names(listed)
        assert len(every) == len(set(every)) and all(listed.values())


def test_every_benchmark_that_makes_a_result_has_its_list() -> None:
    """Without one its checks would be collected from what ran."""
    makers = {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py") if "conclude(" in path.read_text()}
    assert makers == set(_listed.BY_COMMAND)
    for path in RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        assert _listed.list_of(result) or "pytest" in result["about"]["command"], path.name


def test_a_check_that_is_told_twice_or_not_listed_fails() -> None:
    def judge(check: Any) -> None:
        check("a", False, "1")
        check("a", True, "2")
        check("b", True, "3")
        check("c", True, "4")
        raise KeyError("d")

    found = _run.judged({"x": ("a", "b", "d")}, {"x": judge}, {"x": {"returncode": 0}})
    assert failed(found) == ["a", "d", "c"]
    assert found["a"][1] == "told twice: 2" and "KeyError: 'd'" in found["d"][1] and found["b"][0]
    assert found["c"][1] == "not in the list of checks: 4"


# Broken memguards


def broken(make: Callable[[], Result], *path: Any, value: Any) -> Result:
    whole = make()
    place: Any = whole
    for key in path[:-1]:
        by_name = isinstance(place, list) and isinstance(key, str)
        place = next(one for one in place if one["name"] == key) if by_name else place[key]
    place[path[-1]] = value(place[path[-1]]) if callable(value) else value
    return whole


def test_ledgers_of_nonsense_that_add_up_are_found_out() -> None:
    """200 ledgers whose `unaccounted` is the remainder of random figures: the sums are right, nothing else is."""
    rng = random.Random(5)
    noticed = 0
    for _ in range(200):
        s = all_frameworks()
        for one in s["together"]["raw"]:
            one["unaccounted"] = [rng.randint(-(1 << 34), 1 << 34) for _ in range(3)]
        for one in s["together"]["emptied"].values():
            one["held"] = [rng.randint(0, 1 << 34), rng.randint(0, 1 << 30)]
        for name in _listed.COUNTED:
            for step in s["counted"][name].values():
                step["held"] = [rng.randint(0, 1 << 34), rng.randint(0, 1 << 34)]
        s["counted by CUPTI"]["held"] = {name: rng.randint(0, 1 << 34) for name in _listed.SIX}
        s["counted by CUPTI"]["pool"]["held"] = [rng.randint(0, 1 << 34), rng.randint(0, 1 << 34)]
        found = checks.all_frameworks_checks(s)
        assert found["six: rows add up to the total (plain sanity: unaccounted is the remainder)"][0]
        noticed += not found[f"six: {_listed.RAW}"][0]
        for name in _listed.COUNTED:
            noticed += not found[f"six, {_listed.of_emptied(name)}"][0]
        for name in _listed.SEEN_BY_CUPTI:
            noticed += not found[f"{name}: held is what CUPTI saw its library take"][0]
        noticed += not found[_listed.POOL][0]
    assert noticed >= 0.98 * 200 * 11, noticed


SIXTH = ("together", "readings", 5, "unaccounted")
BROKEN: list[tuple[str, str, tuple[Any, ...], Any, str]] = [
    # A raw allocation is booked as overhead, half of it, or stays after its free.
    ("raw as overhead", "main_job", ("together", "raw", 1, "unaccounted"), [0, 0, 0], f"together: {_listed.RAW}"),
    (
        "raw in part",
        "main_job",
        ("together", "raw", 2, "unaccounted", 1),
        lambda n: n - 5 * MIB,
        f"together: {_listed.RAW}",
    ),
    (
        "raw stays",
        "main_job",
        ("together", "raw", 0, "unaccounted", 2),
        lambda n: n + 16 * MIB,
        f"together: {_listed.RAW}",
    ),
    (
        "raw on small",
        "all_frameworks",
        ("together", "raw", 0, "unaccounted", 1),
        lambda n: n - 3 * MIB,
        f"six: {_listed.RAW}",
    ),
    ("raw taken once", "main_job", ("together", "raw"), lambda raw: raw[:1], f"together: {_listed.RAW}"),
    (
        "raw that the driver never gave",
        "main_job",
        ("together", "raw", 1, "nvml", 1),
        lambda n: n - 50 * MIB,
        f"together: {_listed.RAW}",
    ),
    # A framework's row misses memory, keeps what was given back, or is not known.
    (
        "held misses",
        "main_job",
        ("together", "emptied", "torch", "held", 0),
        lambda n: n - 20 * MIB,
        f"together, {_listed.of_emptied('torch')}",
    ),
    (
        "held keeps",
        "all_frameworks",
        ("together", "emptied", "numba", "held", 1),
        lambda n: n + 64 * MIB,
        f"six, {_listed.of_emptied('numba')}",
    ),
    (
        "held unknown",
        "all_frameworks",
        ("together", "emptied", "cupy", "held", 0),
        None,
        f"six, {_listed.of_emptied('cupy')}",
    ),
    (
        "trim keeps",
        "all_frameworks",
        ("together", "emptied", "pycuda"),
        {"held": [GIB, GIB], "nvml": [GIB, GIB]},
        f"six, {_listed.of_emptied('pycuda')}",
    ),
    (
        "pages uncounted",
        "all_frameworks",
        ("counted", "cupy", "small", "held", 0),
        lambda n: n - 80 * MIB,
        "cupy: held grows and shrinks as the driver's figure does, within 5 % for small ones",
    ),
    (
        "large uncounted",
        "all_frameworks",
        ("counted", "pycuda", "large", "held", 0),
        lambda n: n - 3 * MIB,
        "pycuda: held grows and shrinks as the driver's figure does, within 2 MiB for large arrays",
    ),
    (
        "pool unseen",
        "all_frameworks",
        ("counted by CUPTI", "pool", "held", 0),
        900 * MIB,
        _listed.POOL,
    ),
    (
        "library unseen",
        "all_frameworks",
        ("counted by CUPTI", "cupti", "numba"),
        0,
        "numba: held is what CUPTI saw its library take",
    ),
    # Refused though the driver would have stayed within the cap; above the cap; by another error.
    (
        "refused early",
        "all_frameworks",
        ("refusals of cupy", "tried", 7),
        {"bytes": 574_886, "held": GIB - 673_792, "raised_by": PAGE, "grown": 0, "would_hold": GIB - 673_792},
        _listed.of_refusals("cupy"),
    ),
    (
        "refused with a page left",
        "main_job",
        ("refusals of pycuda", "tried", 0),
        {"bytes": 455_008, "held": GIB - PAGE, "raised_by": PAGE, "grown": PAGE, "would_hold": GIB},
        _listed.of_refusals("pycuda"),
    ),
    (
        "passed the cap",
        "all_frameworks",
        ("refusals of numba", "tried", 3, "held"),
        GIB + PAGE,
        _listed.of_refusals("numba"),
    ),
    (
        "another error",
        "all_frameworks",
        ("refusals of torch", "foreign"),
        ["RuntimeError: no"],
        _listed.of_refusals("torch"),
    ),
    (
        "tried once",
        "all_frameworks",
        ("refusals of torch", "tried"),
        lambda tried: tried[:1],
        _listed.of_refusals("torch"),
    ),
    (
        "jax refuses early",
        "all_frameworks",
        ("together", "driven", "jax", "refusals", 2, "would_have_fitted"),
        True,
        "six: jax no refusal where its own figures have room",
    ),
    (
        "jax in the loop",
        "all_frameworks",
        ("loop", "would_have_fitted", "jax"),
        1,
        "loop: no refusal of JAX where its own figures have room",
    ),
    (
        "a slow leak as overhead",
        "all_frameworks",
        ("loop", "outside_drift"),
        670 * MIB,
        "loop: drift of overhead and unaccounted together <= 64 MiB",
    ),
    # 2.5 GiB under a cap of 2; half of the cap; nothing said of what was there before.
    (
        "pycuda live",
        "main_job",
        ("pycuda-live", "allocated_under_cap"),
        2560 * MIB,
        "pycuda live: as much as the cap, and not more",
    ),
    ("pycuda live unsaid", "main_job", ("pycuda-live", "notes"), [], "pycuda live: as much as the cap, and not more"),
    (
        "torch live",
        "main_job",
        ("torch-live", "allocated_under_cap"),
        64 * MIB,
        "torch live: as much as the cap, and not more",
    ),
    (
        "half the cap",
        "main_job",
        ("torch-later", "allocated_under_cap"),
        GIB,
        "torch later: as much as the cap, and not more",
    ),
    (
        "over the cap",
        "main_job",
        ("tensorflow-later", "allocated_under_cap"),
        2 * GIB + 64 * MIB,
        "tensorflow later: as much as the cap, and not more",
    ),
    (
        "not enforced",
        "main_job",
        ("pycuda-later", "enforcement"),
        "watched",
        "pycuda later: as much as the cap, and not more",
    ),
    (
        "gpuarray passes",
        "main_job",
        ("pycuda-imported", "through_gpuarray"),
        "not refused",
        "pycuda imported: as much as the cap, and not more",
    ),
    ("cupy live", "all_frameworks", ("cupy, live", "allocated"), 1, "cupy, live: as much as the cap, and not more"),
    (
        "numba later",
        "all_frameworks",
        ("numba, later", "allocated"),
        33,
        "numba, later: as much as the cap, and not more",
    ),
    # The sampler has holes, or looked for a short time, or the process passed its limit.
    (
        "a gap",
        "main_job",
        ("together", "nvml", "longest_gap_ms"),
        114.0,
        "process <= 40 GiB at every sample, at most 100 ms apart",
    ),
    (
        "few samples",
        "all_frameworks",
        ("together", "nvml", "samples"),
        500,
        "six: process <= 40 GiB at every sample, at most 100 ms apart",
    ),
    (
        "over 40 GiB",
        "all_frameworks",
        ("loop", "nvml", "max_bytes"),
        40 * GIB + 1,
        "loop: process <= 40 GiB at every sample, at most 100 ms apart",
    ),
    # Said to be reclaimable and not given back; given back and not said.
    (
        "31.9 said, 0 freed",
        "watch",
        ("torch async, card full", "report", "holders", "torch", "reclaimable"),
        int(31.9 * MIB),
        "torch async, card full: reclaimable is what a trim gives back to the driver",
    ),
    (
        "6 said, 0 freed",
        "watch",
        ("torch async, own cap", "report", "holders", "torch", "reclaimable"),
        6 * MIB,
        "torch async, own cap: reclaimable is what a trim gives back to the driver",
    ),
    (
        "freed by call only",
        "watch",
        ("cupy, card full", "by_driver", "torch"),
        49 * GIB,
        "cupy, card full: reclaimable is what a trim gives back to the driver",
    ),
    ("a sawtooth that did nothing", "watch", ("sawtooth", "most", "torch"), 0.2, "sawtooth: ten minutes, no alarm"),
    # Rounds that nobody saw a kernel in, and a lender whose memory nobody can take.
    (
        "kernel unseen",
        "exchange",
        ("order from tensorflow", "order", "tensorflow > jax", "running_before"),
        0,
        "30 pairs: none stale in 1,000 rounds in which the producer's kernel was seen running",
    ),
    (
        "jax as lender",
        "exchange",
        ("dropped", "without", "jax > torch: torch.as_tensor of the address alone", "wrong"),
        0,
        "by hand, dropped while it is still read: wrong for each lender",
    ),
    ("nothing counted as lent", "exchange", ("pairs", "open"), 3, "nothing stays lent"),
    (
        "much unaccounted",
        "all_frameworks",
        ("together", "readings", 9, "unaccounted"),
        65 * MIB,
        f"six: {_listed.LITTLE}",
    ),
    (
        "less than nothing",
        "main_job",
        ("together", "readings", 9, "unaccounted"),
        -65 * MIB,
        f"together: {_listed.LITTLE}",
    ),
    (
        "a host leak",
        "exchange",
        ("leak", "rss_growth_kib"),
        17 << 10,
        "10,000 hand-overs: +- 0 bytes of the GPU, at most 16 MiB of the host",
    ),
    (
        "a leak said for another hour",
        "watch",
        ("leak", "forecast_said_s"),
        3600.0,
        "leak: announced >= 5 s before the OOM, for about when it came",
    ),
    (
        "the holder's bytes",
        "watch",
        ("numba, own cap", "report", "holders", "numba", "bytes"),
        GIB,
        "numba, own cap: names the largest holder and its bytes",
    ),
    (
        "another process",
        "watch",
        ("jax, card full", "stranger_pid"),
        4711,
        "jax, card full: names the other process and its bytes",
    ),
    (
        "TensorFlow after the cure",
        "main_job",
        ("order_cured", "tensorflow_matmul"),
        511.0,
        "order_cured: the products of both are right, 132 multiprocessors",
    ),
    (
        "a card that is free",
        "main_job",
        ("without_memguard", "left_free"),
        90 * GIB,
        "without memguard: TensorFlow takes the card, torch and PyCUDA die",
    ),
    (
        "TensorFlow's pool with room",
        "main_job",
        ("together", "tensorflow_log", 0, "available"),
        1 << 40,
        "tensorflow: no refusal where it would fit",
    ),
    (
        "TensorFlow's log of one refusal",
        "main_job",
        ("together", "tensorflow_log"),
        lambda log: log[:1],
        "tensorflow: no refusal where it would fit",
    ),
    (
        "large requests alone",
        "main_job",
        ("together", "driven", "pycuda", "phases"),
        lambda phases: phases[:1],
        "pycuda: own native type",
    ),
    (
        "few allocated at the caps",
        "main_job",
        ("together", "churn", "allocated"),
        999,
        "together: freed and asked again at the caps",
    ),
    (
        "no work at the caps",
        "main_job",
        ("together", "churn", "refused"),
        3,
        "together: freed and asked again at the caps",
    ),
    (
        "overhead without end",
        "main_job",
        ("together", "readings", -1, "overhead"),
        3 * GIB,
        "together: overhead within the reserve",
    ),
    (
        "a pool with room",
        "all_frameworks",
        ("together", "tensorflow_log", 1, "available"),
        2 * MIB,
        "six: tensorflow no refusal where its own log has room",
    ),
    (
        "a pair's unaccounted",
        "all_frameworks",
        ("torch-jax", "unaccounted"),
        65 * MIB,
        "30 import orders alive and capped, at most 64 MiB unaccounted, overhead within the reserve",
    ),
    (
        "a pair's overhead",
        "all_frameworks",
        ("cupy-numba", "overhead"),
        9 * GIB,
        "30 import orders alive and capped, at most 64 MiB unaccounted, overhead within the reserve",
    ),
    ("held unread", "main_job", ("torch-later", "held"), 3 * GIB, "torch later: as much as the cap, and not more"),
    # The figure by which a refusal is judged has to be the driver's.
    *(
        (f"{name}, {what}", "main_job", (name, "held_by_ledger"), held, f"{name}: {_listed.ALONE}")
        for name in ("torch_async", "torch_expandable")
        for what, held in (("held too much", lambda n: n + 66 * MIB), ("held not read", None))
    ),
    (
        "held less than live",
        "main_job",
        ("tensorflow-later", "held"),
        GIB,
        "tensorflow later: as much as the cap, and not more",
    ),
    (
        "in use is held",
        "all_frameworks",
        ("counted", "torch", "small", "in_use"),
        1100 * MIB,
        "torch: in use is what its live arrays were asked for with, and what its rounding adds",
    ),
    (
        "in use misses",
        "all_frameworks",
        ("counted", "numba", "small", "in_use"),
        960 * MIB,
        "numba: in use is what its live arrays were asked for with, and what its rounding adds",
    ),
    (
        "a trim that boasts",
        "watch",
        ("tensorflow, own cap", "returned", "torch"),
        2 * GIB,
        "tensorflow, own cap: reclaimable is what a trim gives back to the driver",
    ),
    (
        "a rank's row",
        "ddp",
        ("ranks", 1, "readings", -2, "held"),
        lambda n: n + GIB,
        "rank 1: held agrees with what the driver has back when it is emptied",
    ),
    (
        "its parent's peak",
        "replay",
        ("runs", 0, "peak_rss_of"),
        "ru_maxrss",
        "memory independent of length, by the process's own peak",
    ),
    ("a short replay", "replay", ("runs", 1, "samples"), 999_999, "replay of 1,000,000 samples <= 60 s"),
]


@pytest.mark.parametrize(("what", "benchmark", "path", "value", "bar"), BROKEN, ids=[one[0] for one in BROKEN])
def test_a_broken_memguard_fails_its_bar(
    what: str, benchmark: str, path: tuple[Any, ...], value: Any, bar: str
) -> None:
    make, judge, _ = WHOLE[benchmark]
    found = failed(judge(broken(make, *path, value=value)))
    also = {
        "TensorFlow's log of one refusal": ["tensorflow: pool <= cap"],
        "freed by call only": ["cupy, card full: what lay idle in the sibling's cache is said and comes back"],
        "a short replay": ["every sample is replayed"],
    }.get(what, [])
    assert set(found) == {bar, *also}, found


# Any figure


def figures(place: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in a result: its figures, words, lists and mappings."""
    inner = place.items() if isinstance(place, dict) else enumerate(place) if isinstance(place, list) else ()
    return [*([path] if path else []), *(deeper for key, one in inner for deeper in figures(one, (*path, key)))]


def one_of_each_kind_first(paths: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Those that differ by their place in a list alone come one after the other, all others between them."""
    seen: dict[tuple[Any, ...], int] = {}
    turns = []
    for path in paths:
        kind = tuple("*" if isinstance(key, int) else key for key in path)
        seen[kind] = seen.get(kind, 0) + 1
        turns.append((seen[kind], len(turns), path))
    return [path for _, _, path in sorted(turns)]


def wrong_instead(value: Any) -> list[Any]:
    """What may stand there in the result of a broken memguard."""
    if isinstance(value, bool) or value is None:
        return [not value]
    if isinstance(value, (int, float)):
        return [0, -value - 1, value + 70 * MIB, 3 * value + 10**12]
    return ["warning" if value == "info" else type(value)() if value else ["a"]]


@pytest.mark.long
@pytest.mark.parametrize("benchmark", WHOLE)
def test_each_check_of_the_list_can_fail_by_one_figure(benchmark: str) -> None:
    """One figure after the other is made wrong until every check has failed: by its bar, not by a death."""
    make, judge, _ = WHOLE[benchmark]
    whole = make()
    if benchmark == "doctor":  # nothing is found there, so there is nothing to change
        whole["scenarios"]["as shipped"]["findings"] = [["second-context", "info", None, "it is there"]]
    passing = {name for name, (passed, _) in judge(whole).items() if passed}
    assert passing == set(_listed.names(_listed.BY_COMMAND[benchmark]))
    for path in one_of_each_kind_first(figures(whole)):
        place: Any = whole
        for key in path[:-1]:
            place = place[key]
        right = place[path[-1]]
        for wrong in wrong_instead(right):
            place[path[-1]] = wrong
            try:
                found = judge(whole)
            except (IndexError, KeyError):  # a whole part of it is gone: others look for that
                found = {}
            passing -= {
                name
                for name, (passed, said) in found.items()
                if not passed and not any(end in said for end in ("did not run", "(it had told", "not started"))
            }
        place[path[-1]] = right
        if not passing:
            return
    raise AssertionError(f"nothing makes them fail: {sorted(passing)}")
