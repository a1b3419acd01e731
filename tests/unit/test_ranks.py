"""What launchers say of a rank, which GPU each rank uses, and the part of the budget that it gets."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memguard
from memguard._base.units import GIB, GRANULE, MIB
from memguard._budget import policy
from memguard._budget import ranks as _ranks
from memguard._budget.ranks import ProcessRank, UnclearRank, of, rank_of, sharing
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.cupy.adapter import CuPy
from memguard.cli import main
from memguard.integrations import mpi, torchrun
from memguard.integrations import ranks as ranks_of

TORCHRUN = {
    "LOCAL_RANK": "1", "RANK": "5", "GROUP_RANK": "1", "ROLE_RANK": "5", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8",
    "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "29500",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "5", "OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_NODE_RANK": "1",
}  # fmt: skip
HYDRA = {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "PMI_RANK": "3", "PMI_SIZE": "5"}
SRUN = {
    "SLURM_JOB_ID": "200505", "SLURM_NODEID": "3", "SLURM_LOCALID": "0", "SLURM_PROCID": "6", "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_TASKS_PER_NODE": "2(x3),1",
}  # fmt: skip
BATCH_SCRIPT = {
    "SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "4", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "1(x4)",
    "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_GTIDS": "0", "SLURM_JOB_GPUS": "2",
}  # fmt: skip
"""Of a job's script, which runs once whatever --ntasks says."""


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, None),
        (TORCHRUN, ProcessRank("torchrun", 1, 4, 5, 8)),
        ({"LOCAL_RANK": "0", "LOCAL_SIZE": "2", "RANK": "0", "WORLD_SIZE": "2"}, ProcessRank("torchrun", 0, 2, 0, 2)),
        (OPEN_MPI, ProcessRank("Open MPI's mpirun", 1, 2, 4, 5)),
        (HYDRA, ProcessRank("MPICH's or Intel MPI's mpirun", 1, 2, 3, 5)),
        (SRUN, ProcessRank("srun", 0, 1, 6, 7)),
        ({**SRUN, "SLURM_NODEID": "2", "SLURM_LOCALID": "1", "SLURM_PROCID": "5"}, ProcessRank("srun", 1, 2, 5, 7)),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, ProcessRank("srun", 0, 4, 6, 7)),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "", "SLURM_TASKS_PER_NODE": "2"}, ProcessRank("srun", 0, 2, 6, 7)),
        ({"SLURM_LOCALID": "1", "SLURM_PROCID": "1", "SLURM_NTASKS_PER_NODE": "2"}, ProcessRank("srun", 1, 2, 1)),
        (BATCH_SCRIPT, None),
        # nested: the nearest one counts
        ({**SRUN, **TORCHRUN}, ProcessRank("torchrun", 1, 4, 5, 8)),
        ({**BATCH_SCRIPT, **TORCHRUN}, ProcessRank("torchrun", 1, 4, 5, 8)),
        ({**SRUN, "SLURM_LOCALID": "0", **OPEN_MPI}, ProcessRank("Open MPI's mpirun", 1, 2, 4, 5)),
        ({**SRUN, **HYDRA}, ProcessRank("MPICH's or Intel MPI's mpirun", 1, 2, 3, 5)),
        # a script that copies it, as many do
        ({**OPEN_MPI, "LOCAL_RANK": "1", "RANK": "4"}, ProcessRank("Open MPI's mpirun", 1, 2, 4, 5)),
        ({**SRUN, "LOCAL_RANK": "0"}, ProcessRank("srun", 0, 1, 6, 7)),
    ],
)
def test_who_this_process_is(environ: dict[str, str], rank: ProcessRank | None) -> None:
    assert of(environ) == rank


@pytest.mark.parametrize(
    ("environ", "what", "fix"),
    [
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 says .* a rank, but LOCAL_WORLD_SIZE", "export LOCAL_WORLD_SIZE"),
        ({**TORCHRUN, "LOCAL_RANK": "one"}, "LOCAL_RANK='one' is no local rank", "remove it"),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, "LOCAL_RANK='-1' is no local rank", "remove it"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4, but there are 4 ranks .* LOCAL_WORLD_SIZE", "set both"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE='0' is no number of ranks", "from 1 to 1024"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4\x1b[2J"}, r"LOCAL_WORLD_SIZE='4\\", "from 1 to 1024"),
        ({**OPEN_MPI, "LOCAL_RANK": "0"}, "LOCAL_RANK=0, but OMPI_COMM_WORLD_LOCAL_RANK=1", "export LOCAL_WORLD_SIZE"),
        ({"MPI_LOCALRANKID": "0"}, "MPI_LOCALNRANKS", "ranks: {per_gpu: 1}"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2x3"}, "no list of tasks on nodes", "let srun set it"),
        ({**SRUN, "SLURM_NODEID": ""}, "SLURM_NODEID does not say which node", "per_gpu"),
        ({**SRUN, "SLURM_NODEID": "4"}, "SLURM_NODEID does not say which node", "per_gpu"),
    ],
)
def test_half_a_set_and_nonsense_are_errors(environ: dict[str, str], what: str, fix: str) -> None:
    with pytest.raises(UnclearRank, match=what) as caught:
        of(environ)
    assert fix in caught.value.fix and "\x1b" not in str(caught.value)


def test_the_number_in_the_whole_job_is_of_the_nearest_launcher() -> None:
    assert rank_of({**SRUN, **TORCHRUN}) == 5 and rank_of({**SRUN, **OPEN_MPI}) == 4 and rank_of(HYDRA) == 3
    assert [name for name, _ in _ranks.local_numbers({**SRUN, **TORCHRUN})] == ["LOCAL_RANK", "SLURM_LOCALID"]


def srun(size: int) -> ProcessRank:
    return ProcessRank("srun", 0, size, 0, size)


def slurm(devices: str = "0", **more: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": devices, **{f"SLURM_{name}": value for name, value in more.items()}}


ONE_GPU = {"CUDA_VISIBLE_DEVICES": "0"}
TWO, FOUR = ProcessRank("torchrun", 1, 2, 1, 2), ProcessRank("torchrun", 1, 4, 1, 4)


@pytest.mark.parametrize(
    ("rank", "visible", "environ", "counts", "nccl"),
    [
        (None, 8, {}, (1,), False),
        (ProcessRank("torchrun", 0, 1, 0, 1), 1, ONE_GPU, (1,), False),
        (ProcessRank("torchrun", 0, 1, 0, 2), 1, ONE_GPU, (1,), True),  # a rank on each of two nodes
        (TWO, 2, {}, (1, 1), True),
        (TWO, 4, {}, (1, 1, 1, 1), True),
        (FOUR, 2, {}, (2, 2), False),
        (FOUR, 3, {}, (2, 1, 1), False),
        (TWO, 1, {}, (2,), False),
        (FOUR, 2, {"CUDA_VISIBLE_DEVICES": "1,3"}, (2, 2), False),
        # srun: the whole node's GPUs for each task, or one for each
        (srun(4), 4, slurm("0,1,2,3", GPUS_ON_NODE="4"), (1, 1, 1, 1), True),
        (srun(4), 1, slurm(GPUS_ON_NODE="4", GPUS_PER_TASK="1"), (1,), True),
        (srun(4), 1, slurm(GPUS_ON_NODE="4", GPUS_PER_TASK="a100:1"), (1,), True),
        (srun(8), 2, slurm("2,3", GPUS_ON_NODE="16", GPUS_PER_TASK="2"), (1,), True),
        (srun(4), 1, slurm(GPUS_ON_NODE="2", NTASKS_PER_GPU="2"), (2,), False),
        (srun(3), 1, slurm(GPUS_ON_NODE="1"), (3,), False),
    ],
)  # fmt: skip
def test_which_gpus_are_shared(
    rank: ProcessRank | None, visible: int, environ: dict[str, str], counts: tuple[int, ...], nccl: bool
) -> None:
    found = sharing(rank, visible, environ)
    assert found.counts == counts and found.nccl is nccl and found.note.startswith("ranks: ")


@pytest.mark.parametrize(
    ("rank", "environ"),
    [
        (TWO, ONE_GPU),
        (srun(2), slurm(GPUS_ON_NODE="2")),  # --gpu-bind, which no variable tells
        (srun(4), slurm(GPUS_ON_NODE="2", GPUS_PER_TASK="1")),
        (srun(2), slurm(GPUS_PER_TASK="a100:1,h100:1", GPUS_ON_NODE="2")),
    ],
)
def test_one_visible_gpu_of_its_own_or_not_is_refused(rank: ProcessRank, environ: dict[str, str]) -> None:
    with pytest.raises(UnclearRank, match="CUDA_VISIBLE_DEVICES shows this one one GPU") as caught:
        sharing(rank, 1, environ)
    assert "'ranks: {per_gpu: 1}'" in caught.value.fix and f"'ranks: {{per_gpu: {rank.size}}}'" in caught.value.fix


# the part of the budget


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [*os.environ]:
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "MPI_")) or name in TORCHRUN:
            monkeypatch.delenv(name)
    yield
    memguard.shutdown()


def budget(**more: Any) -> memguard.Budget:
    return memguard.Budget.from_mapping({"version": 1, "frameworks": {"torch": {"share": "50%"}}, **more})


@given(
    ranks=st.integers(1, 9),
    gpus=st.integers(1, 4),
    limit=st.one_of(st.integers(10, 100).map(lambda n: f"{n}%"), st.integers(40, 130).map(lambda n: f"{n}GiB")),
    reserve=st.sampled_from(["auto", "600MiB"]),
    torch=st.sampled_from([{"share": "41%"}, {"limit": "9999MiB"}, {"min": "5%", "max": "40%"}]),
)
def test_the_ranks_of_a_gpu_never_have_more_than_the_budget(
    ranks: int, gpus: int, limit: str, reserve: str, torch: dict[str, str]
) -> None:
    whole = budget(
        ranks="auto",
        device={"limit": limit, "reserve": reserve},
        frameworks={"torch": torch, "cupy": {"share": "9%"}},
    )
    devices = SimulatedHost(["h200"] * gpus).devices()
    alone = {part.device.uuid: part for part in policy.plan(whole, devices).devices}
    limits, caps = Counter[str](), Counter[tuple[str, str]]()
    for local in range(ranks):
        rank = ProcessRank("torchrun", local, ranks, local, ranks)
        try:
            resolved = policy.plan(whole, devices, sharing(rank, gpus, {}))
        except memguard.PlanError:  # so small a part has no room for its context
            assert ranks > gpus
            return
        part = resolved.devices[local % gpus]
        limits[part.device.uuid] += part.limit
        for name, cap in part.caps.items():
            caps[part.device.uuid, name] += cap
        assert part.limit % GRANULE == 0 or len(range(local % gpus, ranks, gpus)) == 1
        assert part.reserve >= alone[part.device.uuid].reserve, "each process has a context of its own"
    for uuid, total in limits.items():
        assert total <= alone[uuid].limit
        assert sum(caps[uuid, name] for name in alone[uuid].caps) <= alone[uuid].limit - alone[uuid].reserve


def test_each_gpu_is_divided_among_its_own_ranks() -> None:
    devices = SimulatedHost(["h200", "h200"]).devices()
    found = policy.plan(
        budget(ranks="auto", device={"limit": "30GiB"}), devices, sharing(ProcessRank("x", 0, 3), 2, {})
    )
    assert [part.limit for part in found.devices] == [15 * GIB, 30 * GIB]
    turned = [replace(devices[0], ordinal=1), replace(devices[1], ordinal=0)]  # CUDA_VISIBLE_DEVICES=1,0
    found = policy.plan(budget(ranks="auto", device={"limit": "30GiB"}), turned, sharing(ProcessRank("x", 0, 3), 2, {}))
    assert [part.limit for part in found.devices] == [30 * GIB, 15 * GIB]


def guard_of(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], gpus: int = 2, **more: Any) -> Any:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return memguard.init(budget(**more), simulate=["h200"] * gpus, replace=True)


def test_init_applies_the_part_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = guard_of(monkeypatch, TORCHRUN, ranks="auto", device={"limit": "32GiB"})
    assert [part.limit for part in guard.plan.devices] == [16 * GIB] * 2
    assert "note: ranks: torchrun started this process as local rank 1 of 4: it has 1/2 of cuda:1" in str(guard)
    assert guard.plan.devices[1].caps["torch"] <= 8 * GIB
    guard = guard_of(monkeypatch, TORCHRUN, device={"limit": "32GiB"})
    assert [part.limit for part in guard.plan.devices] == [32 * GIB] * 2, "without the key as before"


def test_a_process_that_is_no_rank_has_the_budget_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="memguard")
    guard = guard_of(monkeypatch, BATCH_SCRIPT, ranks="auto", device={"limit": "32GiB"})
    assert guard.plan.devices[0].limit == 32 * GIB
    assert [r.levelname for r in caplog.records if "no launcher says" in r.message] == ["INFO"]
    guard = guard_of(monkeypatch, {}, ranks={"per_gpu": 2}, device={"limit": "32GiB"})
    assert guard.plan.devices[0].limit == 16 * GIB, "the file says it of each process"
    assert policy.plan(guard.budget, SimulatedHost().devices()).devices[0].limit == 16 * GIB


@pytest.mark.parametrize(
    ("local", "world", "frameworks", "more"),
    [
        ("2", "2", {"torch": {"share": "50%"}}, 896 * MIB),
        ("2", "2", {"torch": {"share": "50%", "nccl": 0}}, 0),
        ("2", "2", {"torch": {"share": "50%", "nccl": 2}}, 1408 * MIB),
        ("2", "2", {"cupy": {"share": "50%"}}, 0),
        ("1", "1", {"torch": {"share": "50%"}}, 0),
        ("1", "2", {"torch": {"share": "50%"}}, 896 * MIB),
        ("4", "4", {"torch": {"share": "50%"}}, 0),  # NCCL refuses two ranks on one GPU
    ],
)
def test_the_reserve_has_room_for_nccl_where_ranks_have_gpus_of_their_own(
    monkeypatch: pytest.MonkeyPatch, local: str, world: str, frameworks: dict[str, Any], more: int
) -> None:
    plain = {name: {**one, "nccl": 0} if name == "torch" else one for name, one in frameworks.items()}
    bare = policy.plan(budget(frameworks=plain), SimulatedHost().devices()).devices[0].reserve
    environ = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": local, "RANK": "0", "WORLD_SIZE": world}
    guard = guard_of(monkeypatch, environ, ranks="auto", frameworks=frameworks)
    assert guard.plan.devices[0].reserve == bare + more
    said = "reserve: auto has room for one NCCL communicator" in str(guard)
    assert said is (more == 896 * MIB), "what was written needs no note"


def test_what_does_not_fit_says_what_one_rank_would_get(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "16"}
    with pytest.raises(
        memguard.PlanError, match=r"limit 512\.0 MiB, reserve .* one of 16 ranks that share it"
    ) as caught:
        guard_of(monkeypatch, environ, gpus=1, ranks="auto", device={"limit": "8GiB"})
    assert "start fewer ranks on a GPU, raise device.limit to" in str(caught.value)
    needed = int(str(caught.value).partition("device.limit to ")[2].partition("MiB")[0])
    assert guard_of(monkeypatch, environ, gpus=1, ranks="auto", device={"limit": f"{needed}MiB"}).active
    more = {"frameworks": {"torch": {"share": "5%"}, "cupy": {"limit": "20MiB"}}}
    with pytest.raises(memguard.PlanError, match=r"cupy\.limit.*20\.0 MiB for 16 ranks is less than 2 MiB for each"):
        guard_of(monkeypatch, environ, gpus=1, ranks="auto", **more)


def test_an_unclear_environment_is_an_error_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(memguard.PlanError, match="ranks: LOCAL_RANK=1 says") as caught:
        guard_of(monkeypatch, {"LOCAL_RANK": "1"}, ranks="auto")
    assert "fix: export LOCAL_WORLD_SIZE" in str(caught.value)
    assert guard_of(monkeypatch, {"LOCAL_RANK": "1"}, ranks={"per_gpu": 2}).active, "the budget says what it does not"


# one plan for the node

FILE = """
version: 1
ranks: auto
device: {limit: 40GiB}
frameworks: {torch: {share: 60%}, cupy: {limit: 4GiB}}
"""


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main.main([*arguments], prog_name="memguard")
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "budget.yaml"
    path.write_text(FILE)
    return str(path)


def test_plan_shows_each_rank_of_a_node_and_their_sum(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    h200s = ("--device", "h200") * 2
    shown = printed(capsys, "plan", file, *h200s, "--ranks", "4")
    assert "local ranks 0, 2 together" in shown and "local ranks 1, 3 together" in shown
    assert shown.count("limit 20.00 GiB 40.00 GiB") == 2 and shown.count("cupy 2.00 GiB 4.00 GiB") == 2
    found = json.loads(printed(capsys, "plan", file, *h200s, "--ranks", "3", "--json"))
    first, second = found["devices"]
    assert found["ranks"] == 3 and (first["local_ranks"], second["local_ranks"]) == ([0, 2], [1])
    assert (first["limit"], first["together"]) == (20 * GIB, 40 * GIB)
    assert (second["limit"], second["together"]) == (40 * GIB, 40 * GIB)
    assert "1 NCCL" not in shown, "two ranks on a GPU have none"
    shown = printed(capsys, "plan", file, *h200s, "--ranks", "2")
    assert shown.count("reserve, 1 NCCL 2.16 GiB 2.16 GiB") == 2
    shown = printed(capsys, "plan", file, *h200s, "--ranks", "1")
    assert "000001: no rank uses it" in shown and "note" not in shown
    assert "with --ranks 4 that of a node with four ranks" in printed(capsys, "plan", file, *h200s)


@pytest.mark.parametrize(
    ("ranks", "fix"), [("", "write 'ranks: auto'"), ("ranks: {per_gpu: 1}", "write 'ranks: {per_gpu: 4}'")]
)
def test_plan_names_ranks_that_may_take_more_than_there_is(
    file: str, capsys: pytest.CaptureFixture[str], ranks: str, fix: str
) -> None:
    Path(file).write_text(FILE.replace("ranks: auto", ranks))
    shown = printed(capsys, "plan", file, "--device", "h200", "--ranks", "4")
    assert "may take 160.00 GiB together, more than it has" in shown and fix in shown
    Path(file).write_text(FILE.replace("ranks: auto", "ranks: {per_gpu: 4}"))
    shown = printed(capsys, "plan", file, "--device", "h200", "--ranks", "4")
    assert "limit 10.00 GiB 40.00 GiB" in shown and "note" not in shown
    assert "of 4 that share each GPU" in printed(capsys, "plan", file, "--device", "h200")


def test_check_says_what_ranks_get(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "check", file)
    assert "ranks auto: ranks of torchrun, mpirun and srun that use the same GPU divide its limit" in shown
    assert "nccl: 1 where each rank has a GPU of its own" in shown


# the ledgers of all ranks


class Store:
    """A key-value store of torch.distributed, of one process."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value

    def get(self, key: str) -> Any:
        return self.kept[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.kept.pop(key, None) is not None

    def wait(self, keys: list[str], timeout: Any) -> None:
        end = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > end:
                raise RuntimeError("wait timeout")
            time.sleep(0.001)


def test_a_store_gives_each_rank_the_others_and_keeps_two_rounds() -> None:
    store, rounds = Store(), [dict[str, int](), dict[str, int]()]

    def call(rank: int, timeout: float = 30.0) -> list[Any]:
        found = torchrun._exchanged(store, "0", range(2), ranks_of.own(rank), timeout, rounds[rank])
        return [one["error"] for one in found]

    assert call(0, 0.01) == [None, "no answer within 0.01 s"]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):  # the one that was given up goes on with the next round
            assert [*pool.map(call, range(2))] == [[None, None]] * 2
    assert rounds[0] == rounds[1] == {"0": 6}
    assert sum(key.endswith("/ledger") for key in store.kept) <= 5, "two rounds, and the one that nobody finished"


class Communicator:
    def __init__(self, others: list[Any]) -> None:
        self.others = others

    def Get_rank(self) -> int:  # noqa: N802 # as mpi4py has it
        return 0

    def allgather(self, mine: Any) -> list[Any]:
        return [*self.others, mine]


def test_a_table_of_mpi_has_a_row_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    none = ranks_of.own(2)
    guard = guard_of(monkeypatch, {**OPEN_MPI}, ranks="auto", gpus=2)
    guard.frameworks["torch"].allocate(GIB, 1)
    found = mpi.ledgers(Communicator([ranks_of.without_ledger(11, "lost\x1b[2J"), none]))
    assert [*found.ranks] == [0, 2, 11] and len(found) == 3 and repr(found).startswith("<Ledgers of 3 ranks")
    lines = str(found).splitlines()
    assert lines[0] == "simulated GPUs: nothing real is limited"
    assert lines[2].split()[2:6] == ["1", "NVIDIA", "H200", "torch"] and "1.00 GiB" in lines[2]
    assert lines[4].split()[0] == "2" and "no budget" in lines[4]
    assert lines[5].split()[:4] == ["11", "unknown", "not", "read:"] and "\x1b" not in str(found)
    assert json.loads(json.dumps(found.as_dict()))["0"]["devices"][1]["own"] is True
    assert found.as_dict()[0]["pressure"] == "ok"


def test_a_rank_that_holds_nothing_shows_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    guard_of(monkeypatch, OPEN_MPI, ranks="auto", gpus=2)
    lines = str(mpi.ledgers(Communicator([]))).splitlines()
    assert len(lines) == 3 and "1 NVIDIA H200" in lines[2] and "process: ok" in lines[2]


def test_what_fails_in_a_rank_is_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = guard_of(monkeypatch, {})
    monkeypatch.setattr(guard, "sample", lambda: 1 / 0)
    one = ranks_of.own(0)
    assert one["error"] == "ZeroDivisionError: division by zero" and one["devices"] == []
    assert "not read: ZeroDivisionError" in str(ranks_of.Ledgers.of([one]))


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (None, "has no process group in this process.*init_process_group first"),
        (SimpleNamespace(is_available=lambda: True, is_initialized=lambda: False), "has no process group"),
        (
            SimpleNamespace(
                is_available=lambda: True,
                is_initialized=lambda: True,
                get_rank=lambda group=None: 0,
                distributed_c10d=SimpleNamespace(_get_default_store=lambda: None),
            ),
            r"has no store.*memguard\.integrations\.mpi\.ledgers",
        ),
    ],
)
def test_without_a_group_or_a_store_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, fake: Any, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", fake)
    with pytest.raises(memguard.MemguardError, match=f"(?s){message}"):
        torchrun.ledgers()


def test_without_mpi_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(memguard.MemguardError, match=r"(?s)needs mpi4py and an MPI.*pip install mpi4py"):
        mpi.ledgers()


def test_communicators_of_cupyx_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class NCCLBackend:
        _comm: object = object()

    adapter = CuPy(SimulatedHost())
    assert not adapter.communicating()
    monkeypatch.setitem(sys.modules, "cupyx.distributed._nccl_comm", SimpleNamespace(NCCLBackend=NCCLBackend))
    assert not adapter.communicating()
    one = NCCLBackend()
    assert adapter.communicating()
    one._comm = None  # type: ignore[assignment] # stopped
    assert not adapter.communicating()
