"""Detect this process's rank from the launcher's environment variables, and how many ranks share each GPU.

The variables of each launcher, as its documentation describes them:

- torchrun: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables. DeepSpeed's launcher sets
  LOCAL_SIZE instead of LOCAL_WORLD_SIZE.
- Open MPI: https://docs.open-mpi.org/en/main/launching-apps/runtime-env-vars.html (its page on "Environment variables
  set for MPI applications").
- MPICH and Intel MPI: MPI_LOCALRANKID and MPI_LOCALNRANKS, of their common launcher Hydra.
- Slurm: srun(1), "OUTPUT ENVIRONMENT VARIABLES". `2(x3),1` means three nodes with two tasks and one node with one.

Launchers nest, and the variables of the innermost launcher are used. For example mpirun starts its daemons with srun,
which passes the daemon's SLURM_LOCALID to every rank, and a Slurm script starts torchrun.
"""

# Without `from __future__ import annotations`, which would make typing compile each NamedTuple field's annotation.

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from memguard._base.text import visible as printable
from memguard.errors import PlanError

if TYPE_CHECKING:
    from memguard._budget import Budget

MOST = 1024
"""The maximum number of ranks on one node, or on one GPU: a larger number is a typing mistake."""


class UnclearRank(ValueError):
    """The environment variables do not determine the rank or how ranks share GPUs. `fix` says what to write."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


class _Launcher(NamedTuple):
    """The variables of one launcher: local rank, local size, global rank and global size."""

    title: str
    local: str
    counts: tuple[str, ...]
    rank: str
    world: str


_SRUN = _Launcher("srun", "SLURM_LOCALID", ("SLURM_STEP_TASKS_PER_NODE",), "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
_LAUNCHERS = (
    _Launcher("torchrun", "LOCAL_RANK", ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"), "RANK", "WORLD_SIZE"),
    _Launcher(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
    ),
    _Launcher("MPICH's or Intel MPI's mpirun", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",), "PMI_RANK", "PMI_SIZE"),
    _SRUN,
)
_SIZES = {
    "WORLD_SIZE": "torchrun, accelerate or DeepSpeed",
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "MPICH's or Intel MPI's mpirun",
    "MV2_COMM_WORLD_SIZE": "MVAPICH2's mpirun",
    "HOROVOD_SIZE": "horovodrun",
    "SLURM_STEP_NUM_TASKS": "srun",
}
"""The names of launchers, by the variable that gives the number of ranks. SLURM_NTASKS is missing because Slurm's batch
script, which runs once and is no rank, has it too."""


class ProcessRank(NamedTuple):
    """This process's rank: local rank and local size; global rank and global size (`world`) if known."""

    launcher: str
    local: int
    size: int
    rank: int | None = None
    world: int | None = None


class Sharing(NamedTuple):
    """The number of ranks that use each GPU visible to this process.

    `counts` has the number of ranks on each GPU, by CUDA ordinal; a single number applies to all GPUs. `own` is the
    ordinal of this rank's GPU, None if unknown. `nccl` is True if the rank is expected to create an NCCL communicator.
    """

    counts: tuple[int, ...]
    own: int | None = None
    nccl: bool = False
    note: str = ""

    @property
    def even(self) -> bool:
        """True if the number of ranks is the same on all GPUs, so that CUDA ordinals need not be known."""
        return len({*self.counts}) == 1

    def on(self, ordinal: int | None) -> int:
        """The number of ranks among which this GPU's limit is divided."""
        return self.counts[0] if self.even or ordinal is None else self.counts[ordinal]


# this process's rank


def of(environ: Mapping[str, str]) -> ProcessRank | None:
    """This process's rank; None if no launcher has set a local rank.

    Raises UnclearRank if a launcher sets a rank but no size, or an invalid value.
    """
    unknown: _Launcher | None = None
    for launcher in _LAUNCHERS:
        if not (text := environ.get(launcher.local, "").strip()):
            continue
        if (local := whole(text)) is None:
            raise UnclearRank(
                f"{launcher.local}={printable(text[:40], keep='')!r} is no local rank",
                "set it to a whole number from 0 on, or remove it",
            )
        if launcher is _SRUN and unknown is None and _is_batch_script(environ):
            return None
        count = _count(launcher, environ)
        if count is None:
            unknown = unknown or launcher
            continue
        if unknown is not None:  # a script may have copied the rank, for example to LOCAL_RANK, so both must agree
            known = whole(environ[unknown.local])
            if known != local:
                raise UnclearRank(
                    f"{unknown.local}={known}, but {launcher.local}={local}, and {unknown.counts[0]} is not set",
                    _count_fix(unknown),
                )
        if local >= count:
            raise UnclearRank(
                f"{launcher.local}={local}, but there are {count} ranks on this node by {_named(launcher, environ)}",
                "let the launcher set both, or remove them",
            )
        world = whole(environ.get(launcher.world))
        return ProcessRank(launcher.title, local, count, whole(environ.get(launcher.rank)), world)
    if unknown is not None:
        raise UnclearRank(
            f"{unknown.local}={environ[unknown.local].strip()} says that this process is a rank, but "
            f"{unknown.counts[0]}, which says how many there are on this node, is not set",
            _count_fix(unknown),
        )
    return None


def rank_of(environ: Mapping[str, str]) -> int | None:
    """This process's global rank; None if no launcher's variable gives it."""
    for launcher in _LAUNCHERS:
        if (number := whole(environ.get(launcher.rank))) is not None:
            return number
    return None


def local_numbers(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The names and values of the variables that hold the local rank, the innermost launcher first."""
    for launcher in _LAUNCHERS:
        if text := environ.get(launcher.local, "").strip():
            yield launcher.local, text


def several(environ: Mapping[str, str]) -> str | None:
    """The evidence that the job has several ranks, as part of a sentence; None without evidence."""
    for name, launcher in _SIZES.items():
        if (whole(environ.get(name)) or 0) > 1:
            return f"{launcher} started {environ[name].strip()} ranks ({name})"
    if (whole(environ.get("SLURM_NTASKS")) or 0) > 1 and (whole(environ.get(_SRUN.rank)) or 0) > 0:
        return f"srun started {environ['SLURM_NTASKS'].strip()} ranks (SLURM_NTASKS, {_SRUN.rank})"
    if (size := _cluster(environ.get("TF_CONFIG"))) > 1:
        return f"TensorFlow's cluster has {size} tasks (TF_CONFIG)"
    return None


def whole(text: str | None) -> int | None:
    """A variable's value as a whole number ≥ 0; None for anything else."""
    text = (text or "").strip()
    return int(text) if re.fullmatch("[0-9]{1,9}", text, re.ASCII) else None


def _count(launcher: _Launcher, environ: Mapping[str, str]) -> int | None:
    """The number of ranks on this node; None if the launcher sets no variable for it."""
    if launcher is _SRUN:
        return _tasks(environ)
    for name in launcher.counts:
        if text := environ.get(name, "").strip():
            if not (count := whole(text)) or count > MOST:
                raise UnclearRank(
                    f"{name}={printable(text[:40], keep='')!r} is no number of ranks on one node",
                    f"set it to a whole number from 1 to {MOST}, or remove it",
                )
            return count
    return None


def _is_batch_script(environ: Mapping[str, str]) -> bool:
    """True if this process belongs to Slurm's batch script rather than to a task of srun. Both have SLURM_LOCALID=0,
    SLURM_PROCID=0 and the job's SLURM_TASKS_PER_NODE, but the script has no variables of a job step."""
    numbers = (whole(environ.get(name)) for name in (_SRUN.local, _SRUN.rank))
    return not environ.get(_SRUN.counts[0], "").strip() and not any(numbers)


def _tasks(environ: Mapping[str, str]) -> int | None:
    """The number of tasks on this node, from srun's variables of the job step or else of the job; None if not set."""
    for name in (_SRUN.counts[0], "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        if not (text := environ.get(name, "").strip()):
            continue
        runs = list(_runs(text))
        if not runs:
            raise UnclearRank(
                f"{name}={printable(text[:40], keep='')!r} is no list of tasks on nodes, such as '2(x3),1'",
                "let srun set it, or remove it",
            )
        if len({count for count, _ in runs}) == 1:
            return runs[0][0]
        node = whole(environ.get("SLURM_NODEID"))
        for count, nodes in runs if node is not None else ():
            if node < nodes:  # type: ignore[operator] # if `node` is None, the loop runs over ()
                return count
            node -= nodes  # type: ignore[operator]
        raise UnclearRank(
            f"{name}={printable(text[:40], keep='')} has other numbers of tasks for other nodes, and SLURM_NODEID does "
            "not say which node this is",
            "let srun set both, or write how many ranks share a GPU: 'ranks: {per_gpu: 1}'",
        )
    return None


def _runs(text: str) -> Iterator[tuple[int, int]]:
    """Parse `2(x3),1`: yield (tasks per node, number of nodes) for each entry; nothing if the text is malformed."""
    found = [re.fullmatch(r"\s*([0-9]{1,4})\s*(?:\(x([0-9]{1,6})\))?\s*", one, re.ASCII) for one in text.split(",")]
    if all(found):
        yield from ((int(one[1]), int(one[2] or 1)) for one in found if one is not None)


def _named(launcher: _Launcher, environ: Mapping[str, str]) -> str:
    names = (*launcher.counts, "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    return next(name for name in names if environ.get(name, "").strip())


def _count_fix(launcher: _Launcher) -> str:
    return (
        f"export {launcher.counts[0]} with the number of ranks on this node, or write how many ranks share a GPU: "
        "'ranks: {per_gpu: 1}'"
    )


def _cluster(text: str | None) -> int:
    """The number of tasks in the cluster that TensorFlow's TF_CONFIG (`text`) describes; 0 if missing or malformed."""
    if not text:
        return 0
    import json  # imported here because it is rarely needed

    try:
        cluster = json.loads(text).get("cluster", {})
        return sum(len(tasks) for tasks in cluster.values() if isinstance(tasks, (list, dict)))
    except (ValueError, AttributeError):
        return 0


# the GPU of each rank


def sharing(rank: ProcessRank | None, visible: int, environ: Mapping[str, str]) -> Sharing:
    """How many ranks of this node use each of the `visible` GPUs. Raises UnclearRank if that is unclear.

    If several GPUs are visible, local rank r uses `cuda:{r % visible}`, the usual convention. If one GPU is visible,
    all ranks share it, unless the launcher binds each rank to its own GPU. For simulated GPUs, which no launcher
    assigns, `environ` must be empty.
    """
    if rank is None:
        return Sharing((1,), note="ranks: no launcher says that this process is a rank, so it has the budget whole")
    per_gpu = 1 if rank.size == 1 else _slurm(rank, visible, environ)
    if per_gpu is not None:
        return _said(rank, (per_gpu,), 0 if visible == 1 else None)
    if visible == 1 and environ.get("CUDA_VISIBLE_DEVICES", "").strip():
        raise UnclearRank(
            f"{rank.launcher} started {rank.size} ranks on this node, and CUDA_VISIBLE_DEVICES shows this one one GPU: "
            "whether the others have the same one cannot be seen from here",
            "write 'ranks: {per_gpu: 1}' if each rank has a GPU of its own, or "
            f"'ranks: {{per_gpu: {rank.size}}}' if all of them share this one",
        )
    counts = tuple(max(len(range(ordinal, rank.size, visible)), 1) for ordinal in range(visible))
    return _said(rank, counts, rank.local % visible)


def of_budget(budget: "Budget", visible: int, environ: Mapping[str, str], simulated: bool) -> Sharing | None:
    """How many ranks of this node use each GPU, according to the budget; None if the budget has no `ranks`. Raises
    PlanError if the number of ranks on a GPU is unclear."""
    if budget.ranks is None:
        return None
    try:
        if budget.ranks == "auto":
            return _with_nccl_said(budget, sharing(of(environ), visible, {} if simulated else environ))
        try:
            return _with_nccl_said(budget, declared(int(budget.ranks), of(environ)))
        except UnclearRank:  # the environment is unclear, but the budget declares the number
            return declared(int(budget.ranks), None)
    except UnclearRank as error:
        raise PlanError([budget.problem(("ranks",), str(error), error.fix)], budget.source or "init") from None


def _with_nccl_said(budget: "Budget", found: Sharing) -> Sharing:
    if not found.nccl or budget.device.reserve != "auto":
        return found
    from memguard._budget.parts import without_nccl

    room = "; reserve: auto has room for one NCCL communicator" if without_nccl(budget) else ""
    return found._replace(note=found.note + room)


def declared(per_gpu: int, rank: ProcessRank | None) -> Sharing:
    """The sharing that the budget declares: `per_gpu` processes on each GPU, independent of the launcher."""
    several = rank is not None and (rank.world or rank.size) > 1
    who = "each rank has its GPU for itself" if per_gpu == 1 else f"{per_gpu} ranks share each GPU"
    return Sharing((per_gpu,), None, several and per_gpu == 1, f"ranks: {who}, as per_gpu says")


def _slurm(rank: ProcessRank, visible: int, environ: Mapping[str, str]) -> int | None:
    """The number of tasks on each GPU, if srun bound tasks to GPUs and its variables give the number; else None."""
    if rank.launcher != _SRUN.title:
        return None
    if (tasks := whole(environ.get("SLURM_NTASKS_PER_GPU"))) and visible == 1:
        return min(tasks, rank.size)
    gpus = re.fullmatch(r"(?:[\w.-]+:)?([0-9]{1,4})", environ.get("SLURM_GPUS_PER_TASK", "").strip(), re.ASCII)
    on_node = whole(environ.get("SLURM_GPUS_ON_NODE"))
    if gpus is not None and int(gpus[1]) == visible and (on_node is None or visible * rank.size <= on_node):
        return 1
    return rank.size if visible == on_node == 1 else None


def _said(rank: ProcessRank, counts: tuple[int, ...], own: int | None) -> Sharing:
    found = Sharing(counts, own, (rank.world or rank.size) > 1 and max(counts) == 1)
    mine, where = found.on(own), "its GPU" if own is None else f"cuda:{own}"
    what = f"{where} is its own" if mine == 1 else f"it has 1/{mine} of {where}, which {mine} ranks share"
    note = f"ranks: {rank.launcher} started this process as local rank {rank.local} of {rank.size}: {what}"
    return found._replace(note=note)
