"""What each framework could give back: `memguard.reclaimable()`, and the columns of `ps` and `top --once`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from guards import simulated, start
from test_cli import call
from timelines import START, plan_of, sample_of

import memguard
from memguard._base.types import FrameworkSample, Sample
from memguard._base.units import GIB, MIB
from memguard._frameworks.simulated.adapter import SimulatedFramework
from memguard._guard.figures import FrameworkReclaimable, of_sample
from memguard._node.suspend import processes
from memguard._timeline.writer import Writer

pytestmark = pytest.mark.usefixtures("nothing_stays")
FIGURES = {
    "torch": FrameworkSample(8 * GIB, 2 * GIB, 5 * GIB, 10 * GIB),
    "cupy": FrameworkSample(6 * GIB, GIB, None, 8 * GIB),
    "pycuda": FrameworkSample(GIB, 0, GIB, 2 * GIB),
    "jax": FrameworkSample(4 * GIB, GIB, None, 4 * GIB),
    "numba": FrameworkSample(2 * GIB, GIB, 0, None),
    "exchange": FrameworkSample(GIB, GIB, 0, None),
}


def test_the_figures_of_each_framework() -> None:
    (part,) = of_sample(sample_of(plan_of(), START, **FIGURES), plan_of(), True).devices
    assert part.frameworks == (
        FrameworkReclaimable("torch", 8 * GIB, 6 * GIB, 5 * GIB, "memguard.trim"),
        FrameworkReclaimable("pycuda", GIB, GIB, GIB, "own thread"),
        FrameworkReclaimable("jax", 4 * GIB, 3 * GIB, 0, "never"),
        FrameworkReclaimable("numba", 2 * GIB, GIB, 0, "own call"),
        FrameworkReclaimable("cupy", 6 * GIB, 5 * GIB, None, "memguard.trim"),
    )
    assert part.reclaimable == 6 * GIB
    silent = of_sample(sample_of(plan_of(), START, tensorflow=FrameworkSample(None, GIB, 0, GIB)), plan_of(), True)
    assert silent.devices[0].frameworks == (FrameworkReclaimable("tensorflow", None, None, 0, "never"),)


def test_it_says_what_a_trim_then_gives_back() -> None:
    guard = start()
    torch, pycuda = simulated(guard, "torch"), simulated(guard, "pycuda")
    arrays = [torch.allocate(512 * MIB) for _ in range(4)]
    torch.free(arrays[0])
    torch.free(arrays[3])
    pycuda.free(pycuda.allocate(GIB))
    said = memguard.reclaimable()
    for one in said.devices[0].frameworks:
        assert memguard.trim(one.framework) == one.reclaimable and one.reclaimable
    assert said.simulated and memguard.reclaimable().devices[0].reclaimable == 0
    text = str(said)
    assert text.splitlines()[0].endswith("GiB could come back") and "memguard.trim('torch')" in text
    assert "memguard.trim('pycuda') on its own thread" in text
    assert json.loads(json.dumps(said.as_dict()))["devices"][0]["frameworks"][0]["how"] == "own thread"


def test_where_nothing_is_at_work_or_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    assert str(memguard.reclaimable()).endswith("0 B could come back\n  no framework is at work on it")
    memguard.shutdown()
    with pytest.raises(memguard.NotActive):
        memguard.reclaimable()
    monkeypatch.setenv("MEMGUARD_DISABLE", "1")
    memguard.init({"version": 1, "frameworks": {"torch": {"share": "50%"}}})
    assert memguard.reclaimable().devices == () and "nothing is known" in str(memguard.reclaimable())
    with memguard.workload("w", framework="torch", needs="1GiB", wait="1s") as report:
        assert report.reserved is None


def timeline(folder: Path, *samples: Sample) -> str:
    folder.mkdir(exist_ok=True)
    writer = Writer(folder / "run.jsonl", plan_of(), simulated=True)
    for sample in samples:
        writer.sample(sample)
    writer.close()
    return str(writer.path)


def test_top_once_has_a_column_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of()
    path = timeline(tmp_path, sample_of(plan, START), sample_of(plan, START + 1, **FIGURES))
    assert call("top", "--once", path) == 0
    lines = capsys.readouterr().out.splitlines()
    (head,) = (line for line in lines if line.split()[:2] == ["GiB", "held"])
    end = head.index("reclaim") + len("reclaim")
    cells = {line.split()[0]: line[:end].split()[-1] for line in lines if line.startswith("  ") and line.split()[1:]}
    assert (cells["torch"], cells["pycuda"], cells["jax"], cells["cupy"]) == ("5.00", "1.00", "0.00", "unknown")


def test_ps_has_a_column_for_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a process that `memguard top` may watch; here this one itself."""
    gpu = processes.Gpu("GPU-a", 0, "NVIDIA H200", 140 * GIB, GIB, 139 * GIB, {os.getpid(): GIB})
    person = processes.Person(None, "alice", "python train.py")
    read = processes.Readings((gpu,), {os.getpid(): person})
    monkeypatch.setattr(processes, "read", lambda door: read)
    budget = {"version": 1, "frameworks": {"torch": {"share": "50%"}}, "monitor": {"top": True}}
    guard = memguard.init(budget, simulate="h200")
    try:
        torch = guard.frameworks["torch"]
        assert isinstance(torch, SimulatedFramework)
        torch.free(torch.allocate(2 * GIB))
        assert call("ps", "--json") == 0
        (row,) = json.loads(capsys.readouterr().out)["processes"]
        assert row["reclaimable"] == 2 * GIB
        assert call("ps") == 0 and "2.00 GiB" in capsys.readouterr().out
    finally:
        memguard.shutdown()
    assert call("ps", "--json") == 0
    assert json.loads(capsys.readouterr().out)["processes"][0]["reclaimable"] is None
