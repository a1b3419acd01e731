"""memguard in the ranks of the real torchrun, with gloo, and of Open MPI's mpirun: on simulated GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("rank_program.py")
GIB, MIB = 2**30, 2**20
LIMIT, RESERVE = 40 * GIB, GIB

Ranks = list[dict[str, Any]]


def run(folder: Path, gpus: int, *command: str, mode: str = "plain") -> Ranks:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "SLURM_", "PMI"))}
    environ |= {"MEMGUARD_SIMULATE": ",".join(["h200"] * gpus), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(PROGRAM), str(folder), mode], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    files = sorted(folder.glob("*.json"), key=lambda path: int(path.stem))
    return [json.loads(path.read_text()) for path in files]


def torchrun(folder: Path, ranks: int, gpus: int, mode: str = "plain") -> Ranks:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return run(folder, gpus, *command, mode=mode)


def has_its_part(ranks: Ranks, share: int, gpus: int) -> None:
    """Each rank has its part of the GPU that it uses, and is refused there what the undivided budget would give it."""
    for rank in ranks:
        assert rank["whole"]["limit"] == LIMIT and rank["whole_got"] == [15 * GIB, None], "the control"
        part = rank["part"]
        assert part["limit"] == LIMIT // share and part["reserve"] == RESERVE
        assert part["caps"] == {"torch": (LIMIT // share - RESERVE) // 2, "cupy": 4 * GIB // share}
        got, error = rank["part_got"]
        assert got == part["caps"]["torch"] // GIB * GIB and error == "SimulatedTorchOutOfMemory"
    for gpu in range(gpus):
        assert sum(rank["part"]["limit"] for rank in ranks if rank["local"] % gpus == gpu) == LIMIT


def has_the_same_table(ranks: Ranks, gpus: int) -> None:
    """Every rank has the ledgers of all, and each row what that rank holds on its GPU, and is simulated."""
    tables = [rank["table"] for rank in ranks]
    assert all(table == tables[0] for table in tables) and len(tables[0]) == len(ranks)
    for number, rank in enumerate(ranks):
        one = tables[0][str(number)]
        assert one["pid"] == rank["pid"] and one["active"] and one["simulated"] and one["error"] is None
        mine = one["devices"][rank["local"] % gpus]
        assert mine["own"] and mine["limit"] == rank["part"]["limit"]
        torch = mine["frameworks"]["torch"]
        assert torch["in_use"] == (rank["local"] + 1) * GIB and torch["cap"] == rank["part"]["caps"]["torch"]
        assert [part["frameworks"] for part in one["devices"] if part is not mine] == [{}] * (gpus - 1)
    lines = ranks[0]["text"].splitlines()
    assert lines[0].startswith("simulated GPUs") and lines[1].split()[:2] == ["rank", "host"]
    assert [line.split()[0] for line in lines[2:]] == [str(n) for n in range(len(ranks)) for _ in range(2)]


def test_two_ranks_that_share_a_gpu(tmp_path: Path) -> None:
    ranks = torchrun(tmp_path, ranks=2, gpus=1)
    has_its_part(ranks, share=2, gpus=1)
    has_the_same_table(ranks, gpus=1)
    assert "local rank 1 of 2: it has 1/2 of cuda:0, which 2 ranks share" in ranks[1]["part"]["notes"][0]
    *weights, first, last = ranks[0]["trained"]
    assert weights == ranks[1]["trained"][:-2] and last < first, "the model was trained together"


def test_four_ranks_on_two_gpus(tmp_path: Path) -> None:
    """One run for all of this: four processes import torch, which is most of its time."""
    four = torchrun(tmp_path, ranks=4, gpus=2, mode="more")
    has_its_part(four, share=2, gpus=2)
    has_the_same_table(four, gpus=2)
    a_rank_without_a_ledger_is_a_row_and_nobody_waits(four)
    a_group_has_the_ledgers_of_its_ranks(four)


def a_rank_without_a_ledger_is_a_row_and_nobody_waits(four: Ranks) -> None:
    for rank in four:
        broken = rank["broken"]
        assert broken["2"]["error"] == "ZeroDivisionError: division by zero" and not broken["3"]["active"]
        assert [broken[number]["error"] for number in "013"] == [None] * 3
        assert "not read: ZeroDivisionError" in rank["broken_text"] and "no budget" in rank["broken_text"]
    for rank in four[:3]:
        assert rank["late"]["3"]["error"] == "no answer within 0.5 s" and rank["late"]["1"]["error"] is None
    for rank in four:
        assert rank["again"]["3"]["error"] is None and rank["again"]["0"]["time"] > four[0]["late"]["0"]["time"]


def a_group_has_the_ledgers_of_its_ranks(four: Ranks) -> None:
    assert [*four[1]["two"]] == [*four[2]["two"]] == ["1", "2"]
    assert four[1]["two"]["2"]["pid"] == four[2]["pid"]
    assert "this process is no rank of the group" in four[0]["refused"]


def test_two_ranks_of_mpirun(tmp_path: Path) -> None:
    mpirun = ["mpirun", "--oversubscribe", "-n", "2", sys.executable]
    if os.geteuid() == 0:
        mpirun.insert(1, "--allow-run-as-root")
    ranks = run(tmp_path, 1, *mpirun, mode="mpi")
    has_its_part(ranks, share=2, gpus=1)
    has_the_same_table(ranks, gpus=1)
    assert "Open MPI's mpirun started this process as local rank 0 of 2" in ranks[0]["part"]["notes"][0]
