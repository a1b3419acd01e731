"""Collect the ledgers of all MPI ranks in one table, with mpi4py.

    print(memguard.integrations.mpi.ledgers())      # in every rank

Importing this module imports no MPI.
"""

from __future__ import annotations

from typing import Any

from memguard.errors import MemguardError
from memguard.integrations.ranks import Ledgers, own

__all__ = ["Ledgers", "ledgers"]


def ledgers(comm: Any = None) -> Ledgers:
    """The ledgers of the ranks of an mpi4py communicator, by default MPI.COMM_WORLD. A collective call.

    Every rank of the communicator must call it, and each gets the whole table. A rank without a budget, or one whose
    GPUs cannot be read, gets a row with the reason: it does not delay the other ranks. The data travel through host
    memory. Raises MemguardError without mpi4py, or once MPI is finalized.
    """
    if comm is None:
        comm = _world()
    return Ledgers.of(comm.allgather(own(comm.Get_rank())))


def _world() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py's wheel finds no MPI
        raise MemguardError(
            f"memguard.integrations.mpi needs mpi4py and an MPI ({error})", fix="pip install mpi4py"
        ) from None
    if MPI.Is_finalized():
        raise MemguardError("MPI is finalized in this process", fix="gather the ledgers before MPI.Finalize()")
    return MPI.COMM_WORLD
