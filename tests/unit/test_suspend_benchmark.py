"""`benchmarks/suspend.py` without a GPU: a rehearsal over stand-ins, its bars, its tables."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import suspend_results

pytestmark = pytest.mark.long  # no version of what is installed changes what the benchmarks' own code does

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
_checks, _listed, _room, _run, _table, _children, _breaks, benchmark = (
    importlib.import_module(name)
    for name in (
        "_suspend_checks", "_listed", "_suspend_room", "_run", "_suspend_table", "_suspend_children", "_suspend_breaks",
        "suspend",
    )
)  # fmt: skip
MIB, GIB = 1 << 20, 1 << 30


# Rehearsals: the parent, its processes and their answers are real, the card and the driver are files


def rehearsed(folder: Path, *words: str, limit: float = 100, **env: str) -> tuple[dict[str, Any], str]:
    environment = {**os.environ, "MEMGUARD_SUSPEND_REHEARSAL": str(folder), **env}
    output = folder / "out.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "suspend.py"), *words, "-o", str(output)],
        env=environment, capture_output=True, text=True, timeout=limit,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(output.read_text()), done.stderr


def test_scenarios_run_side_by_side_and_pass_over_stand_ins(tmp_path: Path) -> None:
    names = [
        "rounds cupy", "control", "helper killed, on", "SIGINT, off", "refused a capture", "refused a stopped process",
        "outside", "no room", "notebook",
    ]  # fmt: skip
    result, _ = rehearsed(tmp_path, "--only", ";".join(names))
    assert set(result["scenarios"]) == set(names) and result["harsh"] == []
    wanted = [check for name in names for check in _listed.SUSPEND[name]]
    assert [name for name in wanted if not result["checks"][name][0]] == []
    assert {tuple(figure) for name, figure in result["checks"].items() if name not in wanted} == {
        (False, f"not started: {key}") for key in _listed.SUSPEND if key not in names
    }
    assert not (tmp_path / "out.part").exists()


def test_what_was_measured_stays_when_a_part_breaks_and_is_taken_over(tmp_path: Path) -> None:
    """`--merge` measures only what is not there, and of what is named what failed there."""
    first, _ = rehearsed(tmp_path, "--only", "outside;seconds cupy")
    assert [name for name, (passed, _) in first["checks"].items() if passed] == list(_listed.OUTSIDE)
    before = tmp_path / "before.json"
    (tmp_path / "out.json").rename(before)
    second, told = rehearsed(tmp_path, "--only", "outside;seconds cupy;seconds jax", "--merge", str(before))
    assert list(second["scenarios"]) == ["outside", "seconds cupy", "seconds jax"]
    assert "outside" not in told and "runs again: seconds cupy\n" in told and "seconds jax: rc 0" in told
    assert [list(run["failed"]) for run in second["earlier_runs"]] == [list(_listed.of_seconds("cupy"))]
    named = list(second["scenarios"])
    assert benchmark.to_run([*named, "peak"], second["scenarios"], named=False) == ["peak"]


def test_each_size_is_timed_twice_in_one_process(tmp_path: Path) -> None:
    """MiB here, and a check that wants GiB: it says that it saw less."""
    found, _ = rehearsed(tmp_path, "--only", "seconds torch;seconds tensorflow")
    for name, sizes in (("torch", (1, 16, 60)), ("tensorflow", (1, 16))):
        of = found["scenarios"][f"seconds {name}"]["sizes"]
        assert list(of) == [str(size) for size in sizes]
        for size in sizes:
            assert [one["gone"] for one in of[str(size)]["rounds"]] == [True, True] and of[str(size)]["wrong"] == 0
            assert all(size * MIB <= one["bytes"] < (size + 9) * MIB for one in of[str(size)]["rounds"]), of


def test_two_take_turns_also_where_the_machine_says_that_it_has_too_little(tmp_path: Path) -> None:
    result, _ = rehearsed(tmp_path, "--only", "turns", MEMGUARD_SUSPEND_NEEDS_LEAVE="1")
    one = result["scenarios"]["turns"]
    offs = [what for what, _ in one["order"] if "off" in what]
    assert [what for what, _ in one["ignored"]] == [what for what, _ in one["available"]] == offs and len(offs) == 4
    assert one["wrong"] == 0 and one["both_off"] and min(size for _, size in one["available"]) > 0
    assert "by host_memory='ignore': first off with" in result["checks"][_listed.TURNS[1]][1]


def test_who_is_lost_to_a_stranger_is_told_and_followed_by_another(tmp_path: Path) -> None:
    """The robber gets in within the stand-in's window of 30 ms, and the process is lost: another takes its place."""
    result, told = rehearsed(tmp_path, "--only", "stranger;window, context goes")
    stranger = result["scenarios"]["stranger"]
    assert stranger["rounds"] == 3 and "broke" not in stranger and stranger["wrong"] == 0
    assert len(stranger["losses"]) == stranger["lost"] and stranger["grabbed"]["times"] > 0
    one = result["scenarios"]["window, context goes"]
    assert "broke" not in one and one["robbed"] + one["invalid"] >= 2 and one["wrong"] == 0, told
    assert one["got_in"] >= 1 and one["lost"] + one["late"] == len(one["texts"]) >= 1
    assert "somebody was faster" in one["texts"][-1]["why"]


def test_a_target_that_dies_is_lost_and_the_rounds_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dies:
        lost, words, fails = False, ("cupy",), ["off", "check"]

        def ask(self, do: str, limit: float, **fields: Any) -> dict[str, Any]:
            if do in self.fails:
                raise _children.Broke(f"cupy: it died at {do}, rc -11")
            return {"lost": True, "error": {"exception": "CannotResume", "text": "error 2"}} if do == "on" else {}

    fresh = _room.Fresh()
    fresh.child = Dies()
    for call, said in ((fresh.off, "died at off"), (fresh.wrong, "died at check"), (lambda: fresh.on(1), "error 2")):
        with pytest.raises(_room.Lost, match=said):
            call()
    assert fresh.child.lost


def test_who_gets_in_before_the_window_does_not_count() -> None:
    found: dict[str, Any] = dict.fromkeys(("robbed", "invalid", "got_in", "tries"), 0) | {"at": []}
    for at, came in ((0.1601, True), (0.1, True), (0.3, False), (None, True)):
        _room._seen(found, {"tries": 5, "got": at is not None, "at": at}, sampled=False, came=came)
    assert found == {"robbed": 2, "invalid": 2, "got_in": 1, "tries": 20, "at": [0.1601, 0.1, 0.3]}


def test_beside_a_stranger_each_round_counts_and_a_late_one_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Beside:
        def must(self, do: str, *_: Any, **__: Any) -> dict[str, Any]:
            told.append(do)
            return {"times": 60, "most": GIB} if do == "halt" else {}

    class Scripted(_room.Fresh):
        ons = iter([{"seconds": 1.0}, {"error": {"text": "no room"}}, {"seconds": 1.0}, None, *[{"seconds": 1.0}] * 17])

        def prepare(self) -> None: ...

        def get(self) -> Any:
            if self.child is None:
                told.append("begins")
            self.child = self.child or Beside()
            return self.child

        def off(self) -> int:
            return GIB

        def on(self, timeout: float) -> dict[str, Any]:
            on = next(self.ons)
            if on is None:
                raise _room.Lost("error 2: it is lost")
            return on

        def wrong(self) -> int:
            return 0

    monkeypatch.setattr(_room, "other", lambda *_, **__: contextlib.nullcontext(Beside()))
    monkeypatch.setattr(_room, "Fresh", Scripted)
    monkeypatch.setattr(_room, "ROUNDS", 20)
    monkeypatch.setattr(_room, "end", lambda child: told.append("ends"))
    found = _room.stranger()
    assert (found["rounds"], found["lost"], found["late"], len(found["on_s"])) == (20, 1, 1, 18)
    assert found["losses"] == [{"round": 3, "why": "error 2: it is lost"}] and found["lates"] == ["no room"]
    assert told == [
        "begins", "fill", "go", "halt", "go", "halt", "ends", "begins", "go", "halt", "ends",
    ]  # fmt: skip
    passed, figure = benchmark.suspend_checks({"stranger": {"returncode": 0, **found}})[_listed.STRANGER[0]]
    assert passed and "lost 1 of 20" in figure and "lost in round 3: error 2: it is lost" in figure


def test_a_scenario_that_raises_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def breaks() -> dict[str, Any]:
        raise _children.Broke("torch: it died at off, rc -11; Segmentation fault")

    told: dict[str, Any] = {}
    monkeypatch.setitem(benchmark.SCENARIOS, "rounds torch", breaks)
    monkeypatch.setitem(benchmark.SCENARIOS, "rounds jax", lambda: {"rounds": 1})
    benchmark.ran(["rounds torch", "rounds jax"], told.__setitem__)
    assert told["rounds jax"]["returncode"] == 0 and told["rounds torch"]["returncode"] == 1
    assert "Segmentation fault" in benchmark.suspend_checks(told)[_listed.of_rounds("torch")[0]][1]
    result = benchmark.kept(tmp_path / "out.json", {})
    result.add("rounds torch", told["rounds torch"])
    assert list(json.loads((tmp_path / "out.json").read_text())["scenarios"]) == ["rounds torch"]


def test_an_earlier_run_of_the_same_code_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = benchmark.kept(tmp_path / "out.json", {})
    result.add("peak", {"returncode": 1, "stderr_tail": "died"})
    about = {**_run.header("python benchmarks/suspend.py"), "date": "2099-01-01T00:00:00+00:00"}
    about["memguard_hash"] = json.loads((tmp_path / "out.json").read_text())["about"]["memguard_hash"]
    monkeypatch.setattr(benchmark, "header", lambda *_: about)
    again = benchmark.kept(tmp_path / "out.json", {})
    again.add("peak", {"returncode": 0, **suspend_results.whole()["peak"]})
    again.add("turns", {"returncode": 0, **suspend_results.whole()["turns"]})
    _run.conclude(again.whole(), tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert [list(run["failed"]) for run in found["earlier_runs"]] == [list(_listed.PEAK)]


@pytest.mark.parametrize(("seconds", "processes"), [(200.0, 4), (0.0, 1)])
def test_calls_that_hang_are_told_and_given_up(monkeypatch: pytest.MonkeyPatch, seconds: float, processes: int) -> None:
    begun: list[Any] = []

    class Hangs:
        pid, process = 7, type("Process", (), {"poll": staticmethod(lambda: None)})

        def __init__(self, *words: str) -> None:
            begun.append(self)

        def must(self, do: str, limit: float, **fields: Any) -> dict[str, Any]:
            if do == "round":
                raise _children.Broke(f"round did not come in {limit:.0f} s")
            return {"kinds": ["copy"], "broken": {}}

    said = {"rc": 1, "seconds": 45.2, "err": "there is no room", "out": ""}
    monkeypatch.setattr(_breaks, "Child", Hangs)
    monkeypatch.setattr(_breaks, "resume", lambda pid: said)
    monkeypatch.setattr(_breaks, "end", lambda child: None)
    monkeypatch.setattr(_breaks, "AT_MOST", seconds)
    found = _breaks.calls("cupy")
    assert len(begun) == len(found["hung"]) == processes and found["kinds"] == ["copy"] and found["rounds"] == 0
    assert found["hung"][0] == ("round did not come in 75 s\nmemguard resume: rc 1 in 45.2 s: there is no room"), (
        "what brought it back, or not, is told"
    )


def test_a_scenario_that_hangs_with_its_turn_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue for room is a folder of the user's own (`turn.folder`): each scenario's processes have their own."""
    seen: list[tuple[str, str]] = []

    def scenario() -> dict[str, Any]:
        with _children.Child("_suspend_target.py", "cupy") as child:
            words = Path(f"/proc/{child.pid}/environ").read_text().split("\0")
        child.process.stdout.close()
        runtime = next(word.partition("=")[2] for word in words if word.startswith("XDG_RUNTIME_DIR="))
        seen.append((runtime, _children.surroundings()["XDG_RUNTIME_DIR"]))
        assert os.stat(runtime).st_uid == os.geteuid() and os.stat(runtime).st_mode & 0o777 == 0o700
        return {}

    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    monkeypatch.setattr(benchmark, "SCENARIOS", {"one": scenario, "two": scenario})
    assert [benchmark.run(name)[1]["returncode"] for name in ("one", "two")] == [0, 0]
    (first, commands), (second, _) = seen
    assert first == commands and first != second and not Path(first).exists()


def test_a_crash_names_the_call(tmp_path: Path) -> None:
    """The control's process dies in a call: faulthandler says in which."""
    result, _ = rehearsed(tmp_path, "--only", "control")
    assert result["scenarios"]["control"]["rc"] == -11
    assert result["scenarios"]["control"]["call"] == "call: synchronize"


def test_names_that_are_none_and_parts() -> None:
    assert benchmark.chosen("gi", None) == ["turns", "notebook"]
    assert benchmark.chosen(None, "peak") == ["peak"] and benchmark.chosen(None, None) == list(benchmark.SCENARIOS)
    with pytest.raises(SystemExit, match="part x"):
        benchmark.chosen("x", None)
    assert sorted(benchmark.SCENARIOS) == sorted(_listed.SUSPEND)
    assert set(benchmark.TOGETHER) < set(benchmark.PARTS)


def test_a_gap_is_from_the_rise_to_the_fall() -> None:
    changes = [(0.1, 100 * MIB), (150.0, 2 * GIB), (151.0, 3 * GIB), (170.0, 2 * GIB), (176.0, 20 * MIB)]
    found = _room._gap({"changes": changes, "looks": 5000, "longest_ms": 0.4})
    assert (found["rise_ms"], found["fall_ms"], found["ms"]) == (150.0, 176.0, 26.0)
    none = _room._gap({"changes": changes[:1], "looks": 9, "longest_ms": 0.4})
    assert none["ms"] is None and none["free"] == [100 * MIB] * 3


# Bars

first = ("rounds", 3)
BROKEN: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "another value": (("rounds jax", "wrong"), 1, _listed.of_rounds("jax")[0]),
    "still listed": (("rounds six", "listed_while_off"), 1, _listed.of_rounds("all six")[1]),
    "not back by NVML": (("rounds torch", "missing_when_back"), 1, _listed.of_rounds("torch")[1]),
    "a page more on the card": (("rounds cupy", "card", 19), 604 * MIB, _listed.of_rounds("cupy")[2]),
    "more host memory": (("rounds numba", "host", 19), 2 * GIB, _listed.of_rounds("numba")[2]),
    "a ledger that does not say it": (("rounds pycuda", "ledger"), None, _listed.of_rounds("pycuda")[3]),
    "a timeline without it": (("rounds torch", "timeline", "resumed"), 19, _listed.of_rounds("torch")[3]),
    "a call that goes on": (("calls torch", "ends", "synchronize"), {"waited": 29, "went on": 1}, "waits"),
    "a call that fails": (("calls torch", "ends", "copy to host"), {"CUDAError: 304": 30}, "waits"),
    "a call that never returns": (("calls torch", "ends", "synchronize"), {"never returned": 30}, "waits"),
    "a call that ran seldom": (("calls torch", "ends", "synchronize"), {"waited": 3}, "waits"),
    "a crash": (("calls torch", "crashed"), [{"call": "call: item", "rc": -11}], _listed.of_calls("torch")[1]),
    "a call that holds the GIL": (("calls torch", "hung"), ["it did not answer"], _listed.of_calls("torch")[1]),
    "a control that lives": (("control", "rc"), None, _listed.CONTROL[0]),
    "a control that ends otherwise": (("control", "rc"), 1, _listed.CONTROL[0]),
    "lost when killed": (("helper killed, on", *first, "wrong"), 2, _listed.of_break("helper killed", "on")[0]),
    "left away": (("SIGINT, off", *first, "away_at_last"), True, _listed.of_break("SIGINT", "off")[0]),
    "no strike": (("SIGINT, on", *first, "struck"), False, _listed.of_break("SIGINT", "on")[0]),
    "too few rounds": (("controller killed, off", *first, "step"), "lock", "broken"),
    "it does not answer": (("controller killed, on", *first, "wrong"), "dead", "killed"),
    "not refused": (("refused a capture", "refused"), False, _listed.of_refused("a capture")[0]),
    "another reason": (("refused a capture", "codes"), ["nccl"], _listed.of_refused("a capture")[0]),
    "no remedy": (("refused torch.profiler", "text"), "no", _listed.of_refused("torch.profiler")[0]),
    "touched": (("refused a capture", "on_card"), False, _listed.of_refused("a capture")[0]),
    "for ever": (("refused a capture", "after"), "cannot suspend", _listed.of_refused("a capture")[0]),
    "not in ps": (("outside", "listed_off"), False, _listed.OUTSIDE[0]),
    "not off": (("outside", "gone"), False, _listed.OUTSIDE[1]),
    "taken without leave": (("outside", "not_allowed", "rc"), 0, _listed.OUTSIDE[2]),
    "unsafe and lost": (("outside", "unsafe_wrong"), 1, _listed.OUTSIDE[2]),
    "a peak that was none": (("peak", "before"), 2 * GIB, _listed.PEAK[0]),
    "a peak that stays": (("peak", "while_off"), 500 * MIB, _listed.PEAK[0]),
    "wrong at 60 GiB": (("seconds torch", "sizes", "60", "wrong"), 1, _listed.of_seconds("torch")[0]),
    "no 60 GiB": (("seconds torch", "sizes"), {}, _listed.of_seconds("torch")[0]),
    "less than it says": (("seconds jax", "sizes", "16", "rounds", 0, "bytes"), GIB, _listed.of_seconds("jax")[0]),
    "there was room for both": (("turns", "apart"), [44 * GIB, 45 * GIB], _listed.TURNS[0]),
    "not both at once": (("turns", "most_host"), 45 * GIB, _listed.TURNS[1]),
    "nobody named": (("no room", "names"), False, _listed.NO_ROOM[0]),
    "lost without room": (("no room", "lost"), True, _listed.NO_ROOM[0]),
    "there was room": (("no room", "free"), 9 * GIB, _listed.NO_ROOM[0]),
    "not back": (("no room", "on"), {"text": "no"}, _listed.NO_ROOM[1]),
    "lost, and no reason": (("stranger", "losses", 0, "why"), " ", _listed.STRANGER[0]),
    "lost, and not told": (("stranger", "losses"), [], _listed.STRANGER[0]),
    "rounds that a stranger ended": (("stranger", "rounds"), 19, _listed.STRANGER[0]),
    "not timed twice": (("seconds cupy", "sizes", "16", "rounds"), [], _listed.of_seconds("cupy")[0]),
    "robbed too early": (("window, context goes", "robbed"), 4, _listed.of_window("context goes")[0]),
    "half the card": (("notebook", "filled", "held"), 70 * GIB, _listed.NOTEBOOK[0]),
    "another is named": (("notebook", "holder"), 77, _listed.NOTEBOOK[2]),
    "a stranger that sleeps": (("stranger", "grabbed", "times"), 3, _listed.STRANGER[0]),
    "no window seen": (("window, context goes", "sampled"), [], _listed.of_window("context goes")[0]),
    "nobody tried": (("window, context stays", "tries"), 0, _listed.of_window("context stays")[0]),
    "a kernel that stays": (("notebook", "off_s"), None, _listed.NOTEBOOK[0]),
    "a wrong cell": (("notebook", "next", "text"), "WRONG", _listed.NOTEBOOK[1]),
    "a refused cell that ran": (("notebook", "refused", "text"), "(PID 7) it ran", _listed.NOTEBOOK[2]),
    "a variable of a refused cell": (("notebook", "last", "text"), "RIGHT\nTrue", _listed.NOTEBOOK[2]),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_each_bar_can_be_missed(what: str) -> None:
    path, value, bar = BROKEN[what]
    s = suspend_results.whole()
    place: Any = s
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    short = {
        "waits": _listed.of_calls("torch")[0],
        "broken": _listed.of_break("controller killed", "off")[0],
        "killed": _listed.of_break("controller killed", "on")[0],
    }
    bar = short.get(bar, bar)
    assert [name for name, (passed, _) in benchmark.suspend_checks(s).items() if not passed] == [bar]


def test_a_call_that_needs_no_driver_may_go_on_and_is_named() -> None:
    s = suspend_results.whole()
    s["calls jax"]["ends"]["operator"] = {"went on": 30}
    passed, figure = benchmark.suspend_checks(s)[_listed.of_calls("jax")[0]]
    assert passed and "asked the driver nothing: operator" in figure


# Tables


def test_the_tables_have_every_figure_and_none_of_what_was_not_measured() -> None:
    s = suspend_results.whole()
    text = "\n".join(_table.whole(s))
    for said in (
        "| all six in one process | 20 | 0 | 0 | +0.0 | +19.0 | 0.90 / 0.40 |",
        "| PyTorch | 60 | 60.49 | 36.00 / 15.00 s (0.60 / 0.25) |", "TensorFlow after a peak of 60 GiB held 61.0 GiB",
        "| JAX | 16 | 16.49 | 9.60 / 4.00 s (0.58 / 0.24) | 9.60 / 4.00 s (0.58 / 0.24) |",
        "Two processes of 44 GiB", "rc -11",
        "| PyTorch | 2 | 30 | 58 | 2 | 0 | 0 | 0 |", "| SIGINT, off | 20 | 20 | 0 |",
        "| controller killed, on | 20 | 20 | 20 |", "1 of 20 lost, 1 found no room",
        "  - lost in round 4: error 2: lost",
        "whose context goes, and the restore's taking: 12.5 to 12.5 ms",
    ):  # fmt: skip
        assert said in text, said
    assert _table.row(s)[1] == (
        "140 rounds in 7 processes, 0 arrays with other values; 16 GiB of PyTorch out in 9.6 s, in in 4.0 s"
    )
    died = {key: {"returncode": -9} for key in s}
    assert _table.whole(died) == _table.whole({}) == ["## A process steps off the card"]
