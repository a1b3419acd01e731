"""One of several ranks runs nothing again: what is a sign of that, and what is none."""

from __future__ import annotations

import json
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memguard
from memguard._budget import ranks as _ranks
from memguard._runtime.retry import ranks
from memguard._runtime.retry.ranks import Signs, several

CLUSTER = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}})


class OutOfMemoryError(RuntimeError):
    """As torch's, by its name."""


OutOfMemoryError.__module__ = "torch"


@pytest.mark.parametrize(
    ("libraries", "environ", "why"),
    [
        ({"torch.distributed": 4}, {}, "torch.distributed has 4 ranks"),
        ({"torch.distributed": 1, "MPI": 2}, {}, "MPI has 2 ranks"),
        ({}, {"WORLD_SIZE": "8", "RANK": "0"}, "torchrun, accelerate or DeepSpeed started 8 ranks (WORLD_SIZE)"),
        ({"torch.distributed": 1}, {"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI's mpirun started 2 ranks"),
        ({}, {"PMI_SIZE": " 3 "}, "MPICH's or Intel MPI's mpirun started"),
        ({}, {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "srun started 2 ranks (SLURM_STEP_NUM_TASKS)"),
        ({}, {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, "srun started 2 ranks (SLURM_NTASKS, SLURM_PROCID)"),
        ({}, {"TF_CONFIG": CLUSTER}, "TensorFlow's cluster has 2 tasks (TF_CONFIG)"),
    ],
)
def test_signs_of_several(libraries: dict[str, int], environ: dict[str, str], why: str) -> None:
    found = several(Signs(libraries, environ))
    assert found is not None and found.startswith(why)


@pytest.mark.parametrize(
    ("libraries", "environ"),
    [
        ({}, {}),
        ({"torch.distributed": 1, "jax.distributed": 1}, {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}),
        ({}, {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}),  # a batch script: it runs once
        ({}, {"WORLD_SIZE": "", "PMI_SIZE": "many", "OMPI_COMM_WORLD_SIZE": "-1"}),
        ({}, {"RANK": "3", "LOCAL_RANK": "3", "MASTER_ADDR": "a"}),  # left over: they count nothing
        ({}, {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}),
    ],
)
def test_signs_of_one(libraries: dict[str, int], environ: dict[str, str]) -> None:
    assert several(Signs(libraries, environ)) is None


@given(st.dictionaries(st.sampled_from([*_ranks._SIZES, "TF_CONFIG", "SLURM_NTASKS", "SLURM_PROCID"]), st.text()))
def test_whatever_the_environment_says_it_is_an_answer(environ: dict[str, str]) -> None:
    found = several(Signs({}, environ))
    assert found is None or "ranks" in found or "tasks" in found


@pytest.fixture
def nobody_else(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*_ranks._SIZES, "SLURM_NTASKS", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    for name in ("torch.distributed", "jax._src.distributed", "mpi4py.MPI", *ranks._HOROVOD):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return monkeypatch


class NCCLBackend:
    """As cupyx.distributed's."""

    def __init__(self, n_devices: int) -> None:
        self._n_devices = n_devices


def module(**content: Any) -> ModuleType:
    return SimpleNamespace(**content)  # type: ignore[return-value]


COMM = SimpleNamespace(Get_size=lambda: 3)
LIBRARIES = {
    "torch.distributed": (module(is_initialized=lambda: True, get_world_size=lambda: 3), "torch.distributed"),
    "jax._src.distributed": (
        module(global_state=SimpleNamespace(client=object(), num_processes=3)), "jax.distributed"
    ),
    "mpi4py.MPI": (module(Is_initialized=lambda: True, Is_finalized=lambda: False, COMM_WORLD=COMM), "MPI"),
    "horovod.torch": (module(is_initialized=lambda: True, size=lambda: 3), "Horovod"),
    "cupyx.distributed._nccl_comm": (module(NCCLBackend=NCCLBackend), "cupyx.distributed"),
}  # fmt: skip
NOT_YET = {
    "torch.distributed": module(is_initialized=lambda: False),
    "torch.distributed ": module(is_available=lambda: False),  # a build without it
    "jax._src.distributed": module(global_state=SimpleNamespace(client=None, num_processes=1)),
    "mpi4py.MPI": module(Is_initialized=lambda: True, Is_finalized=lambda: True, COMM_WORLD=COMM),
    "mpi4py.MPI ": module(Is_initialized=lambda: False, Is_finalized=lambda: False),
    "horovod.torch": module(is_initialized=lambda: False),
    "cupyx.distributed._nccl_comm": module(),
    "jax._src.distributed ": module(),  # another version
    "horovod.keras": module(),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_what_loaded_libraries_say(name: str, nobody_else: pytest.MonkeyPatch) -> None:
    own = NCCLBackend(3)
    loaded, called = LIBRARIES[name]
    nobody_else.setitem(sys.modules, name, loaded)
    assert ranks.signs().libraries == {called: 3}
    assert several(ranks.signs()) == f"{called} has 3 ranks"
    assert own._n_devices == 3


@pytest.mark.parametrize("name", NOT_YET)
def test_libraries_that_are_loaded_and_not_used(name: str, nobody_else: pytest.MonkeyPatch) -> None:
    nobody_else.setitem(sys.modules, name.strip(), NOT_YET[name])
    assert ranks.signs().libraries == {}


def test_the_error_comes_out_at_once_with_the_reason(nobody_else: pytest.MonkeyPatch) -> None:
    nobody_else.setenv("WORLD_SIZE", "4")
    ran: list[str] = []

    def step() -> None:
        local = "whole"
        ran.append(local)
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(OutOfMemoryError) as caught:
        memguard.retry(5)(step)()
    assert ran == ["whole"]
    note = caught.value.__notes__[0]
    assert note.startswith(
        "memguard did not run it again: torchrun, accelerate or DeepSpeed started 4 ranks (WORLD_SIZE): the healthy "
    )
    assert "\n  fix: " in note and "memguard.retry(ranks='independent')" in note
    trace = caught.tb
    while trace.tb_next is not None:
        trace = trace.tb_next
    assert trace.tb_frame.f_locals["local"] == "whole", "nothing is cleared where nothing runs again"
    with pytest.raises(OutOfMemoryError):
        memguard.retry(2, ranks="independent")(step)()
    assert len(ran) == 1 + 3
    for attempt in memguard.retry.attempts(ranks="independent"):
        with attempt:
            if attempt.number == 1:
                step()
    with pytest.raises(OutOfMemoryError):
        memguard.retry.call(step)


def test_nothing_is_imported_to_find_out() -> None:
    code = (
        "import sys, memguard, memguard._runtime.retry.ranks as ranks\n"
        "before = set(sys.modules)\nprint(ranks.several(ranks.signs()), set(sys.modules) - before)"
    )
    environ = {"PATH": "/usr/bin", "PYTHONPATH": str(memguard.__path__[0]).rpartition("/")[0]}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True)
    assert done.stdout == "None set()\n"
